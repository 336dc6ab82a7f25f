"""Errors of an optimizer step that cannot be done, worded the same for every backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lockstep.errors import ConfigError, TrainError


def norm_not_finite(norm: float, *, step: int, reason: str = "", **blamed: Any) -> TrainError:
    """The error for a gradient norm that is not finite; reason: the micro-batch that it came from, if known,
    and blamed: its number and its samples."""
    because = f": {reason}" if reason else ""
    return TrainError(
        f"step {step}: the gradient norm is {norm}{because}. No weight was changed. Lower train.lr or set "
        "model.dtype = 'float32'",
        code="not-finite",
        step=step,
        **blamed,
    )


def one_to_blame(index: int, count: int, sample_ids: Sequence[int], bad: Sequence[str]) -> dict[str, Any]:
    """Arguments of `norm_not_finite` for micro-batch `index` of `count` with such gradients of `bad`."""
    samples = list(sample_ids)
    reason = (
        f"micro-batch {index} of {count} has gradients that are not finite in {len(bad)} parameters "
        f"({', '.join(bad[:3])}); its samples are {samples}"
    )
    return {"reason": reason, "micro_batch": index, "samples": samples}


def all_to_blame(sample_ids: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Arguments of `norm_not_finite` where each of these micro-batches alone is finite."""
    samples = [list(ids) for ids in sample_ids]
    reason = f"each micro-batch alone is finite, their sum is not; the samples by micro-batch are {samples}"
    return {"reason": reason, "samples": samples}


def no_gradients(*, step: int) -> TrainError:
    """The error of an optimizer step before any backward, or after one of masked tokens only."""
    return TrainError(
        f"no-gradients: step {step}: there are no gradients; call forward_backward with at least one "
        "trained token before optimizer_step",
        step=step,
    )


def no_optimizer() -> ConfigError:
    """The error of an optimizer step of a backend that was made for none."""
    return ConfigError(
        "missing-setting: this backend was made with total_steps = 0, which leaves the optimizer out; give "
        "at least 1",
        setting="total_steps",
    )


def save_amid_step() -> TrainError:
    """The error of a save between backward and optimizer step."""
    return TrainError(
        "wrong-state: save in the middle of an optimizer step would lose its gradients; step first"
    )
