"""Checks that need no torch, no model and no folder: they run before any of these is loaded or made."""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

from lockstep.common_errors import unknown
from lockstep.config.batch import RewardRoleConfig
from lockstep.config.data import DataConfig
from lockstep.config.declarations import Entry, backends, own_rows
from lockstep.config.record import record_refusal
from lockstep.config.rollout import BUILTIN_REWARDS, RewardConfig
from lockstep.config.run import GRPORun, OfflineRun, RunConfig
from lockstep.config.support import SETTINGS, check_own_settings
from lockstep.data.chat import fill_template
from lockstep.data.held_out import evaluates, held_out_size, holds_out_rows, needed_rows
from lockstep.data.rows import IdRows, reasoning_gym_dataset
from lockstep.data.sources import FILE_SUFFIXES, Source, check_source, count_rows, load_rows, missing_column
from lockstep.engine import ENGINES
from lockstep.errors import ConfigError, DataError, LockstepError, ModelError, nearest, together, unknown_name
from lockstep.loop.hub import check_hub
from lockstep.loop.warm_start import warm_start_of
from lockstep.models.shape_table import PREFIX, SHAPES
from lockstep.observe.files import path_problem
from lockstep.observe.metrics import check_wandb, writes_tensorboard
from lockstep.observe.run_dir import check_free, finished
from lockstep.observe.text import counted
from lockstep.registry import load_object, require_call, require_members
from lockstep.rollout.verifiers import check_row, require_package

BACKEND_ARGUMENTS = ("model", "total_steps", "temperature", "ref")
BACKEND_CLASS_MEMBERS = (
    "shards_weights",
    "logprobs",
    "forward_backward",
    "optimizer_step",
    "weights",
    "save",
    "load",
    "export",
    "close",
    "compile_report",
)
"""Members that a backend's class must have; see lockstep.protocols.TrainBackend, which needs torch."""


def preflight(
    run: RunConfig,
    *,
    resume: Path | None,
    checkpoint: int | None,
    restart: bool = False,
    own_rewards: bool = False,
    own_data: bool = False,
) -> dict[str, Any] | None:
    """Check a run before anything is loaded. Returns the summary of a run that is already finished, and so
    has nothing to resume; else None.

    Args:
        own_rewards: Python callables take the place of `run.rewards`, which are not looked at.
        own_data: an environment takes the place of the config's data, which is not looked at.

    Raises:
        ConfigError, DataError, ModelError: the run cannot start: its folder is taken, or a file, task, shape
            or engine that it names does not exist.
    """
    if resume is None and run.run_dir is not None and not restart:
        check_free(run.run_dir)
    if resume is not None and checkpoint is None:
        done = finished(resume, steps=run.steps)
        if done is not None:
            return done
    found = faults(_checks(run.without_rewards() if own_rewards else run, own_data=own_data))
    if found:
        raise together(found)
    return None


def _checks(run: RunConfig, *, own_data: bool) -> Iterator[Check]:
    """Every fault that can be known by now has a check of its own: all are reported together."""
    for setting, name in run.model_names.items():
        yield partial(check_model, name, setting=setting)
    if run.online:
        yield from _rollout_checks(cast(GRPORun, run))
    yield partial(check_own_attention, run.train.attention)
    yield partial(_check_backend, run)
    yield partial(_check_packages, run)
    yield partial(check_hub, run)
    if own_data:
        return
    for section, config in run.data_sections.items():
        yield partial(_check_data, section, config, run)
    yield from row_checks(run)


def _rollout_checks(run: GRPORun) -> Iterator[Check]:
    """Yield the checks of what samples and scores, and of the warm start before it."""
    if run.warm_start is not None:
        yield from _checks(warm_start_of(run, run.run_dir or Path(run.name)), own_data=False)
    yield partial(_check_engine, run)
    yield partial(check_own_algorithm, run)
    if run.reward_model is not None:
        yield partial(_check_reward_models, run, run.reward_model)
    yield from reward_checks(run)


def _check_engine(run: GRPORun) -> None:
    if ":" in run.engine.name:
        from lockstep.engine.spec import load_engine_class  # needs torch, as their engine does

        load_engine_class(run.engine.name)
    elif run.engine.name not in (*ENGINES, "auto"):
        raise unknown(ENGINES.kind, run.engine.name, [*ENGINES, "auto"], setting="engine.name")


def _check_backend(run: RunConfig) -> None:
    if ":" in run.train.backend:
        what = f"train.backend = {run.train.backend!r}"
        members = [*BACKEND_CLASS_MEMBERS, *(["offload"] if run.offloaded else [])]
        backend = load_object(run.train.backend, what=what)
        require_members(backend, members, what=what)
        require_call(backend, "config", named=BACKEND_ARGUMENTS, what=what)
        check_own_backend(run)


def _check_packages(run: RunConfig) -> None:
    """Check that optional packages which a setting needs are installed; imports none of them."""
    if run.log.wandb:
        check_wandb()
    writes_tensorboard(run.log.tensorboard)
    train = run.train
    needed = {
        "peft": ("model.lora", run.model.lora is not None, "pip install 'lockstep-rl[lora]'"),
        "torchao": ("train.optimizer = 'adamw8bit'", train.optimizer == "adamw8bit", "pip install torchao"),
    }
    if train.backend in backends():
        for package, fix in backends()[train.backend].needs.items():
            needed[package] = (f"train.backend = {train.backend!r}", True, fix)
    for package, (setting, used, fix) in needed.items():
        if used and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"missing-package: {setting} needs the package {package}, which is not installed; {fix}",
                setting=setting,
            )


def check_model(name: str, *, setting: str = "model.name") -> None:
    """Raise ModelError for the name of a shape or a folder that does not exist. The hub is not asked."""
    if name.startswith(PREFIX) and name.removeprefix(PREFIX) not in SHAPES:
        raise ModelError(
            f"unknown-name: {setting} = {name!r}: "
            + unknown_name("shape", name.removeprefix(PREFIX), SHAPES),
            setting=setting,
        )
    check_no_lost_run(name, setting=setting)
    folder = Path(name).expanduser()
    if (folder.is_absolute() or name.startswith((".", "~"))) and not (folder / "config.json").is_file():
        what = "contains no config.json" if folder.is_dir() else "does not exist"
        raise ModelError(
            f"wrong-kind-of-file: {setting} = {name!r}: this folder {what}; name a folder with a saved model",
            setting=setting,
        )


def check_no_lost_run(name: str, *, setting: str | None = None) -> None:
    """Raise ModelError for a name that could be a hub's OWNER/NAME, and is the path of a run that does not
    exist: nobody need ask the hub."""
    path = Path(name).expanduser()
    folder = path.parent
    if name.count("/") != 1 or path_problem(name) or path.exists():
        return
    if folder.name != "runs" and not any(folder.glob("*/config.toml")):
        return
    there = sorted(each.parent.name for each in folder.glob("*/config.toml"))
    near = [str(folder / each) for each in nearest(path.name, there)]
    hint = (
        f"did you mean {' or '.join(map(repr, near))}?" if near else f"existing runs: {', '.join(there[:10])}"
    )
    raise ModelError(
        (f"{setting} = " if setting else "")
        + f"{name!r}: no such run directory (relative to {str(Path.cwd())!r}); "
        + (hint if there else "name a run directory, a model folder or a hub model"),
        code="no-such-file",
        name=name,
    )


def _check_reward_models(run: GRPORun, config: RewardRoleConfig) -> None:
    for number, name in enumerate((config.name, *config.others)):
        setting = "reward_model.others" if number else "reward_model.name"
        check_model(name, setting=setting)
        if name.startswith(PREFIX):
            raise ModelError(
                f"unsupported-combination: {setting} = {name!r}: a shape has no trained weights to score "
                "with; name a folder or a hub model, such as RUN_DIR/export of `lockstep train rm`",
                setting=setting,
            )
    if run.data.source == "ids":
        raise ConfigError(
            f"unsupported-combination: reward_model.name = {config.name!r} with data.source = 'ids': a "
            "reward model reads text, but these prompts are token ids; use text prompts, or leave "
            "reward_model out"
        )


def _check_data(section: str, config: DataConfig, run: RunConfig) -> None:
    try:
        check_source(config)
        if config.source == "ids":
            IdRows(config, vocab_size=1)  # the model's own is not known yet, and is always possible
        elif config.source.startswith("reasoning_gym:"):
            task = config.source.partition(":")[2]
            reasoning_gym_dataset(task, config.task, seed=config.seed, size=1)
    except (ConfigError, DataError) as error:
        raise error.with_message(f"{section}: {error}") from error
    if config.generated and not run.online:
        raise ConfigError(
            f"unsupported-combination: {section}.source = {config.source!r} provides only prompts; "
            f"{run.kind.upper()} needs a file, a folder or a hub data set",
            setting=f"{section}.source",
        )
    if run.model.name.startswith(PREFIX) and config.source != "ids":
        raise ConfigError(
            f"no-tokenizer: {section}.source = {config.source!r} is text, but model.name = "
            f"{run.model.name!r} has no tokenizer; set data.source = 'ids' with rewards = [{{name = "
            "'ids'}], or choose a model with a tokenizer",
            setting=f"{section}.source",
        )


# What a run's own rows and rewards can tell before anything is loaded. Needs no torch.


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
    for section, config in run.data_sections.items():
        if _is_file(config):
            if section == "data":
                yield partial(_ROW_COUNTS[run.kind], run, config)
            yield from _column_checks(run, section, config)
        elif config.source == "ids":
            for reward in run.reward_functions:
                yield partial(check_row, reward, {"token_ids": []})


def _check_reward(config: RewardConfig) -> None:
    if ":" in config.name:
        check_attribute(config.name, what=f"reward {config.name!r}")
    elif config.name not in BUILTIN_REWARDS:
        known = [*BUILTIN_REWARDS, "module:attribute"]
        raise unknown("reward", config.name, known, setting="rewards", name=config.name)
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
            f"Python path (searched for {target!r}, also in {os.getcwd()!r}); install it, or set PYTHONPATH",
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
        raise ConfigError(f"wrong-part: {what}: {spec.origin} has no {first!r}{hint}", name=attribute)


def _find(module: str) -> importlib.machinery.ModuleSpec | None:
    """Return the spec that a module would be imported from, without importing its parents."""
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


def _check_prompts(run: GRPORun, config: DataConfig) -> None:
    """Check that a file has enough rows for a step and the evaluations. How many of them are too long is only
    known with the tokenizer."""
    needed = run.rollout.prompts_per_step
    if evaluates(run) and holds_out_rows(run):
        held_out_size(run, count_rows(_raw(config, size=None), needed_rows(run)))
        return
    after = config.size if run.eval_data is None and evaluates(run) else None
    wanted = after + 1 if after else config.size or needed
    rows = count_rows(_raw(config, size=None), wanted)
    if rows < needed:
        raise _too_few("rollout.prompts_per_step", needed, config, rows=rows)
    if after and rows <= after:
        raise ConfigError(
            f"not-enough: data.size = {after} uses all {rows} rows of data.source = {config.source!r} for "
            "training, so none are left to hold out for evaluations; lower data.size, set "
            "eval_data.source, or turn evaluations off (eval.before = false, eval.after = false, "
            "eval.every = 0)",
            rows=rows,
            held_out=0,
        )


def _check_documents(run: OfflineRun, config: DataConfig) -> None:
    """Check that a file has enough documents for a step; see `_check_prompts`."""
    found = Source(_raw(config, size=config.size)).head(run.batch_size)
    # What a row at fault would have been is told later.
    count = sum(1 if isinstance(row, DataError) else run.documents_of(row) for row in found)
    answers = "" if count == len(found) else f", i.e. {count} {run.documents_name}"
    if count < run.batch_size:
        raise _too_few("batch_size", run.batch_size, config, rows=len(found), answers=answers)


def _too_few(setting: str, needed: int, config: DataConfig, *, rows: int, answers: str = "") -> ConfigError:
    return ConfigError(
        f"not-enough: {setting} = {needed} exceeds the data: data.source = {config.source!r} has "
        f"{counted(rows, 'row')}{answers}; lower {setting}, or provide more data",
        setting=setting,
        rows=rows,
        held_out=0,
    )


_ROW_COUNTS: Mapping[str, Callable[[Any, DataConfig], None]] = {
    "grpo": _check_prompts,
    "ppo": _check_prompts,
    "sft": _check_documents,
    "dpo": _check_documents,
    "rm": _check_documents,
}
"""By kind of run."""


def _raw(config: DataConfig, *, size: int | None) -> DataConfig:
    """The same rows with the columns that are in the file."""
    return config.model_copy(update={"size": size, "columns": {}, "answer_column": "answer"})


def _column_checks(run: RunConfig, section: str, config: DataConfig) -> Iterator[Check]:
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
    for setting in run.columns_read(config, renamed):
        yield need(getattr(config, setting), f"{section}.{setting}", renamed)
    for reward in run.reward_functions:
        yield partial(check_row, reward, renamed)
    if run.online:
        yield partial(fill_template, config.prompt_template, {**renamed, "prompt": ""}, where=where)


# What parts of the user's, named as `module:attribute`, declare about themselves.


def own_support(run: RunConfig, *, attention: str) -> list[Entry]:
    """The rows of the support table in the attribute `support` of the run's backend, engine and kernel; none
    of a part that has no such attribute, and none of ours.

    Args:
        attention: what train.attention resolved to.

    Raises:
        ConfigError: there is no such part, or its attribute holds no rows.
    """
    chosen = {
        "backend": run.train.backend,
        "engine": run.engine_name or "",
        "attention": "" if attention.startswith("hf:") else attention,
    }
    rows = []
    for axis, name in chosen.items():
        if ":" in name:
            part = load_object(name, what=f"{SETTINGS[axis]} = {name!r}")
            rows += own_rows(getattr(part, "support", ()), axis=axis, name=name)
    return rows


def check_own_backend(run: RunConfig) -> None:
    """Check a run's settings against the attributes `reads` and `refuses` of a backend of the user's; without
    them it reads no setting that some backends do not read, and refuses none.

    Raises:
        ConfigError: a setting that the backend does not read, or refuses; or the run cannot be recorded,
            because the backend says that it shards weights.
    """
    name = run.train.backend
    if ":" in name:
        part = load_object(name, what=f"train.backend = {name!r}")
        check_own_settings(
            run.train,
            lora=run.model.lora is not None,
            reads=getattr(part, "reads", ()),
            refuses=getattr(part, "refuses", ()),
        )
        refusal = (
            record_refusal(run.record, run.train, lora=bool(run.model.lora))
            if getattr(part, "shards_weights", False)
            else None
        )
        if refusal is not None:
            raise ConfigError(refusal, code="unsupported-combination")


_ALGORITHM = ("keep", "advantages", "loss_weights", "loss")
_KERNEL = ("cu_seqlens", "max_seqlen", "lengths", "scale", "window", "mask")


def check_own_algorithm(run: GRPORun) -> None:
    """Check the signatures of an algorithm, an advantage estimator and an objective of the user's, before
    anything is loaded or sampled for them.

    Raises:
        ConfigError: there is no such part, or it cannot be called as it will be.
    """
    for field, given, named in (
        ("name", ("config",), ("max_tokens",)),
        ("advantage", ("rewards", "mask"), ()),
        ("objective", ("terms", "config"), ()),
    ):
        if ":" in (name := getattr(run.algorithm, field) or ""):
            what = f"algorithm.{field} = {name!r}"
            part = load_object(name, what=what)
            if field == "name":
                require_members(part, _ALGORITHM, what=what)
            require_call(part, *given, named=named, what=what)


def check_own_attention(name: str) -> None:
    """Check the signature of an attention kernel of the user's; others are left alone.

    Raises:
        ConfigError: there is no such kernel, or it cannot be called as it will be.
    """
    if ":" in name and not name.startswith("hf:"):
        what = f"train.attention = {name!r}"
        require_call(load_object(name, what=what), "q", "k", "v", named=_KERNEL, what=what)
