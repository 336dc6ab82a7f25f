"""Metrics of a step: their writers, named timers, and the memory of this process."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import resource
import secrets
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from lockstep.errors import ConfigError, TrainError
from lockstep.observe.files import json_lines, read_plain
from lockstep.observe.run_dir import RunDir
from lockstep.observe.run_history import EVALUATION

# Writers of a step's metrics: metrics.jsonl, TensorBoard, Weights & Biases.


class Writer(Protocol):
    """A destination of metrics."""

    def write(self, step: int, metrics: Mapping[str, float], *, evaluation: str | None) -> None:
        """Write a step, counted from 0, or an evaluation of the weights after `step` steps."""
        ...

    def close(self) -> None: ...


class JsonlWriter:
    """metrics.jsonl or ledger.jsonl: an object per line, which survives a killed process, and after `sync` a
    power cut. A line that does not fit on the disk leaves no trace."""

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        self._handle = os.open(path, flags, 0o666)
        if not stat.S_ISREG(os.fstat(self._handle).st_mode):
            self.close()
            raise TrainError(f"not-a-file: {path}: is not a regular file; move it away")

    def write(self, step: int, metrics: Mapping[str, float], *, evaluation: str | None) -> None:
        kind = {} if evaluation is None else {EVALUATION: evaluation}
        self.append([{"step": step, **kind, "timestamp": round(time.time(), 3), **metrics}])

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write an object per line, all or none."""
        line = json_lines(rows).encode()
        size = os.fstat(self._handle).st_size
        try:
            while line:
                line = line[os.write(self._handle, line) :]
        except OSError:
            # Otherwise a resumed run would append its first line to half a line.
            os.ftruncate(self._handle, size)
            raise

    def sync(self) -> None:
        """Wait until all lines are on the disk."""
        os.fsync(self._handle)

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
        self._handle = -1


class TensorBoardWriter:
    """Scalars for TensorBoard. `purge_step`: events from this step on, of an earlier process, are hidden."""

    def __init__(self, folder: Path, *, purge_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard reads files in the order of their names, which begin with the second of their making.
        while any(folder.glob(f"events.out.tfevents.{int(time.time()):010d}.*")):
            time.sleep(0.05)
        self._writer = SummaryWriter(str(folder), purge_step=purge_step)

    def write(self, step: int, metrics: Mapping[str, float], *, evaluation: str | None) -> None:
        for name, value in metrics.items():
            if isinstance(value, (int, float)):
                self._writer.add_scalar(name, value, step)
        # So that a run that is killed has its events on the disk, and a step shows as soon as it is done.
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbWriter:
    """Weights & Biases; a resumed run continues under the same id.

    Raises:
        ConfigError: the package is not installed.
    """

    def __init__(
        self, folder: Path, *, project: str, name: str, config: Mapping[str, Any], resumed: bool
    ) -> None:
        check_wandb()
        import wandb

        id_file, run_id = folder / "wandb-id", secrets.token_hex(4)
        if resumed and id_file.exists():
            run_id = read_plain(id_file, ConfigError, limit=1000).decode("utf-8", "replace").strip()
        id_file.write_text(run_id + "\n")
        self._run = wandb.init(
            project=project, name=name, id=run_id, resume="allow", dir=str(folder), config=dict(config)
        )

    def write(self, step: int, metrics: Mapping[str, float], *, evaluation: str | None) -> None:
        # wandb drops what has a smaller step than what came before; a step of our own survives rewinding.
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        self._run.finish()


def check_wandb() -> None:
    """Raise ConfigError if the package wandb is not installed."""
    spec = importlib.util.find_spec("wandb")
    if spec is None or spec.origin is None:  # wandb makes folders of that name, which Python takes for it
        raise ConfigError(
            "missing-package: log.wandb = true needs the package wandb: run `pip install wandb`, or set "
            "log.wandb = false"
        )


class MetricsLog:
    """All writers of a run, in one.

    Args:
        run_dir: of the run, whose files are written. A full or failing disk is a TrainError.
        first_step: of this process.
    """

    def __init__(self, writers: Iterable[Writer], *, run_dir: RunDir, first_step: int = 0) -> None:
        self._writers = list(writers)
        self._ledger: JsonlWriter | None = None
        self._run_dir, self._first_step = run_dir, first_step

    @classmethod
    def of_run(
        cls,
        run_dir: RunDir,
        *,
        tensorboard: bool,
        wandb: Mapping[str, Any] | None = None,
        first_step: int = 0,
    ) -> MetricsLog:
        """Open metrics.jsonl and the configured writers.

        Args:
            wandb: project, name and config; None: no wandb.
            first_step: of this process; above 0 the run was resumed.
        """
        with run_dir.writing(run_dir.metrics), contextlib.ExitStack() as opened:
            writers: list[Writer] = []

            def add(writer: Writer) -> None:
                writers.append(writer)
                opened.callback(writer.close)

            if wandb is not None:  # first: it is the one that may be missing
                add(WandbWriter(run_dir.logs, resumed=first_step > 0, **wandb))
            add(JsonlWriter(run_dir.metrics))
            if tensorboard:
                purge = first_step if first_step > 0 else None
                add(TensorBoardWriter(run_dir.logs / "tensorboard", purge_step=purge))
            opened.pop_all()
        return cls(writers, run_dir=run_dir, first_step=first_step)

    def write(self, step: int, metrics: Mapping[str, float], *, evaluation: str | None = None) -> None:
        """Write to every writer. `evaluation`: "before", "during" or "after"; None for a training step.

        Raises:
            TrainError: the disk is full or fails.
        """
        with self._run_dir.writing(self._run_dir.metrics):
            for writer in self._writers:
                writer.write(step, metrics, evaluation=evaluation)

    def write_ledger(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add to ledger.jsonl, which the first of them makes. Raises as `write`."""
        with self._run_dir.writing(self._run_dir.ledger):
            if self._ledger is None:
                self._ledger = JsonlWriter(self._run_dir.ledger)
                if self._first_step and not self._run_dir.ledger.stat().st_size:
                    self._ledger.append([{"step": self._first_step, "since": self._first_step}])
            self._ledger.append(rows)

    def sync(self) -> None:
        """Wait until both files are on the disk: a checkpoint relies on their lines. Raises as `write`."""
        with self._run_dir.writing(self._run_dir.metrics):
            for writer in (*self._writers, self._ledger):
                if isinstance(writer, JsonlWriter):
                    writer.sync()

    def close(self) -> None:
        """Close every writer. Raises as `write`."""
        with self._run_dir.writing(self._run_dir.metrics), contextlib.ExitStack() as closing:
            for writer in (*self._writers, self._ledger):
                if writer is not None:
                    closing.callback(writer.close)


# Named timers: where the seconds of a step went.


WORK = frozenset(
    {
        "generate",
        "reward",
        "logprobs",
        "values",
        "forward",
        "backward",
        "forward_backward",
        "optimizer",
        "value",
    }
)
"""Spans that count as the step's work; the rest of a step is host overhead."""


@dataclass(slots=True)
class _Open:
    name: str
    started: float
    children: float = 0.0


@dataclass(slots=True)
class Spans:
    """Timers of one thread, nested.

    `with spans("generate"): ...` adds to time/generate what passed outside inner spans (self-time).

    Args:
        synchronize: called on entry and exit of every span, such as torch.cuda.synchronize: without it a span
            on an asynchronous device measures only what the host waited for.
        on_change: called with the names of the open spans, outermost first, whenever they change.
    """

    synchronize: Callable[[], None] | None = None
    on_change: Callable[[tuple[str, ...]], None] | None = None
    work: frozenset[str] = WORK
    clock: Callable[[], float] = time.perf_counter
    _stack: list[_Open] = field(default_factory=list)
    _self_time: dict[str, float] = field(default_factory=dict)
    _work_time: float = 0.0
    _since: float | None = None

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time the body under `name`. Raises ValueError for "step", "host" and "host_share"."""
        if name in ("step", "host", "host_share"):
            raise ValueError(f"span {name!r}: this name is taken by what Spans reports about the whole step")
        if self._since is None:
            self._since = self.clock()
        if self.synchronize is not None:
            self.synchronize()
        self._stack.append(_Open(name, self.clock()))
        if self.on_change is not None:
            self.on_change(self.open)
        try:
            yield
        finally:
            # No synchronisation on the way out of an error: it could raise over the error that matters.
            if self.synchronize is not None and sys.exc_info()[0] is None:
                self.synchronize()
            span = self._stack.pop()
            elapsed = self.clock() - span.started
            self._self_time[span.name] = self._self_time.get(span.name, 0.0) + elapsed - span.children
            if self._stack:
                self._stack[-1].children += elapsed
            if span.name in self.work and not any(outer.name in self.work for outer in self._stack):
                self._work_time += elapsed
            if self.on_change is not None:
                self.on_change(self.open)

    def start(self) -> None:
        """Begin the step now; without this it begins with its first span, or at the last flush."""
        self._self_time.clear()
        self._work_time = 0.0
        self._since = self.clock()

    def flush(self) -> dict[str, float]:
        """Return the seconds since the step began, and start the next one.

        Returns:
            time/NAME (self-time) per span; time/step (wall); time/host (wall less the outermost `work` spans
            and what is nested in them) and time/host_share (host / wall, 0 to 1).

        Raises:
            RuntimeError: inside a span.
        """
        if self._stack:
            raise RuntimeError(f"spans flushed inside span {self._stack[-1].name!r}; flush between steps")
        now = self.clock()
        wall = 0.0 if self._since is None else now - self._since
        host = max(0.0, wall - self._work_time)
        metrics = {f"time/{name}": seconds for name, seconds in self._self_time.items()}
        metrics |= {"time/step": wall, "time/host": host, "time/host_share": host / wall if wall > 0 else 0.0}
        self.start()
        return metrics

    @property
    def open(self) -> tuple[str, ...]:
        """Names of the open spans, outermost first."""
        return tuple(span.name for span in self._stack)


# Memory of this process and of its CUDA device.


GIB = 1024**3


def memory_metrics(device: str = "cpu") -> dict[str, float]:
    """Return memory/rss_peak_gib, since the process started; on CUDA also memory/cuda_peak_gib, allocated
    since the last call, and memory/cuda_reserved_gib.

    Args:
        device: "cpu", "cuda" or "cuda:N".
    """
    metrics = {"memory/rss_peak_gib": peak_rss_bytes() / GIB}
    if device.startswith("cuda"):
        import torch

        metrics["memory/cuda_peak_gib"] = torch.cuda.max_memory_allocated(device) / GIB
        metrics["memory/cuda_reserved_gib"] = torch.cuda.memory_reserved(device) / GIB
        torch.cuda.reset_peak_memory_stats(device)
    return metrics


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the error is an out-of-memory error: a GPU's allocator has its own exception, the CPU's
    raises a plain RuntimeError."""
    import torch

    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)


def peak_rss_bytes() -> int:
    """Return the highest resident size of this process.

    Linux keeps ru_maxrss across exec, so a process that a larger one started would report the larger one's;
    VmHWM is the process's own.
    """
    status = Path("/proc/self/status")
    if status.exists():
        peak = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(peak.split()[1]) * 1024
    # macOS reports bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
