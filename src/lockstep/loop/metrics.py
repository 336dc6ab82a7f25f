"""Metrics of a step: plain numbers from rollouts and micro-batches."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from lockstep.errors import EngineError
from lockstep.schema.batch import PackedBatch
from lockstep.schema.rollout import RolloutGroup


def rollout_metrics(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Return rewards (total and by name), completion lengths in tokens, and the share of truncated
    samples."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    lengths = [len(rollout.completion.token_ids) for rollout in rollouts]
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
        "rollout/truncated": statistics.fmean(r.completion.finish_reason == "length" for r in rollouts),
    }
    for name in names:
        values = [rollout.rewards[name] for rollout in rollouts if name in rollout.rewards]
        metrics[f"reward/{name}"] = statistics.fmean(values)
    return metrics


def shape_metrics(batches: Sequence[PackedBatch]) -> dict[str, float]:
    """Return the shapes that reach the trainer in one step: the first thing to look at when a step is
    slow."""
    slots = sum(batch.num_slots for batch in batches)
    tokens = sum(batch.num_tokens for batch in batches)
    return {
        "input/micro_batches": float(len(batches)),
        "input/slots": float(slots),
        "input/tokens": float(tokens),
        "input/trained_tokens": float(sum(int(batch.loss_mask.sum()) for batch in batches)),
        "input/documents": float(sum(len(batch.sample_ids) for batch in batches)),
        "input/longest_document": float(max(max(batch.lengths) for batch in batches)),
        "input/fill": tokens / slots if slots else math.nan,
    }


GAP_LIMITS = {"float32": (1e-3, 0.1), "bfloat16": (0.05, 0.5), "float16": (0.02, 0.5)}
"""Mean |logprob_gap| of a first step, nats, at temperature 1 and above: beyond the first number there is a
warning, beyond the second the run stops. Two implementations that hold the same weights and differ in
rounding stay well below the first; other weights, another temperature or truncated logprobs are beyond it."""


def gap_complaint(metrics: Mapping[str, float], *, dtype: str, temperature: float) -> str | None:
    """Check the logprob_gap of a step whose rollouts came from the weights that it starts from.

    Args:
        metrics: logprob_gap_mean, _p99, _max and _k3 of the step, nats.
        temperature: of sampling; below 1 it magnifies rounding, so the limits are divided by it.

    Returns:
        A warning; None: the gap is small enough.

    Raises:
        EngineError: the mean is beyond the second limit, or not a number.
    """
    warn, stop = (limit / min(temperature, 1.0) for limit in GAP_LIMITS[dtype])
    mean = metrics["logprob_gap_mean"]
    if mean <= warn:
        return None
    figures = ", ".join(
        f"{name} {metrics[f'logprob_gap_{name}']:.2g}" for name in ("mean", "p99", "max", "k3")
    )
    text = (
        f"at the first step the engine's logprobs differ from the trainer's by {figures} nats, more than the "
        f"{warn:.2g} that rounding in {dtype} explains"
    )
    if mean <= stop:
        return f"{text}; algorithm.rollout_correction bounds what this does to the loss"
    raise EngineError(
        f"{text}: it does not hold the trainer's weights, or its logprobs are of another kind (another "
        "temperature, truncated by top_p or top_k). Compare a few completions by engine.name = 'hf'"
    )
