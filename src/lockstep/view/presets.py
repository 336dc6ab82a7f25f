"""The charts that matter for each kind of run, with what good and bad look like."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """A chart that a kind of run has first."""

    metrics: tuple[str, ...]
    """Names; the chart draws the first of them that the run has."""
    title: str
    hint: str
    """What good and bad look like, in one line."""

    def metric(self, names: Collection[str]) -> str:
        """Return the first of the metrics that is in `names`, or the first of all if none is."""
        return next((each for each in self.metrics if each in names), self.metrics[0])


_GRAD_NORM = Preset(
    metrics=("grad_norm",),
    title="Gradient norm",
    hint="Good: of one size, with few spikes. Bad: grows for many steps, or spikes before the loss jumps.",
)
_HELD_OUT_LOSS = Preset(
    metrics=("eval/loss",),
    title="Held-out loss",
    hint="Good: falls with the training loss. Bad: rises while the training loss falls; the run overfits.",
)
_LEARNING_RATE = Preset(
    metrics=("lr",),
    title="Learning rate",
    hint="Shows warmup and decay. Compare it with the step at which another curve changes.",
)
_TOKENS_PER_SECOND = Preset(
    metrics=("throughput/tokens_per_second",),
    title="Tokens per second",
    hint="Good: flat. Bad: falls step by step (longer completions, or a machine that slows down).",
)
_FILL = Preset(
    metrics=("input/fill",),
    title="Filled slots",
    hint="Good: above 0.9. Bad: low; the packs are mostly padding, so a larger token_budget or layout helps.",
)
_RL = (
    Preset(
        metrics=("reward/mean",),
        title="Reward",
        hint="Good: rises, then flattens. Bad: flat from the start (no signal), or rises while the held-out "
        "accuracy does not (the policy games the reward).",
    ),
    Preset(
        metrics=("eval/lenient_accuracy", "eval/strict_accuracy", "eval/mean_reward"),
        title="Held-out accuracy",
        hint="Good: follows the reward. Bad: stays or falls while the reward rises. It is greedy unless "
        "eval.temperature is set, so it may differ from the reward of samples.",
    ),
    Preset(
        metrics=("entropy",),
        title="Entropy",
        hint="Good: falls slowly. Bad: near 0 early (no exploration, groups without signal), or only rises "
        "(the policy dissolves).",
    ),
    Preset(
        metrics=("kl_ref", "kl_rollout", "logprob_gap_mean"),
        title="KL or gap",
        hint="KL to the reference: good when it grows slowly; bad when it jumps. Without a KL term, the gap "
        "between trainer and engine: good below 0.02 nats; bad when it grows.",
    ),
    Preset(
        metrics=("clip_fraction_high", "clip_fraction_low", "rollout_masked_share"),
        title="Clip share",
        hint="Good: 0 with one update per batch, else below 0.2. Bad: higher; most tokens have no gradient, "
        "so lower the learning rate or the number of updates.",
    ),
    Preset(
        metrics=("rollout/completion_tokens_mean",),
        title="Length",
        hint="Good: changes slowly, as the task needs. Bad: runs to the limit, or collapses to a few tokens.",
    ),
    Preset(
        metrics=("rollout/truncated",),
        title="Truncated share",
        hint="Good: near 0. Bad: high; those completions have no answer to reward, so raise max_tokens.",
    ),
    _GRAD_NORM,
)
_PPO = (
    *_RL,
    Preset(
        metrics=("value/explained_variance",),
        title="Explained variance",
        hint="Good: rises towards 1. Bad: stays below 0; the values are worse than a constant.",
    ),
    Preset(
        metrics=("value/loss",),
        title="Value loss",
        hint="Good: falls, then follows the spread of the returns. Bad: grows, or jumps with each batch.",
    ),
)
_SFT = (
    Preset(
        metrics=("nll", "loss"),
        title="Loss",
        hint="Good: falls fast, then slowly. Bad: flat (learning rate too low, or masked labels), or NaN.",
    ),
    _HELD_OUT_LOSS,
    Preset(
        metrics=("entropy",),
        title="Entropy",
        hint="Good: falls with the loss. Bad: far below the loss; the model is sure of what it gets wrong.",
    ),
    _GRAD_NORM,
    _LEARNING_RATE,
    Preset(
        metrics=("input/trained_tokens",),
        title="Trained tokens",
        hint="Good: of one size. Bad: far below input/tokens; most of the computation trains nothing.",
    ),
    _FILL,
    _TOKENS_PER_SECOND,
)
_PAIRS = (
    Preset(
        metrics=("accuracy",),
        title="Accuracy",
        hint="Share of pairs in the right order. Good: rises from 0.5. Bad: 1 after a few steps (the pairs "
        "are too easy, or the run overfits), or stays at 0.5.",
    ),
    Preset(
        metrics=("eval/accuracy",),
        title="Held-out accuracy",
        hint="Good: follows the accuracy. Bad: falls while the accuracy rises; the run overfits.",
    ),
    Preset(
        metrics=("reward_margin",),
        title="Margin",
        hint="Chosen minus rejected. Good: rises, then flattens. Bad: grows without end, or is negative.",
    ),
    Preset(
        metrics=("reward_chosen",),
        title="Chosen",
        hint="Good: stays or rises. Bad: falls with the rejected reward; the chosen answers get less likely.",
    ),
    Preset(
        metrics=("reward_rejected",),
        title="Rejected",
        hint="Good: falls below the chosen reward. Bad: falls without end.",
    ),
    Preset(
        metrics=("loss",),
        title="Loss",
        hint="Good: falls slowly. Bad: near 0 after a few steps, or NaN.",
    ),
    _HELD_OUT_LOSS,
    _GRAD_NORM,
)
_KTO_KL = Preset(
    metrics=("kl",),
    title="KL baseline",
    hint="Good: small, and grows slowly. Bad: jumps; the policy leaves the reference, so raise beta.",
)
_PRESETS = {"grpo": _RL, "ppo": _PPO, "sft": _SFT, "dpo": _PAIRS, "rm": _PAIRS}


def presets(kind: str, algorithm: str = "") -> tuple[Preset, ...]:
    """Return the charts of a kind of run, in order; those of RL for a kind that is not known."""
    charts = _PRESETS.get(kind, _RL)
    return (*charts, _KTO_KL) if algorithm == "kto" else charts
