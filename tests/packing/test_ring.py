"""Who owns what against constants worked by hand, and against a mask made by brute force."""

from __future__ import annotations

import importlib
import itertools
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lockstep.packing import RingShard, ring_shard
from lockstep.schema.batch import RingStep


def shards(lengths: list[int], size: int, num_documents: int | None = None) -> list[RingShard]:
    return [ring_shard(lengths, rank=r, size=size, num_documents=num_documents) for r in range(size)]


def tables(step: RingStep) -> tuple[list[int], list[int], int, int]:
    return step.cu_q.tolist(), step.cu_k.tolist(), step.max_q, step.max_k


def computed(shards: list[RingShard]) -> Tensor:
    """[T, T] how often each (query slot, key slot) is computed, over all ranks and steps."""
    slots = sum(shards[0].sizes)
    counts = torch.zeros(slots, slots, dtype=torch.int64)
    for shard in shards:
        sources = [shard, *(shards[(shard.rank - i) % shard.size] for i in range(1, shard.size))]
        steps = (shard.own, *shard.others)
        for source, step in zip(sources, steps, strict=False):
            segments = zip(
                itertools.pairwise(step.cu_q.tolist()), itertools.pairwise(step.cu_k.tolist()), strict=True
            )
            for (first_q, last_q), (first_k, last_k) in segments:
                q, k = shard.index[first_q:last_q], source.index[first_k:last_k]
                assert len(q) <= step.max_q and len(k) <= step.max_k
                visible = torch.ones(len(q), len(k), dtype=torch.int64)
                if step is shard.own:
                    visible = visible.tril(len(k) - len(q))  # the last query is aligned with the last key
                counts[q[:, None], k[None, :]] += visible
    return counts


def causal(lengths: list[int]) -> Tensor:
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return ((document[:, None] == document[None, :]).long()).tril()


def owners(shards: list[RingShard], lengths: list[int]) -> list[set[int]]:
    """Of each document the ranks that have some of it."""
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    of_rank = [set(document[shard.index].tolist()) for shard in shards]
    return [{r for r, found in enumerate(of_rank) if d in found} for d in range(len(lengths))]


def test_only_the_longest_is_divided_by_hand():
    """2 ranks, 128 tokens, n^2 sums to 5696: a rank may have 66 rows and a cost of 2937.

    64 is too dear for one rank. Divided, it gives each 32 rows and 2048. Then, longest first: 16 to rank 0
    (48 rows, 2304), 16 to rank 1, 12 to 0 (60, 2448), 12 to 1, 4 to 0 (64, 2464), 4 to 1.
    """
    lengths = [16, 4, 12, 64, 12, 4, 16]
    zero, one = shards(lengths, 2)
    assert owners([zero, one], lengths) == [{0}, {0}, {0}, {0, 1}, {1}, {1}, {1}]
    assert zero.lengths == (32, 16, 4, 12) and one.lengths == (32, 12, 4, 16)
    assert zero.index.tolist() == [*range(32, 48), *range(80, 96), *range(32)]
    assert one.index.tolist() == [*range(48, 80), *range(96, 128)]
    assert zero.sizes == one.sizes == (64, 64) and zero.divided == one.divided == (32, 32)
    assert tables(zero.own) == ([0, 32, 48, 52, 64],) * 2 + (32, 32)
    assert [tables(step) for step in zero.others] == [([0, 16, 32], [0, 0, 32], 16, 32)]


def test_cost_decides_where_rows_are_even():
    """80 = 40 + 40 rows, but 6400 against 3200 where 4950 is the most: the 80 is divided, no other."""
    assert owners(shards([80, 40, 40], 2), [80, 40, 40]) == [{0, 1}, {0}, {1}]


def test_whole_documents_go_by_their_larger_share_of_rows_and_cost():
    """Means of 169 rows and 9986. After 100 | 60 60 the 50 would find fewer rows at rank 0, but at 12500; so
    it goes to 1: 170 rows, 9700. A 4 there would make 174 / 169 = 1.030; all of them leave rank 0 at 168 rows
    and 10272 / 9986 = 1.029.
    """
    lengths = [100, 60, 60, 50] + [4] * 17
    assert owners(shards(lengths, 2), lengths) == [{0}, {1}, {1}, {1}] + [{0}] * 17


@pytest.mark.parametrize(("lengths", "size"), [([8192] * 16, 4), ([1000] * 6, 3), ([300, 500] * 8, 8)])
def test_what_is_even_whole_is_not_divided(lengths: list[int], size: int):
    for shard in shards(lengths, size):
        assert shard.others == () and shard.divided == (0,) * size
        assert shard.sizes == (sum(lengths) // size,) * size
        assert sorted(shard.lengths) == sorted(lengths)[:: len(lengths) // len(shard.lengths)]


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_fewer_documents_than_ranks_are_divided(size: int):
    for lengths in ([131_072], [8192] * (size - 1), [100, 9000]):
        found = owners(shards(lengths, size), lengths)
        assert all(ranks == set(range(size)) for n, ranks in zip(lengths, found, strict=True) if n > 100)


def test_one_long_among_many_short_is_divided_alone():
    lengths = [700] * 60 + [40_000]
    found = owners(shards(lengths, 4), lengths)
    assert found[-1] == {0, 1, 2, 3} and all(len(ranks) == 1 for ranks in found[:-1])


@settings(max_examples=200)
@given(
    st.lists(st.sampled_from([1, 7, 16, 30, 90, 100, 400]) | st.integers(1, 500), min_size=1, max_size=60),
    st.integers(2, 5),
    st.sampled_from([0, 1, 300]),
)
def test_even_or_all_divided(lengths: list[int], size: int, pad: int):
    found = shards(lengths + [pad] * (pad > 0), size, num_documents=len(lengths))
    real = sum(lengths)
    assert sorted(torch.cat([shard.index for shard in found]).tolist()) == list(range(real + pad))
    for shard in found:
        assert (shard.sizes, shard.divided) == (found[0].sizes, found[0].divided)
        assert len(shard.index) == shard.sizes[shard.rank]
        assert len(shard.others) == (size - 1 if any(shard.divided) else 0)
    short = max(2 * size, real / size / 32)
    ranks = owners(found, lengths + [pad] * (pad > 0))[: len(lengths)]
    whole = [(n, min(of)) for n, of in zip(lengths, ranks, strict=True) if len(of) == 1]
    divided = [n for n, of in zip(lengths, ranks, strict=True) if len(of) > 1]
    assert all(len(of) in (1, size) for of in ranks) and all(n >= short for n in divided)
    rows = [int((shard.index < real).sum()) for shard in found]
    if all(n < short for n, _ in whole):
        assert max(rows) - min(rows) <= max([1, *(n for n, _ in whole)]) + len(divided)
        return
    assert min(divided, default=real) >= max(n for n, _ in whole)
    cost = [
        sum(n * n for n, of in whole if of == r) + sum(n * n for n in divided) / size for r in range(size)
    ]
    assert max(rows) <= 33 / 32 * real / size
    assert max(cost) <= 33 / 32 * sum(n * n for n in lengths) / size * (1 + 1e-12)


def test_two_ranks_by_hand():
    """[10 tokens, 3 tokens, 5 tokens]: chunks of 3 3 2 2; 3 < 2R stays whole; chunks of 2 1 1 1.

    Rank 0 owns chunks 0 and 3: slots 0-2 and 8-9, then 13-14 and 17. Rank 1 owns 1 and 2: 3-5 and 6-7, then
    15 and 16. Rank 1 has fewer rows (7 to 8), so the short document, slots 10-12, is its.
    """
    zero, one = shards([10, 3, 5], 2)
    assert zero.index.tolist() == [0, 1, 2, 8, 9, 13, 14, 17]
    assert one.index.tolist() == [3, 4, 5, 6, 7, 15, 16, 10, 11, 12]
    assert (zero.lengths, one.lengths) == ((5, 3), (5, 2, 3))
    assert zero.sizes == one.sizes == (8, 10) and zero.divided == one.divided == (8, 7)
    assert tables(zero.own) == ([0, 5, 8], [0, 5, 8], 5, 5)
    assert tables(one.own) == ([0, 5, 7, 10], [0, 5, 7, 10], 5, 5)
    # Rank 0 against rank 1's keys: its early chunk (3, then 2) sees none, its late one (2, then 1) sees all.
    assert [tables(step) for step in zero.others] == [([0, 3, 5, 7, 8], [0, 0, 5, 5, 7], 3, 5)]
    # Rank 1 against rank 0's keys: all its queries see the early chunk, none the late one.
    assert [tables(step) for step in one.others] == [([0, 5, 5, 7, 7], [0, 3, 5, 7, 8], 5, 3)]


def test_three_ranks_by_hand():
    """13 tokens in 6 chunks of 3 2 2 2 2 2; rank 1 meets rank 0 in step 1, rank 2 in step 2."""
    found = shards([13], 3)
    assert [shard.index.tolist() for shard in found] == [
        [0, 1, 2, 11, 12],
        [3, 4, 9, 10],
        [5, 6, 7, 8],
    ]
    assert found[1].sizes == found[1].divided == (5, 4, 4)
    assert tables(found[1].others[0]) == ([0, 4, 4], [0, 3, 5], 4, 3)
    assert tables(found[1].others[1]) == ([0, 2, 4], [0, 0, 4], 2, 4)


def test_divided_documents_lie_in_pack_order():
    """Chunks of 2 2 2 2, then of 3 3 3 3."""
    assert shards([8, 12], 2)[1].index.tolist() == [2, 3, 4, 5, *range(11, 17)]


def test_a_ring_of_one_is_the_pack():
    (only,) = shards([5, 1, 7], 1)
    assert only.index.tolist() == list(range(13)) and only.lengths == (5, 1, 7) and only.others == ()
    assert tables(only.own) == ([0, 5, 6, 13], [0, 5, 6, 13], 7, 7)


def test_ranks_without_a_token():
    found = shards([3], 4)
    assert found[0].sizes == (3, 0, 0, 0) and found[0].divided == (0, 0, 0, 0)
    assert all(shard.others == () for shard in found)
    assert found[2].index.tolist() == [] and tables(found[2].own) == ([0], [0], 0, 0)


def test_documents_that_are_short_for_their_pack_stay_whole(monkeypatch: pytest.MonkeyPatch):
    """A share is 4096 rows, so documents below 128 tokens are whole; they fill up what the others leave. So
    they do where nothing is even enough, when all others are divided."""
    assert shards([7600] + [129] * 4, 2)[0].lengths == (3800, 129, 129)
    monkeypatch.setattr(importlib.import_module("lockstep.packing.balance"), "_SLACK", Fraction(-1))
    found = shards([7600] + [74] * 8, 2)
    assert found[0].lengths == (3800, 74, 74, 74, 74) and found[0].sizes == (4096, 4096)
    assert shards([7600] + [129] * 4, 2)[0].lengths == (3800, 65, 65, 65, 65)
    assert shards([8192] * 16, 4)[3].lengths == (2048,) * 16


def test_pads_fill_up_and_cost_nothing():
    """1,000 pad slots: in pieces of at most 128 to where rows are missing, seen by nobody else."""
    found = shards([40, 6, 512, 488], 2, num_documents=2)
    assert max(found[0].sizes) - min(found[0].sizes) <= 128 and sum(found[0].sizes) == 1046
    assert [shard.lengths[:1] for shard in found] == [(20,), (20,)]
    assert all(length <= 128 for shard in found for length in shard.lengths)
    assert sorted(torch.cat([shard.index for shard in found]).tolist()) == list(range(1046))
    real = computed(found)[:46, :46]
    assert torch.equal(real, causal([40, 6]))


@settings(max_examples=150)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(1, 5))
def test_every_visible_pair_is_computed_once(lengths: list[int], size: int):
    found = shards(lengths, size)
    assert torch.equal(computed(found), causal(lengths))
    assert sorted(torch.cat([shard.index for shard in found]).tolist()) == list(range(sum(lengths)))
    for shard in found:
        assert len(shard.index) == shard.num_rows == sum(shard.lengths)
        assert shard.sizes == found[0].sizes and shard.divided == found[0].divided
        assert len(shard.others) == (size - 1 if any(shard.divided) else 0)
        assert all(rows >= 2 for rows in shard.divided) or not any(shard.divided)


@settings(max_examples=100)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(2, 5))
def test_gathered_segments_are_what_their_queries_see(lengths: list[int], size: int):
    """Segment by segment: the keys are the document's slots from its first to the last query's."""
    found = [ring_shard(lengths, rank=r, size=size, gather=True) for r in range(size)]
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    if not any(found[0].divided):
        assert all(shard.keys is None for shard in found)
        return
    most, gathered = max(found[0].divided), []
    for shard in found:
        rows = shard.index[: shard.divided[shard.rank]].tolist()
        gathered += rows + [-1] * (most - len(rows))
    for shard in found:
        keys, index = shard.keys, shard.index.tolist()
        source = torch.tensor(gathered + index[shard.divided[shard.rank] :])
        slots = source[keys.index].tolist()
        cu_q, cu_k = keys.step.cu_q.tolist(), keys.step.cu_k.tolist()
        assert cu_q[-1] == len(index) and cu_k[-1] == len(slots)
        for (a, b), (c, d) in zip(itertools.pairwise(cu_q), itertools.pairwise(cu_k), strict=True):
            start = max(s for s in starts if s <= index[a])
            assert index[a:b] == [*range(index[a], index[b - 1] + 1)]
            assert slots[c:d] == [*range(start, index[b - 1] + 1)]
        late = keys.index[keys.late].tolist()
        assert len(set(late)) == len(late) and {*keys.index[keys.early].tolist()} <= {*late}
        assert sorted([*keys.late.tolist(), *keys.early.tolist()]) == [*range(len(slots))]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_step_costs_every_rank_the_same(size: int):
    """Chunks of c tokens: 2 c * c pairs in each step after the first, c * c + c * (c + 1) in the first."""
    c = 5
    found = shards([2 * size * c, 4 * size * c], size)
    for shard in found:
        for step in shard.others:
            q, k = step.cu_q.diff(), step.cu_k.diff()
            assert int((q * k).sum()) == 2 * c * c + 2 * (2 * c) ** 2
    assert len({shard.lengths for shard in found}) == 1


def test_moved_once():
    shard = ring_shard([10, 3, 5], rank=1, size=2)
    moved = shard.to("meta")
    assert moved.index.is_meta and moved.own.cu_q.is_meta and moved.others[0].cu_k.shape == (5,)
    assert shard.to("cpu") is shard


def test_what_is_refused():
    with pytest.raises(ValueError, match="rank 2 is not in a ring of 2"):
        ring_shard([4], rank=2, size=2)
    with pytest.raises(ValueError, match="document 1 has 0 tokens"):
        ring_shard([4, 0], rank=0, size=2)
