"""Steps in which some groups have no signal, made by hand, and the gradients that an optimizer step sees. The
workers of tests/train import it, too, on two ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import sampled
import torch
from torch import Tensor

from lockstep.config.load import build
from lockstep.config.run import GRPORun
from lockstep.loops.online import OnlineParts, OnlineTrainer, StepResult, build_online
from lockstep.ranks.context import RankContext
from lockstep.schema.rollout import RolloutGroup

LENGTHS = (3, 7, 3, 7)
SIGNAL, NONE = (0.0, 1.0, 1.0, 0.0), (0.5, 0.5, 0.5, 0.5)
"""Rewards of a group. With LENGTHS their mean over tokens is 0.5 exactly, too: groups of NONE have advantage
zero under the estimators that whiten over the step's tokens as well."""


def toy_run(*, score_all_every: int, **tables: dict[str, Any]) -> GRPORun:
    """A learning rate that changes no weight, so that steps can be compared: sgd of 1e-30."""
    values: dict[str, Any] = {
        "kind": "grpo",
        "steps": 8,
        "model": {"name": "shape:tiny-llama", "dtype": "float32"},
        "data": {"source": "ids", "max_prompt_tokens": 16},
        "rollout": {"prompts_per_step": 4, "group_size": 4, "sampling": {"max_tokens": 12}},
        "rewards": [{"name": "ids"}],
        "train": {"lr": 1e-30, "optimizer": "sgd", "max_grad_norm": 1e9, "device": "cpu"},
    }
    for name, table in tables.items():
        values[name] = {**values.get(name, {}), **table}
    values["train"] = {"token_budget": 64, **values["train"], "score_all_every": score_all_every}
    run = build(values, origin="test")
    assert isinstance(run, GRPORun)
    return run


def group(index: int, rewards: Sequence[float], lengths: Sequence[int] = LENGTHS) -> RolloutGroup:
    """One prompt of three tokens; samples of these lengths with these rewards, on policy to within a nat."""
    generator = torch.Generator().manual_seed(index)
    prompt = tuple(torch.randint(3, 200, (3,), generator=generator).tolist())
    rollouts = []
    for length, reward in zip(lengths, rewards, strict=True):
        ids = torch.randint(3, 200, (length,), generator=generator).tolist()
        noise = torch.rand(length, generator=generator, dtype=torch.float64)
        one = sampled.completion(prompt, ids, (-5.5 - noise).tolist())
        rollouts.append(sampled.rollout(one, reward, {"ids": reward}))
    return sampled.group(rollouts, index)


@dataclasses.dataclass
class Watched:
    """A trainer, and the gradients at each of its optimizer steps."""

    trainer: OnlineTrainer
    gradients: list[dict[str, Tensor]]

    @classmethod
    def of(cls, parts: OnlineParts) -> Watched:
        backend, seen = parts.backend, list[dict[str, Tensor]]()
        plain = backend.optimizer_step

        def optimizer_step() -> dict[str, float]:
            seen.append(backend.gradients())  # type: ignore[attr-defined]
            return plain()

        backend.optimizer_step = optimizer_step  # type: ignore[method-assign]
        return cls(OnlineTrainer(parts), seen)

    def update(
        self, groups: Sequence[RolloutGroup], *, step: int
    ) -> tuple[StepResult, list[dict[str, Tensor]]]:
        """The step's result and gradients."""
        self.gradients.clear()
        result = self.trainer.update(groups, step=step)
        return result, list(self.gradients)


def watched(run: GRPORun, ranks: RankContext | None = None) -> Watched:
    return Watched.of(build_online(run, ranks=ranks))


def apart(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest distance of a tensor, relative to its norm, or to 1e-6 of all together."""
    assert list(ours) == list(theirs)
    whole = float(torch.stack([g.double().norm() for g in theirs.values()]).norm())
    assert whole > 0
    return max(
        float((ours[n].double() - g.double()).norm()) / max(float(g.double().norm()), 1e-6 * whole)
        for n, g in theirs.items()
    )


def compare_on_ranks(backend: str, ranks: RankContext | None, **train: Any) -> dict[str, float]:
    """Steps in which the second of two ranks has no pack: one document with a signal in each of two
    optimizer steps, then none at all. With weights that move, against a trainer that leaves nothing out."""
    moving = {"optimizer": "sgd", "lr": 0.1, "max_grad_norm": 1.0, "minibatches": 2, **train}
    reinforce = {"name": "reinforce++", "aggregation": "sequence_mean"}
    sides = [
        watched(
            toy_run(
                score_all_every=every,
                rollout={"group_size": 1},
                algorithm=reinforce,
                train={"backend": backend, **moving},
            ),
            ranks,
        )
        for every in (1, 10)
    ]
    worst, norms = 0.0, []
    for step, rewards in ((1, (1.0, 0.5, 0.5, 0.0)), (2, (0.5,) * 4), (3, (0.5, 1.0, 0.0, 0.5))):
        groups = [group(4 * step + i, (reward,), (5,)) for i, reward in enumerate(rewards)]
        (full, of_full), (left, of_left) = (side.update(groups, step=step) for side in sides)
        assert len(of_full) == len(of_left) == 2
        assert full.metrics["scored_share"] == 1.0 and left.metrics["scored_share"] == 0.5, left.metrics
        assert left.metrics["input/documents"] == left.metrics["input/micro_batches"] == 2
        norms.append(left.metrics["grad_norm"])
        if step != 2:
            worst = max(worst, *map(apart, of_left, of_full))
    assert norms[0] > 0 and norms[1] == 0.0 and norms[2] > 0, norms
    weights = [dict(side.trainer.parts.backend.weights(policy_version=0).tensors()) for side in sides]
    worst = max(worst, apart({n: t.float() for n, t in weights[1].items()}, weights[0]))
    for side in sides:
        side.trainer.parts.close()
    assert worst < 1e-5, worst
    return {"apart": worst}
