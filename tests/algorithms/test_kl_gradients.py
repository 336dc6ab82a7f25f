"""Expected gradients of KL penalties, exact: the mean over all sequences, weighted by their probability."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import pytest
import torch
from sampled import completion, group, rollout
from torch import Tensor

from lockstep.algorithms.grpo import PolicyAlgorithm
from lockstep.config.algorithm import GRPOConfig
from lockstep.ops.losses import kl
from lockstep.packing import pack
from lockstep.schema.batch import PolicyBatch, policy_samples, rollout_samples
from lockstep.schema.rollout import RolloutGroup

VOCAB = 3
SEQUENCES = list(itertools.product(range(VOCAB), repeat=2))


def divergence(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum(-1)


class Table:
    """Log probabilities of two tokens: the first [V], the second given the first [V, V]."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.logits = torch.randn(
            1 + VOCAB, VOCAB, generator=generator, dtype=torch.float64, requires_grad=True
        )

    @property
    def first(self) -> Tensor:
        return self.logits[0].log_softmax(-1)

    @property
    def second(self) -> Tensor:
        return self.logits[1:].log_softmax(-1)

    def tokens(self) -> list[Tensor]:
        """[2] per sequence."""
        return [torch.stack([self.first[a], self.second[a, b]]) for a, b in SEQUENCES]


@pytest.fixture
def policy() -> Table:
    return Table(0)


@pytest.fixture
def ref() -> Table:
    return Table(1)


def groups_of(policy: Table) -> list[RolloutGroup]:
    """One rollout per sequence, reward 0."""
    sequences = zip(SEQUENCES, policy.tokens(), strict=True)
    made = [completion((5,), ids, logprobs.tolist(), finish_reason="length") for ids, logprobs in sequences]
    return [group([rollout(each) for each in made])]


def on_slots(logprobs: list[Tensor]) -> list[Tensor]:
    """[3] per sequence: prompt, two tokens; entry t is of token t + 1."""
    return [torch.cat([pair, pair.new_zeros(1)]) for pair in logprobs]


def expected_gradient(policy: Table, ref: Table, **options: object) -> Tensor:
    """Of the loss of all sequences, each weighted by its probability, by the logits."""
    algorithm = PolicyAlgorithm(GRPOConfig(**options), max_tokens=2)
    groups, of_ref = groups_of(policy), [x.detach() for x in on_slots(ref.tokens())]
    rollouts = rollout_samples(rollout.trajectory for rollout in groups[0].rollouts)
    shaped, _ = algorithm.advantages(groups, rollouts, ref_logprobs=of_ref)
    rewards = [rollout.reward * s.loss_mask for rollout, s in zip(shaped[0].rollouts, rollouts, strict=True)]
    samples = policy_samples(rollouts, rewards)
    chances = [pair.detach().sum().exp() for pair in policy.tokens()]
    weights = [sample.loss_mask * chance for sample, chance in zip(samples, chances, strict=True)]
    batch = dataclasses.replace(pack(samples, weights), ref_logprobs=torch.cat(of_ref))
    assert isinstance(batch, PolicyBatch)
    logprobs = torch.cat(on_slots(policy.tokens()))
    loss = algorithm.loss()(logprobs, torch.zeros_like(logprobs), batch, slice(None)).loss
    return torch.autograd.grad(loss, policy.logits)[0]


def test_k1_in_the_reward_has_the_gradient_of_the_kl_of_sequences(policy: Table, ref: Table) -> None:
    found = expected_gradient(policy, ref, kl={"coef": 1.0, "place": "reward"})
    whole = (
        divergence(policy.first, ref.first)
        + (policy.first.exp() * divergence(policy.second, ref.second)).sum()
    )
    (expected,) = torch.autograd.grad(whole, policy.logits)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("estimator", "of_state"),
    [
        ("k2", lambda p, q: divergence(p, q)),
        ("k3", lambda p, q: divergence(q, p)),
        (None, lambda p, q: divergence(q, p)),
    ],
)
def test_in_the_loss_it_is_the_gradient_of_a_kl_of_each_state(
    policy: Table, ref: Table, estimator: str | None, of_state: Callable[[Tensor, Tensor], Tensor]
) -> None:
    """States are visited as the policy does; that it could visit others is not in the gradient."""
    found = expected_gradient(policy, ref, kl={"coef": 1.0, "estimator": estimator})
    visits = policy.first.detach().exp()
    whole = of_state(policy.first, ref.first) + (visits * of_state(policy.second, ref.second)).sum()
    (expected,) = torch.autograd.grad(whole, policy.logits)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert expected.abs().max() > 0.1


def test_what_is_refused_has_another_gradient() -> None:
    """One token: k1 in the loss has none, k3 in the reward that of KL(p || q) - KL(q || p)."""
    p, q = Table(2).logits[0], Table(3).first.detach()

    def gradient(loss: Callable[[Tensor], Tensor]) -> Tensor:
        return torch.autograd.grad(loss(p.log_softmax(-1)), p)[0]

    zero = gradient(lambda x: (x.detach().exp() * kl(x, q, estimator="k1")).sum())
    assert zero.abs().max() < 1e-12
    forward, backward = gradient(lambda x: divergence(x, q)), gradient(lambda x: divergence(q, x))
    in_reward = {
        name: gradient(lambda x, name=name: (x.detach().exp() * kl(x.detach(), q, estimator=name) * x).sum())
        for name in ("k1", "k2", "k3")
    }
    torch.testing.assert_close(in_reward["k1"], forward)
    torch.testing.assert_close(in_reward["k3"], forward - backward)
    for name in ("k2", "k3"):
        assert (in_reward[name] - forward).norm() > 0.1 * forward.norm()
