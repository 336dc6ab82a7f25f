"""Shared by `lockstep generate` and `score`: flags, settings from a file, the command around the work."""

from __future__ import annotations

import hashlib
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

import tyro

from lockstep.cli.arguments import leading_word
from lockstep.cli.flags import parse_flags
from lockstep.config.base import Config
from lockstep.config.load import check, dump_toml, merge, read_toml, to_values
from lockstep.config.problems import model_of, refusal, unknown_keys
from lockstep.errors import ConfigError
from lockstep.loop.interrupt import Interrupt
from lockstep.observe.files import write_json
from lockstep.observe.text import echo

AnyConfig = TypeVar("AnyConfig", bound=Config)
AnyCommand = TypeVar("AnyCommand", bound="BatchFlags")
STOPPED = {signal.SIGINT: 130, signal.SIGTERM: 143}
"""Exit status after a signal that left rows to be done."""


@dataclass(frozen=True, kw_only=True)
class BatchFlags:
    """The flags of both commands that are not settings."""

    out: Annotated[
        Path | None, tyro.conf.arg(help="Output file for the rows, .jsonl or .parquet.", metavar="FILE")
    ]
    overwrite: Annotated[bool, tyro.conf.arg(help="Start over, even if the file has rows.")]
    json: Annotated[Path | None, tyro.conf.arg(help="Write the result to this file.", metavar="FILE")]
    quiet: Annotated[bool, tyro.conf.arg(help="Show no progress.")]
    print_config: Annotated[bool, tyro.conf.arg(help="Print the resolved settings and do nothing.")]


def run_command(
    name: str,
    command: AnyCommand,
    config: Config,
    work: Callable[[AnyCommand, Interrupt], dict[str, Any]],
    verdict: Callable[[Mapping[str, Any]], str],
) -> int:
    """Do the work, or print the config; 0 when all rows are there, 130 or 143 when a signal came before."""
    if command.print_config:
        echo(dump_toml(config), end="")
        return 0
    with Interrupt() as interrupt:
        try:
            result = work(command, interrupt)
        except KeyboardInterrupt:
            if interrupt.signal is None:
                raise
            echo(f"{name}: interrupted; the same command goes on with {command.out}")
            return STOPPED[interrupt.signal]
    if command.json is not None:
        write_json(command.json, result)
    echo(verdict(result))
    if result["outcome"] == "interrupted":
        assert interrupt.signal is not None
        return STOPPED[interrupt.signal]
    return 0


def parse_command(
    prog: str,
    argv: Sequence[str],
    model: type[AnyConfig],
    *,
    flags: type[BatchFlags],
    start: Mapping[str, Any],
    short: Mapping[str, str],
) -> tuple[AnyConfig, dict[str, Any]]:
    """The checked config, on top of `start`, and the values of `flags`.

    Raises:
        ConfigError: with every setting that is wrong.
    """
    source, words = leading_word(argv)
    base = _from_file(source, model, start=start)
    values, overrides = parse_flags(
        base,
        ["--help" if word == "--help-all" else word for word in spelt_out(words, short)],
        general=flags,
        prog=prog,
        description=model.__doc__ or "",
    )
    return check(merge(to_values(base), overrides), model, origin=prog), values


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


def _from_file(source: str | None, model: type[AnyConfig], *, start: Mapping[str, Any]) -> AnyConfig:
    """`start` with a TOML file over it, not checked as a whole yet: flags may still complete it.

    Raises:
        ConfigError: no such file, no TOML, or a wrong setting in a table of it.
    """
    values: dict[str, Any] = {}
    if source is not None:
        path = Path(source)
        if not path.is_file():
            raise ConfigError(f"no-such-file: no such file: {source!r}; name one TOML file, or use flags")
        values = read_toml(path)
    problems, known = unknown_keys(values, model)
    if problems:
        raise refusal(f"{source}: ", problems)
    together = _over(start, known)
    fields = {name: _field(model, name, value, str(source)) for name, value in together.items()}
    return cast(AnyConfig, model.model_construct(**fields))


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


def check_other_file(out: Path, data: Path) -> None:
    """Raises ConfigError: --out would replace what --data reads."""
    if out.resolve() == data.resolve():
        raise ConfigError(f"contradiction: --out {out} is the same file as --data; choose another file")


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
