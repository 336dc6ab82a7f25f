"""Metrics of a step: plain numbers from engines, rollouts and micro-batches."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.config.run import RunConfig
from lockstep.loop.resolve import Resolved
from lockstep.loop.role_worker import RoleWorker
from lockstep.models.memory import ModelShape, planned_shape
from lockstep.models.shapes import attention_flops, peak_flops, utilisation
from lockstep.observe.memory import MemoryMeter
from lockstep.protocols import TrainBackend
from lockstep.protocols.engine import EngineStats, InferenceEngine
from lockstep.ranks.context import RankContext
from lockstep.schema.batch import PackedBatch
from lockstep.schema.rollout import EndReason, RolloutGroup, Trajectory


def memory_of_ranks(meter: MemoryMeter, ranks: RankContext) -> dict[str, float]:
    """Return the largest use of all ranks: that rank would run out first. Collective."""
    own = meter.metrics()
    everyone = ranks.gather(own, dict[str, float], what="the step's metrics")
    return {name: max(values.get(name, 0.0) for values in everyone) for name in own}


def rollout_metrics(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Return rewards (total and by name), completion lengths in tokens, and the share of truncated
    samples."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    lengths = [rollout.trajectory.policy_tokens for rollout in rollouts]
    prompts = [len(group.prompt.token_ids) for group in groups]
    rewards = [rollout.reward for rollout in rollouts]
    names = sorted({name for rollout in rollouts for name in rollout.rewards})
    uniform = [len({rollout.reward for rollout in group.rollouts}) == 1 for group in groups]
    metrics = {
        "reward/mean": statistics.fmean(rewards),
        "reward/std": statistics.pstdev(rewards),
        "reward/groups_without_signal": statistics.fmean(uniform),
        "rollout/samples": float(len(rollouts)),
        "rollout/prompt_tokens_mean": statistics.fmean(prompts),
        "rollout/completion_tokens_mean": statistics.fmean(lengths),
        "rollout/completion_tokens_min": float(min(lengths)),
        "rollout/completion_tokens_max": float(max(lengths)),
        "rollout/truncated": statistics.fmean(r.trajectory.finish_reason == "length" for r in rollouts),
    }
    metrics |= turn_metrics([rollout.trajectory for rollout in rollouts])
    for name in names:
        values = [rollout.rewards[name] for rollout in rollouts if name in rollout.rewards]
        metrics[f"reward/{name}"] = statistics.fmean(values)
    return metrics


def turn_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the figures of trajectories of several turns: turns, seconds that environments took, branches,
    and the share of each reason for an end. Nothing where all have one turn."""
    if all(each.turns == 1 and each.end in ("done", "length") for each in trajectories):
        return {}
    ends: tuple[EndReason, ...] = ("done", "length", "turns", "tokens")
    return {
        "rollout/turns": statistics.fmean(each.turns for each in trajectories),
        "rollout/turns_max": float(max(each.turns for each in trajectories)),
        "rollout/branches": float(sum(len(each.earlier) for each in trajectories)),
        "time/environment": statistics.fmean(each.wait_seconds for each in trajectories),
        **{f"rollout/ended_{end}": statistics.fmean(t.end == end for t in trajectories) for end in ends},
    }


def shape_metrics(batches: Sequence[PackedBatch]) -> dict[str, float]:
    """Return the shapes that reach the trainer in one step: the first thing to look at when a step is
    slow."""
    slots = sum(batch.num_rows for batch in batches)
    real = sum(b.num_tokens if b.shared is None else b.shared.num_rows for b in batches)
    tokens = sum(batch.num_tokens for batch in batches)
    return {
        "input/micro_batches": float(len(batches)),
        "input/slots": float(slots),
        "input/tokens": float(tokens),
        "input/squared_tokens": float(sum(n * n for b in batches for n in b.lengths[: len(b.sample_ids)])),
        "input/trained_tokens": float(sum(int(batch.loss_mask.sum()) for batch in batches)),
        "input/documents": float(sum(len(batch.sample_ids) for batch in batches)),
        "input/longest_document": float(max(max(batch.lengths) for batch in batches)),
        "input/fill": real / slots if slots else math.nan,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingWork:
    """What forward and backward of a run's policy compute, and the GPUs' peak: for throughput/mfu."""

    per_token: float
    """FLOPs beside attention: 2 forward and 2 backward of each parameter in a matrix product, 2 more if it is
    trained; of a layer's experts those of one token."""
    per_squared_token: float
    """FLOPs of attention, over the squared length of a document."""
    peak: float
    """FLOP/s of all ranks."""
    passes: int = 1
    """How often a step computes its documents."""

    @classmethod
    def of(cls, resolved: Resolved[Any], config: Any, *, ranks: int) -> TrainingWork | None:
        """Return the work of a run; None: on a CPU, or on a GPU or in a dtype whose peak is not known.

        Args:
            config: of the text model (transformers).
        """
        if not resolved.device.startswith("cuda") or resolved.dtype != "bfloat16":
            return None
        peak = peak_flops(torch.cuda.get_device_name(resolved.device))
        shape = planned_shape(resolved.run.model, dtype=torch.bfloat16)
        return None if peak is None else cls.of_shape(shape, config, peak=peak * ranks, run=resolved.run)

    @classmethod
    def of_shape(cls, shape: ModelShape, config: Any, *, peak: float, run: RunConfig) -> TrainingWork:
        """Return the work of a run on a model with these sizes."""
        looked_up = 0 if config.tie_word_embeddings else shape.vocab * shape.hidden
        unused = shape.parameters - shape.active_parameters
        trained = shape.trained if shape.lora else shape.active_parameters - looked_up
        return cls(
            per_token=4.0 * (shape.parameters - unused - looked_up) + 2.0 * trained,
            per_squared_token=attention_flops(config),
            peak=peak,
            passes=run.train.epochs_per_batch,
        )

    def metrics(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return throughput/mfu of a step; nothing if it trained no policy.

        Args:
            values: the step's metrics, with its times.
        """
        seconds = sum(values.get(f"time/{name}", 0.0) for name in ("forward_backward", "forward", "backward"))
        if not seconds:
            return {}
        tokens, squares = values["input/tokens"], values["input/squared_tokens"]
        flops = self.passes * (self.per_token * tokens + self.per_squared_token * squares)
        return {"throughput/mfu": utilisation(flops, seconds=seconds, peak=self.peak)}


def engine_metrics(before: EngineStats, engine: InferenceEngine, *, ranks: RankContext) -> dict[str, float]:
    """Return engine/* since `before`: throughput and cache use of the engines of all ranks. Collective. Ranks
    sample in parallel: their tokens are added up, and the slowest one's seconds count."""
    kind = tuple[EngineStats, EngineStats]
    everyone = ranks.gather((before, engine.stats()), kind, what="the engines' figures")
    seconds = max(now.generate_seconds - then.generate_seconds for then, now in everyone)
    completions = sum(now.completion_tokens - then.completion_tokens for then, now in everyone)
    prompts = sum(now.prompt_tokens - then.prompt_tokens for then, now in everyone)
    cached = sum(now.cached_tokens - then.cached_tokens for then, now in everyone)
    values = {
        "engine/tokens_per_second": completions / seconds if seconds > 0 else 0.0,
        "engine/cache_hit_rate": cached / prompts if prompts > 0 else 0.0,
        "engine/recomputed_tokens": float(
            sum(now.recomputed_tokens - then.recomputed_tokens for then, now in everyone)
        ),
    }
    if any(now.kv_cache_use is not None for _, now in everyone):
        values["engine/kv_cache_use"] = max(now.kv_cache_use or 0.0 for _, now in everyone)
    if engine.external:
        values["engine/restarts"] = float(sum(now.restarts for _, now in everyone))
    return values


def remote_role_metrics(workers: Sequence[RoleWorker], *, ranks: RankContext) -> dict[str, float]:
    """Return world/restarts, over all remote roles and ranks; nothing without remote roles. Collective."""
    if not workers:
        return {}
    restarts = ranks.gather(sum(worker.restarts for worker in workers), int, what="restarts of remote roles")
    return {"world/restarts": float(sum(restarts))}


def combine(updates: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the metrics of several optimizer steps of one rollout batch: maxima of what is a maximum, the
    last learning rate, means of the rest."""
    combined = {}
    for name in dict.fromkeys(name for update in updates for name in update):
        values = [update[name] for update in updates if name in update]
        if name.endswith("_max"):
            combined[name] = max(values)
        elif name == "lr":
            combined[name] = values[-1]
        else:
            combined[name] = statistics.fmean(values)
    return combined


# Counts of torch.compile's work in a step, over all ranks.


_COUNTED = ("graphs", "recompiles", "graph_breaks", "seconds")


class CompileMeter:
    """compile/* per step: what a backend's `compile_report` counted since the last reading.

    Args:
        backend: the train backend; one without compiled parts has no metrics.
        ranks: each compiles for itself; the largest count is reported, because the others waited for it.
    """

    def __init__(self, backend: TrainBackend, *, ranks: RankContext) -> None:
        self._report = backend.compile_report
        self._ranks = ranks
        self._before = dict.fromkeys(_COUNTED, 0.0)

    def metrics(self) -> dict[str, float]:
        """Return the counts since the last call; empty where the backend does not compile. Collective where
        it does."""
        report = self._report()
        if report is None:
            return {}
        now = {name: float(getattr(report, name)) for name in _COUNTED}
        own = {name: now[name] - self._before[name] for name in _COUNTED}
        self._before = now
        everyone = self._ranks.gather(own, dict[str, float], what="the step's compilations")
        return {f"compile/{name}": max(counts[name] for counts in everyone) for name in _COUNTED}
