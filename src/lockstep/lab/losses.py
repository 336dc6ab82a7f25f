"""What is differentiated: the recorded loss, or a plain one."""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import ValidationError
from torch import Tensor

from lockstep.algorithms.dpo import DPOLoss
from lockstep.algorithms.policy_loss import PolicyLoss
from lockstep.algorithms.sft import SFTLoss
from lockstep.config.algorithm import PUBLISHED, DPOConfig, GRPOConfig
from lockstep.errors import RecordingError, unknown_name
from lockstep.protocols.train import TokenLoss
from lockstep.schema.batch import PackedBatch
from lockstep.schema.recording import RecordingHeader

LossName = Literal["recorded", "logprob-sum", "cross-entropy"]


class LogprobSum:
    """A TokenLoss: -sum of the trained tokens' logprobs, without weights."""

    separable = True
    entropy_grad = False

    def __call__(self, logprobs: Tensor, entropy: Tensor, batch: PackedBatch, rows: Tensor | slice) -> Tensor:
        """See protocols.TokenLoss."""
        return torch.where(batch.loss_mask[rows], -logprobs, 0.0).sum()


class CrossEntropy:
    """A TokenLoss: mean negative logprob of the input's trained tokens, nats."""

    separable = True
    entropy_grad = False

    def __call__(self, logprobs: Tensor, entropy: Tensor, batch: PackedBatch, rows: Tensor | slice) -> Tensor:
        """See protocols.TokenLoss."""
        total = torch.where(batch.loss_mask[rows], -logprobs, 0.0).sum()
        return total / batch.loss_mask.sum().clamp(min=1)


def token_loss(header: RecordingHeader, name: LossName) -> TokenLoss:
    """The loss to replay with.

    Raises:
        RecordingError: the recorded algorithm is unknown, or its options are not what it has.
    """
    if name == "logprob-sum":
        return LogprobSum()
    if name == "cross-entropy":
        return CrossEntropy()
    algorithm: Any = header.algorithm.get("name")
    if algorithm in ("sft", "surrogate"):
        return SFTLoss()
    if algorithm not in PUBLISHED and algorithm != "dpo":
        problem = unknown_name("algorithm", str(algorithm), (*PUBLISHED, "sft", "dpo", "surrogate"))
        raise RecordingError(
            f"recording.json: field 'algorithm.name': {problem}; or choose --loss logprob-sum|cross-entropy"
        )
    try:
        if algorithm == "dpo":
            return DPOLoss(DPOConfig.model_validate(dict(header.algorithm)))
        config = GRPOConfig.model_validate(dict(header.algorithm))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(("algorithm", *map(str, first["loc"])))
        raise RecordingError(
            f"recording.json: field {where!r}: {first['msg']}; or choose --loss logprob-sum|cross-entropy"
        ) from error
    return PolicyLoss(config.resolved())
