"""`lockstep train`: start or resume a run.

lockstep train grpo --recipe demo --train.lr 1e-6
lockstep train sft --data.source conversations.jsonl
lockstep train run.toml
lockstep train --resume runs/demo-20260101-120000
lockstep train --restart runs/demo-20260101-120000
lockstep train sft --train.backend fsdp2 --ranks 2 --data.source conversations.jsonl
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import gc
import importlib
import json
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict

import tyro

from lockstep.cli.arguments import leading_word
from lockstep.cli.common_model import check_heads, default_ranks
from lockstep.cli.flags import STARTS, named_run, parse_flags
from lockstep.config.cluster import ClusterConfig
from lockstep.config.load import load_restarted, load_resumed, override, recipes
from lockstep.config.run import RunConfig
from lockstep.config.run_config import on_ranks
from lockstep.config.show import shown_config
from lockstep.errors import ConfigError, ModelError, TrainError
from lockstep.observe.files import check_writable, file_errors, write_atomic
from lockstep.observe.lock import SHARED_MEMORY, remove_left
from lockstep.observe.memory_plans import REPLANS, OutOfMemory, take_smaller
from lockstep.observe.run_dir import new_path
from lockstep.observe.run_history import way_on
from lockstep.observe.text import counted, echo
from lockstep.processes.child import gc_paused
from lockstep.processes.programs import COMMAND
from lockstep.ranks.environment import COPIES, TURN, WAIT_SECONDS, Recovery, in_launcher, recovery
from lockstep.ranks.in_memory_checkpoint import PLACE, remove_leftovers
from lockstep.ranks.launch import end_process
from lockstep.ranks.restart import RestartRules, restart_ranks
from lockstep.ranks.warm_spares import await_promotion

if TYPE_CHECKING:
    from lockstep.ranks.context import RankContext

USAGE = """usage: lockstep train grpo|ppo|sft|dpo|rm [--recipe NAME] [OPTIONS]
       lockstep train RUN.toml [OPTIONS]
       lockstep train --recipe NAME [OPTIONS]
       lockstep train --resume RUN_DIR [--checkpoint STEP] [OPTIONS]
       lockstep train --restart RUN_DIR [OPTIONS]

Recipes: {recipes}
Every setting is also a flag. `lockstep train grpo --help` lists the common ones with their values, and so
does --help after a recipe, a file, --resume or --restart; --help-all lists every setting. --print-config
prints the resolved TOML and exits; --print-config=short prints only what differs from the defaults.
--restart runs the config in a folder again from the first step, and moves earlier output to
RUN_DIR/before-restart-N."""


EXIT = {"finished": 0, "failed": 1, "interrupted": 130}
TERMINATED = 143
"""Exit status of a run that SIGTERM interrupted: 128 + its number, as for Ctrl-C."""


class General(TypedDict):
    """Flags of `lockstep train` that are not settings of the run."""

    recipe: Annotated[str | None, tyro.conf.arg(help="Start from this recipe.", metavar="NAME")]
    resume: Annotated[Path | None, tyro.conf.arg(help="Continue the run in this folder.", metavar="RUN_DIR")]
    checkpoint_step: Annotated[
        int | None,
        tyro.conf.arg(
            name="checkpoint",
            help="With --resume: step of the checkpoint to resume from, by default the last one.",
            metavar="STEP",
        ),
    ]
    restart: Annotated[
        Path | None,
        tyro.conf.arg(
            help="Run the config in this folder again, from the first step. Earlier output is moved to "
            "RUN_DIR/before-restart-N.",
            metavar="RUN_DIR",
        ),
    ]
    json: Annotated[Path | None, tyro.conf.arg(help="Write the run's summary to this file.", metavar="FILE")]
    print_config: Annotated[
        bool,
        tyro.conf.arg(
            help="Print the resolved config and exit; with --print-config=short, print only what differs "
            "from the defaults."
        ),
    ]
    ranks: Annotated[
        int | Literal["auto"] | None,
        tyro.conf.arg(
            help="Number of processes that train together on this machine. auto, the default: one "
            "for each visible GPU, or as many as the resumed run had. Leave it out under torchrun and "
            "deepspeed, which start the processes.",
            metavar="N",
        ),
    ]
    provider: Annotated[
        Literal["none", "local", "auto"] | None,
        tyro.conf.arg(
            name="cluster",
            help="Run the ranks under Ray, as set in [cluster]. local: start Ray on this machine. auto: join "
            "the cluster at RAY_ADDRESS, or the one that runs on this machine. none: ignore [cluster].",
        ),
    ]
    rank_timeout: Annotated[
        float | None,
        tyro.conf.arg(
            help="Seconds that a rank waits for another before the run fails, by default 1800.",
            metavar="SECONDS",
        ),
    ]


class Start(TypedDict):
    """Arguments of `train_online` and `train_offline`: how to start the run."""

    resume: Path | None
    checkpoint: int | None
    restart: bool
    ranks: RankContext


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainCommand:
    """A parsed command line."""

    run: RunConfig
    resume: Path | None
    checkpoint: int | None
    restart: bool = False
    """Begin the run in `run.run_dir` again."""
    json: Path | None
    print_config: Literal["whole", "short"] | None
    ranks: int | None = None
    """None: as many as there are GPUs."""
    rank_timeout: float | None = None
    cluster: str | None = None
    """The provider that starts the ranks; None: --ranks."""


def main(argv: Sequence[str]) -> int:
    """Return the exit status: 0 if the run reached its last step, 130 after Ctrl-C, 143 after SIGTERM."""
    if not argv or argv[0] in ("-h", "--help"):
        echo(USAGE.format(recipes=", ".join(recipes()) or "none"))
        return 0 if argv else 2
    command = parse(argv)
    if command.print_config is not None:
        echo(shown_config(command.run, short=command.print_config == "short"), end="")
        return 0
    if command.run.epochs is not None:
        from lockstep.loop.epochs import with_steps

        command = dataclasses.replace(command, run=with_steps(command.run))
    if not in_launcher():
        _remove_left()
    if in_launcher():
        _check_launcher(command)
    elif command.cluster is not None:
        check_cluster(command)
        if not _is_finished(command, _cluster_config(command).ranks):
            return launch(command, argv)
    else:
        ranks = default_ranks(command.run, resume=command.resume) if command.ranks is None else command.ranks
        command = dataclasses.replace(command, ranks=ranks)
        on_ranks(command.run, ranks)
        if ranks > 1 and not _is_finished(command, ranks):
            return launch(command, argv)
    try:
        summary = start(command)
    except Exception as error:
        _start_over(error, argv)
        raise
    if os.environ.get("RANK", "0") == "0":
        if command.json is not None:
            with file_errors(command.json, TrainError, "write"):
                write_atomic(command.json, json.dumps(summary, indent=2, default=str) + "\n")
        echo(verdict(summary))
    status = TERMINATED if summary.get("signal") == "SIGTERM" else EXIT[summary["outcome"]]
    if in_launcher() and summary["outcome"] == "interrupted":
        end_process(status)  # a thread may still be in gloo, waiting for a rank that has gone
    return status


def parse(argv: Sequence[str]) -> TrainCommand:
    """Parse and check a command line down to the last setting, without loading torch.

    Raises:
        ConfigError: a flag or setting is wrong.
    """
    source, flags = leading_word(argv)
    short, flags = _print_config(flags)
    early = _early(flags)
    run = _base_run(source, early)
    origin = _origin(source, early)
    defaults = "" if origin == run.kind else f" Defaults are those of {origin}."
    values, overrides = parse_flags(
        run,
        flags,
        general=General,
        prog=f"lockstep train {source or run.kind}",
        description=f"Train with {run.kind}.{defaults}",
    )
    if early.resume is not None:
        run = load_resumed(early.resume, overrides)
    elif early.restart is not None:
        run = load_restarted(early.restart, overrides)
    else:
        run = override(run, overrides, origin=f"lockstep train {origin}")
    if values["rank_timeout"] is not None and not values["rank_timeout"] > 0:
        raise ConfigError(f"out-of-range: --rank-timeout {values['rank_timeout']:g} must be above 0 seconds")
    check_writable(values["json"])
    if values["provider"] == "none":  # as if the file had no [cluster]
        run = run.model_copy(update={"cluster": None})
    return TrainCommand(
        run=run,
        resume=early.resume,
        checkpoint=early.checkpoint,
        restart=early.restart is not None,
        json=values["json"],
        print_config=("short" if short else "whole") if values["print_config"] else None,
        ranks=None if values["ranks"] == "auto" else values["ranks"],
        rank_timeout=values["rank_timeout"],
        cluster=None if values["provider"] == "none" else values["provider"],
    )


def launch(command: TrainCommand, argv: Sequence[str]) -> int:
    """Start the ranks of `--ranks N` or `--cluster PROVIDER`, each by the same command line, and wait for
    them; the exit status.

    Their output, by rank, is under logs/ranks/ of the run directory.
    """
    with contextlib.suppress(ModelError):  # it is not on this machine yet: the ranks look at it
        check_heads(command.run)
    folder = command.resume or command.run.run_dir or new_path(command.run.name)
    flags = [] if command.resume or command.run.run_dir else ["--run-dir", str(folder)]
    started = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    log_dir, own = folder / "logs" / "ranks" / started, ["train", *argv, *flags]
    watch = command.rank_timeout or WAIT_SECONDS
    again = f"--ranks {command.ranks}" if command.cluster is None else f"--cluster {command.cluster}"
    restarts = _restart_rules(command, run_dir=folder, flags=again)
    if command.cluster is not None:
        status = _launch_on_cluster(command, own, log_dir=log_dir, restarts=restarts)
    else:
        assert command.ranks is not None
        status = restart_ranks(own, ranks=command.ranks, log_dir=log_dir, watch=watch, rules=restarts)
    _remove_left()
    if status == 2 and not (folder / "config.toml").exists():  # the message has been shown: nothing has begun
        _remove_logs(log_dir, folder)
    if status in (EXIT["interrupted"], TERMINATED) and not (folder / "summary.json").exists():
        resume = "nothing had begun: start it again with the same command"
        if (folder / "config.toml").exists():
            resume = f"resume with: {way_on(folder, again)}"
        echo(f"train: interrupted, stopped at once, {folder}, {resume}")
    return status


def _start_over(error: Exception, argv: Sequence[str]) -> None:
    """Replace this process by one that goes on with a smaller memory plan, if that is what the run can do
    about the error. Several ranks leave that to their launcher. It is a new program, because only the end of
    the failed one certainly frees its GPU memory."""
    found, before = OutOfMemory.of(error), recovery()
    is_command = sys.argv[1:][-1 - len(argv) :] == ["train", *argv]  # else a program of the user's called it
    if found is None or os.environ.get("WORLD_SIZE", "1") != "1" or not is_command:
        return
    run_dir = Path(found.run_dir).absolute()
    line = take_smaller(run_dir, failed=found.step)
    if line is None:
        return
    echo(f"lockstep: {line}", file=sys.stderr)
    again = Recovery(
        number=1 if before is None else before.number + 1,
        most=REPLANS,
        run_dir=str(run_dir),
        died=time.time(),
    )
    sys.stdout.flush()
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):  # the folder's own is closed already
            os.set_inheritable(int(name), int(name) <= 2)
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **again.environment()})


def _remove_left() -> None:
    """Remove what killed runs left in shared memory."""
    if SHARED_MEMORY.is_dir():
        remove_left(SHARED_MEMORY)
        remove_leftovers(SHARED_MEMORY)


def _remove_logs(log_dir: Path, run_dir: Path) -> None:
    """Remove the ranks' logs, and the folders above them up to the run directory that are empty then."""
    shutil.rmtree(log_dir, ignore_errors=True)
    for folder in log_dir.parents:
        if not folder.is_relative_to(run_dir) or not folder.is_dir() or any(folder.iterdir()):
            return
        folder.rmdir()


def _restart_rules(command: TrainCommand, *, run_dir: Path, flags: str) -> RestartRules:
    """Return the rules for restarting ranks that have died or run out of memory."""
    config = command.run.cluster or ClusterConfig()
    return RestartRules(
        copy_dir=(config.copy_dir or PLACE) if config.peer_copy else None,
        max_restarts=config.max_restarts,
        run_dir=run_dir.absolute(),
        each_node=command.cluster is not None and config.nodes > 1,
        warm_spares=config.warm_spares,
        flags=flags,
        restart=command.restart,
    )


def check_cluster(command: TrainCommand) -> None:
    """Raise ConfigError if the ranks that [cluster] says cannot train this run."""
    on_ranks(command.run, _cluster_config(command).ranks)


def _cluster_config(command: TrainCommand) -> ClusterConfig:
    """Return [cluster]. Raises ConfigError if --ranks contradicts it."""
    config = command.run.cluster or ClusterConfig()
    if command.ranks not in (None, config.ranks):
        raise ConfigError(
            f"contradiction: --ranks {command.ranks} with a cluster: [cluster] says {config.nodes} * "
            f"{config.per_node} = {config.ranks} ranks; leave --ranks out, or set cluster.nodes, "
            "cluster.gpus or cluster.slots"
        )
    return config


def _launch_on_cluster(
    command: TrainCommand, argv: Sequence[str], *, log_dir: Path, restarts: RestartRules
) -> int:
    from lockstep.cluster.jobs import launch_train

    assert command.cluster is not None
    config = _cluster_config(command)
    watch, command_line = command.rank_timeout or WAIT_SECONDS, ["-m", COMMAND, *argv]
    return launch_train(
        command_line, config, provider=command.cluster, log_dir=log_dir, watch=watch, restarts=restarts
    )


def _is_finished(command: TrainCommand, ranks: int) -> bool:
    """Return whether the run has finished. Raises ConfigError, DataError or ModelError if it cannot start."""
    from lockstep.loop.preflight import preflight

    finished = preflight(
        on_ranks(command.run, ranks),
        resume=command.resume,
        checkpoint=command.checkpoint,
        restart=command.restart,
    )
    return finished is not None


def _check_launcher(command: TrainCommand) -> None:
    started = int(os.environ["WORLD_SIZE"])
    if command.ranks not in (None, started):
        raise ConfigError(
            f"contradiction: --ranks {command.ranks}, but {started} ranks were started; with torchrun and "
            "deepspeed leave --ranks out, or pass the same number"
        )
    on_ranks(command.run, started)
    if command.run.cluster is not None and command.run.cluster.peer_copy and COPIES not in os.environ:
        raise ConfigError(
            "unsupported-combination: cluster.peer_copy = true under torchrun or deepspeed: only "
            "Lockstep's launcher can restart ranks; use --ranks N or --cluster, or set cluster.peer_copy = "
            "false"
        )


def start(command: TrainCommand) -> Mapping[str, Any]:
    """Run it; return the run's summary. Errors that need no torch are raised before torch is imported."""
    from lockstep.loop.interrupt import Interrupted
    from lockstep.loop.preflight import preflight

    if TURN in os.environ:
        _import_loop()
        await_promotion()
    restart = recovery()
    if restart is not None and restart.resume is not None and command.resume is None:
        command = dataclasses.replace(command, resume=restart.resume, restart=False)

    started = int(os.environ.get("WORLD_SIZE", "1"))
    summary = preflight(
        on_ranks(command.run, started),
        resume=command.resume,
        checkpoint=command.checkpoint,
        restart=command.restart,
    )
    if summary is not None:
        if os.environ.get("RANK", "0") == "0":
            echo(f"nothing to do: all {command.run.steps} steps are done; --steps N goes on to more")
        return summary
    _import_loop()
    from lockstep.loop.distributed import connect_ranks

    if restart is not None:
        restart.mark("import")
    try:
        check = partial(on_ranks, command.run)
        with connect_ranks(command.run.train.device, check=check, seconds=command.rank_timeout) as ranks:
            return _train(command, ranks)
    except Interrupted as stop:
        return stop.summary


def _import_loop() -> None:
    with gc_paused():
        importlib.import_module("lockstep.loop.distributed")
        importlib.import_module("lockstep.loops")
    # Imported modules live until the end: the garbage collector need not visit them again.
    gc.freeze()


def _train(command: TrainCommand, ranks: RankContext) -> Mapping[str, Any]:
    run, how = (
        command.run,
        Start(resume=command.resume, checkpoint=command.checkpoint, restart=command.restart, ranks=ranks),
    )
    from lockstep.loops import train

    return train(run, **how)


def verdict(summary: Mapping[str, Any]) -> str:
    """Return the last line: outcome, steps, wall time, held-out results, run directory."""
    parts = [str(summary["outcome"])]
    if "steps" in summary:
        parts.append(counted(summary["steps"], "step"))
    parts.append(f"{summary['wall_seconds']:.0f} s")
    if "warm_start_seconds" in summary:
        parts.append(f"{summary['evaluation_seconds']:.0f} s of them for evaluations")
        parts.append(f"after {summary['warm_start_seconds']:.0f} s of warm start")
    before, after = summary.get("eval_before") or {}, summary.get("eval_after") or {}
    budgets = before.get("max_tokens"), after.get("max_tokens")
    for key in ("strict_accuracy", "lenient_accuracy", "mean_reward", "loss"):
        if after.get(key) is not None:
            old = f"{before[key]:z.3f} -> " if before.get(key) is not None else ""
            parts.append(f"{key.replace('_', ' ')} {old}{after[key]:z.3f}")
    if None not in budgets and budgets[0] != budgets[1]:
        parts.append(f"evaluated with at most {budgets[0]} tokens before, {budgets[1]} after")
    parts.append(str(summary["run_dir"]))
    if "resume" in summary:
        parts.append(f"resume with: {summary['resume']}")
    return "train: " + ", ".join(parts)


def _print_config(flags: Sequence[str]) -> tuple[bool, list[str]]:
    """Whether the config is to be printed short, and the flags with --print-config as a plain boolean.

    Raises:
        ConfigError: --print-config has another value.
    """
    words, short = list(flags), False
    for place, word in reversed(list(enumerate(words))):
        flag, equals, value = word.partition("=")
        if flag.replace("_", "-") != "--print-config":
            continue
        follows = not equals and words[place + 1 : place + 2]
        value = follows[0] if follows and not follows[0].startswith("-") else value
        if value == "short":
            short = True
            words[place : place + (1 if equals else 2)] = ["--print-config"]
        elif value and value.lower() not in ("true", "false"):
            raise ConfigError(
                f"wrong-type: --print-config {value[:200]!r}: leave the value out to print the whole config, "
                "or give --print-config=short for what differs from the defaults"
            )
    return short, words


def _early(flags: Sequence[str]) -> argparse.Namespace:
    """Parse the flags that decide the defaults of the others."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--recipe")
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--restart", type=Path)
    parser.add_argument("--checkpoint", type=int)
    return parser.parse_known_args(flags)[0]


def _base_run(source: str | None, early: argparse.Namespace) -> RunConfig:
    if early.resume is not None:
        if source is not None or early.recipe is not None:
            raise ConfigError(
                "contradiction: --resume reads the run's config; leave the recipe, file or kind out"
            )
        if early.restart is not None:
            raise ConfigError(
                "contradiction: --resume continues a run, but --restart starts it over; pass only one of them"
            )
        return load_resumed(early.resume)
    if early.restart is not None and (source is not None or early.recipe is not None):
        raise ConfigError(
            "contradiction: --restart reads the run's config; leave the recipe, file or kind out"
        )
    if early.checkpoint is not None:
        raise ConfigError(f"missing-setting: --checkpoint {early.checkpoint} needs --resume RUN_DIR")
    if early.restart is not None:
        return load_restarted(early.restart)
    nothing = f"there is nothing to train; begin with {STARTS}, or give --recipe NAME or --resume RUN_DIR"
    return named_run(source, early.recipe, nothing=nothing)


def _origin(source: str | None, early: argparse.Namespace) -> str:
    if early.resume is not None:
        return f"--resume {early.resume}"
    if early.restart is not None:
        return f"--restart {early.restart}"
    return " ".join(word for word in (source, early.recipe and f"--recipe {early.recipe}") if word)
