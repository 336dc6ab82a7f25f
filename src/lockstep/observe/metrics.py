"""Where the numbers of a step go: metrics.jsonl, TensorBoard, Weights & Biases."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from lockstep.errors import ConfigError
from lockstep.observe.files import json_lines
from lockstep.observe.run_dir import EVALUATION, RunDir


class Writer(Protocol):
    """Where metrics go."""

    def write(self, step: int, metrics: Mapping[str, float], *, evaluation: str | None) -> None:
        """A step counted from 0, or an evaluation of the weights after `step` steps."""
        ...

    def close(self) -> None: ...


class JsonlWriter:
    """metrics.jsonl: an object per line, which survives a killed process (not a power cut)."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, metrics: Mapping[str, float], *, evaluation: str | None) -> None:
        kind = {} if evaluation is None else {EVALUATION: evaluation}
        self._file.write(json_lines([{"step": step, **kind, "timestamp": round(time.time(), 3), **metrics}]))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoardWriter:
    """Scalars for TensorBoard. `purge_step`: events from this step on, of an earlier process, are hidden."""

    def __init__(self, folder: Path, *, purge_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=purge_step)

    def write(self, step: int, metrics: Mapping[str, float], *, evaluation: str | None) -> None:
        for name, value in metrics.items():
            if isinstance(value, (int, float)):
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbWriter:
    """Weights & Biases; a resumed run goes on under the same id.

    Raises:
        ConfigError: the package is not installed.
    """

    def __init__(
        self, folder: Path, *, project: str, name: str, config: Mapping[str, Any], resumed: bool
    ) -> None:
        try:
            import wandb
        except ModuleNotFoundError as error:
            raise ConfigError(
                "log.wandb = true needs the package wandb: run `pip install wandb`, or set log.wandb = false"
            ) from error
        id_file = folder / "wandb-id"
        run_id = id_file.read_text().strip() if resumed and id_file.exists() else secrets.token_hex(4)
        id_file.write_text(run_id + "\n")
        self._run = wandb.init(
            project=project, name=name, id=run_id, resume="allow", dir=str(folder), config=dict(config)
        )

    def write(self, step: int, metrics: Mapping[str, float], *, evaluation: str | None) -> None:
        # wandb drops what has a smaller step than what came before; a step of our own survives rewinding.
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        self._run.finish()


class MetricsLog:
    """All writers of a run, in one."""

    def __init__(self, writers: Iterable[Writer]) -> None:
        self._writers = list(writers)

    @classmethod
    def of_run(
        cls,
        run_dir: RunDir,
        *,
        tensorboard: bool,
        wandb: Mapping[str, Any] | None = None,
        first_step: int = 0,
    ) -> MetricsLog:
        """metrics.jsonl, and what is asked for.

        Args:
            wandb: project, name and config; None: no wandb.
            first_step: of this process; above 0 the run was resumed.
        """
        writers: list[Writer] = []
        if wandb is not None:  # first: it is the one that may be missing
            writers.append(WandbWriter(run_dir.logs, resumed=first_step > 0, **wandb))
        writers.append(JsonlWriter(run_dir.metrics))
        if tensorboard:
            purge = first_step if first_step > 0 else None
            writers.append(TensorBoardWriter(run_dir.logs / "tensorboard", purge_step=purge))
        return cls(writers)

    def write(self, step: int, metrics: Mapping[str, float], *, evaluation: str | None = None) -> None:
        """To every writer. `evaluation`: "before", "during" or "after"; None for a training step."""
        for writer in self._writers:
            writer.write(step, metrics, evaluation=evaluation)

    def close(self) -> None:
        """Close every writer."""
        for writer in self._writers:
            writer.close()
