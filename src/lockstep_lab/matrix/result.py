"""The results of a matrix: one record per cell, matrix.json, and when a cell agrees with its reference."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, TypeAdapter, ValidationError

from lockstep.config.problems import first_data
from lockstep.errors import RecordingError
from lockstep.observe.files import read_json, read_plain
from lockstep.observe.text import printable_lines
from lockstep_lab.matrix.compare import Comparison, compare_outputs
from lockstep_lab.suite.job_files import WorkerOutcome, first_problem
from lockstep_lab.suite.process import ExitStatus
from lockstep_lab.suite.report import at
from lockstep_lab.suite.result import Status
from lockstep_lab.suite.run import how_it_ended

FORMAT, VERSION = "lockstep-matrix", 1

LOGPROB_LIMIT = 1e-4
"""Nats, the largest |difference| of a float32 cell to a float32 reference: docs/explanation/numerics.md
claims it of the bundled model; tiny models stay within 2e-6."""
GRADIENT_LIMIT = 1e-4
"""Relative (Frobenius), the same; tiny models stay within 1e-5."""
ROUNDING_FACTOR = 1.5
"""A bfloat16 cell against a float32 reference: RMS logprob difference and gradient error at most this many
times those of the reference's own kernels in bfloat16 (docs/explanation/numerics.md)."""
HALF_RMS_LIMIT, HALF_GRADIENT_LIMIT = 0.025, 0.05
"""The same where the matrix has no such cell to measure by: RMS nats, relative, times the square root of the
number of layers, because rounding adds up as a random walk. On an H200 the random 8B shape in bfloat16 is
0.029 nats and 0.029 from float32 with 2 layers, 0.11 nats and 0.14 with 32
(benchmarks/results/matrix-h200)."""


def status_of(word: Any) -> Any:
    """The status of a cell; matrices of earlier versions had words of their own."""
    old = {"out of memory": "oom", "timeout": "hung", "crashed": "failed", "not run": "interrupted"}
    return next((new for start, new in old.items() if str(word).startswith(start)), word)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measures:
    """What the cell's replay measured; None: not known."""

    first_call_ms: float | None = None
    """Forward and backward of the first input, with warm-up and compilation."""
    forward_ms: float | None = None
    """Median per input, without first calls."""
    backward_ms: float | None = None
    steady_ms: float | None = None
    """Forward and backward of an input, median, without first calls."""
    tokens_per_second: float | None = None
    """Real tokens (without pads) per second, without first calls."""
    peak_memory_bytes: float | None = None
    graphs: int | None = None
    recompiles: int | None = None
    graph_breaks: int | None = None
    inputs_ok: int = 0
    inputs_failed: int = 0
    inputs_oom: int = 0
    inputs_skipped: int = 0
    tokens: int | None = None
    computed_slots: int | None = None
    """Token slots that went through the layers, pads included."""
    num_layers: int | None = None
    """Layers of the model that was replayed."""
    weights: str = ""
    """How many inputs ran on the recorded weights, and what replay says of the first one's: a fingerprint
    that is not the recording's, for example."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CellResult:
    """The result of one cell."""

    name: str
    values: Mapping[str, str]
    """Axis -> value."""
    flags: tuple[str, ...]
    """The cell as flags of `lockstep replay`."""
    command: str
    """The whole command, to be typed."""
    status: Annotated[Status, BeforeValidator(status_of)]
    reason: str = ""
    """Error class and the line that matters; of a refused cell, why; of one that is not done yet, nothing."""
    folder: str
    """The cell's folder, relative to the matrix's."""
    log: str | None = None
    """Relative path of the process's output; None: no process was started."""
    seconds: float | None = None
    """Duration of the whole process."""
    reference: str | None = None
    """The cell it is compared with; None: it is a reference itself."""
    measures: Measures | None = None
    comparison: Comparison | None = None
    agrees: bool | None = None
    """Whether the cell agrees with its reference; None: not compared."""
    disagreement: str = ""
    """Which difference is beyond which limit, or why there is no comparison."""
    timing_note: str = ""
    """Why its times must not be compared with the others'; empty when they may."""
    is_extra: bool = False
    """Whether this is a reference cell outside the axes' combinations."""

    @property
    def works(self) -> bool:
        return self.status == "ok"

    @property
    def fails(self) -> bool:
        """Whether the cell makes the exit status 1; a refused cell does not."""
        return self.status not in ("ok", "refused") or self.agrees is False


@dataclass(frozen=True, kw_only=True, slots=True)
class MatrixResult:
    """matrix.json."""

    command: str
    created: str
    """ISO 8601, UTC."""
    recording: Mapping[str, Any]
    """path, inputs, model, framework."""
    environment: Mapping[str, str]
    """machine, torch, transformers, python, lockstep, commit."""
    axes: Mapping[str, Sequence[str]]
    shared: tuple[str, ...]
    """Flags of replay that all cells have."""
    limits: Mapping[str, float | None]
    cells: tuple[CellResult, ...]
    complete: bool
    notes: tuple[str, ...] = ()

    def cell(self, name: str | None) -> CellResult | None:
        return next((cell for cell in self.cells if cell.name == name), None)

    @property
    def ok(self) -> bool:
        """Whether the exit status is 0: no cell that ran fails or disagrees, and those that work were
        compared."""
        if not self.complete or any(cell.fails for cell in self.cells):
            return False
        return all(cell.agrees is not None for cell in self.cells if cell.works and cell.reference)

    @property
    def table(self) -> tuple[CellResult, ...]:
        """The axes' combinations, without the extra reference cells."""
        return tuple(cell for cell in self.cells if not cell.is_extra)

    @property
    def verdict(self) -> str:
        """The verdict, which is printed last: how many cells work, are refused, do not, and disagree."""
        ran = [cell for cell in self.table if cell.status != "interrupted"]
        parts = [f"{len(self.table)} cells", f"{sum(cell.works for cell in ran)} work"]
        refused = sum(cell.status == "refused" for cell in ran)
        broken = [cell for cell in ran if not cell.works and cell.status != "refused"]
        if refused:
            parts.append(f"{refused} refused")
        if broken:
            parts.append(f"{len(broken)} do not: {', '.join(f'{c.name} ({c.status})' for c in broken[:3])}")
        if len(ran) < len(self.table):
            parts.append(f"{len(self.table) - len(ran)} not run")
        for extra in (cell for cell in self.cells if cell.is_extra and not cell.works):
            parts.append(f"{extra.name}: {extra.status}")
        apart = [cell for cell in self.cells if cell.agrees is False]
        if apart:
            parts.append(f"{len(apart)} disagree: {', '.join(cell.name for cell in apart[:3])}")
        far = {cell.name: d for cell in self.cells if (d := at(cell, "comparison.logprob_max")) is not None}
        if far:
            worst = max(far, key=lambda name: math.inf if math.isnan(far[name]) else far[name])
            parts.append(f"largest difference {far[worst]:.2g} nats ({worst})")
        return "matrix: " + ", ".join(parts)

    def speed_ratio(self, cell: CellResult) -> float | None:
        """Tokens per second as a multiple of the reference cell's; None: not both are known and
        comparable."""
        reference = self.cell(cell.reference or cell.name)
        if reference is None or reference.measures is None or cell.measures is None:
            return None
        mine, base = cell.measures.tokens_per_second, reference.measures.tokens_per_second
        if not mine or not base or cell.timing_note or reference.timing_note:
            return None
        return mine / base

    def as_dict(self) -> dict[str, Any]:
        """The result as matrix.json has it."""
        cells = [
            asdict(cell) | {"works": cell.works, "speed_ratio": self.speed_ratio(cell)} for cell in self.cells
        ]
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "cells"}
        return {"format": FORMAT, "version": VERSION, **own, "verdict": self.verdict, "cells": cells}


CELL: TypeAdapter[CellResult] = TypeAdapter(CellResult)
"""Reads a cell's JSON; keys that it does not know are left."""
_MATRIX: TypeAdapter[MatrixResult] = TypeAdapter(MatrixResult)


def read_matrix(path: Path) -> MatrixResult:
    """Read a result from its folder or its matrix.json.

    Raises:
        RecordingError: no such file, or it is not a matrix's.
    """
    file = path / "matrix.json" if path.is_dir() else path
    values = _read_object(file)
    if values.get("format") != FORMAT or values.get("version") != VERSION:
        raise RecordingError(
            f"version-differs: {file}: format = {values.get('format')!r}, version = "
            f"{values.get('version')!r}; this Lockstep reads {FORMAT} {VERSION}, which `lockstep matrix` "
            "writes"
        )
    try:
        return _MATRIX.validate_python(values)
    except ValidationError as error:
        raise RecordingError(
            f"{file} does not have the form that `lockstep matrix` writes ({first_problem(error)})",
            **first_data(error),
        ) from error


def read_measures(summary: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Measures:
    """Take the measures from a replay's summary.json and results.jsonl."""
    counts = {status: sum(row.get("status") == status for row in rows) for status in ("ok", "failed", "oom")}
    ok_rows = [row for row in rows if row.get("status") == "ok"]
    memory = _figure(summary, "memory.peak_bytes")
    if memory is None:
        memory = max((m for row in rows if (m := _figure(row, "peak_memory_bytes"))), default=None)
    first = next((row for row in ok_rows if row.get("first_call")), None)
    later = [row for row in ok_rows if not row.get("first_call")] or ok_rows
    times = [time for row in later if (time := _total_ms(row)) is not None]
    return Measures(
        first_call_ms=None if first is None else _total_ms(first),
        forward_ms=_figure(summary, "steady_ms.forward"),
        backward_ms=_figure(summary, "steady_ms.backward"),
        steady_ms=statistics.median(times) if times else None,
        tokens_per_second=_figure(summary, "totals.tokens_per_second"),
        peak_memory_bytes=memory,
        graphs=_figure(summary, "compile.graphs"),
        recompiles=_figure(summary, "compile.recompiles"),
        graph_breaks=_figure(summary, "compile.graph_breaks"),
        inputs_ok=counts["ok"],
        inputs_failed=counts["failed"],
        inputs_oom=counts["oom"],
        inputs_skipped=len(rows) - sum(counts.values()),
        tokens=sum(_figure(row, "tokens") or 0 for row in ok_rows),
        computed_slots=sum(_figure(row, "computed_slots") or 0 for row in ok_rows),
        num_layers=_figure(summary, "model.num_layers"),
        weights=_weights(summary),
    )


def _weights(summary: Mapping[str, Any]) -> str:
    weights = summary.get("weights")
    statement = str(weights.get("statement") or "") if isinstance(weights, Mapping) else ""
    names = {"match": "on the recorded weights", "mismatch": "NOT on them", "unknown": "on weights unknown"}
    counts = {kind: _figure(summary, f"weights.inputs.{kind}") or 0 for kind in names}
    total = sum(counts.values())
    if not total:
        return statement
    text = ", ".join(f"{count} {names[kind]}" for kind, count in counts.items() if count)
    return f"of {total} inputs {text}" + (f"; the first: {statement}" if statement else "")


def _total_ms(row: Mapping[str, Any]) -> float | None:
    """Milliseconds of forward and backward of an input, or of forward alone in a replay without backward."""
    forward = _figure(row, "forward_ms")
    return None if forward is None else forward + (_figure(row, "backward_ms") or 0.0)


def judge(
    comparison: Comparison,
    *,
    rounds: bool,
    yardstick: Comparison | None,
    limits: Mapping[str, float | None],
    num_layers: int = 1,
) -> tuple[bool, str]:
    """Judge whether a cell agrees with its reference, and name what is beyond which limit.

    Args:
        rounds: one of the two computes in 16 bits.
        yardstick: the reference's own kernels in the cell's dtype against the same reference, which is then
            float32; None: there is no such cell.
        limits: "logprob" (nats, largest difference) and "gradient" (relative), as the user gave them; None
            chooses by dtype.
        num_layers: of the model; in 16 bits more layers round more often.
    """
    kind, logprob = "largest", comparison.logprob_max
    logprob_limit, gradient_limit = LOGPROB_LIMIT, GRADIENT_LIMIT
    if rounds:
        depth = math.sqrt(num_layers)
        logprob_limit, gradient_limit = HALF_RMS_LIMIT * depth, HALF_GRADIENT_LIMIT * depth
        if yardstick is not None and yardstick.logprob_rms is not None:
            logprob_limit = ROUNDING_FACTOR * yardstick.logprob_rms
        if yardstick is not None and yardstick.gradient_relative_error is not None:
            gradient_limit = ROUNDING_FACTOR * yardstick.gradient_relative_error
        kind, logprob = "RMS", comparison.logprob_rms
    if limits.get("logprob") is not None:
        kind, logprob, logprob_limit = "largest", comparison.logprob_max, float(limits["logprob"] or 0.0)
    if limits.get("gradient") is not None:
        gradient_limit = float(limits["gradient"] or 0.0)
    beyond = []
    # `not <=` instead of `>`: a NaN is beyond every limit.
    if logprob is not None and not logprob <= logprob_limit:
        beyond.append(
            f"{kind} logprob difference {logprob:.2g} nats, limit {logprob_limit:.2g}"
            + (f" (input {comparison.worst_input})" if kind == "largest" else "")
        )
    error = comparison.gradient_relative_error
    if error is not None and not error <= gradient_limit:
        where = f" (worst: {comparison.worst_parameter})" if comparison.worst_parameter else ""
        beyond.append(f"gradient relative error {error:.2g}, limit {gradient_limit:.2g}{where}")
    return not beyond, "; ".join(beyond)


def _read_object(file: Path) -> dict[str, Any]:
    try:
        values = read_json(file, RecordingError)
    except RecordingError as error:
        raise error.with_message(f"{error}; give the output folder of `lockstep matrix`") from error
    if not isinstance(values, dict):
        raise RecordingError(f"wrong-type: {file}: expected a JSON object, got {type(values).__name__}")
    return values


def _figure(values: Mapping[str, Any], path: str) -> Any:
    """The number at the end of a path of keys, in a file that may be damaged; None: there is none."""
    value: Any = values
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    if value in ("NaN", "Infinity", "-Infinity"):
        return float(value)
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


_USAGE_STATUS = 2
"""lockstep's exit status for an invalid setting."""
_SAID = re.compile(r"lockstep [a-z]+: (?P<code>error\[[a-z-]+\]: )?")
"""How a command's own last line begins; argparse writes "error" without a code."""


def with_process_result(
    result: CellResult, exit_status: ExitStatus, *, folder: Path, timeout: float
) -> CellResult:
    """Add status, reason and measures to `result`.

    Args:
        folder: the cell's: log.txt, and replay/ with the replay's own files.
        timeout: seconds that the cell had.
    """
    rows, summary = read_rows(folder / "replay" / "results.jsonl"), _read(folder / "replay" / "summary.json")
    outcome = None if summary is None else _outcome(rows, summary)
    status, reason = how_it_ended(exit_status, outcome, log=folder / "log.txt", timeout=timeout)
    if said := _SAID.match(reason):
        reason = reason[said.end() :]
        if exit_status.returncode == _USAGE_STATUS and said["code"]:
            status = "refused"
    return replace(
        result,
        status=status,
        reason=printable_lines(reason),
        log=f"{result.folder}/log.txt",
        seconds=round(exit_status.seconds, 3),
        measures=read_measures(summary or {}, rows) if summary is not None or rows else None,
    )


def compare_cells(cell: CellResult, reference: CellResult, *, out: Path) -> Comparison:
    """Compare the outputs of two cells that work.

    Raises:
        RecordingError: one of them left none, or they are of different inputs.
    """
    folders = [out / result.folder / "replay" for result in (cell, reference)]
    summed = [_summed(_read(folder / "summary.json")) for folder in folders]
    missing = ""
    if summed[0] != summed[1]:
        missing = f"the gradients are of inputs {summed[0]} here and of {summed[1]} in the reference cell"
    files = [folder / "outputs.safetensors" for folder in folders]
    return compare_outputs(files[0], files[1], gradients_missing=missing)


_ROWS_BYTES = 2**30
"""The largest results.jsonl that is read: a million inputs."""


def read_cell(folder: Path) -> CellResult | None:
    """What an earlier run of the matrix found; None: nothing yet.

    Raises:
        RecordingError: cell.json is damaged.
    """
    file = folder / "cell.json"
    if not file.exists():
        return None
    try:
        return CELL.validate_python(read_json(file, RecordingError))
    except ValidationError as error:
        raise RecordingError(
            f"{file} is not a cell's result ({first_problem(error)}); delete {folder} and resume",
            **first_data(error),
        ) from error


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Read the rows of a results.jsonl; a last line that a crash cut off is left out."""
    if not file.exists():
        return []
    rows = []
    text = read_plain(file, RecordingError, limit=_ROWS_BYTES).decode("utf-8", errors="replace")
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def _outcome(rows: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> WorkerOutcome:
    """How a replay that ran to its end says it went."""
    bad = [row for row in rows if row.get("status") != "ok"]
    if not rows:
        return WorkerOutcome(status="failed", reason="no input was replayed")
    if not bad:
        interrupted = bool(summary.get("interrupted"))
        reason = "the replay was interrupted" if interrupted else ""
        return WorkerOutcome(status="failed" if interrupted else "ok", reason=reason)
    # A device that an error has broken fails every later input as well: the first one says why. Inputs that
    # were skipped cannot.
    bad.sort(key=lambda row: row.get("error") is None)
    error = bad[0].get("error") or {}
    line = ": ".join(str(error[key]) for key in ("type", "line") if error.get(key)) or "no reason given"
    tried = {row.get("status") for row in bad} - {"skipped"}
    return WorkerOutcome(
        status="oom" if tried == {"oom"} else "failed",
        reason=f"{len(bad)} of {len(rows)} inputs; input {bad[0].get('index')}: {line}",
    )


def _summed(summary: Mapping[str, Any] | None) -> list[Any]:
    outputs = (summary or {}).get("outputs")
    inputs = outputs.get("gradient_inputs") if isinstance(outputs, Mapping) else None
    return list(inputs) if isinstance(inputs, list) else []


def _read(file: Path) -> dict[str, Any] | None:
    if not file.exists():
        return None
    try:
        values = read_json(file, RecordingError)
    except RecordingError:  # cut off by a crash: the log says why
        return None
    return values if isinstance(values, dict) else None
