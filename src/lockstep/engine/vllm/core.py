"""vLLM's engine as `lockstep.engine.vllm.engine` uses it: everything that imports vLLM, and all differences
between its versions 0.26 to 0.33, but for its worker (lockstep.wire.vllm_worker)."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Iterator, Sequence, Sized
from typing import Any

import torch

from lockstep.config.engine import EngineConfig
from lockstep.engine.spec import EngineSpec
from lockstep.engine.streaming import Turn
from lockstep.engine.vllm.translate import vllm_constructor
from lockstep.errors import EngineError

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
        environment: of lockstep.engine.spec.vllm_environment.

    Raises:
        EngineError: another engine is open, or vLLM was imported with other values.
    """
    global _owner, _import_environment
    if _owner is not None:
        raise EngineError(
            f"wrong-state: this process has an open engine {NAME} already; close it first, or set "
            "engine.python"
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
            "once; start a new process for an engine with other settings (engine.batch_invariant)"
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
