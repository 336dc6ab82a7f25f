"""Compare a cell's outputs with the reference cell's: logprobs in nats, gradients relative to their norm.

Both sides are the outputs.safetensors that `lockstep replay --keep-outputs` writes: "logprobs/INDEX" [trained
tokens] float32 per input, "gradients/NAME" the sampled entries of a parameter's gradient, summed over inputs.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from lockstep.errors import RecordingError
from lockstep.observe.files import open_plain

LOGPROBS, GRADIENTS = "logprobs/", "gradients/"


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """A cell against its reference cell."""

    inputs: int
    """Inputs that both have."""
    left_out: int
    """Inputs that only one of them has: they failed in the other."""
    tokens: int
    """Trained tokens compared."""
    logprob_max: float | None
    """Largest |difference|, nats; None: there is nothing to compare. Infinite: a NaN or an infinity stands
    where the other cell has a number."""
    logprob_mean: float | None
    logprob_rms: float | None
    worst_input: int | None
    """The input that has the largest difference."""
    gradient_relative_error: float | None
    """||g - r|| / ||r||, Frobenius, over all sampled entries of all parameters; None: not compared."""
    gradient_cosine: float | None
    gradient_entries: int
    worst_parameter: str | None
    """The parameter with the largest relative error of its own."""
    gradient_note: str = ""
    """Why gradients were not compared; empty when they were."""


def compare_outputs(cell: Path, reference: Path, *, gradients_missing: str = "") -> Comparison:
    """Compare two outputs.safetensors; one tensor of each is in memory at a time.

    Args:
        gradients_missing: why the gradients cannot be compared, although both files may have some: they are
            sums over different inputs, for example.

    Raises:
        RecordingError: a file is missing or damaged, or the two do not hold outputs of the same inputs.
    """
    with _open(cell) as a, _open(reference) as b:
        names_a, names_b = set(a.keys()), set(b.keys())
        logprobs = _compare_logprobs(a, b, _under(names_a, LOGPROBS), _under(names_b, LOGPROBS), cell=cell)
        gradients = _compare_gradients(
            a, b, _under(names_a, GRADIENTS), _under(names_b, GRADIENTS), missing=gradients_missing
        )
    return Comparison(**logprobs, **gradients)


def _compare_logprobs(
    a: Any, b: Any, names_a: Collection[str], names_b: Collection[str], *, cell: Path
) -> dict[str, Any]:
    both = sorted(set(names_a) & set(names_b), key=_index)
    largest, worst, total, squares, tokens = -1.0, None, 0.0, 0.0, 0
    for name in both:
        x, y = a.get_tensor(name), b.get_tensor(name)
        if x.shape != y.shape:
            raise RecordingError(
                f"wrong-shape: {cell}: {name} has shape {tuple(x.shape)}, but {tuple(y.shape)} in the "
                "reference cell; the two cells did not get the same inputs: replay both from the same "
                "recording with the same options"
            )
        difference = _difference(x, y)
        tokens += difference.numel()
        total += float(difference.sum())
        squares += float(difference.square().sum())
        top = float(difference.max()) if difference.numel() else 0.0
        if top > largest:
            largest, worst = top, _index(name)
    return {
        "inputs": len(both),
        "left_out": len(set(names_a) ^ set(names_b)),
        "tokens": tokens,
        "logprob_max": max(0.0, largest) if both else None,
        "logprob_mean": total / tokens if tokens else None,
        "logprob_rms": math.sqrt(squares / tokens) if tokens else None,
        "worst_input": worst,
    }


def _compare_gradients(
    a: Any, b: Any, names_a: Collection[str], names_b: Collection[str], *, missing: str
) -> dict[str, Any]:
    nothing: dict[str, Any] = {
        "gradient_relative_error": None,
        "gradient_cosine": None,
        "gradient_entries": 0,
        "worst_parameter": None,
        "gradient_note": missing,
    }
    if missing or not (names_a or names_b):
        return nothing
    if set(names_a) != set(names_b):
        odd = sorted(set(names_a) ^ set(names_b))
        return nothing | {
            "gradient_note": f"{len(odd)} parameters have a gradient in one of the two cells only, such as "
            f"{odd[0].removeprefix(GRADIENTS)}"
        }
    error = norm_a = norm_b = inner = 0.0
    entries, worst, worst_error = 0, None, -1.0
    for name in sorted(names_a):
        x, y = a.get_tensor(name).double().flatten(), b.get_tensor(name).double().flatten()
        if x.shape != y.shape:
            return nothing | {"gradient_note": f"{name.removeprefix(GRADIENTS)} has another shape here"}
        one, of = float(_difference(x, y).square().sum()), float(y.square().sum())
        error, norm_b, norm_a = error + one, norm_b + of, norm_a + float(x.square().sum())
        inner += float(x @ y)
        entries += x.numel()
        own = _ratio(one, of)
        if own > worst_error:
            worst, worst_error = name.removeprefix(GRADIENTS), own
    if norm_a == norm_b == 0:
        return nothing | {
            "gradient_note": "they are zero in both cells, as where all advantages are 0; --inputs and "
            "--gradient-inputs choose others"
        }
    return nothing | {
        "gradient_relative_error": _ratio(error, norm_b),
        "gradient_cosine": _cosine(inner, norm_a, norm_b),
        "gradient_entries": entries,
        "worst_parameter": worst,
    }


def _difference(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """|x - y| in float64; 0 where both are the same infinity or both NaN, infinite where only one is."""
    x, y = x.double(), y.double()
    difference = (x - y).abs()
    same = (x == y) | (x.isnan() & y.isnan())
    odd = ~same & ~difference.isfinite()
    return difference.masked_fill(same, 0.0).masked_fill(odd, math.inf)


def _ratio(error_squared: float, norm_squared: float) -> float:
    if error_squared == 0:
        return 0.0
    if not math.isfinite(error_squared) or norm_squared == 0 or not math.isfinite(norm_squared):
        return math.inf
    return math.sqrt(error_squared / norm_squared)


def _cosine(inner: float, norm_a: float, norm_b: float) -> float | None:
    """None where one of them is zero or not finite: it has no direction."""
    scale = math.sqrt(norm_a) * math.sqrt(norm_b) if norm_a >= 0 and norm_b >= 0 else math.nan
    if not math.isfinite(scale) or scale == 0 or not math.isfinite(inner):
        return None
    return max(-1.0, min(1.0, inner / scale))


def _open(path: Path) -> Any:
    try:
        with open_plain(path, RecordingError):  # safe_open would wait for the writer of a fifo
            return safe_open(path, framework="pt")
    except (SafetensorError, OSError, RecordingError) as error:
        raise RecordingError(
            f"cannot-read: {path}: no outputs to compare ({error}); `lockstep replay --keep-outputs` writes "
            "them"
        ) from error


def _under(names: Collection[str], prefix: str) -> list[str]:
    return [name for name in names if name.startswith(prefix)]


def _index(name: str) -> int:
    number = name.rpartition("/")[2]
    if not number.isdecimal():
        raise RecordingError(
            f"wrong-field: {name!r} in outputs.safetensors does not name an input; expected {LOGPROBS}NUMBER"
        )
    return int(number)
