"""Restart all ranks after one has died, from copies of their state in host memory; and after one has run out
of memory although the run's memory plan fits, with a smaller plan.

    rules = RestartRules(copy_dir=Path("/dev/shm"), max_restarts=3, run_dir=Path("runs/a")) status =
    launch_with_restarts(lambda logs: Launch(command, ranks=2, log_dir=logs), rules, log_dir=Path("logs"))

The processes are replaced and only the state survives: a death leaves the CUDA contexts, NCCL communicators
and compiled graphs of the other ranks in an unknown state, so nothing is rebuilt inside them. Each start has
its own store and secret. Ranks are restarted after a death from outside: a signal, a hang, a lost node. An
error that a rank raises itself would happen again, so it ends the run, unless it is out of memory and the
run's manifest has a smaller plan (lockstep.observe.memory_plans).
"""

from __future__ import annotations

import functools
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import LockstepError
from lockstep.observe.memory_plans import take_smaller
from lockstep.observe.run_history import way_on
from lockstep.observe.text import echo
from lockstep.processes.programs import COMMAND, python
from lockstep.ranks.environment import COPIES, COPY_PLACE, Recovery
from lockstep.ranks.in_memory_checkpoint import committed_steps, copy_folder
from lockstep.ranks.launch import SPARE_LOGS, Launch, LaunchInterrupted, check_launch, signals_raised
from lockstep.ranks.warm_spares import WarmSpares


@dataclass(frozen=True, kw_only=True, slots=True)
class RestartRules:
    """What a launch may do about a death."""

    copy_dir: Path | None
    """Parent of the folder for the copies; None: there are none, and a death from outside ends the run."""
    max_restarts: int
    """After deaths from outside."""
    run_dir: Path
    """The run's folder, which need not exist yet."""
    each_node: bool = False
    """Whether each node makes that folder in its own memory; False: the launcher makes it, on this
    machine."""
    warm_spares: bool = True
    """Whether to keep a spare process per rank."""
    flags: str = ""
    """Flags of the command that resumes the run, for messages."""
    restart: bool = False
    """Whether the ranks start an existing run over (--restart); then it has begun once they rewrite its
    config."""


def restart_ranks(
    argv: Sequence[str], *, ranks: int, log_dir: Path, watch: float, rules: RestartRules
) -> int:
    """Run `python -m lockstep ARGV` as lockstep.ranks.launch.launch_ranks does, gracefully and watched, and
    restart the ranks after a death."""
    check_launch(ranks, log_dir)
    command = [*python(COMMAND, unbuffered=True), *argv]

    def make(logs: Path) -> Launch:
        return Launch(command, ranks=ranks, log_dir=logs, graceful=True, watch=watch)

    return launch_with_restarts(make, rules, log_dir=log_dir)


def launch_with_restarts(make: Callable[[Path], Launch], rules: RestartRules, *, log_dir: Path) -> int:
    """Launch ranks, and relaunch them after a death, up to `max_restarts` times, and after they ran out of
    memory, as often as the run has a smaller plan.

    Args:
        make: makes a launch of all ranks, given the folder for its logs.
        log_dir: logs of the first launch; those of restart n go to `NAME-restart-n` beside it.

    Returns:
        As lockstep.ranks.launch.launch_ranks.

    Raises:
        ConfigError: there is no room for the copies.
    """
    with signals_raised():
        try:
            if rules.copy_dir is None or rules.each_node:
                return _generations(make, rules, None, log_dir)
            try:
                with copy_folder(rules.copy_dir) as copies, WarmSpares(copies) as spares:
                    return _generations(make, rules, spares, log_dir)
            finally:
                shutil.rmtree(log_dir.with_name(SPARE_LOGS), ignore_errors=True)
        except LaunchInterrupted as interrupted:  # between two generations
            return 128 + interrupted.number


def _generations(
    make: Callable[[Path], Launch], rules: RestartRules, spares: WarmSpares | None, log_dir: Path
) -> int:
    copies = None if spares is None else spares.folder
    recovery: Recovery | None = None
    deaths = 0
    config = rules.run_dir / "config.toml"
    before = _version(config) if rules.restart else None
    while True:
        number = 0 if recovery is None else recovery.number
        logs = log_dir if recovery is None else log_dir.with_name(f"{log_dir.name}-restart-{number}")
        logs.mkdir(parents=True, exist_ok=True)
        launch = make(logs)
        launch.restarts, launch.spares = rules.copy_dir is not None, spares
        launch.refills = rules.warm_spares and launch.restarts and deaths < rules.max_restarts
        launch.smaller_plan = functools.partial(_take_smaller, rules, copies, launch.ranks)
        if copies is not None:
            launch.extra = {COPIES: str(copies)}
        elif rules.copy_dir is not None:
            launch.extra = {COPY_PLACE: str(rules.copy_dir)}
        if recovery is not None:
            recovery.mark("begin again")
            launch.extra |= recovery.environment()
        try:
            status = launch.run(None)
        except LockstepError:
            if recovery is not None:
                _say_how_to_resume(rules)
            raise
        if launch.death is None:
            return status
        if deaths == rules.max_restarts and not launch.replanned:
            launch.explain_failure()
            echo(f"lockstep: cluster.max_restarts = {deaths}: the ranks are not restarted", file=sys.stderr)
            return status
        deaths += not launch.replanned
        began = _version(config) not in (None, before)
        recovery = Recovery(
            number=number + 1,
            most=rules.max_restarts * (rules.copy_dir is not None) + number + 1 - deaths,
            run_dir=str(rules.run_dir) if began else None,
            died=launch.died,
        )
        recovery.phases["end the others"] = time.time() - launch.died
        if launch.replanned:
            echo(f"lockstep: {launch.death}", file=sys.stderr)
            continue
        steps = [] if copies is None else committed_steps(copies, launch.ranks)
        source = f"restarted from host memory at step {steps[-1]}" if steps else "started again"
        again = f"restart {recovery.number} of {recovery.most}"
        echo(f"lockstep: {launch.death}; the run is {source} ({again})", file=sys.stderr)


def _take_smaller(rules: RestartRules, copies: Path | None, ranks: int, failed: int) -> str | None:
    """Prepare the run for a smaller memory plan, see lockstep.observe.memory_plans."""
    steps = [] if copies is None else committed_steps(copies, ranks)
    copy = f"step {steps[-1]}" if steps else None
    if rules.each_node and rules.copy_dir is not None:
        copy = "the newest step that the nodes have in memory"
    return take_smaller(rules.run_dir, failed=failed, copy=copy)


def _version(file: Path) -> tuple[int, int] | None:
    """Return a value that changes when the file is rewritten; None: the file does not exist."""
    return (file.stat().st_ino, file.stat().st_mtime_ns) if file.is_file() else None


def _say_how_to_resume(rules: RestartRules) -> None:
    how = "nothing had begun: start it again with the same command"
    if (rules.run_dir / "config.toml").is_file():
        how = f"resume with: {way_on(rules.run_dir, rules.flags)}"
    echo(f"lockstep: the ranks of {rules.run_dir} could not be restarted; {how}", file=sys.stderr)
