"""Checkpoints of a run: written whole or not at all, verified before use, thinned out.

    checkpoints/
      step-000010/
        model.safetensors, optimizer.safetensors, ...   what the train backend saves
        run_state.json                                  what the loop saves: step, tokens, evaluations
        complete.json                                   size and sha256 of every other file; written last
      .saving-step-000020-1f3a9c02/                     a save that was interrupted; removed at the next start

A save goes to a hidden folder, every file is fsynced, and one rename makes it a checkpoint. A process that is
killed at any moment leaves the earlier checkpoints as they were.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lockstep.config.train import CheckpointConfig
from lockstep.errors import CheckpointError
from lockstep.observe.files import sync_folder
from lockstep.protocols.train import TrainBackend
from lockstep.train.files import (
    FileRecord,
    check_record,
    is_out_of_space,
    read_json,
    sha256_of,
    write_json,
)

COMPLETE = "complete.json"
RUN_STATE = "run_state.json"
_NAME = re.compile(r"step-(\d{6,})")
_HIDDEN = re.compile(r"\.(saving|replaced|removing)-(step-\d{6,})-[0-9a-f]{8}")


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
    """What is wrong with it, as far as names and sizes tell; None: nothing."""


class CheckpointManager:
    """The checkpoints of one run.

    Leftovers of interrupted saves are removed when it is made.

    Args:
        directory: the run's checkpoints folder; made when it is first needed.
        config: retention.
    """

    def __init__(self, directory: Path, config: CheckpointConfig) -> None:
        self.directory = Path(directory)
        self.config = config
        self._remove_leftovers()

    def save(
        self, step: int, backend: TrainBackend, run_state: Mapping[str, Any], *, metric: float | None = None
    ) -> Path:
        """Save the state after `step` steps, then remove the checkpoints that need not be kept.

        Args:
            run_state: JSON values that the loop needs to go on; "step" is added.
            metric: the value of `config.metric` for these weights, if it is known; see `keep_best`.

        Returns:
            The checkpoint's folder. An older checkpoint of the same step is replaced.

        Raises:
            CheckpointError: the disk is full, or run_state is not JSON. Earlier checkpoints are as they were.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / f"step-{step:06d}"
        temporary = self._hidden("saving", path)
        temporary.mkdir()
        try:
            self._write(temporary, step, backend, run_state, metric)
        except BaseException as error:
            shutil.rmtree(temporary, ignore_errors=True)
            if isinstance(error, OSError) and is_out_of_space(error):
                raise CheckpointError(self._disk_full(path, error)) from error
            raise
        self._put(temporary, path)
        self.prune()
        return path

    def latest(self) -> Path | None:
        """The checkpoint that was saved last; None when there is none.

        Raises:
            CheckpointError: it is damaged (names and sizes; `load` checks the contents). Names the newest
                undamaged one, which is used only when the user asks for it.
        """
        entries = self._entries()
        if not entries:
            return None
        if entries[-1].damage is not None:
            raise CheckpointError(self._damaged(entries[-1].path, entries[-1].damage))
        return entries[-1].path

    def steps(self) -> list[int]:
        """Steps of the undamaged checkpoints (names and sizes), in the order in which they were saved."""
        return [entry.step for entry in self._entries() if entry.damage is None]

    def find(self, step: int | None = None) -> Path | None:
        """The checkpoint of `step`; None: `latest()`.

        Raises:
            CheckpointError: there is no checkpoint of that step, or it is damaged.
        """
        if step is None:
            return self.latest()
        entries = self._entries()
        for entry in entries:
            if entry.step == step:
                if entry.damage is not None:
                    raise CheckpointError(self._damaged(entry.path, entry.damage))
                return entry.path
        steps = sorted(entry.step for entry in entries)
        raise CheckpointError(
            f"no checkpoint of step {step} in {self.directory}; there are {steps or 'none'}"
        )

    def load(self, path: Path, backend: TrainBackend) -> dict[str, Any]:
        """Verify every file of a checkpoint, load it into the backend, and return its run_state.

        Raises:
            CheckpointError: a file is missing, damaged, or belongs to another model or optimizer; the
                backend is as it was. Names the newest undamaged checkpoint, if there is one.
        """
        try:
            verify(path)
            run_state = read_json(path / RUN_STATE)
        except CheckpointError as error:
            raise CheckpointError(self._damaged(path, str(error))) from error
        backend.load(path, verified=True)
        return dict(run_state)

    def prune(self) -> None:
        """Remove all but the last `keep_last` and the best `keep_best` checkpoints.

        Damaged ones do not count, and go only when `keep_last` undamaged ones were saved after them; if there
        is an undamaged checkpoint, one remains.
        """
        entries = self._entries()
        good = [entry for entry in entries if entry.damage is None]
        if not good:
            return
        last = good[-self.config.keep_last :]
        kept = {*last, *self._best(good)[: self.config.keep_best]}
        for index, entry in enumerate(entries):
            if entry not in kept and (entry.damage is None or index < entries.index(last[0])):
                self._remove(entry.path)

    def _best(self, entries: Sequence[_Entry]) -> list[_Entry]:
        """Those with a metric, best first; of equals the later one is better."""
        sign = 1 if self.config.mode == "max" else -1
        known = [
            (sign * entry.metric, entry.sequence, entry) for entry in entries if entry.metric is not None
        ]
        return [entry for _, _, entry in sorted(known, key=lambda item: item[:2], reverse=True)]

    # --- writing --------------------------------------------------------------------------------------------

    def _write(
        self,
        folder: Path,
        step: int,
        backend: TrainBackend,
        run_state: Mapping[str, Any],
        metric: float | None,
    ) -> None:
        hashes = dict(backend.save(folder)())
        state = {**run_state, "step": step}
        try:
            json.dumps(state)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"run_state cannot be written as JSON: {error}") from error
        hashes[RUN_STATE] = write_json(folder / RUN_STATE, state).sha256
        files = sorted(p for p in folder.rglob("*") if p.is_file())
        records = {}
        for file in files:
            name = file.relative_to(folder).as_posix()
            records[name] = FileRecord(bytes=file.stat().st_size, sha256=hashes.get(name) or sha256_of(file))
        complete = {
            "step": step,
            "sequence": 1 + max((entry.sequence for entry in self._entries()), default=0),
            "metric": metric,
            "metric_name": self.config.metric,
            "files": {name: asdict(record) for name, record in records.items()},
        }
        for directory in {file.parent for file in files}:
            sync_folder(directory)
        write_json(folder / COMPLETE, complete)
        sync_folder(folder)

    def _put(self, temporary: Path, path: Path) -> None:
        """The rename that makes it a checkpoint; one that is in the way steps aside first."""
        aside = self._hidden("replaced", path)
        if path.exists():
            path.rename(aside)
        temporary.rename(path)
        sync_folder(self.directory)
        if aside.exists():
            shutil.rmtree(aside)

    def _remove(self, path: Path) -> None:
        """Rename first: a half-removed checkpoint must not look like a damaged one."""
        hidden = self._hidden("removing", path)
        path.rename(hidden)
        sync_folder(self.directory)
        shutil.rmtree(hidden)

    def _hidden(self, purpose: str, path: Path) -> Path:
        return path.with_name(f".{purpose}-{path.name}-{secrets.token_hex(4)}")

    def _remove_leftovers(self) -> None:
        """What a killed process left; a complete checkpoint that had only stepped aside is put back."""
        if not self.directory.is_dir():
            return
        for path in sorted(self.directory.iterdir()):
            match = _HIDDEN.fullmatch(path.name)
            if match is None or not path.is_dir():
                continue
            place = self.directory / match[2]
            if match[1] == "replaced" and not place.exists():
                path.rename(place)
            else:
                shutil.rmtree(path)

    # --- reading --------------------------------------------------------------------------------------------

    def _entries(self) -> list[_Entry]:
        """All checkpoints, in the order in which they were saved."""
        if not self.directory.is_dir():
            return []
        entries = []
        for path in self.directory.iterdir():
            match = _NAME.fullmatch(path.name)
            if match and path.is_dir():
                entries.append(_entry(path, int(match[1])))
        known = [entry for entry in entries if entry.sequence >= 0]
        # One whose complete.json is gone cannot tell when it was saved: right after its predecessor by step.
        return sorted(entries, key=lambda e: (_place(e, known), e.step))

    def _damaged(self, path: Path, damage: str) -> str:
        others = [e for e in self._entries() if e.damage is None and e.path != path]
        for entry in reversed(others):
            with contextlib.suppress(CheckpointError):
                verify(entry.path)
                return (
                    f"checkpoint {path} is damaged: {damage}. The newest undamaged one is {entry.path}; to "
                    f"go on from it, add --checkpoint {entry.step}"
                )
        return f"checkpoint {path} is damaged: {damage}. There is no undamaged one in {self.directory}"

    def _disk_full(self, path: Path, error: OSError) -> str:
        good = [e.path for e in self._entries() if e.damage is None]
        sizes = [sum(r["bytes"] for r in _complete(p)["files"].values()) for p in good]
        needed = f"needs about {sizes[-1]} bytes" if sizes else "is the run's first"
        free = shutil.disk_usage(self.directory).free
        return (
            f"{path} could not be saved: {error}. It {needed}, {self.directory} has {free} bytes free; free "
            "some space or lower checkpoint.keep_last; earlier checkpoints are as they were"
        )


def verify(path: Path) -> None:
    """Compare every file of a checkpoint with complete.json, contents included.

    Raises:
        CheckpointError: names the first file that is missing or differs.
    """
    for name, record in _complete(path)["files"].items():
        check_record(path / name, FileRecord(**record), contents=True)


def _place(entry: _Entry, known: Sequence[_Entry]) -> float:
    if entry.sequence >= 0:
        return entry.sequence
    return max((other.sequence for other in known if other.step < entry.step), default=-1) + 0.5


def _entry(path: Path, step: int) -> _Entry:
    """What names and sizes tell about a checkpoint."""
    try:
        complete = _complete(path)
    except CheckpointError as error:
        return _Entry(path=path, step=step, sequence=-1, metric=None, damage=str(error))
    damage = None
    try:
        for name, record in complete["files"].items():
            check_record(path / name, FileRecord(**record), contents=False)
    except CheckpointError as error:
        damage = str(error)
    return _Entry(
        path=path, step=step, sequence=complete["sequence"], metric=complete["metric"], damage=damage
    )


def _complete(path: Path) -> dict[str, Any]:
    """complete.json, its fields checked. Raises CheckpointError."""
    file = path / COMPLETE
    value = read_json(file)
    fields: dict[str, Any] = {"step": int, "sequence": int, "metric": (int, float, type(None)), "files": dict}
    for name, kind in fields.items():
        if not isinstance(value, dict) or not isinstance(value.get(name, ...), kind):
            raise CheckpointError(f"{file}: field {name!r} is missing or of the wrong type; it is damaged")
    for name, record in value["files"].items():
        if not isinstance(record, dict) or set(record) != {"bytes", "sha256"}:
            raise CheckpointError(f"{file}: field 'files.{name}' must have bytes and sha256; it is damaged")
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise CheckpointError(f"{file}: field 'files' names {name!r}, which is outside the checkpoint")
    return dict(value)
