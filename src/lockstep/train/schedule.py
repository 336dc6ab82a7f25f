"""Learning-rate schedules as pure functions of the optimizer step."""

from __future__ import annotations

import math
from typing import Literal

from lockstep.config.train import TrainConfig

Schedule = Literal["constant", "linear", "cosine"]


def lr_at(step: int, *, config: TrainConfig, total_steps: int) -> float:
    """Learning rate of the update number `step` (0 is the first one) of `total_steps`.

    Warm-up is linear and never 0: update s of w warm-up steps has lr * (s + 1) / (w + 1), so that the first
    update already moves the weights. Afterwards it is transformers' get_scheduler (optimization.py:
    constant_with_warmup, linear, cosine with half a period) at the same step, compressed into [min_lr_ratio,
    1]; steps beyond `total_steps` keep the last value.

    Raises:
        ValueError: `step` is negative.
    """
    if step < 0:
        raise ValueError(f"step = {step} is negative; the first update is step 0")
    if step < config.warmup_steps:
        return config.lr * (step + 1) / (config.warmup_steps + 1)
    progress = min(1.0, (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps))
    share = config.min_lr_ratio + (1.0 - config.min_lr_ratio) * _decay(config.schedule, progress)
    return config.lr * share


def _decay(schedule: Schedule, progress: float) -> float:
    """1 at progress 0; linear and cosine reach 0 at progress 1."""
    if schedule == "constant":
        return 1.0
    if schedule == "linear":
        return 1.0 - progress
    return 0.5 * (1.0 + math.cos(math.pi * progress))
