"""Settings under which stock GEMMs and compiled elementwise code are row-invariant."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


def configure_cuda() -> Callable[[], None]:
    """Make cuBLASLt add over K in one order for any number of rows: no split-K, no sums in low precision.

    It may be called at any time, and affects products that are launched, or captured, after it. The self-test
    checks that it works on this GPU. CUBLAS_WORKSPACE_CONFIG is not set: with it a product costs the host
    about 150 us instead of 16, in code outside of CUDA graphs.

    Returns:
        A function that restores the earlier settings.
    """
    matmul = torch.backends.cuda.matmul
    library = torch.backends.cuda.preferred_blas_library()
    before = {kind: _reduced_precision(kind) for kind in ("bf16", "fp16")}
    tf32 = matmul.allow_tf32

    def restore() -> None:
        torch.backends.cuda.preferred_blas_library(library)
        for kind, value in before.items():
            setattr(matmul, f"allow_{kind}_reduced_precision_reduction", value)
        matmul.allow_tf32 = tf32

    torch.backends.cuda.preferred_blas_library("cublaslt")
    # The second False forbids split-K, for which torch has a switch since 2.10. By default some weight shapes
    # of a 1B and an 8B Llama had other bits for few rows (at most 32, 128 or 256, by shape; one H200, torch
    # 2.11); with these settings none had.
    matmul.allow_bf16_reduced_precision_reduction = (False, False)
    matmul.allow_fp16_reduced_precision_reduction = (False, False)
    matmul.allow_tf32 = False
    return restore


@contextlib.contextmanager
def configured(on: bool) -> Iterator[None]:
    """Apply `configure_cuda` inside; with on = False nothing is changed."""
    restore = configure_cuda() if on else None
    try:
        yield
    finally:
        if restore is not None:
            restore()


def _reduced_precision(kind: str) -> tuple[bool, bool]:
    """(sums in low precision, split-K), as the setter takes them."""
    matmul, name = torch.backends.cuda.matmul, f"allow_{kind}_reduced_precision_reduction"
    return bool(getattr(matmul, name)), bool(getattr(matmul, f"{name}_split_k", True))


def cuda_settings() -> tuple[str, ...]:
    """Return the settings of this process that decide the bits of a CUDA matrix product."""
    matmul = torch.backends.cuda.matmul
    return (
        str(torch.backends.cuda.preferred_blas_library()),
        f"bf16 {matmul.allow_bf16_reduced_precision_reduction}",
        f"split-k {getattr(matmul, 'allow_bf16_reduced_precision_reduction_split_k', None)}",
        f"tf32 {matmul.allow_tf32}",
        os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""),
        os.environ.get("CUBLASLT_WORKSPACE_SIZE", ""),
    )


def inductor_options() -> dict[str, Any]:
    """Return options for torch.compile: fused code rounds where eager code rounds, and no choice is made by
    timing. Only those that this torch has.
    """
    from torch._inductor import config

    options = {
        # Without it a bfloat16 layer compiled with gradients and one without differ in two thirds of their
        # values: inductor fuses, and so rounds, in other places.
        "emulate_precision_casts": True,
        "max_autotune": False,
        "max_autotune_pointwise": False,
        "max_autotune_gemm": False,
        "coordinate_descent_tuning": False,
        "deterministic": True,
        # torch 2.13 and later; it covers the choice of a reduction's layout only, so reductions are ops of
        # our own all the same.
        "batch_invariant": True,
        "eager_numerics.division_rounding": True,
    }
    return {name: value for name, value in options.items() if _has(config, name)}


def _has(config: Any, name: str) -> bool:
    for part in name.split("."):
        if not hasattr(config, part):
            return False
        config = getattr(config, part)
    return True


# Test whether a row's result depends on the other rows, or on its position among them.


RowOp = Callable[..., Tensor | tuple[Tensor, ...]]
"""Tensors with a row each in their first dimension -> one or more such tensors."""

COUNTS = {
    "cpu": (1, 2, 3, 5, 8, 17, 64, 130),
    "cuda": (1, 2, 3, 4, 8, 16, 17, 32, 64, 100, 128, 256, 512, 1000, 1024, 2048, 4096),
}
"""Numbers of rows that are compared with all rows together."""
NUM_ROWS = {"cpu": 251, "cuda": 8192}
"""All rows together. 251 = 128 + 64 + 32 + 16 + 8 + 3: every tile, and a padded one."""


def dependence(op: RowOp, *inputs: Tensor, counts: Iterable[int] | None = None) -> str | None:
    """Describe how the result of a row depends on other rows or its position; None: no dependence was found.

    Compares bitwise with the result of all rows together: the first n rows, a row alone, the rows shifted and
    reversed, and one row in every position.

    Example:
        >>> dependence(lambda x: x + x.shape[0], torch.zeros(4, 2), counts=(2,))
        'the first 2 of 4 rows alone: 4 of 4 values differ'
    """
    num_rows = inputs[0].shape[0]
    counts = COUNTS[inputs[0].device.type] if counts is None else counts
    whole = _outputs(op(*inputs))

    def differs(index: Tensor | slice) -> str | None:
        """Result of those rows alone against those rows of the whole result."""
        part = _outputs(op(*(x[index].contiguous() for x in inputs)))
        return _difference(part, [y[index] for y in whole])

    for count in counts:
        if count < num_rows and (difference := differs(slice(0, count))):
            return f"the first {count} of {num_rows} rows alone: {difference}"
    for row in sorted({1, num_rows // 2, num_rows - 1} & set(range(num_rows))):
        if difference := differs(slice(row, row + 1)):
            return f"row {row} of {num_rows} alone: {difference}"
    places = torch.arange(num_rows, device=inputs[0].device)
    for name, order in (
        ("rows shifted by 1", places.roll(1)),
        ("rows shifted by 5", places.roll(5)),
        ("rows reversed", places.flip(0)),
        ("one row in every place", places * 0),
    ):
        if difference := differs(order):
            return f"{name}: {difference}"
    return None


def _outputs(result: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def _difference(part: Sequence[Tensor], whole: Sequence[Tensor]) -> str | None:
    for left, right in zip(part, whole, strict=True):
        if not torch.equal(left, right):
            return f"{int((left != right).sum())} of {left.numel()} values differ"
    return None
