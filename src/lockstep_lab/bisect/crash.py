"""A cell that crashes: the first input that does it, made as small as it gets, written as a recording."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.errors import LockstepError
from lockstep.models.dtypes import DTYPES
from lockstep.observe.files import write_atomic
from lockstep_lab.bisect.arms import check_bisectable, exact, take
from lockstep_lab.bisect.shrink import MAX_TRIALS, Shrunk, Trial, shrink
from lockstep_lab.bisect.shrink_worker import TRIAL_SECONDS, TrialRunner
from lockstep_lab.replay.buckets import select_inputs
from lockstep_lab.replay.cell import ReplayOptions
from lockstep_lab.replay.policy import (
    check_inputs_fit,
    check_usable,
    model_config,
    model_head,
    model_size,
)
from lockstep_lab.suite.process import ProcessRunner

if TYPE_CHECKING:
    from lockstep.recording import Recording

RECORDING, TRACEBACK, LOG = "crash-input", "crash-traceback.txt", "crash-trials.log"


@dataclass(frozen=True, kw_only=True, slots=True)
class CrashSearch:
    """The limits of the search."""

    max_trials: int = MAX_TRIALS
    seconds: float = TRIAL_SECONDS
    """Longest trial; a longer one hangs, which is a crash too."""


@dataclass(frozen=True, kw_only=True)
class CrashFinding:
    """The smallest input on which the cell crashes."""

    label: str
    index: int
    """Index of the input that it was cut from."""
    documents: int
    """Documents of that input."""
    tokens: int
    """Tokens of that input."""
    num_layers: int
    """Layers of the whole model."""
    shrunk: Shrunk
    command: str
    """The command that shows the crash."""
    confirmed: bool
    """Whether the command was run and failed."""
    workers: int
    """Number of processes started for the trials."""


def find_crash(
    recording: Recording,
    options: ReplayOptions,
    out: Path,
    *,
    search: CrashSearch,
    progress: Callable[[str], None],
) -> CrashFinding | None:
    """None: no selected input crashes.

    Args:
        out: a directory; the small recording, the traceback and the log of the trials are written there.

    Raises:
        ConfigError, RecordingError, ModelError: before the first trial.
    """
    check_bisectable("b", options)
    order = select_inputs(recording, options)
    config = model_config(recording.header, options)
    size = model_size(config, dtype=DTYPES[options.cell.dtype], head=model_head(recording.header))
    check_inputs_fit(recording, order, size, name=config.name)
    with TrialRunner(
        recording.path, options, num_layers=size.num_layers, log=out / LOG, seconds=search.seconds
    ) as runner:
        for index in order:
            check_usable(recording.metas[index], index=index)
            runner.index = index
            lengths = recording.lengths[index]

            def attempt(trial: Trial, index: int = index) -> object:
                crash = runner(trial)
                ended = "ok" if crash is None else str(crash)
                what = f"{len(trial.parts)} documents, {trial.tokens} tokens, {trial.num_layers} layers"
                progress(f"input {index}, {what}: {ended}")
                return crash

            shrunk = shrink(lengths, size.num_layers, attempt, max_trials=search.max_trials)  # type: ignore[arg-type]
            if shrunk is not None:
                break
        else:
            return None
    command = _write(recording, options, index, shrunk, out, whole_layers=size.num_layers)
    write_atomic(out / TRACEBACK, shrunk.crash.traceback or f"{shrunk.crash}; see {LOG}\n")
    return CrashFinding(
        label=options.cell.label(),
        index=index,
        documents=len(lengths),
        tokens=sum(lengths),
        num_layers=size.num_layers,
        shrunk=shrunk,
        command=shlex.join(["lockstep", *command]),
        confirmed=_confirmed(command, seconds=search.seconds, log=out / LOG),
        workers=runner.starts,
    )


def _write(
    recording: Recording,
    options: ReplayOptions,
    index: int,
    shrunk: Shrunk,
    out: Path,
    *,
    whole_layers: int,
) -> list[str]:
    """Write the recording of one input; return the arguments of `lockstep` that show the crash."""
    from lockstep.recording import RecordingWriter

    recorded = recording[index]
    # Weights are not copied: a crash seldom needs them, and the confirmation says if this one does.
    meta = dataclasses.replace(
        recorded.meta,
        micro_batch=0,
        num_micro_batches=1,
        rank=0,
        world_size=1,
        mesh={},
        weights=None,
        checkpoint=None,
        outcome="pending",
        error=None,
        documents=(),
    )
    small = dataclasses.replace(
        recorded,
        meta=meta,
        batch=take(exact(recorded.batch), shrunk.trial.parts),
        outputs=None,
        extras={},
    )
    header = dataclasses.replace(recording.header, world_size=1, mesh={})
    folder = out / RECORDING
    with RecordingWriter(folder, header) as writer:
        writer.begin([small])
    cell = options.cell
    if shrunk.trial.num_layers != whole_layers:
        cell = dataclasses.replace(cell, num_layers=shrunk.trial.num_layers)
    command = ["replay", str(folder), *cell.flags(), "--loss", options.loss]
    command += [] if options.backward else ["--no-backward"]
    command += [] if options.capacity is None else ["--capacity", str(options.capacity)]
    return command + (["--trust-remote-code"] if options.trust_remote_code else [])


def _confirmed(command: Sequence[str], *, seconds: float, log: Path) -> bool:
    """Run the command once; return whether it fails as a replay does (1), dies, or stalls."""
    out = log.parent / "crash-replay"
    argv = [sys.executable, "-m", "lockstep", *command, "--out", str(out)]
    status = ProcessRunner().run(argv, log=log, timeout=2 * seconds).returncode
    if status == 2:
        raise LockstepError(f"refused: the replay of the small recording was refused; see {log}")
    return status != 0
