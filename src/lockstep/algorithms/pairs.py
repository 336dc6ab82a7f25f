"""What losses of pairs of answers share: the scores of both answers, weights, and metrics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.errors import DataError, TrainError
from lockstep.ops.masks import document_sums, masked
from lockstep.protocols.train import LossOutput, StepStats
from lockstep.schema.batch import PackedBatch, PreferenceBatch, TrainSample

Rows = Tensor | slice


class PairLoss(ABC):
    """A TokenLoss over pairs; not separable, since a token's gradient depends on all of both answers.

    The *score* of an answer is the sum of the model's outputs over its trained slots, see
    lockstep.ops.preferences: logprobs, or the one number of a scalar head.

    Args:
        needs_ref: outputs count less the reference's logprobs.
        average: a score is divided by the number of trained slots.
        beta: metrics are of rewards, beta times scores.

    Raises:
        TrainError: from a call, when the batch holds no pairs, or no ref_logprobs where they are needed.
    """

    separable = False
    entropy_grad = False
    terms: tuple[str, ...] = ()

    def __init__(self, *, needs_ref: bool, average: bool, beta: float) -> None:
        self.needs_ref, self.average, self.beta = needs_ref, average, beta

    @abstractmethod
    def pair_losses(self, chosen: Tensor, rejected: Tensor, batch: PreferenceBatch) -> Tensor:
        """[P]: the loss of each pair, by the scores of its answers, [P] each."""

    def __call__(self, logprobs: Tensor, entropy: Tensor, batch: PackedBatch, rows: Rows) -> LossOutput:
        """See protocols.TokenLoss; rows must hold every trained slot of the batch."""
        batch = _preferences(batch)
        slots = logprobs.new_zeros(batch.num_slots)
        slots[rows] = logprobs
        losses = self.pair_losses(*self.scores(slots, batch), batch)
        weights = masked(batch.loss_weights, batch.loss_mask)
        # Every trained slot of a document has the same weight. The larger one of a pair counts below: an
        # answer without a trained slot has none.
        documents = torch.segment_reduce(weights, "max", offsets=batch.cu_seqlens.long(), initial=0.0)
        return LossOutput((losses * of_pairs(documents, batch).amax(1)).sum())

    def scores(self, outputs: Tensor, batch: PreferenceBatch) -> tuple[Tensor, Tensor]:
        """[P] each: the scores of the chosen and of the rejected answers. outputs: [T]."""
        scores = masked(outputs, batch.loss_mask)
        if self.needs_ref:
            if batch.ref_logprobs is None:
                raise TrainError(
                    "missing-values: the loss compares with a reference, but the batch has no ref_logprobs; "
                    "run backend.ref.logprobs(batches) first",
                    name="ref_logprobs",
                )
            scores = scores - masked(batch.ref_logprobs.to(outputs.device), batch.loss_mask)
        documents = document_sums(scores, batch.cu_seqlens)
        if self.average:
            trained = document_sums(batch.loss_mask.to(scores.dtype), batch.cu_seqlens)
            documents = documents / trained.clamp(min=1)
        chosen, rejected = of_pairs(documents, batch).unbind(1)
        return chosen, rejected

    def metrics(self, batches: Sequence[PackedBatch], stats: StepStats) -> dict[str, float]:
        """Return means over the step's pairs: rewards of chosen and rejected answers, their margin, and the
        share of pairs whose chosen answer has the higher one."""
        chosen, rejected = (
            torch.cat(column) * self.beta
            for column in zip(
                *(
                    self.scores(outputs, _preferences(batch).to(outputs.device))  # type: ignore[arg-type]
                    for batch, outputs in zip(batches, stats.logprobs, strict=True)
                ),
                strict=True,
            )
        )
        margin = chosen - rejected
        figures = torch.stack([chosen, rejected, margin, (margin > 0).to(margin.dtype)]).mean(1)
        names = ("reward_chosen", "reward_rejected", "reward_margin", "accuracy")
        return dict(zip(names, figures.tolist(), strict=True))


def pair_weights(samples: Sequence[TrainSample]) -> list[Tensor]:
    """Return [L] float32 per sample: 1 / pairs of the step at every trained slot, so that the loss is the
    mean over pairs.

    Raises:
        DataError: there is an odd number of samples.
    """
    if len(samples) % 2:
        raise DataError(
            f"wrong-pairs: {len(samples)} samples are not preference pairs: one has no counterpart",
            samples=len(samples),
        )
    return [sample.loss_mask.to(torch.float32) * (2.0 / len(samples)) for sample in samples]


def of_pairs(documents: Tensor, batch: PreferenceBatch) -> Tensor:
    """[P, 2]: a figure of each document [D] as (chosen, rejected)."""
    # The rest are pad documents.
    return documents[: len(batch.sample_ids)].view(-1, 2)


def _preferences(batch: PackedBatch) -> PreferenceBatch:
    if not isinstance(batch, PreferenceBatch):
        raise TrainError(
            f"wrong-batch: a loss of pairs needs a PreferenceBatch, got {type(batch).__name__}; pack "
            "PreferenceSamples"
        )
    return batch
