"""The rows of docs/how-to/coming-from.md about TRL's losses, followed literally, against TRL's own code."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.algorithms.grpo import PolicyAlgorithm
from lockstep.config.algorithm import GRPOConfig
from lockstep.packing import pack
from lockstep.schema.batch import PolicyBatch, PolicySample

LENGTHS, MAX_TOKENS = (2, 8, 5), 12
ADVANTAGES = (1.0, -0.7, 0.4)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figures:
    """[B, L] each, right-padded."""

    policy: Tensor
    old: Tensor
    ref: Tensor
    rollout: Tensor
    mask: Tensor


@pytest.fixture
def figures() -> Figures:
    generator = torch.Generator().manual_seed(0)
    shape = (len(LENGTHS), max(LENGTHS))
    policy, old, ref, rollout = -1.5 + 0.5 * torch.randn(4, *shape, generator=generator, dtype=torch.float64)
    mask = torch.arange(shape[1]) < torch.tensor(LENGTHS)[:, None]
    return Figures(policy=policy, old=old, ref=ref, rollout=rollout, mask=mask)


TRUNCATED = 1
"""The completion that max_tokens cut off, where a row masks those."""


def of_trl(figures: Figures, trainer: str = "grpo", **options: Any) -> tuple[float, Tensor]:
    """Loss and its gradient by the policy's logprobs, by the trainer's own `_compute_loss`."""
    grpo = pytest.importorskip("trl.trainer.grpo_trainer", reason="TRL is not installed")
    rloo = pytest.importorskip("trl.trainer.rloo_trainer")
    policy = figures.policy.clone().requires_grad_()
    args = SimpleNamespace(use_bias_correction_kl=False, steps_per_generation=1, delta=options.get("delta"))
    args.sapo_temperature_pos, args.sapo_temperature_neg = options.get("temperatures", (1.0, 1.05))
    accelerator = SimpleNamespace(
        num_processes=1, reduce=lambda x, reduction: x, gather=lambda x: x, sync_gradients=True
    )
    given = {
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "importance_sampling_level": "token",
        "loss_type": "dapo",
        "beta": 0.0,
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "use_vllm": False,
        "vllm_importance_sampling_correction": True,
        "_entropy_bonus_enabled": False,
        "aux_loss_enabled": False,
        "max_completion_length": MAX_TOKENS,
        "current_gradient_accumulation_steps": 1,
    }
    owner = grpo.GRPOTrainer if trainer == "grpo" else rloo.RLOOTrainer
    stub = SimpleNamespace(
        get_off_policy_mask=grpo.GRPOTrainer.get_off_policy_mask,
        **(given | options),
        args=args,
        accelerator=accelerator,
        model=SimpleNamespace(training=True),
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (policy, torch.zeros_like(policy), None),
    )
    ids = torch.zeros(figures.mask.shape, dtype=torch.int64)
    mask = figures.mask.clone()
    if options.get("mask_truncated_completions"):
        mask[TRUNCATED] = False  # as `_generate_and_score_completions` does
    old = figures.old * mask
    inputs = {
        "prompt_ids": ids[:, :2],
        "prompt_mask": ids[:, :2] + 1,
        "completion_ids": ids,
        "completion_mask": mask.int(),
        "advantages": torch.tensor(ADVANTAGES, dtype=torch.float64),
        "old_per_token_logps": figures.old,
        "old_logps": old.sum(1),
        "ref_per_token_logps": figures.ref,
        "num_items_in_batch": mask.sum(),
        "importance_sampling_ratio": options.get("ratio"),
        "sampling_per_token_logps": figures.rollout,
    }
    loss = owner._compute_loss(stub, None, inputs)
    loss.backward()
    return loss.item(), policy.grad[figures.mask]


def ours(figures: Figures, **options: Any) -> tuple[float, Tensor]:
    """The same by a config of ours."""
    algorithm = PolicyAlgorithm(GRPOConfig(**options), max_tokens=MAX_TOKENS)
    samples = []
    for i, length in enumerate(LENGTHS):
        rollout = torch.cat([torch.zeros(1), figures.rollout[i, :length], torch.zeros(1)])
        samples.append(
            PolicySample(
                token_ids=torch.arange(length + 2),
                loss_mask=torch.tensor([False] + [True] * length + [False]),
                sample_id=i,
                rollout_logprobs=rollout,
                advantages=torch.full((length + 2,), ADVANTAGES[i], dtype=torch.float64),
                policy_version=0,
                truncated=i == TRUNCATED,
            )
        )
    batch = pack(samples, algorithm.loss_weights(samples))
    assert isinstance(batch, PolicyBatch)

    def slots(x: Tensor) -> Tensor:
        found = torch.zeros(batch.num_slots, dtype=torch.float64)
        found[batch.loss_mask] = x[figures.mask]
        return found

    batch = dataclasses.replace(
        batch,
        advantages=slots(torch.tensor(ADVANTAGES, dtype=torch.float64)[:, None].expand_as(figures.mask)),
        old_logprobs=slots(figures.old),
        ref_logprobs=slots(figures.ref),
        rollout_logprobs=slots(figures.rollout),
    )
    logprobs = slots(figures.policy).requires_grad_()
    loss = algorithm.loss()(logprobs, torch.zeros_like(logprobs), batch, slice(None)).loss
    loss.backward()
    return loss.item(), logprobs.grad[batch.loss_mask]


ROWS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({"loss_type": "grpo"}, {"aggregation": "sequence_mean"}),
    "dr_grpo": ({"loss_type": "dr_grpo"}, {"aggregation": "constant"}),
    "dapo": ({}, {"aggregation": "token_mean"}),
    "bnpo": ({"loss_type": "bnpo"}, {"aggregation": "token_mean"}),
    "luspo": (
        {"loss_type": "luspo", "importance_sampling_level": "sequence"},
        {"aggregation": "sequence_sum", "ratio": "sequence"},
    ),
    "sequence level": (
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon_low": 3e-4,
            "epsilon_high": 4e-4,
        },
        {"name": "gspo"},
    ),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 1.3}, {"name": "cispo", "clip_high": 1.3 - 1}),
    "sapo": ({"loss_type": "sapo"}, {"name": "sapo"}),
    "sapo of sequences": (
        {"loss_type": "sapo", "importance_sampling_level": "sequence", "temperatures": (0.7, 3.0)},
        {"name": "sapo", "ratio": "sequence", "tau_pos": 0.7, "tau_neg": 3.0},
    ),
    "epsilon_high": ({"epsilon_high": 0.28}, {"aggregation": "token_mean", "clip_high": 0.28}),
    "delta": ({"delta": 1.5}, {"aggregation": "token_mean", "dual_clip": 1.5}),
    "beta": (
        {"beta": 0.1},
        {"aggregation": "token_mean", "kl": {"coef": 0.1, "max_nats": 1e9}},
    ),
    **{
        f"truncated masked, {aggregation}": (
            {"loss_type": loss_type, "mask_truncated_completions": True, "beta": 0.1},
            {"aggregation": aggregation, "mask_truncated": True, "kl": {"coef": 0.1, "max_nats": 1e9}},
        )
        for loss_type, aggregation in (
            ("grpo", "sequence_mean"),
            ("dr_grpo", "constant"),
            ("dapo", "token_mean"),
            ("luspo", "sequence_sum"),
        )
    },
    "RLOO": ({"trainer": "rloo"}, {"name": "rloo"}),
}


@pytest.mark.parametrize("row", ROWS)
def test_a_row_gives_the_loss_and_the_gradient_of_trl(row: str, figures: Figures) -> None:
    theirs, here = ROWS[row]
    loss, gradient = of_trl(figures, **theirs)
    found, found_gradient = ours(figures, **here)
    assert found == pytest.approx(loss, rel=2e-6)
    torch.testing.assert_close(found_gradient, gradient, rtol=2e-6, atol=1e-9)
    assert gradient.abs().max() > 1e-3


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_off_policy_mask(level: str, figures: Figures) -> None:
    """The completion with a negative advantage has lost 0.5 nats per token since it was sampled."""
    lost = torch.tensor([[0.5], [0.5], [0.0]], dtype=torch.float64)
    figures = dataclasses.replace(figures, rollout=figures.policy + lost)
    losses = []
    for threshold in (0.49, 0.51):
        loss, gradient = of_trl(
            figures, importance_sampling_level=level, beta=0.1, off_policy_mask_threshold=threshold
        )
        kl = {"coef": 0.1, "max_nats": 1e9}
        options = {"aggregation": "token_mean", "ratio": level, "off_policy_mask_threshold": threshold}
        found, found_gradient = ours(figures, kl=kl, **options)
        assert found == pytest.approx(loss, rel=2e-6)
        torch.testing.assert_close(found_gradient, gradient, rtol=2e-6, atol=1e-9)
        losses.append(loss)
    assert losses[0] != losses[1]


def test_truncated_completions_of_rloo(figures: Figures) -> None:
    """There a masked completion has ratio 1, so its advantage is in the loss, without a gradient."""
    loss, gradient = of_trl(figures, trainer="rloo", mask_truncated_completions=True)
    found, found_gradient = ours(figures, name="rloo", mask_truncated=True)
    assert found == pytest.approx(loss + ADVANTAGES[TRUNCATED] / len(ADVANTAGES), rel=2e-6)
    torch.testing.assert_close(found_gradient, gradient, rtol=2e-6, atol=1e-9)


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_importance_sampling_of_vllm(mode: str, figures: Figures) -> None:
    """The ratio as `_generate_and_score_completions` makes it, with _clip_max = 1.5 and no _clip_min."""
    gap = (figures.old - figures.rollout) * figures.mask
    ratio = (gap.sum(1, keepdim=True) if mode.startswith("sequence") else gap).exp()
    held = ratio.clamp(max=1.5) if mode.endswith("truncate") else ratio.masked_fill(ratio > 1.5, 0.0)
    assert bool((held != ratio).any())
    loss, gradient = of_trl(figures, use_vllm=True, ratio=held)
    level, _, word = mode.partition("_")
    kind = {"truncate": "tis", "mask": "mask"}[word]
    correction = {"kind": kind, "level": level, "high": 1.5}
    found, found_gradient = ours(figures, aggregation="token_mean", rollout_correction=correction)
    assert found == pytest.approx(loss, rel=2e-6)
    torch.testing.assert_close(found_gradient, gradient, rtol=2e-6, atol=1e-9)
