"""The problems of a config in words: one line per problem, each with its dotted path and a way out."""

from __future__ import annotations

import re
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from lockstep.errors import ConfigError, LockstepError, names_secret, nearest
from lockstep.observe.text import printable

DEPTH = 64
"""Deepest nesting of tables and lists."""
EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a string",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a table {key = value}",
    "model_type": "a table of settings",
    "model_attributes_type": "a table of settings",
}

_NAMED = re.compile(r"[a-z_][\w.\[\]]*(?= = |: | is | has | names )")
"""The setting that the message of a table's own check begins with: `lam = 1 ...`, `url is not ...`."""


@dataclass(frozen=True)
class Problem:
    """A wrong setting: the line for the user, and the code and fields of an error."""

    text: str
    data: Mapping[str, Any]

    def __str__(self) -> str:
        return self.text


def refusal(text: str, problems: Sequence[Problem]) -> ConfigError:
    """Return the error about all of `problems`, with the code and fields of the first; of several, the field
    `problems` has each one's."""
    more = {"problems": [problem.data for problem in problems]} if len(problems) > 1 else {}
    fields: dict[str, Any] = {**problems[0].data, **more}
    return ConfigError(text + "\n  ".join(map(str, problems)), **fields)


def unusable(value: Any, path: str = "") -> Iterator[Problem]:
    """Yield the problems of values that no setting can have, whatever its name.

    These are integers of more than 64 bits (TOML has none either), and text that UTF-8 or a file name cannot
    hold. Some of them could not even be printed.
    """
    if (why := _unusable(value)) is not None:
        yield Problem(f"{path}: {why}", {"code": "out-of-range", "setting": path})
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from unusable(key, f"a key of {path}" if path else "a key")
            yield from unusable(item, f"{path}.{printable(key)}".lstrip("."))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from unusable(item, f"{path}[{number}]")


def _unusable(value: Any) -> str | None:
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return f"an integer of {value.bit_length()} bits; the maximum is 64 bits"
    if isinstance(value, str) and "\0" in value:
        return f"{value[:80]!r} contains a NUL character; remove it"
    if isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value):
        return f"{value[:80]!r} contains half of a surrogate pair, which is not valid text; remove it"
    return None


def unknown_keys(values: Mapping[str, Any], model: type[BaseModel]) -> tuple[list[Problem], dict[str, Any]]:
    """Return the problems of keys that `model` has no field for, and `values` without these keys."""
    sections = tables(model)
    problems: list[Problem] = []
    return problems, _prune(values, model, path=(), sections=sections, problems=problems)


def explain(error: ValidationError, model: type[BaseModel]) -> list[Problem]:
    """Return one problem per place that pydantic complains about."""
    by_path: dict[str, list[Any]] = {}
    for detail in error.errors(include_url=False):
        path = ".".join(_path(detail["loc"], model))
        by_path.setdefault(path, []).append(detail)
    found = [(path, each) for path, details in by_path.items() for each in _apart(details)]
    return [Problem(_line(path, details), data_of(path, details[0])) for path, details in found]


def _apart(details: list[Any]) -> list[list[Any]]:
    """Return pydantic's errors about one place, with several errors of ours in one taken apart."""
    cause = details[0].get("ctx", {}).get("error")
    if not isinstance(cause, LockstepError) or not cause.parts:
        return [details]
    return [[{**details[0], "ctx": {"error": part}}] for part in cause.parts]


def first_data(error: ValidationError) -> dict[str, Any]:
    """Return the code and the fields of the first problem of a pydantic model."""
    first = error.errors(include_url=False)[0]
    return data_of(".".join(map(str, first["loc"])), first)


def data_of(path: str, detail: Any) -> dict[str, Any]:
    """Return the code and the fields of one problem of pydantic's at `path`."""
    kind, cause = detail["type"], detail.get("ctx", {}).get("error")
    if isinstance(cause, LockstepError):
        named = _NAMED.match(str(cause))
        own = str(cause.fields.get("setting", named[0] if named else ""))
        inside = own and (not path or own == path or own.startswith(f"{path}."))
        parent, _, last = path.rpartition(".")
        if re.split(r"[.\[]", own)[0] == last:  # a field's own check names it
            path = parent
        setting = own if inside else f"{path}.{own}".strip(".")
        return cause.data | ({"setting": setting} if setting else {})
    return {"code": _code(kind), "setting": path}


def _code(kind: str) -> str:
    """The code of a type of pydantic's errors."""
    known = {
        "missing": "missing-setting",
        "literal_error": "unknown-name",
        "extra_forbidden": "unknown-setting",
    }
    if kind in known:
        return known[kind]
    if kind.startswith(("greater", "less", "finite")) or "too_" in kind:
        return "out-of-range"
    return "wrong-type" if kind.endswith("_type") or kind.startswith("int_") else "wrong-format"


def _line(path: str, details: list[Any]) -> str:
    first, path = details[0], printable(path)
    if first["type"] in ("value_error", "assertion_error"):
        text = str(first["ctx"]["error"])
        return f"{path}: {text}" if path else text
    if first["type"] == "missing":
        return f"{path} is required; set it"
    value = "..." if names_secret(path.rpartition(".")[2]) else first["input"]
    expected = " or ".join(dict.fromkeys(_expected(detail) for detail in details))
    fix = "; leave it out for the default" if value == "auto" else ""
    return f"{path} = {value!r}: expected {expected}{fix}"


def _expected(detail: Any) -> str:
    if detail["type"] in EXPECTED:
        return EXPECTED[detail["type"]]
    if detail["type"] == "literal_error":
        expected = str(detail["ctx"]["expected"])
        near = nearest(str(detail["input"]), re.findall(r"'([^']*)'", expected), most=1)
        return f"one of {expected}" + (f" (did you mean {near[0]!r}?)" if near else "")
    # So begin the messages of pydantic 2; one that begins otherwise is shown whole.
    text = str(detail["msg"]).removeprefix("Input should be ").removeprefix("Input should ")
    return f"a number {text}" if text.startswith(("greater than ", "less than ")) else text


def _prune(
    values: Mapping[str, Any],
    model: type[BaseModel],
    *,
    path: tuple[str, ...],
    sections: Mapping[str, type[BaseModel]],
    problems: list[Problem],
) -> dict[str, Any]:
    known: dict[str, Any] = {}
    for key, value in values.items():
        if key not in model.model_fields:
            text = _unknown(key, value, model, path=path, sections=sections)
            data = {"code": "unknown-setting", "setting": printable(".".join((*path, key)))}
            problems.append(Problem(text, data))
            continue
        nested, many = model_of(model.model_fields[key].annotation)
        here = (*path, key)
        if nested is not None and many and isinstance(value, list):
            known[key] = [
                _prune(v, nested, path=(*path, f"{key}[{i}]"), sections=sections, problems=problems)
                if isinstance(v, Mapping)
                else v
                for i, v in enumerate(value)
            ]
        elif nested is not None and isinstance(value, Mapping):
            known[key] = _prune(value, nested, path=here, sections=sections, problems=problems)
        else:
            known[key] = value
    return known


def _unknown(
    key: str,
    value: Any,
    model: type[BaseModel],
    *,
    path: tuple[str, ...],
    sections: Mapping[str, type[BaseModel]],
) -> str:
    here = printable(".".join((*path, key)))
    assigned = "" if isinstance(value, Mapping) or names_secret(key) else f" = {value!r}"
    elsewhere = [
        f"{section}.{key}".lstrip(".") for section, other in sections.items() if key in other.model_fields
    ]
    if elsewhere:
        return f"{here}{assigned}: unknown key in this table; {key} belongs to {' or '.join(elsewhere)}"
    if near := near_settings(".".join((*path, key)), sections):
        return f"{here}{assigned}: unknown key; did you mean {' or '.join(near)}?"
    return f"{here}{assigned}: unknown key; known keys: {', '.join(sorted(model.model_fields))}"


def near_settings(name: str, sections: Mapping[str, type[BaseModel]]) -> list[str]:
    """Return the settings that an unknown dotted name may mean: a slip of one in the same table, a name of
    TRL, OpenRLHF or verl (lockstep.config.problems), a slip of one in any table.

    Args:
        sections: the tables of settings by their dotted paths, see `tables`.
    """
    section, _, key = name.rpartition(".")
    model = sections.get(re.sub(r"\[\d+\]", "[]", section))
    if model is not None and (close := nearest(key, model.model_fields)):
        return [f"{section}.{each}".lstrip(".") for each in close]
    everywhere = {
        f"{where}.{field}".lstrip("."): field
        for where, other in sections.items()
        for field in other.model_fields
    }
    if known := [each for each in ours(name) if each in everywhere]:
        return known
    if key in everywhere.values():
        return [dotted for dotted, field in everywhere.items() if field == key]
    close = nearest(key, everywhere.values())
    return [dotted for each in close for dotted, field in everywhere.items() if field == each][:6]


def tables(model: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """Return every table of settings of a config by its dotted path, the config itself as ''."""
    return dict(_sections(model))


def _sections(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield every table of settings by its dotted path, the run itself as ''."""
    yield prefix, model
    for name, field in model.model_fields.items():
        nested, many = model_of(field.annotation)
        if nested is not None:
            yield from _sections(nested, f"{prefix}.{name}".lstrip(".") + ("[]" if many else ""))


def model_of(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """Return the config model inside `Model`, `Model | None` or `tuple[Model, ...]`, and whether there may be
    many."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    if get_origin(annotation) in (Union, types.UnionType, tuple, list):
        many = get_origin(annotation) in (tuple, list)
        for argument in get_args(annotation):
            model, nested_many = model_of(argument)
            if model is not None:
                return model, many or nested_many
    return None, False


def _path(loc: tuple[int | str, ...], model: type[BaseModel]) -> list[str]:
    """Return the user's path within pydantic's, which also names the branch of a union that it tried."""
    path: list[str] = []
    current: type[BaseModel] | None = model
    free = False  # True if the next part is a key of a table without fields, such as rewards.kwargs
    for part in loc:
        if isinstance(part, int) and path:
            path[-1] += f"[{part}]"
        elif current is not None and part in current.model_fields:
            path.append(str(part))
            annotation = current.model_fields[str(part)].annotation
            current, _ = model_of(annotation)
            free = get_origin(annotation) is dict
        elif free:
            path.append(str(part))
            free = False
        elif current is None:
            break
    return path


# The settings of TRL, OpenRLHF and verl by their names there, for the hints about unknown settings.
#
# docs/how-to/coming-from.md is the table for readers, with the conditions; a test holds the two together.


OTHER_NAMES: dict[str, tuple[str, ...]] = {
    # TRL
    "num_generations": ("rollout.group_size",),
    "generation_batch_size": ("rollout.prompts_per_step", "rollout.group_size"),
    "steps_per_generation": ("train.minibatches",),
    "gradient_accumulation_steps": ("train.minibatches",),
    "per_device_train_batch_size": ("train.token_budget",),
    "num_iterations": ("train.epochs_per_batch",),
    "max_completion_length": ("rollout.sampling.max_tokens",),
    "reward_funcs": ("rewards",),
    "loss_type": ("algorithm.aggregation", "algorithm.name"),
    "scale_rewards": ("algorithm.advantage",),
    "importance_sampling_level": ("algorithm.ratio",),
    "epsilon": ("algorithm.clip_low",),
    "epsilon_high": ("algorithm.clip_high",),
    "delta": ("algorithm.dual_clip",),
    "beta": ("algorithm.kl.coef", "algorithm.beta"),
    "mask_truncated_completions": ("algorithm.mask_truncated",),
    "use_vllm": ("engine.name",),
    "vllm_mode": ("engine.name",),
    "vllm_gpu_memory_utilization": ("engine.memory_fraction",),
    "vllm_tensor_parallel_size": ("engine.tp",),
    "vllm_enable_sleep_mode": ("engine.offload",),
    "vllm_max_model_length": ("engine.max_model_len",),
    "learning_rate": ("train.lr",),
    "lr_scheduler_type": ("train.schedule",),
    "max_steps": ("steps",),
    "num_train_epochs": ("epochs",),
    "push_to_hub": ("checkpoint.push_to_hub",),
    "hub_model_id": ("checkpoint.push_to_hub",),
    "hub_private_repo": ("checkpoint.hub_private",),
    "save_steps": ("checkpoint.every",),
    "save_total_limit": ("checkpoint.keep_last",),
    "eval_steps": ("eval.every",),
    "gradient_checkpointing": ("train.activation_checkpointing",),
    "report_to": ("log.tensorboard", "log.wandb"),
    "assistant_only_loss": ("data.train_on",),
    "simpo_gamma": ("algorithm.margin",),
    "center_rewards_coefficient": ("algorithm.center_coef",),
    "sapo_temperature_pos": ("algorithm.tau_pos",),
    "sapo_temperature_neg": ("algorithm.tau_neg",),
    # OpenRLHF
    "actor.model_name_or_path": ("model.name",),
    "critic.model_name_or_path": ("value.name",),
    "reward.model_name_or_path": ("reward_model.name",),
    "critic.adam.lr": ("value.lr",),
    "critic.value_clip": ("value.clip",),
    "critic.freezing_steps": ("value.warmup_batches",),
    "algo.advantage.estimator": ("algorithm.advantage", "algorithm.name"),
    "algo.advantage.gamma": ("algorithm.gamma",),
    "algo.advantage.lambd": ("algorithm.lam",),
    "rollout.batch_size": ("rollout.prompts_per_step",),
    "rollout.n_samples_per_prompt": ("rollout.group_size",),
    "train.batch_size": ("train.minibatches",),
    "train.micro_batch_size": ("train.token_budget",),
    "train.max_tokens_per_gpu": ("train.token_budget",),
    "train.max_epochs": ("train.epochs_per_batch",),
    "train.num_episodes": ("epochs",),
    "data.max_samples": ("data.size",),
    "data.prompt_dataset": ("data.source",),
    "data.prompt_split": ("data.split",),
    "data.input_key": ("data.prompt_column",),
    "data.label_key": ("data.answer_column",),
    "data.input_template": ("data.prompt_template",),
    "data.max_len": ("data.max_prompt_tokens", "rollout.sampling.max_tokens"),
    "rollout.max_new_tokens": ("rollout.sampling.max_tokens",),
    "actor.eps_clip": ("algorithm.clip_low",),
    "actor.eps_clip_low_high": ("algorithm.clip_low", "algorithm.clip_high"),
    "actor.dual_clip": ("algorithm.dual_clip",),
    "actor.policy_loss_type": ("algorithm.ratio",),
    "algo.kl.init_coef": ("algorithm.kl.coef",),
    "algo.dynamic_filtering_enable": ("algorithm.dynamic_sampling",),
    "reward.overlong_buffer_len": ("algorithm.overlong.buffer_tokens",),
    "ds.zero_stage": ("train.zero_stage",),
    "ds.ring_attn_size": ("train.ring",),
    "ds.tensor_parallel_size": ("train.tp",),
    "ds.adam_offload": ("train.optimizer_device", "value.optimizer_device"),
    "ds.lora.rank": ("model.lora.rank",),
    "ds.lora.alpha": ("model.lora.alpha",),
    "vllm.num_engines": ("engine.replicas",),
    "vllm.tensor_parallel_size": ("engine.tp",),
    "vllm.gpu_memory_utilization": ("engine.memory_fraction",),
    "vllm.enable_sleep": ("engine.offload",),
    "vllm.enforce_eager": ("engine.eager",),
    "vllm.enable_prefix_caching": ("engine.prefix_caching",),
    "actor.gradient_checkpointing_enable": ("train.activation_checkpointing",),
    "algo.kl.use_loss": ("algorithm.kl.estimator",),
    "is_correction_threshold": ("algorithm.rollout_correction.low", "algorithm.rollout_correction.high"),
    "reward.clip_range": ("algorithm.reward_clip",),
    "reward.normalize_enable": ("algorithm.normalize_rewards",),
    "ds.packing_samples": ("train.layout",),
    "eval.steps": ("eval.every",),
    "logger.wandb.key": ("log.wandb",),
    "logger.tensorboard_dir": ("log.tensorboard",),
    "critic.gradient_checkpointing_enable": ("value.activation_checkpointing",),
    "ckpt.save_steps": ("checkpoint.every",),
    "ckpt.max_num": ("checkpoint.keep_last",),
    # verl
    "actor_rollout_ref.model.path": ("model.name",),
    "actor_rollout_ref.actor.loss_agg_mode": ("algorithm.aggregation",),
    "actor_rollout_ref.actor.clip_ratio_c": ("algorithm.dual_clip",),
    "actor_rollout_ref.actor.clip_ratio_low": ("algorithm.clip_low",),
    "clip_ratio_high": ("algorithm.clip_high",),
    "clip_ratio": ("algorithm.clip_low", "algorithm.clip_high"),
    "algorithm.adv_estimator": ("algorithm.advantage", "algorithm.name"),
    "critic.model.path": ("value.name",),
    "critic.optim.lr": ("value.lr",),
    "critic.cliprange_value": ("value.clip",),
    "critic.ppo_epochs": ("value.epochs_per_batch",),
    "critic.ppo_mini_batch_size": ("value.minibatches",),
    "trainer.critic_warmup": ("value.warmup_batches",),
    "data.train_files": ("data.source",),
    "data.val_files": ("eval_data.source",),
    "data.prompt_key": ("data.prompt_column",),
    "data.train_batch_size": ("rollout.prompts_per_step",),
    "actor_rollout_ref.rollout.n": ("rollout.group_size",),
    "actor_rollout_ref.actor.ppo_mini_batch_size": ("train.minibatches",),
    "ppo_micro_batch_size_per_gpu": ("train.token_budget",),
    "use_dynamic_bsz": ("train.token_budget",),
    "ppo_max_token_len_per_gpu": ("train.token_budget",),
    "actor_rollout_ref.actor.ppo_epochs": ("train.epochs_per_batch",),
    "data.max_prompt_length": ("data.max_prompt_tokens",),
    "data.max_response_length": ("rollout.sampling.max_tokens",),
    "data.filter_overlong_prompts": ("data.overlong_prompts",),
    "data.truncation": ("data.overlong_prompts",),
    "actor_rollout_ref.rollout.tensor_model_parallel_size": ("engine.tp",),
    "gpu_memory_utilization": ("engine.memory_fraction",),
    "enforce_eager": ("engine.eager",),
    "free_cache_engine": ("engine.offload",),
    "kl_loss_coef": ("algorithm.kl.coef",),
    "kl_loss_type": ("algorithm.kl.estimator",),
    "algorithm.kl_ctrl.kl_coef": ("algorithm.kl.place",),
    "algorithm.filter_groups.enable": ("algorithm.dynamic_sampling",),
    "actor_rollout_ref.actor.entropy_coeff": ("algorithm.entropy_coef",),
    "custom_reward_function.path": ("rewards",),
    "actor_rollout_ref.actor.optim.lr": ("train.lr",),
    "lr_warmup_steps": ("train.warmup_steps",),
    "warmup_style": ("train.schedule",),
    "actor_rollout_ref.actor.grad_clip": ("train.max_grad_norm",),
    "model.enable_gradient_checkpointing": ("train.activation_checkpointing",),
    "actor.fsdp_config.optimizer_offload": ("train.optimizer_device",),
    "actor.ulysses_sequence_parallel_size": ("train.ring",),
    "actor_rollout_ref.actor.strategy": ("train.backend",),
    "actor_rollout_ref.actor.policy_loss.loss_mode": ("algorithm.ratio", "algorithm.objective"),
    "critic.loss_agg_mode": ("value.aggregation",),
    "model.use_remove_padding": ("train.layout",),
    "trainer.total_epochs": ("epochs",),
    "trainer.save_freq": ("checkpoint.every",),
    "trainer.test_freq": ("eval.every",),
    "trainer.val_before_train": ("eval.before",),
    "trainer.logger": ("log.tensorboard", "log.wandb"),
}
"""A dotted name there -> the settings here that decide the same."""


def ours(name: str) -> list[str]:
    """Return the settings that a name of TRL, OpenRLHF or verl stands for; also its last parts alone, or
    under a table of ours, and with a letter wrong.

    Example:
        >>> ours("train.learning_rate"), ours("rollout.n")
        (['train.lr'], ['rollout.group_size'])
    """
    asked = name.strip("-").replace("-", "_").split(".")
    for shared in range(len(asked), 0, -1):
        tail = asked[-shared:]
        found = [names for other, names in OTHER_NAMES.items() if other.split(".")[-shared:] == tail]
        if found:
            return list(dict.fromkeys(each for names in found for each in names))
    last = nearest(asked[-1], (other.rpartition(".")[2] for other in OTHER_NAMES), most=1)
    return ours(last[0]) if last and len(asked[-1]) >= 6 else []
