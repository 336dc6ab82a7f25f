"""The loops, each on a page: `rl` and `offline`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Unpack, cast

from lockstep.config.run import GRPORun, OfflineRun, RunConfig, on_ranks
from lockstep.errors import ConfigError
from lockstep.loop.epochs import with_steps
from lockstep.loop.preflight import preflight
from lockstep.loop.run import Start
from lockstep.loops import offline, rl
from lockstep.rollout.environment import Environment


def train_online(
    run: GRPORun,
    *,
    rewards: Sequence[Callable[..., Any]] = (),
    environment: Environment | None = None,
    **start: Unpack[Start],
) -> dict[str, Any]:
    """Train a policy with RL, from the start or from a checkpoint, and return the summary that is written to
    summary.json: outcome, steps, run_dir, wall_seconds, trained_tokens, eval_before, eval_after.

    Args:
        rewards: Python callables that replace `run.rewards`, called as f(prompt=, completion=, row=) or, with
            the samples of one prompt, as f(prompts=, completions=, **columns).
        environment: takes the place of the config's data and rewards.
        resume: (Path) a run directory to go on from; `run` is its config.
        checkpoint: (int) the step of the checkpoint to go on from; by default the last.
        restart: (bool) begin the run in `run.run_dir` again; what it has written is kept beside.
        ranks: (RankContext) every one of them makes this call; by default those of the launcher that started
            this process, if one did.

    Raises:
        ConfigError, DataError, ModelError: the run cannot start; all that can be known beforehand is told
            together, and the folder stays as it was.
        LockstepError: it failed on the way; what was trained is saved.
    """
    own_data = environment is not None
    if own_data and run.epochs is not None:
        raise ConfigError(
            f"missing-setting: epochs = {run.epochs:g} with an environment, whose number of tasks is not "
            "known; set steps instead",
            setting="steps",
        )
    run = with_steps(run)
    finished = _check(run, start, own_rewards=bool(rewards) or own_data, own_data=own_data)
    return rl.train(run, rewards=rewards, environment=environment, **start) if finished is None else finished


def train_offline(run: OfflineRun, **start: Unpack[Start]) -> dict[str, Any]:
    """Train on documents: SFT, DPO and its successors, KTO, reward models. See `train_online` for the summary
    and the arguments of `start`."""
    run = with_steps(run)
    finished = _check(run, start)
    return offline.train(run, **start) if finished is None else finished


def train(run: RunConfig, **how: Any) -> dict[str, Any]:
    """Train a run of any kind: `train_online` or `train_offline`."""
    if run.online:
        return train_online(cast(GRPORun, run), **how)
    return train_offline(cast(OfflineRun, run), **how)


def _check(
    run: RunConfig, start: Start, *, own_rewards: bool = False, own_data: bool = False
) -> dict[str, Any] | None:
    """The summary of a run that is already finished. Raises what `preflight` raises."""
    ranks = start.get("ranks")
    started = int(os.environ.get("WORLD_SIZE", "1")) if ranks is None else ranks.world_size
    return preflight(
        on_ranks(run, started),
        resume=start.get("resume"),
        checkpoint=start.get("checkpoint"),
        restart=start.get("restart", False),
        own_rewards=own_rewards,
        own_data=own_data,
    )
