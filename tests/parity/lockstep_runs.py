"""GRPO runs on tiny models, by hand, so that every logprob of trainer and engine can be looked at."""

from __future__ import annotations

import dataclasses
import tomllib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.config.run import GRPORun
from lockstep.loop.determinism import weights_hash
from lockstep.loops.online import OnlineParts, OnlineTrainer, build_online
from lockstep.schema.batch import PackedBatch, policy_samples, rollout_samples

CONFIG = """
kind = "grpo"
steps = 20
[model]
name = "shape:{model}"
dtype = "{dtype}"
[data]
source = "ids"
max_prompt_tokens = 16
[rollout]
prompts_per_step = 4
group_size = 3
[rollout.sampling]
max_tokens = 20
temperature = 0.7
[[rewards]]
name = "ids"
[train]
device = "cpu"
lr = 3e-4
token_budget = 64
attention = "varlen"
execution = "{execution}"
batch_invariant = {invariant}
minibatches = {minibatches}
{settings}
[engine]
name = "native"
max_batch = 8
kv_cache_tokens = 120
prefill_chunk = 4
[eval]
before = false
after = false
[checkpoint]
save_at_end = false
export_at_end = false
[log]
tensorboard = false
"""
"""12 samples of 6 to 36 tokens a step, 8 rows and a KV cache for about four of them: samples wait, lose their
place, and go on. Prompts of up to 16 tokens are prefilled by four. A pack has 64 slots, the only bucket."""


def config(
    model: str,
    dtype: str,
    execution: str,
    *,
    minibatches: int = 2,
    settings: str = "",
    invariant: bool = True,
) -> str:
    """settings: more lines of the table [train]."""
    return CONFIG.format(
        model=model,
        dtype=dtype,
        execution=execution,
        minibatches=minibatches,
        settings=settings,
        invariant=str(invariant).lower(),
    )


class Watched:
    """A train backend that keeps what `forward_backward` was given and what it computed."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.seen: list[tuple[list[PackedBatch], list[Tensor]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def forward_backward(self, batches: Any, loss: Any) -> Any:
        stats = self._backend.forward_backward(batches, loss)
        self.seen.append((list(batches), [lp.detach().clone() for lp in stats.logprobs]))
        return stats


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One GRPO step."""

    recomputed: Tensor
    """logprob_gap of every sampled token, from a forward over all samples before the update."""
    gaps: list[Tensor]
    """Per optimizer step: logprob_gap of its tokens in the forward that was trained on."""
    ratios: list[Tensor]
    """Per optimizer step: importance_ratio of its tokens, against the old_logprobs that it was given."""
    weights: str
    """Hash of the weights after it."""
    metrics: dict[str, float]
    lengths: list[int]
    """Of the completions."""


def build(text: str, *, gate: bool = True) -> OnlineParts:
    """gate: equal logprobs are used and checked as in any run; else they are only measured."""
    torch._dynamo.reset()
    parts = build_online(GRPORun.model_validate(tomllib.loads(text)))
    return parts if gate else dataclasses.replace(parts, bitwise_check=None)


def train(parts: OnlineParts, *, steps: int) -> list[Step]:
    watched = Watched(parts.backend)
    parts = dataclasses.replace(parts, backend=watched)
    trainer = OnlineTrainer(parts)
    trainer.push(policy_version=0)
    done = []
    for number in range(steps):
        groups = trainer.sample(number).groups
        recomputed = _recomputed(parts, groups)
        watched.seen.clear()
        result = trainer.update(groups, step=number)
        trainer.push(policy_version=number + 1)
        done.append(
            Step(
                recomputed=recomputed,
                gaps=[_joined(b, lps, "rollout_logprobs") for b, lps in watched.seen],
                ratios=[_joined(b, lps, "old_logprobs").exp() for b, lps in watched.seen],
                weights=weights_hash(parts.backend),
                metrics=result.metrics,
                lengths=[len(r.trajectory.spans[1].token_ids) for g in result.groups for r in g.rollouts],
            )
        )
    return done


def _recomputed(parts: OnlineParts, groups: Any) -> Tensor:
    rollouts = rollout_samples(rollout.trajectory for group in groups for rollout in group.rollouts)
    samples = policy_samples(rollouts, None)
    batches = parts.plan(samples, parts.algorithm.loss_weights(samples))
    return _joined(batches, parts.backend.logprobs(batches), "rollout_logprobs")


def _joined(batches: Any, logprobs: Any, field: str) -> Tensor:
    """logprobs minus a field of the batches, of the tokens that were sampled."""
    found = []
    for batch, mine in zip(batches, logprobs, strict=True):
        theirs = getattr(batch, field)
        found.append((mine - (mine if theirs is None else theirs))[batch.loss_mask])
    return torch.cat(found)
