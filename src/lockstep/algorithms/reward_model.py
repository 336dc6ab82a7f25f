"""The loss of a reward model on pairs of answers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lockstep.algorithms.pairs import PairLoss, of_pairs, pair_weights
from lockstep.config.algorithm import RewardModelLossConfig
from lockstep.errors import TrainError
from lockstep.ops.masks import document_sums, masked
from lockstep.ops.preferences import bradley_terry
from lockstep.schema.batch import PreferenceBatch, TrainSample


class RewardModelLoss(PairLoss):
    """Of a model with a scalar head, whose output at a document's one trained slot is the document's score.

    Raises:
        TrainError: from a call: the batch has no margins.
    """

    def __init__(self, config: RewardModelLossConfig) -> None:
        super().__init__(needs_ref=False, average=False, beta=1.0)
        self.config = config

    def pair_losses(self, chosen: Tensor, rejected: Tensor, batch: PreferenceBatch) -> Tensor:
        """See PairLoss."""
        if batch.margins is None:
            raise TrainError(
                "missing-values: a reward model's loss needs margins, 0 where there are none; pack "
                "ScoredSamples",
                name="margins",
            )
        margins = document_sums(masked(batch.margins.to(chosen.device), batch.loss_mask), batch.cu_seqlens)
        margin = of_pairs(margins, batch)[:, 0]
        return bradley_terry(chosen, rejected, margin=margin, center_coef=self.config.center_coef)


class RewardModel:
    """Pairs for a reward model. Shares loss_weights and loss with Algorithm."""

    def __init__(self, config: RewardModelLossConfig) -> None:
        self.config = config

    def loss_weights(self, samples: Sequence[TrainSample]) -> list[Tensor]:
        """See pair_weights."""
        return pair_weights(samples)

    def loss(self) -> RewardModelLoss:
        """Return the loss, which is not separable."""
        return RewardModelLoss(self.config)
