"""Every way to compute a token's attention gives the same bits; each is also compared with the definition."""

import pytest
import torch

from lockstep.attention import KERNELS, varlen
from lockstep.attention.cached import cached_attention, store, store_and_attend

LENGTHS = [130, 1, 64, 65, 17]  # one key block and its neighbours, several blocks, one token
STARTS = [500, 7, 300, 400, 50]  # in the pool: in no order, with gaps


# The CUDA kernel has no float32; what it promises is the same.
CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))


@pytest.fixture(params=["cpu", CUDA])
def device(request):
    with torch.device(request.param):
        yield request.param


def randn(*shape, dtype=torch.float32, seed=0):
    """The same numbers on every device."""
    generator = torch.Generator("cpu").manual_seed(seed)
    values = torch.randn(shape, generator=generator, device="cpu", dtype=torch.float64)
    return values.to(torch.get_default_device(), dtype)


def documents(*, heads, kv_heads, head_dim, dtype, sinks=False):
    """Queries, keys and values of each document; and the heads' sinks, if there are some."""
    docs = [
        randn(sum(LENGTHS), n, head_dim, dtype=dtype, seed=seed).split(LENGTHS)
        for seed, n in enumerate((heads, kv_heads, kv_heads))
    ]
    return [*docs, randn(heads, dtype=dtype)] if sinks else docs


def sinks_of(docs):
    return docs[3] if len(docs) > 3 else None


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


def ends(lengths):
    return int32([0, *torch.tensor(lengths).cumsum(0).tolist()])


def packed(docs, order, *, window, capacity=512):
    """Outputs of the documents `order`, in that order in one pack."""
    q, k, v = (torch.cat([part[i] for i in order]) for part in docs[:3])
    lengths = [LENGTHS[i] for i in order]
    options = {"max_seqlen": capacity, "lengths": None, "scale": None, "window": window}
    out = KERNELS["varlen"](q, k, v, cu_seqlens=ends(lengths), sinks=sinks_of(docs), **options)
    return dict(zip(order, out.split(lengths), strict=True))


class Cache:
    """A pool of NaN, and calls of the op as an engine makes them."""

    def __init__(self, docs, *, window):
        kv_heads, head_dim = docs[1][0].shape[1:]
        self.docs, self.window, self.scale = docs, window, head_dim**-0.5
        self.pools = [
            torch.full((700, kv_heads, head_dim), float("nan"), dtype=docs[0][0].dtype) for _ in "kv"
        ]
        self.seen = [0] * len(LENGTHS)
        self.out = [[] for _ in LENGTHS]

    def step(self, take):
        """`take`: {document: how many tokens}."""
        rows = {i: slice(self.seen[i], self.seen[i] + n) for i, n in take.items()}
        q, k, v = (torch.cat([part[i][r] for i, r in rows.items()]) for part in self.docs[:3])
        for i, n in take.items():
            self.seen[i] += n
        out = store_and_attend(
            q,
            k,
            v,
            *self.pools,
            torch.cat([torch.arange(r.start, r.stop) + STARTS[i] for i, r in rows.items()]),
            ends(list(take.values())),
            int32([*(STARTS[i] for i in take), 0]),
            int32([self.seen[i] for i in take]),
            max(take.values()),
            512,
            self.scale,
            self.window,
            all(n == 1 for n in take.values()),
            sinks_of(self.docs),
        )
        for i, rows_of_i in zip(take, out.split(list(take.values())), strict=True):
            self.out[i].append(rows_of_i)

    def outputs(self):
        return {i: torch.cat(rows) for i, rows in enumerate(self.out)}


def chunked(docs, *, window):
    """Prefill in chunks that begin anywhere, then every document's last tokens one by one, all in a batch."""
    cache = Cache(docs, window=window)
    cache.step({0: 37, 3: 1, 4: 10})
    cache.step({3: 40, 0: 1, 2: 50})
    cache.step({0: 80, 3: 12, 4: 1, 2: 1})
    while left := [i for i, n in enumerate(LENGTHS) if cache.seen[i] < n]:
        cache.step(dict.fromkeys(left, 1))
    return cache.outputs()


def decoded_alone(docs, i, *, window):
    """One document from an empty cache, token by token."""
    cache = Cache(docs, window=window)
    for _ in range(LENGTHS[i]):
        cache.step({i: 1})
    return torch.cat(cache.out[i])


def assert_same(ours, theirs):
    for i, rows in ours.items():
        assert torch.equal(rows, theirs[i]), (
            f"document {i}: {(rows != theirs[i]).sum()} of {rows.numel()} differ"
        )


SHAPES = [
    {"heads": 4, "kv_heads": 4, "head_dim": 16},
    {"heads": 4, "kv_heads": 2, "head_dim": 32},
    {"heads": 4, "kv_heads": 1, "head_dim": 64},
    {"heads": 4, "kv_heads": 2, "head_dim": 64, "sinks": True},
    {"heads": 6, "kv_heads": 2, "head_dim": 16},  # groups that do not fill a tile
]


@pytest.mark.parametrize("window", [None, 20, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "-".join(map(str, s.values())))
def test_one_result_for_every_way_to_compute_it(device, shape, dtype, window):
    if (device, dtype) == ("cuda", torch.float32):
        pytest.skip("there is no float32 flash kernel")
    docs = documents(**shape, dtype=dtype)
    all_of_them = list(range(len(LENGTHS)))
    pack = packed(docs, all_of_them, window=window)
    assert_same(packed(docs, all_of_them[::-1], window=window, capacity=4096), pack)
    for i in all_of_them:
        assert_same(packed(docs, [i], window=window), pack)
    assert_same(chunked(docs, window=window), pack)
    assert_same({4: decoded_alone(docs, 4, window=window)}, pack)


def test_another_number_of_threads_changes_nothing():
    docs = documents(heads=4, kv_heads=2, head_dim=32, dtype=torch.float32)
    pack = packed(docs, [0, 2], window=None)
    before = torch.get_num_threads()
    torch.set_num_threads(3 - before if before < 3 else 1)
    assert_same(packed(docs, [0, 2], window=None), pack)
    assert_same(packed(docs, [0], window=None), pack)
    assert_same({4: decoded_alone(docs, 4, window=None)}, packed(docs, [4], window=None))
    torch.set_num_threads(before)


def test_another_block_of_keys_shows(monkeypatch):
    """What the tests above would see if the order of the sums depended on the call."""
    docs = documents(heads=4, kv_heads=2, head_dim=32, dtype=torch.float32)
    pack = packed(docs, [0, 2], window=None)
    monkeypatch.setattr(varlen, "KEYS", 8)
    with pytest.raises(AssertionError, match=r"document 0: \d+ of"):
        assert_same(packed(docs, [0], window=None), pack)


@pytest.mark.parametrize("window", [None, 20])
def test_equals_the_definition(window):
    docs = documents(heads=4, kv_heads=2, head_dim=16, dtype=torch.float64)
    out = chunked(docs, window=window)
    for i, (q, k, v) in enumerate(zip(*docs, strict=True)):
        keys, values = (x.repeat_interleave(2, 1) for x in (k, v))
        scores = torch.einsum("qnh,knh->nqk", q, keys) / 4
        distance = torch.arange(len(q))[:, None] - torch.arange(len(q))
        visible = (distance >= 0) & (distance < (window or 999))
        probs = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        torch.testing.assert_close(out[i], torch.einsum("nqk,knh->qnh", probs, values), rtol=0, atol=1e-12)


def attend(q, pools, *, used, decode=True, **changes):
    options = {"scale": 0.25, "window": None, "max_q": 1, "max_k": 16} | changes
    count = len(used)
    return cached_attention(
        q,
        *pools,
        cu_q=int32(range(count + 1)),
        starts=int32([0, 8, 0]),
        used=int32(used),
        decode=decode,
        **options,
    )


def test_heads_as_rows_is_what_the_gpu_runs(monkeypatch):
    """The layout that decode has on a GPU, on the CPU kernel: four heads of a kv head are four rows."""
    from lockstep.attention import cached

    q, *pools = randn(2, 8, 16), randn(16, 2, 16, seed=1), randn(16, 2, 16, seed=2)
    expected = attend(q, pools, used=[5, 8])
    monkeypatch.setattr(cached, "_rows_keep_blocks", lambda device: True)
    torch.testing.assert_close(attend(q, pools, used=[5, 8]), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(
        attend(q, pools, used=[5, 8], window=3), attend(q, pools, used=[5, 8], window=3, decode=False)
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("window", [None, 20])
def test_decode_in_a_cuda_graph(window):
    with torch.device("cuda"):
        docs = documents(heads=4, kv_heads=2, head_dim=64, dtype=torch.bfloat16)
        pools = [torch.zeros(700, 2, 64, dtype=torch.bfloat16) for _ in "kv"]
        q, k, v = (part[0][:2].clone() for part in docs)
        slots, used = torch.tensor([500, 7]), int32([1, 1])
        arguments = (*pools, slots, int32([0, 1, 2]), int32([500, 7, 0]), used)
        options = (1, 512, 0.125, window, True)
        store_and_attend(q, k, v, *arguments, *options)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = store_and_attend(q, k, v, *arguments, *options)
        expected = packed(docs, [0, 4], window=window)
        for t in range(LENGTHS[4]):
            for static, part in zip((q, k, v), docs, strict=True):
                static.copy_(torch.stack([part[0][t], part[4][t]]))
            slots.copy_(torch.tensor([500 + t, 7 + t]))
            used.fill_(t + 1)
            graph.replay()
            assert torch.equal(out, torch.stack([expected[0][t], expected[4][t]])), t


def test_a_row_without_keys_gets_zeros(device):
    q = torch.ones(2, 4, 16, dtype=torch.bfloat16)
    out = attend(q, [torch.ones(16, 2, 16, dtype=torch.bfloat16)] * 2, used=[0, 3])
    assert out[0].eq(0).all() and out[1].eq(1).all()


def test_store_writes_the_rows_of_the_slots(device):
    pools = [torch.zeros(4, 1, 2), torch.zeros(4, 1, 2)]
    store(*pools, torch.ones(2, 1, 2), torch.full((2, 1, 2), 2.0), torch.tensor([3, 1]))
    assert pools[0][:, 0, 0].tolist() == [0, 1, 0, 1] and pools[1][:, 0, 0].tolist() == [0, 2, 0, 2]


def test_a_document_over_max_k_is_an_error():
    with pytest.raises(ValueError, match="document of 9 tokens exceeds max_seqlen 8"):
        attend(torch.ones(2, 4, 16), [torch.ones(16, 2, 16)] * 2, used=[9, 1], max_k=8)


@pytest.mark.slow
def test_inductor_writes_into_the_pool_itself(device):
    """Compiled, the op sees the pool and no copy of it."""
    from torch._inductor.utils import run_and_get_code

    pools = [torch.zeros(64, 2, 16, dtype=torch.bfloat16) for _ in "kv"]
    q, k, v = (torch.ones(2, n, 16, dtype=torch.bfloat16) for n in (4, 2, 2))

    @torch.compile(fullgraph=True)
    def layer(q, k, v, *places):
        return store_and_attend(q * 2, k + 1, v + 1, *places, 1, 64, 0.25, None, True) + 1

    arguments = (torch.tensor([5, 40]), int32([0, 1, 2]), int32([5, 40, 0]), int32([1, 1]))
    out, code = run_and_get_code(layer, q, k, v, *pools, *arguments)
    assert out.eq(3).all()
    assert pools[0][[5, 40]].eq(2).all() and pools[0].sum() == 2 * 2 * 2 * 16
    assert "copy_" not in code[0] and f"empty_strided_{device}((64" not in code[0]
