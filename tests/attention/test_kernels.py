import pytest
import torch
from raising import raises

from lockstep import attention
from lockstep.attention import adapters
from lockstep.errors import ConfigError, ModelError, TrainError
from lockstep.ops.masks import dense_mask, document_ids

LENGTHS = (5, 1, 7, 3)
CU = torch.tensor([0, 5, 6, 13, 16, 16], dtype=torch.int32)


def inputs(heads=4, kv_heads=2, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = [(16, heads, 8), (16, kv_heads, 8), (16, kv_heads, 8)]
    return [
        torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes
    ]


def slow(q, k, v, *, window, scale, **more):
    """One query, one head at a time, straight from the definition."""
    sinks, softcap = more.get("sinks"), more.get("softcap")
    rows = []
    for end, length in zip((5, 6, 13, 16), LENGTHS, strict=True):
        for t in range(end - length, end):
            first = end - length if window is None else max(end - length, t - window + 1)
            heads = []
            for n in range(q.shape[1]):
                kv = n // (q.shape[1] // k.shape[1])
                scores = k[first : t + 1, kv] @ q[t, n] * scale
                scores = scores if softcap is None else softcap * (scores / softcap).tanh()
                powers = scores.exp()
                total = powers.sum() if sinks is None else powers.sum() + sinks[n].exp()
                heads.append(powers / total @ v[first : t + 1, kv])
            rows.append(torch.stack(heads))
    return torch.stack(rows)


def run(kernel, q, k, v, **changes):
    options = {"cu_seqlens": CU, "max_seqlen": 7, "lengths": LENGTHS, "scale": None, "window": None} | changes
    return attention.KERNELS[kernel](q, k, v, **options)


@pytest.mark.parametrize("lengths", [LENGTHS, None])
@pytest.mark.parametrize("window", [None, 1, 3, 50])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("kernel", ["sdpa", "varlen"])
def test_equals_the_definition(kernel, kv_heads, window, lengths):
    q, k, v = inputs(kv_heads=kv_heads)
    out = run(kernel, q, k, v, lengths=lengths, scale=0.3, window=window)
    reference = slow(q, k, v, window=window, scale=0.3)
    torch.testing.assert_close(out, reference, rtol=0, atol=1e-12)
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ours = torch.autograd.grad((out * direction).sum(), (q, k, v))
    theirs = torch.autograd.grad((reference * direction).sum(), (q, k, v))
    for mine, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("lengths", [LENGTHS, None])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(("kernel", "capped"), [("sdpa", False), ("varlen", False), ("sdpa", True)])
def test_sinks_and_caps_equal_the_definition(kernel, capped, window, lengths):
    q, k, v = inputs()
    sinks = torch.tensor([-1.0, 0.0, 2.0, 5.0], dtype=torch.float64, requires_grad=True)
    more = {"sinks": sinks, **({"softcap": 0.7} if capped else {})}
    out = run(kernel, q, k, v, lengths=lengths, scale=0.3, window=window, **more)
    reference = slow(q, k, v, window=window, scale=0.3, **more)
    torch.testing.assert_close(out, reference, rtol=0, atol=1e-12)
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ours = torch.autograd.grad((out * direction).sum(), (q, k, v, sinks))
    theirs = torch.autograd.grad((reference * direction).sum(), (q, k, v, sinks))
    for mine, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-12)


def test_rows_of_no_document_do_not_reach_the_gradient_of_sinks():
    q, k, v = inputs()
    sinks = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    torch.use_deterministic_algorithms(True)  # uninitialised memory is NaN
    out = run("varlen", q, k, v, cu_seqlens=CU[:4], lengths=None, sinks=sinks)
    torch.use_deterministic_algorithms(False)
    assert out[13:].isnan().all()
    (grad,) = torch.autograd.grad(out[:13].sum(), sinks)
    (expected,) = torch.autograd.grad(
        slow(q, k, v, window=None, scale=8**-0.5, sinks=sinks)[:13].sum(), sinks
    )
    torch.testing.assert_close(grad, expected)


def test_sinks_of_a_compiler_are_those_of_the_kernel():
    from lockstep.attention.sinks import sink_attention

    attention.enable_cpu_reference()
    q, k, v = inputs(dtype=torch.float32)
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    arguments = (q, k, v, torch.zeros(4, requires_grad=True), CU, CU, 7, 7, None, 3)
    torch.library.opcheck(sink_attention, arguments, test_utils=tests)


def test_sinks_have_the_strides_that_a_compiler_is_told(monkeypatch):
    """CUDA's kernels lay their results out as q is, which after GPT-OSS's rotation is not contiguous."""
    from lockstep.attention import sinks

    q, k, v = torch.zeros(4, 7, 8).transpose(0, 1), torch.zeros(7, 2, 8), torch.zeros(7, 2, 8)
    lse = torch.zeros(4, 7)
    like = torch.empty_like
    monkeypatch.setattr(sinks, "_flash", lambda q, *_, **__: (like(q), lse.clone()))
    monkeypatch.setattr(sinks, "_flash_backward", lambda _, q, k, v, *__, **___: (like(q), like(k), like(v)))
    cu = torch.tensor([0, 7], dtype=torch.int32)
    out, total = sinks.sink_attention(q, k, v, torch.zeros(4), cu, cu, 7, 7, None, None)
    found = sinks._sink_backward(out, q, k, v, torch.zeros(4), cu, cu, out, total, 7, 7, None, None)
    assert all(x.is_contiguous() for x in (out, total, *found))


def test_a_kernel_that_lacks_caps_is_refused():
    forward = adapters._adapter("varlen")
    q, k, v = (x.transpose(0, 1)[None] for x in inputs())
    with raises(ModelError, "unsupported-combination: attention kernel 'varlen', softcap"):
        forward(None, q, k, v, None, cu_seqlens=CU, max_seqlen=7, softcap=5.0)
    with raises(ModelError, "unsupported-combination: attention kernel 'ring', sinks"):
        forward(None, q, k, v, None, ring=object(), s_aux=torch.zeros(4))


@pytest.mark.parametrize("more", [{}, {"sinks": torch.tensor([-1.0, 0.0, 2.0, 5.0])}, {"softcap": 0.7}])
@pytest.mark.parametrize("window", [None, 3])
def test_flex_forward_equals_the_definition(window, more):
    q, k, v = (x.detach().float() for x in inputs())
    out = run("flex", q, k, v, window=window, **more)
    torch.testing.assert_close(out, slow(q, k, v, window=window, scale=8**-0.5, **more), rtol=0, atol=1e-6)


def test_flex_refuses_gradients_on_a_cpu():
    q, k, v = inputs(dtype=torch.float32)
    with raises(TrainError, "missing-device: train.attention"):
        run("flex", q, k, v)


def test_default_scale_is_the_head_dim():
    q, k, v = inputs()
    for kernel in ("sdpa", "varlen"):
        torch.testing.assert_close(run(kernel, q, k, v), slow(q, k, v, window=None, scale=8**-0.5))


def test_bfloat16_error_is_one_rounding():
    """The CPU kernels compute in float32 and round once: half an ulp (2 ** -9 relative), no more."""
    q, k, v = inputs(dtype=torch.bfloat16)
    exact = slow(*(x.double() for x in (q, k, v)), window=None, scale=8**-0.5)
    for kernel in ("sdpa", "varlen"):
        out = run(kernel, q, k, v)
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.double(), exact, rtol=2**-8, atol=1e-6)


def test_cpu_reference_leaves_uncovered_rows_and_registers_once():
    attention.enable_cpu_reference()
    attention.enable_cpu_reference()
    assert torch._C._dispatch_has_kernel_for_dispatch_key("aten::_flash_attention_forward", "CPU")
    q, k, v = inputs()
    with pytest.raises(ValueError, match="document of 7 tokens exceeds max_seqlen 6"):
        attention.KERNELS["varlen"](
            q, k, v, cu_seqlens=CU, max_seqlen=6, lengths=None, scale=None, window=None
        )


def test_reference_never_replaces_a_kernel(monkeypatch):
    from lockstep.attention import varlen

    attention.enable_cpu_reference()
    monkeypatch.setattr(varlen, "_library", None)  # as if these kernels were torch's own
    with raises(ModelError, "unsupported-version: train.attention"):
        varlen.enable_cpu_reference()


def test_document_ids_and_mask():
    ids = document_ids(torch.tensor([0, 2, 2, 4, 4], dtype=torch.int32), 4)
    assert ids.tolist() == [0, 0, 2, 2]
    expected = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    assert dense_mask(ids[None], window=None).int().tolist() == [[expected]]
    assert dense_mask(ids[None], window=1).int()[0, 0].tolist() == torch.eye(4).int().tolist()


def test_names():
    assert attention.implementation("varlen") == "lockstep_varlen"
    assert attention.implementation("hf:flash_attention_2") == "flash_attention_2"
    # transformers refuses names with "sdpa" for models that its own cannot compute.
    assert attention.implementation("sdpa") == "lockstep_sdp-a"
    assert attention.kernel_of("lockstep_sdp-a") == "sdpa" and attention.kernel_of("sdpa") == "hf:sdpa"
    assert attention.label("varlen", torch.device("cpu")) == "varlen (cpu reference)"
    assert attention.label("varlen", torch.device("cuda")) == "varlen"
    assert attention.label("sdpa", torch.device("cpu"), ring=2) == "ring of 2 (cpu reference)"
    assert attention.label("varlen", torch.device("cuda"), ring=4) == "ring of 4 varlen"
    with raises(ConfigError, "unknown-name: varlem"):
        attention.implementation("varlem")
