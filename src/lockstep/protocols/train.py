from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from torch import Tensor

from lockstep.schema.batch import PackedBatch, RolloutSample, TrainSample
from lockstep.schema.contract import CompileReport, KernelContract
from lockstep.schema.rollout import RolloutGroup
from lockstep.schema.weights import WeightUpdate


class LossOutput(NamedTuple):
    """The result of one call of a TokenLoss."""

    loss: Tensor
    """Scalar: this micro-batch's share of the loss of the optimizer step."""
    terms: Tensor | None = None
    """[K, R] float32, detached: one row per name in `TokenLoss.terms`. None if the loss has no terms."""


class TokenLoss(Protocol):
    """A loss as a function of the logprobs of the labels.

    `separable`: the loss of a token does not depend on the logprobs of other tokens, so gradients are
    computed chunk by chunk while the logits are still in cache. Otherwise (sequence-level ratios) the logits
    are computed twice.

    A loss may set `zero_without_advantages = True`: a document whose advantages are all zero has no gradient
    and does not affect other gradients (no KL, entropy or value term). Groups of such documents are then
    skipped in most steps (train.score_all_every). Without the attribute every document is computed.
    """

    separable: bool
    entropy_grad: bool
    """Whether the loss has an entropy term, so that gradients flow through `entropy` too."""
    terms: tuple[str, ...]
    """Names of the per-token terms that a call returns for `metrics`; may be empty."""

    def __call__(
        self, logprobs: Tensor, entropy: Tensor, batch: PackedBatch, rows: Tensor | slice
    ) -> LossOutput:
        """Return this micro-batch's share of the loss of the optimizer step, and the terms.

        Args:
            logprobs: [R] float32, nats of `batch.labels[rows]`; requires grad. For a model with a scalar
            head,
                the outputs of `rows`.
            entropy: [R] float32, nats; requires grad only if the loss has an entropy term.
            rows: the slots of the R entries. Every trained slot is in exactly one call.
        """
        ...

    def metrics(self, batches: Sequence[PackedBatch], stats: StepStats) -> dict[str, float]:
        """Return the metrics of a whole step from the backend's `stats` of its `batches`."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class StepStats:
    """Losses, logprobs and entropies of every micro-batch of the step; tensors are detached, on the backend's
    device."""

    losses: list[Tensor]
    """Scalars, in micro-batch order; they add up to the loss of the step."""
    logprobs: list[Tensor]
    """[T] float32 each, 0 where loss_mask is False."""
    entropy: list[Tensor]
    """[T] float32 each, 0 where loss_mask is False."""
    terms: list[Tensor] = field(default_factory=list)
    """[K, T] float32 each, by `TokenLoss.terms`; 0 in slots that no call of the loss covered."""


FinishSave = Callable[[], dict[str, str]]
"""Complete a save, so that this rank's files are safe on disk. Not collective. Returns file name ->
sha256."""


class Scorer(Protocol):
    """A model that scores documents, such as a frozen reference or any TrainBackend. It may share the
    policy's process and memory, or run elsewhere."""

    def logprobs(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        """Return [T] float32 per batch, nats, no grad, 0 where loss_mask is False; on the scorer's device. A
        model with a scalar head (value, reward) returns its output for each slot; loss_mask may then be True
        at a document's last token too. With several ranks, every rank makes the same call and gets all
        results."""
        ...


@dataclass(frozen=True, slots=True)
class Reference:
    """A Scorer made of a function: the reference that a backend keeps beside the policy."""

    logprobs: Callable[[Sequence[PackedBatch]], list[Tensor]]


class TrainBackend(Protocol):
    """Owns the Parameters of one model (the policy, or a model with a scalar head), their float32 master
    copy, the optimizer and the learning-rate schedule.

    Batches arrive with their tensors on the host (`old_logprobs` and `ref_logprobs` wherever `logprobs` left
    them); the backend moves them to its devices. A caller always passes *all* micro-batches of a step and
    gets results for all of them, in order, however many ranks share the work: every rank makes the same call
    with the same list, and the backend assigns the micro-batches to ranks and gathers the results. The loss
    and the metrics of a loop therefore cover the whole step and are equal on every rank, and nothing outside
    the backend reduces over ranks. `loss_weights` contain the normaliser of the whole step, so gradients are
    *summed* over ranks, not averaged.
    """

    shards_weights: bool
    """Class attribute: whether the backend gets a model without weights and loads its own shard of them."""
    contract: KernelContract | None
    """The kernels of the forward pass, if they are batch-invariant. None: bits may differ."""

    def compile_report(self) -> CompileReport | None:
        """Return counts of torch.compile's work since the start. None if nothing is compiled."""
        ...

    @property  # a plain attribute serves as well
    def ref(self) -> Scorer | None:
        """The initial policy, if the backend was made with ref=True; it may share the policy's memory. None
        otherwise."""
        ...

    def logprobs(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        """Score with the current weights; see Scorer."""
        ...

    def forward_backward(self, batches: Sequence[PackedBatch], loss: TokenLoss) -> StepStats:
        """Accumulate the gradients of all micro-batches of one optimizer step. Raises TrainError on every
        rank if a loss is not finite on one of them; the gradients of the step are then dropped. Out of memory
        raises torch's own error on the rank where it happens, and ends the run."""
        ...

    def optimizer_step(self) -> dict[str, float]:
        """Clip, step, advance the schedule, cast to the compute dtype, zero the gradients. Returns grad_norm
        (before clipping) and lr. Raises TrainError on a non-finite norm, before anything changes."""
        ...

    def weights(self, *, policy_version: int) -> WeightUpdate:
        """Return the current weights, under Hugging Face names, as version `policy_version`."""
        ...

    def save(self, directory: Path, *, background: bool = False) -> FinishSave:
        """Save weights, master weights, optimizer, schedule and RNG into an existing empty directory, in the
        one format that every backend loads (lockstep.train.state.save_load). Collective; each rank writes its
        own files. With `background` the state is copied now, and training may continue before the returned
        function is called, in any thread. Raises CheckpointError if the disk is full.
        """
        ...

    def load(self, directory: Path, *, verified: bool = False) -> None:
        """Load a save of any backend on any number of ranks; bitwise if backend and ranks are the same.
        Collective. Raises CheckpointError on every rank, before anything changes.

        Args:
            verified: the caller has compared the files' hashes with what `save` returned.
        """
        ...

    def export(self, directory: Path) -> None:
        """Write a Hugging Face folder that from_pretrained loads with all keys matched."""
        ...

    def close(self) -> None: ...


OffloadPart = Literal["weights", "states", "ref"]
"""weights: the model's. states: the optimizer's, with separate master weights. ref: the weights of a frozen
reference."""


class OffloadableBackend(TrainBackend, Protocol):
    """A TrainBackend that can offload its memory while other roles compute (`offload` in the run file)."""

    def offload(self, *parts: OffloadPart) -> None:
        """From now on keep these parts in host memory, except during calls that use them. Between calls
        nothing else may read them. Results stay bitwise equal."""
        ...


class Algorithm(Protocol):
    """An algorithm of the online loop; see lockstep.algorithms."""

    needs_ref: bool
    """Whether the loss or the reward reads ref_logprobs."""

    def keep(self, group: RolloutGroup) -> bool:
        """Return False for a group without a signal, which is then resampled (DAPO's dynamic sampling)."""
        ...

    def advantages(
        self,
        groups: Sequence[RolloutGroup],
        samples: Sequence[RolloutSample],
        *,
        ref_logprobs: Sequence[Tensor] | None = None,
    ) -> tuple[list[RolloutGroup], list[Tensor]]:
        """Return the groups with the algorithm's own rewards (overlong, kl) added, in total and by name, and
        the advantages: [L] float32 per sample, 0 where loss_mask is False.

        Args:
            samples: the rollouts of all groups as documents, in order.
            ref_logprobs: [L] float32 per sample, nats; given if `needs_ref`.
        """
        ...

    def loss_weights(self, samples: Sequence[TrainSample]) -> list[Tensor]:
        """Return [L] float32 per sample, including the normaliser of the whole optimizer step."""
        ...

    def loss(self) -> TokenLoss: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimates:
    """Advantages and returns of a rollout batch."""

    groups: list[RolloutGroup]
    """The groups, with the algorithm's own rewards added."""
    advantages: list[Tensor]
    """[L] float32 per sample, 0 where loss_mask is False."""
    returns: list[Tensor] = field(default_factory=list)
    """[L] float32 per sample, the targets of the value model; 0 where loss_mask is False. Empty without a
    value model."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    values: list[Tensor] = field(default_factory=list)
    """[L] float32 per sample, which they were made of; empty without a value model."""


class ValueAlgorithm(Algorithm, Protocol):
    """An algorithm with a value model: `estimates` takes the place of `advantages`."""

    def estimates(
        self,
        groups: Sequence[RolloutGroup],
        samples: Sequence[RolloutSample],
        *,
        values: Sequence[Tensor],
        ref_logprobs: Sequence[Tensor] | None = None,
    ) -> Estimates:
        """Return rewards, advantages and returns.

        Args:
            samples: the rollouts of all groups as documents, in order.
            values: [L] float32 per sample: entry t is the value of the state after token_ids[: t + 1], given
                where loss_mask is True and at the last entry; 0 elsewhere.
            ref_logprobs: [L] float32 per sample, nats; given if `needs_ref`.
        """
        ...

    def state(self) -> dict[str, float]:
        """Return the state that persists between rollout batches, for a checkpoint."""
        ...

    def load_state(self, state: Mapping[str, float]) -> None:
        """Restore `state`. Raises CheckpointError if it belongs to another algorithm."""
        ...


class Saved(Protocol):
    """Anything a checkpoint can hold: one TrainBackend, or those of several roles. TrainBackend documents the
    methods."""

    def save(self, directory: Path, *, background: bool = False) -> FinishSave: ...
    def load(self, directory: Path, *, verified: bool = False) -> None: ...
    def export(self, directory: Path) -> None: ...
