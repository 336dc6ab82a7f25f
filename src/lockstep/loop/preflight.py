"""Checks that need no torch, no model and no folder: they run before any of these is loaded or made."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.config.batch import RewardRoleConfig
from lockstep.config.data import DataConfig
from lockstep.config.declarations import backends
from lockstep.config.ppo import POLICY, PPORun
from lockstep.config.run import GRPORun, OfflineRun, RunConfig
from lockstep.data.generated import IdRows, reasoning_gym_dataset
from lockstep.data.sources import check_source
from lockstep.engine import ENGINES
from lockstep.errors import ConfigError, DataError, ModelError, nearest, together, unknown_name
from lockstep.loop.checks import Check, faults, reward_checks, row_checks
from lockstep.loop.own_parts import check_own_algorithm, check_own_attention, check_own_backend
from lockstep.models.shape_table import PREFIX, SHAPES
from lockstep.observe.files import path_problem
from lockstep.observe.metrics import check_wandb
from lockstep.observe.run_dir import check_free, finished
from lockstep.registry import load_object, require_call, require_members

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
"""What a class must have before one is made; see lockstep.protocols.TrainBackend, which needs torch."""


def preflight(
    run: RunConfig,
    *,
    resume: Path | None,
    checkpoint: int | None,
    restart: bool = False,
    own_rewards: bool = False,
) -> dict[str, Any] | None:
    """Check a run before anything is loaded. Returns the summary of a run that is already finished, and so
    has nothing to resume; else None.

    Args:
        own_rewards: Python callables take the place of `run.rewards`, which are not looked at.

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
    if own_rewards and isinstance(run, GRPORun):
        run = run.model_copy(update={"rewards": ()})
    found = faults(_checks(run))
    if found:
        raise together(found)
    return None


def _checks(run: RunConfig) -> Iterator[Check]:
    """Every fault that can be known by now has a check of its own: all are reported together."""
    yield partial(check_model, run.model.name)
    if isinstance(run, PPORun) and run.value.name != POLICY:
        yield partial(check_model, run.value.name, setting="value.name")
    if isinstance(run, GRPORun):
        yield partial(_check_engine, run)
        yield partial(check_own_algorithm, run)
        if run.reward_model is not None:
            yield partial(_check_reward_models, run, run.reward_model)
        yield from reward_checks(run)
    yield partial(check_own_attention, run.train.attention)
    yield partial(_check_backend, run)
    yield partial(_check_packages, run)
    for section, config in _data(run):
        yield partial(_check_data, section, config, run)
    yield from row_checks(run)


def _check_engine(run: GRPORun) -> None:
    if ":" in run.engine.name:
        from lockstep.engine.admission import load_engine_class  # needs torch, as their engine does

        load_engine_class(run.engine.name)
    elif run.engine.name not in (*ENGINES, "auto"):
        raise ConfigError(
            unknown_name(ENGINES.kind, run.engine.name, [*ENGINES, "auto"]),
            code="unknown-name",
            setting="engine.name",
        )


def _check_backend(run: RunConfig) -> None:
    if ":" in run.train.backend:
        what = f"train.backend = {run.train.backend!r}"
        members = [*BACKEND_CLASS_MEMBERS, *(["rest"] if isinstance(run, GRPORun) and run.sleep else [])]
        backend = load_object(run.train.backend, what=what)
        require_members(backend, members, what=what)
        require_call(backend, "config", named=BACKEND_ARGUMENTS, what=what)
        check_own_backend(run)


def _check_packages(run: RunConfig) -> None:
    """Check that optional packages which a setting needs are installed; imports none of them."""
    if run.log.wandb:
        check_wandb()
    train = run.train
    needed = {
        "peft": ("model.lora", run.model.lora is not None, "pip install lockstep-rl[lora]"),
        "torchao": ("train.optimizer = 'adamw8bit'", train.optimizer == "adamw8bit", "pip install torchao"),
    }
    if train.backend in backends():
        for package, fix in backends()[train.backend].needs.items():
            needed[package] = (f"train.backend = {train.backend!r}", True, fix)
    for package, (setting, used, fix) in needed.items():
        if used and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"missing-package: {setting} needs the package {package}, which is not installed: {fix}",
                setting=setting,
            )


def _data(run: RunConfig) -> Iterable[tuple[str, DataConfig]]:
    assert isinstance(run, GRPORun | OfflineRun)
    yield "data", run.data
    if run.eval_data is not None:
        yield "eval_data", run.eval_data


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
        what = "holds no config.json" if folder.is_dir() else "does not exist"
        raise ModelError(
            f"wrong-kind-of-file: {setting} = {name!r}: this folder {what}; set a folder that holds a saved "
            "model",
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
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"runs there: {', '.join(there[:10])}"
    raise ModelError(
        (f"{setting} = " if setting else "")
        + f"{name!r}: there is no such run directory (looked from {str(Path.cwd())!r}); "
        + (hint if there else "name a run directory, a model folder, or a model of the hub"),
        code="no-such-file",
        name=name,
    )


def _check_reward_models(run: GRPORun, config: RewardRoleConfig) -> None:
    for number, name in enumerate((config.name, *config.others)):
        setting = "reward_model.others" if number else "reward_model.name"
        check_model(name, setting=setting)
        if name.startswith(PREFIX):
            raise ModelError(
                f"unsupported-combination: {setting} = {name!r}: a shape has no weights that score; name a "
                "folder or a hub model, such as RUN_DIR/export of `lockstep train rm`",
                setting=setting,
            )
    if run.data.source == "ids":
        raise ConfigError(
            f"unsupported-combination: reward_model.name = {config.name!r} with data.source = 'ids': a "
            "reward model reads text, and these prompts have none; give prompts as text, or leave "
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
    if isinstance(run, OfflineRun) and config.generated:
        raise ConfigError(
            f"unsupported-combination: {section}.source = {config.source!r} has prompts only; "
            f"{run.kind.upper()} needs a file, a folder or a hub set",
            setting=f"{section}.source",
        )
    if run.model.name.startswith(PREFIX) and config.source != "ids":
        raise ConfigError(
            f"no-tokenizer: {section}.source = {config.source!r} is text, but model.name = "
            f"{run.model.name!r} has no tokenizer; set data.source = 'ids' with rewards = [{{name = "
            "'ids'}], or choose a model with a tokenizer",
            setting=f"{section}.source",
        )
