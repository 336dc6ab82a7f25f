from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from lockstep.schema.rollout import Completion, GenerationRequest
from lockstep.schema.weights import WeightUpdate

OnCompletion = Callable[[int, int, Completion], None]
"""Called with (request index, sample index, completion) as soon as a sample finishes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStats:
    """Totals since the engine started."""

    policy_version: int
    requests: int
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens whose computation was shared or cached."""
    completion_tokens: int
    generate_seconds: float
    kv_cache_bytes: int
    """High-water mark."""


class InferenceEngine(Protocol):
    """Token ids in, token ids and logprobs out."""

    def generate(
        self, requests: Sequence[GenerationRequest], *, on_completion: OnCompletion | None = None
    ) -> list[list[Completion]]:
        """One list per request, in request order, its samples in seed order. Raises EngineError."""
        ...

    def update_weights(self, update: WeightUpdate) -> None:
        """Take this version of the weights and drop every cache made with an older one."""
        ...

    def sleep(self) -> None:
        """Give back what memory it can; `generate` is an error until `wake`."""
        ...

    def wake(self) -> None: ...

    def abort(self) -> None:
        """Safe from another thread: running samples end now with finish_reason "abort"."""
        ...

    def stats(self) -> EngineStats: ...

    def close(self) -> None: ...
