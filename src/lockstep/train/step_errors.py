"""Errors of an optimizer step that cannot be done, worded the same for every backend."""

from __future__ import annotations

from lockstep.errors import ConfigError, TrainError


def norm_not_finite(norm: float, *, step: int, reason: str = "") -> TrainError:
    """The error for a gradient norm that is not finite; reason: the micro-batch that it came from, if
    known."""
    because = f": {reason}" if reason else ""
    return TrainError(
        f"step {step}: the gradient norm is {norm}{because}. No weight was changed. Lower train.lr or set "
        "model.dtype = 'float32'",
        code="not-finite",
    )


def no_gradients(*, step: int) -> TrainError:
    """The error of an optimizer step before any backward, or after one of masked tokens only."""
    return TrainError(
        f"step {step}: there are no gradients; call forward_backward with at least one trained token before "
        "optimizer_step",
        code="no-gradients",
    )


def no_optimizer() -> ConfigError:
    """The error of an optimizer step of a backend that was made for none."""
    return ConfigError(
        "this backend was made with total_steps = 0, which leaves the optimizer out; give at least 1",
        code="missing-setting",
        setting="total_steps",
    )


def save_amid_step() -> TrainError:
    """The error of a save between backward and optimizer step."""
    return TrainError(
        "save in the middle of an optimizer step would lose its gradients; step first", code="wrong-state"
    )
