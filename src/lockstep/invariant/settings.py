"""Settings under which stock GEMMs and compiled elementwise code are row-invariant."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch


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
