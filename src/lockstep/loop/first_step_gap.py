"""Check that engine and trainer hold the same weights: the logprob gap of a process's first step."""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.errors import EngineError

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
        f"values-differ: {text}: it does not hold the trainer's weights, or its logprobs are of another "
        "kind (another temperature, truncated by top_p or top_k). Compare a few completions by "
        "engine.name = 'hf'",
        name="logprob_gap_mean",
    )
