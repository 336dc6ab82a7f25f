"""The decode kernel: where it applies, and that it is used only while its bits are flash attention's."""

import pytest
import torch

from lockstep.attention import cached
from lockstep.attention.cached import decode_kernel

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SIZES = [
    (64, 32, 8, torch.bfloat16),
    (128, 32, 8, torch.bfloat16),
    (128, 8, 8, torch.bfloat16),
    (64, 9, 3, torch.float16),
]


def kernel_for(head_dim, heads, kv_heads, dtype, device="cuda", **changes):
    q, cache = (torch.zeros(2, n, head_dim, dtype=dtype, device=device) for n in (heads, kv_heads))
    scale = head_dim**-0.5
    options = {"scale": scale, "window": None, "reference": cached._FlashDecode(scale)} | changes
    return decode_kernel(q, cache, **options)


@GPU
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_equal_to_flash_attention_to_the_bit(sizes):
    """The kernel is returned only where two million values and more are equal."""
    assert kernel_for(*sizes) is not None


@GPU
@pytest.mark.parametrize(
    ("ours", "other"),
    [
        ("__fmaf_rn(sum, rescale, p[0])", "__fadd_rn(__fmul_rn(sum, rescale), p[0])"),
        (
            "__fsub_rn(__fmul_rn(score[tile][j], SCALE_LOG2), shift)",
            "__fmaf_rn(score[tile][j], SCALE_LOG2, -shift)",
        ),
        ("__shfl_xor_sync(~0u, sum, 2)", "__shfl_xor_sync(~0u, sum, 1)"),
    ],
    ids=["sum without fma", "fused exponent", "part of the sum twice"],
)
def test_a_kernel_that_rounds_otherwise_is_not_used(ours, other, monkeypatch, caplog):
    source = cached._source()
    assert source.count(ours) == 1
    monkeypatch.setattr(cached, "_source", lambda: source.replace(ours, other))
    cached._checked.cache_clear()
    try:
        assert kernel_for(*SIZES[0]) is None
        assert "differs from the flash attention of torch" in caplog.text
    finally:
        cached._checked.cache_clear()


@pytest.mark.parametrize(
    ("sizes", "changes"),
    [
        ((64, 32, 8, torch.bfloat16, "cpu"), {}),
        pytest.param((64, 32, 8, torch.bfloat16), {"window": 20}, marks=GPU),
        pytest.param((96, 32, 8, torch.bfloat16), {}, marks=GPU),
        pytest.param((64, 36, 4, torch.bfloat16), {}, marks=GPU),
    ],
    ids=["cpu", "window", "other dimensions", "nine rows"],
)
def test_where_it_does_not_apply(sizes, changes):
    assert kernel_for(*sizes, **changes) is None


@pytest.mark.parametrize(
    "error",
    [
        OSError("CUDA_HOME environment variable is not set"),
        RuntimeError("NVRTC compilation failed"),
        AttributeError("module 'torch.cuda' has no attribute '_compile_kernel'"),
    ],
)
def test_a_machine_that_cannot_compile_it_goes_on_with_flash_attention(error, monkeypatch, caplog):
    def refuse(*arguments):
        raise error

    monkeypatch.setattr(cached, "_compiled", refuse)
    cached._checked.cache_clear()
    try:
        kernel = cached._checked(torch.device("cpu"), torch.bfloat16, (8, 2, 64), 0.125, lambda *_: None)
    finally:
        cached._checked.cache_clear()
    assert kernel is None and str(error) in caplog.text and "same bits" in caplog.text
