"""The prompts of a run's config, and what an environment of the user's takes the place of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any

from lockstep.config.run import GRPORun
from lockstep.data.held_out import HoldOut, evaluates, load_train_and_held_out
from lockstep.data.prompts import FixedPrompts, PromptSet
from lockstep.data.row_tools import RowTools
from lockstep.errors import ConfigError, together
from lockstep.loop.preflight import faults
from lockstep.models.load import OpenedModel, check_positions
from lockstep.rollout.environment import Environment
from lockstep.rollout.prompt_kinds import prompt_kinds
from lockstep.rollout.rewards import RewardSet


def check_own_environment(
    own: Environment, config: GRPORun, *, rewards: Sequence[Callable[..., Any]]
) -> None:
    """Raises ConfigError: an environment that takes the place of the config's does not fit the rest."""
    if rewards:
        raise ConfigError(
            "contradiction: both rewards and environment are given, but an environment computes "
            "its own scores; leave rewards out"
        )
    if evaluates(config) and not len(own.held_out(config.eval.num_prompts)):
        raise ConfigError(
            f"nothing-to-do: eval.before = {config.eval.before}, eval.every = {config.eval.every}, "
            f"eval.after = {config.eval.after}, but held_out of {type(own).__name__} returned no "
            "tasks; return some tasks from it, or turn evaluations off"
        )
    if config.reward_model is not None:
        raise ConfigError(
            f"no-effect: reward_model.name = {config.reward_model.name!r} only scores samples of "
            "the config's environment, not of yours; leave it out, or score in your environment"
        )


def load_prompts(
    run: GRPORun,
    model: OpenedModel,
    rewards: RewardSet,
    *,
    hold_out: HoldOut | None,
    tools: RowTools | None = None,
) -> tuple[PromptSet, FixedPrompts]:
    """Load what there is to learn from; whatever of it, the config and the rewards do not fit each other is
    refused before weights are read. All such faults are reported together."""
    loaded: list[tuple[PromptSet, FixedPrompts]] = []

    def load() -> None:
        both = load_train_and_held_out(
            run,
            tokenizer=model.tokenizer,
            vocab_size=model.text.vocab_size,
            hold_out=hold_out,
            tools=tools,
        )
        for prompts in both:
            if isinstance(prompts, FixedPrompts) and len(prompts):
                rewards.check_row(prompts[0].row)
                rewards.check_rows(prompts.first)
        prompt_kinds(islice(both[1], run.eval.num_prompts), run.eval.kinds)  # while a search can be refused
        loaded.append(both)

    longest = run.longest_unit
    setting = f"data.max_prompt_tokens + {run.rollout.length_setting}"
    found = faults([partial(check_positions, model, longest, setting=setting), load])
    if found:
        raise together(found)
    return loaded[0]
