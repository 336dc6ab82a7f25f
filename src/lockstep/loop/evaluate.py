"""Held-out evaluation of an RL run: strict and lenient accuracy, and the mean reward."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from lockstep.config.rollout import SamplingConfig
from lockstep.errors import ConfigError
from lockstep.loop.build import OnlineParts
from lockstep.rollout.prompt_kinds import prompt_kinds
from lockstep.rollout.rewards import lenient_accuracy, lenient_correct
from lockstep.rollout.sampler import GroupSampler, SampleKey
from lockstep.schema.rollout import Prompt, RolloutGroup
from lockstep.transfer.buckets import serving

EVAL_STEP = -1
"""Used in place of the training step in a sample's seed, so every evaluation draws the same noise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """One pass over the held-out prompts."""

    strict_accuracy: float | None
    """Share that the task's verifier accepts; None for data without answers."""
    lenient_accuracy: float | None
    """The larger of first-number and last-number accuracy over the whole completion: blind to format and
    to length."""
    mean_reward: float
    num_prompts: int
    mean_completion_tokens: float
    max_tokens: int
    """Longest completion that was allowed."""
    groups: tuple[RolloutGroup, ...]
    lenient_by_kind: Mapping[str, float | None] = field(default_factory=dict)
    """lenient_accuracy of the prompts of each of `eval.kinds`; None where no numbers are asked for."""

    def as_dict(self) -> dict[str, float | int | None]:
        """The numbers, for summary.json and metrics.jsonl."""
        return {
            "strict_accuracy": self.strict_accuracy,
            "lenient_accuracy": self.lenient_accuracy,
            "mean_reward": self.mean_reward,
            "num_prompts": self.num_prompts,
            "mean_completion_tokens": self.mean_completion_tokens,
            "max_tokens": self.max_tokens,
        } | {f"lenient_accuracy/{name}": value for name, value in self.lenient_by_kind.items()}


def evaluate(parts: OnlineParts, *, max_tokens_factor: int = 1) -> Evaluation | None:
    """Sample every held-out prompt (greedy by default) with `max_tokens_factor` times the token limit; None
    when generation was aborted.

    Raises:
        ConfigError: no prompts are held out, as the run asks for no evaluation.
    """
    run = parts.run
    if not len(parts.eval_prompts):
        raise ConfigError(
            "nothing-to-do: there are no held-out prompts: eval.before and eval.after are false and "
            "eval.every = 0; set one of them to evaluate",
            setting="eval.every",
        )
    limit = (run.eval.max_tokens or run.rollout.sampling.max_tokens) * max_tokens_factor
    sampling = SamplingConfig.model_validate(
        run.rollout.sampling.model_dump() | {"max_tokens": limit, "temperature": run.eval.temperature}
    )
    sampler = GroupSampler(
        engine=parts.engine,
        rewards=parts.rewards,
        on_progress=parts.on_progress,
        ranks=parts.ranks,
        around=serving(parts.transfer, parts.ranks),
        reward_models=parts.reward_models,
    )
    sampled = sampler.groups(
        eval_prompts(parts),
        SampleKey(run_seed=run.seed, step=EVAL_STEP),
        sampling=sampling,
        group_size=run.eval.samples_per_prompt,
    )
    return None if sampled.aborted else score(parts, sampled.groups, max_tokens=limit)


def eval_prompts(parts: OnlineParts) -> Sequence[Prompt]:
    """The first `eval.num_prompts` held-out prompts, in their order."""
    return [parts.eval_prompts[i] for i in range(min(parts.run.eval.num_prompts, len(parts.eval_prompts)))]


def score(parts: OnlineParts, groups: Sequence[RolloutGroup], *, max_tokens: int) -> Evaluation:
    """Return accuracies and mean reward of finished rollouts of at most `max_tokens`; with several ranks each
    scores a share of them."""
    rollouts = [(group.prompt, rollout) for group in groups for rollout in group.rollouts]
    texts = [(prompt, rollout.trajectory.text or "") for prompt, rollout in rollouts]
    share = texts[parts.ranks.rank :: parts.ranks.world_size]
    everyone = parts.ranks.each(lambda: _mark(parts, share), _Marks, what="judging the evaluation")
    strict = [mark for marks, _ in everyone for mark in marks]
    lenient = [(kinds, mark) for _, marks in everyone for kinds, mark in marks]
    by_kind = {name: [mark for kinds, mark in lenient if name in kinds] for name in parts.run.eval.kinds}
    return Evaluation(
        strict_accuracy=statistics.fmean(strict) if strict else None,
        lenient_accuracy=_lenient(mark for _, mark in lenient),
        lenient_by_kind={name: _lenient(marks) for name, marks in by_kind.items()},
        mean_reward=statistics.fmean(rollout.reward for _, rollout in rollouts),
        num_prompts=len(groups),
        mean_completion_tokens=statistics.fmean(r.trajectory.policy_tokens for _, r in rollouts),
        max_tokens=max_tokens,
        groups=tuple(groups),
    )


_Marks = tuple[list[bool], list[tuple[list[str], tuple[bool, bool]]]]


def _lenient(marks: Iterable[tuple[bool, bool]]) -> float | None:
    found = list(marks)
    return lenient_accuracy(found) if found else None


def _mark(parts: OnlineParts, texts: Sequence[tuple[Prompt, str]]) -> _Marks:
    """Strict marks, and lenient marks with the kinds of their prompt, of the completions that have any."""
    rows = [(prompt.row, text) for prompt, text in texts]
    strict = [mark for row, text in rows if (mark := parts.rewards.strict(row, text)) is not None]
    parts.rewards.pop_counts()  # else the next training step would report them as its own
    marked = [
        (prompt, marks) for prompt, text in texts if (marks := lenient_correct(prompt.row, text)) is not None
    ]
    kinds = prompt_kinds((prompt for prompt, _ in marked), parts.run.eval.kinds)
    return strict, [(kinds[prompt.text], marks) for prompt, marks in marked]
