"""The token loss of a value model, and its metrics."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.config.ppo import ValueConfig
from lockstep.errors import TrainError
from lockstep.ops.masks import masked
from lockstep.ops.values import value_loss
from lockstep.protocols.train import LossOutput, StepStats
from lockstep.schema.batch import PackedBatch, ValueBatch


class ValueLoss:
    """A TokenLoss of a model with a scalar head: see lockstep.ops.values.value_loss, times loss_weights.

    Raises:
        TrainError: from a call: the batch is of another kind.
    """

    separable = True
    entropy_grad = False
    terms: tuple[str, ...] = ("clipped",)

    def __init__(self, config: ValueConfig) -> None:
        self.config = config

    def __call__(
        self, logprobs: Tensor, entropy: Tensor, batch: PackedBatch, rows: Tensor | slice
    ) -> LossOutput:
        """See protocols.TokenLoss; `logprobs` are values."""
        batch, config = _value_batch(batch), self.config
        mask = batch.loss_mask[rows]
        tokens = value_loss(
            masked(logprobs, mask),
            masked(batch.returns[rows], mask),
            masked(batch.old_values[rows], mask),
            clip=config.clip,
            kind=config.loss,
            huber_delta=config.huber_delta,
        )
        weighted = tokens.loss * masked(batch.loss_weights[rows], mask)
        return LossOutput(weighted.sum(), tokens.clipped.to(logprobs.dtype)[None])

    def metrics(self, batches: Sequence[PackedBatch], stats: StepStats) -> dict[str, float]:
        """Return error, the mean of |value - return| before the update, and clip_fraction, a share of tokens;
        empty when there is none."""
        masks = [b.loss_mask.to(x.device) for b, x in zip(batches, stats.logprobs, strict=True)]
        errors = torch.cat(
            [
                (values - _value_batch(batch).returns.to(values.device))[mask]
                for values, batch, mask in zip(stats.logprobs, batches, masks, strict=True)
            ]
        )
        if not len(errors):
            return {}
        clipped = torch.cat([x[0, mask] for x, mask in zip(stats.terms, masks, strict=True)])
        error, share = torch.stack([errors.abs().mean(), clipped.mean()]).tolist()
        return {"error": error, "clip_fraction": share}


def _value_batch(batch: PackedBatch) -> ValueBatch:
    if not isinstance(batch, ValueBatch):
        raise TrainError(
            f"wrong-batch: a value loss needs a ValueBatch, got {type(batch).__name__}; pack ValueSamples"
        )
    return batch
