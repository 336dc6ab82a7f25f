"""The flight recorder of one process: what it is doing now, and its last collectives, in a file that another
process reads while this one runs, is stopped, hangs, or is dead.

    recorder = flight.start(folder, rank=1, world_size=2)     # rank-1.flight and rank-1.stacks
    flight.note(step=3, phase="generate")                      # the heartbeat
    recorder.introduce("0", [0, 1])
    label = recorder.label("allreduce", group="0", shapes="[4096] float32")
    recorder.leave(recorder.enter(label))

    for each in flight.read_all(folder): each.heartbeat, each.collectives

The file is mapped into memory: writing costs no system call, and what was written outlives the process (not
the machine). A heartbeat and a slot carry a count, so that a reader sees when it has read half of one. It is
written in the middle of a step, whose data fills the caches: what is written is made ready before where it
can be, and a call runs little code.
SIGUSR2 makes the process write the Python stacks of all its threads to rank-N.stacks; faulthandler does that
without the interpreter, also inside a collective.

Whoever reads a record may not have written it: it is opened as a plain file, and its values are checked.
Loads no torch, so that the launcher and `lockstep hang` do not either.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import json
import mmap
import os
import re
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

from lockstep.common_errors import damaged
from lockstep.errors import DataError
from lockstep.observe.files import open_plain, parse_json
from lockstep.observe.lock import start_time
from lockstep.observe.trust import check_own

STACKS_SIGNAL = signal.SIGUSR2
"""Makes a process that records write its stacks."""
PAIRS = " p2p"
"""Ends the name under which the sends and receives of a group are recorded."""
_MAGIC = b"LSFLIGHT"
_VERSION = 2
_HEADER = struct.Struct("<8sIIIIQdQQ")
"""Magic, version, rank, world size, pid, start of the process (clock ticks since boot), Unix seconds, ident
of the main thread, whether STACKS_SIGNAL may be sent."""
_COUNT = struct.Struct("<Q")
"""Before what is not written at once: odd while it is written."""
_PAGE = os.sysconf("SC_PAGE_SIZE")
_MOST_LENGTHS = 32
_BEAT = struct.Struct(f"<QdqdqqqQ32sI{4 * _MOST_LENGTHS}s")
"""The heartbeat, without its count: beat, time, step, since, micro-batch, completions done and of how many,
resident bytes, phase, number of inputs, inputs."""
_INPUTS = [struct.Struct(f"<{count}I") for count in range(_MOST_LENGTHS + 1)]
_NONE = -(2**63)
"""Instead of an integer that is not known."""
_TEXT = struct.Struct("<QI")
"""Before a JSON text: its count, and its length."""
_BEAT_AT, _GROUPS_AT, _GROUPS_BYTES, _RING_AT = 128, 512, 7680, 8192
_SLOT = struct.Struct("<QQdd24s24s64s48sQ")
"""Number (from 1), number in its group (from 1), began, ended (0: not yet), op, group, shapes, purpose, and
the number again."""
_WRITTEN = struct.Struct("<QQdd112s48sQ")
"""The same as it is written: op, group and shapes are one label."""
_LABEL = struct.Struct("<24s24s64s")
_ENDED_AT = 24
"""Of a slot."""
_ENDED = struct.Struct("<d")
SLOTS = 400
_MOST_RANKS = 1 << 20
_LATEST = 2.0**40
"""Unix seconds that no clock shows."""
_LEAVES = SLOTS - 16
"""How far behind the newest a collective may be that ends: a slot that is soon another's is left as it is."""
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
    def waiting(self) -> Collective | None:
        """The first of the collectives that it has entered since it last left one; None: it is in none. What
        was started and never waited for is none, once it has left a later one."""
        inside = None
        for collective in reversed(self.collectives):
            if collective.ended is not None:
                break
            inside = collective
        return inside


@dataclass(slots=True)
class _Beat:
    """What the heartbeat says; None: nothing."""

    beat: int = 0
    """How often it was changed."""
    time: float = 0.0
    """Unix seconds of the last change."""
    phase: str = "start"
    since: float = 0.0
    """Unix seconds at which the phase began."""
    rss: int = 0
    """Resident bytes then."""
    step: int | None = None
    micro_batch: int | None = None
    inputs: Sequence[int] | None = None
    """Tokens of the documents of the micro-batch."""
    completions: Sequence[int] | None = None
    """How many are there, and of how many."""
    _phase: bytes = b""
    _inputs: bytes = b""

    def change(self, **values: Any) -> None:
        self.time = time.time()
        self.beat += 1
        if ("phase" in values and values["phase"] != self.phase) or not self._phase:
            self.since, self.rss = self.time, _resident_bytes()
            self._phase = _cut(values.get("phase", self.phase), 32)
        if "inputs" in values:
            inputs = (values["inputs"] or ())[:_MOST_LENGTHS]
            self._inputs = _INPUTS[len(inputs)].pack(*inputs)
        for name, value in values.items():
            setattr(self, name, value)

    def packed(self) -> tuple[Any, ...]:
        """In the order of _BEAT."""
        done, total = self.completions or (_NONE, _NONE)
        step = _NONE if self.step is None else self.step
        micro_batch = _NONE if self.micro_batch is None else self.micro_batch
        counts = (self.beat, self.time, step, self.since, micro_batch, done, total, self.rss)
        return (*counts, self._phase, len(self._inputs) // 4, self._inputs)


Label = tuple[bytes, Callable[[], int]]
"""Op, group and shapes of a collective as a slot has them, and what gives its number in its group."""


class FlightRecorder:
    """Writes the file of this process. Safe from several threads.

    Raises:
        OSError: the files cannot be made.
    """

    def __init__(self, folder: Path, *, rank: int, world_size: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"rank-{rank}.flight"
        self._lock = threading.RLock()
        self._beat = _Beat()
        self._groups: dict[str, list[int]] = {}
        self._sequences: dict[str, itertools.count[int]] = {}
        # A count gives each thread another number without a lock.
        self._next_number, self._newest = itertools.count(1).__next__, 0
        self._purpose = ""
        self._what = b"step ?: start"
        """The purpose of a collective that begins now."""
        # a new file: a reader may still have that of an earlier process mapped
        part = self.path.with_suffix(".part")
        try:
            with open(part, "w+b", opener=_anew) as file:
                file.truncate(_SIZE)
                # on a full disk this fails here, and not by SIGBUS at the first write
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, _SIZE)
                self._map = mmap.mmap(file.fileno(), _SIZE)
        except OSError:
            part.unlink(missing_ok=True)
            raise
        self._stacks = open(  # noqa: SIM115 - faulthandler writes to it
            self.path.with_suffix(".stacks"), "w", encoding="utf-8", opener=_anew
        )
        # Not chained: the signal's default, which would come next, ends the process.
        faulthandler.register(STACKS_SIGNAL, file=self._stacks, all_threads=True, chain=False)
        ident = threading.main_thread().ident or 0
        pid = os.getpid()
        self._header = (_MAGIC, _VERSION, rank, world_size, pid, start_time(pid), time.time(), ident)
        # After the handler is installed: without it the signal that a reader may send from now on ends the
        # process.
        _HEADER.pack_into(self._map, 0, *self._header, True)
        os.replace(part, self.path)

    def note(self, **values: Any) -> None:
        """Change the heartbeat, by the names of `_Beat`: phase, step, micro_batch, inputs, completions. A new
        phase starts its clock."""
        with self._lock:
            self._beat.change(**values)
            count = 2 * self._beat.beat
            _COUNT.pack_into(self._map, _BEAT_AT, count - 1)
            _BEAT.pack_into(self._map, _BEAT_AT + _COUNT.size, *self._beat.packed())
            _COUNT.pack_into(self._map, _BEAT_AT, count)
            if "phase" in values or "step" in values:
                self._name()

    def _name(self) -> None:
        """Make ready what the next collectives are for."""
        step = "?" if self._beat.step is None else self._beat.step
        self._what = _cut(self._purpose or f"step {step}: {self._beat.phase}", 48)

    @contextlib.contextmanager
    def purpose(self, what: str) -> Any:
        """Name the purpose of the collectives inside. One thread at a time has collectives."""
        before, self._purpose = self._purpose, what
        self._name()
        try:
            yield
        finally:
            self._purpose = before
            self._name()

    def introduce(self, group: str, ranks: list[int]) -> None:
        """Note the ranks of a group, before the first collective in it."""
        with self._lock:
            if group in self._groups:
                return
            self._groups[group] = ranks
            data = json.dumps(self._groups).encode()
            # Beyond that the ranks of groups are not told; their collectives are recorded all the same.
            if len(data) <= _GROUPS_BYTES - _TEXT.size:
                count = 2 * len(self._groups)
                _TEXT.pack_into(self._map, _GROUPS_AT, count - 1, len(data))
                self._map[_GROUPS_AT + _TEXT.size : _GROUPS_AT + _TEXT.size + len(data)] = data
                _TEXT.pack_into(self._map, _GROUPS_AT, count, len(data))
            self._sequences[group] = itertools.count(1)

    def label(self, op: str, *, group: str, shapes: str) -> Label:
        """Make a collective of a group that was introduced ready for `enter`; long texts are cut."""
        texts = _LABEL.pack(_cut(op, 24), _cut(group, 24), _cut(shapes, 64))
        return texts, self._sequences[group].__next__

    def enter(self, label: Label) -> int:
        """Note that a collective begins; returns its number."""
        texts, next_sequence = label
        self._newest = number = self._next_number()
        at = _RING_AT + (number - 1) % SLOTS * _SLOT.size
        _WRITTEN.pack_into(
            self._map, at, number, next_sequence(), time.time(), 0.0, texts, self._what, number
        )
        return number

    def leave(self, number: int) -> None:
        """Note that a collective has ended."""
        if self._newest - number < _LEAVES:
            at = _RING_AT + (number - 1) % SLOTS * _SLOT.size + _ENDED_AT
            _ENDED.pack_into(self._map, at, time.time())

    def close(self) -> None:
        """Stop recording; the file stays."""
        _HEADER.pack_into(self._map, 0, *self._header, False)  # first: the signal would end the process now
        faulthandler.unregister(STACKS_SIGNAL)
        self._map.close()
        self._stacks.close()


def _anew(path: str, flags: int) -> int:
    """Open a file of our own, in the place of whatever is there: what others put there stays untouched."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    return os.open(path, flags | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)


def _cut(text: str, size: int) -> bytes:
    data = text.encode("utf-8", errors="replace")
    return data if len(data) <= size else data[: size - 2] + b".."


@dataclass(slots=True)
class _Running:
    recorder: FlightRecorder | None = None


running = _Running()


def _forget() -> None:
    running.recorder = None


# A fork has the same file mapped: its notes would stand among those of its parent.
os.register_at_fork(after_in_child=_forget)


def current() -> FlightRecorder | None:
    """Return the recorder of this process, if it has one; a fork has none."""
    return running.recorder


def start(folder: Path, *, rank: int, world_size: int) -> FlightRecorder:
    """Make this process record, unless it does already."""
    recorder = current()
    if recorder is None:
        recorder = FlightRecorder(folder, rank=rank, world_size=world_size)
        running.recorder = recorder
        recorder.note(phase="start")
    return recorder


def stop() -> None:
    """End the recording of this process, if there is one."""
    recorder, running.recorder = running.recorder, None
    if recorder is not None:
        recorder.close()


def note(**values: Any) -> None:
    """Change the heartbeat of this process, if it records."""
    if running.recorder is not None:
        running.recorder.note(**values)


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
        DataError: it is no such file, holds what no process writes, or cannot be read.
    """
    with open_plain(path, DataError, root=path.parent) as file:
        data = _content(path, file)
        beat, groups = (
            _whole(file, _BEAT_AT, _COUNT.size + _BEAT.size),
            _whole(file, _GROUPS_AT, _GROUPS_BYTES),
        )
    rank, world_size, pid, since, started, ident, answers = _header(path, data)
    return Flight(
        path=path,
        rank=rank,
        world_size=world_size,
        pid=pid,
        born=since,
        started=started,
        main_thread=ident,
        answers=bool(answers),
        heartbeat={} if beat is None else _heartbeat(path, beat),
        groups={} if groups is None else _groups(path, groups),
        collectives=tuple(sorted(_collectives(path, data), key=lambda each: each.number)),
    )


def read_all(folder: Path, rank: int | None = None) -> list[Flight]:
    """Read the files of all ranks, or of one, in a folder, by rank. Raises as `read`."""
    return sorted(map(read, _files(folder, rank)), key=lambda each: each.rank)


@dataclass(frozen=True, kw_only=True, slots=True)
class FlightState:
    """What shows of a process that it makes progress."""

    rank: int
    pid: int
    counts: tuple[int, int, float]
    """They change with the heartbeat, and with each collective that begins or ends."""
    inside: bool
    """Whether it is in a collective."""


def glance_all(folder: Path, rank: int | None = None) -> list[FlightState]:
    """Read of the files of all ranks, or of one, in a folder only this much. Raises as `read`."""
    return [_peek(path) for path in _files(folder, rank)]


def _peek(path: Path) -> FlightState:
    with open_plain(path, DataError, root=path.parent) as file:
        data = _content(path, file)
    rank, _, pid, *_ = _header(path, data)
    ring = [row[:4] for row in _SLOT.iter_unpack(memoryview(data)[_RING_AT:])]
    newest, _, _, left = max(ring, key=lambda row: row[0])
    beat = _BEAT.unpack_from(data, _BEAT_AT + _COUNT.size)[0]
    return FlightState(
        rank=rank,
        pid=pid,
        counts=(beat, newest, max(row[3] for row in ring)),
        inside=bool(newest) and not left,
    )


def _files(folder: Path, rank: int | None) -> Iterable[Path]:
    pattern = re.compile(r"rank-(0|[1-9]\d{0,8})\.flight" if rank is None else rf"rank-{rank}\.flight")
    return [path for path in folder.glob("rank-*.flight") if pattern.fullmatch(path.name)]


def _content(path: Path, file: BufferedReader) -> bytes:
    # Of the folder's owner, who may be another user than the one who looks.
    check_own(path, file.fileno(), DataError, owners=[path.parent.stat().st_uid])
    data = file.read(_SIZE + 1)
    if len(data) < _HEADER.size or not data.startswith(_MAGIC):
        raise DataError(f"damaged-file: {path} is not a flight record")
    version = _HEADER.unpack_from(data)[1]
    if version != _VERSION:
        raise DataError(
            f"version-differs: {path} has format {version}, but this version of lockstep reads {_VERSION}"
        )
    if len(data) != _SIZE:
        size = os.fstat(file.fileno()).st_size
        raise damaged(DataError, path, f"a flight record has {_SIZE:,} bytes, but this file has {size:,}")
    return data


def _header(path: Path, data: bytes) -> tuple[int, int, int, int, float, int, int]:
    _, _, rank, world_size, pid, since, started, ident, answers = _HEADER.unpack_from(data)
    _check(path, "rank", rank, path.name == f"rank-{rank}.flight")
    _check(path, "world size", world_size, rank < world_size <= _MOST_RANKS)
    _check(path, "pid", pid, 0 < pid < 2**31)
    _check(path, "start", started, _is_time(started))
    return rank, world_size, pid, since, started, ident, answers


def _check(path: Path, field: str, value: object, right: bool) -> None:
    if not right:
        raise damaged(DataError, path, f"it says {field} = {value!r:.80}, which no run writes")


def _is_time(value: float) -> bool:
    """Whether it can be Unix seconds."""
    return 0 <= value < _LATEST  # false for NaN


def _heartbeat(path: Path, data: bytes) -> dict[str, Any]:
    """What it says, by the names of _Beat."""
    beat, then, step, since, micro_batch, done, total, rss, phase, count, inputs = _BEAT.unpack_from(
        data, _COUNT.size
    )
    _check(path, "heartbeat's time", then, _is_time(then))
    _check(path, "phase's start", since, _is_time(since))
    _check(path, "number of inputs", count, count <= _MOST_LENGTHS)
    values: dict[str, Any] = {
        "beat": beat,
        "time": then,
        "phase": _decoded(phase),
        "since": since,
        "rss": rss,
    }
    if step != _NONE:
        values["step"] = step
    if micro_batch != _NONE:
        values |= {"micro_batch": micro_batch, "inputs": list(_INPUTS[count].unpack_from(inputs))}
    if done != _NONE:
        values["completions"] = [done, total]
    return values


def _groups(path: Path, data: bytes) -> dict[str, tuple[int, ...]]:
    length = _TEXT.unpack_from(data)[1]
    _check(path, "length of the groups", length, length <= _GROUPS_BYTES - _TEXT.size)
    groups = parse_json(data[_TEXT.size : _TEXT.size + length], f"{path}: the groups", DataError)
    _check(path, "list of groups", groups, isinstance(groups, dict))
    for name, ranks in groups.items():
        whole = isinstance(ranks, list) and all(
            type(each) is int and 0 <= each < _MOST_RANKS for each in ranks
        )
        _check(path, f"group {name!r:.40}", ranks, whole)
    return {name: tuple(ranks) for name, ranks in groups.items()}


def _whole(file: BufferedReader, at: int, size: int) -> bytes | None:
    """What lies there, behind a count that is odd while it is written: read again until it is whole. None:
    nothing was written, or the process died while it wrote."""
    for _ in range(20):
        data = os.pread(file.fileno(), size, at)
        count = _COUNT.unpack_from(data)[0]
        if count == 0:
            return None
        if count % 2 == 0 and data.startswith(os.pread(file.fileno(), _COUNT.size, at)):
            return data
        time.sleep(0.001)
    return None


def _collectives(path: Path, data: bytes) -> list[Collective]:
    rows = (_SLOT.unpack_from(data, _RING_AT + slot * _SLOT.size) for slot in range(SLOTS))
    found = []
    for number, sequence, began, ended, op, group, shapes, what, check in rows:
        if number and number == check:
            _check(path, f"times of collective {number}", (began, ended), _is_time(began) and _is_time(ended))
            collective = Collective(
                number=number,
                sequence=sequence,
                op=_decoded(op),
                group=_decoded(group),
                purpose=_decoded(what),
                shapes=_decoded(shapes),
                began=began,
                ended=ended or None,
            )
            found.append(collective)
    return found


def _decoded(text: bytes) -> str:
    return text.rstrip(b"\0").decode("utf-8", errors="replace")


def _resident_bytes() -> int:
    with contextlib.suppress(OSError):
        file = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)  # a file of Python costs as much again
        try:
            return int(os.read(file, 100).split()[1]) * _PAGE
        finally:
            os.close(file)
    return 0
