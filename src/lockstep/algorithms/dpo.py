"""Direct preference optimisation (arXiv 2305.18290) and the losses of pairs that came after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lockstep.config.algorithm import DPOConfig
from lockstep.errors import DataError, TrainError
from lockstep.ops.masks import document_sums, masked
from lockstep.ops.preferences import dpo, ipo, orpo, robust_dpo, simpo
from lockstep.protocols.train import LossOutput, StepStats
from lockstep.schema.batch import PackedBatch, PreferenceBatch, TrainSample

Rows = Tensor | slice


class DPOLoss:
    """A TokenLoss over pairs; not separable, since a token's gradient depends on all of both answers.

    Raises:
        TrainError: from a call, when the batch holds no pairs or no ref_logprobs.
    """

    separable = False
    entropy_grad = False
    terms: tuple[str, ...] = ()

    def __init__(self, config: DPOConfig) -> None:
        self.config = config.resolved()

    def __call__(self, logprobs: Tensor, entropy: Tensor, batch: PackedBatch, rows: Rows) -> LossOutput:
        """See protocols.TokenLoss; rows must hold every trained slot of the batch."""
        batch = _preferences(batch)
        slots = logprobs.new_zeros(batch.num_slots)
        slots[rows] = logprobs
        losses = pair_losses(*self.scores(slots, batch), self.config)
        weights = masked(batch.loss_weights, batch.loss_mask)
        documents = torch.segment_reduce(weights, "max", offsets=batch.cu_seqlens.long(), initial=0.0)
        return LossOutput((losses * _pairs(documents, batch).amax(1)).sum())

    def scores(self, logprobs: Tensor, batch: PreferenceBatch) -> tuple[Tensor, Tensor]:
        """[P] each: the score of the chosen and of the rejected answers, see lockstep.ops.preferences, nats.
        logprobs: [T]."""
        scores = masked(logprobs, batch.loss_mask)
        if self.config.needs_ref:
            if batch.ref_logprobs is None:
                raise TrainError(
                    f"{self.config.name} compares with a reference, but the batch has no ref_logprobs; run "
                    "backend.ref.logprobs(batches) first"
                )
            scores = scores - masked(batch.ref_logprobs.to(logprobs.device), batch.loss_mask)
        documents = document_sums(scores, batch.cu_seqlens)
        if self.config.average:
            trained = document_sums(batch.loss_mask.to(scores.dtype), batch.cu_seqlens)
            documents = documents / trained.clamp(min=1)
        chosen, rejected = _pairs(documents, batch).unbind(1)
        return chosen, rejected

    def metrics(self, batches: Sequence[PackedBatch], stats: StepStats) -> dict[str, float]:
        """Return means over the step's pairs: rewards (beta times the score) of chosen and rejected answers,
        their margin, and the share of pairs whose chosen answer has the higher one."""
        assert self.config.beta is not None, "resolved"
        chosen, rejected = (
            torch.cat(column) * self.config.beta
            for column in zip(
                *(
                    self.scores(logprobs, _preferences(batch).to(logprobs.device))  # type: ignore[arg-type]
                    for batch, logprobs in zip(batches, stats.logprobs, strict=True)
                ),
                strict=True,
            )
        )
        margin = chosen - rejected
        figures = torch.stack([chosen, rejected, margin, (margin > 0).to(margin.dtype)]).mean(1)
        names = ("reward_chosen", "reward_rejected", "reward_margin", "accuracy")
        return dict(zip(names, figures.tolist(), strict=True))


def pair_losses(chosen: Tensor, rejected: Tensor, config: DPOConfig) -> Tensor:
    """[P]: the loss of each pair, by the scores of its answers, [P] each. config: resolved."""
    loss, names = _LOSSES[config.name]
    return loss(chosen, rejected, **{name: getattr(config, name) for name in names})


_LOSSES: dict[str, tuple[Callable[..., Tensor], tuple[str, ...]]] = {
    "dpo": (dpo, ("beta", "label_smoothing")),
    "robust_dpo": (robust_dpo, ("beta", "label_smoothing")),
    "ipo": (ipo, ("beta",)),
    "simpo": (simpo, ("beta", "margin")),
    "orpo": (orpo, ("beta",)),
}


class DPO:
    """Preference pairs, with ref_logprobs where the loss needs them. Shares loss_weights and loss with
    Algorithm."""

    def __init__(self, config: DPOConfig) -> None:
        self.config = config

    def loss_weights(self, samples: Sequence[TrainSample]) -> list[Tensor]:
        """Return [L] float32 per sample: 1 / pairs of the step at every trained token, so that the loss is
        the mean over pairs. Raises DataError when there is an odd number of samples."""
        if len(samples) % 2:
            raise DataError(f"{len(samples)} samples are no preference pairs: there is one without its other")
        return [sample.loss_mask.to(torch.float32) * (2.0 / len(samples)) for sample in samples]

    def loss(self) -> DPOLoss:
        """Return the loss, which is not separable."""
        return DPOLoss(self.config)


def _pairs(documents: Tensor, batch: PreferenceBatch) -> Tensor:
    """[P, 2]: a figure of each document [D] as (chosen, rejected)."""
    return documents[: len(batch.sample_ids)].view(-1, 2)


def _preferences(batch: PackedBatch) -> PreferenceBatch:
    if not isinstance(batch, PreferenceBatch):
        raise TrainError(f"DPO needs a PreferenceBatch, got {type(batch).__name__}; pack PreferenceSamples")
    return batch
