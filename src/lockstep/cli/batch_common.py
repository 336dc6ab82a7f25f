"""Shared by `lockstep generate`, `score` and `select`: short flags, settings from a file, progress."""

from __future__ import annotations

import hashlib
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from lockstep.config.base import Config
from lockstep.config.load import check, merge, read_toml, to_values
from lockstep.config.problems import model_of, unknown_keys
from lockstep.errors import ConfigError
from lockstep.observe.text import echo

AnyConfig = TypeVar("AnyConfig", bound=Config)
STOPPED = {signal.SIGINT: 130, signal.SIGTERM: 143}
"""Exit status after a signal that left rows to be done."""


def spelt_out(argv: Sequence[str], short: Mapping[str, str]) -> list[str]:
    """`--engine vllm` as `--engine.name vllm`. A short flag of a list may be given several times; its values
    are put together, because of a repeated flag the last one would win in silence."""
    expanded: list[str] = []
    lists: dict[str, list[str]] = {}
    collecting: str | None = None
    for word in argv:
        flag, equals, value = word.partition("=")
        if flag.startswith("--"):
            collecting = None
        if flag in short:
            full = short[flag]
            if full.endswith("..."):
                collecting = full.removesuffix("...")
                lists.setdefault(collecting, []).extend([value] if equals else [])
            else:
                expanded.append(full + equals + value)
        elif collecting is not None:
            lists[collecting].append(word)
        else:
            expanded.append(word)
    for full, values in lists.items():
        expanded += [full, *values]
    return expanded


def from_file(source: str | None, model: type[AnyConfig], *, start: Mapping[str, Any]) -> AnyConfig:
    """`start` with a TOML file over it, not checked as a whole yet: flags may still complete it.

    Raises:
        ConfigError: no such file, no TOML, or a wrong setting in a table of it.
    """
    values: dict[str, Any] = {}
    if source is not None:
        path = Path(source)
        if not path.is_file():
            raise ConfigError(f"no such file: {source!r}; settings come from flags and from one TOML file")
        values = read_toml(path)
    problems, known = unknown_keys(values, model)
    if problems:
        raise ConfigError(f"{source}: " + "\n  ".join(problems))
    together = _over(start, known)
    fields = {name: _field(model, name, value, str(source)) for name, value in together.items()}
    return cast(AnyConfig, model.model_construct(**fields))


def completed(base: AnyConfig, overrides: Mapping[str, Any], *, origin: str) -> AnyConfig:
    """`base` with dotted overrides, checked. Raises ConfigError with all problems."""
    return check(merge(to_values(base), overrides), type(base), origin=origin)


def _field(model: type[Config], name: str, value: Any, origin: str) -> Any:
    nested, many = model_of(model.model_fields[name].annotation)
    if nested is not None and not many and isinstance(value, dict):
        assert issubclass(nested, Config)
        return check(value, nested, origin=f"{origin}, [{name}]")
    return value


def _over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(below)
    for name, value in above.items():
        both = isinstance(value, Mapping) and isinstance(result.get(name), Mapping)
        result[name] = _over(result[name], value) if both else value
    return result


def file_digest(path: Path) -> str:
    """BLAKE2b of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


class Rows:
    """A bar in a terminal, a plain line now and then elsewhere, nothing when quiet."""

    EVERY_SECONDS = 5.0

    def __init__(self, what: str, *, quiet: bool) -> None:
        self._what, self._quiet = what, quiet
        self._bar: Any = None
        self._task: Any = None
        self._last = time.monotonic()

    def __enter__(self) -> Rows:
        if sys.stdout.isatty() and not self._quiet:
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress,
                TextColumn,
                TimeElapsedColumn,
                TimeRemainingColumn,
            )

            self._bar = Progress(
                TextColumn(self._what),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
            )
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, done: int, expected: int) -> None:
        """Show that `done` rows of `expected` are done."""
        if self._quiet:
            return
        if self._bar is not None:
            if self._task is None:
                self._task = self._bar.add_task(self._what, total=expected)
            self._bar.update(self._task, completed=done)
            return
        now = time.monotonic()
        if now - self._last >= self.EVERY_SECONDS:
            self._last = now
            echo(f"[{done}/{expected}] rows", flush=True)
