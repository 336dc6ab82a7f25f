"""Rows of a source by number, read when they are asked for.

    table = open_table(config)
    for row in table.read([17, 3, 999_999]): ...    # a dict, or the DataError of that row

JSON Lines are indexed by offset in one pass. Parquet is copied once into an Arrow file, of which any row can
be read alone; saved and downloaded data sets are such files already. Index and copy are kept in the cache,
named by the content of the file, so that a file that has changed is read anew.
"""

from __future__ import annotations

import codecs
import contextlib
import hashlib
import itertools
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.common_errors import missing_package
from lockstep.config.base import is_module_path
from lockstep.config.data import DataConfig
from lockstep.data.cache import cached, new_cache_file, one_maker, touch
from lockstep.data.readers import (
    check_surrogates,
    foreign_errors,
    opened_parquet,
    parse_row,
    parse_value,
    restorer,
)
from lockstep.data.rows import PlacedRow
from lockstep.errors import DataError
from lockstep.observe.files import file_errors
from lockstep.observe.text import printable
from lockstep.registry import load_object, require_call

SMALL_BYTES = 2**24
"""A file of at most so many bytes is indexed, or loaded, each time: that takes milliseconds."""
WHOLE_BYTES = 2**26
"""A file of at most so many bytes is hashed whole."""
BLOCKS, BLOCK_BYTES = 256, 2**16
"""Number and size of the blocks of a larger file that are hashed, including the first and the last."""
_SCAN_BYTES = 2**24
_COPY_ROWS = 128
"""Rows of a batch in a copy, which is the least that is read for one row."""
_LINE_FEED, _BRACE = ord("\n"), ord("{")

Row = dict[str, Any]


class Table(ABC):
    """Rows by number, from 0. `read` may be called by several threads at once."""

    notes: tuple[str, ...] = ()
    """Notes about the table for the start of a run, a sentence each."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, numbers: Sequence[int]) -> list[Row | DataError]:
        """Return the rows with these numbers, or for one that cannot be read the error.

        Raises:
            DataError: the source itself has changed, or cannot be read any more.
        """

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Hash of the content: of all of it, or of large files their size and blocks of them."""


def open_table(config: DataConfig) -> Table:
    """Open the file, folder, function or hub data set of a config, which `check_source` has let through.

    Raises:
        DataError: it is missing, unreadable, or damaged.
        ConfigError: a package that reads it is missing.
    """
    path = Path(config.source).expanduser()
    if is_module_path(config.source):
        return FunctionTable(config.source)
    if path.is_dir():
        return DatasetTable(_saved_dataset(path, config), f"data.source = {str(path)!r}", config)
    if path.suffix == ".jsonl":
        return JsonLinesTable(path)
    if path.suffix == ".json":
        return JsonTable(path)
    if path.suffix == ".parquet":
        return ParquetTable(path, config)
    return DatasetTable(hub_dataset(config), f"data.source = {config.source!r}", config)


class FunctionTable(Table):
    """The rows that a Python function `module:function` returns. It is called once, without arguments, in the
    trainer's process, and must return the same rows each time: a resumed run calls it again."""

    def __init__(self, source: str) -> None:
        what = f"data.source = {source!r}"
        function = load_object(source, what=what)
        require_call(function, what=what)
        try:
            self._rows = list(function())
            text = json.dumps(self._rows, sort_keys=True)
        except Exception as error:  # whatever the user's function raises or returns
            raise DataError(
                f"wrong-part: {what}: {type(error).__name__}: {printable(str(error))}; return a list of rows "
                "that JSON can hold"
            ) from error
        self._digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        for number, row in enumerate(self._rows):
            if not isinstance(row, Mapping):
                raise DataError(
                    f"wrong-row: {what}, row {number}: is a {type(row).__name__}, not a dict of columns"
                )

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def fingerprint(self) -> str:
        """See Table."""
        return self._digest

    def read(self, numbers: Sequence[int]) -> list[Row | DataError]:
        """See Table."""
        return [dict(self._rows[number]) for number in numbers]


class UnchangedFile:
    """An open file that must stay as it is."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with file_errors(path, DataError):
            self._file = path.open("rb", buffering=0)
        status = os.fstat(self.fd)
        self.size, self.modified = status.st_size, status.st_mtime_ns

    @property
    def fd(self) -> int:
        return self._file.fileno()

    def check_unchanged(self) -> None:
        """Raise DataError if the file has been written since it was opened. One that was replaced is read on:
        what was opened is still there."""
        status = os.fstat(self.fd)
        if (status.st_size, status.st_mtime_ns) != (self.size, self.modified):
            raise DataError(
                f"file-changed: {self.path} was written while it was being read: it had {self.size:,} bytes "
                f"when it was opened and has {status.st_size:,} now; restore it, and resume the run, or "
                "start a new one with the new data"
            )

    @cached_property
    def digest(self) -> str:
        """Hash of the size and the content; of a large file, of blocks of the content."""
        digest = hashlib.blake2b(str(self.size).encode(), digest_size=16)
        if self.size <= WHOLE_BYTES:
            places = [(at, _SCAN_BYTES) for at in range(0, self.size, _SCAN_BYTES)]
        else:
            apart = (self.size - BLOCK_BYTES) / (BLOCKS - 1)
            places = [(round(number * apart), BLOCK_BYTES) for number in range(BLOCKS)]
        with file_errors(self.path, DataError):
            for at, length in places:
                digest.update(os.pread(self.fd, length, at))
        return digest.hexdigest()


class JsonLinesTable(Table):
    """A .jsonl file, by the offsets of its lines. Blank lines are no rows."""

    def __init__(self, path: Path) -> None:
        self._file = UnchangedFile(path)
        with file_errors(path, DataError):
            if os.pread(self._file.fd, 2, 0) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
                raise DataError(
                    f"not-text: {path}: is UTF-16, which cannot be read by lines; convert it to UTF-8: "
                    "iconv -f utf-16 -t utf-8"
                )
        index, self.notes = _line_index(self._file)
        self._offsets, self._lines = index[0], index[1]

    def __len__(self) -> int:
        return len(self._lines) - 1

    @property
    def fingerprint(self) -> str:
        """See Table."""
        return self._file.digest

    def read(self, numbers: Sequence[int]) -> list[Row | DataError]:
        """See Table."""
        self._file.check_unchanged()
        return [self._row(number) for number in numbers]

    def _row(self, number: int) -> Row | DataError:
        start, end = int(self._offsets[number]), int(self._offsets[number + 1])
        path, where = self._file.path, f"{self._file.path}, line {self._lines[number]}"
        with file_errors(path, DataError):
            line = _pread(self._file.fd, end - start, start)
        try:
            row = parse_row(line, where)
            # Half a pair stands in a line as an escape or, as json.loads takes it, as bytes from ED.
            if b"\\u" in line or b"\xed" in line:
                check_surrogates(row, where)
        except DataError as error:
            self._file.check_unchanged()
            return error
        return PlacedRow(row, where=where)


def _pread(fd: int, length: int, offset: int) -> bytes:
    """As os.pread, which may read less than it is asked for."""
    data = os.pread(fd, length, offset)
    while len(data) < length and (more := os.pread(fd, length - len(data), offset + len(data))):
        data += more
    return data


def _line_index(file: UnchangedFile) -> tuple[np.ndarray, tuple[str, ...]]:
    """The offset of each row and the number of its line, from 1; a last offset is the end of the file. Kept
    in the cache unless the file is small."""
    if file.size <= SMALL_BYTES:
        return _scanned(file), ()
    name = f"{file.digest}-{file.modified}.npy"
    if (index := _kept_index(name, file.size)) is not None:
        return index, ()
    with one_maker(name, file.path):
        if (index := _kept_index(name, file.size)) is not None:
            return index, ()
        return _new_index(name, file)


def _kept_index(name: str, size: int) -> np.ndarray | None:
    with contextlib.suppress(OSError, ValueError, EOFError):  # none there, or not a whole one
        index: np.ndarray = np.load(cached(name), allow_pickle=False)
        if _fits(index, size):
            touch(cached(name))
            return index
    return None


def _new_index(name: str, file: UnchangedFile) -> tuple[np.ndarray, tuple[str, ...]]:
    index = _scanned(file)
    file.check_unchanged()
    try:
        with new_cache_file(name) as path, path.open("wb") as target:
            np.save(target, index, allow_pickle=False)
    except OSError as error:
        note = f"the index of {file.path} is not kept, and made again by the next run: {error}"
        return index, (note,)
    return index, ()


def _fits(index: np.ndarray, size: int) -> bool:
    """Return whether this can be the index of a file of `size` bytes."""
    return bool(
        index.dtype == np.int64
        and index.ndim == 2
        and index.shape[0] == 2
        and index.shape[1] >= 1
        and index[0, -1] == size
        and index[0, 0] >= 0
        and (np.diff(index[0]) > 0).all()
    )


def _scanned(file: UnchangedFile) -> np.ndarray:
    """[2, rows + 1]: offsets, and numbers of lines."""
    starts, firsts = [np.zeros(1, np.int64)], [np.zeros(0, np.uint8)]
    at, begins = 0, True  # whether a line begins at `at`
    with file_errors(file.path, DataError):
        while block := os.pread(file.fd, _SCAN_BYTES, at):
            data = np.frombuffer(block, np.uint8)
            places = np.flatnonzero(data == _LINE_FEED) + 1
            firsts += [data[: int(begins)], data[places[places < len(data)]]]
            starts.append(places + at)
            begins = data[-1] == _LINE_FEED
            at += len(block)
    # A file that ends in a line feed has no line behind it.
    offsets = np.unique(np.concatenate([*starts, [at]]))
    lines = np.arange(1, len(offsets) + 1)
    first = np.concatenate(firsts)
    # Only a line that does not begin with a brace can be blank.
    suspects = np.flatnonzero(first != _BRACE)
    blank = [
        line
        for line in map(int, suspects)
        if not _pread(file.fd, int(offsets[line + 1] - offsets[line]), int(offsets[line])).strip()
    ]
    kept = np.ones(len(offsets), bool)
    kept[blank] = False
    return np.stack([offsets, lines])[:, kept]


class JsonTable(Table):
    """A .json file, which is one list and therefore read whole."""

    def __init__(self, path: Path) -> None:
        self._file = UnchangedFile(path)
        with file_errors(path, DataError):
            text = path.read_bytes()
        value = parse_value(text, f"{path} (one object per line belongs in .jsonl)")
        if not isinstance(value, list):
            raise DataError(
                f"wrong-type: {path}: expected a list of objects, got {type(value).__name__}; put the rows "
                "into [ ], or write one object per line into a .jsonl file"
            )
        self._rows = value
        self._surrogates = b"\\u" in text or b"\xed" in text

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def fingerprint(self) -> str:
        """See Table."""
        return self._file.digest

    def read(self, numbers: Sequence[int]) -> list[Row | DataError]:
        """See Table."""
        return [self._row(number) for number in numbers]

    def _row(self, number: int) -> Row | DataError:
        row, where = self._rows[number], f"{self._file.path}, row {number + 1}"
        if not isinstance(row, dict):
            return DataError(
                f"wrong-row: {where}: a row must be a JSON object, got {type(row).__name__}: "
                f"{str(row)[:80]!r}"
            )
        try:
            if self._surrogates:
                check_surrogates(row, where)
        except DataError as error:
            return error
        return row


class _ArrowRows:
    """Rows of an Arrow file of record batches, by number.

    Args:
        lengths: of the batches.
        batch: the batch with a number.
    """

    def __init__(
        self, lengths: Iterable[int], batch: Callable[[int], Any], restored: Callable[[Row], Row]
    ) -> None:
        self._ends = np.cumsum([*lengths], dtype=np.int64)
        self._batch = lru_cache(maxsize=256)(batch)
        self._restored = restored

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def row(self, number: int) -> Row:
        which = int(np.searchsorted(self._ends, number, side="right"))
        batch = self._batch(which)
        start = int(self._ends[which]) - batch.num_rows
        (row,) = batch.slice(number - start, 1).to_pylist()
        return self._restored(row)


class ParquetTable(Table):
    """A .parquet file: a small one in memory, of a larger one the copy in the cache."""

    def __init__(self, path: Path, config: DataConfig) -> None:
        self._file = UnchangedFile(path)
        with opened_parquet(path) as file:
            metadata, schema = file.metadata, file.schema_arrow
            size = sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
            restored = restorer(schema, rendered=rendered_columns(config), source=str(path))
            if max(size, self._file.size) <= SMALL_BYTES:
                batches = list(file.iter_batches())
                self._rows = _ArrowRows((b.num_rows for b in batches), batches.__getitem__, restored)
                return
        copied = self._copied()
        with foreign_errors(f"{copied}: not a readable copy of {path}; remove it"):
            import pyarrow as pa

            reader = pa.ipc.open_file(pa.OSFile(str(copied)))
            lengths = (reader.get_batch(number).num_rows for number in range(reader.num_record_batches))
            self._rows = _ArrowRows(lengths, reader.get_batch, restored)
        if len(self._rows) != metadata.num_rows:
            raise DataError(
                f"cannot-read: {copied} has {len(self._rows)} of the {metadata.num_rows} rows of {path}; "
                "remove it"
            )

    def _copied(self) -> Path:
        """The Arrow file with the same rows, made if it is not there."""
        name = f"{self._file.digest}-{self._file.modified}.arrow"
        path = cached(name)
        if not path.is_file():
            with one_maker(name, self._file.path):
                if not path.is_file():
                    self._copy(name)
        touch(path)
        return path

    def _copy(self, name: str) -> None:
        import pyarrow as pa

        advice = (
            f"free some space there ({self._file.path} takes more than {self._file.size:,} bytes unpacked), "
            "or set LOCKSTEP_CACHE to a folder on another disk"
        )
        with file_errors(cached(name), DataError, "write", advice=advice), new_cache_file(name) as new:
            batches = _batches(self._file.path)
            first = next(batches)
            with pa.OSFile(str(new), "wb") as sink, pa.ipc.new_file(sink, first.schema) as writer:
                for batch in itertools.chain([first], batches):
                    writer.write_batch(batch)
            self._file.check_unchanged()
        pa.default_memory_pool().release_unused()

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def fingerprint(self) -> str:
        """See Table."""
        return self._file.digest

    def read(self, numbers: Sequence[int]) -> list[Row | DataError]:
        """See Table."""
        self._file.check_unchanged()
        return _read_each(self._rows.row, numbers, f"{self._file.path}: a row cannot be read")


def _batches(path: Path) -> Iterator[Any]:
    """The record batches of a Parquet file. What is raised while one is used is none of the file's errors."""
    with opened_parquet(path) as file:
        yield from file.iter_batches(batch_size=_COPY_ROWS)


def _read_each(read: Callable[[int], Row], numbers: Sequence[int], what: str) -> list[Row | DataError]:
    rows: list[Row | DataError] = []
    for number in numbers:
        try:
            with foreign_errors(what):
                rows.append(read(number))
        except DataError as error:
            if isinstance(error.__cause__, OSError | MemoryError):
                raise  # of the disk or the machine, and not of the row
            rows.append(error)
    return rows


class DatasetTable(Table):
    """A set of the package `datasets`, which keeps it in Arrow files."""

    def __init__(self, dataset: Any, what: str, config: DataConfig) -> None:
        self._dataset, self._what = dataset, what
        with foreign_errors(f"{what}: its columns cannot be read"):
            schema = dataset.features.arrow_schema
            self._restored = restorer(schema, rendered=rendered_columns(config), source=what, decoded=True)

    def __len__(self) -> int:
        return len(self._dataset)

    @property
    def fingerprint(self) -> str:
        """See Table."""
        files = [Path(file["filename"]) for file in self._dataset.cache_files]
        parts = [UnchangedFile(file).digest for file in files] or [str(self._dataset._fingerprint)]
        return hashlib.blake2b("/".join(parts).encode(), digest_size=16).hexdigest()

    def read(self, numbers: Sequence[int]) -> list[Row | DataError]:
        """See Table."""
        return _read_each(self._row, numbers, f"{self._what}: a row cannot be read")

    def _row(self, number: int) -> Row:
        return self._restored(self._dataset[number])


def _datasets(source: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise missing_package(f"data.source = {source!r}", "datasets", extra="data", cause=error) from error
    return datasets


def _saved_dataset(path: Path, config: DataConfig) -> Any:
    datasets = _datasets(config.source)
    try:
        with foreign_errors(f"data.source = {str(path)!r}: not a readable folder of datasets"):
            loaded = datasets.load_from_disk(str(path))
    except DataError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise
        raise DataError(
            f"wrong-kind-of-file: data.source = {str(path)!r} is a folder, but not one written by datasets' "
            f"save_to_disk ({error.__cause__}); name a .jsonl, .json or .parquet file in it instead"
        ) from error
    if isinstance(loaded, datasets.DatasetDict):
        if config.split not in loaded:
            raise DataError(
                f"unknown-name: {path} has no split {config.split!r}; set data.split to one of "
                f"{column_names(loaded)}"
            )
        loaded = loaded[config.split]
    return loaded


def hub_dataset(config: DataConfig, *, streaming: bool = False) -> Any:
    """Return a set of the Hugging Face hub.

    Raises:
        DataError: it cannot be loaded.
        ConfigError: the package `datasets` is missing.
    """
    datasets = _datasets(config.source)
    more = {"streaming": True} if streaming else {}
    try:
        return datasets.load_dataset(config.source, config.subset, split=config.split, **more)
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(
            f"refused: cannot load data.source = {config.source!r} (subset {config.subset!r}, split "
            f"{config.split!r}) from the Hugging Face hub: {type(error).__name__}: {str(error)[:300]}. "
            "Check the name, data.subset and data.split and the network (HF_HUB_OFFLINE, HF_ENDPOINT, "
            "HF_TOKEN), or download it elsewhere, write it with datasets' save_to_disk, and set data.source "
            "to that folder"
        ) from error


def rendered_columns(config: DataConfig) -> frozenset[str]:
    """Return the columns, by their names in the source, whose values a chat template may get."""
    names = {
        config.prompt_column,
        config.messages_column,
        config.completion_column,
        config.chosen_column,
        config.rejected_column,
        "tools",
        "chat_template_kwargs",
    }
    return frozenset(config.columns.get(name, name) for name in names)


def column_names(row: Mapping[str, Any]) -> str:
    """Return the names of a row's columns for a message: on one line, 40 at most."""
    names = [printable(name[:80]) for name in itertools.islice(row, 40)]
    return ", ".join([*names, *(["..."] if len(row) > len(names) else [])])
