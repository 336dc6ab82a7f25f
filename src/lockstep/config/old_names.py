"""Renamed settings. An old name or value is read as the new one, with one warning, until 0.2.

`RENAMED` is the only list: TOML files, flags, overrides, keyword arguments and the files of earlier runs go
through it before they are checked.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.errors import ConfigError
from lockstep.ranks.environment import LAUNCHER_PID, in_launcher


class SettingWarning(FutureWarning):
    """A setting has an old name or value, or one that new runs refuse."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Renamed:
    """One renamed setting, or one with renamed values."""

    old: str
    """Dotted path."""
    new: str
    """Dotted path; the same as `old` if only values were renamed."""
    values: Mapping[str, str | bool] = field(default_factory=dict)
    """Old value -> new value. Other values stay as they are."""

    def value(self, old: Any) -> Any:
        """Return the new form of a value."""
        return self.values.get(old, old) if isinstance(old, str) else old

    def shown(self, old: Any) -> tuple[str, str]:
        """Return the old and the new spelling of a setting with the value `old`, for messages and docs."""
        if self.value(old) is old:
            return self.old, self.new
        return f"{self.old} = {_toml(old)}", f"{self.new} = {_toml(self.value(old))}"


RENAMED = (
    Renamed(old="sleep", new="offload"),
    Renamed(old="engine.sleep", new="engine.offload"),
    Renamed(old="engine.process", new="engine.process", values={"own": "separate"}),
    Renamed(old="cluster.world_gpus", new="cluster.dedicated_gpus", values={"own": True, "shared": False}),
    Renamed(old="cluster.world_seconds", new="cluster.remote_seconds"),
    Renamed(old="cluster.world_start_seconds", new="cluster.remote_start_seconds"),
    Renamed(old="cluster.world_restarts", new="cluster.remote_restarts"),
    Renamed(old="cluster.standby", new="cluster.warm_spares"),
)
"""Every setting that has had another name or other values."""

_BY_OLD = {each.old: each for each in RENAMED}
_WARNED: set[str] = set()


def current(values: Mapping[str, Any], *, origin: str, section: str = "") -> dict[str, Any]:
    """Return nested settings under their current names.

    Args:
        origin: begins messages: the file, the flags.
        section: dotted path of the table that `values` are the settings of.

    Raises:
        ConfigError: an old and a new name of one setting are both given.
    """
    result: dict[str, Any] = {}
    for key, value in values.items():
        path = f"{section}.{key}".lstrip(".")
        renamed = _BY_OLD.get(path)
        if renamed is None:
            nested = isinstance(value, Mapping) and any(old.startswith(f"{path}.") for old in _BY_OLD)
            result[key] = current(value, origin=origin, section=path) if nested else value
            continue
        name = renamed.new.rpartition(".")[2]
        if name != key and name in values:
            raise _both(renamed, origin)
        _warn(renamed, value, origin)
        result[name] = renamed.value(value)
    return result


def current_overrides(overrides: Mapping[str, Any], *, origin: str) -> dict[str, Any]:
    """Return overrides, dotted path -> value, under their current names.

    Raises:
        ConfigError: as `current`.
    """
    result: dict[str, Any] = {}
    for path, value in overrides.items():
        renamed = _BY_OLD.get(path)
        if renamed is None:
            nested = isinstance(value, Mapping)
            result[path] = current(value, origin=origin, section=path) if nested else value
            continue
        if renamed.new != path and renamed.new in overrides:
            raise _both(renamed, origin)
        _warn(renamed, value, origin)
        result[renamed.new] = renamed.value(value)
    return result


def current_flags(argv: Sequence[str]) -> list[str]:
    """Return the words of a command line with the flags of settings under their current names.

    Raises:
        ConfigError: as `current`.
    """
    given = {_path(word.partition("=")[0]) for word in argv if word.startswith("--")}
    result: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        flag, equals, value = word.partition("=")
        path = _path(flag)
        table, dot, last = path.rpartition(".")
        off = last.startswith("no_") and f"{table}{dot}{last.removeprefix('no_')}" in _BY_OLD
        renamed = _BY_OLD.get(f"{table}{dot}{last.removeprefix('no_')}" if off else path)
        if not flag.startswith("--") or renamed is None:
            result.append(word)
            continue
        if renamed.new != renamed.old and renamed.new in given:
            raise _both(renamed, "command line", flags=True)
        if renamed.values and not equals and words:
            equals, value = "=", words.pop(0)
        _warn(renamed, value, "command line")
        new_table, dot, name = renamed.new.replace("_", "-").rpartition(".")
        flag = f"--{new_table}{dot}{'no-' if off else ''}{name}"
        new = renamed.value(value)
        result.append(f"{flag}={str(new).lower() if isinstance(new, bool) else new}" if equals else flag)
    return result


def _path(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _both(renamed: Renamed, origin: str, *, flags: bool = False) -> ConfigError:
    names = [f"--{name.replace('_', '-')}" if flags else name for name in (renamed.old, renamed.new)]
    return ConfigError(
        f"duplicate: {origin}: {names[0]} is the old name of {names[1]}, but both are set; leave {names[0]} "
        "out",
        setting=renamed.new,
    )


def _warn(renamed: Renamed, value: Any, origin: str) -> None:
    old, new = renamed.shown(value)
    if old == new:
        return
    warn_once(f"{origin}: {old} is now {new}; the old spelling works until 0.2")


def warn_once(text: str) -> None:
    """Warn about a setting, once in a process, and in one process of a run: the launcher, or else rank 0."""
    if in_launcher() and (LAUNCHER_PID in os.environ or os.environ["RANK"] != "0"):
        return
    if text not in _WARNED:
        _WARNED.add(text)
        warnings.warn(text, SettingWarning, stacklevel=2)


def _toml(value: str | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)
