"""The files of one rank: shards of many inputs, those still open, and the index that says which count.

    rank-0000/index.json                  IndexEntry: the shards that are whole, where open files begin
    rank-0000/shard-000000.safetensors    inputs of finished steps
    rank-0000/open-000064.safetensors     inputs of one step, as long as no shard holds them

A writer that died may leave a shard that the index does not list yet (then the open files of its inputs are
there too), or open files that a listed shard holds. Both are recognised by their numbers. Anything else in
the folder is an error: a file that went missing or was renamed must not look like a shorter recording.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lockstep.errors import RecordingError
from lockstep.observe.files import parse_json
from lockstep.recording.entries import IndexEntry, InputEntry, ShardEntry, checked
from lockstep.recording.files import TensorFile, read_signed_json, write_signed_json
from lockstep.recording.format import column_offsets, decode, metadata_digest
from lockstep.schema.recording import FORMAT, VERSION, InputKey, RecordedInput

INDEX = "index.json"
_FILE = re.compile(r"(shard|open)-(\d{6,9})\.safetensors", re.ASCII)
_METADATA = {"format", "version", "inputs", "tensors", "sha256"}
_IDS = {"U8": "<u1", "U16": "<u2", "I32": "<i4"}


def rank_folder(root: Path, rank: int) -> Path:
    return root / f"rank-{rank:04d}"


def file_name(kind: str, number: int) -> str:
    """kind: shard or open."""
    return f"{kind}-{number:06d}.safetensors"


def check_version(format: object, version: object, where: str) -> None:
    """Raises RecordingError for another format or version."""
    if format != FORMAT:
        raise RecordingError(
            f"wrong-kind-of-file: {where}: field format is {str(format)[:40]!r}, not {FORMAT!r}; this is not "
            "a recording"
        )
    if str(version) != str(VERSION) or isinstance(version, bool):
        raise RecordingError(
            f"version-differs: {where}: field version is {str(version)[:40]!r}, but this Lockstep reads "
            f"{VERSION}; use the Lockstep that wrote it"
        )


class Shard:
    """One safetensors file of inputs; its metadata is read and checked, its tensors when they are needed.

    Raises:
        RecordingError: names the file and the field.
    """

    def __init__(self, path: Path, root: Path, *, rank: int) -> None:
        self.file = TensorFile(path, root)
        self.path = path
        metadata = self.file.metadata
        check_version(metadata.get("format"), metadata.get("version"), str(path))
        if set(metadata) != _METADATA:
            raise self._broken(f"metadata has {sorted(metadata)[:10]}, must have {sorted(_METADATA)}")
        self.sha256 = metadata_digest(metadata)
        if self.sha256 != metadata["sha256"]:
            raise self._broken("metadata does not match its sha256; the file is damaged")
        self._digests = self._read_table(metadata["tensors"])
        values = parse_json(
            metadata["inputs"].encode("utf-8", "surrogatepass"),
            f"{path}: metadata field inputs",
            RecordingError,
        )
        if not isinstance(values, list) or not values:
            raise self._broken("metadata field inputs must be a list with at least one input")
        self.entries = [
            checked(InputEntry, value, where=f"{path}: inputs[{i}]") for i, value in enumerate(values)
        ]
        self._check_entries(rank)
        self._offsets, sizes = column_offsets(self.entries)
        self._check_sizes(sizes)
        self._verified: tuple[int, int, int] | None = None

    def _broken(self, what: str) -> RecordingError:
        return RecordingError(f"damaged-file: {self.path}: {what}")

    def _read_table(self, text: str) -> dict[str, str]:
        table = parse_json(
            text.encode("utf-8", "surrogatepass"), f"{self.path}: metadata field tensors", RecordingError
        )
        real = {name: [span.dtype, list(span.shape)] for name, span in self.file.tensors.items()}
        if (
            not isinstance(table, dict)
            or not all(isinstance(row, list) and len(row) == 3 for row in table.values())
            or {name: row[:2] for name, row in table.items()} != real
        ):
            raise self._broken(
                "metadata field tensors does not list the dtypes and shapes of the file's tensors"
            )
        return {name: str(row[2]) for name, row in table.items()}

    def _check_entries(self, rank: int) -> None:
        numbers: dict[InputKey, int] = {}
        for number, entry in enumerate(self.entries):
            problem = entry.problem()
            if problem is None and entry.meta.rank != rank:
                problem = f"meta.rank is {entry.meta.rank}, but the file is in {self.path.parent.name}"
            first = numbers.setdefault(entry.key(), number)
            if problem is None and first != number:
                problem = (
                    f"update {entry.meta.update}, micro-batch {entry.meta.micro_batch} of rank {rank} is "
                    f"inputs[{first}] already; one of the two would be lost"
                )
            if problem is not None:
                raise self._broken(f"inputs[{number}]: {problem}")

    def _check_sizes(self, sizes: dict[str, int]) -> None:
        others = {f"{n}/{name}" for n, entry in enumerate(self.entries) for name in entry.others}
        if set(self.file.tensors) != set(sizes) | others:
            odd = sorted(set(self.file.tensors) ^ (set(sizes) | others))
            raise self._broken(
                f"the inputs and the tensors of the file differ in {', '.join(map(repr, odd[:5]))}"
            )
        for name, size in sizes.items():
            span = self.file.tensors[name]
            dtypes = {"token_ids": tuple(_IDS), "loss_mask": ("U8",), "current": ("U8",)}.get(name, ("F32",))
            if span.dtype not in dtypes or span.shape != (size,):
                raise self._broken(
                    f"tensor {name!r} is {span.dtype} of shape {list(span.shape)}, but the inputs' "
                    "lengths need "
                    f"{' or '.join(dtypes)} of shape {[size]}"
                )
        for number, entry in enumerate(self.entries):
            if "rng" in entry.others and self.file.tensors[f"{number}/rng"].dtype != "U8":
                raise self._broken(f"tensor '{number}/rng' must be U8")

    def verify(self) -> None:
        """Compare every tensor with its sha256, unless that was done since the file last changed."""
        stamp = self.file.stamp()
        if stamp == self._verified:
            return
        for name, digest in self._digests.items():
            if self.file.digest(name) != digest:
                raise self._broken(f"tensor {name!r} does not match its sha256; the file is damaged")
        self._verified = stamp

    def read(self, number: int, *, vocab_size: int) -> RecordedInput:
        """One input, bitwise.

        Raises:
            RecordingError: names the file and the field.
        """
        self.verify()
        entry, offsets = self.entries[number], self._offsets[number]
        sizes = entry.sizes()
        columns = self.file.read({name: (offsets.first[name], sizes[name]) for name in sizes})
        ids_type = _IDS[self.file.tensors["token_ids"].dtype]
        ids = np.frombuffer(columns["token_ids"], dtype=ids_type)
        if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
            raise self._broken(
                f"inputs[{number}]: token_ids range from {ids.min()} to {ids.max()}, but recording.json's "
                f"vocab_size = {vocab_size}"
            )
        try:
            return decode(
                entry,
                columns,
                lambda name: self.file.read_tensor(f"{number}/{name}"),
                ids_type=ids_type,
            )
        except RecordingError as error:
            raise self._broken(f"inputs[{number}]: {error}") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFiles:
    """The valid files of a rank's folder."""

    index: IndexEntry
    shards: tuple[tuple[int, Shard], ...]
    """(number, file), listed ones first."""
    open: tuple[tuple[int, Shard], ...]
    ignored: tuple[Path, ...]
    """Left by a writer that died; the other files hold their content."""

    def inputs(self) -> Iterator[tuple[Shard, int]]:
        """(file, number in it), one per key: finished before failed before pending, else the later."""
        best: dict[tuple[int, ...], tuple[Shard, int]] = {}
        order = ("pending", "failed", "finished")
        for _, shard in (*self.shards, *self.open):
            for number, entry in enumerate(shard.entries):
                known = best.get(entry.key())
                if known is None or order.index(entry.meta.outcome) >= order.index(
                    known[0].entries[known[1]].meta.outcome
                ):
                    best[entry.key()] = (shard, number)
        return iter(best.values())


def read_rank(root: Path, rank: int) -> RankFiles:
    """Read the files of a rank.

    Raises:
        RecordingError: something is missing, damaged, or should not be there.
    """
    folder = rank_folder(root, rank)
    if not folder.is_dir() or not Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(root)):
        raise RecordingError(
            f"incomplete: {folder} is missing, or is a link that points outside the recording; "
            f"recording.json's field ranks names rank {rank}"
        )
    files: dict[str, dict[int, Path]] = {"shard": {}, "open": {}}
    names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    for name in names:
        match = _FILE.fullmatch(name)
        if match is not None:
            files[match[1]][int(match[2])] = folder / name
        elif name != INDEX:
            raise RecordingError(
                f"wrong-kind-of-file: {folder / name} is not a file of a recording; move it elsewhere"
            )
    if not names:  # the writer died between making the folder and the index
        return RankFiles(index=empty_index(rank), shards=(), open=(), ignored=())
    index = _read_index(folder / INDEX, root, rank)
    return _select(index, files, root=root, folder=folder)


def _read_index(path: Path, root: Path, rank: int) -> IndexEntry:
    value = read_signed_json(path, root)
    check_version(value.pop("format", None), value.pop("version", None), str(path))
    index = checked(IndexEntry, value, where=str(path))
    numbers = [shard.number for shard in index.shards]
    if index.rank != rank:
        raise RecordingError(
            f"wrong-field: {path}: field rank is {index.rank}, but the file is in {path.parent.name}"
        )
    if numbers != sorted(set(numbers)) or any(number >= index.next_shard for number in numbers):
        raise RecordingError(
            f"wrong-field: {path}: field shards must ascend and stay below next_shard = {index.next_shard}"
        )
    return index


def _select(index: IndexEntry, files: dict[str, dict[int, Path]], *, root: Path, folder: Path) -> RankFiles:
    listed = {shard.number: shard for shard in index.shards}
    shards = []
    ignored = [path for n, path in files["shard"].items() if n < index.next_shard and n not in listed]
    ignored += [path for n, path in files["open"].items() if n < index.next_open]
    for number, row in listed.items():
        shard = Shard(folder / file_name("shard", number), root, rank=index.rank)
        if shard.sha256 != row.sha256 or len(shard.entries) != row.inputs:
            raise RecordingError(
                f"mixed-files: {shard.path} is not the file that {folder / INDEX} lists ({row.inputs} "
                f"inputs, sha256 {row.sha256[:12]}...); it was renamed or replaced"
            )
        shards.append((number, shard))
    unlisted = sorted(n for n in files["shard"] if n >= index.next_shard)
    opened = sorted(n for n in files["open"] if n >= index.next_open)
    for kind, numbers, start in (("shard", unlisted, index.next_shard), ("open", opened, index.next_open)):
        if numbers != list(range(start, start + len(numbers))) or (numbers and index.closed):
            raise RecordingError(
                f"incomplete: {folder / file_name(kind, numbers[-1])}: {folder / INDEX} says that the next "
                "file of this kind is "
                f"{file_name(kind, start)}{' and that the recording is closed' if index.closed else ''}; a "
                "file is missing, was renamed or does not belong here"
            )
    if len(unlisted) > 1:
        raise RecordingError(
            f"incomplete: {folder / INDEX} lists too few shards; the file is older than the others"
        )
    shards += [(n, Shard(folder / file_name("shard", n), root, rank=index.rank)) for n in unlisted]
    return RankFiles(
        index=index,
        shards=tuple(shards),
        open=tuple((n, Shard(folder / file_name("open", n), root, rank=index.rank)) for n in opened),
        ignored=tuple(sorted(ignored)),
    )


def empty_index(rank: int) -> IndexEntry:
    return IndexEntry(rank=rank, closed=False, next_shard=0, next_open=0, shards=[])


def write_index(folder: Path, index: IndexEntry) -> None:
    """Atomic, safe on the disk."""
    write_signed_json(folder / INDEX, {"format": FORMAT, "version": VERSION, **index.model_dump()})


def listed(number: int, *, inputs: int, sha256: str) -> ShardEntry:
    return ShardEntry(number=number, inputs=inputs, sha256=sha256)
