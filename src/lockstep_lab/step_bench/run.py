"""`lockstep bench step`: one RL step of the same work in several ways, each in processes of its own.

cells ─► job.json each ─► processes that load and warm up, one after the other ─► turns: a measured step of
the first cell, of the second, ..., the first again ─► medians, ratios to the first cell, verdict

Taking turns means that a machine which slows down for a while slows down every cell, not one of them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from pydantic import Field

from lockstep.config.base import PositiveInt
from lockstep.config.declarations import backends
from lockstep.config.load import override
from lockstep.config.run import GRPORun
from lockstep.config.run_config import on_ranks
from lockstep.errors import ConfigError, LockstepError
from lockstep.observe.files import write_json
from lockstep.processes.child import describe_status
from lockstep_lab.step_bench.cells import BenchCell
from lockstep_lab.step_bench.job import (
    END,
    BenchJob,
    BenchOutcome,
    BenchSettings,
    StepTimes,
    grant_turn,
    read_ready,
    read_times,
)
from lockstep_lab.step_bench.result import BenchResult, CellResult
from lockstep_lab.suite.job_files import Options, same_fields
from lockstep_lab.suite.process import read_tail, start_logged
from lockstep_lab.suite.result import Status
from lockstep_lab.suite.run import Suite, broken, check_folder, make_folder

WORKER = ("-m", "lockstep_lab.step_bench.worker")
"""Arguments of the interpreter that run a job file."""
_POLL_SECONDS = 0.01
_MOST_SECONDS = 1e9


class BenchOptions(Options, BenchSettings):
    """The cells to measure, and how; `timeout` is that of a cell's start and of one turn."""

    cells: Sequence[BenchCell]
    ranks: PositiveInt = 2
    """Ranks of the cells whose backend has ranks."""
    overrides: Mapping[str, Any] = Field(default_factory=dict)
    """Dotted settings of all cells; those of a cell's name take precedence."""
    repeats: int = 5
    one_at_a_time: bool = False
    """Run each cell to its end before the next one starts, if two do not fit into memory."""
    fresh_cache: bool = False
    """Each cell compiles everything anew, into a cache of its own; otherwise into the one of this machine."""
    notes: Sequence[str] = ()


class _Running:
    """One cell's processes."""

    def __init__(self, job: BenchJob, *, log: Path, environment: Mapping[str, str]) -> None:
        self.job, self.log = job, log
        self.timed_out = ""
        self._stopped = False
        argv = [sys.executable, "-u", *WORKER, str(job.write())]
        self._child = start_logged(argv, log=log, environment=environment)

    @property
    def status(self) -> int | None:
        """The exit status; None: it has not ended by itself, but is at work or was stopped."""
        return None if self._stopped else self._child.poll()

    def wait(self, arrived: Callable[[], bool], seconds: float, what: str) -> bool:
        """Wait until `arrived`; False: the process ended, or was killed at the deadline."""
        until = time.monotonic() + seconds
        while not arrived():
            if self.status is not None:
                return arrived()
            if time.monotonic() > until:
                self.timed_out = f"{what} took more than {seconds:g} s (--timeout)"
                self.stop()
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def end(self, seconds: float) -> None:
        """Ask the cell to write its result and to close within `seconds`."""
        grant_turn(self.job.out, END)
        if self._child.wait(seconds) is None and not self.timed_out:
            self.timed_out = f"its end took more than {seconds:g} s (--timeout)"
        self.stop()

    def stop(self) -> None:
        """Kill what is left of the process."""
        self._stopped = self.status is None
        self._child.end()


class _Suite(Suite[BenchCell, CellResult, BenchResult]):
    """The measurement under way.

    Args:
        jobs: cell -> its job, or why its settings are refused.
    """

    options: BenchOptions

    def __init__(
        self, options: BenchOptions, say: Callable[[str], None], jobs: Mapping[str, BenchJob | str]
    ) -> None:
        super().__init__(options, "bench", progress=lambda *_: None)
        self.say, self.jobs, self.parts = say, jobs, options.cells
        self.running: dict[str, _Running] = {}

    def run_all(self) -> BenchResult:
        """Run every cell, in turns. Ctrl-C ends the run with the results so far."""
        options = self.options
        groups = [[cell] for cell in options.cells] if options.one_at_a_time else [list(options.cells)]
        try:
            for group in groups:
                for cell in group:
                    self._start(cell)
                for repeat in range(1, options.repeats + 1):
                    for cell in group:
                        self._turn(cell, repeat)
                for cell in group:
                    self._finish(cell)
        except KeyboardInterrupt:
            self.interrupted = True
        finally:
            for running in self.running.values():
                running.stop()
        return self.result()

    # --- one cell -------------------------------------------------------------------------------------------

    def _start(self, cell: BenchCell) -> None:
        job = self.jobs[cell.name]
        if isinstance(job, str):
            self.results.append(self.run(cell))
            self.say(f"{cell.name}: refused: {job}")
            return
        job.out.mkdir()
        log = self.out / f"{cell.slug}.log"
        log.unlink(missing_ok=True)
        running = self.running[cell.name] = _Running(job, log=log, environment=self._environment(job.out))
        timeout = self.options.timeout
        if not running.wait(lambda: read_ready(job.out) is not None, timeout, "loading and warming up"):
            self._finish(cell)
            return
        ready = read_ready(job.out)
        assert ready is not None
        self.say(
            f"{cell.name}: warm after {ready.load_seconds + ready.first_step_seconds:.1f} s, "
            f"{ready.compile_seconds:.1f} s of them compiling"
        )

    def _environment(self, folder: Path) -> dict[str, str]:
        if not self.options.fresh_cache:
            return {}
        # A folder for each cell: one that finds what an earlier
        # cell has compiled would look cheaper than it is.
        caches = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
        return {variable: str(folder / "cache" / name) for variable, name in caches.items()}

    def _turn(self, cell: BenchCell, repeat: int) -> None:
        running = self.running.get(cell.name)
        if running is None:
            return
        grant_turn(running.job.out, repeat)
        what = f"step {repeat}"
        if not running.wait(lambda: len(read_times(running.job.out)) >= repeat, self.options.timeout, what):
            self._finish(cell)
            return
        last = read_times(running.job.out)[-1]
        self.say(f"{cell.name}: step {repeat}/{self.options.repeats} {last.step:.3f} s")

    def _finish(self, cell: BenchCell) -> None:
        if cell.name not in self.running:
            return
        self.running[cell.name].end(self.options.timeout)
        row = self.run(cell)
        self.results.append(row)
        del self.running[cell.name]
        if row.status != "ok":
            self.say(f"{cell.name}: {row.status}: {row.reason}")
        write_json(self.options.out / "bench.json", self.result().as_dict())

    def run(self, part: BenchCell) -> CellResult:
        """The row of a cell in its current state."""
        cell, refused, running = part, self.jobs[part.name], self.running.get(part.name)
        if isinstance(refused, str):
            return CellResult(name=cell.name, status="refused", reason=refused)
        if running is None:
            return CellResult(name=cell.name, status="interrupted", reason="it was not started")
        folder, work = running.job.out, running.job.work
        outcome, times = BenchOutcome.read(folder), read_times(folder)
        status, reason = self._status(running, outcome, times)
        return CellResult(
            name=cell.name,
            status=status,
            reason=reason,
            ranks=running.job.ranks,
            times=tuple(times),
            ready=read_ready(folder),
            outcome=outcome,
            tokens=(outcome.tokens if outcome else 0) or sum(work.lengths()),
            sampled_tokens=(outcome.sampled_tokens if outcome else 0) or work.completion_tokens,
            log=str(running.log),
        )

    def _status(
        self, running: _Running, outcome: BenchOutcome | None, times: Sequence[StepTimes]
    ) -> tuple[Status, str]:
        if running.timed_out:
            return "hung", running.timed_out
        if outcome is not None and outcome.status != "ok":
            return outcome.status, outcome.reason + _advice(outcome.status, self.options)
        if outcome is not None and len(times) == self.options.repeats:
            return "ok", ""
        if running.status is None:
            warm = read_ready(running.job.out) is not None
            progress = f"after {len(times)} of {self.options.repeats} steps" if warm else "before it was warm"
            return "interrupted", progress
        status, reason = broken(read_tail(running.log), f"it {describe_status(running.status)}")
        return status, reason + _advice(status, self.options)

    # --- the result -----------------------------------------------------------------------------------------

    def result(self) -> BenchResult:
        """The result so far, in the order in which cells were named; unfinished cells count as
        interrupted."""
        options = self.options
        ended = {row.name: row for row in self.results}
        return BenchResult(
            cells=tuple(ended.get(cell.name) or self.run(cell) for cell in options.cells),
            settings=self._settings(),
            notes=tuple(options.notes),
            **self.facts(),
        )

    def _settings(self) -> dict[str, Any]:
        options, work = self.options, self.options.work
        lengths = work.lengths()
        ran = next((row.outcome for row in self.results if row.outcome and row.outcome.axes), None)
        axes = {} if ran is None else ran.axes
        return {
            "model": options.run.model.name
            + ("" if options.run.model.num_layers is None else f", {options.run.model.num_layers} layers"),
            "dtype": axes.get("dtype", options.run.model.dtype),
            "attention": axes.get("attention", options.run.train.attention),
            "samples": f"{len(lengths)} ({work.prompts} prompts x {work.group}), {min(lengths)} to "
            f"{max(lengths)} tokens, {sum(lengths):,} in all, {work.completion_tokens:,} of them sampled",
            "token budget": options.run.train.token_budget,
            "repeats": f"{options.repeats} of each cell, "
            + ("one cell after the other" if options.one_at_a_time else "cells in turns")
            + f", after {options.warmup} to warm up",
            "overrides": ", ".join(f"{k} = {v!r}" for k, v in options.overrides.items()) or "none",
        }


def run_bench(options: BenchOptions, *, progress: Callable[[str], None] = lambda _: None) -> BenchResult:
    """Measure every cell. One that crashes, hangs or is refused is a row with its reason.

    Raises:
        ConfigError: OUT holds something, this process is a rank itself, or every cell is refused by its
            settings; nothing was made or started then.
    """
    check_folder(options.out, "bench")
    jobs = {cell.name: _job(cell, options) for cell in options.cells}
    refused = {cell: reason for cell, reason in jobs.items() if isinstance(reason, str)}
    if len(refused) == len(jobs):
        raise ConfigError(_all_refused(refused), code="nothing-to-do", setting="--cells")
    make_folder(options.out)
    progress(f"bench: {options.out}")
    for note in options.notes:
        progress(note)
    return _Suite(options, progress, jobs).run_all()


def _job(cell: BenchCell, options: BenchOptions) -> BenchJob | str:
    """Make the cell's job, or say why its settings are refused."""
    ranks = options.ranks if backends()[cell.backend].spans_ranks else 1
    try:
        changed = override(options.run, {**options.overrides, **cell.settings()}, origin=cell.name)
        run = cast(GRPORun, on_ranks(changed, ranks))  # of the kind of options.run
    except LockstepError as error:
        return " ".join(str(error).split()).removeprefix(f"{cell.name}: 1 problem ")
    own = {
        "cell": cell.name,
        "ranks": ranks,
        "run": run,
        "out": options.out.resolve() / cell.slug,
        "patience": min(options.timeout * (len(options.cells) + 1), _MOST_SECONDS),
    }
    return BenchJob(**same_fields(BenchJob, options) | own)


def _all_refused(reasons: Mapping[str, str]) -> str:
    """Once where it is the same reason."""
    if len(set(reasons.values())) == 1:
        return next(iter(reasons.values()))
    lines = "\n".join(f"  {cell}: {reason}" for cell, reason in reasons.items())
    return f"every cell is refused:\n{lines}"


def _advice(status: str, options: BenchOptions) -> str:
    if status != "oom" or options.one_at_a_time or len(options.cells) == 1:
        return ""
    return " (all cells are in memory at once; give --one-at-a-time)"
