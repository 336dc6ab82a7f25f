"""Our config and sampling parameters as SGLang's arguments. Written against SGLang 0.5.16 to 0.5.23."""

from __future__ import annotations

from typing import Any

from lockstep.config.engine import EngineConfig
from lockstep.engine.spec import EngineSpec
from lockstep.engine.translate import (
    check_common,
    checked_options,
    command_flags,
    memory_fraction,
    penalties_of,
    refusals,
    stop_ids,
)
from lockstep.errors import ConfigError
from lockstep.schema.rollout import SamplingParams

ENGINE = "sglang"
LOWEST_TEMPERATURE = 1e-6
"""SGLang is greedy below."""
SPARE_CONTEXT = 8
"""Positions that SGLang gets beyond ours: it ends samples a few tokens before its context does, and refuses
prompts that reach within 6 of it. The engine's client keeps samples within ours."""
EAGER = ("disable_decode_cuda_graph", "disable_prefill_cuda_graph", "disable_cuda_graph")
"""SGLang's command line has the first two; older ones the third. Its constructor takes the third."""

_ALIASES = {
    "model": "model_path",
    "tensor_parallel_size": "tp_size",
    "tp": "tp_size",
    "data_parallel_size": "dp_size",
    "dp": "dp_size",
    "mem_fraction": "mem_fraction_static",
    "stream_output": "incremental_streaming_output",
}
_REFUSED = {
    "allow_auto_truncate": "a prompt that is too long would be cut without a word",
    "preferred_sampling_params": "every sampling parameter is sent with each request",
    "dp_size": "set engine.replicas",
    "pp_size": "weights are sent to the ranks of engine.tp only",
    "served_model_name": "the server is asked for the model by its folder",
    "quantization": "trained weights would be rounded on their way; set model.dtype",
    "api_key": "a started server gets a token of its own",
    "admin_api_key": "a started server gets a token of its own",
    "config": "it holds the server's token; give its settings as engine.options",
    "rl_on_policy_target": "its logprobs come from logits rounded to bfloat16; set engine.batch_invariant",
    "disable_decode_cuda_graph": "set engine.eager",
    "disable_prefill_cuda_graph": "set engine.eager",
    "disable_cuda_graph": "set engine.eager",
}


def sglang_constructor(config: EngineConfig, spec: EngineSpec) -> dict[str, Any]:
    """Fields of sglang's ServerArgs.

    Raises:
        ConfigError: SGLang cannot do this here, or an option overrides what is set here.
    """
    own = _own_arguments(config, spec) | {"disable_cuda_graph": config.eager}
    return own | _options(config, own)


def sglang_server_command(
    config: EngineConfig, spec: EngineSpec, *, port: int, flags: frozenset[str]
) -> list[str]:
    """What comes after the interpreter to start SGLang's own server on this machine only.

    Args:
        flags: what this version's `launch_server --help` lists ("--tp-size", ...): some have changed their
            names.

    Raises:
        ConfigError: as sglang_constructor, or a flag that this version does not know.
    """
    own = _own_arguments(config, spec) | {"host": "127.0.0.1", "port": port}
    eager = dict.fromkeys(_eager_flags(flags), True) if config.eager else {}
    off = [name for name, value in config.options.items() if value is False]
    if off:
        raise ConfigError(
            f"no-effect: engine.options.{off[0]} = false: SGLang's command line can only turn switches on; "
            "leave it out",
            setting=f"engine.options.{off[0]}",
        )
    command = command_flags(own | eager | _options(config, own), no_flags=False)
    unknown = [flag for flag in command if flag.startswith("--") and flag not in flags]
    if unknown:
        raise ConfigError(
            f"unknown-setting: this version of SGLang does not know {', '.join(unknown)}; leave it out of "
            "engine.options, or use a version from 0.5.16 to 0.5.23",
            setting="engine.options",
        )
    return ["-m", "sglang.launch_server", *command]


def _eager_flags(flags: frozenset[str]) -> tuple[str, ...]:
    new, old = EAGER[:2], EAGER[2:]
    return new if f"--{new[0].replace('_', '-')}" in flags else old


def _own_arguments(config: EngineConfig, spec: EngineSpec) -> dict[str, Any]:
    if spec.device == "cpu" and config.batch_invariant:
        raise ConfigError(
            "missing-device: engine.batch_invariant = true needs a GPU: SGLang's kernels for it are CUDA's"
        )
    if spec.device == "cpu" and config.sleep:
        raise ConfigError(
            "missing-device: engine.sleep = true needs a GPU: SGLang gives back CUDA memory only"
        )
    arguments: dict[str, Any] = {
        "model_path": str(spec.folder),
        "skip_tokenizer_init": True,
        "dtype": spec.dtype,
        "random_seed": spec.seed,
        "context_length": spec.max_model_len + SPARE_CONTEXT,
        "max_running_requests": config.max_batch,
        "tp_size": config.tp,
        "disable_radix_cache": not config.prefix_caching,
        "enable_memory_saver": config.sleep,
        "enable_deterministic_inference": config.batch_invariant,
        "sampling_defaults": "openai",
        "load_format": "dummy" if spec.weights == "pushed" else "auto",
        "trust_remote_code": False,
        "skip_server_warmup": True,
        "incremental_streaming_output": True,
    }
    fraction = memory_fraction(config, spec)
    if fraction is not None:
        arguments["mem_fraction_static"] = fraction
    return arguments


def _options(config: EngineConfig, own: dict[str, Any]) -> dict[str, Any]:
    return checked_options(config, own, aliases=_ALIASES, refused=_REFUSED)


def sglang_environment(config: EngineConfig, spec: EngineSpec) -> dict[str, str]:
    """Variables of a started server. `config.env` is not among them."""
    return {
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",  # logprobs after temperature, as ours
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # of the spare positions, which stay unused
        "HF_HUB_OFFLINE": "1",  # the model is a folder
    }


def sglang_sampling(
    params: SamplingParams, *, seed: int, eos_token_ids: tuple[int, ...], seeded: bool
) -> dict[str, Any]:
    """`sampling_params` of one sample, as plain JSON.

    `stop` and `keep_stop` are not in it: SGLang runs without a tokenizer, and the engine's client finds stop
    strings in the ids that stream in, then aborts the sample.

    Args:
        seeded: whether the server runs its deterministic mode, the only one in which it reads seeds; without
            one there every request would get the same seed, 42.

    Raises:
        EngineError: a field that SGLang would change or ignore.
    """
    _check(params, seeded=seeded)
    return {
        "n": 1,
        "max_new_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "min_new_tokens": 0,
        "stop_token_ids": stop_ids(params, eos_token_ids),
        "ignore_eos": params.ignore_eos,  # when on, it ignores stop_token_ids as well
    } | ({"sampling_seed": seed} if seeded else {})


def _check(params: SamplingParams, *, seeded: bool) -> None:
    check_common(ENGINE, params)
    refuse = refusals(ENGINE, params)
    if 0.0 < params.temperature < LOWEST_TEMPERATURE:
        raise refuse("temperature", "it would be greedy", "set 0, or a higher temperature")
    for name in penalties_of(params):
        why = "its logprobs come after penalties"
        if name == "repetition_penalty":
            why += ", and it counts the completion's tokens without the prompt's"
        raise refuse(name, why, "turn it off")
    if params.min_tokens:
        raise refuse(
            "min_tokens",
            "without a tokenizer it has no such thing, and with one its logprobs come after stop ids were "
            "suppressed",
            "set it to 0",
        )
    if params.min_p and seeded and params.temperature:
        raise refuse(
            "min_p",
            "with seeds its scheduler stops at an assertion and takes the server with it",
            "set min_p = 0, or engine.unseeded = true without engine.batch_invariant",
        )
    if params.ignore_eos and params.stop_token_ids:
        raise refuse(
            "ignore_eos",
            f"it then ignores stop_token_ids = {list(params.stop_token_ids)} as well",
            "set ignore_eos = false, or leave stop_token_ids out",
        )
