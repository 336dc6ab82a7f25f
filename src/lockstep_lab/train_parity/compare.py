"""Differences between the steps of two stacks: pure functions of the files they wrote."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lockstep_lab.loss_curves.differences import Spread, relative, spread
from lockstep_lab.train_parity.job import LOGPROBS, StepRow


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """One stack against the reference."""

    steps: int
    """The number of steps compared: those that both have."""
    loss: Spread
    """Relative: |a - b| / max(|b|, floor)."""
    loss_floor: float
    """Losses of the reference below it count as this large; 0 for SFT."""
    grad_norm: Spread
    """Relative to the reference's gradient norm."""
    logprob: Spread | None
    """Nats, |a - b| of a trained token; mean over the tokens of all steps. None: not kept."""
    gradients: Mapping[str, float]
    """Step -> the largest |g - r| / max(|r|, 1e-6 |all r|) of any Parameter (Euclidean norms); empty: not
    kept."""
    worst_parameter: str = ""


def compare(
    rows: Sequence[StepRow],
    reference: Sequence[StepRow],
    *,
    folders: tuple[Path, Path],
    relative_to_loss: bool,
) -> Comparison | None:
    """None: there is no step that both have.

    Args:
        folders: of the stack and of the reference, where logprobs and gradients are.
        relative_to_loss: each loss difference is relative to the reference's loss of that step. False (GRPO,
            whose losses pass through 0): to the mean of its absolute losses where that is larger.
    """
    steps = min(len(rows), len(reference))
    if steps == 0:
        return None
    ours, theirs = rows[:steps], reference[:steps]
    floor = 0.0 if relative_to_loss else math.fsum(abs(row.loss) for row in theirs) / steps
    losses = [relative(a.loss, b.loss, floor=floor) for a, b in zip(ours, theirs, strict=True)]
    norms = [relative(a.grad_norm, b.grad_norm) for a, b in zip(ours, theirs, strict=True)]
    gradients, worst = gradient_errors(*folders)
    return Comparison(
        steps=steps,
        loss=spread(losses),
        loss_floor=floor,
        grad_norm=spread(norms),
        logprob=logprob_spread(*folders, steps=steps),
        gradients=gradients,
        worst_parameter=worst,
    )


def logprob_spread(folder: Path, reference: Path, *, steps: int) -> Spread | None:
    """Differences of trained tokens' logprobs over all steps; None if one of the two kept none."""
    ours, theirs = (_tensors(path / LOGPROBS) for path in (folder, reference))
    names = [name for name in (f"step-{n:06d}" for n in range(steps)) if name in ours and name in theirs]
    if not names:
        return None
    largest, total, count = [], 0.0, 0
    for name in names:
        a, b = ours[name], theirs[name]
        if a.shape != b.shape:
            return Spread(max=math.nan, mean=math.nan, at=int(name[5:]) + 1)
        difference = np.abs(a.astype(np.float64) - b)
        largest.append(float(difference.max(initial=0.0)))
        total, count = total + float(difference.sum()), count + difference.size
    sizes = spread(largest)
    return Spread(max=sizes.max, mean=total / max(count, 1), at=sizes.at)


def gradient_errors(folder: Path, reference: Path) -> tuple[dict[str, float], str]:
    """The largest Parameter error of each step that both kept, and the name of the worst Parameter."""
    errors: dict[str, float] = {}
    worst = (-1.0, "")
    for path in sorted(folder.glob("gradients-*.safetensors")):
        if not (reference / path.name).exists():
            continue
        error, name = gradient_error(_tensors(path), _tensors(reference / path.name))
        errors[str(int(path.stem.removeprefix("gradients-")) + 1)] = error
        worst = max(worst, (math.inf if math.isnan(error) else error, name))
    return errors, worst[1]


def gradient_error(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> tuple[float, str]:
    """(largest |g - r| / max(|r|, 1e-6 |all r|), its Parameter); infinite where a Parameter is missing."""
    norms = {name: float(np.linalg.norm(value.astype(np.float64))) for name, value in theirs.items()}
    floor = 1e-6 * math.sqrt(math.fsum(norm * norm for norm in norms.values()))
    worst, where = 0.0, ""
    for name, norm in norms.items():
        if name not in ours or ours[name].shape != theirs[name].shape:
            return math.inf, name
        error = float(np.linalg.norm(ours[name].astype(np.float64) - theirs[name]))
        error = error / max(norm, floor) if error else 0.0
        if not error <= worst:  # NaN too
            worst, where = error, name
        if math.isnan(error):
            break
    return worst, where


def _tensors(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    from safetensors.numpy import load_file

    tensors: dict[str, Any] = load_file(path)
    return tensors
