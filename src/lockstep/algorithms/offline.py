"""Losses on preferences: DPO and its family, reward models, and KTO, which takes single answers."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lockstep.config.algorithm import DPOConfig, RewardModelLossConfig, SFTConfig
from lockstep.errors import DataError, TrainError
from lockstep.ops.losses import bradley_terry, dpo, ipo, kto, loss_weights, orpo, robust_dpo, simpo
from lockstep.ops.masks import document_sums, masked
from lockstep.protocols.train import LossOutput, StepStats
from lockstep.schema.batch import PackedBatch, PreferenceBatch, TrainSample, UnpairedBatch, prompt_ids

# Supervised fine-tuning.


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


# What losses of pairs of answers share: the scores of both answers, weights, and metrics.


Rows = Tensor | slice


class PairLoss(ABC):
    """A TokenLoss over pairs. Not separable: the gradient of a token depends on all tokens of both answers.

    The *score* of an answer is the sum of the model's outputs over its trained slots, see
    lockstep.ops.losses: logprobs, or the single output of a scalar head.

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
        """Return the loss of each pair, [P], from the scores of its answers, [P] each."""

    def __call__(self, logprobs: Tensor, entropy: Tensor, batch: PackedBatch, rows: Rows) -> LossOutput:
        """See protocols.TokenLoss; `rows` must contain every trained slot of the batch."""
        batch = PreferenceBatch.of(batch)
        slots = logprobs.new_zeros(batch.num_slots)
        slots[rows] = logprobs
        losses = self.pair_losses(*self.scores(slots, batch), batch)
        weights = masked(batch.loss_weights, batch.loss_mask)
        # Every trained slot of a document has the same weight. The larger one of a pair counts below: an
        # answer without a trained slot has none.
        documents = torch.segment_reduce(weights, "max", offsets=batch.cu_seqlens.long(), initial=0.0)
        return LossOutput((losses * of_pairs(documents, batch).amax(1)).sum())

    def scores(self, outputs: Tensor, batch: PreferenceBatch) -> tuple[Tensor, Tensor]:
        """Return the scores of the chosen and the rejected answers, [P] each. outputs: [T]."""
        scores = masked(outputs, batch.loss_mask)
        if self.needs_ref:
            if batch.ref_logprobs is None:
                raise TrainError(
                    "missing-values: the loss needs a reference, but the batch has no ref_logprobs; run "
                    "backend.ref.logprobs(batches) first"
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
        share of pairs whose chosen answer has the higher reward."""
        chosen, rejected = (
            torch.cat(column) * self.beta
            for column in zip(
                *(
                    self.scores(outputs, PreferenceBatch.of(batch).to(outputs.device))  # type: ignore[arg-type]
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
            f"wrong-pairs: {len(samples)} samples cannot be preference pairs: the number is odd, so one of "
            "them has no counterpart"
        )
    return [sample.loss_mask.to(torch.float32) * (2.0 / len(samples)) for sample in samples]


def of_pairs(documents: Tensor, batch: PreferenceBatch) -> Tensor:
    """Reshape a value per document, [D], to [P, 2]: (chosen, rejected)."""
    # The remaining documents are padding.
    return documents[: len(batch.sample_ids)].view(-1, 2)


# Direct preference optimisation (arXiv 2305.18290) and the losses of pairs that came after it.


_LOSSES: dict[str, tuple[Callable[..., Tensor], tuple[str, ...]]] = {
    "dpo": (dpo, ("beta", "label_smoothing")),
    "robust_dpo": (robust_dpo, ("beta", "label_smoothing")),
    "ipo": (ipo, ("beta",)),
    "simpo": (simpo, ("beta", "margin")),
    "orpo": (orpo, ("beta",)),
}
"""Name -> the loss of a pair, and the options it takes."""


class DPOLoss(PairLoss):
    """The pair loss named by `config.name`."""

    def __init__(self, config: DPOConfig) -> None:
        config = config.resolved()
        assert config.beta is not None, "resolved"
        super().__init__(needs_ref=config.needs_ref, average=bool(config.average), beta=config.beta)
        self.config = config

    def pair_losses(self, chosen: Tensor, rejected: Tensor, batch: PreferenceBatch) -> Tensor:
        """See PairLoss."""
        loss, names = _LOSSES[self.config.name]
        return loss(chosen, rejected, **{name: getattr(self.config, name) for name in names})


class DPO:
    """Preference pairs, with ref_logprobs if the loss needs them. Implements loss_weights and loss of
    Algorithm."""

    def __init__(self, config: DPOConfig) -> None:
        self.config = config

    def loss_weights(self, samples: Sequence[TrainSample]) -> list[Tensor]:
        """See pair_weights."""
        return pair_weights(samples)

    def loss(self) -> DPOLoss:
        """Return the loss, which is not separable."""
        return DPOLoss(self.config)


# The loss of a reward model on pairs of answers.


class RewardModelLoss(PairLoss):
    """The loss of a model with a scalar head, whose output at a document's only trained slot is its score.

    Raises:
        TrainError: on a call, if the batch has no margins.
    """

    def __init__(self, config: RewardModelLossConfig) -> None:
        super().__init__(needs_ref=False, average=False, beta=1.0)
        self.config = config

    def pair_losses(self, chosen: Tensor, rejected: Tensor, batch: PreferenceBatch) -> Tensor:
        """See PairLoss."""
        if batch.margins is None:
            raise TrainError(
                "missing-values: a reward model's loss needs margins, which may be 0, but the batch has "
                "none; pack ScoredSamples"
            )
        margins = document_sums(masked(batch.margins.to(chosen.device), batch.loss_mask), batch.cu_seqlens)
        margin = of_pairs(margins, batch)[:, 0]
        return bradley_terry(chosen, rejected, margin=margin, center_coef=self.config.center_coef)


class RewardModel:
    """Pairs for a reward model. Implements loss_weights and loss of Algorithm."""

    def __init__(self, config: RewardModelLossConfig) -> None:
        self.config = config

    def loss_weights(self, samples: Sequence[TrainSample]) -> list[Tensor]:
        """See pair_weights."""
        return pair_weights(samples)

    def loss(self) -> RewardModelLoss:
        """Return the loss, which is not separable."""
        return RewardModelLoss(self.config)


# Kahneman-Tversky optimisation (arXiv 2402.01306): labelled answers instead of pairs.
#
# Its baseline z0 is an estimate of KL(policy || ref): the mean of log(policy / ref) over the prompts of the
# optimizer step, each with the answer to another one, at least 0 and without gradient. It is computed before
# the step's forward pass, over the whole step, so that it depends neither on packing nor on the number of
# micro-batches or ranks. (TRL computes it per micro-batch, over ranks.)


class KTOLoss:
    """A TokenLoss over answers. Not separable: the gradient of a token depends on its whole answer.

    Raises:
        TrainError: on a call, if the batch lacks labels, ref_logprobs or kl_baseline.
    """

    separable = False
    entropy_grad = False
    terms: tuple[str, ...] = ()

    def __init__(self, config: DPOConfig) -> None:
        self.config = config.resolved()

    def __call__(self, logprobs: Tensor, entropy: Tensor, batch: PackedBatch, rows: Rows) -> LossOutput:
        """See protocols.TokenLoss; `rows` must contain every trained slot of the batch."""
        batch = UnpairedBatch.of(batch)
        if batch.kl_baseline is None:
            raise TrainError("missing-values: KTO needs a baseline; set the batch's kl_baseline first")
        slots = logprobs.new_zeros(batch.num_slots)
        slots[rows] = logprobs
        options = self.config
        assert options.beta is not None, "resolved"
        assert options.desirable_weight is not None and options.undesirable_weight is not None, "resolved"
        losses = kto(
            log_ratios(slots, batch),
            _of_documents(batch.desirability, batch) > 0,
            _of_documents(batch.kl_baseline, batch),
            beta=options.beta,
            weights=(options.desirable_weight, options.undesirable_weight),
        )
        weights = _of_documents(batch.loss_weights, batch)
        return LossOutput((losses * weights).sum())

    def metrics(self, batches: Sequence[PackedBatch], stats: StepStats) -> dict[str, float]:
        """Return means over the step's answers: rewards (beta log(policy / ref), nats) of desirable and of
        undesirable answers, if any, and their margin; kl, the baseline; and accuracy, see `pair_accuracy`."""
        assert self.config.beta is not None, "resolved"
        answers = [UnpairedBatch.of(batch) for batch in batches]
        rewards, desirable = [], []
        for batch, logprobs in zip(answers, stats.logprobs, strict=True):
            count = len(batch.sample_ids)
            rewards.append(self.config.beta * log_ratios(logprobs, batch.to(logprobs.device))[:count].cpu())  # type: ignore[arg-type]
            desirable.append(_of_documents(batch.desirability, batch)[:count].cpu() > 0)
        reward, good = torch.cat(rewards), torch.cat(desirable)
        figures = {
            "kl": max(float(batch.kl_baseline.max()) for batch in answers if batch.kl_baseline is not None)
        }
        if bool(good.any()):
            figures["reward_chosen"] = float(reward[good].mean())
        if not bool(good.all()):
            figures["reward_rejected"] = float(reward[~good].mean())
        if bool(good.any()) and not bool(good.all()):
            figures["reward_margin"] = figures["reward_chosen"] - figures["reward_rejected"]
            prompts = [prompt_ids(*document) for batch in answers for document in _documents(batch)]
            figures["accuracy"] = pair_accuracy(reward.tolist(), good.tolist(), prompts)
        return figures


class KTO:
    """Labelled answers with ref_logprobs and a baseline. Implements loss_weights and loss of Algorithm."""

    def __init__(self, config: DPOConfig) -> None:
        self.config = config

    def loss_weights(self, samples: Sequence[TrainSample]) -> list[Tensor]:
        """Return [L] float32 per sample: 1 / answers of the step at every trained token, so that the loss is
        the mean over answers."""
        return [sample.loss_mask.to(torch.float32) / len(samples) for sample in samples]

    def loss(self) -> KTOLoss:
        """Return the loss, which is not separable."""
        return KTOLoss(self.config)


def mismatched(batches: Sequence[PackedBatch], *, max_length: int) -> list[TrainSample]:
    """Pair each prompt of the step with the nearest preceding answer (by sample_id, cyclically) that belongs
    to another prompt. Documents are cut at max_length and skipped if no answer remains.

    Raises:
        TrainError: all answers belong to one prompt.
    """
    documents: dict[int, tuple[Tensor, Tensor]] = {}
    for batch in batches:
        documents.update(zip(batch.sample_ids, _documents(batch), strict=True))
    ordered = [documents[sample_id] for sample_id in sorted(documents)]
    prompts = [prompt_ids(ids, mask) for ids, mask in ordered]
    # Of the first one the last that is to another prompt, by its index from the end.
    other = next((i for i in range(-1, -len(prompts), -1) if prompts[i] != prompts[0]), None)
    if other is None:
        raise TrainError(
            f"wrong-batch: all {len(ordered)} answers of the step are to one prompt, but KTO's baseline "
            "combines each prompt with the answer to another prompt; raise batch_size"
        )
    samples = []
    for number, prompt in enumerate(prompts):
        if number and prompts[number - 1] != prompt:  # else it is as far away as for the one before
            other = number - 1
        answer = ordered[other][0][len(prompts[other]) :]
        whole = torch.cat([torch.tensor(prompt, dtype=torch.int64), answer])[:max_length]
        trained = torch.zeros(len(whole), dtype=torch.bool)
        trained[len(prompt) - 1 : -1] = True
        if bool(trained.any()):
            samples.append(TrainSample(token_ids=whole, loss_mask=trained, sample_id=number))
    return samples


def baseline(batches: Sequence[PackedBatch], policy: Sequence[Tensor], ref: Sequence[Tensor]) -> float:
    """Return z0, nats, at least 0, from packed `mismatched` samples and their logprobs, [T] each; 0 without
    samples."""
    ratios = [
        document_sums(
            masked(ours - theirs, batch.loss_mask.to(ours.device)), batch.cu_seqlens.to(ours.device)
        )[: len(batch.sample_ids)].cpu()
        for batch, ours, theirs in zip(batches, policy, ref, strict=True)
    ]
    # A divergence is not negative, and this estimate of one may be.
    return max(float(torch.cat(ratios).mean()), 0.0) if ratios else 0.0


def with_baseline(batch: PackedBatch, z0: float) -> UnpairedBatch:
    """Return the batch with the baseline at every trained token."""
    batch = UnpairedBatch.of(batch)
    return dataclasses.replace(batch, kl_baseline=batch.loss_mask * z0)


def log_ratios(logprobs: Tensor, batch: UnpairedBatch) -> Tensor:
    """Return log(policy / ref) of each answer, [D] nats; differentiable. logprobs: [T].

    Raises:
        TrainError: the batch has no ref_logprobs.
    """
    if batch.ref_logprobs is None:
        raise TrainError(
            "missing-values: KTO needs a reference, but the batch has no ref_logprobs; run "
            "backend.ref.logprobs(batches) first"
        )
    ref = masked(batch.ref_logprobs.to(logprobs.device), batch.loss_mask)
    return document_sums(masked(logprobs, batch.loss_mask) - ref, batch.cu_seqlens)


def pair_accuracy(
    rewards: Sequence[float], desirable: Sequence[bool], prompts: Sequence[tuple[int, ...]]
) -> float:
    """Return the share of (desirable, undesirable) pairs of answers to one prompt in which the desirable
    answer has the higher reward; if no prompt has both kinds, the share over all such pairs. Needs one answer
    of each kind.

    Example:
        >>> pair_accuracy([1.0, 0.5, 2.0, 3.0], [True, False, True, False], [(1,), (1,), (2,), (2,)])
        0.5
    """
    groups: dict[tuple[int, ...], tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    for reward, good, prompt in zip(rewards, desirable, prompts, strict=True):
        groups[prompt][0 if good else 1].append(reward)
    both = [group for group in groups.values() if group[0] and group[1]]
    if not both:
        good_ones = [reward for reward, good in zip(rewards, desirable, strict=True) if good]
        both = [(good_ones, [reward for reward, good in zip(rewards, desirable, strict=True) if not good])]
    won = sum(one > other for good_ones, bad_ones in both for one in good_ones for other in bad_ones)
    return won / sum(len(good_ones) * len(bad_ones) for good_ones, bad_ones in both)


def _documents(batch: PackedBatch) -> list[tuple[Tensor, Tensor]]:
    """Return (ids, mask) of each document, [L] each."""
    return list(zip(batch.split(batch.token_ids), batch.split(batch.loss_mask), strict=True))


def _of_documents(values: Tensor, batch: PackedBatch) -> Tensor:
    """Return the value at a document's trained slots, which is the same in all of them, [D]; 0 without
    any."""
    kept = masked(values, batch.loss_mask)
    offsets = batch.cu_seqlens.long()
    # The other slots are 0, so the value is either the maximum or the minimum, depending on its sign.
    high = torch.segment_reduce(kept, "max", offsets=offsets, initial=0.0)
    return high + torch.segment_reduce(kept, "min", offsets=offsets, initial=0.0)
