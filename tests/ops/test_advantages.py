from __future__ import annotations

import itertools
import math

import pytest
import torch

from lockstep.ops.advantages import (
    batch_mean_std,
    gae,
    group_mean,
    group_mean_std,
    group_mean_step_std,
    leave_one_out,
    reward_to_go,
)

REWARDS = torch.tensor([[1.0, 0.0, 2.0], [5.0, 5.0, 5.0]], dtype=torch.float64)
NAN = float("nan")


def test_group_advantages_by_hand() -> None:
    """The first group has mean 1 and std 1; in the second all are equal."""
    zero = [0.0, 0.0, 0.0]
    assert group_mean(REWARDS).tolist() == [[0.0, -1.0, 1.0], zero]
    assert leave_one_out(REWARDS).tolist() == [[0.0, -1.5, 1.5], zero]
    expected = torch.tensor([[0.0, -1.0, 1.0], zero], dtype=torch.float64) / 1.0001
    torch.testing.assert_close(group_mean_std(REWARDS), expected)


@pytest.mark.parametrize("function", [group_mean, group_mean_std, group_mean_step_std, leave_one_out])
def test_equal_rewards_have_no_advantage_at_all(function: object) -> None:
    """(0.1 + 0.1 + 0.1) / 3 is not 0.1; a lost rollout does not make a group unequal."""
    rewards = torch.tensor([[0.1, 0.1, 0.1, NAN], [0.1, 0.1, 0.4, NAN]], dtype=torch.float64)
    assert (rewards[0, :3].sum() / 3 != 0.1).item()
    found = function(rewards, ~rewards.isnan())
    assert found[0].tolist() == [0.0] * 4 and bool((found[1, :3] != 0).all())


def test_group_mean_step_std_by_hand() -> None:
    """Over the std of all six rewards, sqrt(26 / 5), of which the lost one is none; TRL takes torch.std of
    them."""
    expected = torch.tensor([[0.0, -1.0, 1.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    expected /= math.sqrt(26 / 5) + 1e-4
    torch.testing.assert_close(group_mean_step_std(REWARDS), expected)
    wider = torch.cat([REWARDS, torch.tensor([[NAN], [NAN]])], 1)
    found = group_mean_step_std(wider, ~wider.isnan())
    torch.testing.assert_close(found[:, :3], expected)
    assert found[:, 3].tolist() == [0.0, 0.0]
    of_trl = (REWARDS - REWARDS.mean(1, keepdim=True)) / (REWARDS.std() + 1e-4)
    torch.testing.assert_close(group_mean_step_std(REWARDS), of_trl)
    assert group_mean_step_std(torch.tensor([[2.0]])).tolist() == [[0.0]]


def test_batch_mean_std_by_hand() -> None:
    """1, 0, 2, 5, 5, 5: mean 3, squared distances 4 + 9 + 1 + 4 + 4 + 4 = 26, std sqrt(26 / 5)."""
    expected = (REWARDS - 3) / (math.sqrt(26 / 5) + 1e-4)
    torch.testing.assert_close(batch_mean_std(REWARDS), expected)


@pytest.mark.parametrize("function", [group_mean, group_mean_std, leave_one_out])
def test_a_lost_rollout_counts_for_nothing(function: object) -> None:
    rewards = torch.tensor([[1.0, NAN, 2.0, 6.0], [NAN, 3.0, NAN, NAN]])
    found = function(rewards, ~rewards.isnan())
    alone = function(torch.tensor([[1.0, 2.0, 6.0]]))
    torch.testing.assert_close(found[0, [0, 2, 3]], alone[0])
    assert found[0, 1] == 0 and found[1].tolist() == [0.0, 0.0, 0.0, 0.0]


def test_batch_mean_std_with_a_mask() -> None:
    values = torch.tensor([1.0, NAN, 3.0])
    found = batch_mean_std(values, ~values.isnan(), eps=0.0)
    torch.testing.assert_close(found, torch.tensor([-1.0, 0.0, 1.0]) / math.sqrt(2))


def test_gae_equals_the_recursion_over_tokens() -> None:
    torch.manual_seed(0)
    cu = [0, 4, 4, 5, 11]
    rewards, values = torch.randn(2, 11, dtype=torch.float64)
    expected = torch.zeros(11, dtype=torch.float64)
    for start, stop in itertools.pairwise(cu):
        following, next_value = 0.0, 0.0
        for t in reversed(range(start, stop)):
            following = rewards[t] + 0.9 * next_value - values[t] + 0.9 * 0.8 * following
            expected[t], next_value = following, values[t]
    found = gae(rewards, values, torch.tensor(cu, dtype=torch.int32), gamma=0.9, lam=0.8)
    torch.testing.assert_close(found, expected)


def test_gae_of_documents_that_were_cut_off_and_have_their_own_lambda() -> None:
    """Against the recursion. The second document is empty; the fourth has ended."""
    torch.manual_seed(1)
    cu = [0, 4, 4, 5, 11]
    rewards, values = torch.randn(2, 11, dtype=torch.float64)
    finals, lam = torch.tensor([0.7, 9.0, -2.0, 0.0]).double(), torch.tensor([0.5, 1.0, 0.0, 0.9]).double()
    expected = torch.zeros(11, dtype=torch.float64)
    for document, (start, stop) in enumerate(itertools.pairwise(cu)):
        following, next_value = 0.0, float(finals[document])
        for t in reversed(range(start, stop)):
            following = rewards[t] + 0.9 * next_value - values[t] + 0.9 * lam[document] * following
            expected[t], next_value = following, values[t]
    found = gae(rewards, values, torch.tensor(cu), gamma=0.9, lam=lam, final_values=finals)
    torch.testing.assert_close(found, expected)


def test_reward_to_go_by_hand() -> None:
    cu = torch.tensor([0, 3, 5])
    found = reward_to_go(torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0]), cu)
    assert found.tolist() == [7.0, 6.0, 4.0, 24.0, 16.0]
    found = reward_to_go(torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0]), cu, gamma=0.5)
    assert found.tolist() == [3.0, 4.0, 4.0, 16.0, 16.0]
