"""Our config and sampling parameters as vLLM's arguments. Written against vLLM 0.26 to 0.33."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from lockstep.config.engine import EngineConfig
from lockstep.engine.spec import (
    EngineSpec,
    check_common,
    checked_options,
    command_flags,
    memory_fraction,
    penalties_of,
    refusals,
    stop_ids,
    truncations_of,
)
from lockstep.errors import ConfigError
from lockstep.schema.rollout import SamplingParams

ENGINE = "vllm"
LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]

WORKER_EXTENSION = "lockstep.wire.vllm_worker.LockstepWorker"
SERVER_TOKEN = "lockstep.wire.server_token.RequireToken"
LOWEST_TEMPERATURE = 0.01
"""vLLM raises anything between 0 and this to this, with a warning in its log."""
# vLLM refuses a request above it.
HIGHEST_TEMPERATURE = 2.0
CPU_BATCHED_TOKENS = 8192
"""Tokens of one step on a CPU, at least."""
CPU_KV_CACHE_BYTES = 1 << 30
"""vLLM's default on a CPU is 0.92 of all memory, and it does not start when that much is not free."""

_ALIASES = {"tokenizer_name": "tokenizer", "disable_log_requests": "enable_log_requests"}
_REFUSED = {
    "override_generation_config": "every sampling parameter is sent with each request",
    "data_parallel_size": "set engine.replicas",
    "pipeline_parallel_size": "weights are sent to the ranks of engine.tp only",
    "served_model_name": "the server is asked for the model by its folder",
    "quantization": "trained weights would be rounded on their way; set model.dtype",
    "max_logprobs": "only the sampled token's logprob is asked for",
    "weight_transfer_config": "weights go through Lockstep's own worker extension; set engine.transfer",
    "api_key": "a started server gets a token of its own",
    "distributed_executor_backend": "set engine.tp",
}


def vllm_logprobs_mode(temperatures: Iterable[float]) -> LogprobsMode:
    """The kind of vLLM logprobs, fixed at its start, that is ours at these temperatures.

    Its raw kind is log_softmax(logits): ours at temperatures 0 and 1. Its processed kind comes after
    temperature, penalties and truncation: ours at any temperature, as long as the other two are off.
    """
    return "raw_logprobs" if set(temperatures) <= {0.0, 1.0} else "processed_logprobs"


def vllm_constructor(config: EngineConfig, spec: EngineSpec) -> dict[str, Any]:
    """Keyword arguments of vllm.LLM.

    Raises:
        ConfigError: vLLM cannot do this here, or an option overrides what is set here.
    """
    own = _shared_arguments(config, spec) | {"disable_log_stats": False}
    return own | _options(config, own)


def vllm_server_command(config: EngineConfig, spec: EngineSpec, *, port: int) -> list[str]:
    """Arguments of the interpreter that start vLLM's own server on this machine only.

    Raises:
        ConfigError: as vllm_constructor.
    """
    own = _shared_arguments(config, spec) | {
        "host": "127.0.0.1",
        "port": port,
        "disable_uvicorn_access_log": True,
        "middleware": SERVER_TOKEN,
    }
    arguments = own | _options(config, own)
    return ["-m", "vllm.entrypoints.openai.api_server", *command_flags(arguments, no_flags=True)]


def _shared_arguments(config: EngineConfig, spec: EngineSpec) -> dict[str, Any]:
    on_cpu = spec.device == "cpu"
    if on_cpu and config.batch_invariant:
        raise ConfigError(
            "missing-device: engine.batch_invariant = true is not available on a CPU: vLLM's batch-invariant "
            "kernels crash there; leave it out (in float32 on a CPU vLLM's samples do not depend on their "
            "batch anyway)"
        )
    if on_cpu and config.offload:
        raise ConfigError(
            "missing-device: engine.offload = true is not available on a CPU: vLLM has no sleep mode there"
        )
    arguments: dict[str, Any] = {
        "model": str(spec.folder),
        "tokenizer": str(spec.folder),
        "skip_tokenizer_init": spec.tokenizer is None,
        # Never "auto": for a float32 checkpoint vLLM takes bfloat16 or float16.
        "dtype": spec.dtype,
        "seed": spec.seed,
        "max_model_len": spec.max_model_len,
        "max_num_seqs": config.max_batch,
        "tensor_parallel_size": config.tp,
        "enable_prefix_caching": config.prefix_caching,
        "enforce_eager": config.eager,
        "enable_sleep_mode": config.offload,
        # Otherwise vLLM takes defaults (temperature, top_k, repetition_penalty) from the model folder's
        # generation_config.json.
        "generation_config": "vllm",
        "logprobs_mode": vllm_logprobs_mode(spec.temperatures),
        # Weights that a push replaces before the first sample need not be read.
        "load_format": "dummy" if spec.weights == "pushed" else "auto",
        "trust_remote_code": False,
        "worker_extension_cls": WORKER_EXTENSION,
    }
    if config.tp == 1:
        arguments["distributed_executor_backend"] = "uni"  # on a CPU it would start one more process
    fraction = memory_fraction(config, spec)
    if fraction is not None:
        arguments["gpu_memory_utilization"] = fraction
    elif on_cpu and not {"kv_cache_memory_bytes", "kv-cache-memory-bytes"} & set(config.options):
        arguments["kv_cache_memory_bytes"] = CPU_KV_CACHE_BYTES
    if on_cpu:
        # A prompt in two parts is sampled from twice, and vLLM takes the first draw back by a generator's
        # offset, which CPU generators do not have: every seeded request fails then (vLLM 0.32).
        arguments["enable_chunked_prefill"] = False
        arguments["max_num_batched_tokens"] = max(spec.max_model_len, CPU_BATCHED_TOKENS)
    return arguments


def _options(config: EngineConfig, own: dict[str, Any]) -> dict[str, Any]:
    return checked_options(config, own, aliases=_ALIASES, refused=_REFUSED)


def vllm_environment(config: EngineConfig, spec: EngineSpec, *, in_process: bool) -> dict[str, str]:
    """Variables that must be set before vLLM is imported. `config.env` is not among them."""
    environment = {
        "VLLM_BATCH_INVARIANT": "1" if config.batch_invariant else "0",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it has no seeds
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",  # the model is a folder
    }
    if in_process:
        return environment | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    return environment | {"VLLM_SERVER_DEV_MODE": "1"}  # sleep, cache reset and calls to the worker extension


def vllm_sampling(
    params: SamplingParams, *, seed: int, eos_token_ids: tuple[int, ...], logprobs_mode: LogprobsMode
) -> dict[str, Any]:
    """Keyword arguments of vllm.SamplingParams for one sample, as plain JSON.

    Raises:
        EngineError: a field that vLLM would change or ignore.
    """
    _check(params, eos_token_ids=eos_token_ids, logprobs_mode=logprobs_mode)
    return {
        "n": 1,
        # Every field, also those at vLLM's defaults: defaults differ between engines and come from files.
        "max_tokens": params.max_tokens,
        "min_tokens": params.min_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "seed": seed,
        "stop": list(params.stop),
        "stop_token_ids": stop_ids(params, eos_token_ids),
        "include_stop_str_in_output": params.keep_stop,
        "ignore_eos": True,  # ours are stop ids: vLLM would add those of generation_config.json
        "logprobs": 0,  # of the sampled token alone
        "detokenize": bool(params.stop),
        "skip_special_tokens": params.skip_special_tokens,
    }


def _check(params: SamplingParams, *, eos_token_ids: tuple[int, ...], logprobs_mode: LogprobsMode) -> None:
    check_common(ENGINE, params)
    refuse = refusals(ENGINE, params)
    temperature = params.temperature
    if 0.0 < temperature < LOWEST_TEMPERATURE:
        raise refuse(
            "temperature",
            f"it would sample at {LOWEST_TEMPERATURE} instead",
            f"set 0 (greedy) or at least {LOWEST_TEMPERATURE}",
        )
    if temperature > HIGHEST_TEMPERATURE:
        raise refuse("temperature", "its limit is 2", "set it to at most 2")
    if params.min_tokens and params.stop:
        raise refuse(
            "min_tokens",
            f"it looks for stop strings ({list(params.stop)!r}) one token later than other engines",
            "set min_tokens = 0, or stop_token_ids instead of stop",
        )
    if params.min_tokens and params.ignore_eos and eos_token_ids:
        raise refuse(
            "min_tokens",
            "before min_tokens it suppresses the end-of-sequence ids even with ignore_eos = true",
            "set min_tokens = 0",
        )
    if logprobs_mode == "raw_logprobs":
        if temperature not in (0.0, 1.0):
            raise refuse(
                "temperature",
                "it was started for temperatures 0 and 1, whose logprobs it takes before temperature",
                "name every temperature when the engine is made (EngineSpec.temperatures)",
            )
        return
    for name in (*truncations_of(params), *penalties_of(params), *(["min_tokens"] * (params.min_tokens > 0))):
        raise refuse(
            name,
            "with temperatures besides 0 and 1 its logprobs come after truncation and penalties, and would "
            "be renormalised",
            "turn it off, or use temperatures 0 and 1 only (in evaluation too)",
        )
