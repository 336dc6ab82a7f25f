"""The seams: what a train backend, an inference engine, a weight transfer and a reward function must be."""

from lockstep.protocols.engine import EngineStats, InferenceEngine, ReceivesWeights, SharesWeights
from lockstep.protocols.reward import RewardFunction, RewardInput
from lockstep.protocols.train import Algorithm, StepStats, TokenLoss, TrainBackend
from lockstep.protocols.transfer import WeightTransfer

__all__ = [
    "Algorithm",
    "EngineStats",
    "InferenceEngine",
    "ReceivesWeights",
    "RewardFunction",
    "RewardInput",
    "SharesWeights",
    "StepStats",
    "TokenLoss",
    "TrainBackend",
    "WeightTransfer",
]
