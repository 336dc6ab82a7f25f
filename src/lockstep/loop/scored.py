"""Which samples of a step go through forward and backward. A group whose advantages are all zero has no
gradient where the loss has nothing else to go by, so it is left out; the normaliser of the step counts it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from lockstep.config.train import TrainConfig
from lockstep.protocols.train import TokenLoss
from lockstep.schema.batch import PolicySample
from lockstep.schema.rollout import RolloutGroup


def scores_all(
    train: TrainConfig, step: int, *, loss: TokenLoss, recorded: bool, static_capacity: bool
) -> bool:
    """Return whether every sample of `step` is scored.

    Args:
        loss: one that does not say `zero_without_advantages` needs all samples.
        recorded: whether the run is recorded: a recording holds everything.
        static_capacity: whether packs have static capacities. Fewer samples may be the first to need a small
            one, whose graph counts as a recompile: under train.max_recompiles that could end the run.
    """
    bounded = static_capacity and train.max_recompiles is not None
    declared = bool(getattr(loss, "zero_without_advantages", False))
    return step % train.score_all_every == 0 or recorded or bounded or not declared


def with_signal(groups: Sequence[RolloutGroup], samples: Sequence[PolicySample]) -> frozenset[int]:
    """Return the sample_ids of the groups that have an advantage which is not zero.

    Args:
        samples: the rollouts of all groups, in order.
    """
    found: set[int] = set()
    rest = iter(samples)
    for group in groups:
        members = [next(rest) for _ in group.rollouts]
        if any(bool(member.advantages.any()) for member in members):
            found.update(member.sample_id for member in members)
    return frozenset(found)


def scored_indices(samples: Sequence[PolicySample], scored: Collection[int]) -> list[int]:
    """Return the indices of the samples of one optimizer step that are scored.

    Where that is none, the shortest of those that train anything stands for all: its gradient is zero, so
    every rank and every kind of backend goes through the step as through any other.

    Args:
        scored: sample_ids.
    """
    kept = [index for index, sample in enumerate(samples) if sample.sample_id in scored]
    if any(samples[index].num_trained for index in kept):
        return kept
    trained = [index for index, sample in enumerate(samples) if sample.num_trained]
    return [min(trained, key=lambda index: len(samples[index]))] if trained else list(range(len(samples)))


def scored_metrics(samples: Sequence[PolicySample], *, trained_tokens: float) -> dict[str, float]:
    """Return scored_share, and rollout/tokens: prompt and completion tokens of the step, scored or not.

    Args:
        samples: of the whole step.
        trained_tokens: of those that were scored.
    """
    of_all = sum(sample.num_trained for sample in samples)
    return {
        "scored_share": trained_tokens / of_all if of_all else 1.0,
        "rollout/tokens": float(sum(map(len, samples))),
    }
