"""Feed recorded inputs to the policy again, in any cell.

>>> from lockstep.lab.replay.run import ReplayOptions, replay
>>> from lockstep.lab.replay.cell import Cell
>>> from lockstep.recording import Recording
>>> recording = Recording.open("runs/demo")  # doctest: +SKIP
>>> cell = Cell.of_recording(recording.header, device="cpu")  # doctest: +SKIP
>>> result = replay(recording, ReplayOptions(cell=cell, max_inputs=3))  # doctest: +SKIP
>>> result.summary["differences"]["logprob_max"]  # doctest: +SKIP
0.0
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lockstep.lab.replay.deadline import Deadline
from lockstep.lab.replay.options import ReplayOptions
from lockstep.lab.replay.replayer import Replayer
from lockstep.lab.replay.results import ReplayFiles, ReplayRow
from lockstep.lab.replay.summary import summarise
from lockstep.schema.contract import KernelContract

if TYPE_CHECKING:
    from lockstep.recording import Recording


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


def replay(
    recording: Recording,
    options: ReplayOptions,
    *,
    files: ReplayFiles | None = None,
    on_row: Callable[[ReplayRow, int, int], None] | None = None,
    on_ready: Callable[[Replayer], None] | None = None,
) -> ReplayResult:
    """Replay the selected inputs, one after the other, in this process.

    Ctrl-C ends the replay with the results so far.

    Args:
        files: OUT; None: nothing is written.
        on_row: called after every input with its row, how many are done, and how many there are.
        on_ready: called once the policy is loaded.

    Raises:
        ConfigError, RecordingError, ModelError: before the first forward.
    """
    started = time.perf_counter()
    replayer = Replayer(recording, options, files=files)
    if files is not None:
        for line in opening(replayer):
            files.line(line)
    if on_ready is not None:
        on_ready(replayer)
    rows: list[ReplayRow] = []
    interrupted = False

    def partial(index: int) -> None:
        row = replayer.timed_out_row(index)
        if files is not None:
            files.row(row)
            files.summary(finish(replayer, [*rows, row], started=started, interrupted=True))

    try:
        with Deadline(options.timeout, files=files, on_expiry=partial) as deadline:
            replayer.warm_up(deadline)
            for index in replayer.order:
                deadline.start(index)
                row = replayer.run(index)
                deadline.stop()
                rows.append(row)
                if files is not None:
                    files.row(row)
                if on_row is not None:
                    on_row(row, len(rows), len(replayer.order))
    except KeyboardInterrupt:
        interrupted = True
    summary = finish(replayer, rows, started=started, interrupted=interrupted)
    if files is not None:
        if replayer.outputs is not None:
            replayer.outputs.write(files.out)
        files.summary(summary)
    replayer.close()
    return ReplayResult(rows=tuple(rows), summary=summary, interrupted=interrupted)


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


def finish(
    replayer: Replayer, rows: Sequence[ReplayRow], *, started: float, interrupted: bool
) -> dict[str, Any]:
    """Summarise what was replayed so far."""
    return summarise(replayer, rows, seconds=time.perf_counter() - started, interrupted=interrupted)
