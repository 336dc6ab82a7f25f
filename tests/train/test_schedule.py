from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import get_scheduler

from lockstep.config.train import TrainConfig
from lockstep.train.optimizer import lr_at


def ours(**options: Any) -> list[float]:
    config = TrainConfig(lr=2e-3, **options)
    return [lr_at(step, config=config, total_steps=20) for step in range(24)]


def transformers_lrs(name: str, warmup: int, **specific: Any) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=2e-3)
    scheduler = get_scheduler(
        name, optimizer, num_warmup_steps=warmup, num_training_steps=20, scheduler_specific_kwargs=specific
    )
    values = []
    for _ in range(24):
        values.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return values


@pytest.mark.parametrize(
    ("schedule", "theirs"), [("linear", "linear"), ("cosine", "cosine"), ("constant", "constant_with_warmup")]
)
@pytest.mark.parametrize("warmup", [0, 5])
def test_decay_is_that_of_transformers(schedule: str, theirs: str, warmup: int) -> None:
    got = ours(schedule=schedule, warmup_steps=warmup)
    # cosine is stepped past its end here, where transformers' comes up again; ours stays down
    assert got[warmup:21] == pytest.approx(transformers_lrs(theirs, warmup)[warmup:21], abs=1e-12)
    assert got[20:] == [got[20]] * 4


def test_cosine_with_a_floor_is_that_of_transformers() -> None:
    got = ours(schedule="cosine", warmup_steps=4, min_lr_ratio=0.1)
    theirs = transformers_lrs("cosine_with_min_lr", 4, min_lr_rate=0.1)
    assert got[4:21] == pytest.approx(theirs[4:21], abs=1e-12)
    assert got[-1] == pytest.approx(2e-4)


def test_linear_with_a_floor_by_hand() -> None:
    config = TrainConfig(lr=1.0, schedule="linear", min_lr_ratio=0.5)
    assert [lr_at(s, config=config, total_steps=4) for s in range(5)] == [1.0, 0.875, 0.75, 0.625, 0.5]


def test_warm_up_starts_above_zero_and_reaches_the_peak() -> None:
    config = TrainConfig(lr=1.0, warmup_steps=3)
    assert [lr_at(s, config=config, total_steps=9) for s in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_a_negative_step_is_refused() -> None:
    with pytest.raises(ValueError, match="step = -1"):
        lr_at(-1, config=TrainConfig(), total_steps=3)
