"""The loss of a replay: the recorded one, or a plain one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from lockstep.algorithms.offline import DPOLoss, KTOLoss, RewardModelLoss, SFTLoss
from lockstep.algorithms.policy_loss import PolicyLoss
from lockstep.algorithms.ppo import ValueLoss
from lockstep.config.algorithm import DPOConfig, RewardModelLossConfig
from lockstep.config.ppo import ValueConfig
from lockstep.protocols.train import LossOutput, StepStats, TokenLoss
from lockstep.recording.reader import recorded_algorithm
from lockstep.schema.batch import PackedBatch
from lockstep.schema.recording import RecordingHeader

LossName = Literal["recorded", "logprob-sum", "cross-entropy"]


class LogprobSum:
    """A TokenLoss: -sum of the trained tokens' logprobs, without weights."""

    separable = True
    entropy_grad = False
    terms: tuple[str, ...] = ()

    def __call__(
        self, logprobs: Tensor, entropy: Tensor, batch: PackedBatch, rows: Tensor | slice
    ) -> LossOutput:
        """See protocols.TokenLoss."""
        return LossOutput(torch.where(batch.loss_mask[rows], -logprobs, 0.0).sum())

    def metrics(self, batches: Sequence[PackedBatch], stats: StepStats) -> dict[str, float]:
        """None."""
        return {}


class CrossEntropy(LogprobSum):
    """A TokenLoss: mean negative logprob of the input's trained tokens, nats."""

    def __call__(
        self, logprobs: Tensor, entropy: Tensor, batch: PackedBatch, rows: Tensor | slice
    ) -> LossOutput:
        """See protocols.TokenLoss."""
        total = super().__call__(logprobs, entropy, batch, rows).loss
        return LossOutput(total / batch.loss_mask.sum().clamp(min=1))


def token_loss(header: RecordingHeader, name: LossName) -> TokenLoss:
    """The loss to replay with.

    Raises:
        RecordingError: the recorded algorithm is unknown, or its options are not what it has.
    """
    if name == "logprob-sum":
        return LogprobSum()
    if name == "cross-entropy":
        return CrossEntropy()
    options = recorded_algorithm(header)
    if options is None:
        return SFTLoss()
    if isinstance(options, ValueConfig):
        return ValueLoss(options)
    if isinstance(options, RewardModelLossConfig):
        return RewardModelLoss(options)
    if isinstance(options, DPOConfig):
        return DPOLoss(options) if options.paired else KTOLoss(options)
    return PolicyLoss(options.resolved())
