"""Engine `native`: the trainer's layers, ops and logprob function, with a KV cache.

    requests ─► Scheduler ─► Generation ─► Runner ─► Layers ─► KVCache
                who runs      a step        sizes,    the        keys and
                and where     after the     CUDA      trainer's  values
                              other         graphs    modules

With a module that lockstep.invariant has converted, a token's logprob is bitwise the one that the trainer
computes for it later: `contract` says what that rests on.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Sequence
from typing import NoReturn

import torch

from lockstep.config.engine import EngineConfig
from lockstep.engine.native.generation import Counts, Generation, OnFinish, OnToken
from lockstep.engine.native.kv_cache import KVCache, most_tokens
from lockstep.engine.native.layers import Layers
from lockstep.engine.native.runner import Runner
from lockstep.engine.native.scheduler import Group, Sample, Scheduler
from lockstep.engine.requests import check_requests
from lockstep.engine.sampling import SampleState, is_shaped
from lockstep.engine.stop import StopStrings, completion_text
from lockstep.engine.weights import copy_weights
from lockstep.errors import EngineError
from lockstep.models.contract import kernel_contract
from lockstep.models.load import LoadedModel
from lockstep.observe.memory import is_out_of_memory
from lockstep.protocols.engine import EngineStats, OnCompletion
from lockstep.schema.contract import KernelContract
from lockstep.schema.rollout import Completion, FinishReason, GenerationRequest
from lockstep.schema.weights import WeightUpdate

NAME = "native"


class NativeEngine:
    """Implements lockstep.protocols.SharesWeights over the module of `model`, whose Parameters it shares.

    `generate` runs in the calling thread; only `abort` may be called from another one.
    """

    external = False

    def __init__(self, config: EngineConfig, *, model: LoadedModel) -> None:
        device = next(model.module.parameters()).device
        _check_device(device, model.dtype)
        self._config = config
        self._model = model
        as_trainer = model.execution != "eager"
        compiled = not config.eager and as_trainer
        self._layers = Layers(model.module, dtype=model.dtype, compiled=compiled)
        self._compiled, self._graphs = compiled, device.type == "cuda" and not config.eager
        self.contract: KernelContract | None = kernel_contract(
            self._layers.module,
            attention="varlen",
            execution=model.execution if compiled else "eager",
            dtype=model.dtype,
            device=device,
        )
        self.counts = Counts()
        self.ahead = 1 if device.type == "cuda" else 0
        """Number of steps that are launched before the previous one is read."""
        self._kv_cache: KVCache | None = None
        self._runner: Runner | None = None
        self._scheduler: Scheduler | None = None
        self._abort = threading.Event()
        self._policy_version = 0
        self._state = "awake"
        self._requests = self._prompt_tokens = self._cached_tokens = self._completion_tokens = 0
        self._seconds = 0.0
        self._peak_bytes = 0

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        *,
        on_completion: OnCompletion | None = None,
        on_token: OnToken | None = None,
    ) -> list[list[Completion]]:
        """Sample every request; one list per request, in request order, its samples in seed order.

        Args:
            on_completion: called in this thread as soon as a sample finishes.
            on_token: called in this thread after each token with (request index, sample index, token ids so
                far).

        Raises:
            EngineError: a request is impossible or does not fit into the KV cache, the engine sleeps or is
                closed, memory ran out, or logits are not finite.
        """
        if self._state != "awake":
            raise EngineError(f"engine {NAME} is {self._state}; call wake() before generate")
        model = self._model
        check_requests(
            requests,
            vocab_size=self._layers.vocab_size,
            max_positions=model.max_positions,
            tokenizer=model.tokenizer,
        )
        results: list[list[Completion | None]] = [[None] * len(r.seeds) for r in requests]

        def finish(sample: Sample, reason: FinishReason, stop: int | str | None) -> None:
            completion = self._completion(sample, reason, stop)
            results[sample.group.index][sample.index] = completion
            if on_completion is not None:
                on_completion(sample.group.index, sample.index, completion)

        self._abort.clear()
        started = time.perf_counter()
        samples = [sample for i, r in enumerate(requests) for sample in self._samples(i, r)]
        try:
            with torch.no_grad():
                if samples:
                    generation = self._generation(samples, finish)
                    generation.run(abort=self._abort, on_token=on_token)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            self._give_back()
            raise EngineError(self._out_of_memory()) from error
        finally:
            self._scheduler = None
            self._seconds += time.perf_counter() - started
        self._requests += len(requests)
        return [[c for c in row if c is not None] for row in results]

    def update_weights(self, update: WeightUpdate) -> None:
        """Sample from this version from now on.

        Raises:
            EngineError: the update is not for this module, or its tensors do not fit; nothing was changed.
        """
        self._require_open()
        if update.shared_module is None:
            copy_weights(self._layers.module, update.tensors, engine=NAME)
        elif update.shared_module is not self._model.module:
            raise EngineError(
                f"engine {NAME} reads the Parameters of the module it was built with, and the update names "
                "another module; build the engine with the trainer's model, or send tensors"
            )
        self._policy_version = update.policy_version

    def sleep(self) -> None:
        """Free KV cache, buffers and CUDA graphs. The Parameters are the trainer's and stay."""
        self._require_open()
        self._give_back()
        if self._layers.shape.device.type == "cuda":
            torch.cuda.empty_cache()  # what CUDA graphs held is nobody else's before
        self._state = "asleep"

    def wake(self) -> None:
        self._require_open()
        self._state = "awake"

    def abort(self) -> None:
        """End running samples at their next token, waiting ones without any; no effect when nothing runs."""
        self._abort.set()

    def stats(self) -> EngineStats:
        scheduler = self._scheduler
        return EngineStats(
            policy_version=self._policy_version,
            requests=self._requests,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            completion_tokens=self._completion_tokens,
            generate_seconds=self._seconds,
            kv_cache_bytes=self._peak_bytes,
            queued=0 if scheduler is None else len(scheduler.unfinished()),
            kv_cache_use=0.0 if scheduler is None else scheduler.use,
        )

    def close(self) -> None:
        """Idempotent; every other call but `stats` is an error afterwards."""
        self._give_back()
        self._state = "closed"

    def _require_open(self) -> None:
        if self._state == "closed":
            raise EngineError(f"engine {NAME} is closed; build a new one")

    def _give_back(self) -> None:
        self._kv_cache = self._runner = None

    # a call of generate

    def _samples(self, index: int, request: GenerationRequest) -> list[Sample]:
        sampling, model = request.sampling, self._model
        group = Group(index=index, request=request)
        ends = (() if sampling.ignore_eos else model.eos_token_ids) + sampling.stop_token_ids
        return [
            Sample(
                group=group,
                index=i,
                state=SampleState(
                    params=sampling,
                    seed=seed,
                    prompt_token_ids=request.prompt_token_ids,
                    end_ids=ends,
                ),
                stops=StopStrings(model.tokenizer, sampling.stop) if sampling.stop else None,
                end=min(len(request.prompt_token_ids) + sampling.max_tokens, model.max_positions),
            )
            for i, seed in enumerate(request.seeds)
        ]

    def _generation(self, samples: Sequence[Sample], finish: OnFinish) -> Generation:
        rows = min(self._config.max_batch, len(samples))
        needed = sum(heapq.nlargest(rows, (sample.end - 1 for sample in samples)))
        kv_cache, runner = self._sized(needed, samples)
        runner.use(kv_cache)
        sampling = {sample.group.request.sampling for sample in samples}
        alike = len({p.temperature for p in sampling}) == 1 and not any(is_shaped(p) for p in sampling)
        self._scheduler = Scheduler(
            samples, kv_cache=kv_cache, max_rows=self._config.max_batch, roomy=needed <= kv_cache.capacity
        )
        return Generation(
            runner,
            self._scheduler,
            ahead=self.ahead if alike else 0,
            temperature=samples[0].state.params.temperature if alike else None,
            counts=self.counts,
            on_finish=finish,
        )

    def _sized(self, needed: int, samples: Sequence[Sample]) -> tuple[KVCache, Runner]:
        """A KV cache for the needed tokens, as far as memory allows; it is kept between calls, so that CUDA
        graphs stay valid."""
        if self._runner is None:
            self._runner = Runner(
                self._layers,
                max_rows=self._config.max_batch,
                chunk=self._config.prefill_chunk,
                max_keys=self._model.max_positions,
                compiled=self._compiled,
                graphs=self._graphs,
            )
        tokens = self._config.kv_cache_tokens or needed
        if self._kv_cache is None or self._kv_cache.capacity < tokens:
            self._grow_kv_cache(tokens)
        longest = max(samples, key=lambda sample: sample.end)
        if self._kv_cache is None or longest.end - 1 > self._kv_cache.capacity:
            self._refuse(longest, 0 if self._kv_cache is None else self._kv_cache.capacity)
        return self._kv_cache, self._runner

    def _grow_kv_cache(self, tokens: int) -> None:
        before = 0 if self._kv_cache is None else self._kv_cache.capacity
        shape, config = self._layers.shape, self._config
        if config.kv_cache_tokens is None:
            tokens = max(tokens, before + before // 4)
            held = before * shape.token_bytes
            tokens = max(before, min(tokens, most_tokens(shape, config.memory_fraction, held=held)))
        if tokens > before:
            if self._runner is not None:
                self._runner.forget()
            self._kv_cache = None  # its memory first
            self._kv_cache = KVCache(shape, tokens)
            self._peak_bytes = max(self._peak_bytes, self._kv_cache.num_bytes)

    def _refuse(self, sample: Sample, capacity: int) -> NoReturn:
        request = sample.group.request
        remedy = (
            "raise engine.kv_cache_tokens"
            if self._config.kv_cache_tokens is not None
            else "raise engine.memory_fraction, as the device's memory allows no more"
        )
        raise EngineError(
            f"request {sample.group.index}: a sample with a prompt of {len(request.prompt_token_ids)} tokens "
            f"and max_tokens = {request.sampling.max_tokens} can need {sample.end - 1} tokens of KV cache, "
            f"which holds {capacity}; {remedy}, or lower sampling.max_tokens"
        )

    def _out_of_memory(self) -> str:
        config = self._config
        return (
            f"engine {NAME} ran out of memory with a KV cache of {self._peak_bytes} bytes, engine.max_batch "
            f"= {config.max_batch} and engine.prefill_chunk = {config.prefill_chunk}; lower "
            "engine.memory_fraction or engine.kv_cache_tokens, or one of these"
        )

    def _completion(self, sample: Sample, reason: FinishReason, stop: int | str | None) -> Completion:
        state, request = sample.state, sample.group.request
        cached = sample.cached_tokens or 0
        self._prompt_tokens += len(request.prompt_token_ids)
        self._cached_tokens += cached
        self._completion_tokens += len(state.token_ids)
        return Completion(
            prompt_token_ids=request.prompt_token_ids,
            token_ids=tuple(state.token_ids),
            logprobs=tuple(sample.logprobs),
            finish_reason=reason,
            stop_reason=stop,
            text=completion_text(
                self._model.tokenizer,
                state.token_ids,
                stop=stop if isinstance(stop, str) else None,
                keep=request.sampling.keep_stop,
            ),
            seed=state.seed,
            engine=NAME,
            policy_version=self._policy_version,
            cached_tokens=cached,
        )


def _check_device(device: torch.device, dtype: torch.dtype) -> None:
    if device.type == "cuda" and dtype not in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        raise EngineError(
            f"engine {NAME} attends by varlen, and CUDA flash kernels have no {name}; set model.dtype = "
            "'bfloat16', or engine.name = 'hf'"
        )
