"""Start all ranks again when one has died: they go on from copies of their state in host memory.

    rules = HealingRules(copy_dir=Path("/dev/shm"), max_restarts=3, run_dir=Path("runs/a"))
    status = launch_healing(lambda logs: Launch(command, ranks=2, log_dir=logs), rules, log_dir=Path("logs"))

Processes are restarted, the state survives: nothing is rebuilt inside of a process whose CUDA context, NCCL
communicators and compiled graphs a death has left in a state that nobody knows. Each start is a generation of
its own, with a new store and a new secret. What heals is a death that came from outside: a signal, a hang,
a node that is gone. A rank that ends with an error of its own would do so again, and ends the run.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import LockstepError
from lockstep.observe.run_history import way_on
from lockstep.observe.text import echo
from lockstep.ranks.copy_folder import committed_steps, copy_folder
from lockstep.ranks.environment import COPIES, COPY_PLACE, Recovery
from lockstep.ranks.launch import RESERVE_LOGS, Launch, LaunchInterrupted, check_launch, signals_raised
from lockstep.ranks.reserve import Reserve


@dataclass(frozen=True, kw_only=True, slots=True)
class HealingRules:
    """What a launch may do about a death."""

    copy_dir: Path
    """Where the folder for the copies is made."""
    max_restarts: int
    run_dir: Path
    """The run's folder, or where it will be."""
    each_node: bool = False
    """Whether each node makes that folder, in its own memory; False: the launcher, on this machine."""
    standby: bool = True
    """Whether processes wait to take the ranks' places."""
    flags: str = ""
    """What the command that goes on with the run needs besides its folder, for the user."""
    restart: bool = False
    """Whether the ranks begin a run again that is there: it has begun when they have written its config."""


def launch_healing_ranks(
    argv: Sequence[str], *, ranks: int, log_dir: Path, watch: float, rules: HealingRules
) -> int:
    """Run `python -m lockstep ARGV` as lockstep.ranks.launch.launch_ranks does, gracefully and watched, and
    heal."""
    check_launch(ranks, log_dir)
    command = [sys.executable, "-u", "-m", "lockstep", *argv]

    def make(logs: Path) -> Launch:
        return Launch(command, ranks=ranks, log_dir=logs, graceful=True, watch=watch)

    return launch_healing(make, rules, log_dir=log_dir)


def launch_healing(make: Callable[[Path], Launch], rules: HealingRules, *, log_dir: Path) -> int:
    """Launch ranks, and launch them again after a death, up to `max_restarts` times.

    Args:
        make: a launch of all ranks, whose logs go to the folder given.
        log_dir: of the first; those of restart n are in a folder beside it, `NAME-restart-n`.

    Returns:
        As lockstep.ranks.launch.launch_ranks.

    Raises:
        ConfigError: there is no room for the copies.
    """
    with signals_raised():
        try:
            if rules.each_node:
                return _generations(make, rules, None, log_dir)
            try:
                with copy_folder(rules.copy_dir) as copies, Reserve(copies) as reserve:
                    return _generations(make, rules, reserve, log_dir)
            finally:
                shutil.rmtree(log_dir.with_name(RESERVE_LOGS), ignore_errors=True)
        except LaunchInterrupted as interrupted:  # between two generations
            return 128 + interrupted.number


def _generations(
    make: Callable[[Path], Launch], rules: HealingRules, reserve: Reserve | None, log_dir: Path
) -> int:
    copies = None if reserve is None else reserve.folder
    recovery: Recovery | None = None
    config = rules.run_dir / "config.toml"
    before = _version(config) if rules.restart else None
    while True:
        number = 0 if recovery is None else recovery.number
        logs = log_dir if recovery is None else log_dir.with_name(f"{log_dir.name}-restart-{number}")
        logs.mkdir(parents=True, exist_ok=True)
        launch = make(logs)
        launch.heals, launch.reserve = True, reserve
        launch.refills = rules.standby and number < rules.max_restarts
        launch.extra = {COPY_PLACE: str(rules.copy_dir)} if copies is None else {COPIES: str(copies)}
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
        if number == rules.max_restarts:
            launch.explain_failure()
            echo(f"lockstep: cluster.max_restarts = {number}: the run is not started again", file=sys.stderr)
            return status
        began = _version(config) not in (None, before)
        recovery = Recovery(
            number=number + 1,
            most=rules.max_restarts,
            run_dir=str(rules.run_dir) if began else None,
            died=launch.died,
        )
        recovery.phases["end the others"] = time.time() - launch.died
        steps = [] if copies is None else committed_steps(copies, launch.ranks)
        source = f"healed from host memory at step {steps[-1]}" if steps else "started again"
        again = f"restart {recovery.number} of {recovery.most}"
        echo(f"lockstep: {launch.death}; the run is {source} ({again})", file=sys.stderr)


def _version(file: Path) -> tuple[int, int] | None:
    """What is another one when the file is written again; None: there is none."""
    return (file.stat().st_ino, file.stat().st_mtime_ns) if file.is_file() else None


def _say_how_to_resume(rules: HealingRules) -> None:
    how = "nothing had begun: start it again by the same command"
    if (rules.run_dir / "config.toml").is_file():
        how = f"go on with: {way_on(rules.run_dir, rules.flags)}"
    echo(f"lockstep: the ranks of {rules.run_dir} could not be started again; {how}", file=sys.stderr)
