"""A checkpoint's files beside those of its models, run_state.json and complete.json, and their checks."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from lockstep.common_errors import damaged
from lockstep.errors import CheckpointError
from lockstep.observe.files import check_inside, jsonable
from lockstep.observe.run_dir import is_evaluation
from lockstep.observe.run_history import EVALUATIONS, is_step
from lockstep.observe.text import printable
from lockstep.ranks.context import RankContext
from lockstep.train.state.files import FileRecord, check_record, is_count, read_json, read_record
from lockstep.train.state.index import STATE, StateIndex, rank_file, read_index
from lockstep.train.state.rng import rng_state
from lockstep.train.state.save_load import share_out

# run_state.json of a checkpoint: what the loop needs to go on, and whether that is what it has written.


def seen_field(role: str) -> str:
    """The field of run_state.json with the number of inputs that a recorder has seen."""
    return "inputs_seen" if role == "policy" else f"inputs_seen_{role}"


def checked_run_state(state: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the run_state, its fields checked to be what `Saving` writes. Raises CheckpointError."""
    evaluations = state.get("evaluations")
    known = isinstance(evaluations, dict) and all(
        name in EVALUATIONS and is_evaluation(each) for name, each in evaluations.items()
    )
    if known:  # what is set by default is missing where an earlier version wrote it
        state.setdefault("evaluated", [[each["step"], name] for name, each in state["evaluations"].items()])
    state.setdefault("inputs_seen", 0)
    state.setdefault("gap_checked", True)
    state.setdefault("evaluation_seconds", 0.0)
    evaluated = state.get("evaluated")
    good = {
        "step": is_step(state.get("step")),
        "wall_seconds": _is_seconds(state.get("wall_seconds")),
        "evaluation_seconds": _is_seconds(state["evaluation_seconds"]),
        "trained_tokens": is_step(state.get("trained_tokens")),
        "inputs_seen": is_step(state["inputs_seen"]),
        "gap_checked": isinstance(state["gap_checked"], bool),
        "inputs_seen_value": is_step(state.get("inputs_seen_value", 0)),
        "evaluations": known,
        "evaluated": isinstance(evaluated, list) and all(map(_is_evaluated, evaluated)),
    }
    if known and good["evaluated"]:
        last = {name: step for step, name in state["evaluated"]}
        good["evaluations"] = last == {name: each["step"] for name, each in state["evaluations"].items()}
    for name, right in good.items():
        if not right:
            raise _wrong_field(path / RUN_STATE, name, f"is {state.get(name)!r:.200}")
    return state


def _is_seconds(value: Any) -> bool:
    return isinstance(value, int | float) and 0 <= value < 1e12


def _is_evaluated(value: Any) -> bool:
    """Return whether `value` is [steps done, name of an evaluation]."""
    return isinstance(value, list) and len(value) == 2 and is_step(value[0]) and value[1] in EVALUATIONS


def algorithm_notes(now: Mapping[str, Any] | None, then: Mapping[str, Any]) -> Iterator[str]:
    """Say where an option that the config leaves open means something else than when the run began.

    Args:
        now: the algorithm's resolved options; None: a run without an algorithm.
        then: the manifest.
    """
    before = then.get("algorithm")
    if now is None or "axes" not in then:
        return
    if before is None:  # begun before 2026-11-22, when these two were corrected
        if now["name"] == "rloo" or now["kl"]["coef"] > 0:
            yield (
                "the run was started by an older version, in which rloo had a ratio per token and KL had "
                "different estimators and bounds (CHANGELOG.md); its loss may differ from now on"
            )
        return
    for key, value in now.items():
        old = before.get(key) if isinstance(before, Mapping) else None
        if old != value:
            yield (
                f"the run was started with algorithm.{key} = {printable(str(old))} and continues with {value}"
            )


# The state of a run between two steps.


@dataclass(frozen=True, kw_only=True, slots=True)
class Boundary:
    """The state that any later save of this boundary writes, so that a step that is cut short leaves no
    trace in it. Weights, optimizer and the algorithm's numbers change only in an update and need no copy."""

    done: int
    """Steps."""
    generators: dict[str, Tensor]
    """States of this process's random generators. A reward's process is seeded for each sample."""
    state: dict[str, Any]
    """The content of run_state.json."""

    @classmethod
    def take(cls, done: int, state: Mapping[str, Any], *, ranks: RankContext) -> Boundary:
        """Copy the state as it is now, after `done` steps or after an evaluation there."""
        generators = rng_state(all_devices=ranks.world_size == 1)
        return cls(done=done, generators=generators, state=copy.deepcopy(dict(state)))


COMPLETE = "complete.json"


RUN_STATE = "run_state.json"


_NAME = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Entry:
    """One checkpoint on the disk."""

    path: Path
    step: int
    sequence: int
    """Counts saves of the run: after going back to an older checkpoint, a later save may have a smaller
    step. -1: unknown, complete.json cannot be read."""
    metric: float | None
    damage: str | None
    """The damage that names and sizes show; None: none."""


def verify(path: Path, *, part: int = 0, of: int = 1) -> None:
    """Compare every file of a checkpoint with complete.json, contents included, and the files with each
    other.

    Args:
        part, of: of several ranks each compares a share.

    Raises:
        CheckpointError: names the first file that is missing or differs.
    """
    complete = _read_complete(path)
    records = {name: FileRecord(**record) for name, record in complete["files"].items()}
    owners = share_out({name: record.bytes for name, record in records.items()}, of)
    for name, record in records.items():
        check_record(path / name, record, contents=owners[name] == part)
    _check_step(path, "the folder's name", _step_of(path.name), complete)
    _check_step(path, RUN_STATE, read_run_state(path).get("step"), complete)
    if STATE in records or (path / STATE).exists():
        _check_state(path, read_index(path), complete)
    for role in sorted({name.partition("/")[0] for name in records if name.endswith(f"/{STATE}")}):
        _check_state(path, read_index(path / role), complete, role=role)


def _check_step(path: Path, source: str, step: Any, complete: Mapping[str, Any]) -> None:
    if step is not None and step != complete["step"]:
        what = f"{COMPLETE} belongs to step {complete['step']}, but {source} to step {step!r:.40}"
        raise _mixed_files(path, "step", what)


def _check_state(
    path: Path, index: StateIndex, complete: Mapping[str, Any], *, role: str | None = None
) -> None:
    """Raise CheckpointError unless complete.json lists every file of the train state; `role`: of the model in
    that folder of the checkpoint."""
    listed = complete["files"]
    lists = [
        rank_file("files", "json", rank=rank, size=index.world_size) for rank in range(1, index.world_size)
    ]
    folder = "" if role is None else f"{role}/"
    for own in (STATE, *lists, *index.files, *(() if role else (RUN_STATE,))):
        name = f"{folder}{own}"
        if name not in listed:
            raise _wrong_field(path / COMPLETE, "files", f"lacks {name!r}, which the state needs", file=name)
        record = index.files.get(own)
        if record is not None and asdict(record) != listed[name]:
            what = f"{COMPLETE} and {folder}{STATE} disagree on the size or hash of {name!r}"
            raise _mixed_files(path, name, what)
    recorded, steps = complete.get("optimizer_steps"), index.progress.get("step")
    if role is None and recorded not in (None, steps):  # checkpoints of earlier versions do not have it
        what = f"{COMPLETE} records {recorded} optimizer steps, but {STATE} records {steps!r:.40}"
        raise _mixed_files(path, "optimizer steps", what)


def _step_of(name: str) -> int | None:
    match = _NAME.fullmatch(name)
    return None if match is None else int(match[1])


def read_run_state(path: Path) -> dict[str, Any]:
    """Return what the loop saved. Raises CheckpointError."""
    value = read_json(path / RUN_STATE)
    if not isinstance(value, dict):
        file = path / RUN_STATE
        raise damaged(CheckpointError, file, "it contains no run state", path=file)
    return {name: _with_nan(each) for name, each in value.items()}


def without_nan(value: Any) -> Any:
    """The same with "NaN", "Infinity" and "-Infinity" for numbers that JSON has no text for."""
    if isinstance(value, dict):
        return {name: without_nan(each) for name, each in value.items()}
    return jsonable(value) if isinstance(value, float) else value


def _with_nan(value: Any) -> Any:
    """The inverse."""
    if isinstance(value, dict):
        return {name: _with_nan(each) for name, each in value.items()}
    return float(value) if value in ("NaN", "Infinity", "-Infinity") else value


def _sort_key(entry: _Entry, known: Sequence[_Entry]) -> float:
    if entry.sequence >= 0:
        return entry.sequence
    return max((other.sequence for other in known if other.step < entry.step), default=-1) + 0.5


def _entry(path: Path, step: int) -> _Entry:
    """Read a checkpoint's entry; checks names and sizes, not contents."""
    try:
        check_inside(path, CheckpointError, root=path.parent)
        complete = _read_complete(path)
    except CheckpointError as error:
        return _Entry(path=path, step=step, sequence=-1, metric=None, damage=str(error))
    damage = None
    try:
        for name, record in complete["files"].items():
            check_record(path / name, FileRecord(**record), contents=False)
        _check_step(path, "the folder's name", step, complete)
    except CheckpointError as error:
        damage = str(error)
    return _Entry(
        path=path, step=step, sequence=complete["sequence"], metric=complete["metric"], damage=damage
    )


def _read_complete(path: Path) -> dict[str, Any]:
    """complete.json, its fields checked. Raises CheckpointError."""
    file = path / COMPLETE
    value: Any = read_json(file)
    if not isinstance(value, dict):
        raise CheckpointError(f"damaged-file: {file} contains no JSON object; it is damaged", path=file)
    # Absent from checkpoints of earlier versions.
    value.setdefault("optimizer_steps", None)
    fields = {
        "step": is_count(value.get("step")),
        "sequence": is_count(value.get("sequence")),
        "metric": value.get("metric") is None or _is_number(value["metric"]),
        "optimizer_steps": value["optimizer_steps"] is None or is_count(value["optimizer_steps"]),
        "files": isinstance(value.get("files"), dict),
    }
    for name, good in fields.items():
        if not good:
            raise _wrong_field(file, name, "is missing or has the wrong type; the file is damaged")
    for name, record in value["files"].items():
        read_record(file, name, record)
        if printable(name) != name or not name:
            why = f"names '{printable(name)}', which is not a file name"
            raise _wrong_field(file, "files", why, file=name)
        if Path(name).is_absolute() or ".." in Path(name).parts:
            what = f"{file}: field 'files' names {name!r}"
            raise CheckpointError(f"leads-out-of-folder: {what}, which is outside the checkpoint", file=name)
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _wrong_field(path: Path, name: str, why: str, /, **fields: Any) -> CheckpointError:
    return CheckpointError(f"wrong-field: {path}: field {name!r} {why}", name=name, **fields)


def _mixed_files(folder: Path, name: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"mixed-files: {folder}: {what}; the folder mixes files from two checkpoints", name=name
    )
