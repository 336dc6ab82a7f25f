"""Writes a recording while the run goes on, so that what the policy was fed outlives a run that is killed.

begin(inputs)    open-000064.safetensors, in the page cache: there if the process dies in the forward
finish(inputs)   the same file again, with outputs
every so often   shard-000003.safetensors on the disk, the index lists it, its open files go
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from lockstep.common_errors import leads_out
from lockstep.errors import RecordingError
from lockstep.observe.files import JSON_BYTES, JSON_VALUES, file_errors, jsonable
from lockstep.observe.tensor_file import tensor_bytes
from lockstep.recording.entries import HeaderEntry, IndexEntry, checked
from lockstep.recording.files import dtype_name, write_signed_json, write_tensors
from lockstep.recording.format import Encoded, encode, join, sealed
from lockstep.recording.reader import HEADER, read_root
from lockstep.recording.shards import (
    INDEX,
    Shard,
    empty_index,
    file_name,
    listed,
    rank_folder,
    read_rank,
    write_index,
)
from lockstep.schema.recording import FORMAT, VERSION, InputKey, RecordedInput, RecordingHeader

SHARD_BYTES = 64 * 2**20
"""A shard is written when its inputs take more, however few they are."""
SHARD_JSON = 2**20
"""The same limit for their JSON, which a reader parses as a whole."""


_LARGEST_JSON = 4 * SHARD_JSON
"""The same of one input; several stay below what a reader takes."""


class InputError(RecordingError):
    """An input that could not be read back bitwise; nothing of it is written."""


class RecordingWriter:
    """Writes one rank's inputs; every rank has its own, in the same directory.

    Args:
        directory: created if needed. Rank 0 writes recording.json, the others touch only their own folder.
        resume_at: go on behind the inputs of steps below it; those of later steps are dropped. None: the
            directory must not hold a recording.
        shard_inputs: inputs of one shard.
        ranks: those that record; None: all of header.world_size. A reader misses the folder of any of them.

    Raises:
        RecordingError: there is a recording already, or resume_at is set and it is damaged or of another
            model.
    """

    def __init__(
        self,
        directory: Path,
        header: RecordingHeader,
        *,
        rank: int = 0,
        resume_at: int | None = None,
        shard_inputs: int = 256,
        ranks: Sequence[int] | None = None,
    ) -> None:
        self.directory, self.header, self.rank = Path(directory), header, rank
        self._ranks = sorted(set(range(header.world_size) if ranks is None else ranks))
        if rank not in self._ranks:
            raise RecordingError(
                f"out-of-range: rank {rank} is not one of the ranks that record: {self._ranks[:20]}"
            )
        self._first = self._ranks[0]
        self._shard_inputs = shard_inputs
        self._folder = rank_folder(self.directory, rank)
        self._encoded: dict[InputKey, Encoded] = {}
        self._file_of: dict[InputKey, int] = {}
        self._groups: dict[int, list[InputKey]] = {}
        self._pending: set[InputKey] = set()
        self._bytes = self._json = 0
        self._closed = False
        self._index: IndexEntry = self._start(resume_at)
        self._next_open = self._index.next_open

    # --- what a recorder calls ------------------------------------------------------------------------------

    def begin(self, inputs: Sequence[RecordedInput]) -> None:
        """Inputs of one optimizer step that are about to be fed; they survive the process from here on.

        Raises:
            InputError: an input that could not be read back bitwise.
            RecordingError: no room on the disk.
        """
        self._write_open(inputs)
        self._pending |= {recorded.meta.key for recorded in inputs}

    def finish(self, inputs: Sequence[RecordedInput]) -> None:
        """Write the same inputs with their outputs, replacing those that `begin` wrote under their keys.

        Raises:
            RecordingError: see `begin`.
        """
        self._write_open(inputs)
        for key in {recorded.meta.key for recorded in inputs}:
            self._pending.discard(key)
            # Its batch will not come again, so it need not be held for comparison.
            self._encoded[key] = dataclasses.replace(self._encoded[key], batch=None)
        self._flush_if_full(wait=True)

    def add(self, inputs: Sequence[RecordedInput]) -> None:
        """Inputs that are known whole and need not survive the process before `close`: no open files."""
        for recorded in inputs:
            self._keep(recorded.meta.key, self._encode(recorded))
        self._flush_if_full(wait=False)

    def update_header(self, header: RecordingHeader) -> None:
        """Rank 0 (the first that records) replaces recording.json; the other ranks do nothing."""
        self.header = header
        if self.rank == self._first:
            self._write_header()

    def close(self) -> None:
        """Write everything into shards, safe on the disk. Idempotent."""
        if not self._closed:
            self._closed = True
            self._flush(closed=True)

    def __enter__(self) -> RecordingWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # --- files ----------------------------------------------------------------------------------------------

    def _write_open(self, inputs: Sequence[RecordedInput]) -> None:
        if self._closed:
            raise RecordingError(f"wrong-state: {self._folder}: the recording is closed")
        encoded = {recorded.meta.key: self._encode(recorded) for recorded in inputs}
        new = [key for key in encoded if key not in self._file_of]
        touched = {self._file_of[key] for key in encoded if key in self._file_of}
        for key, value in encoded.items():
            self._keep(key, value)
        if new:
            number = self._next_open
            self._next_open += 1
            self._groups[number] = new
            self._file_of |= dict.fromkeys(new, number)
            touched.add(number)
        for number in sorted(touched):
            group = [self._encoded[key] for key in self._groups[number]]
            _write_inputs(self._folder / file_name("open", number), group, sync=False)

    def _encode(self, recorded: RecordedInput) -> Encoded:
        if recorded.meta.rank != self.rank:
            raise RecordingError(
                f"out-of-range: input {tuple(recorded.meta.key)} is from another rank than the writer's, "
                f"{self.rank}"
            )
        known = self._encoded.get(recorded.meta.key)
        try:
            encoded = encode(recorded, vocab_size=self.header.vocab_size, known=known)
            for tensor in encoded.others.values():
                dtype_name(tensor)
        except RecordingError as error:
            raise error.with_message(str(error), kind=InputError) from error
        if _json_size(encoded) > _LARGEST_JSON:
            raise InputError(
                f"too-large: input {tuple(recorded.meta.key)}: its entry takes {len(encoded.entry):,} bytes "
                "of JSON, more than can be read back; keep less of each of its "
                f"{len(recorded.batch.sample_ids):,} documents"
            )
        return dataclasses.replace(encoded, others={n: t.detach().cpu() for n, t in encoded.others.items()})

    def _keep(self, key: InputKey, encoded: Encoded) -> None:
        if key in self._encoded:
            self._bytes -= self._encoded[key].nbytes
            self._json -= _json_size(self._encoded[key])
        self._encoded[key] = encoded
        self._bytes += encoded.nbytes
        self._json += _json_size(encoded)

    def _flush_if_full(self, *, wait: bool) -> None:
        """wait: for steps that have not finished yet, unless they become many."""
        share = max(
            len(self._encoded) / self._shard_inputs, self._bytes / SHARD_BYTES, self._json / SHARD_JSON
        )
        if share >= 1 and (not wait or not self._pending or share >= 2):
            self._flush(closed=False)

    def _flush(self, *, closed: bool) -> None:
        rows, number = list(self._index.shards), self._index.next_shard
        if self._encoded:
            group = [self._encoded[key] for key in sorted(self._encoded)]
            digest = _write_inputs(self._folder / file_name("shard", number), group, sync=True)
            rows.append(listed(number, inputs=len(group), sha256=digest))
            number += 1
        old = list(self._groups)
        self._index = IndexEntry(
            rank=self.rank, closed=closed, next_shard=number, next_open=self._next_open, shards=rows
        )
        # Between the shard and the removal of open files: at any
        # moment each input is in one that a reader looks at.
        write_index(self._folder, self._index)
        for opened in old:
            (self._folder / file_name("open", opened)).unlink(missing_ok=True)
        self._encoded.clear()
        self._file_of.clear()
        self._groups.clear()
        self._pending.clear()
        self._bytes = self._json = 0

    # --- start and resume -----------------------------------------------------------------------------------

    def _start(self, resume_at: int | None) -> IndexEntry:
        """The index to continue from."""
        first = self.rank == self._first
        index, root = self._folder / INDEX, self.directory / HEADER
        has_index, has_root = os.path.lexists(index), os.path.lexists(root)
        if resume_at is None and (has_index or (first and has_root)):
            raise RecordingError(
                f"already-exists: {self.directory} already contains a recording; record into another "
                "directory, or remove the recording first"
            )
        names = self._visible()
        if names and not has_index:
            raise _incomplete(f"{index} is missing, but {', '.join(names[:3])} are beside it")
        if first and has_root and resume_at and not names:
            raise _incomplete(f"{index} is missing, but {root} names its rank")
        if first and has_index and not has_root:
            raise _incomplete(f"{root} is missing, but {index} is there")
        with file_errors(self._folder, RecordingError, "write"):
            self._folder.mkdir(parents=True, exist_ok=True)
        if first:
            if has_root:
                self._adopt(resume_at or 0)
            _clear(self.directory, HEADER)
            self._write_header()
        if has_index:
            return _drop(self.directory, self.rank, resume_at or 0)
        _clear(self._folder, INDEX)
        empty = empty_index(self.rank)
        write_index(self._folder, empty)
        return empty

    def _visible(self) -> list[str]:
        """Names in the rank's folder but for hidden ones. Raises RecordingError: it is a link."""
        if self._folder.is_symlink():
            raise leads_out(RecordingError, self._folder, "the recording")
        if not self._folder.is_dir():
            return []
        return sorted(name for name in os.listdir(self._folder) if not name.startswith("."))

    def _adopt(self, resume_at: int) -> None:
        """Check that the recording is of this model; cut the folders of ranks that the run no longer has."""
        old = read_root(self.directory)
        if old.vocab_size != self.header.vocab_size:
            raise RecordingError(
                f"other-model: {self.directory / HEADER}: field vocab_size is {old.vocab_size}, but the "
                f"model's is {self.header.vocab_size}; record into another directory"
            )
        for folder in (rank_folder(self.directory, rank) for rank in old.ranks if resume_at):
            if folder != self._folder and not folder.exists():
                raise _incomplete(f"{folder} is missing, but {self.directory / HEADER} names its rank")
        for rank in set(old.ranks) - set(self._ranks):
            _drop(self.directory, rank, resume_at, closed=True)
        self._ranks = sorted({*old.ranks, *self._ranks})

    def _write_header(self) -> None:
        fields = {name: getattr(self.header, name) for name in HeaderEntry.model_fields}
        path = self.directory / HEADER
        write_header(path, fields, self._ranks)


def _json_size(encoded: Encoded) -> int:
    """Bytes of its JSON; many short values count as much as the bytes that a reader would take instead."""
    text = encoded.entry
    return max(len(text), (text.count(",") + text.count("[") + text.count("{")) * JSON_BYTES // JSON_VALUES)


def write_header(path: Path, fields: Mapping[str, Any], ranks: Sequence[int]) -> None:
    """recording.json.

    Raises:
        RecordingError: a field that could not be read again.
    """
    plain = jsonable(fields)
    checked(HeaderEntry, plain, where=str(path))
    write_signed_json(path, {"format": FORMAT, "version": VERSION, **plain, "ranks": list(ranks)})


def _write_inputs(path: Path, inputs: Sequence[Encoded], *, sync: bool) -> str:
    """Write one file; returns the sha256 of its metadata."""
    tensors, metadata = join(inputs)
    table = {
        name: (dtype_name(tensor), tuple(tensor.shape), hashlib.sha256(tensor_bytes(tensor)).hexdigest())
        for name, tensor in tensors.items()
    }
    full = sealed(metadata, table)
    write_tensors(path, tensors, full, sync=sync)
    return full["sha256"]


def _drop(root: Path, rank: int, resume_at: int, *, closed: bool = False) -> IndexEntry:
    """Forget a rank's inputs of steps from `resume_at` on; the index that is then on the disk.

    Dying in between leaves the recording as it was or as it shall be: what is kept of a shard goes into a new
    one first, then the index changes, then the files go.
    """
    files, folder = read_rank(root, rank), rank_folder(root, rank)
    kept, rest = [], []
    numbers = {id(shard): number for number, shard in files.shards}
    chosen: dict[int, list[tuple[Shard, int]]] = {}
    for shard, number in files.inputs():
        chosen.setdefault(id(shard), []).append((shard, number))
    listed_before = {row.number: row for row in files.index.shards}
    for pairs in chosen.values():
        early = [(s, n) for s, n in pairs if s.entries[n].meta.step < resume_at]
        shard_number = numbers.get(id(pairs[0][0]))
        if shard_number in listed_before and len(early) == len(pairs[0][0].entries):
            kept.append(listed_before[shard_number])
        else:
            rest += early
    next_shard = max([files.index.next_shard, *(number + 1 for number, _ in files.shards)])
    next_open = max([files.index.next_open, *(number + 1 for number, _ in files.open)])
    if rest:
        vocab_size = read_root(root).vocab_size
        rest.sort(key=lambda pair: pair[0].entries[pair[1]].key())
        group = [encode(shard.read(n, vocab_size=vocab_size), vocab_size=vocab_size) for shard, n in rest]
        digest = _write_inputs(folder / file_name("shard", next_shard), group, sync=True)
        kept.append(listed(next_shard, inputs=len(group), sha256=digest))
        next_shard += 1
    kept.sort(key=lambda row: row.number)
    index = IndexEntry(rank=rank, closed=closed, next_shard=next_shard, next_open=next_open, shards=kept)
    write_index(folder, index)
    stay = {folder / file_name("shard", row.number) for row in kept} | {folder / INDEX}
    for name in os.listdir(folder):
        if folder / name not in stay and name.endswith(".safetensors"):
            (folder / name).unlink()
    _clear(folder, INDEX)
    return index


def _clear(folder: Path, name: str) -> None:
    """Remove what a writer that was killed left half-written: of `name`, and of shards and open files."""
    for path in [*folder.glob(f".{name}.*"), *folder.glob(".*.safetensors.tmp")]:
        path.unlink()


def _incomplete(what: str) -> RecordingError:
    return RecordingError(
        f"incomplete: {what}; the recording is incomplete, and continuing would lose what is left of it. Put "
        "the file back, or move the whole recording elsewhere"
    )
