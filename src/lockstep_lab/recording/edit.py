"""Parts of a recording, and several recordings as one; one shard of inputs is in memory at a time."""

from __future__ import annotations

import dataclasses
import filecmp
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.errors import RecordingError
from lockstep.observe.files import file_errors, open_plain
from lockstep.recording.reader import Recording
from lockstep.recording.weights import FILE, find_weights, verified
from lockstep.recording.writer import RecordingWriter
from lockstep.schema.recording import InputKey, InputMeta, RecordingHeader

MAY_DIFFER = ("created", "device_name", "capacity", "notes")
"""Fields of the headers of recordings that are merged."""

_Item = tuple[Recording, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """Selects inputs; fields that are None select all."""

    indices: tuple[int, ...] | None = None
    first_step: int | None = None
    last_step: int | None = None
    """Last step, inclusive."""
    ranks: tuple[int, ...] | None = None
    every: int = 1
    """Of the inputs left by the other fields, the first and then every k-th, in the order of the
    recording."""

    def of(self, recording: Recording) -> list[int]:
        """The selected indices, ascending.

        Raises:
            RecordingError: there is no such input.
        """
        count = len(recording)
        candidates = range(count) if self.indices is None else sorted(set(self.indices))
        outside = [index for index in candidates if not 0 <= index < count]
        if outside or self.every < 1:
            raise RecordingError(
                f"{recording.path} has inputs 0 to {count - 1}, not {outside[:5]}"
                if outside
                else f"every = {self.every} must be at least 1",
                code="out-of-range",
            )
        indices = [index for index in candidates if self._takes(recording.metas[index])][:: self.every]
        if not indices:
            steps = [meta.step for meta in recording.metas]
            raise RecordingError(
                f"nothing-left: {recording.path}: no input is selected; it has steps {min(steps)} to "
                f"{max(steps)} and ranks {', '.join(map(str, recording.ranks))}"
            )
        return indices

    def _takes(self, meta: InputMeta) -> bool:
        return (
            (self.first_step is None or meta.step >= self.first_step)
            and (self.last_step is None or meta.step <= self.last_step)
            and (self.ranks is None or meta.rank in self.ranks)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Edited:
    """What was written."""

    path: Path
    inputs: int
    weights: tuple[str, ...]
    """Folders with weights that inputs need, copied."""
    without_weights: int
    """Number of inputs whose weights are not stored, or were left out."""


def slice_recording(recording: Recording, out: Path, selection: Selection, *, weights: bool = True) -> Edited:
    """Write some inputs, with the weights that they need, as a new recording.

    Args:
        weights: copy them. Otherwise the inputs name none.

    Raises:
        RecordingError: nothing is selected, `out` exists, or an input is damaged.
    """
    items = [(recording, index) for index in selection.of(recording)]
    plain = {name: getattr(selection, name) for name in ("first_step", "last_step", "ranks", "every")}
    notes = {**recording.header.notes, "slice": plain | {"of_inputs": len(recording)}}
    return _write(items, out, dataclasses.replace(recording.header, notes=notes), weights=weights)


def merge_recordings(recordings: Sequence[Recording], out: Path, *, weights: bool = True) -> Edited:
    """Merge the recordings of one run: of ranks that recorded separately, or of parts of its steps.

    Raises:
        RecordingError: headers differ in more than MAY_DIFFER, two hold the same input, or one is damaged.
    """
    if len(recordings) < 2:
        raise RecordingError("missing-argument: merging takes at least two recordings")
    first = recordings[0]
    owner: dict[InputKey, Recording] = {}
    for recording in recordings:
        different = differences(first.header, recording.header)
        if different:
            raise RecordingError(
                f"other-model: {first.path} and {recording.path} are not from the same run; they differ in "
                f"{'; '.join(different)}"
            )
        for meta in recording.metas:
            if meta.key in owner:
                raise RecordingError(
                    f"duplicate: {owner[meta.key].path} and {recording.path} both contain the input of "
                    f"update {meta.update}, micro-batch {meta.micro_batch}, rank {meta.rank}; leave it out "
                    "of one with recording slice"
                )
            owner[meta.key] = recording
    headers = [recording.header for recording in recordings]
    names = {name for header in headers for name in header.capacity}
    notes = dict(first.header.notes) | {"merged": [header.created for header in headers]}
    header = dataclasses.replace(
        first.header,
        created=min(header.created for header in headers),
        device_name=", ".join(sorted({header.device_name for header in headers} - {""})),
        capacity={name: max(header.capacity.get(name, 0) for header in headers) for name in sorted(names)},
        notes=notes,
    )
    items = [(recording, index) for recording in recordings for index in range(len(recording))]
    items.sort(key=lambda item: item[0].metas[item[1]].key)
    return _write(items, out, header, weights=weights)


def differences(one: RecordingHeader, other: RecordingHeader) -> list[str]:
    """Return "field: value / value" for every field that must be equal and is not."""
    differences: list[str] = []
    for spec in dataclasses.fields(RecordingHeader):
        if spec.name not in MAY_DIFFER:
            differences += _differing(spec.name, getattr(one, spec.name), getattr(other, spec.name))
    return differences


def _differing(name: str, one: Any, other: Any) -> Iterator[str]:
    if name == "axes.device":
        return
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in sorted({*one, *other}):
            yield from _differing(f"{name}.{key}", one.get(key), other.get(key))
    elif one != other:
        yield f"{name}: {str(one)[:60]!r} / {str(other)[:60]!r}"


@dataclass(slots=True)
class _Weights:
    """Copies folders of weights, each once."""

    target: Path
    enabled: bool
    names: dict[Path, str] = field(default_factory=dict)
    known: dict[tuple[Path, int, str | None, str | None], str | None] = field(default_factory=dict)
    fingerprints: dict[Path, str] = field(default_factory=dict)

    def name(self, recording: Recording, meta: InputMeta) -> str | None:
        """The folder in the new recording, copied now; None: there is none."""
        if not self.enabled:
            return None
        key = (recording.path, meta.step, meta.checkpoint, meta.weights)
        if key not in self.known:
            folder = find_weights(recording.path, meta, known=self.fingerprints)
            self.known[key] = None if folder is None else self._copied(folder, meta.weights)
        return self.known[key]

    def _copied(self, folder: Path, weights: str | None) -> str:
        """Raises RecordingError: the file is not what was stored; see `verified`. Nothing else is copied."""
        verified(folder, weights=weights, known=self.fingerprints)
        if folder not in self.names:
            name, number = f"weights/{folder.name}", 1
            while (self.target / name).exists():
                if filecmp.cmp(folder / FILE, self.target / name / FILE, shallow=False):
                    break
                number += 1
                name = f"weights/{folder.name}-{number}"
            else:
                (self.target / name).mkdir(parents=True)
                _copy(folder, self.target / name)
            self.names[folder] = name
        return self.names[folder]


def _copy(folder: Path, target: Path) -> None:
    """Copy the checked file of weights. Raises RecordingError: it cannot be read or written."""
    with (
        open_plain(folder / FILE, RecordingError, root=folder) as source,
        file_errors(target / FILE, RecordingError, "write"),
        open(target / FILE, "xb") as copy,
    ):
        shutil.copyfileobj(source, copy, 2**20)


def _write(items: Sequence[_Item], out: Path, header: RecordingHeader, *, weights: bool) -> Edited:
    """Write `items` in the order of their keys."""
    if os.path.lexists(out):
        raise RecordingError(f"already-exists: {out} already exists; give a new directory")
    ranks = sorted({recording.metas[index].rank for recording, index in items})
    without = 0
    with whole_or_not(out) as folder:
        copies = _Weights(folder, weights)
        for rank in ranks:
            with RecordingWriter(folder, header, rank=rank, ranks=ranks) as writer:
                for recording, index in items:
                    if recording.metas[index].rank != rank:
                        continue
                    one = recording[index]
                    name = copies.name(recording, one.meta)
                    without += name is None
                    writer.add(
                        [dataclasses.replace(one, meta=dataclasses.replace(one.meta, checkpoint=name))]
                    )
    return Edited(
        path=out,
        inputs=len(items),
        weights=tuple(sorted(set(copies.names.values()))),
        without_weights=without,
    )


@contextmanager
def whole_or_not(out: Path) -> Iterator[Path]:
    """A context with a folder that gets its name once all of it is written."""
    folder = out.with_name(f".{out.name}.partial")
    try:
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        yield folder
        os.rename(folder, out)
    except BrokenPipeError:
        raise  # from a terminal or pipe that shows progress, not from the folder
    except OSError as error:
        raise RecordingError(f"cannot-write: {out} cannot be written ({error.strerror or error})") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
