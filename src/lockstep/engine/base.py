"""Bases of the engines: what does not depend on who computes the tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lockstep.engine.requests import Decoding, RequestCheck, completion_text
from lockstep.engine.spec import EngineSpec
from lockstep.engine.streaming import Streaming, Turn
from lockstep.errors import EngineError
from lockstep.protocols.engine import EngineStats
from lockstep.schema.rollout import Completion, FinishReason, GenerationRequest, SamplingParams
from lockstep.schema.weights import UpdateSession

Ending = tuple[FinishReason, int | str | None]
"""Why a sample ended, and the stop token or string that ended it."""


class ModelEngine(Streaming):
    """An engine of one model: awake, asleep, closed or broken; it checks requests and counts tokens."""

    def __init__(
        self,
        name: str,
        *,
        vocab_size: int,
        max_positions: int,
        tokenizer: Any | None,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        super().__init__(name)
        self._tokenizer, self._eos_token_ids = tokenizer, eos_token_ids
        self._check_request = RequestCheck(
            vocab_size=vocab_size,
            max_positions=max_positions,
            tokenizer=tokenizer,
            eos_token_ids=eos_token_ids,
        )
        self._state = "awake"
        self._policy_version = 0
        self._prompt_tokens = self._cached_tokens = self._completion_tokens = 0
        self._kv_bytes = 0
        """Of the KV cache, at most so far."""
        self._kv_use: float | None = None
        self._restarts = 0

    def _check(self, turn: Turn) -> None:
        self._check_request(turn.request, index=turn.index)

    def _require_open(self) -> None:
        if self._state == "closed":
            raise EngineError(f"wrong-state: engine {self.name} is closed; build a new one", state="closed")
        if self._state == "broken":
            raise EngineError(
                f"wrong-state: engine {self.name} failed earlier and cannot go on; build a new one",
                state="failed",
            )

    def _require_awake(self, what: str) -> None:
        self._require_open()
        if self._state != "awake":
            raise EngineError(
                f"wrong-state: engine {self.name} is {self._state}; call wake() before {what}",
                state=self._state,
            )

    def _require_ready(self) -> None:
        if self._state != "awake":
            self._require_awake("generate")

    def decoding(self, sampling: SamplingParams) -> Decoding | None:
        """How completions sampled with `sampling` become text; None for a model without a tokenizer."""
        if self._tokenizer is None:
            return None
        return Decoding.of(self._tokenizer, sampling, eos_token_ids=self._eos_token_ids)

    def _completion(  # the request, the sample's seed, and what was sampled
        self,
        request: GenerationRequest,
        seed: int,
        *,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        ending: Ending,
        cached_tokens: int,
    ) -> Completion:
        """Count a sample that has ended; returns it."""
        reason, stop = ending
        self._prompt_tokens += len(request.prompt_token_ids)
        self._cached_tokens += cached_tokens
        self._completion_tokens += len(token_ids)
        return Completion(
            prompt_token_ids=request.prompt_token_ids,
            token_ids=tuple(token_ids),
            logprobs=tuple(logprobs),
            finish_reason=reason,
            stop_reason=stop,
            text=completion_text(
                self.decoding(request.sampling),
                token_ids,
                stop=stop if isinstance(stop, str) else None,
                keep=request.sampling.keep_stop,
            ),
            seed=seed,
            engine=self.name,
            policy_version=self._policy_version,
            cached_tokens=cached_tokens,
        )

    def stats(self) -> EngineStats:
        """See lockstep.protocols.InferenceEngine."""
        return EngineStats(
            policy_version=self._policy_version,
            requests=self._requests,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            completion_tokens=self._completion_tokens,
            generate_seconds=self._seconds,
            kv_cache_bytes=self._kv_bytes,
            queued=self._open,
            kv_cache_use=self._kv_use,
            restarts=self._restarts,
        )


class ReceivingEngine(ModelEngine):
    """An engine with weights of its own, which come in sessions."""

    external = True

    def __init__(self, name: str, *, spec: EngineSpec) -> None:
        super().__init__(
            name,
            vocab_size=spec.vocab_size,
            max_positions=spec.max_model_len,
            tokenizer=spec.tokenizer,
            eos_token_ids=spec.eos_token_ids,
        )
        self._spec = spec
        self._session: UpdateSession | None = None
        self.dirty = spec.weights == "pushed"
        """Whether the weights are not a whole update: the engine then refuses to generate."""
        self.recover: Callable[..., None] | None = None
        """Sends the current weights to a restarted server; set by the sender of the weights."""

    def _require_no_session(self, what: str) -> None:
        if self._session is not None:
            raise EngineError(
                f"wrong-state: engine {self.name} is being updated to policy version "
                f"{self._session.policy_version}; {what} after finish_update or fail_update",
                state="in-update",
            )

    def _require_clean(self) -> None:
        if self.dirty:
            raise EngineError(
                f"wrong-state: engine {self.name} is dirty: it holds no whole version of the policy (no "
                "update yet, or the last one failed, or its server was started again); send it a whole "
                "update first",
                state="dirty",
            )

    def _require_ready(self) -> None:
        super()._require_ready()
        self._require_no_session("generate")
        self._require_clean()

    def _open_session(self) -> UpdateSession:
        self._require_open()
        if self._session is None:
            raise EngineError(
                f"wrong-state: engine {self.name}: no update is open; call begin_update first",
                state="no-update",
            )
        return self._session
