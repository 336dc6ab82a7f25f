"""Records the inputs of a train backend, and the policy's outputs.

    forward_backward ─► inputs on the disk ("pending") ─► the backend's forward_backward
    optimizer_step   ─► the backend's optimizer_step    ─► the same inputs with their outputs ("finished")

So whatever kills the process, the input that killed it is there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from lockstep.common_errors import leads_out
from lockstep.config.record import RecordConfig
from lockstep.errors import RecordingError
from lockstep.observe.metrics import Spans
from lockstep.protocols.train import FinishSave, Scorer, StepStats, TokenLoss, TrainBackend
from lockstep.ranks.context import RankContext
from lockstep.recording.files import fingerprint, module_tensors
from lockstep.recording.weights import FILE, save_tensors, save_weights, stored_fingerprint
from lockstep.recording.writer import RecordingWriter
from lockstep.schema.batch import PackedBatch
from lockstep.schema.contract import CompileReport
from lockstep.schema.recording import VALUE, InputMeta, RecordedInput, RecordedOutputs, RecordingHeader
from lockstep.schema.rollout import RolloutGroup
from lockstep.schema.weights import TensorSource, WeightUpdate

_ERROR_CHARACTERS = 2000
_WEIGHTS = re.compile(r"step-(\d{6,12})")
# The names of the families' configs. Applied inside the
# kernel, so that no module of the class Dropout shows it.
_ATTENTION_DROPOUT = ("attention_dropout", "attn_dropout", "attn_pdrop", "attention_probs_dropout_prob")


@dataclass(frozen=True, kw_only=True, slots=True)
class RecorderSettings:
    """Settings of a recorder."""

    config: RecordConfig
    header: RecordingHeader
    updates_per_step: int = 1
    """Optimizer steps per step of the loop."""
    resume_at: int = 0
    """The first step of this process: earlier recordings of it and of later steps are removed."""
    inputs_seen: int = 0
    """Inputs of earlier steps, recorded or not: counting to `config.every` continues from there."""
    rank: int = 0
    """Rank among those that micro-batches are assigned to. Rank 0 writes the header and stores weights."""
    world_size: int = 1
    mesh: Mapping[str, int] = field(default_factory=dict)
    """Mesh axis -> coordinate of this rank."""
    own_batches: bool = True
    """The batches of a call are this rank's own. False: they are those of all ranks, and batch i is
    assigned to rank i % world_size (see `lockstep.train.assignment.assigned_indices`)."""
    writes: bool = True
    """False: another process records the same rank (they share its matrices or tokens)."""


@dataclass(slots=True)
class _Part:
    """One call of forward_backward."""

    inputs: list[RecordedInput]
    indices: list[int]
    """Index of each input among the batches of the call."""
    count: int
    """Number of batches of the call."""
    stats: StepStats | None = None


class Recorder:
    """Writes the inputs of one rank.

    The loop announces its step (`begin_step`) and the rollouts of the documents (`see`); the batches come
    through a RecordingBackend.

    Args:
        directory: of the recording; a run's recordings/, so that its checkpoints/ are found beside it.
        module: the policy, which is fingerprinted and stored.
        spans: times the recorder's work under "record".
        spread: the run's ranks and what yields whole weights by name, called by all of them together, where
            the module of each has only a part. Weights are then fingerprinted only where they are stored.
    """

    def __init__(
        self,
        directory: Path,
        settings: RecorderSettings,
        *,
        module: nn.Module,
        spans: Spans | None = None,
        spread: tuple[RankContext, TensorSource] | None = None,
    ) -> None:
        self.directory, self.settings = directory, settings
        self.inputs_seen = settings.inputs_seen
        """Inputs so far; when assigned to ranks, of the rank that has most."""
        self._module, self._spans, self._spread = module, spans, spread
        self._draws = draws_random_numbers(module)
        self._writer: RecordingWriter | None = None
        if settings.writes:
            self._writer = RecordingWriter(
                directory, settings.header, rank=settings.rank, resume_at=settings.resume_at
            )
        self._weights_stored = self._rewind_weights()
        if spread is not None:  # what is gathered must be decided by all alike
            self._weights_stored = spread[0].broadcast(self._weights_stored, bool, what="looking for weights")
        self._step, self._update = settings.resume_at, 0
        self._documents: tuple[Mapping[str, Any], ...] = ()
        self._parts: list[_Part] = []

    def around(self, backend: TrainBackend) -> TrainBackend:
        """The backend whose inputs are recorded."""
        return RecordingBackend(backend, self)

    def begin_step(self, step: int) -> None:
        """Announce the step of the loop that the next inputs belong to."""
        self._step, self._update = step, 0
        self._documents, self._parts = (), []

    def see(self, groups: Iterable[RolloutGroup]) -> None:
        """The step's rollouts; sample_id i of a batch is the i-th of their parts."""
        if self.settings.config.covers(self._step):
            self._documents = tuple(_documents(groups))

    def before(self, batches: Sequence[PackedBatch]) -> None:
        """Write batches that the backend is about to get: they are on the disk when this returns."""
        settings, config = self.settings, self.settings.config
        own = range(
            0 if settings.own_batches else settings.rank,
            len(batches),
            1 if settings.own_batches else settings.world_size,
        )
        # Every rank counts the rank with most, so that all agree on which of their inputs `every` chooses.
        most = len(batches) if settings.own_batches else -(-len(batches) // settings.world_size)
        first, self.inputs_seen = self.inputs_seen, self.inputs_seen + most
        part = _Part([], [], len(own))
        self._parts.append(part)
        if not config.covers(self._step):
            return
        chosen = [i for i in range(most) if (first + i) % config.every == 0]
        every = config.weights_every
        is_due = every is not None and self._step % every == 0 and self._update == 0 and len(self._parts) == 1
        if not chosen and not is_due:
            return
        with self._timed():
            # Before the return below: with spread weights it is
            # collective, and ranks that write nothing take part.
            weights, checkpoint = self._weights(is_due=is_due)
            if self._writer is None:
                return
            before = sum(other.count for other in self._parts[:-1])
            chosen = [i for i in chosen if i < len(own)]
            part.indices = [own[i] for i in chosen]
            for number, index in zip((before + i for i in chosen), part.indices, strict=True):
                documents = self._documents
                ids = batches[index].sample_ids
                meta = InputMeta(
                    step=self._step,
                    update=self._step * self.settings.updates_per_step + self._update,
                    micro_batch=number,
                    # As far as is known now; `_write` corrects it
                    # when all calls of the optimizer step are in.
                    num_micro_batches=before + len(own),
                    rank=self.settings.rank,
                    world_size=self.settings.world_size,
                    mesh=self.settings.mesh,
                    time=time.time(),
                    weights=weights,
                    checkpoint=checkpoint,
                    outcome="pending",
                    documents=tuple(documents[i] for i in ids) if documents else (),
                )
                # Only the first: the state before a later one is
                # known only when the earlier ones have drawn from it.
                rng = torch.get_rng_state() if self._draws and number == 0 else None
                part.inputs.append(
                    RecordedInput(meta=meta, batch=_on_host(batches[index]), outputs=None, rng=rng)
                )
            if part.inputs:
                self._writer.begin(part.inputs)

    def record_outputs(self, stats: StepStats) -> None:
        """Record the outputs of the batches of the last `before`."""
        self._parts[-1].stats = stats

    def finish(self, *, grad_norm: float | None) -> None:
        """Finish an optimizer step: write the outputs to the disk."""
        self._write("finished", grad_norm=grad_norm)
        self._update += 1

    def fail(self, error: Exception) -> None:
        """Fail an optimizer step: its inputs stay on the disk, marked as failed."""
        self._write("failed", error=f"{type(error).__name__}: {error}"[:_ERROR_CHARACTERS])

    def close(self) -> None:
        """Close; everything is safe on the disk, and inputs that never finished stay pending."""
        if self._writer is not None:
            self._writer.close()

    def _write(
        self,
        outcome: Literal["finished", "failed"],
        *,
        grad_norm: float | None = None,
        error: str | None = None,
    ) -> None:
        parts, self._parts = self._parts, []
        if self._writer is None or not any(part.inputs for part in parts):
            return
        total = sum(part.count for part in parts)
        with self._timed():
            inputs: list[RecordedInput] = []
            for part in parts:
                outputs: list[RecordedOutputs] | None = None
                # After a failure the device may give nothing back any more; the error itself goes on.
                with contextlib.suppress(RuntimeError) if error else contextlib.nullcontext():
                    outputs = _outputs(part, grad_norm)
                for i, each in enumerate(part.inputs):
                    meta = dataclasses.replace(
                        each.meta, outcome=outcome, error=error, num_micro_batches=total
                    )
                    result = outputs[i] if outputs else None
                    inputs.append(dataclasses.replace(each, meta=meta, outputs=result))
            self._writer.finish(inputs)

    def _timed(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._spans is None else self._spans("record")

    def _weights(self, *, is_due: bool) -> tuple[str | None, str | None]:
        """(fingerprint of the weights, their folder); the weights are stored if it is time to."""
        if self._spread is None:
            weights = fingerprint(module_tensors(self._module).items())
            return weights, self._checkpoint(weights, is_due=is_due)
        is_first = self.settings.config.weights != "none" and not self._weights_stored
        return self._gathered() if is_due or is_first else (None, self._of_run())

    def _gathered(self) -> tuple[str, str]:
        """The weights of all ranks, stored by rank 0. Collective."""
        assert self._spread is not None
        ranks, whole = self._spread
        name = f"weights/step-{self._step:06d}"
        names = module_tensors(self._module).keys()
        kept = {
            key: tensor.to("cpu", copy=True)
            for key, tensor in whole()
            if key in names and ranks.is_first  # the others only take part
        }
        self._weights_stored = True
        return ranks.on_rank_zero(
            lambda: save_tensors(kept, self.directory / name), str, what="storing weights"
        ), name

    def _of_run(self) -> str | None:
        """The run's checkpoint of the weights that the step starts from, if it is one file."""
        of_run = f"../checkpoints/step-{self._step:06d}"
        own = f"{of_run}/value" if self.settings.header.role == VALUE else of_run
        complete = (self.directory / of_run / "complete.json").is_file()
        is_whole = complete and (self.directory / own / FILE).is_file()
        return own if self._update == 0 and is_whole else None

    def _checkpoint(self, weights: str, *, is_due: bool) -> str | None:
        """Store the weights if it is time to, and return their folder."""
        name = f"weights/step-{self._step:06d}"
        folder = self.directory / name
        is_first = self.settings.config.weights != "none" and not self._weights_stored
        if self.settings.rank == 0 and (is_due or is_first):
            save_weights(self._module, folder, known=weights)
            self._weights_stored = True
        # Compared, as an update within the step changes the weights after they were stored.
        if (folder / FILE).is_file() and stored_fingerprint(folder) == weights:
            return name
        return self._of_run()

    def _rewind_weights(self) -> bool:
        """Remove the weights of steps that will be done again; returns whether any are left."""
        left = False
        for folder in sorted((self.directory / "weights").glob("step-*")):
            match = _WEIGHTS.fullmatch(folder.name)
            if match is None:
                continue
            if (link := folder).is_symlink() or (link := folder.parent).is_symlink():
                raise leads_out(RecordingError, link, "the recording")
            if int(match[1]) >= self.settings.resume_at and self.settings.rank == 0:
                shutil.rmtree(folder)
            else:
                left = True
        return left


class RecordingBackend:
    """A TrainBackend around another one, which records inputs and outputs without changing them."""

    def __init__(self, backend: TrainBackend, recorder: Recorder) -> None:
        self.inner, self.recorder = backend, recorder
        self.shards_weights, self.contract = backend.shards_weights, backend.contract

    def compile_report(self) -> CompileReport | None:
        """See protocols.TrainBackend."""
        return self.inner.compile_report()

    @property
    def ref(self) -> Scorer | None:
        """The reference of the backend. Its inputs are not recorded: the same documents are, on their way to
        `forward_backward`. Nor are those of `logprobs`."""
        return self.inner.ref

    def logprobs(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        """See protocols.TrainBackend."""
        return self.inner.logprobs(batches)

    def forward_backward(self, batches: Sequence[PackedBatch], loss: TokenLoss) -> StepStats:
        """See protocols.TrainBackend; the batches are on the disk before it begins."""
        self.recorder.before(batches)
        with self._failing():
            stats = self.inner.forward_backward(batches, loss)
        self.recorder.record_outputs(stats)
        return stats

    def optimizer_step(self) -> dict[str, float]:
        """See protocols.TrainBackend."""
        with self._failing():
            update = self.inner.optimizer_step()
        self.recorder.finish(grad_norm=update.get("grad_norm"))
        return update

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Record an error and raise it again; Ctrl-C is no error, and leaves the inputs pending."""
        try:
            yield
        except Exception as error:
            self.recorder.fail(error)
            raise

    def weights(self, *, policy_version: int) -> WeightUpdate:
        """See protocols.TrainBackend."""
        return self.inner.weights(policy_version=policy_version)

    def save(self, directory: Path, *, background: bool = False) -> FinishSave:
        """See protocols.TrainBackend."""
        return self.inner.save(directory, background=background)

    def load(self, directory: Path, *, verified: bool = False) -> None:
        """See protocols.TrainBackend."""
        self.inner.load(directory, verified=verified)

    def export(self, directory: Path) -> None:
        """See protocols.TrainBackend."""
        self.inner.export(directory)

    def close(self) -> None:
        """Close the inner backend; the recorder is closed by its creator."""
        self.inner.close()


def draws_random_numbers(module: nn.Module) -> bool:
    """Whether a forward pass in train mode draws random numbers: dropout in a module or inside attention."""
    if any(isinstance(m, _DropoutNd) and m.p > 0 for m in module.modules()):
        return True
    config = getattr(module, "config", None)
    if config is None:
        return False
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    return any((getattr(config, name, None) or 0) > 0 for name in _ATTENTION_DROPOUT)


def _documents(groups: Iterable[RolloutGroup]) -> Iterable[Mapping[str, Any]]:
    """One per document of each rollout, in the order of sample ids. JSON values."""
    for group in groups:
        for number, rollout in enumerate(group.rollouts):
            for spans in rollout.trajectory.parts:
                yield {
                    "prompt_index": group.prompt.index,
                    "sample": number,
                    "reward": float(rollout.reward),
                    "rewards": {name: float(value) for name, value in rollout.rewards.items()},
                    "finish_reason": rollout.trajectory.finish_reason,
                    "seed": rollout.trajectory.seed,
                    "spans": [
                        [span.policy_version, len(span.token_ids)]
                        for span in spans
                        if span.author == "policy"
                    ],
                }


def _on_host(batch: PackedBatch) -> PackedBatch:
    """Batches are on the host but for what `logprobs` left on a device."""
    moved = {
        name: value.cpu()
        for name in ("old_logprobs", "ref_logprobs")
        if (value := getattr(batch, name, None)) is not None
    }
    return dataclasses.replace(batch, **moved) if moved else batch


def _outputs(part: _Part, grad_norm: float | None) -> list[RecordedOutputs] | None:
    """Of the recorded batches of one call, copied from the device at once; None: it gave none."""
    stats = part.stats
    if stats is None or not part.indices:
        return None
    sizes = [stats.logprobs[i].shape[0] for i in part.indices]
    columns = [torch.stack([stats.losses[i] for i in part.indices])]
    columns += [stats.logprobs[i] for i in part.indices] + [stats.entropy[i] for i in part.indices]
    losses, *rest = torch.cat(columns).cpu().split([len(sizes), *sizes, *sizes])
    return [
        RecordedOutputs(loss=loss, logprobs=logprobs, entropy=entropy, grad_norm=grad_norm)
        for loss, logprobs, entropy in zip(
            losses.tolist(), rest[: len(sizes)], rest[len(sizes) :], strict=True
        )
    ]
