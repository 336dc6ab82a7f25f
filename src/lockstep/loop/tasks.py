"""The tasks of the offline loop: their documents, their loss and their metrics."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from lockstep.algorithms.dpo import DPO
from lockstep.algorithms.pairs import PairLoss
from lockstep.algorithms.reward_model import RewardModel
from lockstep.algorithms.sft import SFT
from lockstep.config.data import DataConfig
from lockstep.config.run import DPORun, OfflineRun, RewardModelRun, SFTRun
from lockstep.data.preferences import load_preferences, load_scored_pairs
from lockstep.data.sft import load_sft
from lockstep.models.causal_lm import text_config
from lockstep.models.load import LoadedModel
from lockstep.models.scalar import HeadKind
from lockstep.protocols import TokenLoss, TrainBackend
from lockstep.protocols.train import StepStats
from lockstep.schema.batch import PackedBatch, TrainSample


class OfflineSet(Protocol):
    """Documents, or pairs of them."""

    report: dict[str, int]

    def __len__(self) -> int: ...
    @property
    def longest(self) -> int: ...
    @property
    def fingerprint(self) -> str: ...
    def batch(self, step: int, n: int, seed: int) -> Sequence[TrainSample]:
        """The samples of optimizer step `step`."""
        ...


class OfflineTask(Protocol):
    """One kind of run on documents."""

    @property
    def needs_ref(self) -> bool:
        """Whether the loss reads ref_logprobs."""
        ...

    @property
    def head(self) -> HeadKind:
        """The head of the model that is trained."""
        ...

    def load(self, config: DataConfig, model: LoadedModel) -> OfflineSet: ...
    def loss_weights(self, samples: Sequence[TrainSample]) -> list[Tensor]: ...
    def prepared(self, batches: Sequence[PackedBatch], backend: TrainBackend) -> list[PackedBatch]:
        """Return the micro-batches with every field that the loss reads."""
        ...

    def loss(self) -> TokenLoss: ...
    def held_out(self, batches: Sequence[PackedBatch], backend: TrainBackend) -> dict[str, float]:
        """Return the metrics of an evaluation on prepared batches (config.run.OFFLINE_METRICS)."""
        ...


class SFTTask(SFT):
    """Documents."""

    needs_ref = False
    head: HeadKind = "logits"

    def load(self, config: DataConfig, model: LoadedModel) -> OfflineSet:
        """See load_sft."""
        return load_sft(config, tokenizer=model.tokenizer)

    def prepared(self, batches: Sequence[PackedBatch], backend: TrainBackend) -> list[PackedBatch]:
        """As they are."""
        return list(batches)

    def held_out(self, batches: Sequence[PackedBatch], backend: TrainBackend) -> dict[str, float]:
        """loss and perplexity."""
        loss = _loss_of(self.loss(), batches, backend.logprobs(batches))
        return {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}


class DPOTask(DPO):
    """Pairs; the reference, where the loss has one, is the policy as it was loaded."""

    head: HeadKind = "logits"

    @property
    def needs_ref(self) -> bool:
        """See OfflineTask."""
        return self.config.needs_ref

    def load(self, config: DataConfig, model: LoadedModel) -> OfflineSet:
        """See load_preferences."""
        return load_preferences(config, tokenizer=model.tokenizer)

    def prepared(self, batches: Sequence[PackedBatch], backend: TrainBackend) -> list[PackedBatch]:
        """With ref_logprobs, if the loss needs them."""
        if not self.needs_ref:
            return list(batches)
        assert backend.ref is not None, "the loop asks for one where needs_ref"
        return [
            dataclasses.replace(batch, ref_logprobs=logprobs)  # type: ignore[call-arg]
            for batch, logprobs in zip(batches, backend.ref.logprobs(batches), strict=True)
        ]

    def held_out(self, batches: Sequence[PackedBatch], backend: TrainBackend) -> dict[str, float]:
        """See _held_out_pairs."""
        return _held_out_pairs(self.loss(), batches, backend)


class RewardModelTask(RewardModel):
    """Pairs, scored by a model with a scalar head."""

    needs_ref = False
    head: HeadKind = "scalar"

    def load(self, config: DataConfig, model: LoadedModel) -> OfflineSet:
        """See load_scored_pairs."""
        pad_id = text_config(model.module).pad_token_id
        return load_scored_pairs(config, tokenizer=model.tokenizer, pad_id=pad_id)

    def prepared(self, batches: Sequence[PackedBatch], backend: TrainBackend) -> list[PackedBatch]:
        """As they are."""
        return list(batches)

    def held_out(self, batches: Sequence[PackedBatch], backend: TrainBackend) -> dict[str, float]:
        """See _held_out_pairs."""
        return _held_out_pairs(self.loss(), batches, backend)


def offline_task(run: OfflineRun) -> OfflineTask:
    """The task of a run."""
    if isinstance(run, DPORun):
        return DPOTask(run.algorithm)
    if isinstance(run, RewardModelRun):
        return RewardModelTask(run.algorithm)
    assert isinstance(run, SFTRun)
    return SFTTask(run.algorithm)


def _held_out_pairs(
    loss: PairLoss, batches: Sequence[PackedBatch], backend: TrainBackend
) -> dict[str, float]:
    """loss, and the metrics of a step."""
    outputs = backend.logprobs(batches)
    stats = StepStats(losses=[], logprobs=outputs, entropy=[])
    return {"loss": _loss_of(loss, batches, outputs), **loss.metrics(batches, stats)}


def _loss_of(loss: TokenLoss, batches: Sequence[PackedBatch], logprobs: Sequence[Tensor]) -> float:
    return sum(
        float(loss(each, each, batch.to(each.device), slice(0, batch.num_slots)).loss)
        for batch, each in zip(batches, logprobs, strict=True)
    )
