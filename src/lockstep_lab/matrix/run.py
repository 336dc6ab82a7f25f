"""The compatibility matrix: the same inputs under every combination of some axes, each in its own process.

    >>> from pathlib import Path
    >>> from lockstep_lab.matrix.run import MatrixOptions, run_matrix
    >>> result = run_matrix(None, MatrixOptions(out=Path("runs/matrix")))  # doctest: +SKIP
    >>> result.verdict  # doctest: +SKIP
    'matrix: 8 cells, 8 work, largest difference 2.4e-07 nats (varlen + eager + packed)'

A cell that crashes, hangs or says nothing is a result as any other; the folder holds, per cell, the log, the
replay's own files and cell.json, and matrix.json, matrix.md and matrix.html for all of them.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.errors import ConfigError, RecordingError
from lockstep.loop.interrupt import Interrupt, Interrupted
from lockstep.observe.files import write_atomic, write_json
from lockstep.observe.lock import RunLock
from lockstep.recording import Recording
from lockstep.schema.batch import PackedBatch, PolicyBatch
from lockstep_lab.matrix.cells import (
    Axis,
    MatrixCell,
    make_cells,
    parse_axes,
    reference_cells,
    refusal,
    settings,
)
from lockstep_lab.matrix.compare import Comparison
from lockstep_lab.matrix.report import write_reports
from lockstep_lab.matrix.result import (
    CellResult,
    MatrixResult,
    compare_cells,
    judge,
    read_cell,
    read_matrix,
    with_process_result,
)
from lockstep_lab.replay.cell import ALL_OFF, Cell, resolve_cell
from lockstep_lab.suite.job_files import Options
from lockstep_lab.suite.machine import machine
from lockstep_lab.suite.process import ProcessRunner
from lockstep_lab.suite.run import make_folder

Progress = Callable[[CellResult, int, int], None]
"""Called with a cell that is done, the number of cells done, and the number of all."""


class MatrixOptions(Options):
    """The cells of a matrix, and how to run them; `timeout` is that of each cell."""

    axes: tuple[Axis, ...] | None = None
    """None: flash, compile, packing."""
    base: tuple[tuple[str, Any], ...] = ()
    """Fields of Cell that all cells share, and the reference except for its dtype: model, dtype,
    num_layers."""
    device: str = "auto"
    reference: str = ""
    """AXIS=VALUE words on top of padded, sdpa, eager, float32."""
    replay_flags: tuple[str, ...] = ()
    """Flags of `lockstep replay` that all cells share, such as ("--max-inputs", "8")."""
    jobs: int = 1
    """Cells that run at a time; with more than 1 their times are not comparable."""
    resume: bool = False
    """Continue in `out`: cells that have a result are not run again."""
    retry: bool = False
    """With resume: cells that failed, crashed or timed out are run again."""
    logprob_limit: float | None = None
    """Nats, largest difference; None: by dtype, see lockstep_lab.matrix.result."""
    gradient_limit: float | None = None
    keep_outputs: bool = False
    """Keep every cell's outputs.safetensors; else only the reference cells'."""


def run_matrix(
    recording: Path | str | None, options: MatrixOptions, *, progress: Progress | None = None
) -> MatrixResult:
    """Run every cell, compare it with its reference, and write the reports.

    Args:
        recording: as Recording.open takes it; None: the shipped one.
        progress: called with every cell that is done.

    Raises:
        ConfigError: an axis, value or setting is wrong, or `out` holds another matrix.
        RecordingError: the recording cannot be read.
        Interrupted: Ctrl-C or SIGTERM. The running cell is killed; what is done is written, and the same
            options with resume=True go on.
    """
    opened = Recording.open(recording)
    work = _Work(opened, None if recording is None else str(recording), options)
    work.prepare()
    try:
        lock = RunLock(options.out / "lock")
    except ConfigError as error:
        raise ConfigError(f"locked: another matrix uses {str(options.out)!r}; give another --out") from error
    try:
        return work.run(progress or (lambda cell, done, total: None))
    finally:
        lock.release()


class _Work:
    """One matrix under way."""

    def __init__(self, recording: Recording, path: str | None, options: MatrixOptions) -> None:
        self.options, self.path = options, path
        overrides = dict(ALL_OFF) | dict(options.base)
        base = resolve_cell(recording.header, device=options.device, overrides=overrides)[0]
        self.axes = options.axes if options.axes is not None else parse_axes(())
        self.cells = make_cells(base, self.axes)
        self.reference = _reference(base, options.reference)
        self.extra, self.reference_of = reference_cells(self.cells, self.reference)
        # References first: every other cell is compared with one as soon as it is done.
        references = set(self.reference_of.values())
        self.order = sorted((*self.extra, *self.cells), key=lambda cell: cell.name not in references)
        self.done: dict[str, CellResult] = {}
        self.runner = ProcessRunner()
        self.created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self.environment = machine(base.device)
        self.described = {
            "path": path or "the shipped recording",
            "inputs": len(recording),
            "framework": recording.header.framework,
            "model": recording.header.model.get("name"),
        }
        self.replay_flags, self.notes = with_signal(recording, options.replay_flags)

    # --- the folder -----------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Make the folder, or read the results in it. Raises ConfigError if it holds another matrix."""
        out = self.options.out
        if out.exists() and not out.is_dir():
            raise self._refusal("--out", "is a file; give a folder", code="not-a-file")
        if not (out / "matrix.json").exists():
            if out.exists() and any(out.iterdir()):
                why = "contains something that is not a matrix; give a new folder"
                raise self._refusal("--out", why, code="wrong-kind-of-file")
            if self.options.resume:
                why = "contains no matrix to continue; leave --resume out"
                raise self._refusal("--resume", why, code="wrong-kind-of-file")
            make_folder(out / "cells")
            return
        if not self.options.resume:
            why = "already contains a matrix; continue it with --resume, or give another --out"
            raise self._refusal("--out", why, code="already-exists")
        old = read_matrix(out)
        self.created = old.created
        other = sorted(k for k, v in self.environment.items() if old.environment.get(k) != v)
        if other:
            was, now = old.environment.get(other[0]), self.environment[other[0]]
            why = (
                f"was started with {other[0]} {was}, but this is {now}; give another --out, and compare the "
                "two with `lockstep matrix diff`"
            )
            raise self._refusal("--resume", why, code="not-resumable")
        for cell in self.order:
            self._take(cell)

    def _refusal(self, flag: str, why: str, code: str) -> ConfigError:
        out = self.options.out
        return ConfigError(f"{flag}: {str(out)!r} {why}", code=code)

    def _take(self, cell: MatrixCell) -> None:
        result = read_cell(self.options.out / "cells" / cell.slug)
        if result is None:
            return
        if result.command != self.command(cell):
            why = f"has {cell.name!r} from another command ({result.command}); give the same options, or "
            why += "another --out"
            raise self._refusal("--resume", why, code="not-resumable")
        again = self.options.retry and not result.works and result.status != "refused"
        if not again:
            self.done[cell.name] = replace(result, **self._place(cell))

    def command(self, cell: MatrixCell) -> str:
        """The command that a user would type for this cell."""
        return shlex.join(["lockstep", *self._replay(cell)])

    def _replay(self, cell: MatrixCell) -> list[str]:
        where = [] if self.path is None else [self.path]
        return ["replay", *where, *cell.flags, *self.replay_flags]

    # --- running --------------------------------------------------------------------------------------------

    def run(self, progress: Progress) -> MatrixResult:
        pending = [cell for cell in self.order if cell.name not in self.done]
        total = len(self.order)
        self.write(complete=False)

        def finish(result: CellResult) -> None:
            self.done[result.name] = self._compared(result)
            self.write(complete=False)
            progress(self.done[result.name], len(self.done), total)

        with Interrupt() as interrupt:
            try:
                self._run_all(pending, finish)
                # Cells that an earlier run had nothing to compare with: their reference may work by now.
                for name, cell in self.done.items():
                    if cell.comparison is None:
                        self.done[name] = self._compared(cell)
            except KeyboardInterrupt:
                result = self.write(complete=False)
                write_reports(result, self.options.out)
                raise Interrupted(
                    {
                        "outcome": "interrupted",
                        "cells": len(self.done),
                        "total": total,
                        "out": str(self.options.out),
                        "verdict": result.verdict,
                        "signal": None if interrupt.signal is None else int(interrupt.signal),
                    }
                ) from None
        result = self.write(complete=True)
        write_reports(result, self.options.out)
        return result

    def _run_all(self, pending: Sequence[MatrixCell], finish: Callable[[CellResult], None]) -> None:
        references = [cell for cell in pending if cell.name in self.reference_of.values()]
        for group in (references, [cell for cell in pending if cell not in references]):
            with ThreadPoolExecutor(self.options.jobs) as pool:
                futures = [pool.submit(self._run_cell, cell) for cell in group]
                try:
                    for future in as_completed(futures):
                        finish(future.result())
                except BaseException:
                    self.runner.stop()
                    pool.shutdown(wait=False, cancel_futures=True)
                    raise

    def _run_cell(self, cell: MatrixCell) -> CellResult:
        folder = self.options.out / "cells" / cell.slug
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        result = replace(self._row(cell), timing_note=self._timing_note(cell))
        why = refusal(cell.cell)
        if why is not None:
            return self._saved(replace(result, status="refused", reason=why))
        arguments = [*self._replay(cell), "--out", str(folder / "replay"), "--keep-outputs", "--quiet"]
        log = folder / "log.txt"
        write_atomic(log, f"$ {shlex.join(['python', '-m', 'lockstep', *arguments])}\n")
        argv = [sys.executable, "-m", "lockstep", *arguments]
        exit_status = self.runner.run(argv, log=log, timeout=self.options.timeout)
        return self._saved(
            with_process_result(result, exit_status, folder=folder, timeout=self.options.timeout)
        )

    def _row(self, cell: MatrixCell) -> CellResult:
        """A cell that has not run."""
        return CellResult(
            flags=cell.flags,
            command=self.command(cell),
            status="interrupted",
            folder=f"cells/{cell.slug}",
            **self._place(cell),
        )

    def _place(self, cell: MatrixCell) -> dict[str, Any]:
        """What a result has of its cell's place in this matrix."""
        reference = self.reference_of.get(cell.name)
        return {
            "name": cell.name,
            "values": dict(cell.values),
            "is_extra": not cell.values,
            "reference": None if reference == cell.name else reference,
        }

    def _timing_note(self, cell: MatrixCell) -> str:
        if cell.cell.attention == "varlen" and cell.cell.device == "cpu":
            return "reference kernels on a CPU: times are not comparable"
        if self.options.jobs > 1:
            return f"up to {self.options.jobs} cells ran at a time: times are not comparable"
        return ""

    # --- results --------------------------------------------------------------------------------------------

    def _compared(self, result: CellResult) -> CellResult:
        reference = self.done.get(result.reference or "")
        if result.reference is None or not result.works:
            return result
        if reference is None or not reference.works:
            why = "it did not run" if reference is None else reference.status
            return self._saved(replace(result, disagreement=f"no comparison: the reference cell: {why}"))
        out = self.options.out
        try:
            compared = compare_cells(result, reference, out=out)
        except RecordingError as error:
            return self._saved(replace(result, disagreement=f"no comparison: {error}"))
        if not self.options.keep_outputs:
            (out / result.folder / "replay" / "outputs.safetensors").unlink(missing_ok=True)
        return self._saved(replace(result, comparison=compared, disagreement=""))

    def _saved(self, result: CellResult) -> CellResult:
        write_json(self.options.out / result.folder / "cell.json", dataclasses.asdict(result))
        return result

    def write(self, *, complete: bool) -> MatrixResult:
        """Write matrix.json with the results so far."""
        limits = {"logprob": self.options.logprob_limit, "gradient": self.options.gradient_limit}
        cells = tuple(self._judged(cell, limits) for cell in (*self.extra, *self.cells))
        result = MatrixResult(
            command=self.options.command,
            created=self.created,
            recording=self.described,
            environment=self.environment,
            axes={axis.name: [value.value for value in axis.values] for axis in self.axes},
            shared=self.replay_flags,
            notes=self.notes,
            limits=limits,
            cells=cells,
            complete=complete,
        )
        write_json(self.options.out / "matrix.json", result.as_dict())
        return result

    def _judged(self, cell: MatrixCell, limits: dict[str, float | None]) -> CellResult:
        result = self.done.get(cell.name)
        if result is None:
            return self._row(cell)
        if result.comparison is None:
            return result
        rounds = cell.cell.dtype != "float32" or self.reference.dtype != "float32"
        layers = None if result.measures is None else result.measures.num_layers
        agrees, why = judge(
            result.comparison,
            rounds=rounds,
            yardstick=self._yardstick(cell),
            limits=limits,
            num_layers=layers or 1,
        )
        return replace(result, agrees=agrees, disagreement=why)

    def _yardstick(self, cell: MatrixCell) -> Comparison | None:
        """The comparison of the reference's own kernels in this cell's dtype, to judge the cell by."""
        if cell.cell.dtype == self.reference.dtype or self.reference.dtype != "float32":
            return None
        same = ("model", "num_layers")
        target = replace(
            self.reference, dtype=cell.cell.dtype, **{name: getattr(cell.cell, name) for name in same}
        )
        for other in self.cells:
            candidate = replace(other.cell, activation_checkpointing=target.activation_checkpointing)
            if candidate == target and other.name != cell.name and other.name in self.done:
                return self.done[other.name].comparison
        return None


def _reference(base: Cell, text: str) -> Cell:
    default = {"zero_stage": None, "ranks": 1, "dtype": "float32"}
    return replace(base, **(default | settings(text, origin="--reference")))


# --- which inputs are compared: some that have a gradient ---------------------------------------------------


_GRADIENT_INPUTS = 8
"""The default of `lockstep replay --gradient-inputs`."""


def with_signal(recording: Recording, flags: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return flags of `lockstep replay` under which one of the inputs whose gradients are compared has a
    signal, and notes of what was done for that: in an input whose advantages are all 0 every gradient is
    0, and two that are 0 compare nothing.

    Args:
        flags: those given; inputs that they name are left as they are.
    """
    given = dict(itertools.pairwise(flags))
    if "--inputs" in given or "--no-backward" in flags or given.get("--loss", "recorded") != "recorded":
        return tuple(flags), ()
    candidates = list(_candidates(recording, given.get("--steps")))
    chosen = candidates[: int(given.get("--max-inputs", len(candidates)))]
    counted = min(len(chosen), int(given.get("--gradient-inputs", _GRADIENT_INPUTS)))
    if not counted:
        return tuple(flags), ()
    first = next((index for index in candidates if _has_signal(recording[index].batch)), None)
    if first is None or first in chosen[:counted]:
        return tuple(flags), ()
    before = chosen[:counted]
    chosen = [first, *(index for index in chosen if index != first)][: len(chosen)]
    kept = _without(flags, ("--max-inputs", "--steps"))
    note = f"input {first} comes first: the advantages of inputs {ranges(before)} are all 0"
    return (*kept, "--inputs", ranges(chosen)), (note,)


def ranges(indices: Iterable[int]) -> str:
    """Write indices as --inputs reads them, in their order: [5, 0, 1, 2] is "5,0-2"."""
    spans: list[list[int]] = []
    for index in indices:
        if spans and index == spans[-1][1] + 1:
            spans[-1][1] = index
        else:
            spans.append([index, index])
    return ",".join(f"{low}-{high}" if high > low else str(low) for low, high in spans)


def _candidates(recording: Recording, steps: str | None) -> Iterator[int]:
    first, _, last = (steps or ":").partition(":")
    for index, meta in enumerate(recording.metas):
        if (not first or meta.step >= int(first)) and (not last or meta.step < int(last)):
            yield index


def _has_signal(batch: PackedBatch) -> bool:
    trained = batch.loss_mask
    if isinstance(batch, PolicyBatch):
        trained = trained & (batch.advantages != 0)
    return bool(trained.any())


def _without(flags: Sequence[str], names: Sequence[str]) -> Iterator[str]:
    """The flags but those of these names, with their values."""
    skip = False
    for flag in flags:
        if not skip and flag not in names:
            yield flag
        skip = not skip and flag in names
