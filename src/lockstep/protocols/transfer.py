from __future__ import annotations

from typing import Literal, Protocol

from lockstep.protocols.engine import InferenceEngine
from lockstep.protocols.train import TrainBackend
from lockstep.schema.weights import MemoryReport, Transport


class WeightTransfer(Protocol):
    """Sends the trainer's weights to an engine, all of them, in one push."""

    before: MemoryReport | None
    """Before the last push, as is `after` after it; None: not measured."""
    after: MemoryReport | None

    @property
    def transport(self) -> Transport | Literal["shared"]:
        """How weights travel; shared: they do not, the engine reads the trainer's."""
        ...

    def push(self, source: TrainBackend, target: InferenceEngine, *, policy_version: int) -> None:
        """Send the weights of `source`, from which `target` samples afterwards. Raises EngineError; after a
        push that failed the engine must not sample from half an update."""
        ...

    def check(self, target: InferenceEngine) -> bool:
        """Compare the weights of the last push with what the engine holds; False: there is nothing to
        compare. Raises EngineError: it holds others, and is dirty now."""
        ...

    def close(self) -> None: ...
