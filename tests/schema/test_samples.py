from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import sampled
import torch
from raising import raises

from lockstep.errors import DataError
from lockstep.schema.batch import policy_samples, rollout_samples
from lockstep.schema.rollout import Trajectory

completion = functools.partial(sampled.completion, policy_version=3)


def one_turn(*spans: Any) -> Trajectory:
    return Trajectory.of(completion(*spans))


def test_alignment_is_that_of_the_schema_example() -> None:
    """Prompt [5, 6], completion [7, 8, 2]."""
    _, sample = rollout_samples(
        [one_turn((1,), (2,), (-1.0,)), one_turn((5, 6), (7, 8, 2), (-0.5, -1.5, -2.5))]
    )
    assert sample.token_ids.tolist() == [5, 6, 7, 8, 2]
    assert sample.loss_mask.tolist() == [False, True, True, True, False]
    assert sample.rollout_logprobs.tolist() == [0.0, -0.5, -1.5, -2.5, 0.0]
    assert (sample.sample_id, sample.policy_version) == (1, 3)


def test_only_what_the_policy_wrote_is_trained() -> None:
    """Two turns: prompt [5], policy [7, 8], tool [4, 4], policy [9]. Then one that goes on where it stopped,
    by a later policy."""
    first = one_turn((5,), (7, 8), (-0.5, -1.5))
    second = first.continued((4, 4), completion((5, 7, 8, 4, 4), (9,), (-0.25,)))
    later = dataclasses.replace(completion((5, 7, 8, 4, 4, 9), (2,), (-0.75,)), policy_version=4)
    third = second.continued((), later)
    assert [span.author for span in third.spans] == ["prompt", "policy", "tool", "policy", "policy"]
    assert third.policy_tokens == 4 and third.policy_version == 3
    (sample,) = rollout_samples([third])
    assert sample.token_ids.tolist() == [5, 7, 8, 4, 4, 9, 2]
    assert sample.loss_mask.tolist() == [True, True, False, False, True, True, False]
    assert sample.rollout_logprobs.tolist() == [-0.5, -1.5, 0.0, 0.0, -0.25, -0.75, 0.0]
    with pytest.raises(ValueError, match=r"prompt \(2 tokens\) is not the trajectory \(3 tokens\)"):
        first.continued((4,), completion((5, 7), (9,), (-0.25,)))


def test_samples_with_advantages_keep_the_rest() -> None:
    samples = rollout_samples([one_turn((5,), (7, 8), (-0.5, -1.5))])
    (full,) = policy_samples(samples, [torch.tensor([1.0, 2.0, 0.0])], ref_logprobs=[torch.full((3,), -2.0)])
    assert full.advantages.tolist() == [1.0, 2.0, 0.0] and full.ref_logprobs.tolist() == [-2.0] * 3
    assert full.rollout_logprobs is samples[0].rollout_logprobs and full.policy_version == 3
    (bare,) = policy_samples(samples, None)
    assert not bare.advantages.any() and bare.ref_logprobs is None


def test_an_empty_completion_trains_nothing() -> None:
    (sample,) = rollout_samples([one_turn((5, 6), (), ())])
    assert sample.num_trained == 0 and sample.token_ids.tolist() == [5, 6]


def test_refusals() -> None:
    good = one_turn((5,), (7,), (-1.0,))
    with raises(DataError, "empty"):
        rollout_samples([good, good, good, one_turn((), (7,), (-1.0,))])
    with raises(DataError, "wrong-result"):
        rollout_samples([one_turn((5,), (7, 8), (-1.0,))])
