"""The results of a replay: a row per input, and aggregates over all rows."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TextIO

from lockstep.errors import ConfigError
from lockstep.observe.files import check_above, jsonable, naming, write_atomic, write_json
from lockstep.observe.text import printable_lines
from lockstep_lab.suite.run import make_folder

Status = Literal["ok", "failed", "oom", "skipped", "desync"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayRow:
    """One input's result: a line of OUT/results.jsonl."""

    index: int
    """Index of the input in the recording."""
    step: int
    update: int
    micro_batch: int
    rank: int
    status: Status
    """failed: it raised. oom: memory ran out. skipped: not tried, because an earlier one broke the device
    or the ranks got out of step, which is desync."""
    documents: int
    tokens: int
    """Tokens of real documents."""
    longest: int
    shortest: int
    weights: str = "unknown"
    """match, mismatch or unknown: whether the weights are those that saw this input."""
    first_call: bool = False
    """The first input of its shape (eager: of the replay), which pays for compilation and warm-up."""
    shape: tuple[int, int, int] | None = None
    """Slots, entries of cu_seqlens, longest document allowed."""
    computed_slots: int = 0
    """Rows that every layer computed: T, or B x L when padded."""
    forward_ms: float | None = None
    """Forward with the loss, device-synchronised."""
    backward_ms: float | None = None
    tokens_per_second: float | None = None
    """Real tokens over forward and backward."""
    slots_per_second: float | None = None
    """Computed slots over forward and backward."""
    peak_memory_bytes: int | None = None
    loss: float | None = None
    loss_recorded: float | None = None
    loss_difference: float | None = None
    """loss - loss_recorded."""
    logprob_max_difference: float | None = None
    """Largest |logprob - recorded| of a trained token, nats."""
    logprob_mean_difference: float | None = None
    grad_norm: float | None = None
    """Norm of this input's gradients alone, before clipping."""
    new_graphs: int = 0
    """Graphs that torch compiled during it."""
    error: Mapping[str, str] | None = None
    """type, line (the one that matters) and log (the traceback's file in OUT)."""


@dataclass(slots=True)
class ReplayFiles:
    """OUT: results.jsonl, replay.log, tracebacks/, summary.json.

    Args:
        out: a directory that holds no earlier replay; made with the first line: what is refused leaves
            nothing behind.
        echo: called with every line of the log that is also for the terminal.
    """

    out: Path
    echo: Callable[[str], None] = print
    _opened: tuple[TextIO, TextIO] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        check_fresh(self.out)

    def _files(self) -> tuple[TextIO, TextIO]:
        """(results, log)."""
        if self._opened is None:
            make_folder(self.out)
            results = (self.out / "results.jsonl").open("w", encoding="utf-8")
            self._opened = results, (self.out / "replay.log").open("w", encoding="utf-8")
        return self._opened

    def line(self, text: str, *, show: bool = True) -> None:
        """Write one line to the log."""
        log = self._files()[1]
        with naming(self.out / "replay.log"):
            log.write(printable_lines(text) + "\n")
            log.flush()
        if show:
            self.echo(printable_lines(text))

    def row(self, row: ReplayRow) -> None:
        """Write one input's row to the results and to the log."""
        text = json.dumps(jsonable(dataclasses.asdict(row)), ensure_ascii=False, allow_nan=False)
        results = self._files()[0]
        with naming(self.out / "results.jsonl"):
            results.write(text + "\n")
            results.flush()
        self.line(row_text(row), show=False)

    def traceback(self, index: int, error: BaseException) -> str:
        """Write an error's traceback; return its path below OUT."""
        text = "".join(traceback.format_exception(error))
        name = f"tracebacks/{index:06d}.txt"
        (self.out / "tracebacks").mkdir(parents=True, exist_ok=True)
        with naming(self.out / name):
            (self.out / name).write_text(text, encoding="utf-8", errors="backslashreplace")
        return name

    def summary(self, summary: Mapping[str, Any], *, copy: Path | None = None) -> None:
        """Write summary.json, and the same to `copy`."""
        self._files()
        write_json(self.out / "summary.json", summary)
        if copy is not None:
            write_atomic(copy, (self.out / "summary.json").read_text(encoding="utf-8"))

    def close(self) -> None:
        """Close the files."""
        for file in self._opened or ():
            file.close()


def check_fresh(out: Path) -> None:
    """Raise ConfigError if OUT holds a replay already, or is not a directory."""
    if out.exists() and not out.is_dir():
        raise ConfigError(f"not-a-file: --out {out} is a file; give a directory that does not exist yet")
    check_above(out)
    existing = [n for n in ("results.jsonl", "summary.json", "replay.log") if (out / n).exists()]
    if existing:
        raise ConfigError(
            f"already-exists: --out {out} already contains a replay ({existing[0]}); give another directory, "
            "or remove this one"
        )


def row_text(row: ReplayRow) -> str:
    """Format a row as one line of the log."""
    head = (
        f"input {row.index}: step {row.step} micro-batch {row.micro_batch} rank {row.rank}, {row.documents} "
        f"documents of {row.shortest} to {row.longest}, {row.tokens} tokens"
    )
    if row.error is not None:
        return f"{head}: {row.status.upper()}: {row.error['type']}: {row.error['line']} ({row.error['log']})"
    if row.status != "ok":
        return f"{head}: {row.status}"
    parts = [f"forward {_ms(row.forward_ms)}"]
    if row.backward_ms is not None:
        parts.append(f"backward {_ms(row.backward_ms)}")
    if row.tokens_per_second is not None:
        parts.append(f"{row.tokens_per_second:,.0f} tok/s")
    if row.peak_memory_bytes is not None:
        parts.append(f"{row.peak_memory_bytes / 1024**2:,.0f} MiB")
    if row.loss is not None:
        parts.append(f"loss {row.loss:.6g}")
    if row.loss_difference is not None:
        parts.append(f"loss diff {row.loss_difference:.2g}")
    if row.logprob_max_difference is not None:
        parts.append(f"logprob diff max {row.logprob_max_difference:.2g}")
    if row.weights != "match":
        parts.append(f"weights {row.weights}")
    if row.new_graphs:
        parts.append(f"{row.new_graphs} new graphs")
    return f"{head}: " + ", ".join(parts)


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} ms"


def aggregate(rows: Sequence[ReplayRow]) -> dict[str, Any]:
    """Aggregate the rows: counts, totals, percentiles, first and steady calls, differences."""
    ok_rows = [row for row in rows if row.status == "ok"]
    steady = [row for row in ok_rows if not row.first_call] or ok_rows
    counts = Counter(row.status for row in rows)
    columns = {
        name: [value for row in steady if (value := getattr(row, name)) is not None]
        for name in ("forward_ms", "backward_ms", "tokens_per_second")
    }
    seconds = sum((row.forward_ms or 0.0) + (row.backward_ms or 0.0) for row in steady) / 1000
    steady_tokens = sum(row.tokens for row in steady)
    return {
        "counts": {name: counts.get(name, 0) for name in ("ok", "failed", "oom", "desync", "skipped")}
        | {"inputs": len(rows)},
        "totals": {
            "documents": sum(row.documents for row in ok_rows),
            "tokens": sum(row.tokens for row in ok_rows),
            "computed_slots": sum(row.computed_slots for row in ok_rows),
            "seconds": sum((row.forward_ms or 0.0) + (row.backward_ms or 0.0) for row in ok_rows) / 1000,
            "tokens_per_second": steady_tokens / seconds if seconds else None,
            "slots_per_second": sum(r.computed_slots for r in steady) / seconds if seconds else None,
        },
        "percentiles": {name: percentiles(values) for name, values in columns.items()},
        "first_call_ms": [
            {"shape": row.shape, "forward": row.forward_ms, "backward": row.backward_ms}
            for row in ok_rows
            if row.first_call
        ],
        "steady_ms": {
            name: statistics.median(columns[f"{name}_ms"]) if columns[f"{name}_ms"] else None
            for name in ("forward", "backward")
        },
        "differences": _differences(ok_rows)
        | {"on_recorded_weights": _differences([row for row in ok_rows if row.weights == "match"])},
        "errors": dict(Counter(row.error["type"] for row in rows if row.error is not None)),
    }


def _differences(rows: Sequence[ReplayRow]) -> dict[str, Any]:
    """Largest and mean differences of these inputs from the recording."""
    worst = [row.logprob_max_difference for row in rows if row.logprob_max_difference is not None]
    means = [row.logprob_mean_difference for row in rows if row.logprob_mean_difference is not None]
    losses = [abs(row.loss_difference) for row in rows if row.loss_difference is not None]
    return {
        "compared": len(worst),
        "logprob_max": _largest(worst),
        "logprob_mean": statistics.fmean(means) if means else None,
        "loss_max": _largest(losses),
    }


def _largest(values: Sequence[float]) -> float | None:
    """The largest value; nan if any of them is nan, which `max` would miss."""
    return max(values, key=lambda value: (math.isnan(value), value), default=None)


def percentiles(values: Sequence[float]) -> dict[str, float | None]:
    """min, p10, p50, p90, p99, max (nearest rank) and mean; each None if there are no values."""
    names = {"min": 0.0, "p10": 0.1, "p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    if not values:
        return dict.fromkeys((*names, "mean"))
    ordered = sorted(values)
    result: dict[str, float | None] = {
        name: ordered[max(0, math.ceil(share * len(ordered)) - 1)] for name, share in names.items()
    }
    return result | {"mean": statistics.fmean(values)}
