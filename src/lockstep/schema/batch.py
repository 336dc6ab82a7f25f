"""The policy's inputs: train samples, and the packed batches made of them.

Shape legend, used in the whole code base:
    T   token slots of one pack (its capacity)      N   attention heads          H   head dim
    D   documents of one pack                       K   key/value heads          C   hidden size
    L   tokens of one document                      V   vocabulary               B   rows of a dense batch

Alignment: entry t of `labels`, `loss_mask`, `loss_weights` and of every per-token float is about predicting
`labels[t] = token_ids[t + 1]` of the same document. A document's last entry predicts nothing: label -100,
mask False.

Example: prompt [5, 6], completion [7, 8, 2]; the document has L = 5 tokens.

    token_ids        5     6     7     8     2
    labels           6     7     8     2  -100
    loss_mask    False  True  True  True False      the three completion tokens, each at the slot before it
    logprobs         .  lp(7) lp(8) lp(2)    .      "." is 0.0 and must never be read

A pack of that document and of [9, 10], at capacity T = 8 with D_cap = 4 documents:

    token_ids    5 6 7 8 2 | 9 10 | 0               the tail slot is a pad document of its own
    positions    0 1 2 3 4 | 0 1  | 0
    cu_seqlens   0 5 7 8 8                          [D_cap + 1]; unused entries repeat T (empty documents)
    labels       6 7 8 2 -100 | 10 -100 | -100
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from lockstep.errors import DataError, TrainError
from lockstep.schema.rollout import Span, Trajectory

IGNORE_LABEL = -100
Record = TypeVar("Record", "PackedBatch", "SharedRows")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSample:
    """One document to train on: prompt and completion, already tokenised. Tensors are on the CPU."""

    token_ids: Tensor
    """[L] int64."""
    loss_mask: Tensor
    """[L] bool. True where `token_ids[t + 1]` is trained on; the last entry is False."""
    sample_id: int = 0
    """Index of the sample in its step. Packs keep it, so that per-sample values can be mapped back."""

    scores_last: ClassVar[bool] = False
    """Whether loss_mask may be True at the last token, which predicts nothing."""

    def __post_init__(self) -> None:
        if self.token_ids.ndim != 1 or self.token_ids.dtype != torch.int64:
            raise ValueError(
                f"token_ids must be [L] int64, got {list(self.token_ids.shape)} {self.token_ids.dtype}"
            )
        if self.loss_mask.shape != self.token_ids.shape or self.loss_mask.dtype != torch.bool:
            raise ValueError(
                f"loss_mask must be bool of shape {list(self.token_ids.shape)}, "
                f"got {list(self.loss_mask.shape)} {self.loss_mask.dtype}"
            )
        if not self.scores_last and len(self) and self.loss_mask.numpy()[-1]:
            raise ValueError("loss_mask[-1] must be False: the last token has no next token to predict")

    def __len__(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_trained(self) -> int:
        """Tokens that are trained on."""
        return int(np.count_nonzero(self.loss_mask.numpy()))


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutSample(TrainSample):
    """A trajectory, or a part of one, as a document; the policy's own tokens are trained on."""

    rollout_logprobs: Tensor
    """[L] float32, nats, from the engine that sampled it; 0 where loss_mask is False."""
    policy_version: int = 0
    """Version of the policy that sampled it: Trajectory.policy_version."""
    truncated: bool = False
    """Whether max_tokens or the context length cut the trajectory off."""
    trajectory: int = -1
    """Number of the trajectory that it is a part of, in its step; -1: the document is one, `sample_id`."""
    versions: Tensor | None = None
    """[L] int64, the version of the policy that sampled the token; None: all are of `policy_version`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicySample(RolloutSample):
    """A rollout ready for a policy-gradient step."""

    advantages: Tensor
    """[L] float32, from the algorithm; 0 where loss_mask is False."""
    ref_logprobs: Tensor | None = None
    """[L] float32, nats, from the frozen reference. None if the algorithm has no KL term."""
    current: Tensor | None = None
    """[L] bool, True where the trainer's weights sampled the token; None: everywhere, or it is not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StateSample(TrainSample):
    """A document for a model with a scalar head. loss_mask is True where the state is scored: entry t is the
    state after token_ids[: t + 1], the last entry the state of the whole document."""

    scores_last: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueSample(TrainSample):
    """A rollout ready for an update of the value model."""

    returns: Tensor
    """[L] float32, the targets, in units of reward; 0 where loss_mask is False."""
    old_values: Tensor
    """[L] float32, from the value model before the first update on the rollout batch; 0 where loss_mask is
    False."""
    trajectory: int = -1
    """RolloutSample.trajectory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PreferenceSample(TrainSample):
    """One of the two answers of a preference pair: sample_id 2p is the chosen one of pair p, 2p + 1 the
    rejected one. Both are always in one micro-batch, side by side."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredSample(PreferenceSample):
    """One of the two answers of a pair for a reward model. loss_mask is True at the token whose state is the
    document's score, and nowhere else."""

    scores_last: ClassVar[bool] = True

    margin: float = 0.0
    """By how much the score of the chosen answer should exceed the other; the same in both samples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnpairedSample(TrainSample):
    """A single answer with a label, for KTO."""

    desirable: bool
    """The label: whether the answer is good."""


def prompt_ids(ids: Tensor, mask: Tensor) -> tuple[int, ...]:
    """Return the ids before the first trained token. ids, mask: [L], the mask True somewhere."""
    return tuple(ids[: int(mask.to(torch.uint8).argmax()) + 1].tolist())


def rollout_samples(trajectories: Iterable[Trajectory]) -> list[RolloutSample]:
    """Return the documents of the trajectories, in order, sample_id counting from 0, trained on every token
    that the policy wrote: one for each part of a trajectory, of which most have one.

    Raises:
        DataError: a prompt is empty (nothing predicts its first sampled token), or logprobs do not match the
            policy's tokens.
    """
    samples: list[RolloutSample] = []
    for number, trajectory in enumerate(trajectories):
        for spans in trajectory.parts:
            samples.append(_document(spans, trajectory, sample_id=len(samples), number=number))
    return samples


def _document(spans: Sequence[Span], trajectory: Trajectory, *, sample_id: int, number: int) -> RolloutSample:
    if not spans[0].token_ids:
        raise DataError(
            f"empty: sample {number} has an empty prompt, so its first sampled token has no context; give "
            "the prompt at least a beginning-of-sequence token"
        )
    # numpy takes numbers out of tuples several times as fast as torch.
    token_ids = np.array(tuple(chain.from_iterable(span.token_ids for span in spans)), dtype=np.int64)
    loss_mask = np.zeros(len(token_ids), dtype=np.bool_)
    rollout_logprobs = np.zeros(len(token_ids), dtype=np.float32)
    versions = None
    if len(trajectory.policy_versions) > 1:
        versions = np.full(len(token_ids), trajectory.policy_version, dtype=np.int64)
    start = 0
    for span in spans:
        stop = start + len(span.token_ids)
        if span.author == "policy":
            if len(span.logprobs) != stop - start:
                raise DataError(
                    f"wrong-result: sample {number} from engine {trajectory.engine!r} has {stop - start} "
                    f"completion tokens but {len(span.logprobs)} logprobs; an engine must return one per "
                    "token"
                )
            loss_mask[start - 1 : stop - 1] = True
            rollout_logprobs[start - 1 : stop - 1] = span.logprobs
            if versions is not None:
                assert span.policy_version is not None, "written by the policy"
                versions[start - 1 : stop - 1] = span.policy_version
        start = stop
    return RolloutSample(
        token_ids=torch.from_numpy(token_ids),
        loss_mask=torch.from_numpy(loss_mask),
        sample_id=sample_id,
        rollout_logprobs=torch.from_numpy(rollout_logprobs),
        policy_version=trajectory.policy_version,
        truncated=trajectory.finish_reason == "length",
        trajectory=number if trajectory.earlier or sample_id != number else -1,
        versions=None if versions is None else torch.from_numpy(versions),
    )


def trajectory_slices(samples: Sequence[TrainSample]) -> list[slice]:
    """Return where the documents of each trajectory are among `samples`, in order; other documents than
    rollouts are one by one."""
    slices: list[slice] = []
    before: int | None = None
    for index, sample in enumerate(samples):
        number = getattr(sample, "trajectory", -1)
        if number >= 0 and number == before:
            slices[-1] = slice(slices[-1].start, index + 1)
        else:
            slices.append(slice(index, index + 1))
        before = number
    return slices


def policy_samples(
    samples: Sequence[RolloutSample],
    advantages: Sequence[Tensor] | None,
    *,
    ref_logprobs: Sequence[Tensor] | None = None,
    version: int | None = None,
) -> list[PolicySample]:
    """Return the samples with their advantages.

    Args:
        advantages: [L] float32 per sample, 0 where loss_mask is False. None: all 0, for packs that are only
            scored.
        ref_logprobs: [L] float32 per sample, nats; None: the algorithm has no KL term.
        version: of the trainer's weights, where some tokens may be of earlier ones.
    """
    if advantages is None:
        advantages = [torch.zeros(len(sample)) for sample in samples]
    refs: Sequence[Tensor | None] = [None] * len(samples) if ref_logprobs is None else ref_logprobs
    return [
        PolicySample(
            token_ids=sample.token_ids,
            loss_mask=sample.loss_mask,
            sample_id=sample.sample_id,
            rollout_logprobs=sample.rollout_logprobs,
            policy_version=sample.policy_version,
            truncated=sample.truncated,
            advantages=values,
            ref_logprobs=ref,
            trajectory=sample.trajectory,
            versions=sample.versions,
            current=None if version is None else _sampled_by(version, sample),
        )
        for sample, values, ref in zip(samples, advantages, refs, strict=True)
    ]


def _sampled_by(version: int, sample: RolloutSample) -> Tensor:
    """[L] bool."""
    if sample.versions is None:
        return torch.full((len(sample),), sample.policy_version == version)
    return sample.versions == version


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedRows:
    """The rows that a decoder computes for a pack whose documents share prefixes, and what each attends to.

    The slots of a pack remain those of whole documents. A *row* is one token that runs through the layers: a
    common prefix has one set of rows, and the rest of each document has its own. Rows form *segments*: the
    queries of a segment are its rows, and its keys are the rows of everything before it in the document,
    followed by its own, gathered. The last query is aligned with the last key.

    Example: documents 5 6 7 and 5 6 8 9, nothing trained before slot 1 of either; so slot 0 is shared.

        slots        0 | 1 2 | 4 5 6             [R]: of the pack, whose token the row has
        rows         0 1 2 | 0 3 4 5             [T]: by slot
        keys         0 | 0 1 2 | 0 3 4 5         [S]: rows, by segment
    """

    slots: Tensor
    """[R] int64: the slot that gives each row its token and position; the last slot in padding."""
    rows: Tensor
    """[T] int64: the row of every slot; slots of pad documents have the last row."""
    keys: Tensor
    """[S] int64: the row of every gathered key."""
    order: Tensor
    """[S] int64: the gathered keys sorted by row, keys of one row in their order in `keys`."""
    ends: Tensor
    """[R + 1] int64: row r is the key at order[ends[r]] to order[ends[r + 1]]."""
    cu_rows: Tensor
    """[G_cap + 1] int32: segment g is rows cu_rows[g] to cu_rows[g + 1]; unused entries repeat R."""
    cu_keys: Tensor
    """[G_cap + 1] int32: segment g has the gathered keys cu_keys[g] to cu_keys[g + 1]."""
    row_lengths: tuple[int, ...]
    """Rows of each segment that has rows or keys: the host's copy of cu_rows."""
    key_lengths: tuple[int, ...]
    """Keys of each of these segments."""
    max_rows: int
    """Most rows of a segment. At least 2, since a flash kernel takes another path for a single query."""
    max_keys: int
    """Most keys of a segment."""
    num_rows: int
    """Rows without padding, which is the cost of the pack."""

    @property
    def size(self) -> int:
        """R."""
        return self.slots.shape[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRows:
    """SharedRows whose tensors are still to be made. A rank needs only those of the packs that it computes,
    and makes them while its GPU computes the pack before."""

    make: Callable[[], SharedRows]
    """A pure function."""
    size: int
    """R."""
    num_rows: int
    """As SharedRows.num_rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedBatch:
    """One micro-batch: documents laid end to end, padded to a static capacity. See the module for an
    example."""

    token_ids: Tensor
    """[T] int64; 0 in the padded tail."""
    positions: Tensor
    """[T] int64; restart at 0 in every document, including pad documents."""
    cu_seqlens: Tensor
    """[D_cap + 1] int32; document d is slots cu_seqlens[d] to cu_seqlens[d + 1]."""
    max_seqlen: int
    """Longest document, including pad documents. Constant per capacity bucket, since graphs bake it in."""
    labels: Tensor
    """[T] int64; IGNORE_LABEL where nothing is predicted."""
    loss_mask: Tensor
    """[T] bool; False in the padded tail and at every document's last token."""
    loss_weights: Tensor
    """[T] float32; the weight of each token in the loss of the whole optimizer step, 0 where loss_mask is
    False. It includes the normaliser of the step, so the loss of a micro-batch is a plain sum and does not
    depend on packing."""
    lengths: tuple[int, ...]
    """Lengths of all non-empty documents in order, pad documents last; they sum to T. The host's copy of
    cu_seqlens."""
    sample_ids: tuple[int, ...]
    """TrainSample.sample_id of each real document, in order; shorter than `lengths` by the number of pad
    documents."""
    step_tokens: int | None = None
    """Tokens of all micro-batches of the optimizer step: router losses of a micro-batch count by its share.
    None: those of the batches that a train backend gets in one call."""
    shared: SharedRows | PlannedRows | None = None
    """Derived from the other fields (lockstep.packing.share) for train.layout = "shared". None: not yet
    derived, or every slot is computed."""

    @classmethod
    def of(cls, batch: PackedBatch) -> Self:
        """Return `batch`, which a loss needs to be of this class.

        Raises:
            TrainError: it is not.
        """
        if not isinstance(batch, cls):
            samples, given = f"{cls.__name__.removesuffix('Batch')}Samples", type(batch).__name__
            raise TrainError(f"wrong-batch: this loss needs a {cls.__name__}, got {given}; pack {samples}")
        return batch

    @property
    def num_slots(self) -> int:
        """T."""
        return self.token_ids.shape[0]

    @property
    def num_rows(self) -> int:
        """Rows that the layers compute, including padding: T, or fewer if documents share prefixes. For
        layout padded see models.forward.dense_shape."""
        return self.num_slots if self.shared is None else self.shared.size

    @property
    def shared_rows(self) -> SharedRows | None:
        """`shared` with its tensors, which are made anew each time unless this is a batch of `with_rows`."""
        return self.shared.make() if isinstance(self.shared, PlannedRows) else self.shared

    def with_rows(self) -> Self:
        """Return the batch with the tensors of `shared`."""
        return dataclasses.replace(self, shared=self.shared_rows)

    @property
    def num_tokens(self) -> int:
        """Tokens of real documents."""
        return sum(self.lengths[: len(self.sample_ids)])

    def to(self, device: torch.device | str) -> PackedBatch:
        """Return the batch with every tensor on `device`, including cu_seqlens and those of `shared`."""
        return _moved(self, device)

    def split(self, per_token: Tensor) -> list[Tensor]:
        """Split `[T, ...]` into one `[L, ...]` per real document, in the order of `sample_ids`."""
        return list(per_token[: self.num_tokens].split(self.lengths[: len(self.sample_ids)]))


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyBatch(PackedBatch):
    """A micro-batch of rollouts."""

    rollout_logprobs: Tensor
    """[T] float32, nats, from the engine."""
    advantages: Tensor
    """[T] float32."""
    policy_versions: tuple[int, ...] = ()
    """PolicySample.policy_version of each real document, in the order of `sample_ids`."""
    old_logprobs: Tensor | None = None
    """[T] float32, nats, from the trainer before the step's first update. None: the policy has not changed
    since, so a loss uses its own logprobs, detached (importance ratio exactly 1)."""
    ref_logprobs: Tensor | None = None
    """[T] float32, nats, from the frozen reference. None if the algorithm has no KL term."""
    current: Tensor | None = None
    """[T] bool, PolicySample.current."""
    trajectories: Tensor | None = None
    """[T] int64, the number of the trajectory, counted from 1, at documents that are parts of one; 0
    elsewhere. Parts that follow one another are one sequence for ratios and masks of a whole sequence. None:
    no document is a part."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueBatch(PackedBatch):
    """A micro-batch of rollouts for the value model."""

    returns: Tensor
    """[T] float32, in units of reward."""
    old_values: Tensor
    """[T] float32, from the value model before the first update on the rollout batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PreferenceBatch(PackedBatch):
    """A micro-batch of preference pairs: documents 2i and 2i + 1 are a chosen answer and its rejected one."""

    ref_logprobs: Tensor | None = None
    """[T] float32, nats, from the frozen reference."""
    margins: Tensor | None = None
    """[T] float32: ScoredSample.margin where loss_mask is True. None except for reward models."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnpairedBatch(PackedBatch):
    """A micro-batch of labelled answers."""

    desirability: Tensor
    """[T] float32: 1 at trained tokens of a desirable answer, -1 at those of an undesirable one, else 0."""
    kl_baseline: Tensor | None = None
    """[T] float32, nats: KTO's z0 of the optimizer step at every trained token, else 0."""
    ref_logprobs: Tensor | None = None
    """[T] float32, nats, from the frozen reference."""


def _moved(record: Record, device: torch.device | str) -> Record:
    """Return the record with every tensor on `device`."""
    moved: dict[str, Any] = {}
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if isinstance(value, PlannedRows):
            value = value.make()
        if isinstance(value, Tensor):
            moved[field.name] = value.to(device, non_blocking=True)
        elif isinstance(value, SharedRows):
            moved[field.name] = _moved(value, device)
    return dataclasses.replace(record, **moved)


# The assignment of a pack's slots to the ranks of a ring, made by `lockstep.packing.ring_shard`.


@dataclass(frozen=True, kw_only=True, slots=True)
class RingStep:
    """The documents of one call of a varlen attention kernel: segment i of q attends to segment i of k."""

    cu_q: Tensor
    """[S + 1] int32."""
    cu_k: Tensor
    """[S + 1] int32."""
    max_q: int
    """Longest segment of q."""
    max_k: int
    """Longest segment of k."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RingKeys:
    """The keys of a rank's rows where those of divided documents are gathered from all ranks: a chunk of such
    a document sees the document's keys up to the chunk's end, as one segment of one kernel call."""

    step: RingStep
    """Segments of q: the two chunks of each divided document, then whole documents: all t rows."""
    index: Tensor
    """[S] int64: the segments' keys, one after the other, as rows of [divided rows of rank 0, of rank 1, ...,
    each filled up to the most of any rank | this rank's whole documents]."""
    early: Tensor
    """[E] int64: positions in `index` of the earlier chunks' keys. All of these are also keys of the later
    chunks."""
    late: Tensor
    """[S - E] int64: the others; each row is there once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RingShard:
    """One rank's share of a pack, and the keys that it attends to in each step of the ring.

    A document is either divided among all ranks or kept whole on one. The rows of a rank are, in local order:

        divided documents, each as [its earlier chunk | its later chunk], then whole documents

    so each message around the ring is one slice, `[:divided[rank]]`.
    """

    rank: int
    size: int
    """Ranks of the ring, R."""
    index: Tensor
    """[t] int64: the pack's slot of every local row."""
    lengths: tuple[int, ...]
    """Rows of each document with rows on this rank, in local order; they sum to t."""
    sizes: tuple[int, ...]
    """t of every rank."""
    divided: tuple[int, ...]
    """Rows of divided documents, by rank. All zero (nothing is sent) or all at least 2."""
    own: RingStep
    """Step 0: the rank's own keys, causal, over all t rows."""
    others: tuple[RingStep, ...]
    """Step i = 1 .. R - 1, at index i - 1: keys of rank (rank - i) mod R, not causal, over the divided rows
    of both. Empty if no document is divided."""
    keys: RingKeys | None = None
    """Instead of `own` and `others`, where keys are gathered; None: they go round, or nothing is divided."""

    @property
    def num_rows(self) -> int:
        """t."""
        return self.sizes[self.rank]

    def to(self, device: torch.device | str) -> RingShard:
        """Return the shard with every tensor on `device`, in two copies however many steps there are."""
        if self.index.device == torch.device(device):
            return self
        keys = self.keys
        steps = (self.own, *self.others, *(() if keys is None else (keys.step,)))
        tables = [table for step in steps for table in (step.cu_q, step.cu_k)]
        moved = torch.cat(tables).to(device, non_blocking=True).split([len(table) for table in tables])
        placed = [
            dataclasses.replace(step, cu_q=moved[2 * i], cu_k=moved[2 * i + 1])
            for i, step in enumerate(steps)
        ]
        if keys is None:
            index = self.index.to(device, non_blocking=True)
        else:
            parts = (self.index, keys.index, keys.early, keys.late)
            index, *rows = torch.cat(parts).to(device, non_blocking=True).split([len(x) for x in parts])
            keys = RingKeys(step=placed.pop(), index=rows[0], early=rows[1], late=rows[2])
        return dataclasses.replace(self, index=index, own=placed[0], others=tuple(placed[1:]), keys=keys)
