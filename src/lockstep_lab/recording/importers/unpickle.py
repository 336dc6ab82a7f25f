"""Reads what torch.save and pickle wrote without executing any of it.

A pickle is a program, so none is handed to pickle or torch.load. pickletools reads its instructions, which
are interpreted here over plain values: a global is a symbol of a short list, never an imported object; "call"
picks a branch of `pickle_stubs.call`. What is built are containers, numbers, text and tensors over copies of
the file's own bytes.

Limits on steps, nesting and bytes hold for a file and everything nested in it, so that time and memory are
bounded by its size.
"""

from __future__ import annotations

import io
import pickletools
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from lockstep.errors import RecordingError
from lockstep.observe.files import read_plain
from lockstep_lab.recording.importers.pickle_stubs import (
    Budget,
    LazyArray,
    LazyDtype,
    LazyTensor,
    Opaque,
    Storage,
    StorageKind,
    Symbol,
    call,
    damaged,
    symbol,
)

MAX_FILE_BYTES = 8 * 2**30
MAX_NESTING = 24
_MAX_ARCHIVES = 3
"""torch.save inside pickle inside ...: pickled tensors are one level."""
# MAGIC_NUMBER and PROTOCOL_VERSION of torch/serialization.py.
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_PROTOCOL = 1001
_ZIP = b"PK\x03\x04"

_DAMAGE = (IndexError, KeyError, ValueError, TypeError, OverflowError, AttributeError)
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
    advice = "dump the inputs in several files"
    data = read_plain(path, RecordingError, limit=MAX_FILE_BYTES, advice=advice)
    budget = Budget.of(len(data), where)
    value, kind = _load(data, where, budget, level=0)
    try:
        return Dump(_plain(value, budget, depth=0), kind)
    except RecordingError:
        raise
    except (*_DAMAGE, RuntimeError) as error:
        raise damaged(where, f"a tensor cannot be rebuilt ({error})") from error


def _load(data: bytes, where: str, budget: Budget, *, level: int) -> tuple[Any, str]:
    if level > _MAX_ARCHIVES:
        raise RecordingError(
            f"too-deep: {where}: archives are nested more than {_MAX_ARCHIVES} deep; it is not a dump"
        )
    if data[:4] == _ZIP:
        return _load_zip(data, where, budget, level=level), "torch"
    first = _Machine(io.BytesIO(data), where, budget, level=level)
    value = first.run()
    if type(value) is int and value == _LEGACY_MAGIC:
        return _load_legacy(first.file, where, budget, level=level), "torch"
    return value, "pickle"


# --- archives -----------------------------------------------------------------------------------------------


def _load_zip(data: bytes, where: str, budget: Budget, *, level: int) -> Any:
    entries = _zip_entries(data, where)
    programs = [name for name in entries if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(programs) != 1:
        what = f"a zip file with {len(programs)} entries data.pkl; torch.save writes one"
        raise damaged(where, what)
    root = programs[0].removesuffix("data.pkl")
    if entries.get(f"{root}byteorder", b"little") != b"little":
        raise RecordingError(f"unsupported-version: {where}: big-endian files are not supported")
    known: dict[str, Storage] = {}

    def storage(kind: StorageKind, key: str, count: int) -> Storage:
        if key not in known:
            raw = entries.get(f"{root}data/{key}")
            if raw is None:
                raise damaged(where, f"the archive lacks the tensor data {key[:60]!r}")
            known[key] = Storage(kind.dtype, count)
            known[key].fill(raw, budget)
        return known[key].viewed(kind.dtype, count)

    return _Machine(io.BytesIO(entries[programs[0]]), where, budget, level=level, storage=storage).run()


def _zip_entries(data: bytes, where: str) -> dict[str, bytes]:
    """Every entry's content, checked against its CRC; nothing is ever decompressed."""
    members: dict[str, bytes] = {}
    left = len(data)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for info in archive.infolist():
                if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
                    raise RecordingError(
                        f"wrong-kind-of-file: {where}: entry {info.filename[:60]!r} is compressed; "
                        "torch.save does not compress, so it did not write this file"
                    )
                left -= info.file_size
                if left < 0:
                    raise RecordingError(
                        f"too-large: {where}: its entries claim more bytes than the file has"
                    )
                if info.filename in members:
                    raise RecordingError(f"duplicate: {where}: entry {info.filename[:60]!r} appears twice")
                members[info.filename] = archive.read(info)
    except RecordingError:
        raise  # a ValueError, but no damage
    except _ZIP_DAMAGE as error:
        raise damaged(where, f"{error}; copy the file again") from error
    return members


def _load_legacy(file: io.BytesIO, where: str, budget: Budget, *, level: int) -> Any:
    """torch.save before zip files, and what pickle makes of a tensor: pickles in a row, then the bytes."""
    waiting: dict[str, Storage] = {}

    def storage(kind: StorageKind, key: str, count: int) -> Storage:
        if key not in waiting:
            waiting[key] = Storage(kind.dtype, count)
        return waiting[key].viewed(kind.dtype, count)

    protocol, system, value, keys = (
        _Machine(file, where, budget, level=level, storage=storage).run() for _ in range(4)
    )
    if protocol != _LEGACY_PROTOCOL or type(system) is not dict or system.get("little_endian") is not True:
        raise RecordingError(
            f"unsupported-version: {where} was written by an unknown version of torch.save, or on a "
            "big-endian machine"
        )
    if type(keys) is not list or any(type(key) is not str for key in keys) or set(keys) != set(waiting):
        raise damaged(where, "its list of tensor data does not match its tensors")
    for key in keys:
        count = int.from_bytes(file.read(8), "little", signed=True)
        raw = file.read(waiting[key].size_bytes)
        if count != waiting[key].count or len(raw) != waiting[key].size_bytes:
            raise damaged(where, f"the tensor data {key[:60]!r} is cut short")
        waiting[key].fill(raw, budget)
    return value


# --- values -------------------------------------------------------------------------------------------------


_ATOMS = frozenset((int, float, bool, str, bytes, type(None)))


def _plain(value: Any, budget: Budget, *, depth: int) -> Any:
    """Containers without symbols, tensors built."""
    if type(value) in _ATOMS:
        return value
    if depth > MAX_NESTING:
        raise RecordingError(f"too-deep: {budget.where}: containers are nested more than {MAX_NESTING} deep")
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
    """The pickle that `file` is at, up to its STOP, behind which the file is after `run`."""

    def __init__(
        self,
        file: io.BytesIO,
        where: str,
        budget: Budget,
        *,
        level: int,
        storage: Callable[[StorageKind, str, int], Storage] | None = None,
    ) -> None:
        self.file, self.where, self.budget, self.level, self.storage = file, where, budget, level, storage
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        name = "nothing"
        try:
            for opcode, argument, _ in pickletools.genops(self.file):
                self.budget.step()
                name = opcode.name
                # A table of what is known and not Python's Unpickler with a find_class: that one still runs
                # instructions that call and set state, and has no budget.
                if name in _STEPS:
                    _STEPS[name](self, argument)
                elif name != "STOP":
                    self._refuse(name)
            (value,) = self.stack
            if self.marks:
                self._bad("an open mark")
            return value
        except RecordingError:
            raise
        except _DAMAGE as error:
            cause = f"{type(error).__name__}: {str(error)[:100]}"
            what = (
                f"the pickle is not valid: {name} before byte {self.file.tell()} ({cause}); copy the file "
                "again"
            )
            raise damaged(self.where, what) from error

    def _bad(self, what: str) -> NoReturn:
        raise damaged(self.where, f"the pickle is not valid: {what} before byte {self.file.tell()}")

    def _refuse(self, name: str) -> NoReturn:
        what = _REFUSED.get(name, _OLD)
        raise RecordingError(
            f"forbidden-content: {self.where}: {what} (this loader does not support {name}, before byte "
            f"{self.file.tell()})"
        )

    # stack

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop(self) -> None:
        if self.stack:
            self.stack.pop()
        else:
            self.marked()

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

    def extend(self, items: list[Any]) -> None:
        self.top(list).extend(items)

    def put_items(self, items: list[Any]) -> None:
        target = self.top(dict)
        if len(items) % 2:
            self._bad("a key without a value")
        for key, value in zip(items[::2], items[1::2], strict=True):
            plain = key is None or type(key) in (str, bytes, bool) or (type(key) is int and abs(key) < 2**31)
            if not plain:  # hashing anything else could take unbounded time
                raise RecordingError(
                    f"wrong-type: {self.where}: a dict has a {type(key).__name__} as a key; dump dicts with "
                    "text keys"
                )
            target[key] = value

    def new_dict(self) -> None:
        items = self.marked()
        self.push({})
        self.put_items(items)

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
                self._bad("torch.storage._load_from_bytes without bytes")
            self.budget.charge(len(raw))
            value, _ = _load(raw, self.where, self.budget, level=self.level + 1)
            if not isinstance(value, Storage):
                self._bad("torch.storage._load_from_bytes without a storage")
            self.push(value)
            return
        self.push(call(function, arguments, self.budget))

    def build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if not isinstance(target, LazyArray | LazyDtype):
            raise RecordingError(
                f"forbidden-content: {self.where}: it sets the state of a {type(target).__name__}, which "
                "this loader supports only for numpy arrays; dump plain dicts of tensors"
            )
        target.set_state(state)

    def persistent(self) -> None:
        identity = self.stack.pop()
        if self.storage is None or type(identity) is not tuple or len(identity) not in (5, 6):
            self._bad("a persistent id that is not tensor data")
        word, kind, key, _, count, *view = identity
        if word != "storage" or not isinstance(kind, StorageKind) or type(key) is not str:
            self._bad("a persistent id that is not tensor data")
        if type(count) is not int or count < 0 or view not in ([], [None]):
            self._bad("tensor data without a size, or a view of other data")
        self.push(self.storage(kind, key, count))


_STEPS: Mapping[str, Callable[[_Machine, Any], object]] = {
    "PROTO": lambda m, version: version <= 5 or m._bad(f"pickle protocol {version}"),
    "FRAME": lambda m, _: None,  # a hint about reading
    "NONE": lambda m, _: m.push(None),
    "NEWTRUE": lambda m, _: m.push(True),
    "NEWFALSE": lambda m, _: m.push(False),
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"), _Machine.push),
    **dict.fromkeys(("SHORT_BINBYTES", "BINBYTES", "BINBYTES8"), _Machine.push),
    **dict.fromkeys(
        ("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
        # Halves of surrogate pairs are nothing that could be written anywhere.
        lambda m, text: m.push(text.encode("utf-8", "replace").decode("utf-8")),
    ),
    **dict.fromkeys(("SHORT_BINSTRING", "BINSTRING"), lambda m, text: m.push(text.encode("latin-1"))),
    "BYTEARRAY8": lambda m, raw: m.push(bytes(raw)),
    "MARK": lambda m, _: m.mark(),
    "POP": lambda m, _: m.pop(),
    "POP_MARK": lambda m, _: m.marked(),
    "DUP": lambda m, _: m.push(m.stack[-1]),
    "EMPTY_LIST": lambda m, _: m.push([]),
    "EMPTY_SET": lambda m, _: m.push([]),  # of which only the members matter
    "EMPTY_DICT": lambda m, _: m.push({}),
    "EMPTY_TUPLE": lambda m, _: m.push(()),
    "TUPLE": lambda m, _: m.push(tuple(m.marked())),
    "LIST": lambda m, _: m.push(m.marked()),
    "FROZENSET": lambda m, _: m.push(m.marked()),
    "DICT": lambda m, _: m.new_dict(),
    "TUPLE1": lambda m, _: m.last(1),
    "TUPLE2": lambda m, _: m.last(2),
    "TUPLE3": lambda m, _: m.last(3),
    "APPEND": lambda m, _: m.extend([m.stack.pop()]),
    "APPENDS": lambda m, _: m.extend(m.marked()),
    "ADDITEMS": lambda m, _: m.extend(m.marked()),
    "SETITEM": lambda m, _: m.put_items([m.stack.pop(), m.stack.pop()][::-1]),
    "SETITEMS": lambda m, _: m.put_items(m.marked()),
    "BINPUT": lambda m, number: m.memoize(number),
    "LONG_BINPUT": lambda m, number: m.memoize(number),
    "MEMOIZE": lambda m, _: m.memoize(len(m.memo)),
    "BINGET": lambda m, number: m.push(m.memo[number]),
    "LONG_BINGET": lambda m, number: m.push(m.memo[number]),
    "GLOBAL": lambda m, names: m.find(*names.split(" ", 1)),
    "STACK_GLOBAL": lambda m, _: m.find(*reversed([m.stack.pop(), m.stack.pop()])),
    "REDUCE": lambda m, _: m.reduce(),
    "BUILD": lambda m, _: m.build(),
    "BINPERSID": lambda m, _: m.persistent(),
}
"""Instruction -> what it does here with its argument."""

_OLD = "it was pickled with protocol 0 or 1; dump it again with protocol=4"
_REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        ("NEWOBJ", "NEWOBJ_EX", "INST", "OBJ"),
        "it creates an instance of a class; dump plain dicts of tensors",
    ),
    **dict.fromkeys(("EXT1", "EXT2", "EXT4"), "it uses the extension registry"),
    **dict.fromkeys(("NEXT_BUFFER", "READONLY_BUFFER"), "its buffers are stored elsewhere (out of band)"),
    "LONG4": "it contains an integer of more than 255 bytes",
    "PERSID": "it refers to an object by a persistent name",
}
"""Instructions of the format that no dump of tensors needs; all others are of protocol 0."""
