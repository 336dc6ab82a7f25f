from __future__ import annotations

import pytest
import torch

from lockstep.algorithms.samples import policy_sample
from lockstep.errors import DataError
from lockstep.schema.rollout import Completion


def completion(prompt: tuple[int, ...], tokens: tuple[int, ...], logprobs: tuple[float, ...]) -> Completion:
    return Completion(
        prompt_token_ids=prompt,
        token_ids=tokens,
        logprobs=logprobs,
        finish_reason="stop",
        stop_reason=None,
        text=None,
        seed=0,
        engine="test",
        policy_version=3,
    )


def test_alignment_is_that_of_the_schema_example() -> None:
    """Prompt [5, 6], completion [7, 8, 2]."""
    sample = policy_sample(completion((5, 6), (7, 8, 2), (-0.5, -1.5, -2.5)), advantages=3.0, sample_id=4)
    assert sample.token_ids.tolist() == [5, 6, 7, 8, 2]
    assert sample.loss_mask.tolist() == [False, True, True, True, False]
    assert sample.rollout_logprobs.tolist() == [0.0, -0.5, -1.5, -2.5, 0.0]
    assert sample.advantages.tolist() == [0.0, 3.0, 3.0, 3.0, 0.0]
    assert (sample.sample_id, sample.policy_version) == (4, 3)
    per_token = policy_sample(completion((5,), (7, 8), (-0.5, -1.5)), advantages=torch.tensor([1.0, 2.0]))
    assert per_token.advantages.tolist() == [1.0, 2.0, 0.0]


def test_an_empty_completion_trains_nothing() -> None:
    sample = policy_sample(completion((5, 6), (), ()), advantages=1.0)
    assert sample.num_trained == 0 and sample.token_ids.tolist() == [5, 6]


def test_refusals() -> None:
    with pytest.raises(DataError, match="sample 3 has an empty prompt"):
        policy_sample(completion((), (7,), (-1.0,)), advantages=0.0, sample_id=3)
    with pytest.raises(DataError, match="2 completion tokens but 1 logprobs"):
        policy_sample(completion((5,), (7, 8), (-1.0,)), advantages=0.0)
