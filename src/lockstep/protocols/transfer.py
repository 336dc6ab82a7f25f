from __future__ import annotations

from typing import Protocol

from lockstep.protocols.engine import InferenceEngine
from lockstep.protocols.train import TrainBackend


class WeightTransfer(Protocol):
    """Sends the trainer's weights to an engine, all of them, in one push."""

    def push(self, source: TrainBackend, target: InferenceEngine, *, policy_version: int) -> None:
        """Send the weights of `source`, from which `target` samples afterwards. Raises EngineError; after a
        push that failed the engine must not sample from half an update."""
        ...
