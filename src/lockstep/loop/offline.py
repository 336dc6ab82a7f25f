"""The loop over documents: SFT, DPO and its successors, reward models.

documents ─► packs ─► (DPO: reference logprobs) ─► loss + backward (per micro-batch) ─► optimizer step
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from lockstep.algorithms.preferences import DPO, KTO, RewardModel, baseline, mismatched, with_baseline
from lockstep.algorithms.sft import SFT
from lockstep.config.algorithm import DPOConfig
from lockstep.config.data import DataConfig
from lockstep.config.run import OfflineRun
from lockstep.data.preferences import UnpairedSet, load_preferences, load_scored_pairs, load_unpaired
from lockstep.data.sft import load_sft
from lockstep.errors import DataError, together
from lockstep.loop.build import (
    Policy,
    build_backend,
    data_parallel,
    load_policy,
    recording_header,
)
from lockstep.loop.determinism import batch_invariance_manifest, deterministic, weights_hash
from lockstep.loop.distributed import connect_ranks
from lockstep.loop.metrics import CompileMeter, shape_metrics
from lockstep.loop.preflight import faults, preflight
from lockstep.loop.resolve import Resolved, find_machine, resolve
from lockstep.loop.session import Session
from lockstep.models.heads import HeadKind
from lockstep.models.load import OpenedModel, check_positions, open_model
from lockstep.models.memory import opened_shape
from lockstep.observe.display import Display
from lockstep.packing import Planner
from lockstep.protocols import TokenLoss, TrainBackend
from lockstep.protocols.train import StepStats
from lockstep.ranks.context import RankContext
from lockstep.schema.batch import PackedBatch, TrainSample


def train_offline(
    run: OfflineRun,
    *,
    resume: Path | None = None,
    checkpoint: int | None = None,
    restart: bool = False,
    ranks: RankContext | None = None,
) -> dict[str, Any]:
    """Fine-tune a policy on documents; returns the run's summary (see `Session.finish`).

    Args:
        resume: a run directory to go on from; `run` is its config.
        checkpoint: the step of the checkpoint to go on from; None is the last.
        restart: begin the run in `run.run_dir` again; what it has written is kept beside.
        ranks: every one of them makes this call; None: those of this process's launcher, if it has one.
    """
    if (summary := preflight(run, resume=resume, checkpoint=checkpoint, restart=restart)) is not None:
        return summary
    with (
        deterministic(run.train),
        connect_ranks(run, ranks) as ranks,
        Session(run, resume=resume, checkpoint=checkpoint, restart=restart, ranks=ranks) as session,
    ):
        task = offline_task(run)
        policy, documents, held_out = _open(run, task, session)
        resolved, model, run = policy.resolved, policy.model, policy.resolved.run
        backend = build_backend(resolved, model, total_steps=run.steps, temperature=1.0, ref=task.needs_ref)
        plan = _planner(resolved, ranks)
        session.describe(
            resolved=resolved, model=model, data=documents.report, fingerprint=documents.fingerprint
        )
        contract, compiled = backend.contract, CompileMeter(backend, ranks=ranks)
        session.dir.update_manifest(batch_invariance_manifest(policy.batch_invariance, contract))
        first_step = session.restore(backend)
        header = recording_header(resolved, model=model, plan=plan, contract=contract)
        recorder = session.recorder(header, first_step=first_step, model=model, backend=backend)
        backend, loss = backend if recorder is None else recorder.around(backend), task.loss()

        def packs(documents: OfflineSet, step: int, n: int) -> list[PackedBatch]:
            samples = documents.batch(step, n, run.seed)
            return plan(samples, task.loss_weights(samples))

        def evaluate(done: int) -> bool:
            """The held-out loss that is due after `done` steps; False when there is none."""
            name = "before" if done == 0 else "after" if done == run.steps else "during"
            due = name != "during" or session.is_due(run.eval_every, done)
            if held_out is None or not due or session.evaluated(name, done):
                return False
            with session.spans("evaluate"):
                batches = task.prepared(packs(held_out, 0, len(held_out)), backend, plan=plan)
                numbers = task.held_out(batches, backend)
            session.log_evaluation(name, done, numbers)
            return True

        with session.interruptible():
            for done in range(first_step, run.steps + 1):
                with session.keeping(done, backend):
                    fresh = not session.stopping() and evaluate(done)
                if session.stopping():
                    return session.interrupted(done, backend)
                if session.is_due(run.checkpoint.every, done) and (fresh or done > first_step):
                    session.save(done, backend)
                if done == run.steps:
                    break
                session.begin_step(done)
                with session.spans("pack"):
                    batches = packs(documents, done, run.batch_size)
                if task.needs_ref:
                    with session.spans("logprobs"):
                        batches = task.prepared(batches, backend, plan=plan)
                with session.spans("forward_backward"):
                    stats = backend.forward_backward(batches, loss)
                with session.spans("optimizer"):
                    update = backend.optimizer_step()
                metrics = {"loss": float(sum(stats.losses)), **update, **loss.metrics(batches, stats)}
                metrics |= shape_metrics(batches) | compiled.metrics()
                weights = weights_hash(backend) if run.train.deterministic else None
                session.log_step(done, metrics, weights_hash=weights)
                session.copy(done + 1, backend)
            return session.finish(run.steps, backend)


def _open(
    run: OfflineRun, task: OfflineTask, session: Session
) -> tuple[Policy[OfflineRun], OfflineSet, OfflineSet | None]:
    """The policy, the documents and the held-out ones: rows are refused before weights are read."""
    machine, ranks = find_machine(run, session.ranks), session.ranks
    with ranks.together("loading model and data"):
        opened = open_model(run.model, task.head)
        shape = partial(opened_shape, opened, run.model)
        resolved = resolve(run, shape=shape, machine=machine, manifest=session.dir.read_manifest())
        documents, held_out = _load(run, task, opened, session.display)
        return load_policy(resolved, ranks=ranks, opened=opened), documents, held_out


def _load(
    run: OfflineRun, task: OfflineTask, model: OpenedModel, display: Display
) -> tuple[OfflineSet, OfflineSet | None]:
    """The documents, and the held-out ones. All their faults are reported together.

    Raises:
        DataError: they cannot be read, or are fewer than those of a step.
        ConfigError: one is longer than the positions.
    """
    sets: dict[str, OfflineSet] = {}

    def load(name: str, config: DataConfig) -> None:
        documents = sets[name] = task.load(config, model)
        subject = (
            f"{name}.max_length = {config.max_length} lets the longest document of {config.source!r} have "
            f"{documents.longest} tokens"
        )
        check_positions(model, documents.longest, setting=f"{name}.max_length", subject=subject)
        held_out = name == "eval_data"
        n = len(documents) if held_out else run.batch_size
        if len(documents) < n:
            raise DataError(
                f"not-enough: batch_size = {n}, but only {len(documents)} {run.documents_name} of "
                f"data.source = {config.source!r} are left ({documents.report}); lower batch_size, or give "
                "more data",
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
    return TASKS[run.kind](run.algorithm)


def _preferences(config: DPOConfig) -> OfflineTask:
    return DPOTask(config) if config.paired else KTOTask(config)


TASKS: Mapping[str, Callable[..., OfflineTask]] = {
    "sft": SFTTask,
    "dpo": _preferences,
    "rm": RewardModelTask,
}
"""By kind of run."""


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
