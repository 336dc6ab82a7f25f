"""Load a checked run from TOML, a recipe's name and overrides, and write it back to TOML.

Every problem of a file is reported at once, by its dotted path, before any model is loaded.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar, get_origin

from pydantic import BaseModel, ValidationError

from lockstep.common_errors import OR_A_PATH, unknown
from lockstep.config.base import Config, Record, accept_saved_secrets
from lockstep.config.old_names import current, current_overrides, warn_once
from lockstep.config.ppo import PPORun
from lockstep.config.problems import DEPTH, explain, model_of, refusal, unknown_keys, unusable
from lockstep.config.run import DPORun, GRPORun, RewardModelRun, RunConfig, SFTRun
from lockstep.errors import ConfigError, unknown_name
from lockstep.observe.files import check_inside, path_problem, read_plain
from lockstep.observe.text import printable

AnyConfig = TypeVar("AnyConfig", bound=Record)

RUN_KINDS: dict[str, type[RunConfig]] = {
    "grpo": GRPORun,
    "ppo": PPORun,
    "sft": SFTRun,
    "dpo": DPORun,
    "rm": RewardModelRun,
}

TOML_BYTES = 2**20
"""Largest file of settings that is read."""
_LONG_KEY = re.compile(r"(?<![\w\"'-])(?:[\w\"'-]++[ \t]*+\.[ \t]*+){64}")
"""tomllib takes time with the square of a key's parts: minutes for a key of some hundred kilobytes."""

RESUMABLE = ("steps", "epochs", "log", "checkpoint", "record", "eval", "eval_every", "cluster", "offload")
"""Tables that may differ when a run is resumed: none of them changes what one step computes."""

PARALLELISM = (
    *("backend", "tp", "ring", "ep", "ring_comm", "tp_plan", "zero_stage", "reshard_after_forward"),
    *("reduce_gradients", "parameter_device", "optimizer_device", "plan_for_free"),
)
"""Settings of `train` that decide where a step is computed. They may differ too, and change results by
rounding: any backend on any number of ranks loads any checkpoint."""

ENGINE_SIZES = ("kv_cache_tokens", "memory_fraction", "max_batch", "prefill_chunk")
"""Settings of `engine` that decide how much is decoded together. They may differ too, as what does not fit
must be changed: samples change by rounding at most, and not at all under train.batch_invariant."""


def recipes() -> dict[str, Path]:
    """Return the recipes that come with Lockstep: name -> TOML file."""
    folder = resources.files("lockstep") / "recipes"
    with resources.as_file(folder) as path:
        return {file.stem: file for file in sorted(path.glob("*.toml"))}


def load_run(
    source: str | Path | None = None, *, kind: str | None = None, overrides: Mapping[str, Any] | None = None
) -> RunConfig:
    """Load and check a run.

    Args:
        source: a TOML file, or a recipe's name; None: the defaults of `kind`.
        kind: "grpo", "ppo", "sft", "dpo" or "rm"; None: the file's. A file of another kind is refused.
        overrides: dotted path -> value, such as {"train.lr": 1e-6}; applied to the file before it is checked.

    Raises:
        ConfigError: naming every unknown key, wrong type and impossible combination.

    Example:
        >>> load_run(kind="grpo", overrides={"train.lr": 1e-6}).train.lr
        1e-06
    """
    if source is None:
        values: dict[str, Any] = {"kind": kind}
        origin = f"{kind} run"
    else:
        path = find(source)
        values, origin = current(read_toml(path), origin=str(source)), str(source)
        if kind is not None and values.setdefault("kind", kind) != kind:
            file_kind = build(values, origin=origin).kind
            raise ConfigError(
                f"contradiction: {origin}: kind = {file_kind!r}, but {kind!r} was requested; run `lockstep "
                f"train {file_kind}` with this file, or leave the kind out",
                setting="kind",
            )
    return build(merge(values, overrides or {}), origin=origin)


def override(run: RunConfig, overrides: Mapping[str, Any], *, origin: str = "overrides") -> RunConfig:
    """Return the run with other settings, checked again. Keys are dotted paths; `origin` begins an error.

    Raises:
        ConfigError: as `load_run`.
    """
    return build(merge(to_values(run), overrides), origin=origin)


def load_resumed(run_dir: str | Path, overrides: Mapping[str, Any] | None = None) -> RunConfig:
    """Load the config of an existing run, to go on with it. `run_dir` of the result is the folder given.

    Raises:
        ConfigError: when the folder holds no run, or when an override would change what a step computes
            (everything outside RESUMABLE, PARALLELISM and ENGINE_SIZES), naming each difference.
    """
    folder = Path(run_dir)
    changed = override(_saved_run(folder), overrides or {})
    check_resumable(folder, changed)
    return override(changed, {"run_dir": str(folder)})


def load_restarted(run_dir: str | Path, overrides: Mapping[str, Any] | None = None) -> RunConfig:
    """Load the config of an existing run, to begin it again in its folder, with any other settings.

    Raises:
        ConfigError: the folder holds no run, or the settings are wrong.
    """
    folder = Path(run_dir)
    return override(_saved_run(folder, verb="restart"), {**(overrides or {}), "run_dir": str(folder)})


def check_resumable(run_dir: str | Path, run: RunConfig) -> None:
    """Raise unless `run` may go on with the run in `run_dir`; the path of the folder may differ.

    Raises:
        ConfigError: as `load_resumed`.
    """
    folder = Path(run_dir)
    saved = _saved_run(folder)
    old, new = to_values(saved), to_values(run)
    if run.run_dir is None or run.run_dir.resolve() == folder.resolve():
        old.pop("run_dir", None)
        new.pop("run_dir", None)
    differences = list(_differences(old, new))
    single = {f"train.{name}" for name in PARALLELISM} | {f"engine.{name}" for name in ENGINE_SIZES}
    if run.rows_are_slots:
        single -= {"engine.max_batch"}
    refused = [d for d in differences if d[0].split(".")[0] not in RESUMABLE and d[0] not in single]
    if run.schedules != {"constant"}:
        refused += [d for d in differences if d[0] in ("steps", "epochs")]
    if refused:
        # A decay ends at the last step.
        why = {"steps": " (only train.schedule = 'constant' lets it change)"}
        lines = [
            f"  {path}: {_show(old)} in the run, now {_show(new)}{why.get(path, '')}"
            for path, old, new in refused
        ]
        raise ConfigError(
            f"not-resumable: cannot resume {str(folder)!r} with other settings; leave them out, or start a "
            f"new run with lockstep train {folder / 'config.toml'}:\n" + "\n".join(lines)
        )


def _saved_run(folder: Path, *, verb: str = "resume") -> RunConfig:
    file = folder / "config.toml"
    if not file.is_file():
        raise ConfigError(
            f"no-such-file: cannot {verb} {str(folder)!r}: it has no config.toml; give the folder of an "
            "earlier run"
        )
    check_inside(file, ConfigError, root=folder)
    return saved_run(file)


def saved_run(file: Path) -> RunConfig:
    """Load a run's own config.toml, which an earlier version may have written: renamed settings, and settings
    that had no effect and are refused now, are accepted with a warning.

    Raises:
        ConfigError: it is not the config of a run.
    """
    return saved_values(read_toml(file), origin=str(file))


def saved_values(values: Mapping[str, Any], *, origin: str) -> RunConfig:
    """Check the values of a run's own config.toml: see `saved_run`."""
    values = _without_idle(current(values, origin=origin), origin=origin)
    accept_saved_secrets(values, origin=origin)
    return build(values, origin=origin)


def _without_idle(values: dict[str, Any], *, origin: str) -> dict[str, Any]:
    """Leave out settings that earlier versions accepted although they had no effect."""
    train, value, cluster = (_table(values, name) for name in ("train", "value", "cluster"))
    ratio, constant = train.get("min_lr_ratio"), train.get("schedule", "constant") == "constant"
    if constant and ratio:
        if value.get("schedule", "constant") != "constant":  # a value model's own decay took it
            values = values | {"value": {"min_lr_ratio": ratio} | value}
        train = {name: each for name, each in train.items() if name != "min_lr_ratio"}
        values = values | {"train": train}
        warn_once(
            f"{origin}: train.min_lr_ratio = {ratio} is ignored, because it has no effect with "
            "train.schedule = 'constant'"
        )
    groups = cluster.get("colocate")
    if isinstance(groups, list) and len(groups) == 1 and "policy" in groups[0]:
        # One group is what all roles are in without it; earlier versions took one that did not name them all.
        values = values | {"cluster": {name: each for name, each in cluster.items() if name != "colocate"}}
    return values


def _table(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    table = values.get(name)
    return dict(table) if isinstance(table, Mapping) else {}


def find(source: str | Path) -> Path:
    """Return the file behind a path or a recipe's name. Raises ConfigError."""
    if problem := path_problem(str(source)):
        raise ConfigError(f"bad-file-name: {str(source)[:80]!r} is not a valid file name: {problem}")
    path = Path(source)
    if path.is_file():
        return path
    known = recipes()
    if isinstance(source, str) and source in known:
        return known[source]
    if path.suffix == ".toml" or len(path.parts) > 1:
        raise ConfigError(
            f"no-such-file: no such file: {str(source)!r} (the working directory is {os.getcwd()!r})"
        )
    raise unknown("recipe", str(source), known, more=OR_A_PATH)


def read_toml(path: Path) -> dict[str, Any]:
    """Read the tables of a TOML file, unchecked.

    Raises:
        ConfigError: it cannot be read, or is not TOML.
    """
    return parse_toml(read_plain(path, ConfigError, limit=TOML_BYTES), origin=str(path))


def parse_toml(data: bytes, *, origin: str) -> dict[str, Any]:
    """Parse the tables of a TOML text, unchecked.

    Raises:
        ConfigError: it is not TOML; names `origin`.
    """
    try:
        return _parse(data.decode("utf-8-sig"), origin)
    except ValueError as error:  # TOMLDecodeError, UnicodeDecodeError, or a number of thousands of digits
        raise ConfigError(f"not-toml: {origin}: not a TOML file: {printable(str(error))}") from error


def parse_value(text: str, *, origin: str) -> Any:
    """Parse one word of a command line as a TOML value, or return the word itself: text needs no quotes
    there.

    Raises:
        ConfigError: it is TOML that no setting can have; names `origin`.
    """
    try:
        values = _parse(f"value = {text}", origin)
    except tomllib.TOMLDecodeError:
        return text
    except ValueError as error:  # a number of thousands of digits
        raise ConfigError(f"out-of-range: {origin}: {printable(str(error))}") from error
    value = values.get("value")
    # No setting takes a date; and what follows a # would be lost.
    plain = values.keys() != {"value"} or isinstance(value, datetime.date | datetime.time)
    return text if plain or _ends_in_comment(text, origin) else value


def _ends_in_comment(text: str, origin: str) -> bool:
    """Return whether a # begins a comment in the last line of a TOML value: more may then follow it."""
    if "#" not in text:
        return False
    try:
        _parse(f'value = {text.rstrip()} "', origin)
    except tomllib.TOMLDecodeError:
        return False
    return True


def _parse(text: str, origin: str) -> dict[str, Any]:
    if _LONG_KEY.search(text):
        raise ConfigError(f"too-deep: {origin}: a key has more than 64 parts, but no setting has so many")
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise ConfigError(
            f"too-deep: {origin}: lists or tables are nested too deeply for a setting"
        ) from error


def build(values: Mapping[str, Any], *, origin: str) -> RunConfig:
    """Check nested plain values and freeze them into the run that `values["kind"]` names.

    Raises:
        ConfigError: with all problems, each by its dotted path.
    """
    kind = values.get("kind")
    if not isinstance(kind, str) or kind not in RUN_KINDS:
        what = "kind is missing" if kind is None else "kind is not a string"
        if isinstance(kind, str):
            what = unknown_name("kind", kind, RUN_KINDS)
        raise ConfigError(
            f"unknown-name: {origin}: {what}; write kind = 'grpo' or kind = 'sft' at the top", setting="kind"
        )
    if None not in (values.get("steps"), values.get("epochs")):
        raise ConfigError(
            f"contradiction: {origin}: steps = {values['steps']!r} and epochs = {values['epochs']!r} both "
            "say how long the run is; leave one of them out",
            setting="epochs",
        )
    return check(values, RUN_KINDS[kind], origin=origin)


def check(values: Mapping[str, Any], model: type[AnyConfig], *, origin: str) -> AnyConfig:
    """Check nested plain values and freeze them into `model`.

    Raises:
        ConfigError: with all problems, each by its dotted path.
    """
    problems = list(unusable(values))
    if issubclass(model, Config) and model.section is not None:
        values = current(values, origin=origin, section=model.section)
    if issubclass(model, Config):
        values = model.completed(values)
    checked = None
    if not problems:
        problems, known = unknown_keys(values, model)
        try:
            # JSON mode is the only strict one that takes a list for a tuple and a string for a path.
            checked = model.model_validate_json(json.dumps(_plain(known)), strict=True)
        except ValidationError as error:
            problems += explain(error, model)
    if checked is None or problems:
        count = f"{len(problems)} problems" if len(problems) > 1 else "1 problem"
        raise refusal(f"{origin}: {count}\n  ", problems)
    return checked


def to_values(run: Config) -> dict[str, Any]:
    """Return the nested plain values of a config (None left out), as TOML and `build` take them."""
    values: dict[str, Any] = json.loads(run.model_dump_json(exclude_none=True))
    if "epochs" in values:  # its steps are not known yet
        del values["steps"]
    return values


def dump_toml(run: Config, *, only: Mapping[str, Any] | None = None) -> str:
    """Return TOML with every setting of the run; `load_run` of it gives an equal run.

    Args:
        only: nested values to write in place of all.

    Raises:
        ConfigError: when a free-form table (data.task, ...) holds what TOML has no value for.
    """
    values = to_values(run) if only is None else dict(only)
    ordered = {"kind": values.pop("kind")} | values if "kind" in values else values
    try:
        return to_toml(ordered, inline=_free_tables(type(run)))
    except TomlError as error:
        raise ConfigError(str(error), code="wrong-type") from error


def merge(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of nested `values` with dotted `overrides` set; None removes a setting. Both may have old
    names; an override wins over a value, and of steps and epochs over the other one, too."""
    result = current(_plain(values), origin="settings")
    for named, other in (("steps", "epochs"), ("epochs", "steps")):
        if overrides.get(named) is not None:
            result.pop(other, None)
    for path, value in current_overrides(overrides, origin="overrides").items():
        *sections, key = path.split(".")
        table = result
        for section in sections:
            table = table.setdefault(section, {})
            if not isinstance(table, dict):
                raise ConfigError(
                    f"wrong-type: {path} = {_show(value)}: {section!r} is not a table of settings"
                )
        if value is None:
            table.pop(key, None)
        else:
            table[key] = _plain(value)
    checked: dict[str, Any] = result
    return checked


def _free_tables(model: type[BaseModel], prefix: str = "") -> frozenset[str]:
    """Dotted paths of fields that are plain dicts: their keys are the user's, so they are written inline."""
    paths: set[str] = set()
    for name, field in model.model_fields.items():
        nested, many = model_of(field.annotation)
        if nested is not None and not many:
            paths |= _free_tables(nested, f"{prefix}{name}.")
        elif get_origin(field.annotation) is dict:
            paths.add(prefix + name)
    return frozenset(paths)


def _differences(
    old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    for key in dict.fromkeys([*old, *new]):
        a, b = old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            yield from _differences(a, b, f"{prefix}{key}.")
        elif a != b:
            yield f"{prefix}{key}", a, b


def _plain(value: Any, depth: int = 0) -> Any:
    """Return a copy in JSON's types; `unusable` checks its contents."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_none=True)
    if depth <= DEPTH and isinstance(value, Mapping):
        return {str(key): _plain(item, depth + 1) for key, item in value.items()}
    if depth <= DEPTH and isinstance(value, list | tuple):
        return [_plain(item, depth + 1) for item in value]
    if depth > DEPTH:
        raise ConfigError(f"too-deep: lists or tables are nested over {DEPTH} levels deep, but no setting is")
    raise ConfigError(f"wrong-type: {value!r} is a {type(value).__name__}, which no setting accepts")


def _show(value: Any) -> str:
    return "nothing" if value is None else repr(value)


# A small TOML writer: the standard library only reads.


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
    raise TomlError(f"{path} = {value!r}: TOML has no {type(value).__name__} values; leave the key out")


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
        dotted = ".".join((*path, key))
        only_tables = [isinstance(v, Mapping) and f"{dotted}.{k}" not in inline for k, v in value.items()]
        if not only_tables or not all(only_tables):  # else the tables inside say that it is there
            lines += ["", "[" + ".".join(_key(part) for part in (*path, key)) + "]"]
        _write_table(value, path=(*path, key), inline=inline, lines=lines)


def _key(key: Any) -> str:
    if not isinstance(key, str):
        raise TomlError(f"key {key!r}: TOML keys must be strings")
    return key if _BARE_KEY.fullmatch(key) else toml_value(key)
