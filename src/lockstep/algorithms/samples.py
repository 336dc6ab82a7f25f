"""Train samples from prompts and completions, in the alignment that lockstep.schema.batch describes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lockstep.errors import DataError
from lockstep.schema.batch import PolicySample
from lockstep.schema.rollout import Completion, RolloutGroup


def policy_sample(completion: Completion, *, advantages: Tensor | float, sample_id: int = 0) -> PolicySample:
    """Return the document prompt + completion, trained on every token of the completion.

    Args:
        completion: n sampled tokens with their logprobs.
        advantages: one for the sample, or [n] float, one per completion token.

    Raises:
        DataError: without a prompt token (nothing precedes the first sampled one), or when there is
            not one logprob per token.
    """
    prompt, tokens = completion.prompt_token_ids, completion.token_ids
    if not prompt:
        raise DataError(
            f"sample {sample_id} has an empty prompt, so nothing predicts its first token; give the "
            "prompt at least a beginning-of-sequence token"
        )
    if len(completion.logprobs) != len(tokens):
        raise DataError(
            f"sample {sample_id} from engine {completion.engine!r} has {len(tokens)} completion tokens but "
            f"{len(completion.logprobs)} logprobs; an engine must return one per token"
        )
    length = len(prompt) + len(tokens)
    trained = slice(len(prompt) - 1, length - 1)
    loss_mask = torch.zeros(length, dtype=torch.bool)
    loss_mask[trained] = True
    rollout_logprobs, per_token = torch.zeros(length), torch.zeros(length)
    rollout_logprobs[trained] = torch.tensor(completion.logprobs, dtype=torch.float32)
    per_token[trained] = torch.as_tensor(advantages, dtype=torch.float32)
    return PolicySample(
        token_ids=torch.tensor(prompt + tokens, dtype=torch.int64),
        loss_mask=loss_mask,
        sample_id=sample_id,
        rollout_logprobs=rollout_logprobs,
        advantages=per_token,
        policy_version=completion.policy_version,
    )


def rollout_samples(
    groups: Iterable[RolloutGroup], *, advantages: Sequence[Tensor | float] | None = None
) -> list[PolicySample]:
    """Return one sample per rollout, in order, sample_id counting from 0.

    Args:
        advantages: one entry per rollout, as `policy_sample` takes them. None: all 0, for packs that go
            through the reference before there are rewards to compare.
    """
    completions = [rollout.completion for group in groups for rollout in group.rollouts]
    values = [0.0] * len(completions) if advantages is None else advantages
    return [
        policy_sample(completion, advantages=value, sample_id=index)
        for index, (completion, value) in enumerate(zip(completions, values, strict=True))
    ]
