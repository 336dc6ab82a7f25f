"""A run's settings as --print-config shows them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lockstep.config.base import Config
from lockstep.config.load import RUN_KINDS, dump_toml, to_values, toml_value
from lockstep.config.run_config import RunConfig


def shown_config(run: RunConfig, *, short: bool = False) -> str:
    """Return the TOML of a run, with a comment for each option that the name of its algorithm decides. The
    text is a file that gives the same run.

    Args:
        short: only what differs from the defaults.
    """
    text = dump_toml(run, only=different(run) if short else None)
    decided = list(_decided(to_values(run.algorithm), to_values(run.algorithm_options)))
    if not decided:
        return text
    own = to_values(run.algorithm).get("name")
    comments = [f"# {name} = {toml_value(value)}" for name, value in decided]
    lines = text.rstrip("\n").split("\n")
    if "[algorithm]" not in lines:
        lines += ["", "[algorithm]"]
    start = lines.index("[algorithm]") + 1
    ends = (i for i, line in enumerate(lines[start:], start) if not line.strip() or line.startswith("["))
    end = next(ends, len(lines))
    lines[end:end] = [f"# {own!r} resolves what is not set to:".replace("'", '"'), *comments]
    return "\n".join(lines) + "\n"


def different(run: RunConfig) -> dict[str, Any]:
    """Return the nested values of a run that its kind alone would not have, and the kind."""
    return {"kind": run.kind} | _different(run, RUN_KINDS[run.kind].model_validate({}))


def _different(config: Config, default: Config) -> dict[str, Any]:
    """Return the settings that differ from the defaults; a table that is not there by default, as a whole."""
    values, defaults = to_values(config), to_values(default)
    found: dict[str, Any] = {}
    for name in (each for each in values if values[each] != defaults.get(each)):
        value = getattr(config, name)
        if isinstance(value, Config):
            other = getattr(default, name)
            found[name] = _different(value, type(value).model_construct() if other is None else other)
        elif isinstance(value, tuple) and value and isinstance(value[0], Config):
            own = [{"name": each["name"]} if "name" in each else {} for each in values[name]]
            found[name] = [
                names | _different(each, type(each).model_construct())
                for names, each in zip(own, value, strict=True)
            ]
        else:
            found[name] = values[name]
    return found


def _decided(
    given: Mapping[str, Any], resolved: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """The dotted names and values of what is only in the resolved options."""
    for name, value in resolved.items():
        if isinstance(value, dict):
            yield from _decided(given.get(name, {}), value, f"{prefix}{name}.")
        elif name not in given:
            yield f"{prefix}{name}", value
