"""Sources that are read from their beginning on, in any length, without an index: `data.streaming`.

Rows are shuffled within windows of `data.shuffle_buffer` rows. Window w of an epoch is in an order drawn from
(seed, epoch, w), so that any batch can be found again by reading its window, after the rows before it have
been passed over: a resume goes on at the exact row, whatever was shuffled."""

from __future__ import annotations

import itertools
import sys
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from lockstep.config.base import is_module_path
from lockstep.config.data import DataConfig
from lockstep.data.lazy import LAST_KEPT, EndOfStream, LazyItems, Make
from lockstep.data.readers import check_surrogates, foreign_errors, opened_parquet, parse_row, restorer
from lockstep.data.rows import PlacedRow
from lockstep.data.tables import Row, Table, UnchangedFile, hub_dataset, rendered_columns
from lockstep.errors import ConfigError, DataError
from lockstep.observe.files import file_errors

T = TypeVar("T")

UNKNOWN = sys.maxsize // 2
"""The length of a source whose end was not reached yet."""
_WINDOWS = 4
"""Windows of rows that are kept: those of this step and of the next ones, of which each may begin in
another."""


class StreamTable(Table):
    """Rows of a source that is read from its beginning on, by windows.

    Args:
        rows: returns the rows from number `first` on.
        name: stands for the content where it cannot be hashed.
        file: that the rows are of, which must stay as it is.
    """

    def __init__(
        self,
        rows: Callable[[int], Iterator[Row | DataError]],
        *,
        window: int,
        name: str,
        file: UnchangedFile | None = None,
    ) -> None:
        self._rows, self._size, self._name, self._file = rows, window, name, file
        self._lock = threading.Lock()
        self._windows: OrderedDict[int, list[Row | DataError]] = OrderedDict()
        self._iterator: Iterator[Row | DataError] | None = None
        self._next = 0
        """The window that the iterator is before."""
        self._length = UNKNOWN

    def __len__(self) -> int:
        return self._length

    @property
    def fingerprint(self) -> str:
        """See Table. Of a hub data set it is the name; its first rows are compared by those who use it."""
        return self._name if self._file is None else self._file.digest

    def read(self, numbers: Sequence[int]) -> list[Row | DataError]:
        """See Table. Raises EndOfStream."""
        return [self._row(number) for number in numbers]

    def _row(self, number: int) -> Row | DataError:
        which, place = divmod(number, self._size)
        with self._lock:
            window = self._window(which)
        if place < len(window):
            return window[place]
        if window or not which:
            raise EndOfStream(which * self._size + len(window))
        raise EndOfStream(sum(1 for _ in self._rows(0)))  # one that is far behind the end

    def _window(self, which: int) -> list[Row | DataError]:
        if which not in self._windows:
            if self._file is not None:
                self._file.check_unchanged()
            if self._iterator is None or which < self._next:
                self._iterator, self._next = self._rows(which * self._size), which
            iterator, self._iterator = self._iterator, None  # one that has raised is at its end
            passed = (which - self._next) * self._size
            next(itertools.islice(iterator, passed, passed), None)
            self._windows[which] = list(itertools.islice(iterator, self._size))
            self._iterator, self._next = iterator, which + 1
            while len(self._windows) > _WINDOWS:
                self._windows.popitem(last=False)
        return self._windows[which]


def open_stream(config: DataConfig) -> StreamTable:
    """Open a file or a hub data set to be streamed.

    Raises:
        ConfigError: a source of another kind.
        DataError: it cannot be opened.
    """
    path = Path(config.source).expanduser()
    name = f"{config.source} {config.subset} {config.split}"
    file: UnchangedFile | None = None
    if path.suffix in (".jsonl", ".parquet"):
        file = UnchangedFile(path)
        rows = _lines(path) if path.suffix == ".jsonl" else _batches(path, config)
    elif path.is_dir() or path.suffix == ".json" or is_module_path(config.source):
        raise ConfigError(
            f"no-effect: data.streaming = true with data.source = {config.source!r}, of which any row can be "
            "read by its number; leave it out"
        )
    else:
        rows = _hub(config)
    return StreamTable(rows, window=config.shuffle_buffer, name=name, file=file)


def _lines(path: Path) -> Callable[[int], Iterator[Row | DataError]]:
    def rows(first: int) -> Iterator[Row | DataError]:
        with file_errors(path, DataError), path.open("rb") as lines:
            numbered = ((number, line) for number, line in enumerate(lines, start=1) if not line.isspace())
            for number, line in itertools.islice(numbered, first, None):
                where = f"{path}, line {number}"
                try:
                    row = parse_row(line, where)
                    if b"\\u" in line or b"\xed" in line:
                        check_surrogates(row, where)
                except DataError as error:
                    yield error
                    continue
                yield PlacedRow(row, where=where)

    return rows


def _batches(path: Path, config: DataConfig) -> Callable[[int], Iterator[Row | DataError]]:
    def rows(first: int) -> Iterator[Row | DataError]:
        with opened_parquet(path) as file:
            restored = restorer(file.schema_arrow, rendered=rendered_columns(config), source=str(path))
            for batch in file.iter_batches():
                passed = min(first, batch.num_rows)
                first -= passed
                for row in batch.slice(passed).to_pylist():
                    try:
                        yield restored(row)
                    except DataError as error:
                        yield error

    return rows


def _hub(config: DataConfig) -> Callable[[int], Iterator[Row | DataError]]:
    loaded = hub_dataset(config, streaming=True)
    what = f"data.source = {config.source!r}"

    def rows(first: int) -> Iterator[Row | DataError]:
        with foreign_errors(f"{what}: a row cannot be read"):
            # Of a data set that does not say them, they are those of its first rows.
            known = loaded if loaded.features is not None else loaded._resolve_features()
            schema = known.features.arrow_schema
            restored = restorer(schema, rendered=rendered_columns(config), source=what, decoded=True)
            for row in known.skip(first):
                yield restored(row)

    return rows


class StreamItems(LazyItems[T]):
    """Items of a stream: of a number that is not known until its end was reached.

    Args:
        has: raises EndOfStream if there is no row with this number.
        window: rows that are shuffled together.
        of_row: items of a row.
    """

    _open_end = True

    def __init__(
        self,
        make: Make[T],
        has: Callable[[int], object],
        *,
        config: DataConfig,
        selective: bool,
        of_row: int = 1,
    ) -> None:
        self._has, self.of_row = has, of_row
        self._window = config.shuffle_buffer * of_row
        self._full = 0
        """Windows that are known to be full."""
        self._left_out_of: Counter[int] = Counter()
        """By window."""
        super().__init__(0, make, config=config, selective=selective)

    def __len__(self) -> int:
        return UNKNOWN if self._open_end else super().__len__()

    def __iter__(self) -> Iterator[T]:
        self.make_all()
        return super().__iter__()

    def make_all(self) -> None:
        """See LazyItems. Reads to the end."""
        while self._open_end:
            self._reach_window(self._full)
        super().make_all()

    def numbers(self, step: int, n: int, seed: int) -> np.ndarray:
        """See LazyItems. An epoch is windows in order, each shuffled."""
        epoch, batch = 0, step
        if not self._open_end:
            self._check_enough(n)
            epoch, batch = divmod(step, len(self) // n)
        begin, end, found = batch * n, batch * n + n, list[np.ndarray]()
        which = passed = 0
        while passed < end:
            size = self._window if self._open_end else min(self._window, self.rows - which * self._window)
            kept = size - self._left_out_of[which]
            if passed + kept > begin:
                if self._open_end and not self._reach_window(which):
                    return self.numbers(step, n, seed)  # the source ends in this window or before it
                order = self._order_of(which, size, seed=seed, epoch=epoch)
                found.append(order[max(begin - passed, 0) : end - passed])
            passed += kept
            which += 1
        return np.concatenate(found)

    def _reach_window(self, which: int) -> bool:
        """Read rows until a window is full, and return whether it is. Its order depends on its size, which is
        therefore known before any of it is made."""
        if which >= self._full:
            try:
                self._has((which + 1) * self._window // self.of_row - 1)
            except EndOfStream as end:
                self._set_end(end)
                return False
            self._full = which + 1
            self._reach(self._full * self._window - 1)
        return True

    def _set_end(self, end: EndOfStream) -> None:
        rows = end.rows * self.of_row
        self._reach(rows)
        self._open_end = False
        self._making.clear()
        self._states = self._states[:rows]

    def _order_of(self, which: int, size: int, *, seed: int, epoch: int) -> np.ndarray:
        first = which * self._window
        order = np.arange(first, first + size)
        if self.config.shuffle:
            order = np.random.default_rng([seed, epoch, which]).permutation(order)
        return order[self._states[order] <= LAST_KEPT] if self._left_out_of[which] else order

    def _ensure(self, numbers: Sequence[int]) -> None:
        try:
            super()._ensure(numbers)
        except EndOfStream as end:  # of the first rows: batches know what there is
            self._set_end(end)
            super()._ensure([number for number in numbers if number < self.rows])

    def _reach(self, number: int) -> int:
        if self._open_end and number >= self.rows:
            more = (number // self._window + 1) * self._window - self.rows
            self._states = np.concatenate([self._states, np.zeros(more, np.uint8)])
        return self.rows

    def _set_state(self, number: int, state: str) -> None:
        before = self._left_out
        super()._set_state(number, state)
        self._left_out_of[number // self._window] += self._left_out - before
