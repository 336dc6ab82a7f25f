"""The trainer's numbers for each token of a step's rollouts, which log.token_details adds to rollouts/."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import TrainError
from lockstep.protocols.train import StepStats
from lockstep.schema.batch import PackedBatch, PolicyBatch, PolicySample, trajectory_slices


class TokenDetails:
    """Keeps the figures of one step, which its optimizer steps compute anyway, until its rows are written.

    The logprob of a token is the one that logprob_gap_* compares with the rollout's: old_logprobs, or with a
    single optimizer step, whose loss needs none, the loss's own. Its entropy is that of the loss in the first
    pass over the token, as in the metric `entropy`. With several minibatches the weights have therefore moved
    between the two, except in the first minibatch.
    """

    def __init__(self) -> None:
        self._samples: Sequence[PolicySample] = ()
        self._scored: dict[int, Tensor] = {}
        """[L, 2] float32 by sample_id, on the host: logprobs and entropy."""

    def begin(self, samples: Sequence[PolicySample]) -> None:
        """Start a step. `samples` are its rollouts, in order, also those that will not be scored."""
        self._samples, self._scored = samples, {}

    def add(self, batches: Sequence[PackedBatch], stats: StepStats) -> None:
        """Keep the results of an optimizer step for the samples that no earlier one of this step had."""
        for batch, own, entropy in zip(batches, stats.logprobs, stats.entropy, strict=True):
            if all(sample_id in self._scored for sample_id in batch.sample_ids):
                continue  # a later epoch: nothing is copied from the device
            old = PolicyBatch.of(batch).old_logprobs
            both = torch.stack([(own if old is None else old).cpu(), entropy.cpu()], 1)
            for sample_id, values in zip(batch.sample_ids, batch.split(both), strict=True):
                self._scored.setdefault(sample_id, values)

    def add_to(self, rows: Sequence[dict[str, Any]]) -> None:
        """Add policy_logprobs, entropies and advantages to the rows of the step's rollouts, in the order of
        rollout_logprobs; logprobs and entropies are None if the step did not score the sample.

        Raises:
            TrainError: the rows are of other rollouts than the step was packed from.
        """
        fields = [self._fields(self._samples[parts]) for parts in trajectory_slices(self._samples)]
        ours = [len(each["advantages"]) for each in fields]
        theirs = [len(row["rollout_logprobs"]) for row in rows]
        if ours != theirs:
            raise TrainError(
                f"values-differ: log.token_details = true, but the {len(theirs)} rollouts to be written have "
                f"{sum(theirs)} policy tokens in all, and the {len(ours)} that policy.pack() got in this "
                f"step have {sum(ours)}; pass the same groups to run.write_rollouts() and policy.pack(), or "
                "set log.token_details = false"
            )
        for row, each in zip(rows, fields, strict=True):
            row.update(each)

    def _fields(self, parts: Sequence[PolicySample]) -> Mapping[str, Any]:
        """Of a trajectory, over its parts in order."""
        logprobs, entropies = None, None
        if all(sample.sample_id in self._scored for sample in parts):
            scored = torch.cat([self._scored[sample.sample_id][sample.loss_mask] for sample in parts])
            logprobs, entropies = map(_rounded, scored.unbind(1))
        return {
            "policy_logprobs": logprobs,
            "entropies": entropies,
            "advantages": _rounded(torch.cat([sample.advantages[sample.loss_mask] for sample in parts])),
        }


def _rounded(values: Tensor) -> list[float]:
    # As Python's round(), because a float32 times 1e6 is exact in float64.
    rounded: list[float] = values.double().round(decimals=6).tolist()
    return rounded
