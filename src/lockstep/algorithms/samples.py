"""Train samples from trajectories, in the alignment that lockstep.schema.batch describes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lockstep.errors import DataError
from lockstep.schema.batch import PolicySample, RolloutSample
from lockstep.schema.rollout import Trajectory


def rollout_samples(trajectories: Iterable[Trajectory]) -> list[RolloutSample]:
    """Return one document per trajectory, in order, sample_id counting from 0, trained on every token that
    the policy wrote.

    Raises:
        DataError: without a prompt token (nothing precedes the first sampled one), or when there is not one
            logprob per token of the policy.
    """
    return [_rollout_sample(trajectory, index) for index, trajectory in enumerate(trajectories)]


def _rollout_sample(trajectory: Trajectory, sample_id: int) -> RolloutSample:
    if not trajectory.prompt_token_ids:
        raise DataError(
            f"sample {sample_id} has an empty prompt, so nothing predicts its first token; give the "
            "prompt at least a beginning-of-sequence token"
        )
    token_ids = torch.tensor(trajectory.token_ids, dtype=torch.int64)
    loss_mask = torch.zeros(len(token_ids), dtype=torch.bool)
    rollout_logprobs = torch.zeros(len(token_ids))
    start = 0
    for span in trajectory.spans:
        stop = start + len(span.token_ids)
        if span.author == "policy":
            if len(span.logprobs) != stop - start:
                raise DataError(
                    f"sample {sample_id} from engine {trajectory.engine!r} has {stop - start} completion "
                    f"tokens but {len(span.logprobs)} logprobs; an engine must return one per token"
                )
            loss_mask[start - 1 : stop - 1] = True
            rollout_logprobs[start - 1 : stop - 1] = torch.tensor(span.logprobs, dtype=torch.float32)
        start = stop
    return RolloutSample(
        token_ids=token_ids,
        loss_mask=loss_mask,
        sample_id=sample_id,
        rollout_logprobs=rollout_logprobs,
        policy_version=trajectory.policy_version,
    )


def policy_samples(
    samples: Sequence[RolloutSample],
    advantages: Sequence[Tensor] | None,
    *,
    ref_logprobs: Sequence[Tensor] | None = None,
) -> list[PolicySample]:
    """Return the samples with their advantages.

    Args:
        advantages: [L] float32 per sample, 0 where loss_mask is False; None: all 0, for packs that are only
            scored.
        ref_logprobs: [L] float32 per sample, nats; None: the algorithm has no KL term.
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
            advantages=values,
            ref_logprobs=ref,
        )
        for sample, values, ref in zip(samples, advantages, refs, strict=True)
    ]
