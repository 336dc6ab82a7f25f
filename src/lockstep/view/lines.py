"""JSON Lines files that grow while they are read."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lockstep.errors import DataError
from lockstep.observe.files import JSON_BYTES, open_plain

_MARK = 64
"""Bytes before the place where reading stopped that show whether the file is still the one that was read."""
_HEAD, _TAIL = 1 << 16, 1 << 18
"""Bytes of a large file's ends."""
_MOST_NAMED = 20
"""Damaged lines of one file that are named."""


def ends_of(path: Path, *, root: Path) -> list[dict[str, Any]]:
    """Return the objects of the first and the last lines of a large file, in order; none if it cannot be
    read."""
    try:
        with open_plain(path, DataError, root=root) as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(_HEAD).split(b"\n")[:-1]
            file.seek(max(file.tell(), size - _TAIL))
            tail = file.read(_TAIL).split(b"\n")[1:-1]
    except DataError:
        return []
    rows = []
    for raw in (*head, *tail):
        with contextlib.suppress(ValueError, RecursionError):
            rows.append(json.loads(raw))
    return [row for row in rows if isinstance(row, dict)]


class GrowingLines:
    """Reads a JSON Lines file as it grows.

    A last line without its line end is left for later. A damaged line is skipped, and named in `problems`.
    """

    def __init__(self, path: Path, *, root: Path) -> None:
        self.path, self._root = path, root
        self.problems: list[str] = []
        self.generation = 0
        """Counts how often the file was replaced or cut: what was read before then is no longer in it."""
        self._restart()

    def _restart(self) -> None:
        self._offset, self._number, self._damaged = 0, 0, 0
        self._inode: int | None = None
        self._mark = b""
        self.problems.clear()

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the objects of the lines that were appended since the last call, or all of them once
        `generation` has changed. A missing file has no lines."""
        try:
            with open_plain(self.path, DataError, root=self._root) as file:
                if self._replaced(file.fileno()):
                    self._restart()
                    self.generation += 1
                self._inode = os.fstat(file.fileno()).st_ino
                file.seek(self._offset)
                while raw := file.readline(JSON_BYTES + 1):
                    if not raw.endswith(b"\n") and len(raw) <= JSON_BYTES:
                        break
                    self._offset += len(raw)
                    self._number += 1
                    self._mark = raw[-_MARK:]
                    if raw.strip() and (row := self._parsed(raw)) is not None:
                        yield row
        except DataError as error:
            if error.code != "cannot-read" or self.path.exists():
                self._note(str(error))
            elif self._inode is not None:  # the run was deleted while it was looked at
                self._restart()
                self.generation += 1

    def _replaced(self, handle: int) -> bool:
        if self._inode is None:
            return False
        status = os.fstat(handle)
        if status.st_ino != self._inode or status.st_size < self._offset:
            return True
        return os.pread(handle, len(self._mark), self._offset - len(self._mark)) != self._mark

    def _parsed(self, raw: bytes) -> dict[str, Any] | None:
        try:
            row = json.loads(raw)
        except (ValueError, RecursionError) as error:
            self._damaged += 1
            if self._damaged <= _MOST_NAMED:
                self._note(f"{self.path.name}, line {self._number}: not valid JSON ({error})")
            return None
        if isinstance(row, dict):
            return row
        self._note(f"{self.path.name}, line {self._number}: not a JSON object")
        return None

    def _note(self, problem: str) -> None:
        if problem not in self.problems and len(self.problems) <= _MOST_NAMED:
            self.problems.append(problem)
