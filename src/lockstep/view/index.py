"""An index of a run's rollouts in SQLite, in the user's cache folder, since a run folder may be read-only.

    index = RolloutIndex(run)
    index.update(stop=event.is_set)           # in a thread; what is there can be searched meanwhile
    found = index.find(query, files)          # None: it does not hold all of these files yet

The index knows each file by size and time: the rows of a file that has changed are dropped and read again.

Text and token ids of some rows together are a chunk. FTS5 knows which chunks have all trigrams of a text, and
the chunks themselves, which are searched as bytes, say which of their rows have it. So a common word is found
as fast as a rare one, and the trigrams of 480 MB of rollouts take 12 MB. The FTS5 table has no content and
cannot delete a row: numbers of dropped chunks stay in it, and are never used again.
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import json
import os
import sqlite3
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
_BUSY_SECONDS = 5.0
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_TABLES = """
CREATE TABLE about (run TEXT, next INTEGER);
CREATE TABLE files (name TEXT PRIMARY KEY, id INTEGER, size INTEGER, mtime_ns INTEGER);
CREATE TABLE rollouts (
    id INTEGER PRIMARY KEY, file INTEGER, number INTEGER, offset INTEGER, size INTEGER, step INTEGER,
    evaluation TEXT, prompt_index INTEGER, prompt INTEGER, reward REAL, gap REAL, length INTEGER, finish TEXT
);
CREATE INDEX rollouts_of_file ON rollouts (file);
CREATE TABLE chunks (
    id INTEGER PRIMARY KEY, file INTEGER, first INTEGER, lengths BLOB, text BLOB, id_lengths BLOB, ids BLOB
);
CREATE INDEX chunks_of_file ON chunks (file);
CREATE VIRTUAL TABLE trigrams USING fts5(
    text, content='', columnsize=0, detail=none, tokenize='trigram case_sensitive 1'
);
"""
_INSERT = "INSERT INTO rollouts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What a query found."""

    places: tuple[tuple[str, int, int], ...]
    """(file name, offset, size) of the rows of the page."""
    total: int


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
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _reading: sqlite3.Connection | None = None

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
        with self._errors(), self._connected() as database:
            where, values = _conditions(database, query)
            order, down = query.ranked
            direction = "DESC" if down else "ASC"
            rows = database.execute(
                "SELECT files.name, rollouts.offset, rollouts.size, count(*) OVER () FROM rollouts "
                f"JOIN files ON files.id = rollouts.file WHERE {where} "
                f"ORDER BY rollouts.{order} {direction} NULLS LAST, step, number LIMIT ? OFFSET ?",
                (*values, query.limit, query.offset),
            ).fetchall()
            if rows or not query.offset:
                total = rows[0][3] if rows else 0
            else:  # a page after the last one
                found = database.execute(f"SELECT count(*) FROM rollouts WHERE {where}", values).fetchone()
                total = found[0]
        return Found(places=tuple(row[:3] for row in rows), total=total)

    def forget(self) -> None:
        """Remove the index, so that it is built again."""
        self.close()
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
            if self._reading is None or not self.path.exists():
                self._reading = self._open()
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
            database.execute("INSERT INTO about VALUES (?, 1)", (str(self.run.resolve()),))
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
            with contextlib.closing(self._open()) as database:
                yield database
        finally:
            os.close(handle)


def _is_of(database: sqlite3.Connection, run: Path) -> bool:
    row = database.execute("SELECT run FROM about").fetchone()
    return row is not None and row[0] == str(run.resolve())


def _known(database: sqlite3.Connection) -> dict[str, tuple[int, int, int]]:
    """Name -> number, size and time of each file that the index holds whole."""
    rows = database.execute("SELECT name, id, size, mtime_ns FROM files")
    return {name: (number, size, mtime_ns) for name, number, size, mtime_ns in rows}


def _drop(database: sqlite3.Connection, name: str, number: int) -> None:
    with _transaction(database):
        for table in ("rollouts", "chunks"):
            database.execute(f"DELETE FROM {table} WHERE file = ?", (number,))
        database.execute("DELETE FROM files WHERE name = ?", (name,))


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
    rows, added, prompts = read_rows(file, problems=[]), 0, dict[tuple[str | None, tuple[int, ...]], int]()
    number = _take_numbers(database, 1)
    values = (file.path.name, number, file.size, file.mtime_ns)
    database.execute("INSERT INTO files VALUES (?, ?, ?, ?)", values)
    while chunk := list(islice(rows, _CHUNK)):
        if stop():
            raise _Stopped
        _add_rows(database, number, chunk, prompts)
        added += len(chunk)
    return added


def _add_rows(
    database: sqlite3.Connection,
    file: int,
    rows: Sequence[Row],
    prompts: dict[tuple[str | None, tuple[int, ...]], int],
) -> None:
    """Add rows of a file. prompts: those of the file that have a number already; new ones are added."""
    keys = [(row.rollout.spans[0].text, row.rollout.spans[0].token_ids) for row in rows]
    new = [key for key in dict.fromkeys(keys) if key not in prompts]
    first_prompt, first = _take_numbers(database, len(new)), _take_numbers(database, len(rows))
    prompts.update(zip(new, range(first_prompt, first_prompt + len(new)), strict=True))
    records = []
    for number, (row, key) in enumerate(zip(rows, keys, strict=True), start=first):
        one = row.rollout
        place = (number, file, row.number, row.offset, row.size)
        values = (one.step, one.evaluation, one.prompt_index, prompts[key], one.reward, one.gap, one.length)
        records.append((*place, *values, one.finish_reason))
    database.executemany(_INSERT, records)
    spans = [row.rollout.spans[1:] for row in rows]
    answers = ["\n".join(span.text for span in each if span.text) for each in spans]
    ids = [[id for span in each for id in span.token_ids] for each in spans]
    _add_chunk(database, file, first, texts=answers, ids=ids)
    if new:
        texts = [text or "" for text, _ in new]
        _add_chunk(database, file, first_prompt, texts=texts, ids=[ids for _, ids in new])


def _add_chunk(
    database: sqlite3.Connection,
    file: int,
    first: int,
    *,
    texts: Sequence[str],
    ids: Sequence[Sequence[int]],
) -> None:
    """Add what rows, or prompts, with the numbers from `first` on are searched for."""
    data = [_folded(text) for text in texts]
    whole, number = b"".join(data), _take_numbers(database, 1)
    lengths, id_lengths = (np.array([*map(len, each)], np.int64).tobytes() for each in (data, ids))
    blob = np.fromiter(chain.from_iterable(ids), np.int64).astype(_ID).tobytes()
    values = (number, file, first, lengths, whole, id_lengths, blob)
    database.execute("INSERT INTO chunks VALUES (?, ?, ?, ?, ?, ?, ?)", values)
    if whole:
        values = (number, whole.decode())
        database.execute("INSERT INTO trigrams (rowid, text) VALUES (?, ?)", values)


_ID = np.dtype("<u4")


def _folded(text: str) -> bytes:
    """Text as it is searched: in lower case; FTS5 ends at a NUL, and UTF-8 has no half of a surrogate pair."""
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


def _conditions(database: sqlite3.Connection, query: RolloutQuery) -> tuple[str, list[Any]]:
    """The condition of a query, and its values."""
    order, _ = query.ranked
    plain: Mapping[str, Any] = {
        "step >= ?": query.first_step,
        "step <= ?": query.last_step,
        "reward >= ?": query.min_reward,
        "reward <= ?": query.max_reward,
        "length >= ?": query.min_length,
        "length <= ?": query.max_length,
        "finish = ?": query.finish_reason,
        "prompt_index = ?": query.prompt_index,
    }
    parts, values = ["evaluation IS ?"], [query.evaluation]
    for text, value in plain.items():
        if value is not None:
            parts.append(text)
            values.append(value)
    if query.only == "truncated":
        parts.append("finish = 'length'")
    elif query.only is not None:
        parts.append(f"{order} IS NOT NULL")
    found = [_with_text(database, query.text)] if query.text else []
    found += [_with_ids(database, query.ids)] if query.ids else []
    for numbers in found:
        among = "IN (SELECT value FROM json_each(?))"
        parts.append(f"(rollouts.id {among} OR prompt {among})")
        values += [json.dumps(numbers)] * 2
    return " AND ".join(parts), values


def _with_text(database: sqlite3.Connection, text: str) -> list[int]:
    """The numbers of the rollouts and of the prompts that have a text."""
    wanted = _folded(text)
    trigrams = {wanted.decode()[at : at + _TRIGRAM] for at in range(len(wanted.decode()) - _TRIGRAM + 1)}
    where, values = "", []
    if trigrams:
        where = "WHERE id IN (SELECT rowid FROM trigrams WHERE trigrams MATCH ?)"
        values = [" AND ".join('"' + each.replace('"', '""') + '"' for each in sorted(trigrams))]
    rows = database.execute(f"SELECT first, lengths, text FROM chunks {where}", values)
    return [number for first, lengths, data in rows for number in _having(data, wanted, first, lengths)]


def _with_ids(database: sqlite3.Connection, ids: Sequence[int]) -> list[int]:
    """The same for token ids in a row."""
    if not all(0 <= id < 2**32 for id in ids):
        return []
    wanted = np.array(ids, _ID).tobytes()
    rows = database.execute("SELECT first, id_lengths, ids FROM chunks")
    return [
        number
        for first, lengths, data in rows
        for number in _having(data, wanted, first, lengths, width=_ID.itemsize)
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
