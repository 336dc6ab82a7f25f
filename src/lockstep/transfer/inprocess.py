"""Trainer and engine in one process: the engine reads the trainer's Parameters, so nothing is copied; where
no rank has them whole, it takes the gathered weights."""

from __future__ import annotations

from typing import Literal, cast

from lockstep.protocols.engine import InferenceEngine, SharesWeights
from lockstep.protocols.train import TrainBackend
from lockstep.schema.weights import MemoryReport


class InProcessTransfer:
    """Implements lockstep.protocols.WeightTransfer by handing over `source.weights(...)`.

    On several ranks each pushes to its own engine, all together: gathering weights is collective.
    """

    transport: Literal["shared"] = "shared"
    before: MemoryReport | None = None
    after: MemoryReport | None = None

    def push(self, source: TrainBackend, target: InferenceEngine, *, policy_version: int) -> None:
        """Afterwards `target` samples from `source`'s weights and stamps `policy_version` on completions.

        Raises:
            EngineError: the engine refused the weights; it kept its own.
        """
        cast(SharesWeights, target).update_weights(source.weights(policy_version=policy_version))

    def check(self, target: InferenceEngine) -> bool:
        """False: the engine has no weights of its own."""
        return False

    def close(self) -> None:
        """Nothing is held."""
