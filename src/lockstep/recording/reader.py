"""An open recording: the description of its inputs is read at once, the inputs themselves on demand."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.errors import RecordingError
from lockstep.recording.corpus import corpus_path
from lockstep.recording.storage.entries import Count, HeaderEntry, checked
from lockstep.recording.storage.files import read_signed_json
from lockstep.recording.storage.shards import RankFiles, Shard, check_version, read_rank
from lockstep.schema.recording import InputMeta, RecordedInput, RecordingHeader

HEADER = "recording.json"


class RootEntry(HeaderEntry):
    """recording.json."""

    ranks: list[Count]
    """Ranks that recorded; each has a folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """One input, read and checked by Recording.validate."""

    index: int
    meta: InputMeta
    problem: str | None
    """The problem with the input; None: none."""
    notes: tuple[str, ...] = ()
    """Unusual, but no damage: values that are not finite."""


class Recording:
    """A recorded run's inputs, in the order of their keys (update, micro-batch, rank).

    Nothing in it is ever executed or unpickled, and the cost of reading is bounded by the size of the files.
    `Recording.open` opens one.
    """

    def __init__(self, path: Path, root: RootEntry, ranks: dict[int, RankFiles]) -> None:
        self.path = path
        self.ranks = tuple(ranks)
        self.closed = all(files.index.closed for files in ranks.values())
        """False: the run still records, or ended in the middle."""
        self.header: RecordingHeader = root.header()
        inputs = [pair for files in ranks.values() for pair in files.inputs()]
        inputs.sort(key=lambda pair: pair[0].entries[pair[1]].key())
        self._inputs: tuple[tuple[Shard, int], ...] = tuple(inputs)
        entries = [shard.entries[number] for shard, number in inputs]
        self.metas: tuple[InputMeta, ...] = tuple(entry.input_meta() for entry in entries)
        self.lengths: tuple[tuple[int, ...], ...] = tuple(tuple(entry.lengths) for entry in entries)

    @classmethod
    def open(cls, path: Path | str | None = None) -> Recording:
        """Open a recording, a run directory that has one in its recordings/, or the shipped corpus (None).

        Raises:
            RecordingError: there is none, it holds no input, or it is damaged; names file and field.
        """
        root = find_recording(path)
        entry = read_root(root)
        recording = cls(root, entry, {rank: read_rank(root, rank) for rank in entry.ranks})
        if not recording.metas:
            raise RecordingError(
                f"nothing-left: {root}: holds no input; the run ended before its first step was fed to the "
                "policy"
            )
        return recording

    def __len__(self) -> int:
        return len(self.metas)

    def __getitem__(self, index: int) -> RecordedInput:
        """One input, bitwise; the tensors of its file are compared with their sha256 at first touch.

        Raises:
            IndexError: there are not so many.
            RecordingError: the file is damaged; names file and field.
        """
        shard, number = self._inputs[index]
        return shard.read(number, vocab_size=self.header.vocab_size)

    def __iter__(self) -> Iterator[RecordedInput]:
        return (self[index] for index in range(len(self)))

    def source(self, index: int) -> tuple[Path, int]:
        """The file of an input, and its position there."""
        shard, number = self._inputs[index]
        return shard.path, number

    def stored(self, index: int) -> frozenset[str]:
        """The stored parts of an input besides ids and mask: names of float fields, "rng", "extras/NAME"."""
        shard, number = self._inputs[index]
        entry = shard.entries[number]
        return frozenset(entry.floats) | frozenset(entry.others)

    def outputs_of(self, index: int) -> tuple[float | None, float | None] | None:
        """(loss, grad_norm), without touching tensors; None: no outputs."""
        shard, number = self._inputs[index]
        outputs = shard.entries[number].outputs
        return None if outputs is None else (outputs.loss, outputs.grad_norm)

    def size_bytes(self) -> int:
        """Size in bytes of all files of inputs."""
        return sum(path.stat().st_size for path in {shard.path for shard, _ in self._inputs})

    def validate(self) -> Iterator[Checked]:
        """Read and check every input; damage is reported in the yielded value, and the check goes on."""
        for index, meta in enumerate(self.metas):
            try:
                recorded = self[index]
            except RecordingError as error:
                yield Checked(index=index, meta=meta, problem=str(error))
            else:
                yield Checked(index=index, meta=meta, problem=None, notes=_notes(recorded))


def find_recording(path: Path | str | None) -> Path:
    """Find the folder with the recording.json for `path`, see Recording.open."""
    if path is None:
        return corpus_path()
    start = Path(path)
    for candidate in (start, start / "recordings"):
        if os.path.lexists(candidate / HEADER):
            return candidate
    if not start.exists():
        raise RecordingError(
            f"no-such-file: {start}: does not exist; name a recording, or a run directory that has one"
        )
    raise RecordingError(
        f"wrong-kind-of-file: {start}: has no {HEADER}, nor has its folder recordings; name a recording, or "
        "record one with lockstep train --record"
    )


def read_root(root: Path) -> RootEntry:
    """Read recording.json.

    Raises:
        RecordingError: names file and field.
    """
    path = root / HEADER
    value: dict[str, Any] = read_signed_json(path, root)
    check_version(value.pop("format", None), value.pop("version", None), str(path))
    entry = checked(RootEntry, value, where=str(path))
    if entry.ranks != sorted(set(entry.ranks)) or not entry.ranks:
        raise RecordingError(
            f"wrong-field: {path}: field ranks must be at least one rank, ascending; got {entry.ranks[:20]}",
            name="ranks",
        )
    return entry


def _notes(recorded: RecordedInput) -> tuple[str, ...]:
    batch, outputs = recorded.batch, recorded.outputs
    named = {name: getattr(batch, name, None) for name in ("loss_weights", "rollout_logprobs", "advantages")}
    named |= {name: getattr(batch, name, None) for name in ("old_logprobs", "ref_logprobs")}
    named |= {name: getattr(outputs, name, None) for name in ("logprobs", "entropy")}
    return tuple(
        f"{name} is not finite at {int((~values.isfinite()).sum())} tokens"
        for name, values in named.items()
        if values is not None and not bool(values.isfinite().all())
    )
