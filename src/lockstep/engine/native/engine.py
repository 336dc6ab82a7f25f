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
from collections.abc import Sequence
from typing import NoReturn

import torch

from lockstep.config.engine import EngineConfig
from lockstep.engine.native.generation import Counts, EndedSample, Generation, Mode
from lockstep.engine.native.kv_cache import KVCache, most_tokens
from lockstep.engine.native.layers import Layers
from lockstep.engine.native.runner import Runner
from lockstep.engine.native.scheduler import Group, Sample, Scheduler
from lockstep.engine.requests import RequestCheck, StopStrings, completion_text
from lockstep.engine.sampling import SampleState, is_shaped
from lockstep.engine.streaming import Ended, OnToken, Streaming, Turn
from lockstep.engine.weights import copy_weights
from lockstep.errors import EngineError
from lockstep.models.contract import kernel_contract
from lockstep.models.load import LoadedModel
from lockstep.observe.memory import is_out_of_memory
from lockstep.protocols.engine import EngineStats
from lockstep.schema.contract import KernelContract
from lockstep.schema.rollout import Completion, FinishReason, GenerationRequest, SamplingParams
from lockstep.schema.weights import WeightUpdate

NAME = "native"


class NativeEngine(Streaming):
    """Implements lockstep.protocols.SharesWeights over the module of `model`, whose Parameters it shares.

    It computes in the thread that calls `generate`, or that iterates `finished`. The KV cache is sized for
    the samples that are there when the first of them begins, and grows when nothing runs: later turns, whose
    context is longer, may wait for room. `engine.kv_cache_tokens` says how much the last turns need.
    """

    external = False

    def __init__(self, config: EngineConfig, *, model: LoadedModel) -> None:
        super().__init__(NAME)
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
        self._check_request = RequestCheck(
            vocab_size=self._layers.vocab_size,
            max_positions=model.max_positions,
            tokenizer=model.tokenizer,
        )
        self.on_token: OnToken | None = None
        """Called after each token, in the thread that computes; set it while nothing runs."""
        self._generation: Generation | None = None
        self._later: list[Sample] = []
        """Samples that wait until nothing runs, so that the KV cache may grow."""
        self._sampling: set[SamplingParams] = set()
        """Of all samples of the generation."""
        self._most: int | None = None
        """Tokens of KV cache that memory allows, as of the beginning of the stream."""
        self._policy_version = 0
        self._state = "awake"
        self._prompt_tokens = self._cached_tokens = self._completion_tokens = 0
        self._peak_bytes = 0

    # a stream

    def _check(self, turn: Turn) -> None:
        self._check_request(turn.request, index=turn.index)
        most = self._most_keys(self._end_of(turn.request) - 1)
        if most is not None:
            self._refuse(turn, most)

    def _advance(self) -> list[Ended]:
        try:
            with torch.no_grad():
                ended = self._run()
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            self._give_back()
            raise EngineError(
                self._out_of_memory(), code="out-of-memory", setting="engine.memory_fraction"
            ) from error
        return [(one[0].group.turn, one[0].index, self._completion(*one)) for one in ended]

    def _run(self) -> list[EndedSample]:
        """Steps until one ends a sample; turns that come meanwhile join."""
        ended: list[EndedSample] = []
        while not ended:
            if self._inbox:
                self._take_inbox()
            if self._abort.is_set():
                running = [] if self._generation is None else self._generation.abort()
                ended = [*running, *((sample, "abort", None) for sample in self._later)]
                self._retire()
                self._later = []
                return ended
            if self._generation is None or (self._later and self._generation.idle):
                self._start()
            assert self._generation is not None
            ended = self._generation.step(self._abort)
        return ended

    def _end(self) -> None:
        self._retire()
        self._later, self._most = [], None

    def _retire(self) -> None:
        generation, self._generation = self._generation, None
        if generation is not None:
            if generation.idle:
                generation.drain()
            self.counts.preemptions += generation.scheduler.preemptions

    def update_weights(self, update: WeightUpdate) -> None:
        """Sample from this version from now on.

        Raises:
            EngineError: samples are running, the update is not for this module, or its tensors do not fit;
                nothing was changed.
        """
        self._require_open()
        self._require_idle("update_weights")
        if update.shared_module is None:
            copy_weights(self._layers.module, update.tensors, engine=NAME)
        elif update.shared_module is not self._model.module:
            raise EngineError(
                f"engine {NAME} reads the Parameters of the module it was built with, and the update names "
                "another module; build the engine with the trainer's model, or send tensors",
                code="other-model",
                name="module",
            )
        self._policy_version = update.policy_version

    def sleep(self) -> None:
        """Free KV cache, buffers and CUDA graphs. The Parameters are the trainer's and stay."""
        self._require_open()
        self._require_idle("sleep")
        self._give_back()
        if self._layers.shape.device.type == "cuda":
            torch.cuda.empty_cache()  # until then torch keeps the memory of the CUDA graphs
        self._state = "asleep"

    def wake(self) -> None:
        self._require_open()
        self._state = "awake"

    def stats(self) -> EngineStats:
        generation = self._generation
        return EngineStats(
            policy_version=self._policy_version,
            requests=self._requests,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            completion_tokens=self._completion_tokens,
            generate_seconds=self._seconds,
            kv_cache_bytes=self._peak_bytes,
            queued=self._open,
            kv_cache_use=0.0 if generation is None else generation.scheduler.use,
        )

    def close(self) -> None:
        """Idempotent; every other call but `stats` is an error afterwards."""
        self._close_stream()
        self._give_back()
        self._state = "closed"

    def _require_open(self) -> None:
        if self._state == "closed":
            raise EngineError(f"engine {NAME} is closed; build a new one", code="wrong-state", state="closed")

    def _require_ready(self) -> None:
        if self._state != "awake":
            raise EngineError(
                f"engine {NAME} is {self._state}; call wake() before generate",
                code="wrong-state",
                state=self._state,
            )

    def _give_back(self) -> None:
        self._kv_cache = self._runner = None

    # samples

    def _take_inbox(self) -> None:
        """Let the turns of the inbox run: at once, or when nothing runs if the KV cache is too small."""
        while self._inbox:
            self._later += self._samples(self._inbox.popleft())
        generation = self._generation
        if generation is None or generation.idle:
            return
        assert self._kv_cache is not None
        capacity = self._kv_cache.capacity
        joining = [sample for sample in self._later if sample.end - 1 <= capacity]
        self._later = [sample for sample in self._later if sample.end - 1 > capacity]
        if joining:
            together = [*generation.scheduler.unfinished(), *joining]
            generation.add(joining, mode=self._mode(joining), roomy=self._needed(together) <= capacity)

    def _samples(self, turn: Turn) -> list[Sample]:
        request, model = turn.request, self._model
        sampling, end = request.sampling, self._end_of(request)
        group = Group(turn=turn)
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
                end=end,
            )
            for i, seed in enumerate(request.seeds)
        ]

    def _end_of(self, request: GenerationRequest) -> int:
        """Tokens of prompt and completion at most."""
        return min(len(request.prompt_token_ids) + request.sampling.max_tokens, self._model.max_positions)

    def _start(self) -> None:
        """Start a generation of all samples that wait; nothing runs now."""
        self._retire()
        samples, self._sampling = self._later, set()
        needed = self._needed(samples)
        kv_cache, runner = self._sized(needed, samples)
        runner.use(kv_cache)
        scheduler = Scheduler(
            samples, kv_cache=kv_cache, max_rows=self._config.max_batch, roomy=needed <= kv_cache.capacity
        )
        self._generation = Generation(
            runner, scheduler, mode=self._mode(samples), counts=self.counts, on_token=self.on_token
        )
        self._later = []

    def _mode(self, more: Sequence[Sample]) -> Mode:
        """How to run `more` with the samples before them."""
        seen = self._sampling
        seen |= {sample.state.params for sample in more}
        temperatures = {params.temperature for params in seen}
        if len(temperatures) > 1 or any(is_shaped(params) for params in seen):
            return Mode(ahead=0, temperature=None)
        return Mode(ahead=self.ahead, temperature=temperatures.pop())

    def _needed(self, samples: Sequence[Sample]) -> int:
        """Tokens of KV cache with which all that can run together fit at full length."""
        return sum(heapq.nlargest(self._config.max_batch, (sample.end - 1 for sample in samples)))

    def _most_keys(self, needed: int) -> int | None:
        """None if a sample that needs so many tokens of KV cache can fit; else how many there can be."""
        have = 0 if self._kv_cache is None else self._kv_cache.capacity
        if needed <= have:
            return None
        config, shape = self._config, self._layers.shape
        most = config.kv_cache_tokens
        if most is None:
            if self._most is None:
                self._most = most_tokens(shape, config.memory_fraction, held=have * shape.token_bytes)
            most = max(have, self._most)
        return None if needed <= most else most

    def _sized(self, needed: int, samples: Sequence[Sample]) -> tuple[KVCache, Runner]:
        """A KV cache for the needed tokens, as far as memory allows; it is kept between streams, so that CUDA
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
        if self._kv_cache is None or longest.end - 1 > self._kv_cache.capacity:  # memory was taken meanwhile
            self._refuse(longest.group.turn, 0 if self._kv_cache is None else self._kv_cache.capacity)
        return self._kv_cache, self._runner

    def _grow_kv_cache(self, tokens: int) -> None:
        before = 0 if self._kv_cache is None else self._kv_cache.capacity
        shape, config = self._layers.shape, self._config
        if config.kv_cache_tokens is None:
            # By a quarter at least: another cache costs all CUDA graphs.
            tokens = max(tokens, before + before // 4)
            held = before * shape.token_bytes
            tokens = max(before, min(tokens, most_tokens(shape, config.memory_fraction, held=held)))
        if tokens > before:
            if self._runner is not None:
                self._runner.forget()
            self._kv_cache = None  # its memory first
            self._kv_cache = KVCache(shape, tokens)
            self._peak_bytes = max(self._peak_bytes, self._kv_cache.num_bytes)

    def _refuse(self, turn: Turn, capacity: int) -> NoReturn:
        request = turn.request
        remedy = (
            "raise engine.kv_cache_tokens"
            if self._config.kv_cache_tokens is not None
            else "raise engine.memory_fraction, as the device's memory allows no more"
        )
        raise EngineError(
            f"request {turn.index}: a sample with a prompt of {len(request.prompt_token_ids)} tokens "
            f"and max_tokens = {request.sampling.max_tokens} can need {self._end_of(request) - 1} tokens of "
            f"KV cache, which holds {max(0, capacity)}; {remedy}, or lower sampling.max_tokens",
            code="too-long",
            request=turn.index,
            needed=self._end_of(request) - 1,
            capacity=max(0, capacity),
        )

    def _out_of_memory(self) -> str:
        config = self._config
        return (
            f"engine {NAME} ran out of memory with a KV cache of {self._peak_bytes} bytes, engine.max_batch "
            f"= {config.max_batch} and engine.prefill_chunk = {config.prefill_chunk}; lower "
            "engine.memory_fraction or engine.kv_cache_tokens, or one of these"
        )

    def _completion(self, sample: Sample, reason: FinishReason, stop: int | str | None) -> Completion:
        state, request = sample.state, sample.group.turn.request
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
            "'bfloat16', or engine.name = 'hf'",
            code="unsupported-combination",
            setting="model.dtype",
        )
