"""A run seen from another shell: whether its process is there, what it is doing, how to end it, what it said.

    print(look(Path("runs/demo")).text())
    stop(Path("runs/demo"), seconds=600)

Everything is read from the run directory, so it does not matter who started the run or whether that is still
there. Loads no torch.
"""

from __future__ import annotations

import signal
import socket
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lockstep.errors import DataError, TrainError
from lockstep.observe import flight
from lockstep.observe.files import read_plain
from lockstep.observe.lock import Owner, holding, holds, read_owner
from lockstep.observe.run_history import (
    check_layout,
    gaps,
    is_step,
    read_lines,
    read_summary,
    recorded_steps,
    way_on,
)
from lockstep.observe.text import printable
from lockstep.ranks.hang import find_records

_POLL_SECONDS = 0.1
_SHOWN = ("reward/mean", "loss", "grad_norm")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunLook:
    """What a run directory tells at one moment."""

    run: Path
    state: str
    """running, finished, interrupted, failed; died: the process has gone without a word; elsewhere: another
    machine has the run, and cannot be asked from here; not started."""
    where: str | None
    """The process and its machine, while there is one."""
    steps: int
    """That are done."""
    total: int | None
    """That the run has; None: its config does not say so."""
    last: Mapping[str, float]
    """Of the last step: reward/mean, loss, grad_norm."""
    checkpoint: str | None
    """The newest."""
    doing: tuple[str, ...]
    """A line for each rank of a running run."""
    error: str | None
    """With which it failed."""
    gaps: tuple[str, ...] = ()
    """Where its files do not tell of the same steps."""

    def text(self) -> str:
        """For a terminal."""
        of = "" if self.total is None else f" of {self.total}"
        lines = [f"{self.run}: {self.state}" + (f", {self.where}" if self.where else "")]
        figures = "".join(f"  {name} {value:.4g}" for name, value in self.last.items())
        lines.append(f"  {self.steps}{of} steps{figures}")
        lines += [f"  {line}" for line in self.doing]
        if self.error is not None:
            lines.append(f"  {self.error}")
        lines += [f"  warning: {gap}" for gap in self.gaps]
        if self.checkpoint is not None and self.state != "finished":
            lines.append(f"  newest checkpoint: {self.checkpoint}")
        if self.state in ("interrupted", "failed", "died"):
            lines.append(f"  {self._advice()}")
        return "\n".join(map(printable, lines))

    def _advice(self) -> str:
        """What can be done with a run that has ended early."""
        if self.checkpoint is None and not self.steps and self.state == "failed":
            again = f"lockstep train {self.run / 'config.toml'} --run-dir {self.run}"
            return f"it failed before its first step; correct that, and start it again: {again}"
        return f"resume with: {way_on(self.run)}"

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self) | {"run": str(self.run)}


def look(run: Path) -> RunLook:
    """Read a run directory.

    Raises:
        DataError: there is no run in it.
        CheckpointError: its files are damaged.
    """
    owner = _owner(run)
    summary = read_summary(run / "summary.json") or {}
    state, where = _state(run, owner, summary)
    rows = read_lines(run / "metrics.jsonl") if (run / "metrics.jsonl").exists() else []
    steps = [row for row in rows if "evaluation" not in row]
    numbers = [row["step"] for row in steps if is_step(row.get("step"))]
    folder = run / "checkpoints"
    saved = sorted(path.name for path in folder.glob("step-*")) if folder.is_dir() else []
    return RunLook(
        run=run,
        state=state,
        where=where,
        steps=recorded_steps(run)[0],
        total=_total(run / "config.toml"),
        last={name: float(steps[-1][name]) for name in _SHOWN if steps and name in steps[-1]},
        checkpoint=str(folder / saved[-1]) if saved else None,
        doing=_doing(run) if state == "running" else (),
        gaps=tuple(gaps(run, numbers, running=state in ("running", "elsewhere"))),
        error=str(summary["error"]) if state == "failed" and "error" in summary else None,
    )


def stop(run: Path, *, seconds: float, say: Callable[[str], None]) -> RunLook:
    """Ask a run to save and end, as Ctrl-C does, and wait until it has; return what became of it.

    Args:
        seconds: the deadline.
        say: called with what happens.

    Raises:
        DataError: there is no run in the folder, or none that runs on this machine.
        TrainError: it has not ended in time, and goes on ending.
    """
    owner = _owner(run)
    state, where = _state(run, owner, read_summary(run / "summary.json") or {})
    if owner is None or state != "running":
        raise DataError(
            f"wrong-state: {run}: nothing to stop, the run is {state}"
            + (f": {where}; give the command there" if state == "elsewhere" else "")
        )
    with holding(run / "lock", pid=owner.pid, started=owner.started) as holder:
        if holder is None or not holder.send(signal.SIGTERM):
            raise DataError(
                f"wrong-state: {run}: nothing was stopped: {where} belongs to another user, or has ended "
                "just now; give the command as the user who started the run"
            )
    say(f"asked {where} to save and end after its step")
    until = time.monotonic() + seconds
    while owner.alive():
        if time.monotonic() > until:
            doing = "; ".join(_doing(run)) or "no flight record"
            raise TrainError(
                f"deadline: {run}: {where} has not ended within {seconds:g} s ({doing}). It will end after "
                f"its step. To see why it takes so long: lockstep hang {run}. To end it at once, and lose "
                f"what came after the newest checkpoint: kill -9 {owner.pid}"
            )
        time.sleep(_POLL_SECONDS)
    return look(run)


def log_file(run: Path, *, rank: int) -> Path:
    """Return the log of a rank.

    Raises:
        DataError: there is no run in the folder, or no such log.
    """
    _owner(run)
    path = run / "logs" / f"rank-{rank}.log"
    if not path.is_file():
        there = sorted(each.stem for each in (run / "logs").glob("rank-*.log"))
        raise DataError(
            f"no-such-file: {path}: there is no such log; there are those of {', '.join(there) or 'no rank'}"
        )
    return path


def _owner(run: Path) -> Owner | None:
    """The process that says that it writes the run."""
    if not (run / "config.toml").is_file():
        raise DataError(
            f"wrong-kind-of-file: {run}: holds no run (config.toml); give a folder as --run-dir named it"
        )
    check_layout(run)
    return read_owner(run / "lock")


def _state(run: Path, owner: Owner | None, summary: Mapping[str, Any]) -> tuple[str, str | None]:
    if owner is None:
        return str(summary.get("outcome", "not started")), None
    where = f"process {owner.pid} on {owner.host}"
    if owner.host != socket.gethostname():
        return "elsewhere", where
    # A process that has the pid now, or that somebody wrote into the lock, does not hold the lock open.
    there = holds(run / "lock", pid=owner.pid, started=owner.started) is not False
    return ("running", where) if there else ("died", f"{where} has gone")


def _total(config: Path) -> int | None:
    try:
        steps = tomllib.loads(read_plain(config, DataError).decode("utf-8")).get("steps")
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"not-toml: {config}: is not TOML: {error}") from error
    return steps if isinstance(steps, int) else None


def _doing(run: Path) -> tuple[str, ...]:
    try:
        flights = flight.read_all(find_records(run))
    except DataError:  # a run without flight records goes on all the same
        return ()
    return tuple(map(_line, flights))


def _line(each: flight.Flight) -> str:
    beat = each.heartbeat
    step, then = beat.get("step"), beat.get("time", each.started)
    return (
        f"rank {each.rank}: {beat.get('phase', 'starting')}"
        + (f", step {step + 1}" if isinstance(step, int) else "")
        + f", since {max(0.0, time.time() - float(then)):.0f} s"
    )
