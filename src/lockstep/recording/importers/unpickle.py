"""Reads what torch.save and pickle wrote without executing any of it.

A pickle is a program, so none is handed to pickle or torch.load. Its instructions are interpreted here over
plain values: a global is a symbol of a short list, never an imported object; "call" picks a branch of
`symbols.call`. What is built are containers, numbers, text and tensors over copies of the file's own bytes.

Limits on steps, nesting and bytes hold for a file and everything nested in it, so that time and memory are
bounded by its size.
"""

from __future__ import annotations

import io
import os
import stat
import struct
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from lockstep.errors import RecordingError
from lockstep.recording.importers.symbols import (
    Budget,
    LazyArray,
    LazyDtype,
    LazyTensor,
    Opaque,
    Storage,
    StorageKind,
    Symbol,
    call,
    symbol,
)

MAX_FILE_BYTES = 8 * 2**30
MAX_NESTING = 24
_MAX_ARCHIVES = 3
"""torch.save inside pickle inside ...: pickled tensors are one level."""
_MAX_LINE = 512
# MAGIC_NUMBER and PROTOCOL_VERSION of torch/serialization.py.
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_PROTOCOL = 1001
_ZIP = b"PK\x03\x04"

_DAMAGE = (IndexError, KeyError, ValueError, TypeError, OverflowError, AttributeError, struct.error)
"""What a damaged program does to the interpreter; each is reported as damage."""
_ZIP_DAMAGE = (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, *_DAMAGE)


@dataclass(frozen=True, slots=True)
class Dump:
    """One file's content."""

    value: Any
    """dict, list, tuple, str, bytes, int, float, bool, None, Tensor (on the CPU), or Opaque: a value of an
    allowed kind that no tensor is made of."""
    kind: str
    """"torch" for torch.save, "pickle"."""


def load_dump(path: Path) -> Dump:
    """The file's plain values.

    Raises:
        RecordingError: it is no dump, is damaged, or wants something that is not on the list; names the file.
    """
    where = path.name
    data = _read(path, where)
    budget = Budget.of(len(data), where)
    value, kind = _load(data, where, budget, level=0)
    try:
        return Dump(_plain(value, budget, depth=0), kind)
    except RecordingError:
        raise
    except (*_DAMAGE, RuntimeError) as error:
        raise RecordingError(
            f"{where}: damaged: a tensor cannot be rebuilt ({error})", code="damaged-file"
        ) from error


def _read(path: Path, where: str) -> bytes:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | getattr(os, "O_CLOEXEC", 0))
    except OSError as error:
        raise RecordingError(f"{path}: cannot be read ({error.strerror})", code="cannot-read") from error
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise RecordingError(f"{where}: is no regular file", code="not-a-file")
        if status.st_size > MAX_FILE_BYTES:
            raise RecordingError(
                f"{where}: {status.st_size:,} bytes; dumps of at most {MAX_FILE_BYTES:,} are read, so dump "
                "the inputs in several files",
                code="too-large",
                name="file",
            )
        return file.read(status.st_size)


def _load(data: bytes, where: str, budget: Budget, *, level: int) -> tuple[Any, str]:
    if level > _MAX_ARCHIVES:
        raise RecordingError(
            f"{where}: archives are nested more than {_MAX_ARCHIVES} deep; it is no dump",
            code="too-deep",
            name="archives",
        )
    if data[:4] == _ZIP:
        return _load_zip(data, where, budget, level=level), "torch"
    first = _Machine(data, 0, where, budget, level=level)
    value = first.run()
    if type(value) is int and value == _LEGACY_MAGIC:
        return _load_legacy(data, first.at, where, budget, level=level), "torch"
    return value, "pickle"


# --- archives -----------------------------------------------------------------------------------------------


def _load_zip(data: bytes, where: str, budget: Budget, *, level: int) -> Any:
    entries = _zip_entries(data, where)
    programs = [name for name in entries if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(programs) != 1:
        raise RecordingError(
            f"{where}: a zip file with {len(programs)} entries data.pkl; torch.save writes one",
            code="damaged-file",
            name="data.pkl",
        )
    root = programs[0].removesuffix("data.pkl")
    if entries.get(f"{root}byteorder", b"little") != b"little":
        raise RecordingError(
            f"{where}: written on a big-endian machine, which is not read",
            code="unsupported-version",
            name="byteorder",
        )
    known: dict[str, Storage] = {}

    def storage(kind: StorageKind, key: str, count: int) -> Storage:
        if key not in known:
            raw = entries.get(f"{root}data/{key}")
            if raw is None:
                raise RecordingError(
                    f"{where}: the archive lacks the tensor data {key[:60]!r}", code="damaged-file", name=key
                )
            known[key] = Storage(kind.dtype, count)
            known[key].fill(raw, budget)
        return known[key].viewed(kind.dtype, count)

    return _Machine(entries[programs[0]], 0, where, budget, level=level, storage=storage).run()


def _zip_entries(data: bytes, where: str) -> dict[str, bytes]:
    """Every entry's content, checked against its CRC; nothing is ever decompressed."""
    members: dict[str, bytes] = {}
    left = len(data)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for info in archive.infolist():
                if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
                    raise RecordingError(
                        f"{where}: entry {info.filename[:60]!r} is compressed; torch.save stores plain "
                        "bytes, so this is no dump of it",
                        code="wrong-kind-of-file",
                        name="compressed",
                    )
                left -= info.file_size
                if left < 0:
                    raise RecordingError(
                        f"{where}: its entries claim more bytes than the file has",
                        code="too-large",
                        name="entries",
                    )
                if info.filename in members:
                    raise RecordingError(
                        f"{where}: entry {info.filename[:60]!r} is there twice",
                        code="duplicate",
                        name=info.filename,
                    )
                members[info.filename] = archive.read(info)
    except RecordingError:
        raise  # a ValueError, but no damage
    except _ZIP_DAMAGE as error:
        raise RecordingError(
            f"{where}: the archive is damaged ({error}); copy the file again", code="damaged-file"
        ) from error
    return members


def _load_legacy(data: bytes, at: int, where: str, budget: Budget, *, level: int) -> Any:
    """torch.save before zip files, and what pickle makes of a tensor: pickles in a row, then the bytes."""
    waiting: dict[str, Storage] = {}

    def storage(kind: StorageKind, key: str, count: int) -> Storage:
        if key not in waiting:
            waiting[key] = Storage(kind.dtype, count)
        return waiting[key].viewed(kind.dtype, count)

    parts = []
    for _ in range(4):
        machine = _Machine(data, at, where, budget, level=level, storage=storage)
        parts.append(machine.run())
        at = machine.at
    protocol, system, value, keys = parts
    if protocol != _LEGACY_PROTOCOL or type(system) is not dict or system.get("little_endian") is not True:
        raise RecordingError(
            f"{where}: of an unknown version of torch.save, or of a big-endian machine",
            code="unsupported-version",
        )
    if type(keys) is not list or any(type(key) is not str for key in keys) or set(keys) != set(waiting):
        raise RecordingError(
            f"{where}: damaged: its list of tensor data is not that of its tensors", code="damaged-file"
        )
    for key in keys:
        count = int.from_bytes(data[at : at + 8], "little", signed=True)
        size = waiting[key].size_bytes
        if count != waiting[key].count or len(data) - at - 8 < size:
            raise RecordingError(
                f"{where}: damaged: the tensor data {key[:60]!r} is cut short", code="damaged-file"
            )
        waiting[key].fill(data[at + 8 : at + 8 + size], budget)
        at += 8 + size
    return value


# --- values -------------------------------------------------------------------------------------------------


_ATOMS = frozenset((int, float, bool, str, bytes, type(None)))


def _plain(value: Any, budget: Budget, *, depth: int) -> Any:
    """Containers without symbols, tensors built."""
    if type(value) in _ATOMS:
        return value
    if depth > MAX_NESTING:
        raise RecordingError(
            f"{budget.where}: containers are nested more than {MAX_NESTING} deep",
            code="too-deep",
            name="containers",
        )
    if isinstance(value, LazyTensor | LazyArray):
        return value.build(budget)
    if isinstance(value, Symbol | StorageKind | LazyDtype | Storage | torch.dtype):
        return Opaque(type(value).__name__)
    budget.step(1 + len(value) if type(value) in (dict, list, tuple) else 1)
    if type(value) is dict:
        return {key: _plain(item, budget, depth=depth + 1) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)([_plain(item, budget, depth=depth + 1) for item in value])
    return value


# --- the interpreter ----------------------------------------------------------------------------------------


class _Machine:
    """One pickle from `at` to its STOP. After `run`, `at` is behind it."""

    def __init__(
        self,
        data: bytes,
        at: int,
        where: str,
        budget: Budget,
        *,
        level: int,
        storage: Callable[[StorageKind, str, int], Storage] | None = None,
    ) -> None:
        self.data, self.at, self.where, self.budget, self.level = data, at, where, budget, level
        self.storage = storage
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        code, begin = 0, self.at
        try:
            while True:
                self.budget.step()
                begin, code = self.at, self.data[self.at]
                self.at += 1
                if code == _STOP:
                    (value,) = self.stack
                    if self.marks:
                        self._bad("an open mark")
                    return value
                # A table of what is known and not Python's Unpickler with a find_class: that one still runs
                # instructions that call and set state, and has no budget.
                step = _STEPS.get(code)
                if step is None:
                    self._refuse(code)
                step(self)
        except RecordingError:
            raise
        except _DAMAGE as error:
            raise RecordingError(
                f"{self.where}: no pickle, or a damaged one: instruction {code:#04x} at byte {begin} "
                f"({type(error).__name__}: {str(error)[:100]}); copy the file again",
                code="damaged-file",
            ) from error

    def _bad(self, what: str) -> NoReturn:
        raise RecordingError(
            f"{self.where}: no pickle, or a damaged one: {what} at byte {self.at}",
            code="damaged-file",
            reason=what,
        )

    def _refuse(self, code: int) -> NoReturn:
        what = _REFUSED.get(code)
        if what is None:
            self._bad(f"unknown instruction {code:#04x}")
        raise RecordingError(
            f"{self.where}: {what}, which this loader does not do (byte {self.at - 1})",
            code="forbidden-content",
            name=what,
        )

    # bytes

    def take(self, count: int) -> bytes:
        if not 0 <= count <= len(self.data) - self.at:
            self._bad(f"{count} bytes are claimed behind the end")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, width: int, *, signed: bool = False) -> int:
        return int.from_bytes(self.take(width), "little", signed=signed)

    def block(self, width: int) -> bytes:
        return self.take(self.number(width))

    def line(self) -> str:
        end = self.data.index(b"\n", self.at, self.at + _MAX_LINE)
        text = self.data[self.at : end].decode("utf-8")
        self.at = end + 1
        return text

    # stack

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def marked(self) -> list[Any]:
        items, self.stack = self.stack, self.marks.pop()
        return items

    def mark(self) -> None:
        self.marks.append(self.stack)
        self.stack = []

    def top(self, kind: type) -> Any:
        if type(self.stack[-1]) is not kind:
            self._bad(f"a {type(self.stack[-1]).__name__} where a {kind.__name__} must be")
        return self.stack[-1]

    def last(self, count: int) -> None:
        items = tuple(self.stack[-count:])
        if len(items) != count:
            self._bad("too few values")
        self.stack[-count:] = [items]

    def memoize(self, number: int) -> None:
        self.memo[number] = self.stack[-1]

    def put_items(self, target: dict[Any, Any], items: list[Any]) -> None:
        if len(items) % 2:
            self._bad("a key without a value")
        for key, value in zip(items[::2], items[1::2], strict=True):
            plain = key is None or type(key) in (str, bytes, bool) or (type(key) is int and abs(key) < 2**31)
            if not plain:  # hashing anything else could take unbounded time
                raise RecordingError(
                    f"{self.where}: a dict has a {type(key).__name__} as a key; dump dicts with text keys",
                    code="wrong-type",
                    name=type(key).__name__,
                )
            target[key] = value

    # what could execute, and does not

    def find(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            self._bad("a global without a name")
        self.push(symbol(module, name, self.where))

    def reduce(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if not isinstance(function, Symbol) or type(arguments) is not tuple:
            self._bad(f"a call of a {type(function).__name__}")
        if function.name == "_load_from_bytes":
            (raw,) = arguments
            if type(raw) is not bytes:
                self._bad("torch.storage._load_from_bytes of no bytes")
            self.budget.charge(len(raw))
            value, _ = _load(raw, self.where, self.budget, level=self.level + 1)
            if not isinstance(value, Storage):
                self._bad("torch.storage._load_from_bytes of no storage")
            self.push(value)
            return
        self.push(call(function, arguments, self.budget))

    def build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if not isinstance(target, LazyArray | LazyDtype):
            raise RecordingError(
                f"{self.where}: it sets the state of a {type(target).__name__}, which this loader does only "
                "for numpy arrays; dump plain dicts of tensors",
                code="forbidden-content",
                name=type(target).__name__,
            )
        target.set_state(state)

    def persistent(self) -> None:
        identity = self.stack.pop()
        if self.storage is None or type(identity) is not tuple or len(identity) not in (5, 6):
            self._bad("a persistent id that is no tensor data")
        word, kind, key, _, count, *view = identity
        if word != "storage" or not isinstance(kind, StorageKind) or type(key) is not str:
            self._bad("a persistent id that is no tensor data")
        if type(count) is not int or count < 0 or view not in ([], [None]):
            self._bad("tensor data of no size, or a view of other data")
        self.push(self.storage(kind, key, count))


def _binget(m: _Machine, width: int) -> None:
    m.push(m.memo[m.number(width)])


def _append(m: _Machine) -> None:
    value = m.stack.pop()
    m.top(list).append(value)


def _appends(m: _Machine) -> None:
    items = m.marked()
    m.top(list).extend(items)


def _setitem(m: _Machine) -> None:
    value, key = m.stack.pop(), m.stack.pop()
    m.put_items(m.top(dict), [key, value])


def _setitems(m: _Machine) -> None:
    items = m.marked()
    m.put_items(m.top(dict), items)


def _dict(m: _Machine) -> None:
    items, mapping = m.marked(), dict[Any, Any]()
    m.put_items(mapping, items)
    m.push(mapping)


def _global(m: _Machine) -> None:
    module = m.line()
    m.find(module, m.line())


def _stack_global(m: _Machine) -> None:
    name, module = m.stack.pop(), m.stack.pop()
    m.find(module, name)


def _pop(m: _Machine) -> None:
    if m.stack:
        m.stack.pop()
    else:
        m.marked()


def _proto(m: _Machine) -> None:
    version = m.number(1)
    if version > 5:
        m._bad(f"pickle protocol {version}")


def _text(m: _Machine, width: int) -> None:
    m.push(m.block(width).decode("utf-8", "replace"))


_STOP = ord(".")
_STEPS: Mapping[int, Callable[[_Machine], object]] = {
    0x80: _proto,
    0x95: lambda m: m.take(8),  # FRAME: a hint about reading
    ord("("): _Machine.mark,
    ord("0"): _pop,
    ord("1"): lambda m: m.marked(),
    ord("2"): lambda m: m.push(m.stack[-1]),
    ord("N"): lambda m: m.push(None),
    0x88: lambda m: m.push(True),
    0x89: lambda m: m.push(False),
    ord("J"): lambda m: m.push(m.number(4, signed=True)),
    ord("K"): lambda m: m.push(m.number(1)),
    ord("M"): lambda m: m.push(m.number(2)),
    0x8A: lambda m: m.push(int.from_bytes(m.block(1), "little", signed=True)),
    ord("G"): lambda m: m.push(struct.unpack(">d", m.take(8))[0]),
    ord("X"): lambda m: _text(m, 4),
    0x8C: lambda m: _text(m, 1),
    0x8D: lambda m: _text(m, 8),
    ord("U"): lambda m: m.push(m.block(1)),
    ord("T"): lambda m: m.push(m.block(4)),
    ord("C"): lambda m: m.push(m.block(1)),
    ord("B"): lambda m: m.push(m.block(4)),
    0x8E: lambda m: m.push(m.block(8)),
    0x96: lambda m: m.push(m.block(8)),  # BYTEARRAY8
    ord("]"): lambda m: m.push([]),
    0x8F: lambda m: m.push([]),  # a set, of which only the members matter
    ord("}"): lambda m: m.push({}),
    ord(")"): lambda m: m.push(()),
    ord("t"): lambda m: m.push(tuple(m.marked())),
    ord("l"): lambda m: m.push(m.marked()),
    0x91: lambda m: m.push(m.marked()),  # a frozenset
    ord("d"): _dict,
    0x85: lambda m: m.last(1),
    0x86: lambda m: m.last(2),
    0x87: lambda m: m.last(3),
    ord("a"): _append,
    ord("e"): _appends,
    0x90: _appends,  # ADDITEMS
    ord("s"): _setitem,
    ord("u"): _setitems,
    ord("q"): lambda m: m.memoize(m.number(1)),
    ord("r"): lambda m: m.memoize(m.number(4)),
    0x94: lambda m: m.memoize(len(m.memo)),
    ord("h"): lambda m: _binget(m, 1),
    ord("j"): lambda m: _binget(m, 4),
    ord("c"): _global,
    0x93: _stack_global,
    ord("R"): _Machine.reduce,
    ord("b"): _Machine.build,
    ord("Q"): _Machine.persistent,
}
"""Instruction -> what it does here."""

_OLD = "it was pickled with protocol 0 or 1; dump it again with protocol=4"
_REFUSED: Mapping[int, str] = {
    0x81: "it makes an object of a class; dump plain dicts of tensors",
    0x92: "it makes an object of a class; dump plain dicts of tensors",
    ord("i"): "it makes an object of a class; dump plain dicts of tensors",
    ord("o"): "it makes an object of a class; dump plain dicts of tensors",
    0x82: "it uses the registry of extensions",
    0x83: "it uses the registry of extensions",
    0x84: "it uses the registry of extensions",
    0x97: "its buffers are in another place (out of band)",
    0x98: "its buffers are in another place (out of band)",
    0x8B: "it holds an integer of more than 255 bytes",
    ord("P"): "it refers to an object by a persistent name",
    **dict.fromkeys(map(ord, "ILSVFpg"), _OLD),
}
"""Instructions of the format that no dump of tensors needs."""
