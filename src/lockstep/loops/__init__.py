"""The loops, each on a page: `rl` and `offline`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Unpack, cast

from lockstep.config.load import check_resumable
from lockstep.config.run import GRPORun, OfflineRun, RunConfig, on_ranks
from lockstep.errors import ConfigError
from lockstep.loop.build import Builder
from lockstep.loop.distributed import connect_ranks
from lockstep.loop.epochs import with_steps
from lockstep.loop.preflight import preflight
from lockstep.loop.run import Start
from lockstep.loop.warm_start import after_warm_start, warm_start_of
from lockstep.loops import offline, rl
from lockstep.observe.run_dir import new_path
from lockstep.ranks.context import RankContext
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
    if finished is not None:
        return finished
    if run.warm_start is None:
        return rl.train(run, rewards=rewards, environment=environment, **start)
    check = partial(on_ranks, run)
    with connect_ranks(run.train.device, start.get("ranks"), check=check) as ranks:
        if environment is None:  # tools and template, which would else be looked at after the warm start
            with Builder(run, ranks=ranks) as build:
                build.environment(rewards=rewards)
        folder = ranks.broadcast(run.run_dir or new_path(run.name), Path, what="naming the run directory")
        warm_start = _train_warm_start(run, folder, ranks)
        if warm_start["outcome"] != "finished":
            return {**warm_start, "resume": f"the same command and --run-dir {folder}"}
        started: Start = {**start, "ranks": ranks}
        run = after_warm_start(run, folder)
        summary = rl.train(run, rewards=rewards, environment=environment, **started)
    return {**summary, "warm_start": warm_start}


def _train_warm_start(run: GRPORun, folder: Path, ranks: RankContext) -> dict[str, Any]:
    """Train the run that `warm_start` names, or go on with what the folder has of it; returns its summary."""
    sft = warm_start_of(run, folder)
    assert sft.run_dir is not None, "it has a folder in that of the run"
    begun = sft.run_dir if (sft.run_dir / "config.toml").is_file() else None
    if begun is not None:
        check_resumable(begun, sft)
    return train_offline(sft, resume=begun, ranks=ranks)


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
