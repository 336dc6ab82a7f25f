"""Held-out evaluation of an RL run: strict and lenient accuracy, and the mean reward."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from lockstep.config.rollout import SamplingConfig
from lockstep.config.run import GRPORun
from lockstep.errors import ConfigError
from lockstep.loop.rollout_rows import rollout_rows
from lockstep.loop.rollouts import LoopHooks, RolloutEngine
from lockstep.loop.run import Evaluate, EvaluationResult, Run
from lockstep.ranks.context import RankContext
from lockstep.rollout.environment import Environment
from lockstep.rollout.prompt_kinds import prompt_kinds
from lockstep.rollout.rewards import lenient_accuracy, lenient_correct
from lockstep.rollout.sampler import SampleKey, sampling_params, trajectory_rules
from lockstep.schema.rollout import Prompt, RolloutGroup

EVAL_STEP = -1
"""Used in place of the training step in a sample's seed, so every evaluation draws the same noise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """One pass over the held-out prompts. `print` shows it in three lines."""

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
    groups: tuple[RolloutGroup, ...] = field(repr=False)
    lenient_by_kind: Mapping[str, float | None] = field(default_factory=dict)
    """lenient_accuracy of the prompts of each of `eval.kinds`; None where no numbers are asked for."""

    def __str__(self) -> str:
        """Return the accuracies and the reward; the numbers of prompts and samples; the lengths."""
        shares = {"strict accuracy": self.strict_accuracy, "lenient accuracy": self.lenient_accuracy}
        shares |= {f"lenient accuracy of {name}": value for name, value in self.lenient_by_kind.items()}
        shares["mean reward"] = self.mean_reward
        reasons = [r.trajectory.finish_reason for group in self.groups for r in group.rollouts]
        return "\n".join(
            [
                ", ".join(f"{name} {value:z.3f}" for name, value in shares.items() if value is not None),
                f"{self.num_prompts} prompts, {len(reasons)} samples",
                f"{self.mean_completion_tokens:.1f} tokens on average, {reasons.count('length')} samples cut "
                f"off at {self.max_tokens} tokens",
            ]
        )

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


def evaluate(
    engine: RolloutEngine,
    environment: Environment,
    config: GRPORun,
    *,
    hooks: LoopHooks,
    max_tokens_factor: int = 1,
) -> Evaluation | None:
    """Sample every held-out task (greedy by default) with `max_tokens_factor` times the token limit; None
    when generation was aborted.

    Raises:
        ConfigError: nothing is held out, as the run asks for no evaluation.
    """
    tasks = environment.held_out(config.eval.num_prompts)
    if not len(tasks):
        raise ConfigError(
            "nothing-to-do: there are no held-out prompts. None are held out if eval.before and eval.after "
            "are false and eval.every = 0; set one of the three to evaluate",
            setting="eval.every",
        )
    limit, trajectory_limit = config.eval_tokens(max_tokens_factor)
    sampling = SamplingConfig.model_validate(
        config.rollout.sampling.model_dump() | {"max_tokens": limit, "temperature": config.eval.temperature}
    )
    rules = replace(
        trajectory_rules(config.rollout), sampling=sampling_params(sampling), max_tokens=trajectory_limit
    )
    with hooks.spans("evaluate"):
        sampled = engine.sampler(environment, on_progress=hooks.on_progress).groups(
            tasks,
            SampleKey(run_seed=config.seed, step=EVAL_STEP),
            sampling=rules,
            group_size=config.eval.samples_per_prompt,
        )
        if sampled.aborted:
            return None
        return score(
            sampled.groups, environment, kinds=config.eval.kinds, ranks=engine.ranks, max_tokens=limit
        )


def evaluation_of(run: Run, engine: RolloutEngine, environment: Environment) -> Evaluate:
    """Return what a run calls for each of its evaluations."""
    config = cast(GRPORun, run.config)

    def make(name: str, done: int) -> EvaluationResult | None:
        factor = config.eval.before_max_tokens_factor if name == "before" else 1
        environment.begin(f"evaluation-{name}-{done:06d}")
        evaluation = evaluate(
            engine,
            environment,
            config,
            hooks=LoopHooks(spans=run.spans, on_progress=run.progress),
            max_tokens_factor=factor,
        )
        if evaluation is None:
            return None
        skip = config.rollout.sampling.skip_special_tokens
        rows = rollout_rows(done, evaluation.groups, skip_special_tokens=skip)
        return EvaluationResult(numbers=evaluation.as_dict(), rows=rows, budget_factor=factor)

    return make


def score(
    groups: Sequence[RolloutGroup],
    environment: Environment,
    *,
    kinds: Mapping[str, str],
    ranks: RankContext,
    max_tokens: int,
) -> Evaluation:
    """Return accuracies and mean reward of finished rollouts of at most `max_tokens`; with several ranks each
    scores a share of them. kinds: see EvalConfig."""
    rollouts = [(group.prompt, rollout) for group in groups for rollout in group.rollouts]
    texts = [(prompt, rollout.trajectory.text or "") for prompt, rollout in rollouts]
    share = texts[ranks.rank :: ranks.world_size]
    everyone = ranks.gather_results(
        lambda: _mark(environment, share, kinds), _Marks, what="judging the evaluation"
    )
    strict = [mark for marks, _ in everyone for mark in marks]
    lenient = [(names, mark) for _, marks in everyone for names, mark in marks]
    by_kind = {name: [mark for names, mark in lenient if name in names] for name in kinds}
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


def _mark(environment: Environment, texts: Sequence[tuple[Prompt, str]], kinds: Mapping[str, str]) -> _Marks:
    """Strict marks, and lenient marks with the kinds of their prompt, of the completions that have any."""
    correct = ((environment.is_correct(prompt, text)) for prompt, text in texts)
    strict = [mark for mark in correct if mark is not None]
    environment.pop_counts()  # else the next training step would report them as its own
    marked = [
        (prompt, marks) for prompt, text in texts if (marks := lenient_correct(prompt.row, text)) is not None
    ]
    of_prompt = prompt_kinds((prompt for prompt, _ in marked), kinds)
    return strict, [(of_prompt[prompt.text], marks) for prompt, marks in marked]
