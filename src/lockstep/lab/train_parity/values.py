"""PPO's half of a parity run: the value model's inputs, and the advantages that its values make."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.algorithms.ppo import WHITENING_EPS
from lockstep.algorithms.value_loss import ValueLoss
from lockstep.config.ppo import PPOConfig, ValueConfig
from lockstep.lab.train_parity.job import InputsSpec
from lockstep.lab.train_parity.start import starting_backend
from lockstep.ops.advantages import batch_mean_std, gae
from lockstep.recording.replayable import VALUE_LOSS
from lockstep.schema.batch import PackedBatch, PolicyBatch, ValueBatch
from lockstep.schema.recording import VALUE


def value_algorithm() -> dict[str, Any]:
    """The value loss, with the default settings, as a recording's header has it."""
    return {"name": VALUE} | ValueConfig().model_dump(mode="json", include=set(VALUE_LOSS))


def with_values(
    plan: Sequence[Sequence[PackedBatch]], spec: InputsSpec
) -> tuple[list[list[PackedBatch]], list[list[PackedBatch]], list[float]]:
    """Score every pack with the untrained value model, by `local`, and estimate advantages and returns with
    PPO's default settings. The reward of a document, earned by its last trained token, is the advantage that
    this token has in `plan`.

    Args:
        plan: PolicyBatches, by optimizer step.

    Returns:
        The packs with PPO's advantages, whitened over each step; the same as ValueBatches; and the value
        loss of each step before its first update.
    """
    loss = ValueLoss(ValueConfig())
    with starting_backend(spec, "value") as backend:
        scored = [[each.cpu() for each in backend.logprobs(batches)] for batches in plan]
    of_policy: list[list[PackedBatch]] = []
    of_value: list[list[PackedBatch]] = []
    starts: list[float] = []
    for batches, values in zip(plan, scored, strict=True):
        raw = [_estimates(batch, each) for batch, each in zip(batches, values, strict=True)]
        mask = torch.cat([batch.loss_mask for batch in batches])
        white = batch_mean_std(torch.cat(raw), mask, eps=WHITENING_EPS).float()
        sizes = [batch.num_slots for batch in batches]
        of_policy.append(
            [
                dataclasses.replace(batch, advantages=part)  # type: ignore[call-arg]
                for batch, part in zip(batches, white.split(sizes), strict=True)
            ]
        )
        of_value.append([_value_batch(*each) for each in zip(batches, values, raw, strict=True)])
        starts.append(
            sum(
                float(loss(each, torch.zeros_like(each), batch, slice(0, batch.num_slots)).loss)
                for batch, each in zip(of_value[-1], values, strict=True)
            )
        )
    return of_policy, of_value, starts


def _estimates(batch: PackedBatch, values: Tensor) -> Tensor:
    """[T] float64: the advantages before they are whitened, 0 where nothing is trained."""
    assert isinstance(batch, PolicyBatch)
    mask, options = batch.loss_mask, PPOConfig()
    counts = [int(part.sum()) for part in batch.split(mask)]
    ends = torch.tensor([0, *counts]).cumsum(0)
    earned = batch.advantages[mask].double()
    rewards = torch.zeros_like(earned)
    last = ends[1:][torch.tensor(counts) > 0] - 1
    rewards[last] = earned[last]
    found = torch.zeros(batch.num_slots, dtype=torch.float64)
    found[mask] = gae(rewards, values[mask].double(), ends, gamma=options.gamma, lam=options.lam)
    return found


def _value_batch(batch: PackedBatch, values: Tensor, advantages: Tensor) -> ValueBatch:
    shared = {field.name: getattr(batch, field.name) for field in dataclasses.fields(PackedBatch)}
    old = torch.where(batch.loss_mask, values, 0.0)
    returns = torch.where(batch.loss_mask, (advantages + old.double()).float(), 0.0)
    return ValueBatch(**shared, returns=returns, old_values=old)
