"""What "auto" means on a machine."""

from __future__ import annotations

import pytest

from lockstep.loop.axes import resolve_attention


@pytest.mark.parametrize(
    ("device", "dtype", "batch_invariant", "kernel"),
    [
        ("cpu", "float32", None, "sdpa"),
        ("cpu", "float32", True, "varlen"),
        ("cpu", "bfloat16", False, "sdpa"),
        ("cuda", "bfloat16", None, "varlen"),
        ("cuda:1", "float16", False, "varlen"),
        ("cuda", "float32", None, "sdpa"),
    ],
)
def test_the_attention_kernel_of_auto(
    device: str, dtype: str, batch_invariant: bool | None, kernel: str
) -> None:
    settings = {"device": device, "dtype": dtype, "batch_invariant": batch_invariant}
    assert resolve_attention("auto", **settings) == kernel  # type: ignore[arg-type]
    assert resolve_attention("flex", **settings) == "flex"  # type: ignore[arg-type]
