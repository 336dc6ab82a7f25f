"""Losses fed with NaN, inf and log ratios that overflow."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.algorithms.grpo import PolicyAlgorithm
from lockstep.algorithms.offline import DPO, SFT
from lockstep.config.algorithm import PUBLISHED, DPOConfig, GRPOConfig, SFTConfig
from lockstep.packing import pack
from lockstep.protocols.train import StepStats, TokenLoss
from lockstep.schema.batch import PackedBatch, PolicyBatch, PolicySample, PreferenceSample
from lockstep_lab.replay.losses import CrossEntropy, LogprobSum

LENGTHS = (5, 9, 4)
PER_TOKEN = ("loss_weights", "rollout_logprobs", "advantages", "old_logprobs", "ref_logprobs")

POLICY_LOSSES: dict[str, dict[str, Any]] = {
    **{name: {"name": name} for name in PUBLISHED},
    "k2": {"kl": {"coef": 0.1, "estimator": "k2"}},
    "k3": {"kl": {"coef": 0.1, "estimator": "k3"}, "entropy_coef": 0.01},
    "sequence sum": {"aggregation": "sequence_sum", "dual_clip": 3.0},
    **{
        f"{kind} of a {level}": {"rollout_correction": {"kind": kind, "level": level}}
        for kind in ("tis", "mask", "icepop")
        for level in ("token", "sequence")
    },
    "geometric mask": {"rollout_correction": {"geometric_high": 1.1}},
    "gspo with all": {
        "name": "gspo",
        "off_policy_mask_threshold": 0.1,
        "kl": {"coef": 0.1},
        "entropy_coef": 0.01,
        "dual_clip": 2.0,
        "rollout_correction": {"kind": "icepop", "level": "sequence", "low": 0.1, "high": 9.0},
    },
}


def mask_of(length: int) -> Tensor:
    """A prompt of two tokens, and an untrained token within the completion."""
    mask = torch.arange(length) >= 1
    mask[[2, -1]] = False
    return mask


def policy_batch(algorithm: PolicyAlgorithm) -> PolicyBatch:
    samples = [
        PolicySample(
            token_ids=torch.arange(length),
            loss_mask=mask_of(length),
            sample_id=i,
            rollout_logprobs=-torch.rand(length) - 0.5,
            advantages=torch.full((length,), float(i - 1) or 0.5),
            policy_version=0,
        )
        for i, length in enumerate(LENGTHS)
    ]
    batch = pack(samples, algorithm.loss_weights(samples))
    assert isinstance(batch, PolicyBatch)
    near = batch.rollout_logprobs + 0.2 * torch.randn(2, batch.num_slots)
    return dataclasses.replace(batch, old_logprobs=near[0], ref_logprobs=near[1])


def other_batch(name: str) -> PackedBatch:
    samples = [
        PreferenceSample(token_ids=torch.arange(n), loss_mask=mask_of(n), sample_id=i)
        for i, n in enumerate((5, 6, 4, 7))
    ]
    batch = pack(samples, DPO(DPOConfig()).loss_weights(samples))
    return dataclasses.replace(batch, ref_logprobs=-torch.rand(batch.num_slots)) if name == "dpo" else batch


def filled(batch: PackedBatch, value: float) -> PackedBatch:
    """With `value` in each untrained slot of each per-token input."""
    there = {name: getattr(batch, name, None) for name in PER_TOKEN}
    fields = {
        name: torch.where(batch.loss_mask, x, value) for name, x in there.items() if isinstance(x, Tensor)
    }
    assert len(fields) >= 1
    return dataclasses.replace(batch, **fields)


def loss_and_gradients(loss: TokenLoss, batch: PackedBatch, given: Tensor, value: float) -> list[Tensor]:
    leaves = [torch.where(batch.loss_mask, x, value).requires_grad_() for x in given]
    total = loss(leaves[0], leaves[1], filled(batch, value), slice(None)).loss
    gradients = torch.autograd.grad(total, leaves, allow_unused=True)
    return [total.detach(), *(g for g in gradients if g is not None)]


OTHERS: dict[str, TokenLoss] = {
    "sft": SFT(SFTConfig()).loss(),
    "dpo": DPO(DPOConfig()).loss(),
    "logprob-sum": LogprobSum(),
    "cross-entropy": CrossEntropy(),
}


@pytest.mark.parametrize("case", [*POLICY_LOSSES, *OTHERS])
def test_what_untrained_slots_hold_changes_no_bit(case: str) -> None:
    torch.manual_seed(0)
    if case in OTHERS:
        loss, batch = OTHERS[case], other_batch(case)
    else:
        algorithm = PolicyAlgorithm(GRPOConfig(**POLICY_LOSSES[case]), max_tokens=10)
        loss, batch = algorithm.loss(), policy_batch(algorithm)
    given = -torch.rand(2, batch.num_slots) - 0.5
    clean = loss_and_gradients(loss, batch, given, 0.0)
    assert all(bool(x.isfinite().all()) for x in clean) and bool(clean[1].any())
    for value in (math.nan, math.inf, -math.inf, 3e38):
        for found, expected in zip(loss_and_gradients(loss, batch, given, value), clean, strict=True):
            assert torch.equal(found, expected), value


@pytest.mark.parametrize("name", [*PUBLISHED, "tis"])
@pytest.mark.parametrize("far", [95.0, -95.0, 1e4, math.inf])
def test_a_log_ratio_that_overflows_is_bounded(name: str, far: float) -> None:
    """Of one token of each document, against old and reference; also where the advantage is 0."""
    torch.manual_seed(0)
    options = {"rollout_correction": {"kind": "tis"}} if name == "tis" else {"name": name}
    algorithm = PolicyAlgorithm(GRPOConfig(**options, kl={"coef": 0.1}), max_tokens=10)
    batch = policy_batch(algorithm)
    slots = torch.tensor([1, 6, 15])
    assert batch.loss_mask[slots].all()
    advantages = batch.advantages.clone()
    advantages[:5] = 0.0
    moved = {
        key: getattr(batch, key).index_put((slots,), torch.tensor(-1.0 - far))
        for key in ("old_logprobs", "ref_logprobs")
    }
    batch = dataclasses.replace(batch, advantages=advantages, **moved)
    logprobs = torch.full((batch.num_slots,), -1.0, requires_grad=True)
    loss = algorithm.loss()(logprobs, torch.zeros_like(logprobs), batch, slice(None)).loss
    loss.backward()
    assert loss.isfinite() and logprobs.grad.isfinite().all()


def test_the_shares_of_bounded_tokens_by_hand() -> None:
    """Log ratios 21, 19, -21, 0 of four tokens; ref - policy is 3, 2, -30, 0: k3 is 16.1, 4.4, 29, 0."""
    algorithm = PolicyAlgorithm(GRPOConfig(kl={"coef": 0.1}), max_tokens=10)
    sample = PolicySample(
        token_ids=torch.arange(5),
        loss_mask=torch.tensor([True] * 4 + [False]),
        sample_id=0,
        rollout_logprobs=torch.zeros(5),
        advantages=torch.ones(5),
        policy_version=0,
    )
    logprobs = torch.full((5,), -40.0)
    batch = dataclasses.replace(
        pack([sample], algorithm.loss_weights([sample])),
        old_logprobs=logprobs - torch.tensor([21.0, 19.0, -21.0, 0.0, 0.0]),
        ref_logprobs=logprobs + torch.tensor([3.0, 2.0, -30.0, 0.0, 0.0]),
    )
    loss, entropy = algorithm.loss(), torch.zeros(5)
    terms = loss(logprobs, entropy, batch, slice(None)).terms
    stats = StepStats(losses=[], logprobs=[logprobs], entropy=[entropy], terms=[terms])
    found = loss.metrics([batch], stats)
    assert found["importance_ratio_clamped"] == 2 / 4 and found["kl_clamped"] == 2 / 4
    assert found["importance_ratio_max"] == pytest.approx(math.exp(20.0), rel=1e-6)
    assert found["kl_ref"] == pytest.approx((10 + (math.exp(2) - 1 - 2) + 10) / 4, rel=1e-6)
    leaf = logprobs.clone().requires_grad_()
    loss.kl(loss.policy_terms(leaf, batch, slice(None)), batch, slice(None))[0].sum().backward()
    assert leaf.grad.tolist() == pytest.approx([0.0, 1 - math.exp(2), 0.0, 0.0, 0.0], rel=1e-6)
    wide = PolicyAlgorithm(GRPOConfig(kl={"coef": 0.1, "max_nats": 1e9}), max_tokens=10).loss()
    unbounded, _ = wide.kl(wide.policy_terms(logprobs, batch, slice(None)), batch, slice(None))
    assert unbounded.tolist() == pytest.approx(
        [math.exp(3) - 4, math.exp(2) - 3, 19 + math.exp(-20), 0, 0], rel=1e-5
    )
