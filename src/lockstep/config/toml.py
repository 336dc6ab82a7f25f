"""A small TOML writer: the standard library only reads."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping
from typing import Any

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


class TomlError(ValueError):
    """A value that TOML has no way to write."""


def to_toml(values: Mapping[str, Any], *, inline: Collection[str] = ()) -> str:
    """TOML text of nested mappings, lists, strings, numbers and booleans.

    Args:
        inline: dotted paths of mappings to write as `{key = value}` instead of as a `[section]`.

    Raises:
        TomlError: for None and for types that TOML does not have, naming the dotted path.
    """
    lines: list[str] = []
    _write_table(values, path=(), inline=inline, lines=lines)
    return "\n".join(lines).strip() + "\n"


def toml_value(value: Any, *, path: str = "value") -> str:
    """One value on one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else str(value)
    if isinstance(value, str):
        # JSON's escapes are TOML's, except that TOML also forbids a bare DEL.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        pairs = [f"{_key(k)} = {toml_value(v, path=f'{path}.{k}')}" for k, v in value.items()]
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(toml_value(v, path=f"{path}[{i}]") for i, v in enumerate(value)) + "]"
    raise TomlError(f"{path} = {value!r}: TOML cannot hold a {type(value).__name__}; leave the key out")


def _write_table(
    table: Mapping[str, Any], *, path: tuple[str, ...], inline: Collection[str], lines: list[str]
) -> None:
    later = []
    for key, value in table.items():
        dotted = ".".join((*path, key))
        if isinstance(value, Mapping) and dotted not in inline:
            later.append((key, value))
        else:
            lines.append(f"{_key(key)} = {toml_value(value, path=dotted)}")
    for key, value in later:
        lines += ["", "[" + ".".join(_key(part) for part in (*path, key)) + "]"]
        _write_table(value, path=(*path, key), inline=inline, lines=lines)


def _key(key: Any) -> str:
    if not isinstance(key, str):
        raise TomlError(f"key {key!r}: TOML keys are strings")
    return key if _BARE_KEY.fullmatch(key) else toml_value(key)
