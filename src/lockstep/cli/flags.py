"""Every setting of a run as a command-line flag: a tyro view of the pydantic models.

tyro reads flags into plain nested dicts (TypedDicts made from the models), with the loaded run as defaults.
What was given goes back through `lockstep.config.load`: flags and files are checked by the same code. A table
that is off (None), such as model.lora, comes into being with its first flag.
"""

from __future__ import annotations

import argparse
import inspect
import types
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, TypedDict, Union, cast, get_args, get_origin, get_type_hints

import tyro
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from lockstep.cli.arguments import leading_word
from lockstep.cli.common_settings import short_help
from lockstep.common_errors import OR_A_PATH, unknown
from lockstep.config.base import Config
from lockstep.config.load import RUN_KINDS, load_run, override, parse_value, recipes, to_values, toml_value
from lockstep.config.old_names import current_flags
from lockstep.config.problems import Problem, model_of, near_settings, refusal, tables
from lockstep.config.run import RunConfig
from lockstep.errors import ConfigError, nearest
from lockstep.observe.files import path_problem
from lockstep.observe.text import echo

PAIRS = "KEY=VALUE"
STARTS = "grpo, ppo, sft, dpo, rm or a TOML file"
"""What may be the first word of a command about a run."""


def named_run(source: str | None, recipe: str | None, *, nothing: str) -> RunConfig:
    """The run that the first word of a command (a kind, a file, a recipe) and --recipe name.

    Raises:
        ConfigError: they name two, or none, which the text `nothing` says; or it cannot be read.
    """
    if source in RUN_KINDS:
        return load_run(recipe, kind=source)
    if source is not None and not _is_config(source):
        known = [*RUN_KINDS, *(() if recipe else recipes())]
        raise unknown("kind of run" if recipe else "kind of run or recipe", source, known, more=OR_A_PATH)
    if source is not None and recipe is not None:
        raise ConfigError(
            f"contradiction: {source!r} and --recipe {recipe} both name a config; use only one of them"
        )
    if source is None and recipe is None:
        raise ConfigError(nothing, code="missing-setting")
    return load_run(source or recipe)


def parse_run(
    argv: Sequence[str], *, general: type, command: str, verb: str, description: str
) -> tuple[RunConfig, dict[str, Any]]:
    """Parse the arguments of a command that takes a kind, a file or a recipe, and every setting as a flag.
    Loads no torch.

    Args:
        general: see `parse_flags`.
        command: its name, such as "lockstep plan".
        verb: of what it does with a run, such as "plan".

    Returns:
        The checked run and the values of `general`.

    Raises:
        ConfigError: a flag or setting is wrong, or nothing names a run.
    """
    source, flags = leading_word(argv)
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--recipe")
    recipe = early.parse_known_args(flags)[0].recipe
    nothing = f"there is nothing to {verb}; begin with {STARTS}, or give --recipe NAME"
    run = named_run(source, recipe, nothing=nothing)
    prog = f"{command} {source or run.kind}"
    values, overrides = parse_flags(run, flags, general=general, prog=prog, description=description)
    return override(run, overrides, origin=command), values


def _is_config(source: str) -> bool:
    """Return whether the word names a recipe or a file, which may not exist."""
    path = Path(source)
    named = source in recipes() or path.suffix == ".toml" or len(path.parts) > 1
    return named or path_problem(source) is not None or path.is_file()


def parse_flags(
    run: Config, argv: Sequence[str], *, general: type, prog: str, description: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parse the flags into (values of `general`, dotted overrides of `run`).

    Args:
        run: its values are the defaults that --help shows.
        general: a TypedDict of the flags that are not settings of the run (--json, ...).

    Raises:
        SystemExit: 0 after --help, which shows the common settings of a run, or --help-all; 2 after telling
            about a value of the wrong type.
        ConfigError: unknown flags, or a value that does not parse as KEY=VALUE or as a reward.
    """
    fields, defaults = _view(type(run), run)
    own = get_type_hints(general, include_extras=True)
    if isinstance(run, RunConfig) and not {"-h", "--help"}.isdisjoint(argv):
        echo(short_help(run, own, prog=prog, description=description))
        raise SystemExit(0)
    argv = ["--help" if word == "--help-all" else word for word in argv]
    view = _typed_dict("Run", own | fields, description)
    words = _spell_booleans(current_flags(argv), booleans := _booleans(type(run), own))
    parsed, unknown = tyro.cli(
        view,
        args=words,
        default=_unset(own) | defaults,
        prog=prog,
        return_unknown_args=True,
    )
    if unknown:
        before = {word: flag for flag, word in pairwise(words) if _path(flag) in booleans}
        raise _unknown_flags(unknown, type(run), own, prog=prog, before=before)
    values = cast(dict[str, Any], parsed)
    overrides = _overrides(values, defaults, type(run), saved=to_values(run))
    return {name: values[name] for name in own}, overrides


def _unknown_flags(
    unknown: Sequence[str],
    model: type[BaseModel],
    own: Mapping[str, Any],
    *,
    prog: str,
    before: Mapping[str, str],
) -> ConfigError:
    """The error about words that are no flag and no value of one: each with the flags it may mean.

    Args:
        before: word -> the boolean flag in front of it.
    """
    sections = tables(model)
    problems: list[Problem] = []
    for word in unknown:
        flag = word.partition("=")[0]
        if not flag.startswith("--"):
            if word in before:
                text = f"{before[word]} {word[:200]!r}: expected true or false"
                problems.append(Problem(text, {"code": "wrong-type", "setting": before[word]}))
            elif not problems:  # else the value of the flag before it
                text = f"{word[:200]!r} belongs to no flag; quote a value that contains spaces"
                problems.append(Problem(text, {"code": "unknown-setting", "setting": word[:200]}))
            continue
        name = flag.removeprefix("--").replace("-", "_")
        table, _, last = name.rpartition(".")
        name = f"{table}.{last.removeprefix('no_')}".lstrip(".") if last.startswith("no_") else name
        near = [f"--{each.replace('_', '-')}" for each in nearest(name, own)]
        near += [f"--{each.replace('_', '-')}" for each in near_settings(name, sections)]
        hint = f"; did you mean {' or '.join(near)}?" if near else f"; `{prog} --help` lists the flags"
        problems.append(
            Problem(f"{flag}: unknown flag{hint}", {"code": "unknown-setting", "setting": flag, "near": near})
        )
    return refusal("", problems)


_SPELT = ("true", "false")


def _booleans(model: type[BaseModel], own: Mapping[str, Any]) -> dict[str, bool]:
    """Flags of booleans, without the dashes in front, and whether each may also be None or "auto". Those with
    dashes are second spellings, which are the same however deep their table is."""
    flags = {name.replace("_", "-"): False for name, kind in own.items() if get_args(kind)[0] is bool}
    for name, field in model.model_fields.items():
        nested, many = model_of(field.annotation)
        flag = name.replace("_", "-")
        if nested is not None and not many:
            for inner, none in _booleans(nested, {}).items():
                flags[inner if inner.startswith("--") else f"{flag}.{inner}"] = none
        elif field.annotation is bool or bool in get_args(field.annotation):
            flags[flag] = field.annotation is not bool
            flags |= dict.fromkeys(_aliases(field), flags[flag])
    return flags


def _path(flag: str) -> str:
    return flag.removeprefix("--").replace("_", "-")


def _spell_booleans(argv: Sequence[str], booleans: Mapping[str, bool]) -> list[str]:
    """`--eval.before false` and `--eval.before=false` as tyro spells them: `--eval.no-before`; and
    `--engine.offload` and `--engine.no-offload`, which may also be "auto": `--engine.offload True`."""
    spelt: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        flag, equals, value = word.partition("=")
        path = _path(flag)
        if flag in booleans:
            path = flag
        table, dot, name = path.removeprefix("--").rpartition(".")
        plain = f"{table}{dot}{name.removeprefix('no-')}"
        if not flag.startswith("--"):
            pass
        elif (
            path in booleans
            and (equals or words)
            and (text := (value if equals else words[0]).lower()) in _SPELT
        ):
            if not equals:
                words.pop(0)
            if booleans[path]:
                spelt += [flag, text.capitalize()]
            else:
                spelt.append(flag if text == "true" else f"--{table}{dot}no-{name}")
            continue
        elif booleans.get(path) and not equals and (not words or words[0].startswith("--")):
            spelt += [flag, "True"]
            continue
        elif path != plain and booleans.get(plain) and not equals:
            spelt += [f"--{plain}", "False"]
            continue
        spelt.append(word)
    return spelt


def _unset(own: Mapping[str, Any]) -> dict[str, Any]:
    return {name: False if get_args(annotation)[0] is bool else None for name, annotation in own.items()}


def _typed_dict(name: str, fields: dict[str, Any], doc: str) -> Any:
    view = TypedDict(name, fields, total=False)  # type: ignore[misc]
    view.__doc__ = doc
    return view


def _view(model: type[BaseModel], value: BaseModel | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """(annotations, defaults) of the TypedDict for `model`; a None `value` has only hints of them."""
    fields: dict[str, Any] = {}
    defaults: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        if name == "kind" and issubclass(model, RunConfig):  # a word of its own: lockstep train grpo
            continue
        nested, many = model_of(field.annotation)
        current = None if value is None else getattr(value, name)
        if nested is not None and not many:
            annotations, inner = _view(nested, current)
            off = "" if current is not None else " Not set unless one of these flags is given."
            fields[name] = _typed_dict(nested.__name__, annotations, _summary(nested) + off)
            defaults[name] = inner
            continue
        kind, default = _leaf(field, current, many=many)
        hint = (
            None
            if value is not None
            else f"(off; then {_text(field.get_default(call_default_factory=True))})"
        )
        if isinstance(current, dict) or many:
            hint = f"(default: {_text(current)})"
        metavar = PAIRS if _is_dict(field) else "NAME[=WEIGHT]" if many else None
        if _is_nested(field):
            metavar, hint = "TOML", hint or f"(default: {toml_value(current)})"
        fields[name] = Annotated[
            kind,
            tyro.conf.arg(
                help=_help(field, many=many),
                help_behavior_hint=hint,
                metavar=metavar,
                aliases=_aliases(field) or None,
            ),
        ]
        if value is not None:
            defaults[name] = default
    return fields, defaults


def _leaf(field: FieldInfo, current: Any, *, many: bool) -> tuple[Any, Any]:
    """The type that tyro reads a setting as, and its default. Tables, rewards and lists of lists are read as
    words: `_overrides`."""
    if _is_dict(field) or many:
        return tuple[str, ...], ()
    if _is_nested(field):
        return str, ""
    return _plain(field.annotation), current


def _plain(annotation: Any) -> Any:
    """The annotation without pydantic's constraints, which are checked later, all at once."""
    if get_origin(annotation) is Annotated:
        return _plain(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return Union[tuple(_plain(a) for a in get_args(annotation))]  # noqa: UP007
    return annotation


def _aliases(field: FieldInfo) -> tuple[str, ...]:
    """A flag's second, shorter spelling: `alias` in the field's json_schema_extra."""
    extra = field.json_schema_extra
    return (str(extra["alias"]),) if isinstance(extra, dict) and "alias" in extra else ()


def _is_dict(field: FieldInfo) -> bool:
    return get_origin(field.annotation) is dict


def _is_nested(field: FieldInfo) -> bool:
    """A list of lists, whose ends words cannot tell."""
    kind = field.annotation
    return get_origin(kind) is tuple and any(get_origin(inner) is tuple for inner in get_args(kind))


def _help(field: FieldInfo, *, many: bool) -> str:
    text = inspect.cleandoc(field.description or "").replace("\n", " ")
    if _is_dict(field):
        return f"{text} These are added to the existing ones.".strip()
    if many:
        return f"{text} This replaces the list. Write NAME, NAME=WEIGHT or a quoted TOML table.".strip()
    return text


def _summary(model: type[BaseModel]) -> str:
    return inspect.cleandoc(model.__doc__ or "").split("\n\n")[0].replace("\n", " ")


def _text(value: Any) -> str:
    if isinstance(value, tuple) and value and isinstance(value[0], BaseModel):
        return " ".join(getattr(v, "name", repr(v)) for v in value)
    if isinstance(value, Mapping):
        return " ".join(f"{k}={toml_value(v)}" for k, v in value.items()) or "empty"
    return "None" if value is None else str(value)


def _overrides(
    parsed: Mapping[str, Any],
    defaults: Mapping[str, Any],
    model: type[BaseModel],
    *,
    saved: Mapping[str, Any],
    prefix: str = "",
) -> dict[str, Any]:
    """Dotted overrides for the flags whose value is not the default."""
    overrides: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        if name not in parsed:
            continue
        value, path = parsed[name], f"{prefix}{name}"
        nested, many = model_of(field.annotation)
        if nested is not None and not many:
            table = saved.get(name, {})
            inner = defaults.get(name, {})
            overrides |= _overrides(value, inner, nested, saved=table, prefix=f"{path}.")
        elif _is_dict(field):
            if value:
                texts = get_args(field.annotation)[1] is str
                pairs = [_pair(word, path, texts=texts) for word in value]
                overrides[path] = dict(saved.get(name, {})) | dict(pairs)
        elif many:
            if value:
                overrides[path] = [_item(word, path) for word in value]
        elif _is_nested(field):
            if value:
                overrides[path] = parse_value(value, origin=f"--{path}")
        elif name not in defaults or value != defaults[name]:
            overrides[path] = value
    return overrides


def _pair(word: str, path: str, *, texts: bool) -> tuple[str, Any]:
    """Key and value of a word; in a table of `texts`, such as engine.env, 1 and true are texts as well."""
    key, equals, text = word.partition("=")
    if not equals or not key:
        raise ConfigError(f"wrong-format: --{path} {word!r}: expected {PAIRS}, such as --{path} min_terms=2")
    value = parse_value(text, origin=f"--{path} {key}")
    return key, text if texts and not isinstance(value, str) else value


def _item(word: str, path: str) -> dict[str, Any]:
    if word.lstrip().startswith("{"):
        table = parse_value(word, origin=f"--{path}")
        if not isinstance(table, dict):
            raise ConfigError(
                f"not-toml: --{path} {word[:200]!r} is not a TOML table like {{name = 'math', weight = 2}}"
            )
        return table
    name, equals, weight = word.partition("=")
    return {"name": name} | ({"weight": parse_value(weight, origin=f"--{path} {name}")} if equals else {})
