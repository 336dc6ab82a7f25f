"""Engine `vllm` in this process: vLLM's engine, stepped by us, with weights of its own.

    caller ── _advance ──► own thread: add_request for every new sample, step until one finishes ──┐
       ▲                                                                                         │
       └── finished samples one after the other, noise of the trainer put back ◄─────────────────────┘

Everything of vLLM runs in one thread of its own, so that every wait has a deadline; the caller waits, so the
two never run at the same time.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotDone
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from lockstep.common_errors import not_finite
from lockstep.config.engine import EngineConfig
from lockstep.engine.receiving import ReceivingEngine
from lockstep.engine.spec import EngineSpec
from lockstep.engine.streaming import Ended, Turn
from lockstep.engine.vllm.translate import (
    NAME,
    Core,
    claim,
    release,
    same_threads,
    vllm_environment,
    vllm_logprobs_mode,
    vllm_sampling,
)
from lockstep.errors import ConfigError, EngineError
from lockstep.protocols.engine import EngineStats
from lockstep.schema.rollout import Completion, FinishReason, GenerationRequest
from lockstep.schema.weights import Transport, UpdateSession, WeightBucket
from lockstep.wire.buckets import named_dtype

_CLOSE_SECONDS = 60.0
_LOOK_SECONDS = 0.5
_FINISH_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
_Result = TypeVar("_Result")


class VLLMEngine(ReceivingEngine):
    """Implements lockstep.protocols.ReceivesWeights with vLLM in this process, one at a time.

    Methods may be called from any thread; one of them works and the others wait for it, `submit`,
    `continue_`, `abort` and `stats` excepted. A second stream is refused.
    """

    def __init__(self, config: EngineConfig, *, spec: EngineSpec) -> None:
        super().__init__(NAME, spec=spec)
        _check_spec(config, spec)
        self._config = config
        self._device = torch.device(spec.device)
        self._logprobs_mode = vllm_logprobs_mode(spec.temperatures)
        self._new: deque[tuple[tuple[Turn, int], dict[str, Any]]] = deque()
        """Samples that vLLM does not know yet, with the keyword arguments of vllm.SamplingParams."""
        self._at_core = 0
        """Samples that vLLM has."""
        self._working: str | None = None
        self.transports: tuple[Transport, ...] = ("memory", "disk")
        self.receivers = 1
        self._thread = OwnThread(f"engine {NAME}")
        # Before the thread imports vLLM, which reads its variables once.
        claim(self, vllm_environment(config, spec, in_process=True))
        try:
            # vLLM seeds the global generators of torch and Python when it is made, and draws from torch's in
            # samples without a seed.
            with same_noise(self._device), same_threads():
                self._core = self._thread.call(
                    lambda: Core(config, spec),
                    what="start",
                    deadline=time.monotonic() + config.start_seconds,
                )
                self._kv_bytes = int(self._memory(seconds=config.start_seconds)["kv_cache_bytes"])
        except BaseException:
            self._state = "closed"
            self._thread.end(seconds=0.0)
            release(self)
            raise

    # sampling

    def _accept(self, turn: Turn) -> None:
        """Check a turn, and write vLLM's arguments of each of its samples."""
        self._check_request(turn.request, index=turn.index)
        arguments = [
            vllm_sampling(
                turn.request.sampling,
                seed=turn.drawn_seed(sample),
                eos_token_ids=self._spec.eos_token_ids,
                logprobs_mode=self._logprobs_mode,
            )
            for sample in range(len(turn.samples))
        ]
        self._new.extend([((turn, sample), given) for sample, given in enumerate(arguments)])

    def _advance(self) -> list[Ended]:
        core, seconds = self._core, self._config.request_seconds

        def step(work: Callable[[], _Result]) -> _Result:
            core.last_progress = time.monotonic()
            return self._in_thread(work, what="generate", until=lambda: core.last_progress + seconds)

        outputs: list[tuple[tuple[Turn, int], Any]] = []
        with self._turn_for("generate", until=time.monotonic() + seconds):
            while not outputs and (self._new or self._at_core):
                new = [self._new.popleft() for _ in range(len(self._new))]
                self._at_core += len(new)
                step(functools.partial(core.submit, new))
                outputs = step(lambda: core.advance(self._abort, self._new))
                if not outputs and not self._new:
                    break
            self._at_core -= len(outputs)
        return [(*key, self._checked(key[0].request, key[1], output)) for key, output in outputs]

    def _end(self) -> None:
        left, self._at_core = self._at_core, 0
        self._new.clear()
        if left and self._state == "awake":
            with contextlib.suppress(EngineError):  # the reason that brought us here is raised
                self._in_thread(self._core.abort_all, what="abort", until=time.monotonic() + _CLOSE_SECONDS)

    def _checked(self, request: GenerationRequest, sample: int, output: Any) -> Completion:
        answer = output.outputs[0]
        token_ids = tuple(answer.token_ids)
        flat = answer.logprobs
        if list(flat.token_ids) != list(token_ids):  # logprobs = 0: the sampled token's and no other
            raise EngineError(f"wrong-result: engine {NAME} returned logprobs for tokens it did not sample")
        logprobs = tuple(flat.logprobs)
        if answer.finish_reason not in _FINISH_REASONS:
            raise EngineError(
                f"wrong-result: engine {NAME} ended a sample with {answer.finish_reason!r}; see its log"
            )
        total = sum(logprobs)
        if total != total:
            raise not_finite(f"engine {NAME}: logprobs of a sample")
        if tuple(output.prompt_token_ids) != request.prompt_token_ids:
            raise EngineError(f"wrong-result: engine {NAME} changed the token ids of a prompt")
        return self._completion(
            request,
            request.seeds[sample],
            token_ids=token_ids,
            logprobs=logprobs,
            ending=(_FINISH_REASONS[answer.finish_reason], answer.stop_reason),
            cached_tokens=int(output.num_cached_tokens or 0),
        )

    # weights

    def begin_update(self, session: UpdateSession) -> None:
        """Refuse new requests, wait for running ones, open a session.

        Raises:
            EngineError: it sleeps or is closed, another session is open, or samples are running that do not
                end before the session's deadline.
        """
        self._require_open()
        with self._turn:
            self._wait_until_idle("update", deadline=session.deadline)
        with self._turn_for("begin_update", until=session.deadline):
            self._require_open()
            self._require_idle("begin_update")
            self._require_awake("an update")
            self._require_no_session("begin another update")
            self._rpc("lockstep_begin", {}, until=session.deadline)
            self._session = session

    def receive(self, bucket: WeightBucket) -> None:
        """Load the tensors of one bucket; returns when its memory may be reused.

        Raises:
            EngineError: no session is open, a tensor does not fit or has come before, or the deadline passed.
                The engine stays dirty.
        """
        session = self._open_session()
        with self._turn_for("receive", until=session.deadline):
            self.dirty = True
            text = bucket.as_json()
            if bucket.transport not in self.transports:
                raise EngineError(
                    f"unsupported-combination: engine {NAME} in this process cannot receive weights by "
                    f"{bucket.transport!r}, only by {', '.join(self.transports)}",
                    setting="engine.transfer",
                )
            if bucket.transport == "memory":
                if bucket.data is None:
                    raise EngineError(
                        f"missing-argument: bucket {bucket.index} has transport 'memory' but no data"
                    )
                _synchronize(bucket.data.device)  # the trainer wrote it on a stream of its own
                self._rpc("lockstep_receive_memory", text, bucket.data, until=session.deadline)
            else:
                text["seconds"] = session.deadline - time.monotonic()
                self._rpc("lockstep_receive", text, until=session.deadline)

    def finish_update(self, session: UpdateSession) -> None:
        """Close the session, flush the prefix cache and check that it is flushed, take over the version.

        Raises:
            EngineError: weights are missing, or the cache could not be flushed; the engine stays dirty.
        """
        self._open_session()
        with self._turn_for("finish_update", until=session.deadline):
            self._rpc("lockstep_finish", {}, until=session.deadline)
            self._session = None
            flushed = self._in_thread(
                self._core.reset_prefix_cache, what="the flush of the prefix cache", until=session.deadline
            )
            if not flushed:
                self.dirty = True
                raise EngineError(
                    f"refused: engine {NAME} did not flush its prefix cache: requests still hold blocks of "
                    "it, and keys and values of older weights would be reused"
                )
            self._policy_version = session.policy_version
            self.dirty = False

    def fail_update(self, reason: str) -> None:
        """End a session early: layers that are half loaded get their old weights back; the engine is dirty
        until a complete session. Does not raise."""
        self.dirty = True
        if self._session is None or self._state != "awake":
            return
        until = time.monotonic() + _CLOSE_SECONDS
        try:
            with self._turn_for("fail_update", until=until):
                self._rpc("lockstep_fail", {"reason": reason}, until=until)
        except EngineError:
            self._state = "broken"  # what it holds cannot even be replaced
        finally:
            self._session = None

    def read_back(self, names: Sequence[str]) -> dict[str, Tensor]:
        """The first 64 values of each weight as vLLM holds them, by Hugging Face name; those that it holds
        in a packed form only (matrices on a CPU) are left out."""
        until = time.monotonic() + self._config.update_seconds
        with self._turn_for("read_back", until=until):
            self._require_open()
            weights = self._rpc("lockstep_read", list(names), until=until)
        return {
            name: torch.frombuffer(bytearray.fromhex(entry["hex"]), dtype=named_dtype(entry["dtype"]))
            for name, entry in weights.items()
        }

    # life

    def sleep(self) -> None:
        """Free memory: weights go to the host, the KV cache dropped, when engine.offload is on. Otherwise
        only refuses to work until `wake`."""
        until = time.monotonic() + self._config.update_seconds
        with self._turn_for("sleep", until=until):
            self._require_open()
            self._require_idle("sleep")
            self._require_no_session("sleep")
            if self._state == "awake" and self._config.offloads:
                self._in_thread(self._core.sleep, what="sleep", until=until)
            self._state = "asleep"

    def wake(self) -> None:
        until = time.monotonic() + self._config.update_seconds
        with self._turn_for("wake", until=until):
            self._require_open()
            if self._state == "asleep" and self._config.offloads:
                self._in_thread(self._core.wake, what="wake", until=until)
            self._state = "awake"

    def stats(self) -> EngineStats:
        open_now = self._state in ("awake", "asleep")
        self._kv_use = self._core.kv_cache_use() if open_now else None
        return super().stats()

    def memory(self) -> dict[str, float]:
        """Bytes, by name: weights, KV cache; on a GPU also of the allocator and the device."""
        return self._memory(seconds=self._config.update_seconds)

    def describe(self) -> dict[str, Any]:
        """Describe the engine and its arguments for the run's manifest."""
        return {"engine": NAME, "where": "in process", **self._core.description}

    def close(self) -> None:
        """Stop what runs and free everything. Idempotent; all else but `stats` is an error afterwards."""
        if self._state == "closed":
            return
        self._abort.set()
        until = time.monotonic() + _CLOSE_SECONDS
        broken = self._state == "broken"
        self._close_stream()
        with self._turn:
            while not self._is_idle() and self._turn.wait(until - time.monotonic()):
                pass  # the thread that runs it ends it, as everything is aborted
        try:
            with self._turn_for("close", until=until):
                self._state = "closed"
                with same_noise(self._device):
                    self._thread.call(self._core.shutdown, what="close", deadline=until)
        except EngineError:
            if not broken:
                raise
        finally:
            self._state = "closed"
            self._thread.end(seconds=1.0)
            release(self)

    def _memory(self, *, seconds: float) -> dict[str, float]:
        return {k: float(v) for k, v in self._rpc("lockstep_memory", {}, seconds=seconds).items()}

    # turns, states, calls

    @contextlib.contextmanager
    def _turn_for(self, what: str, *, until: float) -> Iterator[None]:
        """Wait until no other call works; later calls wait for this one."""
        with self._turn:
            while self._working is not None:
                left = until - time.monotonic()
                if left <= 0:
                    raise EngineError(
                        f"deadline: engine {NAME}: {what} waited too long for {self._working}, which is "
                        "still running"
                    )
                self._turn.wait(min(left, _LOOK_SECONDS))
            self._working = what
        try:
            yield
        finally:
            with self._turn:
                self._working = None
                self._turn.notify_all()

    def _in_thread(
        self, work: Callable[[], _Result], *, what: str, until: float | Callable[[], float]
    ) -> _Result:
        """Run a part of vLLM; any error but an EngineError leaves it in an unknown state."""
        try:
            with same_noise(self._device):
                return self._thread.call(work, what=what, deadline=until)
        except torch.OutOfMemoryError as error:
            self._state = "broken"
            raise EngineError(
                f"out-of-memory: engine {NAME} ran out of memory in {what}: {error}; lower "
                "engine.memory_fraction or engine.max_batch"
            ) from error
        except EngineError:
            if self._thread.stuck:
                self._state = "broken"
            raise
        except (RuntimeError, ValueError, AssertionError, KeyError, TypeError, AttributeError) as error:
            self._state = "broken"
            raise EngineError(f"refused: vLLM failed in {what}: {type(error).__name__}: {error}") from error

    def _rpc(
        self, method: str, text: object, *more: Any, until: float = 0.0, seconds: float = 0.0
    ) -> dict[str, Any]:
        """Call a method of LockstepWorker."""
        answer: dict[str, Any] = self._in_thread(
            lambda: self._core.rpc(method, json.dumps(text), *more),
            what=method,
            until=until or time.monotonic() + seconds,
        )
        if "error" in answer:
            raise EngineError(f"refused: engine {NAME}, {method}: {answer['error']}")
        return answer


def _check_spec(config: EngineConfig, spec: EngineSpec) -> None:
    """Refuse what cannot work, before anything of vLLM is imported."""
    elsewhere = "set engine.python to an interpreter that has vLLM, and Lockstep starts its server with it"
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(f"missing-package: engine {NAME}: this environment has no vllm; {elsewhere}")
    if config.tp > 1:
        raise ConfigError(
            f"unsupported-combination: engine.tp = {config.tp} needs separate vLLM processes; {elsewhere}"
        )
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        size = torch.distributed.get_world_size()
        if size > 1:
            raise ConfigError(
                f"unsupported-combination: engine {NAME} in this process would take the trainer's process "
                f"group of {size} ranks as its own; {elsewhere}"
            )
    device = torch.device(spec.device)
    if device.type == "cuda" and (device.index or 0) != 0:
        raise ConfigError(
            f"unsupported-combination: engine {NAME} in this process runs only on cuda:0, not on "
            f"{spec.device}; use CUDA_VISIBLE_DEVICES, or {elsewhere}",
            setting="train.device",
        )


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# One thread for all work of an in-process engine, so that every wait for it has a deadline.


class OwnThread:
    """A daemon thread that runs the functions passed to `call`, one at a time.

    An engine that hangs inside a kernel cannot be stopped, but the trainer need not wait for it: once a
    deadline has passed, every later call raises at once.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._stuck: str | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def stuck(self) -> bool:
        """Whether a deadline has passed: the running work is no longer waited for."""
        return self._stuck is not None

    def call(
        self, work: Callable[[], _Result], *, what: str, deadline: float | Callable[[], float]
    ) -> _Result:
        """Run `work`; returns its result or raises its exception.

        Args:
            deadline: time.monotonic(); a function is called repeatedly, so that progress can move it.

        Raises:
            EngineError: the deadline passed, now or in an earlier call.
        """
        if self._stuck is not None:
            raise EngineError(
                f"deadline: {self._name} missed the deadline of {self._stuck} and is still busy; start again"
            )
        future: Future[_Result] = Future()
        started = time.monotonic()
        self._work.put((work, future))
        while True:
            until = deadline() if callable(deadline) else deadline
            left = until - time.monotonic()
            try:
                return future.result(timeout=max(0.0, min(left, _LOOK_SECONDS)))
            except NotDone:
                if future.done():  # `work` itself ended in a TimeoutError
                    return future.result()
                if left <= 0:
                    self._stuck = what
                    raise EngineError(
                        f"deadline: {self._name}: {what} showed no progress before its deadline, "
                        f"{time.monotonic() - started:.1f} s after it started"
                    ) from None

    def end(self, *, seconds: float) -> bool:
        """Let the thread end after its current work; True if it ended in time."""
        self._work.put(None)
        self._thread.join(timeout=seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            work, future = item
            try:
                result = work()
            except BaseException as error:  # handed to the caller, which raises it
                future.set_exception(error)
            else:
                future.set_result(result)
            del item, work, future


@contextlib.contextmanager
def same_noise(device: torch.device) -> Iterator[None]:
    """Restore the global generators of torch, numpy and random on exit: an engine seeds and draws from them,
    and the trainer's dropout and shuffling must not depend on the choice of an engine."""
    cuda = device.type == "cuda" and torch.cuda.is_initialized()
    host, python, numpy = torch.get_rng_state(), random.getstate(), np.random.get_state()
    gpu = torch.cuda.get_rng_state(device) if cuda else None
    try:
        yield
    finally:
        torch.set_rng_state(host)
        random.setstate(python)
        np.random.set_state(numpy)
        if gpu is not None:
            torch.cuda.set_rng_state(gpu, device)
