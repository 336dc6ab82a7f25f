"""Numbers of a step: added up over micro-batches, then written to every place that wants them."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from lockstep.errors import ConfigError
from lockstep.observe.files import json_lines
from lockstep.observe.run_dir import EVALUATION, RunDir

Reduction = Literal["mean", "max", "sum"]


class MetricAccumulator:
    """Adds values under names until `reduce`. A name keeps the reduction it was first added with.

    Values may be 0-dim tensors: they are read (which waits for their device) only in `reduce`.

    Example:
        >>> metrics = MetricAccumulator()
        >>> metrics.add("loss", 1.0, weight=3); metrics.add("loss", 5.0, weight=1)
        >>> metrics.reduce()
        {'loss': 2.0}
    """

    def __init__(self) -> None:
        self._values: dict[str, list[tuple[Any, float]]] = {}
        self._kinds: dict[str, Reduction] = {}

    def add(self, name: str, value: Any, *, kind: Reduction = "mean", weight: float = 1.0) -> None:
        """One value. `weight` counts for means only, such as the number of tokens that it is the mean of.

        Raises:
            ValueError: another reduction than before, or a negative weight.
        """
        known = self._kinds.setdefault(name, kind)
        if known != kind:
            raise ValueError(f"metric {name!r} was added as {known!r}, now as {kind!r}; use two names")
        if weight < 0:
            raise ValueError(f"metric {name!r}: weight {weight} is negative")
        self._values.setdefault(name, []).append((value, weight))

    def reduce(self) -> dict[str, float]:
        """One number per name, and start anew. NaN stays NaN; a mean of no weight at all is NaN."""
        result = {name: _reduce(values, self._kinds[name]) for name, values in self._values.items()}
        self._values.clear()
        self._kinds.clear()
        return result


def _reduce(values: list[tuple[Any, float]], kind: Reduction) -> float:
    numbers = [float(value) for value, _ in values]
    if kind == "sum":
        return math.fsum(numbers)
    if kind == "max":
        return math.nan if any(map(math.isnan, numbers)) else max(numbers)
    pairs = [(number, weight) for number, (_, weight) in zip(numbers, values, strict=True) if weight > 0]
    total = math.fsum(weight for _, weight in pairs)
    return math.fsum(number * weight for number, weight in pairs) / total if pairs else math.nan


def percentile(values: Iterable[Any], q: float) -> float:
    """The smallest value that at least q percent of `values` do not exceed (nearest rank); NaN for no values.

    Nearest rank gives a value that occurred, the same one whatever the order and the library.

    Example:
        >>> percentile([4.0, 1.0, 3.0, 2.0], 50)
        2.0
    """
    ordered = sorted(float(value) for value in values)
    if not ordered or any(map(math.isnan, ordered)):
        return math.nan
    return ordered[max(0, math.ceil(q / 100 * len(ordered)) - 1)]


def spread(name: str, values: Iterable[Any]) -> dict[str, float]:
    """name/mean, name/p99 and name/max; the latter two of absolute values: what a gap is judged by."""
    numbers = [float(value) for value in values]
    sizes = [abs(number) for number in numbers]
    return {
        f"{name}/mean": math.fsum(numbers) / len(numbers) if numbers else math.nan,
        f"{name}/p99": percentile(sizes, 99),
        f"{name}/max": percentile(sizes, 100),
    }


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
