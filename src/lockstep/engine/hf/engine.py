"""Engine `hf`: a decode loop of ours over a transformers model that shares the trainer's Parameters.

requests ──► prefill (packed, once per prompt) ──► running samples ──► one forward per token ──► completions
                                                         ▲                      │
                                                         └── gaps are closed ◄──┘ when 1/8 have finished
"""

from __future__ import annotations

import torch

from lockstep.config.engine import EngineConfig
from lockstep.engine.hf.generation import EndedRow, Generation
from lockstep.engine.hf.kv_cache import SampleCache
from lockstep.engine.hf.skeleton import Skeleton
from lockstep.engine.requests import RequestCheck, completion_text
from lockstep.engine.sampling import Sampler
from lockstep.engine.streaming import Ended, OnToken, Streaming, Turn
from lockstep.engine.weights import copy_weights
from lockstep.errors import EngineError
from lockstep.models.load import LoadedModel
from lockstep.observe.memory import is_out_of_memory
from lockstep.protocols.engine import EngineStats
from lockstep.schema.contract import KernelContract
from lockstep.schema.rollout import Completion
from lockstep.schema.weights import WeightUpdate

NAME = "hf"


class HFEngine(Streaming):
    """Implements lockstep.protocols.SharesWeights over the module of `model`, whose Parameters it shares.

    A sample depends on its batch only through rounding: in float32 on CPU tokens are equal alone and in a
    batch. It computes in the thread that calls `generate`, or that iterates `finished`.
    """

    external = False
    contract: KernelContract | None = None

    def __init__(self, config: EngineConfig, *, model: LoadedModel) -> None:
        super().__init__(NAME)
        self._config = config
        self._model = model
        self._skeleton = Skeleton(model.module)
        self._check_request = RequestCheck(
            vocab_size=self._skeleton.vocab_size,
            max_positions=model.max_positions,
            tokenizer=model.tokenizer,
        )
        self.on_token: OnToken | None = None
        """Called after each token, in the thread that computes; set it while nothing runs."""
        self._generation: Generation | None = None
        self._cache = SampleCache()
        self._sampler = Sampler()
        self._policy_version = 0
        self._state = "awake"
        self._prompt_tokens = self._cached_tokens = self._completion_tokens = 0
        self._peak_bytes = 0

    def _check(self, turn: Turn) -> None:
        self._check_request(turn.request, index=turn.index)

    def _advance(self) -> list[Ended]:
        try:
            with torch.inference_mode():
                if self._generation is None:
                    self._skeleton.linears.refresh()
                    self._generation = Generation(
                        self._skeleton,
                        self._cache,
                        sampler=self._sampler,
                        model=self._model,
                        max_batch=self._config.max_batch,
                        on_token=self.on_token,
                    )
                ended = self._generation.advance(self._inbox, abort=self._abort)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise EngineError(
                f"engine {NAME} ran out of memory with a KV cache of {self._cache.num_bytes} bytes "
                f"(engine.max_batch = {self._config.max_batch}); lower engine.max_batch or "
                "sampling.max_tokens",
                code="out-of-memory",
                setting="engine.max_batch",
            ) from error
        return [(one.row.group.turn, one.row.sample, self._completion(one)) for one in ended]

    def _end(self) -> None:
        self._generation = None
        self._peak_bytes = max(self._peak_bytes, self._cache.num_bytes)
        self._cache.clear()

    def update_weights(self, update: WeightUpdate) -> None:
        """Sample from this version from now on.

        Raises:
            EngineError: samples are running, the update is not for this module, or its tensors do not fit;
                nothing was changed.
        """
        self._require_open()
        self._require_idle("update_weights")
        if update.shared_module is None:
            copy_weights(self._skeleton.module, update.tensors, engine=NAME)
        elif update.shared_module is not self._model.module:
            raise EngineError(
                f"engine {NAME} reads the Parameters of the module it was built with, and the update names "
                "another module; build the engine with the trainer's model, or send tensors",
                code="other-model",
                name="module",
            )
        self._cache.clear()
        self._skeleton.linears.clear()
        self._policy_version = update.policy_version

    def sleep(self) -> None:
        """Free the KV cache and scratch memory. The Parameters are the trainer's and stay."""
        self._require_open()
        self._require_idle("sleep")
        self._cache.clear()
        self._skeleton.linears.clear()
        self._sampler = Sampler()
        self._state = "asleep"

    def wake(self) -> None:
        self._require_open()
        self._state = "awake"

    def stats(self) -> EngineStats:
        return EngineStats(
            policy_version=self._policy_version,
            requests=self._requests,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            completion_tokens=self._completion_tokens,
            generate_seconds=self._seconds,
            kv_cache_bytes=self._peak_bytes,
            queued=self._open,
        )

    def close(self) -> None:
        """Idempotent; every other call but `stats` is an error afterwards."""
        self._close_stream()
        self._cache.clear()
        self._skeleton.linears.clear()
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

    def _completion(self, ended: EndedRow) -> Completion:
        row, stop = ended.row, ended.stop
        state, request = row.state, row.group.turn.request
        prompt_tokens = len(request.prompt_token_ids)
        cached = 0 if row.sample == 0 else prompt_tokens
        self._prompt_tokens += prompt_tokens
        self._cached_tokens += cached
        self._completion_tokens += len(state.token_ids)
        return Completion(
            prompt_token_ids=request.prompt_token_ids,
            token_ids=tuple(state.token_ids),
            logprobs=tuple(row.logprobs),
            finish_reason=ended.reason,
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
