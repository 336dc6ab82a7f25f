"""The journal of what tools have answered, from which a resumed run takes the answers of what it repeats.

    RUN/journal/step-000012.rank-0.jsonl
        {"key": "5a..."}                                  a call begins; on the disk before it is made
        {"key": "5a...", "value": {...}, "state": "..."}  it has ended

A key is a hash of the sample and of everything that it has asked its environment up to this call.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import threading
from pathlib import Path
from typing import Any

from lockstep.errors import TrainError
from lockstep.observe.files import file_errors, sync_folder

Entry = dict[str, Any]
"""A line. Without "value": the call has begun, and its end is not known."""
_FILE = re.compile(r"(?:step|evaluation-[a-z]+)-(\d+)\.rank-\d+\.jsonl")


class Journal:
    """The journal of a rank: a file for each step and evaluation.

    Args:
        folder: made when it is needed.
        run: what tells this run from others that began in the same folder.
        checkpoints: folder of the run's checkpoints; files of steps before the newest one are removed.
        keep: steps before the current one whose files are kept, where there is no newer checkpoint.
        lag: steps (rollout.max_lag) before the one that a trajectory is trained in, in which it may have made
            calls. Their files are kept and read as well.
    """

    def __init__(
        self, folder: Path, *, run: str, rank: int, checkpoints: Path, keep: int, lag: int = 0
    ) -> None:
        self.run, self._lag = run, lag
        self._lock = threading.Lock()
        """Of the file: calls may go on while the next step begins."""
        self._folder, self._rank, self._checkpoints, self._keep = folder, rank, checkpoints, keep
        self._path = folder
        self._step = 0
        self._file: int | None = None
        self._entries: dict[str, Entry] = {}
        self._written = self._synced = 0  # bytes
        self._syncing = asyncio.Lock()

    def begin(self, what: str) -> None:
        """Begin, or repeat, a step (`step-000012`) or an evaluation (`evaluation-before-000000`).

        Raises:
            TrainError: files cannot be read or removed.
        """
        with self._lock:
            self._close_file()
            self._step = int(what.rpartition("-")[2])
            self._path = self._folder / f"{what}.rank-{self._rank}.jsonl"
        with file_errors(self._folder, TrainError, "read"):
            self._remove_old(self._step)
            found = self._read_by(what)
            self._entries = {}
            for line in (line for path in found for line in path.read_bytes().splitlines()):
                try:
                    entry = json.loads(line)
                except ValueError:  # a write that was cut short: its call had not begun
                    continue
                self._entries[entry["key"]] = self._entries.get(entry["key"], {}) | entry

    def _read_by(self, what: str) -> list[Path]:
        """The files in which the calls of a step or an evaluation may be: those of all ranks, because a
        resumed run may have given the sample to another one."""
        if not self._lag or not what.startswith("step-"):
            return sorted(self._folder.glob(f"{what}.rank-*.jsonl"))
        # Evaluations, too: what a step had left running ended there. And later steps, of which a run that was
        # killed had begun some.
        first, files = self._step - self._lag, sorted(self._folder.glob("*.jsonl"))
        return [path for path in files if (match := _FILE.fullmatch(path.name)) and int(match[1]) >= first]

    def find(self, key: str) -> Entry | None:
        """Return what is known of a call."""
        return self._entries.get(key)

    async def begun(self, key: str) -> None:
        """Note that a call begins; returns when that is on the disk. Calls that begin together share a sync.

        Raises:
            TrainError: the disk is full or fails.
        """
        self.write({"key": key})
        mine = self._written
        async with self._syncing:
            if self._synced < mine:
                with self._lock:
                    written, file = self._written, self._file
                    copy = None if file is None else os.dup(file)
                if copy is not None:  # else the next step has begun, and closed the file
                    with self._errors():
                        await asyncio.to_thread(_sync_and_close, copy)
                self._synced = written

    def write(self, entry: Entry) -> None:
        """Append a line, which survives the end of the process. Raises as `begun`."""
        line = json.dumps(entry).encode() + b"\n"
        with self._lock, self._errors():
            if self._file is None:
                self._folder.mkdir(exist_ok=True)
                self._file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
                sync_folder(self._folder)
                size = os.fstat(self._file).st_size
                if size and os.pread(self._file, 1, size - 1) != b"\n":
                    line = b"\n" + line
            while line:
                written = os.write(self._file, line)
                line, self._written = line[written:], self._written + written

    def close(self) -> None:
        """Close the file, and remove those that the last checkpoint has made needless. Idempotent.

        Raises:
            TrainError: one cannot be removed.
        """
        with self._lock:
            self._close_file()
        with file_errors(self._folder, TrainError, "remove"):
            self._remove_old(self._step + 1)

    def _close_file(self) -> None:
        if self._file is not None:
            if self._synced < self._written and self._lag:
                os.fdatasync(self._file)
                self._synced = self._written
            os.close(self._file)
            self._file = None

    def _remove_old(self, current: int) -> None:
        saved = [int(path.name.removeprefix("step-")) for path in self._checkpoints.glob("step-*[0-9]")]
        first = max([current - self._keep, *(step for step in saved if step <= current)])
        for path in self._folder.glob("*.jsonl"):
            match = _FILE.fullmatch(path.name)
            if match and int(match[1]) < first - self._lag:
                path.unlink(missing_ok=True)  # another rank may be faster

    def _errors(self) -> Any:
        return file_errors(self._path, TrainError, "write", advice="free some space, then resume the run")


def _sync_and_close(file: int) -> None:
    try:
        os.fdatasync(file)
    finally:
        os.close(file)


def key_of(before: str, *what: Any) -> str:
    """Return the key of the next call.

    Args:
        before: the key of the call before; of the first call: what identifies the sample.
        what: which call it is, and its arguments.
    """
    try:
        text = json.dumps([before, *what], sort_keys=True, ensure_ascii=False, default=_listed)
    except TypeError:  # of keys that JSON lacks, or that have no order; calls in Python's form may hold them
        text = repr([before, *what])
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()


def _listed(value: Any) -> Any:
    """What JSON lacks, as text that is the same in every process: the order of a set is not."""
    return sorted(map(repr, value)) if isinstance(value, set) else repr(value)
