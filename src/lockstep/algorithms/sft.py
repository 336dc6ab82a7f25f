"""Supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.config.algorithm import SFTConfig
from lockstep.ops.losses import loss_weights
from lockstep.ops.masks import masked
from lockstep.protocols.train import LossOutput, StepStats
from lockstep.schema.batch import PackedBatch, TrainSample


class SFTLoss:
    """A TokenLoss: -sum of loss_weights * logprobs."""

    separable = True
    entropy_grad = False
    terms: tuple[str, ...] = ()

    def __call__(
        self, logprobs: Tensor, entropy: Tensor, batch: PackedBatch, rows: Tensor | slice
    ) -> LossOutput:
        """See protocols.TokenLoss."""
        mask = batch.loss_mask[rows]
        return LossOutput((-masked(logprobs, mask) * masked(batch.loss_weights[rows], mask)).sum())

    def metrics(self, batches: Sequence[PackedBatch], stats: StepStats) -> dict[str, float]:
        """Return nll and entropy per trained token of the step, nats; empty when there is none."""
        masks = [
            batch.loss_mask.to(logprobs.device)
            for batch, logprobs in zip(batches, stats.logprobs, strict=True)
        ]
        logprobs, entropy = (
            torch.cat([x[mask] for x, mask in zip(column, masks, strict=True)])
            for column in (stats.logprobs, stats.entropy)
        )
        if logprobs.numel() == 0:
            return {}
        nll, mean_entropy = torch.stack([-logprobs.mean(), entropy.mean()]).tolist()
        return {"nll": nll, "entropy": mean_entropy}


class SFT:
    """Cross-entropy of the labels. Shares loss_weights and loss with protocols.Algorithm."""

    def __init__(self, config: SFTConfig) -> None:
        self.config = config

    def loss_weights(self, samples: Sequence[TrainSample]) -> list[Tensor]:
        """See lockstep.ops.losses.loss_weights; `samples` are all of one optimizer step."""
        return loss_weights([sample.loss_mask for sample in samples], aggregation=self.config.aggregation)

    def loss(self) -> SFTLoss:
        """Return the loss, which is separable."""
        return SFTLoss()
