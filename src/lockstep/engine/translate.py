"""Shared parts of the translations to vLLM and SGLang."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lockstep.config.engine import EngineConfig
from lockstep.engine.spec import EngineSpec
from lockstep.errors import ConfigError, EngineError
from lockstep.schema.rollout import SamplingParams

SHARED_MEMORY_FRACTION = 0.45
"""Fraction of a GPU that a trainer uses too: the rest is for weights, gradients and optimizer state."""


def memory_fraction(config: EngineConfig, spec: EngineSpec) -> float | None:
    """Fraction of its GPU that the engine may use; None: its own default."""
    if config.memory_fraction is not None:
        return config.memory_fraction
    return SHARED_MEMORY_FRACTION if spec.shares_device and spec.device != "cpu" else None


def checked_options(
    config: EngineConfig, own: Mapping[str, Any], *, aliases: Mapping[str, str], refused: Mapping[str, str]
) -> dict[str, Any]:
    """`config.options` under the engine's field names.

    Args:
        own: fields that are set already.
        aliases: other spellings of the engine for fields in `own`.
        refused: option -> why it may not be set, and what to set instead.

    Raises:
        ConfigError: an option that we set ourselves, or that would change what a request means.
    """
    checked = {}
    for written, value in config.options.items():
        name = written.lstrip("-").replace("-", "_")
        name = aliases.get(name, name)
        if name in refused:
            raise ConfigError(
                f"unsupported-combination: engine.options.{written} is not available: {refused[name]}",
                setting=f"engine.options.{written}",
            )
        if name in own:
            raise ConfigError(
                f"contradiction: engine.options.{written} = {value!r} would override what Lockstep sets "
                f"itself ({name} = {own[name]!r}); leave it out, and use the settings under [engine] and "
                "[model]",
                setting=f"engine.options.{written}",
            )
        if name in checked:
            raise ConfigError(
                f"duplicate: engine.options names {name} twice ({written!r} is another spelling of it)",
                setting=f"engine.options.{name}",
            )
        checked[name] = value
    return checked


def command_flags(arguments: Mapping[str, Any], *, no_flags: bool) -> list[str]:
    """`--name value` for each argument; a switch is `--name`, or `--no-name` where the engine knows it.

    Args:
        no_flags: whether a switch can be turned off with --no-NAME; else False is left out.
    """
    flags: list[str] = []
    for name, value in arguments.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            flags.append(flag)
        elif value is False:
            flags += [f"--no-{flag[2:]}"] if no_flags else []
        elif value is not None:
            flags += [flag, str(value)]
    return flags


def stop_ids(params: SamplingParams, eos_token_ids: tuple[int, ...]) -> list[int]:
    """Every id that ends a sample, each once."""
    eos = () if params.ignore_eos else eos_token_ids
    return list(dict.fromkeys((*params.stop_token_ids, *eos)))


def refusals(engine: str, params: SamplingParams) -> Callable[..., EngineError]:
    """Return what makes the error for a field of `params` that `engine` cannot honour: of its name, why, what
    to do instead, and `rule`: what it goes against, where several rules are about one field."""

    def refuse(field: str, why: str, instead: str, *, rule: str = "") -> EngineError:
        value = getattr(params, field)
        return EngineError(
            f"unsupported-sampling: engine {engine} cannot honour sampling.{field} = {value!r}: {why}; "
            f"{instead}",
            setting=f"sampling.{field}",
            value=value,
            rule=rule,
        )

    return refuse


def check_common(engine: str, params: SamplingParams) -> None:
    """Raises EngineError for values that vLLM and SGLang alike refuse or change."""
    refuse = refusals(engine, params)
    for name in ("presence_penalty", "frequency_penalty"):
        if not -2.0 <= getattr(params, name) <= 2.0:
            raise refuse(name, "its range is [-2, 2]", f"set {name} within it", rule="range")
    if params.logprob_kind != "temperature_scaled":
        raise refuse("logprob_kind", "only one kind is known", "set 'temperature_scaled'")


def penalties_of(params: SamplingParams) -> list[str]:
    """The penalties that are on."""
    off = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    return [name for name, value in off.items() if getattr(params, name) != value]


def truncations_of(params: SamplingParams) -> list[str]:
    """The truncations that are on and have an effect: at temperature 0 none has."""
    if params.temperature == 0.0:
        return []
    off = {"top_p": 1.0, "top_k": -1, "min_p": 0.0}
    return [name for name, value in off.items() if getattr(params, name) != value]
