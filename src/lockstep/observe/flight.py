"""The flight recorder of one process: what it is doing now, and its last collectives, in a file that another
process reads while this one runs, is stopped, hangs, or is dead.

    recorder = flight.start(folder, rank=1, world_size=2)     # rank-1.flight and rank-1.stacks
    flight.note(step=3, phase="generate")                      # the heartbeat
    slot = recorder.enter("allreduce", group="0", shapes="[4096] float32")
    recorder.leave(slot)

    for each in flight.read_all(folder): each.heartbeat, each.collectives

The file is mapped into memory: writing costs no system call, and what was written outlives the process (not
the machine). A heartbeat and a slot carry a count, so that a reader sees when it has read half of one.
SIGUSR2 makes the process write the Python stacks of all its threads to rank-N.stacks; faulthandler does that
without the interpreter, also inside a collective.

Standard library only, so that the launcher and `lockstep hang` load no torch.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import mmap
import os
import signal
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.errors import DataError

STACKS_SIGNAL = signal.SIGUSR2
"""Makes a process that records write its stacks."""
PAIRS = " p2p"
"""Ends the name under which the sends and receives of a group are recorded."""
_MAGIC = b"LSFLIGHT"
_VERSION = 1
_HEADER = struct.Struct("<8sIIIIQdQQ")
"""Magic, version, rank, world size, pid, start of the process (clock ticks since boot), Unix seconds, ident
of the main thread, whether STACKS_SIGNAL may be sent."""
_TEXT = struct.Struct("<QI")
"""Before a JSON text: a count that is odd while it is written, and its length."""
_BEAT_AT, _BEAT_BYTES = 128, 4096
_GROUPS_AT, _GROUPS_BYTES = _BEAT_AT + _BEAT_BYTES, 8192
_RING_AT = _GROUPS_AT + _GROUPS_BYTES
_SLOT = struct.Struct("<QQdd24s24s48s64sQ")
"""Number (from 1), number in its group (from 1), began, ended (0: not yet), op, group, purpose, shapes, and
the number again."""
SLOTS = 400
_MOST_LENGTHS = 32
_SIZE = _RING_AT + SLOTS * _SLOT.size


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """A collective that a rank entered."""

    number: int
    """Of the process, from 1."""
    sequence: int
    """Of the process in its group, from 1: ranks that are in step have the same collective under it."""
    op: str
    group: str
    """The name of the process group; the same on all its ranks."""
    purpose: str
    """Such as "the step's boundary"; else the step and the phase, such as "step 3: forward_backward"."""
    shapes: str
    """Such as "[4096] float32"."""
    began: float
    """Unix seconds."""
    ended: float | None
    """None: the rank has not left it, or did not wait for it."""

    @property
    def text(self) -> str:
        """Op and shapes, with the purpose where there is one."""
        return f"{self.op} {self.shapes}".rstrip() + f" ({self.purpose})"


@dataclass(frozen=True, kw_only=True)
class Flight:
    """What the file of one process holds."""

    path: Path
    rank: int
    world_size: int
    pid: int
    born: int
    """When the process started, in clock ticks since the machine did: a pid alone may be another's by now."""
    started: float
    main_thread: int
    answers: bool
    """Whether STACKS_SIGNAL may be sent: it ends a process that does not handle it."""
    heartbeat: Mapping[str, Any]
    """`beat` (its number), `time` (Unix seconds), and what `note` was given: step, phase, since, ..."""
    groups: Mapping[str, tuple[int, ...]]
    """Process group -> its ranks."""
    collectives: tuple[Collective, ...] = ()
    """Oldest first."""

    @property
    def stacks(self) -> Path:
        """The file that STACKS_SIGNAL appends to."""
        return self.path.with_suffix(".stacks")

    @property
    def signs(self) -> tuple[int, int, float]:
        """Numbers that change whenever the process makes progress."""
        last = self.collectives[-1] if self.collectives else None
        ended = max((c.ended or 0.0 for c in self.collectives), default=0.0)
        return int(self.heartbeat.get("beat", 0)), last.number if last else 0, ended

    @property
    def waiting(self) -> Collective | None:
        """The first of the collectives that it has entered since it last left one; None: it is in none. What
        was started and never waited for is none, once it has left a later one."""
        inside = None
        for collective in reversed(self.collectives):
            if collective.ended is not None:
                break
            inside = collective
        return inside


class FlightRecorder:
    """Writes the file of this process. Safe from several threads.

    Raises:
        OSError: the files cannot be made.
    """

    def __init__(self, folder: Path, *, rank: int, world_size: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"rank-{rank}.flight"
        self._lock = threading.RLock()
        self._beat: dict[str, Any] = {"beat": 0}
        self._groups: dict[str, list[int]] = {}
        self._sequences: dict[str, int] = {}
        self._number = 0
        self._purpose = ""
        # a new file: a reader may still have that of an earlier process mapped
        part = self.path.with_suffix(".part")
        try:
            with part.open("w+b") as file:
                file.truncate(_SIZE)
                # on a full disk this fails here, and not by SIGBUS at the first write
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, _SIZE)
                self._map = mmap.mmap(file.fileno(), _SIZE)
        except OSError:
            part.unlink(missing_ok=True)
            raise
        self._stacks = self.path.with_suffix(".stacks").open("w", encoding="utf-8")
        faulthandler.register(STACKS_SIGNAL, file=self._stacks, all_threads=True, chain=False)
        ident = threading.main_thread().ident or 0
        pid = os.getpid()
        self._header = (_MAGIC, _VERSION, rank, world_size, pid, born(pid), time.time(), ident)
        # After the handler is installed: without it the signal that a reader may send from now on ends the
        # process.
        _HEADER.pack_into(self._map, 0, *self._header, True)
        os.replace(part, self.path)

    def note(self, **values: Any) -> None:
        """Change the heartbeat: JSON values by name. A new phase starts its clock."""
        now = time.time()
        with self._lock:
            if "phase" in values and values["phase"] != self._beat.get("phase"):
                values["since"] = now
                values["rss"] = _resident_bytes()
            self._beat |= values
            self._beat["beat"] += 1
            self._beat["time"] = now
            self._write(_BEAT_AT, _BEAT_BYTES, self._beat, self._beat["beat"])

    def _write(self, at: int, size: int, value: Any, count: int) -> None:
        data = json.dumps(value, default=str).encode()
        if len(data) > size - _TEXT.size:
            return  # a heartbeat is small; the last one that fitted stays
        _TEXT.pack_into(self._map, at, 2 * count + 1, len(data))
        self._map[at + _TEXT.size : at + _TEXT.size + len(data)] = data
        _TEXT.pack_into(self._map, at, 2 * count + 2, len(data))

    @contextlib.contextmanager
    def purpose(self, what: str) -> Any:
        """Name the purpose of the collectives inside. One thread at a time has collectives."""
        before, self._purpose = self._purpose, what
        try:
            yield
        finally:
            self._purpose = before

    def enter(self, op: str, *, group: str, shapes: str, ranks: list[int] | None = None) -> int:
        """Note that a collective begins; returns its number.

        Args:
            ranks: of the group, when it is used for the first time.
        """
        with self._lock:
            if ranks is not None and group not in self._groups:
                self._groups[group] = ranks
                self._write(_GROUPS_AT, _GROUPS_BYTES, self._groups, len(self._groups))
            self._number += 1
            number = self._number
            sequence = self._sequences[group] = self._sequences.get(group, 0) + 1
            what = self._purpose or f"step {self._beat.get('step', '?')}: {self._beat.get('phase', 'start')}"
            texts = (_cut(op, 24), _cut(group, 24), _cut(what, 48), _cut(shapes, 64))
            at = _RING_AT + (number - 1) % SLOTS * _SLOT.size
            _SLOT.pack_into(self._map, at, number, sequence, time.time(), 0.0, *texts, number)
        return number

    def knows(self, group: str) -> bool:
        """Whether the ranks of a group are noted."""
        return group in self._groups

    def leave(self, number: int) -> None:
        """Note that a collective has ended."""
        at = _RING_AT + (number - 1) % SLOTS * _SLOT.size
        with self._lock:
            # The ring may have come round: the slot is another collective's then.
            if struct.unpack_from("<Q", self._map, at)[0] == number:
                struct.pack_into("<d", self._map, at + 24, time.time())

    def close(self) -> None:
        """Stop recording; the file stays."""
        _HEADER.pack_into(self._map, 0, *self._header, False)  # first: the signal would end the process now
        faulthandler.unregister(STACKS_SIGNAL)
        self._map.close()
        self._stacks.close()


def _cut(text: str, size: int) -> bytes:
    data = text.encode("utf-8", errors="replace")
    return data if len(data) <= size else data[: size - 2] + b".."


@dataclass(slots=True)
class _Current:
    recorder: FlightRecorder | None = None
    pid: int = field(default_factory=os.getpid)


_current = _Current()


def current() -> FlightRecorder | None:
    """Return the recorder of this process, if it has one; a fork has none."""
    return _current.recorder if _current.pid == os.getpid() else None


def start(folder: Path, *, rank: int, world_size: int) -> FlightRecorder:
    """Make this process record, unless it does already."""
    recorder = current()
    if recorder is None:
        recorder = FlightRecorder(folder, rank=rank, world_size=world_size)
        _current.recorder, _current.pid = recorder, os.getpid()
        recorder.note(phase="start")
    return recorder


def stop() -> None:
    """End the recording of this process, if there is one."""
    recorder, _current.recorder = current(), None
    if recorder is not None:
        recorder.close()


def note(**values: Any) -> None:
    """Change the heartbeat of this process, if it records."""
    if _current.recorder is not None and (recorder := current()) is not None:
        recorder.note(**values)


def note_micro_batch(index: int | None, lengths: Sequence[int]) -> None:
    """Note in the heartbeat that a rank begins with a micro-batch of the step.

    Args:
        index: None: an empty one, which it runs because others have more.
        lengths: tokens of its documents; the first are noted.
    """
    note(micro_batch=-1 if index is None else index, inputs=list(lengths[:_MOST_LENGTHS]))


@contextlib.contextmanager
def purpose(what: str) -> Any:
    """Name the purpose of the collectives inside, if this process records."""
    recorder = current()
    with contextlib.nullcontext() if recorder is None else recorder.purpose(what):
        yield


# --- reading ------------------------------------------------------------------------------------------------


def read(path: Path) -> Flight:
    """Read the file of one process.

    Raises:
        DataError: it is no such file.
        OSError: it cannot be read.
    """
    data = path.read_bytes()
    if len(data) != _SIZE or not data.startswith(_MAGIC):
        raise DataError(f"{path}: is no flight record of this version", code="damaged-file", path=path)
    _, version, rank, world_size, pid, since, started, ident, answers = _HEADER.unpack_from(data)
    if version != _VERSION:
        raise DataError(
            f"{path}: version {version}; this version of lockstep reads {_VERSION}",
            code="version-differs",
            path=path,
        )
    return Flight(
        path=path,
        rank=rank,
        world_size=world_size,
        pid=pid,
        born=since,
        started=started,
        main_thread=ident,
        answers=bool(answers),
        heartbeat=_text(path, _BEAT_AT, _BEAT_BYTES),
        groups={name: tuple(ranks) for name, ranks in _text(path, _GROUPS_AT, _GROUPS_BYTES).items()},
        collectives=tuple(sorted(_collectives(data), key=lambda each: each.number)),
    )


def read_all(folder: Path, rank: int | None = None) -> list[Flight]:
    """Read the files of all ranks, or of one, in a folder, by rank. Raises as `read`."""
    files = folder.glob("rank-*.flight" if rank is None else f"rank-{rank}.flight")
    return sorted((read(path) for path in files), key=lambda each: each.rank)


def _text(path: Path, at: int, size: int) -> dict[str, Any]:
    """A JSON object, read again while it is being written."""
    for _ in range(20):
        with path.open("rb") as file:
            file.seek(at)
            data = file.read(size)
            count, length = _TEXT.unpack_from(data)
            file.seek(at)
            again = _TEXT.unpack(file.read(_TEXT.size))[0]
        if count == 0:
            return {}
        if count == again and count % 2 == 0 and length <= size - _TEXT.size:
            with contextlib.suppress(ValueError):
                value = json.loads(data[_TEXT.size : _TEXT.size + length])
                if isinstance(value, dict):
                    return value
        time.sleep(0.001)
    return {}  # it died in the middle of a write


def _collectives(data: bytes) -> list[Collective]:
    rows = (_SLOT.unpack_from(data, _RING_AT + slot * _SLOT.size) for slot in range(SLOTS))
    return [
        Collective(
            number=number,
            sequence=sequence,
            op=_decoded(op),
            group=_decoded(group),
            purpose=_decoded(what),
            shapes=_decoded(shapes),
            began=began,
            ended=ended or None,
        )
        for number, sequence, began, ended, op, group, what, shapes, check in rows
        if number and number == check
    ]


def _decoded(text: bytes) -> str:
    return text.rstrip(b"\0").decode("utf-8", errors="replace")


def born(pid: int) -> int:
    """When a process started, in clock ticks since boot; 0: there is none, or the system does not say."""
    fields = _stat(pid)
    return int(fields[19]) if fields else 0


def state(pid: int, since: int) -> str | None:
    """Return the state of a process as one letter of proc(5), such as T (stopped), S or D (it waits), R; None
    when it has gone."""
    fields = _stat(pid)
    return fields[0] if fields and int(fields[19]) == since else None


def cpu_seconds(pid: int, since: int) -> float:
    """Return the CPU time of a process and of its children that have ended; 0 when it has gone."""
    fields = _stat(pid)
    if not fields or int(fields[19]) != since:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name: state first."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return []


def _resident_bytes() -> int:
    with contextlib.suppress(OSError), open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0
