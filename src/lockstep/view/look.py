"""What a run directory tells at one moment: whether the run is alive, how far it is, what its ranks do.

Everything is read from the files, so it does not matter who started the run or whether that process is still
alive. Loads no torch.
"""

from __future__ import annotations

import socket
import time
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lockstep.errors import DataError
from lockstep.observe import flight
from lockstep.observe.files import read_plain
from lockstep.observe.lock import Owner, holds, read_owner
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
        steps = "step" if (self.steps if self.total is None else self.total) == 1 else "steps"
        lines = [f"{self.run}: {self.state}" + (f", {self.where}" if self.where else "")]
        figures = "".join(f"  {name} {value:.4g}" for name, value in self.last.items())
        lines.append(f"  {self.steps}{of} {steps}{figures}")
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
        if _read(self.run / "config.toml").get("kind") == "serve":
            return "start lockstep serve again with the --dir that it is in; its clients go on"
        if self.checkpoint is None and not self.steps and self.state == "failed":
            again = f"lockstep train {self.run / 'config.toml'} --run-dir {self.run}"
            return f"it failed before its first step; fix the error, then start it again: {again}"
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
    owner = run_owner(run)
    summary = read_summary(run / "summary.json") or {}
    state, where = run_state(run, owner, summary)
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
        doing=rank_lines(run) if state == "running" else (),
        gaps=tuple(gaps(run, numbers, running=state in ("running", "elsewhere"))),
        error=str(summary["error"]) if state == "failed" and "error" in summary else None,
    )


def run_owner(run: Path) -> Owner | None:
    """Return the process that says that it writes the run; None if none does.

    Raises:
        DataError: there is no run in the folder.
        CheckpointError: its files are damaged.
    """
    if not (run / "config.toml").is_file():
        raise DataError(f"wrong-kind-of-file: {run} contains no run (config.toml); give the run's --run-dir")
    check_layout(run)
    return read_owner(run / "lock")


def run_state(run: Path, owner: Owner | None, summary: Mapping[str, Any]) -> tuple[str, str | None]:
    """Return the state of a run, by the names of RunLook, and its process and machine, while there is one.

    Args:
        summary: summary.json; empty if there is none.
    """
    if owner is None:
        return str(summary.get("outcome", "not started")), None
    where = f"process {owner.pid} on {owner.host}"
    if owner.host != socket.gethostname():
        return "elsewhere", where
    # A process that has the pid now, or that somebody wrote into the lock, does not hold the lock open.
    there = holds(run / "lock", pid=owner.pid, started=owner.started) is not False
    return ("running", where) if there else ("died", f"{where} no longer exists")


def _total(config: Path) -> int | None:
    steps = _read(config).get("steps")
    return steps if isinstance(steps, int) else None


def _read(config: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_plain(config, DataError).decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"not-toml: {config} is not TOML: {error}") from error


def rank_lines(run: Path) -> tuple[str, ...]:
    """Return what each rank says that it is doing, a line each; empty without flight records."""
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
