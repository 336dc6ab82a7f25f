"""The settings that most runs change, by kind of run: what --help shows of `lockstep train` and `plan`."""

from __future__ import annotations

import inspect
import shutil
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from lockstep.config.load import toml_value
from lockstep.config.problems import model_of
from lockstep.config.run_config import RunConfig

_RL = (
    *("model.name", "model.lora.rank"),
    *("data.source", "data.prompt_column", "data.answer_column", "data.system_prompt"),
    *("data.max_prompt_tokens", "rewards", "steps", "epochs"),
    *("rollout.prompts_per_step", "rollout.group_size"),
    *("rollout.sampling.max_tokens", "rollout.sampling.temperature"),
    *("algorithm.name", "algorithm.kl.coef"),
    *("train.lr", "train.schedule", "train.minibatches", "train.backend", "engine.name"),
    *("eval.every", "checkpoint.every", "run_dir", "seed"),
)
_DOCUMENTS = (
    *("model.name", "model.lora.rank"),
    *("data.source", "data.prompt_column", "data.max_length", "data.overlong_documents", "eval_data.source"),
    *("steps", "epochs", "batch_size"),
    *("train.lr", "train.schedule", "train.warmup_steps", "train.weight_decay", "train.max_grad_norm"),
    *("train.backend", "train.token_budget", "model.dtype"),
    *("eval_every", "checkpoint.every", "log.wandb", "run_dir", "seed"),
)
COMMON: Mapping[str, tuple[str, ...]] = {
    "grpo": _RL,
    "ppo": tuple({"rollout.group_size": "value.lr", "algorithm.name": "value.name"}.get(n, n) for n in _RL),
    "sft": (*_DOCUMENTS, "data.messages_column", "data.completion_column"),
    "dpo": (*_DOCUMENTS, "algorithm.name", "algorithm.beta"),
    "rm": (*_DOCUMENTS, "data.chosen_column", "data.rejected_column"),
}
"""Kind of run -> 25 settings, by their dotted names."""


def short_help(run: RunConfig, own: Mapping[str, Any], *, prog: str, description: str) -> str:
    """Return the help text with the COMMON settings of the run's kind, their values in `run`, and the first
    sentence about each.

    Args:
        own: the flags that are no settings, by name, as annotations of a TypedDict.
    """
    settings = [_setting(run, name) for name in COMMON[run.kind]]
    flags = [(f"--{_flag(name, kind)}", _first(_argument(kind).help or "")) for name, kind in own.items()]
    return "\n".join(
        [
            f"usage: {prog} [FLAGS]\n",
            description,
            "\nsettings that most runs change, with their values:",
            *_lines(settings),
            "\nthe command's own flags:",
            *_lines([*flags, ("--help-all", "List every setting with its full description.")]),
        ]
    )


def _setting(run: RunConfig, name: str) -> tuple[str, str]:
    field, value = _look_up(type(run), run, name)
    shown = "" if value is None else f" [{_shown(value)}]"
    return f"--{name.replace('_', '-')}", f"{_first(field.description or '')}{shown}"


def _look_up(model: type[BaseModel], value: BaseModel | None, name: str) -> tuple[FieldInfo, Any]:
    """The setting's field, and its value; None also where its table is not set."""
    first, _, rest = name.partition(".")
    field, inner = model.model_fields[first], getattr(value, first, None)
    if not rest:
        return field, inner
    nested, _ = model_of(field.annotation)
    assert nested is not None, f"{name} is no setting"
    return _look_up(nested, inner, rest)


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(str(getattr(each, "name", each)) for each in value)
    return toml_value(value) if isinstance(value, bool) else str(value)


def _first(text: str) -> str:
    """The first sentence."""
    whole = " ".join(inspect.cleandoc(text).split())
    end = whole.find(". ")
    return whole if end < 0 else whole[: end + 1]


def _argument(kind: Any) -> Any:
    return get_args(kind)[1]


def _flag(name: str, kind: Any) -> str:
    return (_argument(kind).name or name).replace("_", "-")


def _lines(flags: list[tuple[str, str]]) -> Iterator[str]:
    width = max(len(flag) for flag, _ in flags) + 4
    total = max(shutil.get_terminal_size((100, 24)).columns, width + 30)
    for flag, text in flags:
        yield textwrap.fill(
            text,
            total,
            initial_indent=f"  {flag}".ljust(width),
            subsequent_indent=" " * width,
            break_on_hyphens=False,
            break_long_words=False,
        )
