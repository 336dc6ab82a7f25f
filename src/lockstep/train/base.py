"""What the train backends of this tree have in common: errors, the frame of a step, saves and loads."""

from __future__ import annotations

import contextlib
import copy
import math
import zlib
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep import invariant
from lockstep.attention import kernel_of
from lockstep.config.support import check_capacity
from lockstep.config.train import TrainConfig
from lockstep.errors import ConfigError, TrainError
from lockstep.execution import CompileWatch, compile_blocks, install_joint, joint_of
from lockstep.models.architectures import causal_lm
from lockstep.models.forward import kernel_contract
from lockstep.models.load import LoadedModel
from lockstep.models.lora import has_lora, without_lora
from lockstep.models.offload import Offloadable
from lockstep.observe.metrics import Spans, is_out_of_memory
from lockstep.packing import empty_batch
from lockstep.protocols.train import FinishSave, OffloadPart, StepStats, TokenLoss
from lockstep.schema.batch import PackedBatch
from lockstep.schema.contract import CompileReport, KernelContract
from lockstep.train.loss_module import MicroBatchOutput, require_finite, static_head, step_stats
from lockstep.train.optimizer import MasterOptimizer, lr_at
from lockstep.train.state.files import CopySpace, Layout, TensorParts, train_progress
from lockstep.train.state.save_load import load_state, save_state


class Backend:
    """Base of all of them. See lockstep.protocols.TrainBackend for what their methods promise."""

    _layout: Layout
    _outer: Any
    """The policy with its loss."""
    _ref: Any = None
    """The reference with its loss; None: there is none, or it is the policy without its adapters."""
    _compile_watch: CompileWatch | None = None

    def __init__(
        self,
        config: TrainConfig,
        *,
        model: LoadedModel,
        total_steps: int,
        spans: Spans | None,
        device: torch.device,
    ) -> None:
        self.config, self.model, self.total_steps = config, model, total_steps
        self.module = model.module.eval()
        self.spans = spans or Spans()
        self.steps_done = 0
        self.device = device
        self.contract = contract_of(config, model, device)
        self._lora = has_lora(self.module)
        self._static_head = static_head(config, self.module)
        self._copies = CopySpace()

    def _copied(self, ref: bool) -> nn.Module | None:
        """A copy of the policy as frozen reference; None: there is none, or it is the policy without its
        adapters. Made before the policy is checkpointed, compiled and sharded: a copy needs no recomputation,
        is compiled by itself, and could not be made any more."""
        return copy.deepcopy(self.module).requires_grad_(False) if ref and not self._lora else None

    @contextlib.contextmanager
    def _as_model(self, model: Literal["policy", "ref"]) -> Iterator[nn.Module]:
        if model == "policy":
            yield self._outer
        elif self._ref is not None:
            yield self._ref
        else:
            with without_lora(self.module):
                yield self._outer

    def _on_device(self, *_: OffloadPart) -> AbstractContextManager[None]:
        """Do nothing: this backend cannot be offloaded; see Offloadable."""
        return contextlib.nullcontext()

    def _counting(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if self._compile_watch is None else self._compile_watch.counting()

    def compile_report(self) -> CompileReport | None:
        """Report what torch.compile did so far on this rank; None in eager mode."""
        return None if self._compile_watch is None else self._compile_watch.report()

    @contextlib.contextmanager
    def _memory_errors_explained(
        self, index: int | None, batch: PackedBatch, *, count: int
    ) -> Iterator[None]:
        """Raises TrainError for memory that ran out; index None: of an empty micro-batch."""
        try:
            yield
        except RuntimeError as error:
            # RuntimeError, because torch's allocator for CPUs raises nothing else: the text tells.
            if not is_out_of_memory(error):
                raise
            what = "an empty micro-batch" if index is None else f"micro-batch {index}"
            raise TrainError(
                f"out-of-memory: step {self.steps_done}, {what} of {count}: out of memory with "
                f"{batch.num_slots} token slots{self._memory_advice(batch.num_slots, count)}. No weight was "
                f"changed. torch says: {error}",
                setting="train.token_budget",
            ) from error

    def _memory_advice(self, tokens: int, micro_batches: int) -> str:
        """What to do about a lack of memory."""
        raise NotImplementedError

    def _step_is_done(self) -> None:
        self.steps_done += 1
        if self._compile_watch is not None:
            self._compile_watch.check()
            # Graphs of the first step are expected: from here on every new one counts as a recompile.
            self._compile_watch.mark_warm()

    def drop_gradients(self) -> None:
        """Forget every gradient since the last optimizer step."""
        raise NotImplementedError

    # --- state ----------------------------------------------------------------------------------------------

    @property
    def _amid_step(self) -> bool:
        """Whether there are gradients that no optimizer step has used."""
        raise NotImplementedError

    def _parts(self) -> TensorParts:
        """The state that a save holds."""
        raise NotImplementedError

    def save(self, directory: Path, *, background: bool = False, in_memory: bool = False) -> FinishSave:
        """Save everything that decides how training goes on into an existing empty directory (see
        train/state/save_load.py); on several ranks every tensor whole, written by one of them. With
        `background` all of it is copied into host memory, by a thread where it is there already (the next
        `optimizer_step` and `load` wait for that), and written by the function that is returned.

        Returns:
            A function that finishes the save and returns the sha256 of each file written, by name.

        Raises:
            CheckpointError: it does not fit on the disk; on every rank.
            OSError: the disk failed in another way.
            TrainError: there are gradients that no optimizer step has used.
        """
        if self._amid_step:
            raise save_amid_step()
        with self._on_device("weights", "states"):
            finish = save_state(
                directory,
                parts=self._parts(),
                progress=self._progress(),
                layout=self._layout,
                background=background and self._copies,
                in_memory=in_memory,
            )
            self._saved()
        return finish

    def _saved(self) -> None:
        """Called when the copies of a save have been begun."""

    def load(self, directory: Path, *, verified: bool = False) -> None:
        """Load what `save` (bitwise, on the same ranks) or any backend on any number of ranks saved.

        Args:
            verified: the caller has compared the files' hashes already.

        Raises:
            CheckpointError: missing, damaged or of another model or optimizer; nothing was changed. On every
                rank.
        """
        # The copy of an earlier save may still read what is about to be overwritten.
        self._copies.wait()
        with self._on_device("weights", "states"):
            parts, progress = self._parts(), self._progress()
            restored = load_state(
                directory, parts=parts, progress=progress, layout=self._layout, verified=verified
            )
            self._loaded(parts)
        self.drop_gradients()
        self.steps_done = restored["step"]

    def _loaded(self, parts: Any) -> None:
        """Called when the parts have the values of a save."""

    def _progress(self) -> dict[str, Any]:
        return train_progress(
            self.config,
            steps_done=self.steps_done,
            total_steps=self.total_steps,
            dtype=self.model.dtype,
            lora=self._lora,
        )


class MasterBackend(Offloadable, Backend):
    """Base of the backends that use Lockstep's optimizers. Their state can be offloaded to the host."""

    _names: list[str]
    """Of the Parameters that are trained, in the optimizer's order."""
    _optimizer: MasterOptimizer | None

    def __init__(self, config: TrainConfig, **parts: Any) -> None:
        super().__init__(config, **parts)
        self._pending: list[tuple[PackedBatch, TokenLoss]] = []
        self._offloaded = {}

    def forward_backward(self, batches: Sequence[PackedBatch], loss: TokenLoss) -> StepStats:
        """Add the gradients of all micro-batches of one optimizer step.

        Raises:
            TrainError: a loss is not finite, or the ranks were not given the same batches, on every rank; or
                memory ran out, where it did. All gradients of the step are dropped.
        """
        try:
            stats = self._accumulate(batches, loss)
            # Once per step, not per micro-batch: looking at a loss waits for the device.
            require_finite(stats.losses, batches, step=self.steps_done)  # each rank has the losses of all
        except BaseException:  # half a step's gradients must not leak into the next one
            self._recover()
            raise
        # Only when all of them went well: these are what `_blame` runs again.
        self._pending += [(batch, loss) for batch in batches]
        return stats

    @abstractmethod
    def _accumulate(self, batches: Sequence[PackedBatch], loss: TokenLoss) -> StepStats:
        """Forward and backward of this rank's share; returns the results of all ranks."""

    def _recover(self) -> None:
        """Clean up after a forward or backward that raised."""
        self.drop_gradients()

    @property
    def _amid_step(self) -> bool:
        return bool(self._pending)

    def _saved(self) -> None:
        # Offloaded tensors leave the device when the save returns, while the thread may still read them.
        if self._offloaded:
            self._copies.wait()

    @abstractmethod
    def _here(self) -> dict[str, Tensor]:
        """The gradients since the last optimizer step, or this rank's shards of them, by Parameter name."""

    @abstractmethod
    def _norm(self, gradients: dict[str, Tensor]) -> float:
        """Their Euclidean norm, of all ranks."""

    @abstractmethod
    def _not_finite(self) -> list[str]:
        """Names of the Parameters whose gradient is not finite, the same on every rank."""

    def gradient_norm(self) -> float:
        """Euclidean norm over all gradients, before clipping; 0 when there are none."""
        return self._norm(self._here())

    def optimizer_step(self) -> dict[str, float]:
        """Clip, step, schedule, cast to the compute dtype, zero the gradients. Returns grad_norm (before
        clipping) and lr.

        Raises:
            ConfigError: the backend was made with total_steps = 0.
            TrainError: there is no gradient, or the norm is not finite, and no weight was changed; or torch
                recompiled more often than train.max_recompiles.
        """
        with self._on_device("weights"):
            update = self._updated()
        self.drop_gradients()
        self._step_is_done()
        return update

    @torch.no_grad()
    def _updated(self) -> dict[str, float]:
        gradients = self._here()
        if not gradients:
            raise no_gradients(step=self.steps_done)
        norm = self._norm(gradients)
        if not math.isfinite(norm):
            # The update runs under no_grad, and finding the culprit takes backward passes.
            with torch.enable_grad():
                blamed = self._blame()
            raise norm_not_finite(norm, step=self.steps_done, **blamed)
        if self._optimizer is None:
            raise no_optimizer()
        lr = lr_at(self.steps_done, config=self.config, total_steps=self.total_steps)
        # the coefficient of torch.nn.utils.clip_grad_norm_
        scale = min(1.0, self.config.max_grad_norm / (norm + 1e-6))
        # A save in the background may still read the masters and states that are about to change.
        self._copies.wait()
        with self._on_device("states"):
            self._optimizer.step([gradients.get(name) for name in self._names], lr=lr, scale=scale)
        return {"grad_norm": norm, "lr": lr}

    def _blame(self) -> dict[str, Any]:
        """Find the micro-batch whose gradients are not finite: each is run once more, alone, because only
        sums of gradients are kept."""
        pending = list(self._pending)
        self.drop_gradients()
        for index, (batch, loss) in enumerate(pending):
            self._accumulate([batch], loss)
            bad = self._not_finite()
            self.drop_gradients()
            if bad:
                return bad_micro_batch(index, len(pending), batch.sample_ids, bad)
        return bad_step([batch.sample_ids for batch, _ in pending])

    def close(self) -> None:
        """Drop gradients; the module stays usable, and a process group stays."""
        self.drop_gradients()


# The kernel contract that a train backend keeps.


def compile_options(module: nn.Module) -> dict[str, Any] | None:
    """Options that torch.compile needs for this module; None unless it is batch-invariant. An engine that
    computes the same bits passes the same options."""
    return invariant.inductor_options() if invariant.is_converted(module) else None


def contract_of(config: TrainConfig, model: LoadedModel, device: torch.device) -> KernelContract | None:
    """Return the kernel contract of a batch-invariant model; None when `config.batch_invariant` is off.

    Raises:
        ConfigError: it is on, and the model's modules were not converted for it.
    """
    if not config.batch_invariant:
        return None
    module = causal_lm(model.module)
    base = getattr(module, module.base_model_prefix)
    contract = kernel_contract(
        model.module,
        attention=kernel_of(base.config._attn_implementation),
        execution=config.execution,
        dtype=model.dtype,
        device=device,
    )
    if contract is None:
        raise ConfigError(
            f"not-batch-invariant: train.batch_invariant = true, but {type(module).__name__} was not "
            f"converted, or attends by another kernel than varlen ({base.config._attn_implementation!r}), or "
            f"runs under train.execution = {config.execution!r}; load it with attention 'varlen' and call "
            "lockstep.invariant.convert on it before the backend is made"
        )
    return contract


# The execution modes `compile` and `joint` of a train backend's modules.


def compile_module(
    module: nn.Module, config: TrainConfig, *, like: nn.Module | None = None
) -> CompileWatch | None:
    """Make a causal LM run as `config.execution` says, in place. None: eager.

    Wrappers that shard its weights or add up its gradients come after this: no graph holds their hooks. A
    joint graph has no modules inside whose hooks could run, so they wrap it as a whole.

    Args:
        like: a module of the same architecture that this function has prepared; the two share their joint
            graphs.

    Raises:
        ConfigError: its layers are compiled already, or the mode does not support a setting.
        ModelError: the module has no list of decoder layers.
    """
    if config.execution == "eager":
        return None
    options = compile_options(module)
    if config.execution == "compile":
        return compile_blocks(module, max_recompiles=config.max_recompiles, options=options)
    check_capacity(config)
    graphs_of = None if like is None else joint_of(like)
    cuda_graph = config.cuda_graph and like is None
    install_joint(module, options=options, cuda_graph=cuda_graph, graphs_of=graphs_of)
    return CompileWatch(max_recompiles=config.max_recompiles)


# Errors of an optimizer step that cannot be done, worded the same for every backend.


def norm_not_finite(norm: float, *, step: int, reason: str = "", **blamed: Any) -> TrainError:
    """The error for a gradient norm that is not finite; reason: the micro-batch that it came from, if known,
    and blamed: its number and its samples."""
    because = f": {reason}" if reason else ""
    return TrainError(
        f"step {step}: the gradient norm is {norm}{because}. No weight was changed. Lower train.lr or set "
        "model.dtype = 'float32'",
        code="not-finite",
        **blamed,
    )


def bad_micro_batch(index: int, count: int, sample_ids: Sequence[int], bad: Sequence[str]) -> dict[str, Any]:
    """Arguments of `norm_not_finite` for micro-batch `index` of `count` with such gradients of `bad`."""
    samples = list(sample_ids)
    reason = (
        f"micro-batch {index} of {count} has gradients that are not finite in {len(bad)} parameters "
        f"({', '.join(bad[:3])}); its samples are {samples}"
    )
    return {"reason": reason, "micro_batch": index, "samples": samples}


def bad_step(sample_ids: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Arguments of `norm_not_finite` where each of these micro-batches alone is finite."""
    samples = [list(ids) for ids in sample_ids]
    reason = f"each micro-batch alone is finite, their sum is not; the samples by micro-batch are {samples}"
    return {"reason": reason, "samples": samples}


def no_gradients(*, step: int) -> TrainError:
    """The error of an optimizer step before any backward, or after one of masked tokens only."""
    return TrainError(
        f"no-gradients: step {step}: there are no gradients; call forward_backward with at least one "
        "trained token before optimizer_step"
    )


def no_optimizer() -> ConfigError:
    """The error of an optimizer step of a backend that was made for none."""
    return ConfigError(
        "missing-setting: this backend was made with total_steps = 0, which leaves the optimizer out; give "
        "at least 1"
    )


def save_amid_step() -> TrainError:
    """The error of a save between backward and optimizer step."""
    return TrainError(
        "wrong-state: save in the middle of an optimizer step would lose its gradients; step first"
    )


# Assign the micro-batches of an optimizer step to ranks, and share every rank's results with all ranks.


def assigned_indices(count: int, *, parts: int) -> list[list[int | None]]:
    """Indices of the micro-batches of each part, the same number for every part, because collectives inside
    forward and backward must pair. None: the part runs an empty micro-batch (`lockstep.packing.empty_batch`).

    Example:
        >>> assigned_indices(5, parts=2)
        [[0, 2, 4], [1, 3, None]]
    """
    rounds = -(-count // parts)
    return [[i if i < count else None for i in range(part, rounds * parts, parts)] for part in range(parts)]


def assign_batches(
    batches: Sequence[PackedBatch], *, part: int, parts: int
) -> list[tuple[int | None, PackedBatch]]:
    """The micro-batches of a step that one part runs, each with its index; None with an empty one, made from
    the smallest, which costs least."""
    mine = assigned_indices(len(batches), parts=parts)[part]
    smallest = min(batches, key=lambda batch: batch.num_slots, default=None)
    assigned: list[tuple[int | None, PackedBatch]] = []
    for index in mine:
        assert smallest is not None, "a part that is assigned something has a smallest one"
        assigned.append((index, empty_batch(smallest) if index is None else batches[index]))
    return assigned


def require_same_batches(
    batches: Sequence[PackedBatch], *, group: dist.ProcessGroup, device: torch.device
) -> None:
    """Refuse a call whose ranks got different micro-batches: their collectives would not pair, and would wait
    for each other until the deadline. One small collective, on the host where the group can.

    Raises:
        TrainError: on every rank; lists what each rank got.
    """
    if group.size() == 1:
        return
    # Not hash(): Python salts that of strings in each process.
    digest = zlib.crc32(repr([(batch.lengths, batch.sample_ids) for batch in batches]).encode())
    own = torch.tensor([len(batches), sum(batch.num_slots for batch in batches), digest])
    # On a GPU the gather would queue behind the kernels of earlier work, and reading it would wait for them.
    gather_device = torch.device("cpu") if "gloo" in str(dist.get_backend_config(group)) else device
    gathered = [torch.empty_like(own, device=gather_device) for _ in range(group.size())]
    dist.all_gather(gathered, own.to(gather_device), group=group)
    summaries = [tuple(one.tolist()) for one in gathered]
    if len(set(summaries)) > 1:
        listed = ", ".join(f"rank {r}: {n} with {t} slots" for r, (n, t, _) in enumerate(summaries))
        raise TrainError(
            f"ranks-differ: the ranks were not given the same micro-batches ({listed}); every rank must be "
            "given all of a step, in the same order: check that data, seed and config are the same "
            "everywhere"
        )


def share_stats(
    batches: Sequence[PackedBatch],
    outputs: Mapping[int, MicroBatchOutput],
    *,
    terms: int,
    group: dist.ProcessGroup,
    device: torch.device,
) -> StepStats:
    """Share the results of all ranks of `group` with every rank, in micro-batch order: one all-reduce for the
    whole step.

    Args:
        outputs: this rank's, by index into `batches`. Each slot of each micro-batch belongs to exactly one
            rank: the others have 0 there (x + 0 = x bitwise, NaN stays NaN).
        terms: how many the loss has.
    """
    rows, slots = 2 + terms, [batch.num_slots for batch in batches]
    flat = torch.zeros(len(batches) + rows * sum(slots), dtype=torch.float32, device=device)
    losses, *tokens = flat.split([len(batches), *(rows * size for size in slots)])
    shared = [
        MicroBatchOutput(loss=loss, tokens=part.view(rows, -1))
        for loss, part in zip(losses.unbind(), tokens, strict=True)
    ]
    for index, output in outputs.items():
        shared[index].loss.copy_(output.loss)
        shared[index].tokens.copy_(output.tokens)
    dist.all_reduce(flat, group=group)
    return step_stats(shared)


def share_logprobs(
    batches: Sequence[PackedBatch],
    logprobs: Mapping[int, Tensor],
    *,
    group: dist.ProcessGroup,
    device: torch.device,
) -> list[Tensor]:
    """Logprobs, [T] float32 per micro-batch, on every rank: like `share_stats`, for logprobs only."""
    slots = [batch.num_slots for batch in batches]
    flat = torch.zeros(sum(slots), dtype=torch.float32, device=device)
    parts = list(flat.split(slots))
    for index, values in logprobs.items():
        parts[index].copy_(values)
    dist.all_reduce(flat, group=group)
    return parts
