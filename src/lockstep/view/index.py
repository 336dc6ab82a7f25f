"""An index of a run's rollouts in SQLite, in the user's cache folder, since a run folder may be read-only.

    index = RolloutIndex(run)
    index.update(stop=event.is_set)           # in a thread; what is there can be searched meanwhile
    found = index.find(query, files)          # None: it does not hold all of these files yet

The index knows each file by size and time: the rows of a file that has changed are dropped and read again.
What rows are filtered and sorted by is an array per file. Text and token ids of some rows together are a
chunk. FTS5 knows which chunks have all trigrams of a text, and the chunks themselves, which are searched as
bytes, say which of their rows have it. So a common word is found as fast as a rare one, and the trigrams of
480 MB of rollouts take 12 MB. The FTS5 table has no content and cannot delete a row: numbers of dropped
chunks stay in it, and are never used again.
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import math
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.observe.files import cache_root
from lockstep.observe.lock import flock_within
from lockstep.view.rollout_files import RolloutFile, Row, read_rows
from lockstep.view.rollouts import RolloutQuery

VERSION = 1
"""Of the tables; an index of another version is built again."""
_TRIGRAM = 3
_CHUNK = 64
"""Rows of a chunk; a stop waits for no more."""
_TRANSACTION = 2000
"""Rows after which a transaction ends, at the end of a file: a file is in the index whole or not at all."""
_MOST_NAMED = 5
"""Damaged rows of a file that are named."""
_KEPT_SECONDS = 30 * 86400.0
_BUSY_SECONDS = 5.0
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_TABLES = """
CREATE TABLE about (run TEXT, next INTEGER);
CREATE TABLE files (
    name TEXT PRIMARY KEY, id INTEGER UNIQUE, size INTEGER, mtime_ns INTEGER, evaluation TEXT, problems TEXT,
    rows BLOB
);
CREATE TABLE texts (id INTEGER PRIMARY KEY, file INTEGER, first INTEGER, lengths BLOB, data BLOB);
CREATE TABLE token_ids (id INTEGER PRIMARY KEY, file INTEGER, first INTEGER, lengths BLOB, data BLOB);
CREATE INDEX texts_of_file ON texts (file);
CREATE INDEX token_ids_of_file ON token_ids (file);
CREATE VIRTUAL TABLE trigrams USING fts5(
    text, content='', columnsize=0, detail=none, tokenize='trigram case_sensitive 1'
);
"""
_ROW = np.dtype(
    [
        *((name, np.int64) for name in ("id", "file", "line", "offset", "size", "step", "prompt_index")),
        *(("prompt", np.int64), ("length", np.int64), ("reward", np.float64), ("gap", np.float64)),
        ("finish", "S16"),
    ]
)
"""A rollout as it is filtered and sorted. id, prompt: their numbers in chunks. NaN: it has no such value."""
_ID = np.dtype("<u4")
"""A token id."""
Rows = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What a query found."""

    places: tuple[tuple[str, int, int], ...]
    """(file name, offset, size) of the rows of the page."""
    total: int
    problems: tuple[str, ...]
    """Rows that are damaged, which no query finds."""


class IndexUnavailable(Exception):
    """There is no index, for a reason that the text says; rollouts are then read from their files."""


@dataclass(slots=True)
class RolloutIndex:
    """The index of one run. Safe from several threads; one process at a time builds it.

    Args:
        run: the run's folder.
        folder: where indexes are; None: `view` in the cache folder.
    """

    run: Path
    folder: Path | None = None
    _lock: Any = field(default_factory=threading.RLock)
    _reading: sqlite3.Connection | None = None
    _inode: int | None = None
    """Of the file that is being read."""
    _loaded: dict[int, Rows] = field(default_factory=dict)
    """File -> its rows."""

    @property
    def path(self) -> Path:
        """The file of the index."""
        name = hashlib.blake2b(os.fsencode(self.run.resolve()), digest_size=12).hexdigest()
        return (self.folder or cache_root() / "view") / f"{name}.sqlite"

    def close(self) -> None:
        """Close the connection for reading."""
        with self._lock:
            if self._reading is not None:
                self._reading.close()
                self._reading = None

    def holds(self, files: Collection[RolloutFile]) -> int:
        """Return how many of these files the index holds as they are.

        Raises:
            IndexUnavailable: the cache folder cannot be used.
        """
        with self._connected() as database:
            known = _known(database)
        return sum(known.get(file.path.name, ())[1:] == (file.size, file.mtime_ns) for file in files)

    def update(self, files: Sequence[RolloutFile], *, stop: Callable[[], bool] = lambda: False) -> bool:
        """Read the files that are new or have changed, and drop those that are gone.

        Args:
            files: all of rollouts/, in the order in which they are read.
            stop: asked between transactions; whether to end early.

        Returns:
            Whether the index now holds all of them: False if it was stopped, or if another process builds it.

        Raises:
            IndexUnavailable: as `holds`.
        """
        with self._errors(), self._building() as database:
            if database is None:
                return False
            known, wanted = _known(database), {file.path.name: file for file in files}
            for name, (number, *same) in [*known.items()]:
                file = wanted.get(name)
                if file is None or same != [file.size, file.mtime_ns]:
                    _drop(database, name, number)
                    del known[name]
            left = [file for file in files if file.path.name not in known]
            try:
                _add_files(database, left, stop=stop)
            except _Stopped:
                return False
        return True

    def find(self, query: RolloutQuery) -> Found:
        """Return the places of the rollouts that a query asks for, among the files that the index holds.

        Raises:
            IndexUnavailable: as `holds`.
        """
        with self._errors(), self._connected() as database, _snapshot(database):
            rows, names = self._rows(database, query.evaluation)
            rows = rows[_selected(rows, query)]
            if query.text:
                rows = rows[_among(rows, _with_text(database, query.text))]
            if query.ids:
                rows = rows[_among(rows, _with_ids(database, query.ids))]
            damaged = database.execute(
                "SELECT problems FROM files WHERE problems != '' ORDER BY name LIMIT 20"
            )
            problems = tuple(line for (text,) in damaged for line in text.split("\n"))
        order, down = query.ranked
        # NaN, no value, comes last either way.
        key = -rows[order] if down else rows[order]
        best = np.lexsort((rows["line"], rows["step"], key))[query.offset : query.offset + query.limit]
        places = tuple((names[row["file"]], int(row["offset"]), int(row["size"])) for row in rows[best])
        return Found(places=places, total=len(rows), problems=problems)

    def _rows(self, database: sqlite3.Connection, evaluation: str | None) -> tuple[Rows, dict[int, str]]:
        """The rows of training steps, or of an evaluation, and the names of their files."""
        asked = "SELECT id, name FROM files WHERE evaluation IS ?"
        names: dict[int, str] = dict(database.execute(asked, (evaluation,)).fetchall())
        for number in names.keys() - self._loaded.keys():
            (blob,) = database.execute("SELECT rows FROM files WHERE id = ?", (number,)).fetchone()
            self._loaded[number] = np.frombuffer(blob, _ROW)
        return np.concatenate([np.empty(0, _ROW), *(self._loaded[number] for number in names)]), names

    def forget(self) -> None:
        """Remove the index, so that it is built again."""
        self.close()
        self._loaded.clear()
        for end in ("", "-wal", "-shm"):
            self.path.with_name(self.path.name + end).unlink(missing_ok=True)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn errors of SQLite and of the system into IndexUnavailable; remove a damaged index."""
        try:
            yield
        except sqlite3.Error as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF in _DAMAGED:
                self.forget()
                raise IndexUnavailable(f"{self.path} was damaged and is built again ({error})") from error
            raise IndexUnavailable(f"{self.path} cannot be used: {error}") from error
        except OSError as error:
            raise IndexUnavailable(f"{self.path} cannot be used: {error.strerror or error}") from error

    @contextlib.contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        with self._errors(), self._lock:
            if self._reading is None or self._inode != _inode(self.path):
                # Another process may have removed the file and built a new one, with other numbers.
                self.close()
                self._loaded.clear()
                self._reading = self._open()
                self._inode = _inode(self.path)
            yield self._reading

    def _open(self) -> sqlite3.Connection:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        database = sqlite3.connect(
            self.path, isolation_level=None, check_same_thread=False, timeout=_BUSY_SECONDS
        )
        try:
            version = database.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, VERSION) or (version and not _is_of(database, self.run)):
                database.close()
                self.forget()
                return self._open()
            database.execute("PRAGMA page_size = 32768")
            database.execute("PRAGMA journal_mode = WAL")
            # A power cut may damage it: then it is built again.
            database.execute("PRAGMA synchronous = OFF")
            database.execute("PRAGMA cache_size = -16000")
            if not version:
                self._create(database)
        except BaseException:
            database.close()
            raise
        return database

    def _create(self, database: sqlite3.Connection) -> None:
        database.execute("BEGIN IMMEDIATE")
        if not database.execute("PRAGMA user_version").fetchone()[0]:
            for statement in _TABLES.split(";\n"):
                database.execute(statement)
            database.execute("INSERT INTO about VALUES (?, 1)", (_name(self.run),))
            database.execute(f"PRAGMA user_version = {VERSION}")
        database.execute("COMMIT")

    @contextlib.contextmanager
    def _building(self) -> Iterator[sqlite3.Connection | None]:
        """A connection to write with; None while another process or thread has one."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        handle = os.open(self.path.with_suffix(".lock"), flags, 0o600)
        try:
            if not flock_within(0.0, handle):
                yield None
                return
            _remove_unused(self.path)
            with contextlib.closing(self._open()) as database:
                yield database
        finally:
            os.close(handle)


def _remove_unused(own: Path) -> None:
    """Remove the indexes beside `own` that nobody has opened for a month."""
    if own.exists():
        os.utime(own)
    for path in own.parent.glob("*.sqlite"):
        if path != own and time.time() - path.stat().st_mtime > _KEPT_SECONDS:
            for name in (path.name, f"{path.name}-wal", f"{path.name}-shm"):
                path.with_name(name).unlink(missing_ok=True)


def _is_of(database: sqlite3.Connection, run: Path) -> bool:
    row = database.execute("SELECT run FROM about").fetchone()
    return row is not None and row[0] == _name(run)


def _name(run: Path) -> str:
    return os.fsencode(run.resolve()).decode("utf-8", "backslashreplace")


def _known(database: sqlite3.Connection) -> dict[str, tuple[int, int, int]]:
    """Name -> number, size and time of each file that the index holds whole."""
    rows = database.execute("SELECT name, id, size, mtime_ns FROM files")
    return {name: (number, size, mtime_ns) for name, number, size, mtime_ns in rows}


def _drop(database: sqlite3.Connection, name: str, number: int) -> None:
    with _transaction(database):
        for table in ("texts", "token_ids"):
            database.execute(f"DELETE FROM {table} WHERE file = ?", (number,))
        database.execute("DELETE FROM files WHERE name = ?", (name,))


@contextlib.contextmanager
def _snapshot(database: sqlite3.Connection) -> Iterator[None]:
    """Read one state of the index, whatever is built meanwhile."""
    database.execute("BEGIN")
    try:
        yield
    finally:
        if database.in_transaction:
            database.execute("COMMIT")


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None


class _Stopped(Exception):
    """The update was asked to end."""


def _add_files(
    database: sqlite3.Connection, files: Sequence[RolloutFile], *, stop: Callable[[], bool]
) -> None:
    left = iter(files)
    while (file := next(left, None)) is not None:
        with _transaction(database):
            added = _add(database, file, stop=stop)
            while added < _TRANSACTION and (file := next(left, None)) is not None:
                added += _add(database, file, stop=stop)


def _add(database: sqlite3.Connection, file: RolloutFile, *, stop: Callable[[], bool]) -> int:
    """Add the rows of a file; returns how many."""
    number = _take_numbers(database, 1)
    problems, prompts, records = list[str](), dict[_Prompt, int](), list[Rows]()
    rows = read_rows(file, problems=problems)
    while chunk := list(islice(rows, _CHUNK)):
        if stop():
            raise _Stopped
        records.append(_add_rows(database, number, chunk, prompts))
    table = np.concatenate([np.empty(0, _ROW), *records])
    seen, wrong = (file.size, file.mtime_ns, file.evaluation), "\n".join(problems[:_MOST_NAMED])
    values = (file.path.name, number, *seen, wrong.encode("utf-8", "replace").decode(), table.tobytes())
    database.execute("INSERT INTO files VALUES (?, ?, ?, ?, ?, ?, ?)", values)
    return len(table)


_Prompt = tuple[str | None, tuple[int, ...]]


def _add_rows(
    database: sqlite3.Connection, file: int, rows: Sequence[Row], prompts: dict[_Prompt, int]
) -> Rows:
    """Add the chunks of rows of a file, and return what they are filtered by. prompts: those of the file that
    have a number already; new ones are added."""
    keys = [(row.rollout.spans[0].text, row.rollout.spans[0].token_ids) for row in rows]
    new = [key for key in dict.fromkeys(keys) if key not in prompts]
    first_prompt, first = _take_numbers(database, len(new)), _take_numbers(database, len(rows))
    prompts.update(zip(new, range(first_prompt, first_prompt + len(new)), strict=True))
    records = np.empty(len(rows), _ROW)
    for index, (row, key) in enumerate(zip(rows, keys, strict=True)):
        one = row.rollout
        place = (first + index, file, row.number, row.offset, row.size)
        values = (one.step, one.prompt_index, prompts[key], one.length, _float(one.reward), _float(one.gap))
        records[index] = (*place, *values, _finish(one.finish_reason))
    answers = [row.rollout.spans[1:] for row in rows]
    _add_texts(database, file, first, ["\n".join(s.text for s in spans if s.text) for spans in answers])
    _add_ids(database, file, first, [[id for span in spans for id in span.token_ids] for spans in answers])
    _add_texts(database, file, first_prompt, [text or "" for text, _ in new])
    _add_ids(database, file, first_prompt, [ids for _, ids in new])
    return records


def _finish(reason: str) -> bytes:
    return reason.encode("utf-8", "replace")[:16]


def _float(value: float | None) -> float:
    return math.nan if value is None else value


def _add_texts(database: sqlite3.Connection, file: int, first: int, texts: Sequence[str]) -> None:
    """Add a chunk of texts, of the numbers from `first` on."""
    data = [_folded(text) for text in texts]
    whole, number = b"".join(data), _take_numbers(database, 1)
    if whole:
        values = (number, file, first, _lengths(data), whole)
        database.execute("INSERT INTO texts VALUES (?, ?, ?, ?, ?)", values)
        database.execute("INSERT INTO trigrams (rowid, text) VALUES (?, ?)", (number, whole.decode()))


def _add_ids(database: sqlite3.Connection, file: int, first: int, ids: Sequence[Sequence[int]]) -> None:
    """Add a chunk of token ids, of the numbers from `first` on."""
    data = np.fromiter(chain.from_iterable(ids), np.int64).astype(_ID).tobytes()
    values = (_take_numbers(database, 1), file, first, _lengths(ids), data)
    database.execute("INSERT INTO token_ids VALUES (?, ?, ?, ?, ?)", values)


def _lengths(parts: Sequence[Sequence[int]] | Sequence[bytes]) -> bytes:
    return np.array([*map(len, parts)], np.int64).tobytes()


def _folded(text: str) -> bytes:
    """Text as it is searched: in lower case. FTS5 ends at a NUL, and UTF-8 has no half surrogate pairs."""
    return text.lower().replace("\0", " ").encode("utf-8", "replace")


def _take_numbers(database: sqlite3.Connection, count: int) -> int:
    """Return the first of `count` numbers that nothing had before."""
    (first,) = database.execute("SELECT next FROM about").fetchone()
    database.execute("UPDATE about SET next = ?", (first + count,))
    return int(first)


@contextlib.contextmanager
def _transaction(database: sqlite3.Connection) -> Iterator[None]:
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        database.execute("ROLLBACK")
        raise
    database.execute("COMMIT")


def _selected(rows: Rows, query: RolloutQuery) -> Rows:
    """Which rows fulfil the conditions of a query, apart from its text and its ids."""
    ranges = {
        "step": (query.first_step, query.last_step),
        "reward": (query.min_reward, query.max_reward),
        "length": (query.min_length, query.max_length),
        "prompt_index": (query.prompt_index, query.prompt_index),
    }
    selected = np.ones(len(rows), bool)
    for name, (low, high) in ranges.items():
        if low is not None:
            selected &= rows[name] >= low
        if high is not None:
            selected &= rows[name] <= high
    finish = "length" if query.only == "truncated" else query.finish_reason
    if finish is not None:
        selected &= rows["finish"] == _finish(finish)
    if query.only in ("largest gap", "highest reward"):
        selected &= ~np.isnan(rows[query.ranked[0]])
    return selected


def _among(rows: Rows, numbers: Sequence[int]) -> Rows:
    """Which rows have one of these numbers, or their prompt has."""
    return np.isin(rows["id"], numbers) | np.isin(rows["prompt"], numbers)


def _with_text(database: sqlite3.Connection, text: str) -> list[int]:
    """The numbers of the rollouts and of the prompts that have a text."""
    wanted = _folded(text)
    letters = wanted.decode()
    trigrams = {letters[at : at + _TRIGRAM] for at in range(len(letters) - _TRIGRAM + 1)}
    where, values = "", []
    if trigrams:
        where = "WHERE id IN (SELECT rowid FROM trigrams WHERE trigrams MATCH ?)"
        values = [" AND ".join('"' + each.replace('"', '""') + '"' for each in sorted(trigrams))]
    rows = database.execute(f"SELECT first, lengths, data FROM texts {where}", values)
    return [number for first, lengths, data in rows for number in _having(data, wanted, first, lengths)]


def _with_ids(database: sqlite3.Connection, ids: Sequence[int]) -> list[int]:
    """The same for token ids in a row."""
    if not all(0 <= id < 2**32 for id in ids):
        return []
    wanted, width = np.array(ids, _ID).tobytes(), _ID.itemsize
    rows = database.execute("SELECT first, lengths, data FROM token_ids")
    return [
        number
        for first, lengths, data in rows
        for number in _having(data, wanted, first, lengths, width=width)
    ]


def _having(data: bytes, wanted: bytes, first: int, lengths: bytes, *, width: int = 1) -> Iterator[int]:
    """Yield `first` plus the index of each part of `data` that contains `wanted`.

    Args:
        lengths: of the parts, int64, in units of `width` bytes, at whose multiples `wanted` may begin.
    """
    at = data.find(wanted)
    if at < 0:
        return
    ends = (np.cumsum(np.frombuffer(lengths, np.int64)) * width).tolist()
    while at >= 0:
        part = bisect.bisect_right(ends, at)
        if at % width or at + len(wanted) > ends[part]:
            at = data.find(wanted, at + 1)
            continue
        yield first + part
        at = data.find(wanted, ends[part])
