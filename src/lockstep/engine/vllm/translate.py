"""Our config and sampling parameters as vLLM's arguments. Written against vLLM 0.26 to 0.33."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Any, Literal

import torch

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
from lockstep.engine.streaming import Turn
from lockstep.errors import ConfigError, EngineError
from lockstep.processes.programs import VLLM_MIDDLEWARE, VLLM_WORKER
from lockstep.schema.rollout import SamplingParams

ENGINE = "vllm"
LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]

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
    "quantization": "trained weights would be rounded when they are sent; set model.dtype",
    "max_logprobs": "only the sampled token's logprob is requested",
    "weight_transfer_config": "weights go through Lockstep's own worker extension; set engine.transfer",
    "api_key": "Lockstep generates a token for each server that it starts",
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
        "middleware": VLLM_MIDDLEWARE,
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
    if on_cpu and config.offloads:
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
        "enable_sleep_mode": config.offloads,
        # Otherwise vLLM takes defaults (temperature, top_k, repetition_penalty) from the model folder's
        # generation_config.json.
        "generation_config": "vllm",
        "logprobs_mode": vllm_logprobs_mode(spec.temperatures),
        # Weights that a push replaces before the first sample need not be read.
        "load_format": "dummy" if spec.weights == "pushed" else "auto",
        "trust_remote_code": False,
        "worker_extension_cls": VLLM_WORKER,
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
    stop = f"it looks for stop strings ({list(params.stop)!r}) one token later than other engines"
    for applies, name, why, instead in (
        (
            0.0 < temperature < LOWEST_TEMPERATURE,
            "temperature",
            f"it would sample at {LOWEST_TEMPERATURE} instead",
            f"set 0 (greedy) or at least {LOWEST_TEMPERATURE}",
        ),
        (temperature > HIGHEST_TEMPERATURE, "temperature", "its limit is 2", "set it to at most 2"),
        (
            params.min_tokens and params.stop,
            "min_tokens",
            stop,
            "set min_tokens = 0, or stop_token_ids instead of stop",
        ),
        (
            params.min_tokens and params.ignore_eos and eos_token_ids,
            "min_tokens",
            "before min_tokens it suppresses the end-of-sequence ids even with ignore_eos = true",
            "set min_tokens = 0",
        ),
        (
            logprobs_mode == "raw_logprobs" and temperature not in (0.0, 1.0),
            "temperature",
            "it was started for temperatures 0 and 1, for which it returns logprobs before temperature is "
            "applied",
            "list every temperature when the engine is created (EngineSpec.temperatures)",
        ),
    ):
        if applies:
            raise refuse(name, why, instead)
    if logprobs_mode == "raw_logprobs":
        return
    for name in (*truncations_of(params), *penalties_of(params), *(["min_tokens"] * (params.min_tokens > 0))):
        why = "with temperatures other than 0 and 1 its logprobs come after truncation and penalties"
        fix = "turn it off, or use temperatures 0 and 1 only (in evaluation too)"
        raise refuse(name, f"{why}, and would be renormalised", fix)


# vLLM's engine as `lockstep.engine.vllm.engine` uses it: everything that imports vLLM, and all differences
# between its versions 0.26 to 0.33, but for its worker (lockstep.wire.vllm_worker).


NAME = "vllm"
_LOOK_SECONDS = 0.5
_Key = tuple[Turn, int]
"""A turn, and the index of a sample in its request."""


class Core:
    """vLLM's engine; constructed and used in one thread only."""

    def __init__(self, config: EngineConfig, spec: EngineSpec) -> None:
        self.last_progress = time.monotonic()
        """time.monotonic() of the last new token, updated now and then."""
        self._had_group = torch.distributed.is_available() and torch.distributed.is_initialized()
        self._count = 0
        self._keys: dict[str, _Key] = {}
        self._computed: tuple[int, int] = (0, 0)
        self._looked = 0.0
        arguments = vllm_constructor(config, spec) | {"disable_log_stats": True}
        # LLMEngine and not LLM: only it can be stepped, so that samples join and end one by one. What follows
        # reads its insides (output_processor, engine_core), of vLLM 0.26 to 0.33.
        from vllm import SamplingParams
        from vllm import __version__ as version
        from vllm.engine.arg_utils import EngineArgs
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.llm_engine import LLMEngine

        try:
            self._engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        except (RuntimeError, ValueError, AssertionError, TypeError, OSError) as error:
            self._free_groups()
            hint = "; lower engine.memory_fraction" if isinstance(error, torch.OutOfMemoryError) else ""
            raise EngineError(
                f"refused: engine {NAME} {version} could not start with {spec.folder}: {error}{hint}"
            ) from error
        self._params = SamplingParams
        self._final_only = RequestOutputKind.FINAL_ONLY
        self.description = {
            "version": version,
            "arguments": {k: str(v) for k, v in arguments.items()},
            "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith("VLLM_")},
        }

    def submit(self, samples: Sequence[tuple[_Key, dict[str, Any]]]) -> None:
        """Hand samples, with the keyword arguments of vllm.SamplingParams, to the scheduler, siblings in a
        row: they share the blocks of their prompt."""
        for key, sampling in samples:
            self._count += 1
            name = f"lockstep-{self._count}"
            # flat: lists of numbers, not a dict and an object for each token
            params = self._params(**sampling, output_kind=self._final_only, flat_logprobs=True)
            self._keys[name] = key
            self._engine.add_request(
                name, {"prompt_token_ids": list(key[0].request.prompt_token_ids)}, params
            )

    def advance(self, abort: threading.Event, more: Sized) -> list[tuple[_Key, Any]]:
        """Step until at least one sample has finished. Returns nothing when there is `more` to submit, or
        none is left."""
        engine = self._engine
        while engine.has_unfinished_requests() and not more:
            if abort.is_set():
                return self.abort_all()
            finished = [o for o in engine.step() if o.finished]
            self._note_progress(bool(finished))
            if finished:
                return [(self._keys.pop(output.request_id), output) for output in finished]
        return []

    def abort_all(self) -> list[tuple[_Key, Any]]:
        """End every sample now, with the tokens that it has."""
        from vllm.v1.engine import FinishReason as Reason

        # vLLM's abort_request alone ends them without an output, and their tokens are wanted.
        states = self._engine.output_processor.request_states
        outputs = []
        for state in list(states.values()):
            output = state.make_request_output([], None, Reason.ABORT, None)
            outputs.append((self._keys[output.request_id], output))
        self._engine.abort_request(list(states), internal=True)
        self._keys.clear()
        return outputs

    def _note_progress(self, finished: bool) -> None:
        """Note new tokens; steps alone are no progress: a request that never fits would be scheduled for
        ever."""
        now = time.monotonic()
        if finished:
            self.last_progress = now
        elif now - self._looked > _LOOK_SECONDS:
            self._looked = now
            requests = self._scheduler.requests
            computed = (sum(r.num_computed_tokens for r in list(requests.values())), len(requests))
            if computed != self._computed:
                self._computed, self.last_progress = computed, now

    def rpc(self, method: str, *arguments: Any) -> dict[str, Any]:
        answer: dict[str, Any] = self._engine.collective_rpc(method, args=arguments)[0]
        return answer

    def reset_prefix_cache(self) -> bool:
        return bool(self._engine.reset_prefix_cache())

    def sleep(self) -> None:
        # Level 2 drops the weights, and an engine that wakes before a whole update has come samples from
        # garbage without a warning.
        self._engine.sleep(level=1)

    def wake(self) -> None:
        self._engine.wake_up()

    def kv_cache_use(self) -> float:
        return float(self._scheduler.kv_cache_manager.usage)

    @property
    def _scheduler(self) -> Any:
        # Twice: the client of an engine in this process, then the engine itself.
        return self._engine.engine_core.engine_core.scheduler

    def shutdown(self) -> None:
        """Free memory, groups and threads."""
        with _kept_group(self._had_group):
            self._engine.engine_core.shutdown()
        del self._engine
        # vLLM freezes all objects of the process when it starts, so that collections are short; its own would
        # never be freed.
        gc.unfreeze()
        self._free_groups()
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def _free_groups(self) -> None:
        import vllm.distributed.parallel_state as state

        with _kept_group(self._had_group):
            state.destroy_model_parallel()
            state.destroy_distributed_environment()


@contextlib.contextmanager
def _kept_group(keep: bool) -> Iterator[None]:
    """Keep the trainer's process group if it existed first: vLLM takes it for its own, and destroys it
    whenever an engine shuts down."""
    import vllm.distributed.parallel_state as state

    def destroy_own() -> None:
        world, state._WORLD = state._WORLD, None
        if world is not None:
            world.destroy()

    # Replaced for as long as a shutdown takes, in vLLM 0.26 to 0.33. A vLLM that leaves the groups of others
    # alone needs none of this.
    original = state.destroy_distributed_environment
    if keep:
        state.destroy_distributed_environment = destroy_own
    try:
        yield
    finally:
        state.destroy_distributed_environment = original


_owner: object | None = None
_import_environment: dict[str, str] | None = None


def claim(owner: object, environment: dict[str, str]) -> None:
    """Claim vLLM for `owner`, before vLLM is imported. Its process groups, memory pools and settings are
    global: one engine at a time, all of them with the environment that vLLM was imported with.

    Args:
        environment: of `vllm_environment`.

    Raises:
        EngineError: another engine is open, or vLLM was imported with other values.
    """
    global _owner, _import_environment
    if _owner is not None:
        raise EngineError(
            f"wrong-state: this process already has an open engine {NAME}; close it, or set engine.python"
        )
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if _import_environment is None:
        # A value that the user set stays, but for those that one of our settings decides.
        for name, value in environment.items():
            if name in ("VLLM_BATCH_INVARIANT", "VLLM_ENABLE_V1_MULTIPROCESSING"):
                os.environ[name] = value
            else:
                os.environ.setdefault(name, value)
        _import_environment = environment
    elif environment != _import_environment:
        changed = sorted(k for k in environment if environment[k] != _import_environment.get(k))
        raise EngineError(
            f"wrong-environment: vLLM was imported with other values of {', '.join(changed)} and reads them "
            "only once; start a new process for an engine with other settings (engine.batch_invariant)"
        )
    _owner = owner


def release(owner: object) -> None:
    """Release vLLM for the next engine; no effect when `owner` has no claim."""
    global _owner
    if _owner is owner:
        _owner = None


@contextlib.contextmanager
def same_threads() -> Iterator[None]:
    """Restore torch's threads and default dtype: on a CPU vLLM sets both, and replaces torch.set_num_threads
    by a function that does nothing."""
    set_threads, threads, dtype = torch.set_num_threads, torch.get_num_threads(), torch.get_default_dtype()
    try:
        yield
    finally:
        torch.set_num_threads = set_threads
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
