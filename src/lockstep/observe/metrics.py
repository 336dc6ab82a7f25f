"""Writers of a step's metrics: metrics.jsonl, TensorBoard, Weights & Biases."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import stat
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from lockstep.errors import ConfigError, TrainError
from lockstep.observe.files import json_lines, read_plain
from lockstep.observe.run_dir import RunDir
from lockstep.observe.run_history import EVALUATION


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
            raise TrainError(f"not-a-file: {path}: is not a regular file; move it away", path=path)

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
