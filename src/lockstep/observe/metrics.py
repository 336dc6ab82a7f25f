"""Metrics of a step: their writers, and named timers."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import secrets
import stat
import sys
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from lockstep.common_errors import missing_package
from lockstep.errors import ConfigError, DataError, TrainError
from lockstep.observe.files import json_lines, read_plain
from lockstep.observe.run_dir import RunDir
from lockstep.observe.run_history import (
    EVALUATION,
    is_step,
    ledger_since,
    read_lines,
    rollout_counts,
    rollout_gaps,
    saves_rollouts,
    trained_samples,
)
from lockstep.observe.text import counted

log = logging.getLogger(__name__)

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
            raise TrainError(f"not-a-file: {path} is not a regular file; move it away")

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


def writes_tensorboard(setting: bool | str) -> bool:
    """Resolve log.tensorboard.

    Raises:
        ConfigError: it is true, and the package is not installed.
    """
    there = importlib.util.find_spec("tensorboard") is not None
    if setting is True and not there:
        raise missing_package(
            "log.tensorboard = true",
            "tensorboard",
            extra="tensorboard",
            or_else="set log.tensorboard = false",
        )
    if setting == "auto":
        found = "is installed" if there else "is not installed"
        log.info("log.tensorboard auto -> %s (tensorboard %s)", str(there).lower(), found)
        return there
    return bool(setting)


def check_wandb() -> None:
    """Raise ConfigError if the package wandb is not installed."""
    spec = importlib.util.find_spec("wandb")
    if spec is None or spec.origin is None:  # wandb makes folders of that name, which Python takes for it
        raise missing_package("log.wandb = true", "wandb", or_else="set log.wandb = false")


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
        tensorboard: bool | Literal["auto"],
        wandb: Mapping[str, Any] | None = None,
        first_step: int = 0,
    ) -> MetricsLog:
        """Open metrics.jsonl and the configured writers.

        Args:
            tensorboard: as log.tensorboard.
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
            if writes_tensorboard(tensorboard):
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
            raise ValueError(f"span {name!r}: Spans uses this name for its report about the whole step")
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
            raise RuntimeError(f"flushed inside span {self._stack[-1].name!r}; flush between steps")
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


# ledger.jsonl: what became of every sample that a run asked for, and the check that none was lost or trained
# twice.
#
#     {"id": "3/12/5", "step": 3, "seed": 7, "policy_versions": [3], "attempt": 1, "trained_step": 3,
#      "dropped": null}
#
# The lines of a step are written after its update, all at once, and before its line in metrics.jsonl. Where a
# version without a ledger began the run, the first line is {"step": N, "since": N}.


_SHOWN = 20
_MOST = 2**20
"""Samples of a prompt: what a damaged config may ask the check to look for."""
Sample = tuple[int, int, int]
"""Step, prompt_index, and number among the samples of the prompt."""


def sample_id(step: int, prompt_index: int, sample: int) -> str:
    """Return the id of a sample in its run."""
    return f"{step}/{prompt_index}/{sample}"


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerCheck:
    """What the ledger of a run says of its finished steps."""

    steps: int
    since: int
    """The first step that it has to have: of a run that a version without a ledger began, the first after."""
    samples: int
    """That were asked for."""
    trained: int
    dropped: Mapping[str, int]
    """By reason."""
    asked_again: int
    """Samples that were asked for more than once."""
    problems: tuple[str, ...]
    """Samples that were lost, or trained twice, by id; and lines that contradict themselves."""

    def text(self) -> str:
        """For a terminal."""
        dropped = ", ".join(f"{count} dropped ({reason})" for reason, count in self.dropped.items())
        counts = [f"{self.trained} trained", dropped or "none dropped"]
        if self.asked_again:
            counts.append(f"{self.asked_again} requested more than once")
        verdict = "none lost, none trained twice"
        if self.problems:
            verdict = f"{len(self.problems)} problem{'s' * (len(self.problems) > 1)}"
        since = f" since step {self.since}" if self.since else ""
        steps = f"{counted(self.steps, 'step')}{since}"
        lines = [f"ledger: {self.samples} samples in {steps}: {', '.join(counts)}; {verdict}"]
        more = len(self.problems) - _SHOWN
        shown = [*self.problems[:_SHOWN], *([f"... and {more} more"] if more > 0 else [])]
        return "\n".join(f"  {line}" for line in (*shown, *lines))

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


def check_ledger(run: Path) -> LedgerCheck:
    """Check the ledger of a run against its config and the steps in metrics.jsonl. Lines of the step that was
    going on when the run ended do not count: --resume does that step again.

    Raises:
        DataError: the run has no ledger.
        CheckpointError: a file is damaged.
    """
    path, trained, begin = run / "ledger.jsonl", trained_samples(run), ledger_since(run)
    if not path.is_file() and (begin is None or begin not in trained):
        raise DataError(
            f"no-such-file: {run} has no ledger.jsonl; it is not an RL run or has not finished a step"
        )
    steps, going_on = sorted(trained), max(trained, default=-1) + 1
    problems, rows, since = list[str](), dict[Sample, list[Mapping[str, Any]]](), 0
    for number, row in enumerate(read_lines(path) if path.is_file() else (), 1):
        if number == 1 and is_step(row.get("since")):
            since = row["since"]
            continue
        sample, wrong = _sample(row)
        if wrong is not None:
            problems.append(f"line {number}: {wrong}")
        if sample is not None and sample[0] != going_on:
            rows.setdefault(sample, []).append(row)
    trained = {step: count for step, count in trained.items() if step >= since}
    if begin is not None and begin < since:
        problems.append(
            f"lines were lost: the ledger begins with step {since}, but the run with step {begin}"
        )
    problems += rollout_gaps(run, steps, saves=saves_rollouts(run)) + rollout_counts(run, trained)
    problems += _repeated(rows) + _missing(rows, trained, *_asked_per_step(run / "config.toml"))
    every = [row for same in rows.values() for row in same]
    dropped = Counter(str(row["dropped"]) for row in every if row.get("dropped") is not None)
    return LedgerCheck(
        steps=len({step for step, _, _ in rows}),
        since=since,
        samples=len(rows),
        trained=sum(row.get("trained_step") is not None for row in every),
        dropped=dict(sorted(dropped.items())),
        asked_again=sum(same[0].get("attempt") != 1 for same in rows.values()),
        problems=tuple(problems),
    )


def _sample(row: Mapping[str, Any]) -> tuple[Sample | None, str | None]:
    """The sample of a line, if it has an id, and what is wrong with the line."""
    name, step, versions = row.get("id"), row.get("step"), row.get("policy_versions")
    parts = name.split("/") if isinstance(name, str) else []
    if len(parts) != 3 or not all(part.isdecimal() and len(part) < 19 for part in parts):
        return None, f"id {name!r:.80} is not STEP/PROMPT/SAMPLE"
    sample = (int(parts[0]), int(parts[1]), int(parts[2]))
    trained, dropped = row.get("trained_step"), row.get("dropped")
    if step != sample[0]:
        return sample, f"sample {name} has step {step!r:.80}"
    if (trained is None) == (dropped is None):
        how = "neither trained nor dropped" if trained is None else "both trained and dropped"
        return sample, f"sample {name} was {how}"
    if trained not in (None, step):
        return sample, f"sample {name} was trained in step {trained!r:.80}"
    if not (isinstance(versions, list) and versions and all(is_step(v) and v <= sample[0] for v in versions)):
        return sample, f"sample {name} has policy_versions {versions!r:.80}"
    if not (is_step(row.get("attempt")) and row["attempt"] > 0):
        return sample, f"sample {name} has attempt {row.get('attempt')!r:.80}"
    return sample, None


def _repeated(rows: Mapping[Sample, Sequence[Mapping[str, Any]]]) -> list[str]:
    problems = []
    for sample, same in rows.items():
        times = sum(row.get("trained_step") is not None for row in same)
        if len(same) > 1:
            what = f"was trained {times} times" if times > 1 else f"has {len(same)} lines"
            problems.append(f"sample {sample_id(*sample)} {what}")
    return problems


def _missing(
    rows: Mapping[Sample, Sequence[Mapping[str, Any]]],
    trained: Mapping[int, float | None],
    prompts: int,
    group_size: int,
) -> list[str]:
    """What is not there of the samples that every finished step has asked for."""
    problems: list[str] = []
    found = defaultdict[int, dict[int, set[int]]](lambda: defaultdict(set))
    counts = Counter[int]()
    for (step, prompt, number), same in rows.items():
        found[step][prompt].add(number)
        counts[step] += same[0].get("trained_step") is not None
    for step in sorted(found.keys() | trained.keys()):
        if step not in trained:
            problems.append(f"step {step} is in the ledger but not in metrics.jsonl")
            continue
        if step not in found:
            problems.append(f"step {step} has no lines")
            continue
        lost = list(_lost(step, found[step], group_size))
        first = sum(any(number < group_size for number in numbers) for numbers in found[step].values())
        if first != prompts:
            lost.append(f"step {step} has samples of {first} prompts, but began with {prompts}")
        if not lost and trained[step] is not None and counts[step] != trained[step]:
            lost.append(f"step {step} trained on {trained[step]} samples, but the ledger has {counts[step]}")
        problems += lost
    return problems


def _lost(step: int, found: Mapping[int, set[int]], group_size: int) -> Iterator[str]:
    """Samples are asked for in whole groups, one in each round of dynamic sampling."""
    for prompt, numbers in found.items():
        for asked in sorted({number // group_size for number in numbers}):
            for number in range(asked * group_size, (asked + 1) * group_size):
                if number not in numbers:
                    yield f"sample {sample_id(step, prompt, number)} was lost: it has no line"


def _asked_per_step(config: Path) -> tuple[int, int]:
    """Prompts of a step, and samples of a prompt. Raises DataError."""
    text = read_plain(config, DataError)
    try:
        rollout = tomllib.loads(text.decode("utf-8")).get("rollout")
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"not-toml: {config} is not TOML: {error}") from error
    table = rollout if isinstance(rollout, dict) else {}
    prompts, group_size = table.get("prompts_per_step"), table.get("group_size")
    if not (isinstance(prompts, int) and isinstance(group_size, int) and prompts > 0 < group_size < _MOST):
        raise DataError(
            f"wrong-field: {config} has no rollout.prompts_per_step and rollout.group_size, so the number "
            "of samples per step is unknown; restore the file"
        )
    return prompts, group_size
