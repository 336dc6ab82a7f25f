"""The protocols of train backends, inference engines, weight transfers, reward functions and cluster
providers.

Names are imported on first use, so that a reward's process does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.protocols.cluster import Node as Node
    from lockstep.protocols.cluster import Placement as Placement
    from lockstep.protocols.cluster import Provider as Provider
    from lockstep.protocols.cluster import RankEnded as RankEnded
    from lockstep.protocols.cluster import Slot as Slot
    from lockstep.protocols.cluster import World as World
    from lockstep.protocols.engine import EngineStats as EngineStats
    from lockstep.protocols.engine import Finished as Finished
    from lockstep.protocols.engine import Handle as Handle
    from lockstep.protocols.engine import InferenceEngine as InferenceEngine
    from lockstep.protocols.engine import ReceivesWeights as ReceivesWeights
    from lockstep.protocols.engine import SamplesTokens as SamplesTokens
    from lockstep.protocols.engine import SharesWeights as SharesWeights
    from lockstep.protocols.engine import WeightTransfer as WeightTransfer
    from lockstep.protocols.reward import RewardFunction as RewardFunction
    from lockstep.protocols.reward import RewardInput as RewardInput
    from lockstep.protocols.train import Algorithm as Algorithm
    from lockstep.protocols.train import Estimates as Estimates
    from lockstep.protocols.train import LossOutput as LossOutput
    from lockstep.protocols.train import Reference as Reference
    from lockstep.protocols.train import Saved as Saved
    from lockstep.protocols.train import Scorer as Scorer
    from lockstep.protocols.train import StepStats as StepStats
    from lockstep.protocols.train import TokenLoss as TokenLoss
    from lockstep.protocols.train import TrainBackend as TrainBackend
    from lockstep.protocols.train import ValueAlgorithm as ValueAlgorithm

_HOMES = {
    "Algorithm": "train",
    "EngineStats": "engine",
    "Estimates": "train",
    "Finished": "engine",
    "Handle": "engine",
    "InferenceEngine": "engine",
    "LossOutput": "train",
    "Node": "cluster",
    "Placement": "cluster",
    "Provider": "cluster",
    "RankEnded": "cluster",
    "ReceivesWeights": "engine",
    "Reference": "train",
    "RewardFunction": "reward",
    "RewardInput": "reward",
    "SamplesTokens": "engine",
    "Saved": "train",
    "Scorer": "train",
    "SharesWeights": "engine",
    "Slot": "cluster",
    "StepStats": "train",
    "TokenLoss": "train",
    "TrainBackend": "train",
    "ValueAlgorithm": "train",
    "WeightTransfer": "engine",
    "World": "cluster",
}

__all__ = [
    "Algorithm",
    "EngineStats",
    "Estimates",
    "Finished",
    "Handle",
    "InferenceEngine",
    "LossOutput",
    "Node",
    "Placement",
    "Provider",
    "RankEnded",
    "ReceivesWeights",
    "Reference",
    "RewardFunction",
    "RewardInput",
    "SamplesTokens",
    "Saved",
    "Scorer",
    "SharesWeights",
    "Slot",
    "StepStats",
    "TokenLoss",
    "TrainBackend",
    "ValueAlgorithm",
    "WeightTransfer",
    "World",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
