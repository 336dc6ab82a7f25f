"""Lazy tables of components: a name maps to "module:Class", imported on first use."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from lockstep.errors import ConfigError, unknown_name


class Registry(Mapping[str, str]):
    """An explicit, closed table of one kind of component.

    Third parties extend Lockstep by writing `module:Class` where a name is expected.

    Raises:
        ConfigError: from `load`, when the name is neither in the table nor of the form `module:attribute`,
            or when what it names cannot be imported.
    """

    def __init__(self, kind: str, table: Mapping[str, str]) -> None:
        self.kind = kind
        self._table = dict(table)

    def __getitem__(self, name: str) -> str:
        return self._table[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)

    def load(self, name: str) -> Any:
        """Import and return the object behind `name`."""
        target = self._table.get(name, name)
        if ":" not in target:
            raise ConfigError(unknown_name(self.kind, name, self._table), code="unknown-name")
        return load_object(target, what=f"{self.kind} {name!r}")


def require_members(value: Any, names: Iterable[str], *, what: str) -> None:
    """Raise ConfigError unless `value`, a class or an instance, has every attribute in `names`."""
    missing = [name for name in names if not hasattr(value, name)]
    if missing:
        raise ConfigError(f"wrong-part: {what} lacks {', '.join(missing)}; see docs/how-to/extend.md")


def require_call(value: Any, *given: str, what: str, named: Sequence[str] = ()) -> None:
    """Check, before it is called, that a part of the user's takes the arguments that it will be called with.

    Args:
        given: names, for the message, of the arguments by position.
        named: keyword arguments.

    Raises:
        ConfigError: it is no function or class, or its signature does not take them.
    """
    if not callable(value):
        raise ConfigError(
            f"wrong-part: {what} is a {type(value).__name__}, not a function or a class; name one"
        )
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):  # of a callable that is written in C; only a call can say
        return
    try:
        signature.bind(*given, **dict.fromkeys(named))
    except TypeError as error:
        call = ", ".join([*given, *(f"{name}=..." for name in named)])
        raise ConfigError(
            f"wrong-part: {what} is called with ({call}), which its signature {signature} does not accept: "
            f"{error}; see docs/how-to/extend.md"
        ) from error


def load_object(target: str, *, what: str) -> Any:
    """Import `module:attribute`, from the Python path or the working directory.

    Raises:
        ConfigError: there is no such module, it cannot be imported, or it has no such attribute.
    """
    module_name, _, attribute = target.partition(":")
    if (folder := os.getcwd()) not in sys.path:
        sys.path.append(folder)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"missing-package: {what} needs the module {error.name!r}, which is not installed or not on the "
            f"Python path (looked for {target!r})"
        ) from error
    except Exception as error:  # whatever a module of the user's raises while it is imported
        raise ConfigError(
            f"wrong-part: {what}: importing {module_name!r} raised {type(error).__name__}: {error}; correct "
            "the module"
        ) from error
    try:
        value: Any = module
        for part in attribute.split("."):
            value = getattr(value, part)
    except AttributeError as error:
        raise ConfigError(
            f"wrong-part: {what}: module {module_name!r} has no attribute {attribute!r}"
        ) from error
    return value
