"""Checks that engine and trainer agree: the logprob gap of the first step, and bits under batch_invariant."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import ConfigError, EngineError, TrainError
from lockstep.protocols import SharesWeights, TrainBackend
from lockstep.schema.batch import PackedBatch, PolicyBatch
from lockstep.schema.contract import KernelContract
from lockstep.schema.rollout import RolloutGroup

# Check that engine and trainer hold the same weights: the logprob gap of a process's first step.


GAP_LIMITS = {"float32": (1e-3, 0.1), "bfloat16": (0.05, 0.5), "float16": (0.02, 0.5)}
"""Mean |logprob_gap| of a first step, nats, at temperature 1 and above: beyond the first number there is a
warning, beyond the second the run stops. Two implementations that hold the same weights and differ in
rounding stay well below the first; other weights, another temperature or truncated logprobs are beyond it."""


def gap_complaint(metrics: Mapping[str, float], *, dtype: str, temperature: float) -> str | None:
    """Check the logprob_gap of a step whose rollouts came from the weights that it starts from.

    Args:
        metrics: logprob_gap_mean, _p99, _max and _k3 of the step, nats.
        temperature: of sampling; below 1 it magnifies rounding, so the limits are divided by it.

    Returns:
        A warning; None: the gap is small enough.

    Raises:
        EngineError: the mean is beyond the second limit, or not a number.
    """
    warn, stop = (limit / min(temperature, 1.0) for limit in GAP_LIMITS[dtype])
    mean = metrics["logprob_gap_mean"]
    if mean <= warn:
        return None
    figures = ", ".join(
        f"{name} {metrics[f'logprob_gap_{name}']:.2g}" for name in ("mean", "p99", "max", "k3")
    )
    text = (
        f"at the first step the engine's logprobs differ from the trainer's by {figures} nats, more than "
        f"the {warn:.2g} that {dtype} rounding can explain"
    )
    if mean <= stop:
        return f"{text}; algorithm.rollout_correction limits the effect on the loss"
    raise EngineError(
        f"values-differ: {text}. Either the engine does not have the trainer's weights, or it computes its "
        "logprobs differently (at another temperature, or after top_p or top_k truncation). Compare a few "
        "completions with those of engine.name = 'hf'",
        name="logprob_gap_mean",
    )


@dataclasses.dataclass(slots=True)
class GapWatch:
    """Warns of the logprob gaps of the steps of one process: every start has a new engine.

    Args:
        temperature: of sampling.
        note: displays a line.
    """

    temperature: float
    note: Callable[[str], None]
    _waits: bool = True
    """For the first step with a gap."""
    _blind: bool = False
    """Whether the last step had no token of the weights that it trained."""

    def check(self, metrics: Mapping[str, float], *, dtype: str) -> bool | None:
        """Check a step.

        Returns:
            Whether the gap is small enough, of the first step that has one; else None.

        Raises:
            EngineError: at that step, as gap_complaint.
        """
        blind = metrics.get("logprob_gap_share") == 0.0
        if blind and not self._blind:
            self.note(
                "warning: logprob_gap_share is 0: earlier weights sampled every token of this step, so the "
                "engine's logprobs cannot be compared with the trainer's. A smaller rollout.max_lag leaves "
                "tokens to compare"
            )
        self._blind = blind
        if not self._waits or "logprob_gap_mean" not in metrics:
            return None
        self._waits = False
        complaint = gap_complaint(metrics, dtype=dtype, temperature=self.temperature)
        if complaint is not None:
            self.note(f"warning: {complaint}")
        return complaint is None


# Use equal kernel contracts: rollout logprobs serve as old logprobs, and each step checks that they may.
#
# A trainer and an engine with the same contract compute bitwise equal logprobs for every token. So the
# forward pass that would compute old_logprobs is left out; what the trainer computes anyway at the weights
# that the rollouts came from, and a few micro-batches that take turns, are compared with the rollout's, and
# one unequal bit ends the run.


Logprobs = Callable[[Sequence[PackedBatch]], list[Tensor]]
"""A forward of the policy: [T] float32 per micro-batch."""


def shared_contract(backend: TrainBackend, engine: SharesWeights, *, engine_name: str) -> KernelContract:
    """Return the contract that both keep under train.batch_invariant = true.

    Raises:
        ConfigError: they differ, field by field, or one of them has none.
    """
    ours = backend.contract
    theirs = engine.contract
    for side, found in ((f"{type(backend).__name__}", ours), (f"engine.name = {engine_name!r}", theirs)):
        if found is None:
            raise ConfigError(
                f"wrong-part: train.batch_invariant = true, but {side} declares no kernel contract "
                "(attribute `contract`), so its kernels are unknown. Set engine.name = 'native' and a "
                "train backend of Lockstep, or train.batch_invariant = false",
                name=side,
            )
    assert ours is not None and theirs is not None
    different = ours.difference(theirs)
    if different:
        raise ConfigError(
            "kernels-differ: train.batch_invariant = true, but the kernel contracts of the trainer (here) "
            f"and the engine (there) differ in {len(different)} field{'s' if len(different) > 1 else ''}: "
            f"{'; '.join(different)}. Make these fields equal for both, or train.batch_invariant = false",
            different=different,
        )
    return ours


@dataclasses.dataclass(slots=True)
class BitwiseCheck:
    """The check that trainer and engine of one run compute bitwise equal logprobs. `begin` once per rollout
    batch.

    Args:
        contract: the one that both have.
        reuse: whether rollout logprobs are taken as old_logprobs.
        at_once: micro-batches per comparison: as many as ranks compute at the same time.
    """

    contract: KernelContract
    reuse: bool
    at_once: int = 1
    _step: int = 0
    _names: list[str] = dataclasses.field(default_factory=list)
    _compared: int = 0
    _reused: bool = False
    _first: bool = True

    def begin(self, step: int, groups: Sequence[RolloutGroup]) -> None:
        """Start a step. `groups` are its rollouts: sample_id i is the i-th of their parts."""
        self._step, self._compared, self._reused = step, 0, False
        self._names = [
            f"prompt {group.prompt.index}, sample {number}"
            for group in groups
            for number, rollout in enumerate(group.rollouts)
            for _ in rollout.trajectory.parts
        ]

    def old_logprobs(
        self, minibatches: list[list[PackedBatch]], logprobs: Logprobs
    ) -> list[list[PackedBatch]]:
        """Return the micro-batches with old_logprobs; to be called before the first update.

        The first minibatch is compared when it is trained on (`check`), at the very same weights; of the
        others `at_once` micro-batches are computed here, other ones each step.

        Raises:
            TrainError: a logprob differs.
        """
        if not self.reuse:
            return [self._computed(batches, logprobs) for batches in minibatches]
        later = [batch for batches in minibatches[1:] for batch in batches]
        if later:
            chosen = self._chosen(later)
            self._compare(chosen, logprobs(chosen))
        self._reused = True
        return [[self._with(batch, _policy(batch).rollout_logprobs) for batch in b] for b in minibatches]

    def _chosen(self, later: list[PackedBatch]) -> list[PackedBatch]:
        """The micro-batches whose turn it is. The first time also one of each size, so that a compiled
        forward makes its graphs now: later a new one would count as a recompile."""
        count = min(self.at_once, len(later))
        turn = self._step * count
        chosen = [(turn + i) % len(later) for i in range(count)]
        if self._first:
            self._first = False
            sizes = {_size(later[number]) for number in chosen}
            for number, batch in enumerate(later):
                if _size(batch) not in sizes:
                    sizes.add(_size(batch))
                    chosen.append(number)
        return [later[number] for number in chosen]

    def _computed(self, batches: list[PackedBatch], logprobs: Logprobs) -> list[PackedBatch]:
        computed = logprobs(batches)
        self._compare(batches, computed)
        return [self._with(batch, old) for batch, old in zip(batches, computed, strict=True)]

    @staticmethod
    def _with(batch: PackedBatch, old: Tensor) -> PackedBatch:
        return dataclasses.replace(_policy(batch), old_logprobs=old)

    def check(self, batches: Sequence[PackedBatch], logprobs: Sequence[Tensor]) -> None:
        """Compare the logprobs of the step's first forward, before the weights are updated.

        Raises:
            TrainError: a logprob differs.
        """
        if self.reuse or _policy(batches[0]).old_logprobs is None:  # else all were compared before
            self._compare(batches, logprobs)

    def metrics(self, trained_tokens: int) -> dict[str, float]:
        """The share of the rollout batch's tokens that was compared, all of them equal."""
        values = {"contract_verified": min(1.0, self._compared / max(trained_tokens, 1))}
        if self._reused:
            values["old_logprobs_reused"] = 1.0
        return values

    def _compare(self, batches: Sequence[PackedBatch], logprobs: Sequence[Tensor]) -> None:
        # One wait for the device: almost always there is nothing to say.
        wrong = [_differs(_policy(batch), ours) for batch, ours in zip(batches, logprobs, strict=True)]
        counts = torch.stack([w.sum() for w in wrong]).tolist() if wrong else []
        for index, count in enumerate(counts):
            if count:
                raise self._complaint(index, batches, logprobs, wrong, sum(counts))
        self._compared += sum(int(_compared(_policy(batch)).sum()) for batch in batches)

    def _complaint(
        self,
        index: int,
        batches: Sequence[PackedBatch],
        logprobs: Sequence[Tensor],
        wrong: Sequence[Tensor],
        count: int,
    ) -> TrainError:
        batch, computed = _policy(batches[index]), logprobs[index].detach().cpu()
        slot = int(wrong[index].cpu().nonzero()[0, 0])
        document, start = _document_of(batch, slot)
        first = int(batch.loss_mask[start:].nonzero()[0, 0])  # of the document: what predicts its completion
        sample, position = batch.sample_ids[document], slot - start + 1
        name = self._names[sample] if sample < len(self._names) else f"sample_id {sample}"
        ours, theirs = float(computed[slot]), float(batch.rollout_logprobs[slot])
        tokens = sum(int(_compared(_policy(b)).sum()) for b in batches)
        return TrainError(
            f"values-differ: step {self._step}, {name}, position {position} (token {position - first - 1} "
            f"of its completion, id {int(batch.labels[slot])}): with the same weights, the engine's logprob "
            f"is {theirs!r} and the trainer's is {ours!r}; {count} of {tokens} compared tokens differ. With "
            f"train.batch_invariant = true both follow kernel contract {self.contract.hash[:12]}, so their "
            "logprobs must be bitwise equal. No weights were changed. Set train.batch_invariant = false to "
            "continue with a gap, and report this error with the run's manifest.json",
            step=self._step,
            name=name,
            position=position,
            token=position - first - 1,
        )


def _size(batch: PackedBatch) -> tuple[int, int]:
    """The sizes that a static capacity fixes."""
    return batch.num_slots, len(batch.cu_seqlens)


def _differs(batch: PolicyBatch, logprobs: Tensor) -> Tensor:
    """[T] bool, on the device of `logprobs`; NaN differs from everything."""
    mask = _compared(batch).to(logprobs.device)
    return mask & (logprobs.detach() != batch.rollout_logprobs.to(logprobs.device))


def _compared(batch: PolicyBatch) -> Tensor:
    """[T] bool: the trained tokens that the trainer's weights sampled."""
    return batch.loss_mask if batch.current is None else batch.loss_mask & batch.current


def _document_of(batch: PackedBatch, slot: int) -> tuple[int, int]:
    """(number, first slot) of the document that `slot` is in."""
    start = 0
    for number, length in enumerate(batch.lengths):
        if slot < start + length:
            return number, start
        start += length
    raise AssertionError(f"slot {slot} is in no document")


def _policy(batch: Any) -> PolicyBatch:
    assert isinstance(batch, PolicyBatch), "rollouts are packed as policy batches"
    return batch
