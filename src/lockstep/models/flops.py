"""FLOPs of training a transformer, and the peaks of GPUs: the two sides of model FLOPs utilisation (MFU)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

PEAKS: Mapping[str, float] = {
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
}
"""Part of a GPU's name -> FLOP/s of dense bfloat16, as its maker says. The longest name that fits counts."""


def training_flops(config: Any, *, parameters: int, lengths: Sequence[int]) -> float:
    """FLOPs of forward and backward: 6 N sum(L) + 3 A, with A = 2 L^2 heads head_dim layers summed over
    documents (causal attention). Padding and what is computed twice do not count.

    Args:
        config: of the text model (transformers).
        parameters: that take part in a matmul: all where the embeddings are tied, else without the input's.
    """
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_token_squared: float = 2.0 * config.num_attention_heads * head_dim * config.num_hidden_layers
    return 6.0 * parameters * sum(lengths) + 3.0 * per_token_squared * sum(n * n for n in lengths)


def peak_flops(device_name: str) -> float | None:
    """FLOP/s of dense bfloat16 of a GPU; None: not known.

    Example:
        >>> peak_flops("NVIDIA H200")
        989000000000000.0
    """
    matches = [name for name in PEAKS if name in device_name]
    return PEAKS[max(matches, key=len)] if matches else None


def utilisation(flops: float, *, seconds: float, peak: float) -> float:
    """MFU: the share of `peak`, in FLOP/s of all GPUs together, that `flops` done in `seconds` are."""
    return flops / seconds / peak
