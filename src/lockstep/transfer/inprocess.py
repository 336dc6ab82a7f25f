"""Trainer and engine in one process: the engine reads the trainer's Parameters, so nothing is copied; where
no rank has them whole, it takes the gathered weights."""

from __future__ import annotations

from typing import cast

from lockstep.protocols.engine import InferenceEngine, SharesWeights
from lockstep.protocols.train import TrainBackend


class InProcessTransfer:
    """Implements lockstep.protocols.WeightTransfer by handing over `source.weights(...)`.

    On several ranks each pushes to its own engine, all together: gathering weights is collective.
    """

    def push(self, source: TrainBackend, target: InferenceEngine, *, policy_version: int) -> None:
        """Afterwards `target` samples from `source`'s weights and stamps `policy_version` on completions.

        Raises:
            EngineError: the engine refused the weights; it kept its own.
        """
        cast(SharesWeights, target).update_weights(source.weights(policy_version=policy_version))
