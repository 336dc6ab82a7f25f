"""Documents of an offline run: how each kind loads, prepares and evaluates them.

Each kind of run has a task: its documents here, its loss from the algorithm that it is mixed with.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor

from lockstep.algorithms.offline import DPO, KTO, SFT, RewardModel, baseline, mismatched, with_baseline
from lockstep.config.algorithm import DPOConfig
from lockstep.config.data import DataConfig
from lockstep.config.run import OfflineRun
from lockstep.data.preferences import (
    PreferenceSet,
    UnpairedSet,
    load_preferences,
    load_scored_pairs,
    load_unpaired,
)
from lockstep.data.sft import SFTSet, load_sft
from lockstep.errors import DataError, together
from lockstep.loop.build import build_backend, data_parallel, load_policy
from lockstep.loop.determinism import batch_invariance_manifest
from lockstep.loop.machine import find_machine
from lockstep.loop.policy import Policy
from lockstep.loop.preflight import faults
from lockstep.loop.resolve import Resolved, resolve
from lockstep.loop.run import Run
from lockstep.models.heads import HeadKind
from lockstep.models.load import OpenedModel, open_model
from lockstep.models.memory import opened_shape
from lockstep.observe.display import Display
from lockstep.packing import Planner
from lockstep.protocols import TokenLoss, TrainBackend
from lockstep.protocols.train import StepStats
from lockstep.ranks.context import RankContext
from lockstep.schema.batch import PackedBatch, PreferenceSample, ScoredSample, TrainSample, UnpairedSample


@dataclasses.dataclass(frozen=True, kw_only=True)
class SentSample:
    """A sample of documents, as one rank sends it to the others."""

    kind: str
    """The name of its class."""
    ids: list[int]
    trained: list[int]
    """Places where loss_mask is True."""
    margin: float | None = None
    desirable: bool | None = None

    @classmethod
    def of(cls, sample: TrainSample) -> SentSample:
        """Return a sample in the form that is sent."""
        more = {name: getattr(sample, name) for name in ("margin", "desirable") if hasattr(sample, name)}
        ids, trained = sample.token_ids.tolist(), sample.loss_mask.nonzero().flatten().tolist()
        return cls(kind=type(sample).__name__, ids=ids, trained=trained, **more)

    def sample(self, number: int) -> TrainSample:
        """Return it as it was, with sample_id `number`."""
        mask = torch.zeros(len(self.ids), dtype=torch.bool)
        mask[self.trained] = True
        more = {"margin": self.margin, "desirable": self.desirable}
        known = {name: value for name, value in more.items() if value is not None}
        make: Callable[..., TrainSample] = _SENT[self.kind]
        return make(token_ids=torch.tensor(self.ids), loss_mask=mask, sample_id=number, **known)


_SENT = {kind.__name__: kind for kind in (TrainSample, PreferenceSample, ScoredSample, UnpairedSample)}


class DocumentBatches:
    """The micro-batches of each step, and those of the held-out documents."""

    def __init__(
        self,
        task: OfflineTask,
        documents: OfflineSet,
        held_out: OfflineSet | None,
        *,
        policy: Policy,
        config: OfflineRun,
        ranks: RankContext,
    ) -> None:
        self.documents, self.held_out, self._ranks = documents, held_out, ranks
        self._task, self._policy, self._size, self._seed = task, policy, config.batch_size, config.seed

    def next(self, step: int) -> list[PackedBatch]:
        """Return the micro-batches of a step, with everything that the loss reads."""
        with self._policy.spans("data"):
            samples = self._shared(step)
        with self._policy.spans("pack"):
            batches = self._packed(samples)
        if self._task.needs_ref:
            with self._policy.spans("logprobs"):
                batches = self._prepared(batches)
        return batches

    def _shared(self, step: int) -> Sequence[TrainSample]:
        """The samples of a step: rank 0 reads, renders and tokenises their rows, and sends them to the
        others."""
        if self._ranks.world_size == 1:
            return self.documents.batch(step, self._size, self._seed)

        def made() -> list[SentSample]:
            return [SentSample.of(sample) for sample in self.documents.batch(step, self._size, self._seed)]

        sent = self._ranks.on_rank_zero(made, list[SentSample], what="the documents of the step")
        return [each.sample(number) for number, each in enumerate(sent)]

    def evaluation(self) -> list[PackedBatch]:
        """Return those of all held-out documents."""
        assert self.held_out is not None, "the run has eval_data"
        self.held_out.items.make_all()
        return self._prepared(self._packed(self.held_out.batch(0, len(self.held_out), self._seed)))

    def abort(self) -> None:
        """Do nothing: a step's documents are packed at once."""

    def _packed(self, samples: Sequence[TrainSample]) -> list[PackedBatch]:
        return self._policy.plan(samples, self._task.loss_weights(samples))

    def _prepared(self, batches: Sequence[PackedBatch]) -> list[PackedBatch]:
        return self._task.prepared(batches, self._policy.backend, plan=self._policy.plan)


def build_documents(run: Run) -> tuple[OfflineTask, Policy, DocumentBatches]:
    """Load the documents, and then the policy: rows are refused before weights are read. Describes both in
    the run's manifest.

    Raises:
        ConfigError, DataError, ModelError: before anything is trained.
    """
    config, ranks = cast(OfflineRun, run.config), run.ranks
    task, machine = offline_task(config), find_machine(config, ranks)
    with ranks.fail_together("loading model and data"):
        opened = open_model(config.model, task.head)
        shape = partial(opened_shape, opened, config.model)
        resolved = resolve(config, shape=shape, machine=machine, manifest=run.dir.read_manifest())
        documents, held_out = _load(config, task, opened, run.display)
        loaded = load_policy(resolved, ranks=ranks, opened=opened)
    resolved, model = loaded.resolved, loaded.model
    backend = build_backend(resolved, model, total_steps=config.steps, temperature=1.0, ref=task.needs_ref)
    policy = Policy(
        backend,
        loaded,
        plan=_planner(resolved, ranks),
        spans=run.spans,
    )
    run.describe(resolved=resolved, model=model, data=documents.report, fingerprint=documents.fingerprint)
    run.dir.update_manifest(batch_invariance_manifest(loaded.batch_invariance, backend.contract))
    run.follow_rows(documents.items)
    batches = DocumentBatches(
        task,
        documents,
        held_out,
        policy=policy,
        config=config,
        ranks=ranks,
    )
    return task, policy, batches


def _load(
    run: OfflineRun, task: OfflineTask, model: OpenedModel, display: Display
) -> tuple[OfflineSet, OfflineSet | None]:
    """The documents, and the held-out ones. All their faults are reported together.

    Raises:
        DataError: they cannot be read, are fewer than those of a step, or one is longer than the positions.
    """
    sets: dict[str, OfflineSet] = {}

    def load(name: str, config: DataConfig) -> None:
        documents = sets[name] = task.load(config, model)
        held_out = name == "eval_data"
        n = len(documents) if held_out else run.batch_size
        if len(documents) < n:
            raise DataError(
                f"not-enough: batch_size = {n}, but only {len(documents)} {run.documents_name} of "
                f"data.source = {config.source!r} are left ({documents.report}); lower batch_size, or "
                "provide more data",
                setting="batch_size",
                documents=len(documents),
            )
        task.check(documents, steps=1 if held_out else run.steps, n=n, seed=run.seed)

    if found := faults(partial(load, name, config) for name, config in run.data_sections.items()):
        raise together(found)
    display.notes(*(each.notes for each in sets.values()))
    return sets["data"], sets.get("eval_data")


def _planner(resolved: Resolved[OfflineRun], ranks: RankContext) -> Planner:
    run = resolved.run
    return Planner(
        token_budget=resolved.token_budget,
        static_capacity=resolved.static_capacity,
        layout=resolved.layout,
        max_seqlen=max(run.data.max_length, run.eval_data.max_length if run.eval_data else 0),
        max_documents=run.documents_per_update,
        parts=data_parallel(run, ranks),
    )


# The tasks of the offline loop: their documents, their loss and their metrics.

OfflineSet = SFTSet | PreferenceSet


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
        return load_sft(config, tokenizer=model.tokenizer, **_limits(model))

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
        return load_preferences(config, tokenizer=model.tokenizer, **_limits(model))


class KTOTask(KTO, OfflineTask):
    """Answers with labels."""

    needs_ref = True

    def load(self, config: DataConfig, model: OpenedModel) -> OfflineSet:
        """See load_unpaired."""
        return load_unpaired(config, tokenizer=model.tokenizer, **_limits(model))

    def check(self, documents: OfflineSet, *, steps: int, n: int, seed: int) -> None:
        """See UnpairedSet.check_prompts."""
        assert isinstance(documents, UnpairedSet), "of load"
        documents.check_prompts(steps=steps, n=n, seed=seed)

    def prepared(
        self, batches: Sequence[PackedBatch], backend: TrainBackend, *, plan: Planner
    ) -> list[PackedBatch]:
        """Return the batches with ref_logprobs and the step's baseline, in a pass of policy and reference."""
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
            **_limits(model),
        )


def offline_task(run: OfflineRun) -> OfflineTask:
    """The task of a run."""
    return TASKS[run.kind](run.algorithm)


def _preferences(config: DPOConfig) -> OfflineTask:
    return DPOTask(config) if config.paired else KTOTask(config)


TASKS: Mapping[str, Callable[..., OfflineTask]] = {
    "sft": SFTTask,
    "dpo": _preferences,
    "rm": RewardModelTask,
}
"""By kind of run."""


def _limits(model: OpenedModel) -> dict[str, int]:
    """The limits that a document must fit."""
    return {"vocab_size": int(model.text.vocab_size), "positions": model.max_positions}


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
