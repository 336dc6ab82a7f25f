"""Feed recorded inputs to the policy again, in any cell.

>>> from lockstep_lab.replay.run import ReplayOptions, replay
>>> from lockstep_lab.replay.cell import Cell
>>> from lockstep.recording import Recording
>>> recording = Recording.open("runs/demo")  # doctest: +SKIP
>>> cell = Cell.of_recording(recording.header, device="cpu")  # doctest: +SKIP
>>> result = replay(recording, ReplayOptions(cell=cell, max_inputs=3))  # doctest: +SKIP
>>> result.summary["differences"]["logprob_max"]  # doctest: +SKIP
0.0
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lockstep.schema.contract import KernelContract
from lockstep_lab.replay.cell import ReplayOptions
from lockstep_lab.replay.replayer import Deadline, Replayer
from lockstep_lab.replay.results import ReplayFiles, ReplayRow
from lockstep_lab.replay.summary import summarise

if TYPE_CHECKING:
    from lockstep.recording import Recording
    from lockstep_lab.replay.results import ReplayFiles


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayResult:
    """The rows and the summary of a replay."""

    rows: tuple[ReplayRow, ...]
    summary: dict[str, Any]
    """OUT/summary.json."""
    interrupted: bool

    @property
    def ok(self) -> bool:
        """Whether every selected input was replayed."""
        return not self.interrupted and all(row.status == "ok" for row in self.rows)


OnRow = Callable[[ReplayRow, int, int], None]
"""Called after every input with its row, how many are done, and how many there are."""


@dataclass(kw_only=True)
class Session:
    """A replay under way: its rows, and where they go."""

    replayer: Replayer
    files: ReplayFiles | None
    """OUT; None: nothing is written."""
    on_row: OnRow | None
    started: float
    rows: list[ReplayRow] = field(default_factory=list)
    interrupted: bool = False

    def begin(self, *lines: str, on_ready: Callable[[Replayer], None] | None) -> None:
        """Say what is replayed, and `lines`."""
        if self.files is not None:
            for line in (*opening(self.replayer), *lines):
                self.files.line(line)
        if on_ready is not None:
            on_ready(self.replayer)

    def deadline(self) -> Deadline:
        """The deadline of each input, at which what there is is written."""
        return Deadline(self.replayer.options.timeout, files=self.files, on_expiry=self._timed_out)

    def _timed_out(self, index: int) -> None:
        self.rows.append(self.replayer.timed_out_row(index))
        if self.files is not None:
            self.interrupted = True
            self.files.row(self.rows[-1])
            self.files.summary(self.summary())

    @contextlib.contextmanager
    def inputs(self) -> Iterator[Deadline]:
        """The time in which inputs run, each with a deadline; Ctrl-C ends it."""
        try:
            with self.deadline() as deadline:
                yield deadline
        except KeyboardInterrupt:
            self.interrupted = True

    def keep(self, row: ReplayRow) -> None:
        """Keep the row of an input that has run."""
        self.rows.append(row)
        if self.files is not None:
            self.files.row(row)
        if self.on_row is not None:
            self.on_row(row, *self._progress(row))

    def _progress(self, row: ReplayRow) -> tuple[int, int]:
        return len(self.rows), len(self.replayer.order)

    def summary(self) -> dict[str, Any]:
        """Summarise what was replayed so far."""
        seconds = time.perf_counter() - self.started
        return summarise(self.replayer, self.rows, seconds=seconds, interrupted=self.interrupted)

    def end(self, summary: dict[str, Any]) -> ReplayResult:
        """Write outputs and summary, and close the policy."""
        if self.files is not None:
            if self.replayer.outputs is not None:
                self.replayer.outputs.write(self.files.out)
            self.files.summary(summary)
        self.replayer.close()
        return self.result(summary)

    def result(self, summary: dict[str, Any]) -> ReplayResult:
        """The result with this summary."""
        return ReplayResult(rows=tuple(self.rows), summary=summary, interrupted=self.interrupted)


def replay(
    recording: Recording,
    options: ReplayOptions,
    *,
    files: ReplayFiles | None = None,
    on_row: OnRow | None = None,
    on_ready: Callable[[Replayer], None] | None = None,
) -> ReplayResult:
    """Replay the selected inputs, one after the other, in this process.

    Ctrl-C ends the replay with the results so far.

    Args:
        files: OUT; None: nothing is written.
        on_ready: called once the policy is loaded.

    Raises:
        ConfigError, RecordingError, ModelError: before the first forward.
    """
    started = time.perf_counter()
    replayer = Replayer(recording, options, files=files)
    session = Session(replayer=replayer, files=files, on_row=on_row, started=started)
    session.begin(on_ready=on_ready)
    with session.inputs() as deadline:
        replayer.warm_up(deadline)
        for index in replayer.order:
            deadline.start(index)
            row = replayer.run(index)
            deadline.stop()
            session.keep(row)
    return session.end(session.summary())


def opening(replayer: Replayer) -> list[str]:
    """The lines shown before the first input: recording, cell, weights, and what was resolved."""
    options, recording = replayer.options, replayer.recording
    lines = [
        f"recording: {recording.path}, {len(recording)} inputs, {len(replayer.order)} to replay",
        f"cell: {options.cell.label()}, {options.cell.dtype} on {options.cell.device}; "
        f"{replayer.bucketing.describe()}",
        *options.notes,
        replayer.weights_description,
        *_contract_lines(replayer),
    ]
    if options.optimizer_step:
        lines.append(
            "optimizer steps move the weights: only the first input is comparable with the recording"
        )
    return lines


def _contract_lines(replayer: Replayer) -> list[str]:
    """One line on whether the replay has the recording's kernel contract, where both have one."""
    recorded = replayer.recording.header.contract
    here = replayer.policy.backend.contract
    if recorded is None or here is None:
        return []
    difference = here.difference(KernelContract.from_json(recorded))
    if not difference:
        return [f"kernel contract {here.hash[:12]}, the recorded one: logprobs must be bitwise equal"]
    return [f"kernel contract {here.hash[:12]}, not the recorded one: {'; '.join(difference)}"]
