"""The globals that a dump may name, and what stands for them: `unpickle` imports and calls nothing.

A global is looked up in a table by its text. Calling one picks a branch of `call`, which checks every
argument and builds a value of this module; tensors are built at the end, over copies of the file's bytes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.errors import RecordingError
from lockstep.observe.tensor_file import DTYPES

MAX_STEPS = 4_000_000
"""Instructions and values of one file; they take some hundred bytes each at most."""
_SPARE_BYTES = 64 * 2**20
_MAX_DIMS = 16


def damaged(where: str, what: str) -> RecordingError:
    """The error of a file that was cut short or changed on its way."""
    return RecordingError(f"damaged-file: {where}: the file is damaged: {what}")


@dataclass(kw_only=True, slots=True)
class Budget:
    """What a file, with all that is nested in it, may still cost."""

    where: str
    """The file's name, for errors."""
    steps: int
    bytes: int

    @classmethod
    def of(cls, size: int, where: str) -> Budget:
        """For a file of `size` bytes: each byte may be copied a few times (archives in archives, views)."""
        return cls(where=where, steps=MAX_STEPS, bytes=6 * size + _SPARE_BYTES)

    def step(self, count: int = 1) -> None:
        """Raises RecordingError after MAX_STEPS."""
        self.steps -= count
        if self.steps < 0:
            raise RecordingError(
                f"too-large: {self.where}: more than {MAX_STEPS:,} values; dump tensors instead of lists, "
                "or fewer inputs per file"
            )

    def charge(self, size: int) -> None:
        """Before `size` bytes are allocated. Raises RecordingError: far more than the file has."""
        self.bytes -= size
        if self.bytes < 0:
            raise RecordingError(
                f"too-large: {self.where}: its tensors claim far more bytes than the file has (expanded "
                "views, or a crafted file); dump them with .contiguous()"
            )


@dataclass(frozen=True, slots=True)
class Symbol:
    """A function or class that is known by name only."""

    name: str


@dataclass(frozen=True, slots=True)
class StorageKind:
    """torch.FloatStorage and so on."""

    dtype: torch.dtype
    """uint8 for untyped storage."""


@dataclass(frozen=True, slots=True)
class Opaque:
    """A value of an allowed kind that no tensor is made of, such as a numpy array of objects."""

    kind: str


# --- the table ----------------------------------------------------------------------------------------------

_SHORT = ("half", "float", "double", "short", "int", "long")
_DTYPES: dict[str, torch.dtype] = {
    **{str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values() if not dtype.is_complex},
    **{name: getattr(torch, name) for name in _SHORT},
}
_STORAGES: dict[str, torch.dtype] = {
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
_GLOBALS: dict[tuple[str, str], Any] = {
    **{("torch", name): dtype for name, dtype in _DTYPES.items()},
    **{
        (module, name): StorageKind(dtype)
        for module in ("torch", "torch.cuda", "torch.storage")
        for name, dtype in {**_STORAGES, "UntypedStorage": torch.uint8}.items()
    },
    **{
        (module, name): Symbol(name)
        for module, names in (
            (
                "torch._utils",
                "_rebuild_tensor _rebuild_tensor_v2 _rebuild_tensor_v3 _rebuild_parameter",
            ),
            ("torch.storage", "_load_from_bytes"),
            ("torch", "Size device"),
            ("numpy", "ndarray dtype"),
            ("numpy.core.multiarray", "_reconstruct scalar"),
            ("numpy._core.multiarray", "_reconstruct scalar"),
            ("numpy.core.numeric", "_frombuffer"),
            ("numpy._core.numeric", "_frombuffer"),
            ("collections", "OrderedDict"),
            ("_codecs", "encode"),
            ("builtins", "bytearray set"),
            ("__builtin__", "bytearray set"),
        )
        for name in names.split()
    },
}
"""(module, name) -> what stands for it. Everything else is refused."""


def symbol(module: str, name: str, where: str) -> Any:
    """Look up what stands for a global.

    Raises:
        RecordingError: it is not on the list; names it.
    """
    factory = _GLOBALS.get((module, name))
    if factory is None:
        requested = f"{module}.{name}"[:200]
        raise RecordingError(
            f"forbidden-content: {where}: it requests {requested!r}, but a dump may request only what "
            "rebuilds tensors, numpy arrays and plain containers; nothing was executed. Dump plain values "
            "instead: torch.save({'input_ids': ..., 'attention_mask': ...}, path)"
        )
    return factory


# --- tensors ------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Storage:
    """Bytes of a tensor; they may arrive after the tensor was named."""

    dtype: torch.dtype
    count: int
    raw: list[bytearray] = field(default_factory=list)
    """Empty until filled; shared with views of another dtype."""

    @property
    def size_bytes(self) -> int:
        return self.count * self.dtype.itemsize

    def fill(self, data: bytes, budget: Budget) -> None:
        """Raises RecordingError: not the declared size."""
        if len(data) != self.size_bytes:
            what = f"{len(data)} bytes of tensor data where {self.count} of {self.dtype} are declared"
            raise damaged(budget.where, what)
        budget.charge(len(data))
        self.raw.append(bytearray(data))

    def viewed(self, dtype: torch.dtype, count: int) -> Storage:
        """The same bytes for another tensor. Raises ValueError: of another size."""
        if count * dtype.itemsize != self.size_bytes:
            raise ValueError("tensor data with two sizes")
        return Storage(dtype, count, self.raw)


@dataclass(slots=True)
class LazyTensor:
    """A tensor that is built when all bytes are there."""

    storage: Storage
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    negated: bool = False
    """torch's negative bit: the values are those of the bytes times -1."""
    built: Tensor | None = None

    def build(self, budget: Budget) -> Tensor:
        """Contiguous, on the CPU. Raises RecordingError: it reaches out of its storage."""
        if self.built is not None:
            return self.built
        (raw,) = self.storage.raw
        item, elements = self.dtype.itemsize, prod(self.size)
        reach = self.offset + sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True)) + 1
        if elements and reach > len(raw) // item:
            shape = f"{list(self.size)[:8]} with strides {list(self.stride)[:8]}"
            raise damaged(budget.where, f"a tensor {shape} reaches beyond its {len(raw)} bytes")
        budget.charge(elements * item)
        if not elements:
            self.built = torch.empty(self.size, dtype=self.dtype)
            return self.built
        # A bool of a crafted file may hold a byte other than 0 and 1, for which torch defines nothing.
        kind = torch.uint8 if self.dtype == torch.bool else self.dtype
        flat = torch.frombuffer(raw, dtype=kind, count=len(raw) // item)
        values = flat.as_strided(self.size, self.stride, self.offset).clone(
            memory_format=torch.contiguous_format
        )
        self.built = values != 0 if self.dtype == torch.bool else values.neg_() if self.negated else values
        return self.built


_NUMPY_KINDS = re.compile(r"(b1|[iu][1248]|f[248])")


@dataclass(slots=True)
class LazyDtype:
    """A numpy dtype by its text."""

    code: str
    order: str = "<"

    def set_state(self, state: Any) -> None:
        """State of numpy.dtype.__reduce__: (version, byte order, ...)."""
        if type(state) is not tuple or len(state) < 2 or state[1] not in ("<", ">", "=", "|"):
            raise ValueError("a numpy dtype with an unknown state")
        self.order = state[1]

    @property
    def dtype(self) -> np.dtype[Any] | None:
        """None: of objects, text or structures, which no tensor is made of."""
        if not _NUMPY_KINDS.fullmatch(self.code):
            return None
        return np.dtype(f"{'>' if self.order == '>' else '<'}{self.code}")


@dataclass(slots=True)
class LazyArray:
    """A numpy array, or scalar, as a tensor."""

    kind: LazyDtype | None = None
    shape: tuple[int, ...] = ()
    raw: bytes = b""
    fortran: bool = False
    built: Any = None

    def set_state(self, state: Any) -> None:
        """State of numpy.ndarray.__reduce__: (version, shape, dtype, is_fortran, bytes or list)."""
        _, shape, kind, fortran, raw = state
        if not isinstance(kind, LazyDtype):
            raise TypeError("a numpy array without a dtype")
        self.kind, self.shape, self.fortran = kind, _sizes(shape), bool(fortran)
        self.raw = raw if type(raw) is bytes else b""

    def build(self, budget: Budget) -> Any:
        """A tensor; a Python number of a numpy scalar; Opaque. Raises RecordingError: bytes do not fit."""
        if self.built is not None:
            return self.built
        dtype = None if self.kind is None else self.kind.dtype
        if dtype is None:
            self.built = Opaque("numpy array of objects or text")
            return self.built
        size = prod(self.shape) * dtype.itemsize
        if size != len(self.raw):
            what = f"a numpy array {list(self.shape)[:8]} of {dtype} has {len(self.raw)} bytes"
            raise damaged(budget.where, what)
        budget.charge(2 * size)
        plain = np.frombuffer(self.raw, np.uint8 if dtype.kind == "b" else dtype)
        plain = plain != 0 if dtype.kind == "b" else plain.astype(dtype.newbyteorder("="))
        shaped = plain.reshape(self.shape, order="F" if self.fortran else "C")
        self.built = torch.from_numpy(np.ascontiguousarray(shaped).reshape(self.shape))
        return self.built


def _sizes(value: Any) -> tuple[int, ...]:
    if type(value) not in (tuple, list) or len(value) > _MAX_DIMS:
        raise ValueError("a shape that is not a short tuple")
    for number in value:
        if type(number) is not int or not 0 <= number < 2**40:
            raise ValueError("a shape with entries that are not sizes")
    return tuple(value)


# --- calls --------------------------------------------------------------------------------------------------


def call(function: Symbol, arguments: tuple[Any, ...], budget: Budget) -> Any:
    """What `function(*arguments)` stands for. Raises ValueError, TypeError: wrong arguments."""
    name = function.name
    if name.startswith("_rebuild_"):
        return _tensor(name, arguments)
    if name == "OrderedDict":
        return _ordered(arguments, budget)
    if name == "encode":
        text, encoding = arguments
        if type(text) is not str or encoding not in ("latin1", "latin-1"):
            raise ValueError("_codecs.encode of something that is not pickled bytes")
        budget.charge(len(text))
        return text.encode("latin1")
    if name == "bytearray":
        if arguments and type(arguments[0]) is bytes:
            return arguments[0]
        return b""
    if name == "set":
        members = list(arguments[0]) if arguments and type(arguments[0]) in (list, tuple) else []
        budget.charge(8 * len(members))
        return members
    if name == "Size":
        return _sizes(arguments[0])
    if name == "device":
        return Opaque("torch.device")
    return _numpy(name, arguments)


def _ordered(arguments: tuple[Any, ...], budget: Budget) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for pair in arguments[0] if arguments else ():
        budget.step()
        key, value = pair
        if type(key) is not str:
            raise TypeError("an OrderedDict with keys that are not text")
        entries[key] = value
    return entries


def _tensor(name: str, arguments: tuple[Any, ...]) -> LazyTensor:
    if name == "_rebuild_parameter":
        if not isinstance(arguments[0], LazyTensor):
            raise TypeError("a Parameter without a tensor")
        return arguments[0]
    storage, offset, size, stride = arguments[:4]
    if not isinstance(storage, Storage):
        raise TypeError("a tensor without storage")
    dtype = arguments[6] if name == "_rebuild_tensor_v3" else storage.dtype
    if not isinstance(dtype, torch.dtype):
        raise TypeError("a tensor without a dtype")
    size, stride, (offset,) = _sizes(size), _sizes(stride), _sizes((offset,))
    if len(size) != len(stride):
        raise ValueError("a tensor with more sizes than strides")
    lazy = _lazy_bits(arguments[_METADATA[name]] if len(arguments) > _METADATA[name] else None)
    return LazyTensor(storage, dtype, offset, size, stride, negated="neg" in lazy)


_METADATA = {"_rebuild_tensor": 4, "_rebuild_tensor_v2": 6, "_rebuild_tensor_v3": 7}
"""Which argument says what torch still has to do to the values."""


def _lazy_bits(metadata: Any) -> set[str]:
    """The names of the bits that are set: "neg", or "conj", which changes no real number.

    Raises:
        ValueError: it says something else about the values, which would be lost.
    """
    if metadata is None:
        return set()
    if type(metadata) is not dict or any(type(value) is not bool for value in metadata.values()):
        raise ValueError("a tensor whose metadata is not a dict of bits")
    unknown = sorted(str(name)[:40] for name in metadata if name not in ("neg", "conj"))
    if unknown:
        raise ValueError(f"a tensor with the unknown bit {unknown[0]!r}; dump it with .clone()")
    return {name for name, value in metadata.items() if value}


def _numpy(name: str, arguments: tuple[Any, ...]) -> Any:
    if name == "dtype":
        if type(arguments[0]) is not str:
            raise TypeError("a numpy dtype that is not text")
        return LazyDtype(arguments[0].lstrip("<>=|"), ">" if arguments[0].startswith(">") else "<")
    if name == "_reconstruct":
        return LazyArray()
    if name == "scalar":
        kind, raw = arguments
        return _array(kind, (), raw)
    if name == "_frombuffer":
        raw, kind, shape, order = arguments
        array = _array(kind, _sizes(shape), raw)
        array.fortran = order == "F"
        return array
    raise TypeError(f"a call of numpy.{name}")


def _array(kind: Any, shape: tuple[int, ...], raw: Any) -> LazyArray:
    if not isinstance(kind, LazyDtype):
        raise TypeError("numpy data without a dtype")
    return LazyArray(kind, shape, raw if type(raw) is bytes else b"")
