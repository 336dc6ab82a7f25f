"""The rows of benchmarks/frameworks.md that no other file shows; and that
every row points to a test that is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lockstep.algorithms.ppo import ValueLoss
from lockstep.config.ppo import ValueConfig
from lockstep.ops.advantages import gae
from lockstep.ops.losses import loss_weights
from lockstep.packing import pack
from lockstep.schema.batch import PackedBatch, ValueSample

ROOT = Path(__file__).parents[2]


def samples() -> list[ValueSample]:
    """Documents of 1, 5 and 3 trained tokens."""
    generator, made = torch.Generator().manual_seed(0), []
    for number, trained in enumerate((1, 5, 3)):
        mask = torch.zeros(trained + 2, dtype=torch.bool)
        mask[1:-1] = True
        returns, old = torch.where(mask, torch.randn(2, trained + 2, generator=generator), 0.0)
        made.append(
            ValueSample(
                token_ids=torch.arange(trained + 2),
                loss_mask=mask,
                sample_id=number,
                returns=returns,
                old_values=old,
            )
        )
    return made


def ours(groups: list[list[int]], *, clip: float) -> float:
    """The loss of the step, cut into these micro-batches; values are 0.4 above the old ones."""
    every = samples()
    weights = loss_weights([each.loss_mask for each in every], aggregation="token_mean")
    loss = ValueLoss(ValueConfig(clip=clip))
    batches = [pack([every[i] for i in group], [weights[i] for i in group]) for group in groups]
    return sum(float(loss(values_of(b), values_of(b), b, slice(None)).loss) for b in batches)


def values_of(batch: PackedBatch) -> Tensor:
    return torch.where(batch.loss_mask, batch.old_values + 0.4, 0.0)  # type: ignore[attr-defined]


def trl(group: list[int], *, cliprange_value: float) -> float:
    """trl/experimental/ppo/ppo_trainer.py: 0.5 * masked_mean(max(...)) of one micro-batch."""
    every = [samples()[i] for i in group]
    old, returns = (
        torch.cat([getattr(each, name)[each.loss_mask] for each in every])
        for name in ("old_values", "returns")
    )
    values = old + 0.4
    clipped = torch.clamp(values, old - cliprange_value, old + cliprange_value)
    return float(0.5 * torch.max((values - returns) ** 2, (clipped - returns) ** 2).mean())


def test_a_mean_of_the_micro_batches_means_depends_on_how_they_are_cut_and_ours_does_not() -> None:
    whole, cut = [[0, 1, 2]], [[0], [1, 2]]
    assert ours(whole, clip=0.2) == pytest.approx(ours(cut, clip=0.2), rel=1e-6)
    assert ours(whole, clip=0.2) == pytest.approx(trl([0, 1, 2], cliprange_value=0.2), rel=1e-6)
    theirs = sum(trl(group, cliprange_value=0.2) for group in cut) / len(cut)
    assert abs(theirs - ours(cut, clip=0.2)) > 0.05, "the token of the short document counts four times"


def peers_gae(rewards: Tensor, values: Tensor, *, gamma: float, lam: float) -> Tensor:
    """OpenRLHF's get_advantages_and_returns, TRL's and verl's loop: V is 0 after the last token,
    whatever ended the rollout. [L]."""
    last, reversed_advantages = 0.0, []
    for t in reversed(range(len(rewards))):
        following = float(values[t + 1]) if t < len(rewards) - 1 else 0.0
        last = float(rewards[t]) + gamma * following - float(values[t]) + gamma * lam * last
        reversed_advantages.append(last)
    return torch.tensor(reversed_advantages[::-1], dtype=torch.float64)


def test_gae_is_the_peers_and_a_time_limit_is_no_end_where_asked() -> None:
    rewards, values = torch.randn(2, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    cu = torch.tensor([0, 6])
    theirs = peers_gae(rewards, values, gamma=0.9, lam=0.8)
    torch.testing.assert_close(gae(rewards, values, cu, gamma=0.9, lam=0.8), theirs)
    # A policy that earns 1 a token for ever is worth 1 / (1 - gamma) = 2 in every state. Cut off, its true
    # value function has no error with the bootstrap, and one at every token without it.
    ones, true = torch.ones(4, dtype=torch.float64), torch.full((4,), 2.0, dtype=torch.float64)
    limits = gae(ones, true, torch.tensor([0, 4]), gamma=0.5, lam=1.0, final_values=true[:1])
    torch.testing.assert_close(limits, torch.zeros(4, dtype=torch.float64))
    ended = peers_gae(ones, true, gamma=0.5, lam=1.0)
    torch.testing.assert_close(ended, -2.0 * 0.5 ** torch.arange(4, 0, -1).double())


def test_every_row_points_to_a_test() -> None:
    page = (ROOT / "benchmarks" / "frameworks.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| ") and "---" not in line][1:]
    assert len(rows) >= 9
    for row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", row)
        assert named, row
        for path, test in named:
            assert f"def {test}(" in (ROOT / path).read_text(encoding="utf-8"), (path, test)
