"""Errors of an optimizer step that cannot be done, worded the same for every backend."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.errors import ConfigError, TrainError
from lockstep.schema.batch import PackedBatch


def require_finite(losses: Sequence[Tensor], batches: Sequence[PackedBatch], *, step: int) -> None:
    """Check the losses of all micro-batches of a step, with one wait for the device.

    Args:
        losses: scalars, one per batch.

    Raises:
        TrainError: names the first micro-batch whose loss is NaN or infinite, and its samples.
    """
    values = torch.stack(list(losses)).tolist() if losses else []
    for index, value in enumerate(values):
        if not math.isfinite(value):
            raise TrainError(
                f"step {step}, micro-batch {index} of {len(values)}: the loss is {value}; its samples are "
                f"{list(batches[index].sample_ids)}. No weight was changed. Look at these samples "
                "(advantages, rollout_logprobs, loss_weights), lower train.lr, or set model.dtype = 'float32'"
            )


def norm_not_finite(norm: float, *, step: int, reason: str = "") -> TrainError:
    """The error for a gradient norm that is not finite; reason: the micro-batch that it came from, if
    known."""
    because = f": {reason}" if reason else ""
    return TrainError(
        f"step {step}: the gradient norm is {norm}{because}. No weight was changed. Lower train.lr or set "
        "model.dtype = 'float32'"
    )


def no_gradients(*, step: int) -> TrainError:
    """The error of an optimizer step before any backward, or after one of masked tokens only."""
    return TrainError(
        f"step {step}: there are no gradients; call forward_backward with at least one trained token before "
        "optimizer_step"
    )


def no_optimizer() -> ConfigError:
    """The error of an optimizer step of a backend that was made for none."""
    return ConfigError(
        "this backend was made with total_steps = 0, which leaves the optimizer out; give at least 1"
    )


def save_amid_step() -> TrainError:
    """The error of a save between backward and optimizer step."""
    return TrainError("save in the middle of an optimizer step would lose its gradients; step first")
