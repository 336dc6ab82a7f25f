"""What a run's own rows and rewards can tell before anything is loaded. Needs no torch."""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.config.data import DataConfig
from lockstep.config.rollout import BUILTIN_REWARDS, RewardConfig
from lockstep.config.run import DPORun, GRPORun, OfflineRun, PairRun, RunConfig
from lockstep.data.chat import fill_template
from lockstep.data.prompts import evaluates, held_out_size, holds_out_rows, needed_rows
from lockstep.data.sources import FILE_SUFFIXES, load_rows, missing_column
from lockstep.errors import ConfigError, LockstepError, nearest, unknown_name
from lockstep.rollout.reward_rows import check_row
from lockstep.rollout.verifiers import require_package

Check = Callable[[], object]


def faults(checks: Iterable[Check]) -> list[LockstepError]:
    """Return the errors of all checks, each of which raises at most one."""
    found: list[LockstepError] = []
    for check in checks:
        try:
            check()
        except LockstepError as error:
            found.append(error)
    return found


def reward_checks(run: GRPORun) -> Iterator[Check]:
    """Return the checks of the rewards' names, modules and packages."""
    for reward in run.rewards:
        yield partial(_check_reward, reward)


def row_checks(run: RunConfig) -> Iterator[Check]:
    """Return the checks of the rows of files: whether there are enough, and whether the first one has the
    columns that are read."""
    assert isinstance(run, GRPORun | OfflineRun)
    for section, config in {"data": run.data, "eval_data": run.eval_data}.items():
        if config is not None and _is_file(config):
            yield partial(_check_count, run, section, config)
            yield from _column_checks(run, section, config)
        elif isinstance(run, GRPORun) and config is not None and config.source == "ids":
            for reward in run.rewards:
                yield partial(check_row, reward, {"token_ids": []})


def _check_reward(config: RewardConfig) -> None:
    if ":" in config.name:
        check_attribute(config.name, what=f"reward {config.name!r}")
    elif config.name not in BUILTIN_REWARDS:
        raise ConfigError(
            unknown_name("reward", config.name, [*BUILTIN_REWARDS, "module:attribute"]),
            code="unknown-name",
            setting="rewards",
            name=config.name,
        )
    elif config.name in ("verifier", "math"):
        package = {"verifier": "reasoning_gym", "math": "math_verify"}[config.name]
        require_package(package, needed_by=f"reward {config.name!r}")


def check_attribute(target: str, *, what: str) -> None:
    """Check that `module:attribute` can be there, without running the module, which may be slow or have
    effects. What only a run of it would show is left to the import.

    Raises:
        ConfigError: there is no such module, or its source binds no such name.
    """
    module, _, attribute = target.partition(":")
    spec = _find(module)
    if spec is None:
        raise ConfigError(
            f"missing-package: {what} needs the module {module!r}, which is not installed or not on the "
            f"Python path (looked for {target!r}, also in {os.getcwd()!r})",
            name=module,
        )
    if spec.origin is None or not spec.origin.endswith(".py"):
        return
    try:
        bound = _bound(ast.parse(Path(spec.origin).read_bytes()))
    except (OSError, SyntaxError, ValueError, RecursionError):  # the import will say it
        return
    first = attribute.partition(".")[0]
    # A submodule that the package imports from is an attribute of it, too.
    inside = spec.submodule_search_locations is not None and _find(f"{module}.{first}") is not None
    if bound is not None and first not in bound and not inside:
        near = nearest(first, bound)
        hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise ConfigError(f"wrong-part: {what}: {spec.origin} defines no {first!r}{hint}", name=attribute)


def _find(module: str) -> importlib.machinery.ModuleSpec | None:
    """Where a module would be imported from; none of its parents is imported."""
    first, *rest = module.split(".")
    loaded = sys.modules.get(module)
    if loaded is not None and loaded.__spec__ is not None:
        return loaded.__spec__
    try:
        spec = importlib.util.find_spec(first)
    except ValueError:  # a module without a spec, such as one that was made by hand
        return importlib.machinery.ModuleSpec(module, None)
    if spec is None:
        spec = importlib.machinery.PathFinder.find_spec(first, [os.getcwd()])
    name = first
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        name = f"{name}.{part}"
        spec = importlib.machinery.PathFinder.find_spec(name, list(spec.submodule_search_locations))
    return spec


def _bound(tree: ast.Module) -> set[str] | None:
    """The names that a module's source binds anywhere; None: it may bind others."""
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.add(node.name)
            case ast.Name() if isinstance(node.ctx, ast.Store):
                names.add(node.id)
            case ast.Name(id="globals" | "setattr" | "exec" | "vars"):
                return None
            case ast.Import() | ast.ImportFrom():
                for alias in node.names:
                    if alias.name == "*":
                        return None
                    names.add(alias.asname or alias.name.partition(".")[0])
    return None if "__getattr__" in names else names


def _is_file(config: DataConfig) -> bool:
    path = Path(config.source).expanduser()
    return not config.generated and path.suffix in FILE_SUFFIXES and path.is_file()


def _check_count(run: GRPORun | OfflineRun, section: str, config: DataConfig) -> None:
    """Check that a file has enough rows for a step. How many of them are too long is only known with the
    tokenizer."""
    if section == "eval_data":
        return
    if isinstance(run, GRPORun):
        setting, needed = "rollout.prompts_per_step", run.rollout.prompts_per_step
        if evaluates(run) and holds_out_rows(run):
            held_out_size(run, len(load_rows(_raw(config, size=needed_rows(run)))))
            return
    else:
        setting, needed = "batch_size", run.batch_size
    after = config.size if isinstance(run, GRPORun) and run.eval_data is None and evaluates(run) else None
    found = load_rows(_raw(config, size=after + 1 if after else config.size or needed))
    rows, answers = len(found), ""
    count = sum(map(run.documents_of, found)) if isinstance(run, OfflineRun) else rows
    if isinstance(run, OfflineRun) and count != rows:
        answers = f", which are {count} {run.documents_name}"
    if count < needed:
        raise ConfigError(
            f"not-enough: {setting} = {needed} is more than data.source = {config.source!r} has: {rows} "
            f"rows{answers}; lower {setting}, or give more data",
            setting=setting,
            rows=rows,
            held_out=0,
        )
    if after and rows <= after:
        raise ConfigError(
            f"not-enough: data.size = {after} takes all {rows} rows of data.source = {config.source!r} to "
            "train on, and evaluations are held out after them; lower data.size, set eval_data.source, or "
            "turn evaluations off (eval.before = false, eval.after = false, eval.every = 0)",
            rows=rows,
            held_out=0,
        )


def _raw(config: DataConfig, *, size: int) -> DataConfig:
    """The same rows with the columns that are in the file."""
    return config.model_copy(update={"size": size, "columns": {}, "answer_column": "answer"})


def _column_checks(run: GRPORun | OfflineRun, section: str, config: DataConfig) -> Iterator[Check]:
    try:
        row = load_rows(_raw(config, size=1))[0]
    except LockstepError:  # told by the count
        return
    where = row.where

    def need(column: str, setting: str, columns: Mapping[str, Any]) -> Check:
        def check() -> None:
            if column not in columns:
                raise missing_column(column, columns, setting=setting, source=where)

        return check

    for new, old in config.columns.items():
        yield need(old, f"{section}.columns.{new}", row)
    renamed = {name: value for name, value in row.items() if name not in config.columns.values()}
    renamed |= {new: row.get(old) for new, old in config.columns.items()}
    if config.answer_column != "answer":
        yield need(config.answer_column, f"{section}.answer_column", renamed)
        renamed["answer"] = renamed.get(config.answer_column, "")
    for setting in _read_columns(run, config, renamed):
        yield need(getattr(config, setting), f"{section}.{setting}", renamed)
    if isinstance(run, GRPORun):
        for reward in run.rewards:
            yield partial(check_row, reward, renamed)
        yield partial(fill_template, config.prompt_template, {**renamed, "prompt": ""}, where=where)


def _read_columns(run: GRPORun | OfflineRun, config: DataConfig, row: Mapping[str, Any]) -> list[str]:
    """The settings that name a column which a row of this kind must have."""
    if isinstance(run, GRPORun):
        return [] if config.messages_column in row else ["prompt_column"]
    if isinstance(run, DPORun) and not run.algorithm.paired and config.label_column in row:
        return ["prompt_column", "completion_column"]
    if isinstance(run, PairRun):
        kinds = [row.get(config.chosen_column), row.get(config.rejected_column)]
        return ["chosen_column", "rejected_column", *(["prompt_column"] if str in map(type, kinds) else [])]
    return []
