"""The tasks of the offline loop: their documents, their loss and their metrics."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from lockstep.algorithms.preferences import DPO, KTO, RewardModel, baseline, mismatched, with_baseline
from lockstep.algorithms.sft import SFT
from lockstep.config.data import DataConfig
from lockstep.config.run import DPORun, OfflineRun, RewardModelRun, SFTRun
from lockstep.data.preferences import UnpairedSet, load_preferences, load_scored_pairs, load_unpaired
from lockstep.data.sft import load_sft
from lockstep.models.load import OpenedModel
from lockstep.models.scalar import HeadKind
from lockstep.packing import Planner
from lockstep.protocols import TokenLoss, TrainBackend
from lockstep.protocols.train import StepStats
from lockstep.schema.batch import PackedBatch, TrainSample


class OfflineSet(Protocol):
    """Documents, or pairs of them."""

    report: dict[str, int]
    notes: tuple[str, ...]

    def __len__(self) -> int: ...
    @property
    def longest(self) -> int: ...
    @property
    def fingerprint(self) -> str: ...
    def batch(self, step: int, n: int, seed: int) -> Sequence[TrainSample]:
        """The samples of optimizer step `step`."""
        ...


class OfflineTask(ABC):
    """One kind of run on documents: its documents here, their loss from the algorithm that it is mixed with.

    Where a task says nothing else, its loss needs no reference, and its evaluation has the metrics of a step.
    """

    head: HeadKind = "logits"
    """The head of the model that is trained."""

    @property
    def needs_ref(self) -> bool:
        """Whether the loss reads ref_logprobs: those of the policy as it was loaded."""
        return False

    @abstractmethod
    def load(self, config: DataConfig, model: OpenedModel) -> OfflineSet: ...
    def check(self, documents: OfflineSet, *, steps: int, n: int, seed: int) -> None:  # noqa: B027
        """Check that the batches of n documents of all steps can be trained on. Raises DataError."""

    @abstractmethod
    def loss_weights(self, samples: Sequence[TrainSample]) -> list[Tensor]: ...
    @abstractmethod
    def loss(self) -> TokenLoss: ...
    def prepared(
        self, batches: Sequence[PackedBatch], backend: TrainBackend, *, plan: Planner
    ) -> list[PackedBatch]:
        """Return the micro-batches with every field that the loss reads. plan: of the run."""
        return _with_ref(batches, backend) if self.needs_ref else list(batches)

    def held_out(self, batches: Sequence[PackedBatch], backend: TrainBackend) -> dict[str, float]:
        """Return the metrics of an evaluation on prepared batches (config.run.OFFLINE_METRICS)."""
        loss, logprobs = self.loss(), backend.logprobs(batches)
        stats = StepStats(losses=[], logprobs=logprobs, entropy=[])
        return {"loss": _loss_of(loss, batches, logprobs), **loss.metrics(batches, stats)}


class SFTTask(SFT, OfflineTask):
    """Documents."""

    def load(self, config: DataConfig, model: OpenedModel) -> OfflineSet:
        """See load_sft."""
        return load_sft(config, tokenizer=model.tokenizer, vocab_size=_vocab_size(model))

    def held_out(self, batches: Sequence[PackedBatch], backend: TrainBackend) -> dict[str, float]:
        """loss and perplexity."""
        loss = _loss_of(self.loss(), batches, backend.logprobs(batches))
        return {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}


class DPOTask(DPO, OfflineTask):
    """Pairs."""

    @property
    def needs_ref(self) -> bool:
        """See OfflineTask."""
        return self.config.needs_ref

    def load(self, config: DataConfig, model: OpenedModel) -> OfflineSet:
        """See load_preferences."""
        return load_preferences(config, tokenizer=model.tokenizer, vocab_size=_vocab_size(model))


class KTOTask(KTO, OfflineTask):
    """Answers with labels."""

    needs_ref = True

    def load(self, config: DataConfig, model: OpenedModel) -> OfflineSet:
        """See load_unpaired."""
        return load_unpaired(config, tokenizer=model.tokenizer, vocab_size=_vocab_size(model))

    def check(self, documents: OfflineSet, *, steps: int, n: int, seed: int) -> None:
        """See UnpairedSet.check_prompts."""
        assert isinstance(documents, UnpairedSet), "of load"
        documents.check_prompts(steps=steps, n=n, seed=seed)

    def prepared(
        self, batches: Sequence[PackedBatch], backend: TrainBackend, *, plan: Planner
    ) -> list[PackedBatch]:
        """With ref_logprobs and the step's baseline, which takes a pass of policy and reference."""
        assert backend.ref is not None, "the loop asks for one where needs_ref"
        others = mismatched(batches, max_length=plan.max_seqlen)
        packed = plan(others, [sample.loss_mask.float() for sample in others])
        z0 = baseline(packed, backend.logprobs(packed), backend.ref.logprobs(packed))
        return [with_baseline(batch, z0) for batch in super().prepared(batches, backend, plan=plan)]


class RewardModelTask(RewardModel, OfflineTask):
    """Pairs, scored by a model with a scalar head."""

    head: HeadKind = "scalar"

    def load(self, config: DataConfig, model: OpenedModel) -> OfflineSet:
        """See load_scored_pairs."""
        return load_scored_pairs(
            config,
            tokenizer=model.tokenizer,
            pad_id=model.text.pad_token_id,
            vocab_size=_vocab_size(model),
        )


def offline_task(run: OfflineRun) -> OfflineTask:
    """The task of a run."""
    if isinstance(run, DPORun):
        return DPOTask(run.algorithm) if run.algorithm.paired else KTOTask(run.algorithm)
    if isinstance(run, RewardModelRun):
        return RewardModelTask(run.algorithm)
    assert isinstance(run, SFTRun)
    return SFTTask(run.algorithm)


def _vocab_size(model: OpenedModel) -> int:
    return int(model.text.vocab_size)


def _with_ref(batches: Sequence[PackedBatch], backend: TrainBackend) -> list[PackedBatch]:
    assert backend.ref is not None, "the loop asks for one where needs_ref"
    return [
        dataclasses.replace(batch, ref_logprobs=logprobs)  # type: ignore[call-arg]
        for batch, logprobs in zip(batches, backend.ref.logprobs(batches), strict=True)
    ]


def _loss_of(loss: TokenLoss, batches: Sequence[PackedBatch], logprobs: Sequence[Tensor]) -> float:
    return sum(
        float(loss(each, each, batch.to(each.device), slice(0, batch.num_slots)).loss)
        for batch, each in zip(batches, logprobs, strict=True)
    )
