from __future__ import annotations

import dataclasses
import math

import pytest
import sampled
import torch
from raising import raises
from sampled import completion, group
from torch import Tensor

from lockstep.algorithms import ALGORITHMS
from lockstep.algorithms.grpo import PolicyAlgorithm
from lockstep.algorithms.policy_loss import PolicyLoss
from lockstep.config.algorithm import GRPOConfig
from lockstep.config.ppo import PPOConfig
from lockstep.errors import ConfigError, DataError, TrainError
from lockstep.packing import Bucket, PackLimits, pack, plan_micro_batches
from lockstep.protocols import Algorithm, StepStats
from lockstep.schema.batch import PolicyBatch, PolicySample, RolloutSample, policy_samples, rollout_samples
from lockstep.schema.rollout import Rollout, RolloutGroup

LENGTHS, REWARDS = ((1, 3), (2, 2)), ((1.0, 0.0), (3.0, 1.0))
LN2 = math.log(2)


def rollout(prompt: tuple[int, ...], length: int, reward: float, finish_reason: str = "stop") -> Rollout:
    made = completion(prompt, range(3, 3 + length), finish_reason=finish_reason)
    return sampled.rollout(made, reward, {"task": reward})


def groups(lengths: object = LENGTHS, rewards: object = REWARDS) -> list[RolloutGroup]:
    return [
        group([rollout((1, 2), n, r) for n, r in zip(ns, rs, strict=True)], g)
        for g, (ns, rs) in enumerate(zip(lengths, rewards, strict=True))
    ]


def algorithm(name: str = "grpo", **options: object) -> PolicyAlgorithm:
    return ALGORITHMS.load(name)(GRPOConfig(name=name, **options), max_tokens=10)


def documents(sampled: list[RolloutGroup]) -> list[RolloutSample]:
    return rollout_samples(r.trajectory for group in sampled for r in group.rollouts)


def samples_of(
    algo: Algorithm, sampled: list[RolloutGroup], ref_logprobs: list[Tensor] | None = None
) -> list[PolicySample]:
    rollouts = documents(sampled)
    _, advantages = algo.advantages(sampled, rollouts, ref_logprobs=ref_logprobs)
    return policy_samples(rollouts, advantages)


def batch_of(algo: Algorithm, samples: list[PolicySample], **fields: Tensor) -> PolicyBatch:
    return dataclasses.replace(pack(samples, algo.loss_weights(samples)), **fields)


def per_rollout(samples: list[PolicySample], values: list[float]) -> Tensor:
    """[T]: one value per document on its trained tokens, NaN elsewhere: it must never be read."""
    return torch.cat(
        [
            torch.where(sample.loss_mask, torch.tensor(value), torch.nan)
            for sample, value in zip(samples, values, strict=True)
        ]
    )


A1, A3 = 0.5 / (math.sqrt(0.5) + 1e-4), 1 / (math.sqrt(2) + 1e-4)
S1, S2 = math.sqrt(10.875 / 7) + 1e-4, math.sqrt(4.875 / 7) + 1e-4
"""Token-weighted: rewards 1, 0, 0, 0, 3, 3, 1, 1 have mean 9/8 and squared distances 21 - 81/8 = 10.875;
centred by group, .5, -.5, -.5, -.5, 1, 1, -1, -1 have mean -1/8 and 5 - 1/8 = 4.875."""
HAND_WORKED = {
    "grpo": ([A1, -A1, A3, -A3], -(1.2 * A1 - A1 + 1.2 * A3 - A3) / 4),
    "dr_grpo": ([0.5, -0.5, 1, -1], -(1.2 * 0.5 - 3 * 0.5 + 2 * 1.2 * 1 - 2 * 1) / (4 * 10)),
    "dapo": ([A1, -A1, A3, -A3], -(1.28 * A1 - 3 * A1 + 2 * 1.28 * A3 - 2 * A3) / 8),
    "rloo": ([1, -1, 2, -2], -(1.2 * 1 - 1 + 1.2 * 2 - 2) / 4),
    "reinforce++": (
        [-0.125 / S1, -1.125 / S1, 1.875 / S1, -0.125 / S1],
        -(2 * -0.125 + 3 * -1.125 + 2 * 1.2 * 1.875 + 2 * -0.125) / S1 / 8,
    ),
    "reinforce++-baseline": (
        [0.625 / S2, -0.375 / S2, 1.125 / S2, -0.875 / S2],
        -(1.2 * 0.625 + 3 * -0.375 + 2 * 1.2 * 1.125 + 2 * -0.875) / S2 / 8,
    ),
    "gspo": ([A1, -A1, A3, -A3], -(1.0004 * A1 - A1 + 1.0004 * A3 - A3) / 4),
    "gspo_token": ([A1, -A1, A3, -A3], -(1.0004 * A1 - A1 + 1.0004 * A3 - A3) / 4),
    "cispo": ([A1, -A1, A3, -A3], (2 * A1 - 3 * A1 + 2 * 2 * A3 - 2 * A3) / 8),
    # sigmoid(1) * 4 at ratio 2 and tau 1, 2 / 1.05 at ratio 1 and tau 1.05
    "sapo": ([A1, -A1, A3, -A3], -(4 / (1 + math.exp(-1)) - 2 / 1.05) * (A1 + A3) / 4),
}
"""Advantages, and the loss where the first rollout of each group has importance ratio 2, the second 1, and
every logprob is -1. Completions have 1, 3, 2 and 2 tokens."""


@pytest.mark.parametrize("name", HAND_WORKED)
def test_published_variants_by_hand(name: str) -> None:
    algo = algorithm(name)
    advantages, expected = HAND_WORKED[name]
    samples = samples_of(algo, groups())
    for sample, advantage in zip(samples, advantages, strict=True):
        found = sample.advantages[sample.loss_mask]
        torch.testing.assert_close(found, torch.full_like(found, advantage), rtol=1e-5, atol=1e-6)
    batch = batch_of(algo, samples, old_logprobs=per_rollout(samples, [-1 - LN2, -1, -1 - LN2, -1]))
    logprobs = torch.where(batch.loss_mask, -1.0, torch.nan)
    loss = algo.loss()(logprobs, torch.zeros_like(logprobs), batch, slice(None)).loss
    assert loss.item() == pytest.approx(expected, rel=1e-4, abs=1e-7)


def test_every_variant_is_hand_worked() -> None:
    assert set(HAND_WORKED) | {"ppo", "sft", "dpo", "bradley_terry"} == set(
        ALGORITHMS
    )  # tests/algorithms/test_ppo.py


def test_off_policy_mask_drops_a_completion_that_the_policy_has_left() -> None:
    """Engine and trainer sampled at -1. On average the four completions are less likely by 0.3, 0.3, 0 and
    0.1 nats now; of those with a negative advantage only the second is beyond 0.2. Its KL stays."""
    algo = algorithm(off_policy_mask_threshold=0.2, kl={"coef": 0.5, "estimator": "k2"})
    assert not algo.loss().separable
    samples = samples_of(algo, groups())
    batch = batch_of(
        algo,
        samples,
        old_logprobs=per_rollout(samples, [-1.0] * 4),
        ref_logprobs=per_rollout(samples, [-1.3, -1.0, -1.0, -1.1]),
    )
    logprobs = per_rollout(samples, [-1.3, torch.nan, -1.0, -1.1])
    logprobs[samples[0].loss_mask.numel() :][: len(samples[1])][samples[1].loss_mask] = torch.tensor(
        [-1.9, -1.0, -1.0]
    )
    logprobs.requires_grad_()
    output = algo.loss()(logprobs, torch.zeros_like(logprobs), batch, slice(None))
    output.loss.backward()
    gradients = logprobs.grad[batch.loss_mask].tolist()
    kl = 0.5 * -0.9 / 12  # of the one token that has left the reference
    expected = [-A1 * math.exp(-0.3) / 4, kl, 0, 0, -A3 / 8, -A3 / 8, *[A3 * math.exp(-0.1) / 8] * 2]
    assert gradients == pytest.approx(expected, rel=1e-4, abs=1e-7)
    stats = StepStats(losses=[], logprobs=[logprobs.detach()], entropy=[logprobs], terms=[output.terms])
    assert algo.loss().metrics([batch], stats)["off_policy_masked_share"] == pytest.approx(3 / 8)


@pytest.mark.parametrize("bucket", [None, Bucket(tokens=16, documents=9, max_seqlen=8)])
def test_the_parts_of_a_trajectory_are_one_sequence(bucket: Bucket | None) -> None:
    """Of one and three tokens: a mean over four."""
    algo = algorithm("gspo", off_policy_mask_threshold=0.2)
    samples = [dataclasses.replace(s, trajectory=max(1, i)) for i, s in enumerate(samples_of(algo, groups()))]
    batch = pack(samples, algo.loss_weights(samples), bucket=bucket)
    old, off = torch.zeros(2, batch.num_slots)
    off[batch.loss_mask] = torch.tensor([0.9, 0.0, 0.0, 0.0, 0.4, 0.2, -0.1, 0.3])
    advantages = torch.where(batch.loss_mask, -1.0, 0.0)
    batch = dataclasses.replace(batch, old_logprobs=old, rollout_logprobs=2 * off, advantages=advantages)
    terms = algo.loss().policy_terms(off, batch, slice(None))
    means = [0.225] * 4 + [0.3] * 2 + [0.1] * 2
    assert terms.log_ratio[batch.loss_mask].tolist() == pytest.approx(means)
    assert terms.off_policy_mask[batch.loss_mask].tolist() == [mean <= 0.2 for mean in means]


@pytest.mark.parametrize("layout", ["packed", "padded", "shared"])
def test_a_loss_of_whole_sequences_gets_all_parts_of_a_trajectory(layout: str) -> None:
    algo = algorithm("gspo")
    assert algo.config.whole_sequences and not algorithm().config.whole_sequences
    documents = zip((0, 1, 1, 2), samples_of(algo, groups()), strict=True)  # of 3, 5, 4 and 4 tokens
    samples = [dataclasses.replace(sample, trajectory=number) for number, sample in documents]
    weights = algo.loss_weights(samples)

    def together(**limits: object) -> bool:
        limits_ = PackLimits(token_budget=10, layout=layout, **limits)
        return any({1, 2} <= set(b.sample_ids) for b in plan_micro_batches(samples, weights, limits_))

    assert together(whole_trajectories=True) and (layout == "padded" or not together())
    with raises(DataError, "too-long: the 2 parts of a trajectory have 9 tokens"):
        limits = PackLimits(token_budget=8, layout=layout, whole_trajectories=True)
        plan_micro_batches(samples, weights, limits)


def test_geometric_mask_goes_by_the_mean_over_a_completion() -> None:
    """old - rollout is 0.3 on the completion of one token, 0.2 on average on those of three and two, and -0.4
    on the last; the bound is 0.25 nats. A token of the third is 0.4 off, and so is its whole completion."""
    algo = algorithm(
        advantage="group_mean", rollout_correction={"kind": "tis", "geometric_high": math.exp(0.25)}
    )
    assert not algo.loss().separable
    samples = samples_of(algo, groups())
    batch = batch_of(algo, samples)
    gap = torch.tensor([0.3, 0.2, 0.2, 0.2, 0.4, 0.0, -0.4, -0.4])
    old = torch.zeros(batch.num_slots)
    old[batch.loss_mask] = batch.rollout_logprobs[batch.loss_mask] + gap
    batch = dataclasses.replace(batch, old_logprobs=old)
    logprobs = old.clone().requires_grad_()
    output = algo.loss()(logprobs, torch.zeros_like(old), batch, slice(None))
    output.loss.backward()
    kept, third = math.exp(0.2) * 0.5 / 12, -1 / 8
    expected = [0, kept, kept, kept, math.exp(0.4) * third, third, 0, 0]
    assert logprobs.grad[batch.loss_mask].tolist() == pytest.approx(expected, rel=1e-5)
    stats = StepStats(losses=[], logprobs=[old], entropy=[old], terms=[output.terms])
    assert algo.loss().metrics([batch], stats)["rollout_masked_share"] == pytest.approx(3 / 8)
    lower = {"geometric_high": math.exp(0.35), "geometric_low": math.exp(-0.5)}
    loss = algorithm(rollout_correction=lower).loss()
    assert loss.policy_terms(old, batch, slice(None)).is_weight[batch.loss_mask].tolist() == [1.0] * 8


@pytest.mark.parametrize(
    ("aggregation", "kept"),
    [
        ("sequence_mean", [1 / 4, 0, 1 / 8, 1 / 8]),
        ("sequence_sum", [1 / 4, 0, 1 / 4, 1 / 4]),
        ("token_mean", [1 / 5, 0, 1 / 5, 1 / 5]),
        ("constant", [1 / 40, 0, 1 / 40, 1 / 40]),
    ],
)
def test_a_truncated_completion_is_masked_as_if_it_had_no_token(aggregation: str, kept: list[float]) -> None:
    """1, 3, 2 and 2 tokens, of which the second completion was cut off: 5 tokens are left, of 4 completions.
    Its reward of 0 is in its group's mean all the same."""
    sampled = groups()
    cut = rollout((1, 2), 3, 0.0, finish_reason="length")
    sampled[0] = dataclasses.replace(sampled[0], rollouts=(sampled[0].rollouts[0], cut))
    algo = algorithm(advantage="group_mean", aggregation=aggregation, mask_truncated=True)
    samples = samples_of(algo, sampled)
    weights = algo.loss_weights(samples)
    for sample, weight, expected in zip(samples, weights, kept, strict=True):
        assert weight.tolist() == pytest.approx((sample.loss_mask * expected).tolist())
    assert samples[0].advantages[samples[0].loss_mask].tolist() == [0.5]
    unmasked = algorithm(advantage="group_mean", aggregation=aggregation).loss_weights(samples)
    assert all(weight.any() for weight in unmasked)


def test_a_step_of_truncated_completions_alone_has_no_gradient() -> None:
    cut = [
        dataclasses.replace(
            group, rollouts=tuple(rollout((1, 2), 2, r.reward, "length") for r in group.rollouts)
        )
        for group in groups()
    ]
    for aggregation in ("sequence_mean", "sequence_sum", "token_mean", "constant"):
        options = {"kl": {"coef": 0.1}, "entropy_coef": 0.1, "mask_truncated": True}
        algo = algorithm(aggregation=aggregation, **options)
        samples = samples_of(algo, cut)
        batch = batch_of(algo, samples, ref_logprobs=per_rollout(samples, [-3.0] * 4))
        logprobs = torch.full((batch.num_slots,), -1.0, requires_grad=True)
        entropy = torch.ones(batch.num_slots, requires_grad=True)
        loss = algo.loss()(logprobs, entropy, batch, slice(None)).loss
        loss.backward()
        assert loss.item() == 0 and not logprobs.grad.any() and not entropy.grad.any()


VARIANTS = {
    **{name: {"name": name} for name in HAND_WORKED},
    "kl_and_entropy": {"kl": {"coef": 0.1}, "entropy_coef": 0.01},
    "tis": {"rollout_correction": {"kind": "tis"}},
    "geometric_mask": {"rollout_correction": {"kind": "tis", "geometric_high": 1.1}},
    "off_policy_mask": {"off_policy_mask_threshold": 0.1},
    "sequence_icepop": {"rollout_correction": {"kind": "icepop", "level": "sequence", "low": 0.2}},
}


@pytest.mark.parametrize("case", VARIANTS)
def test_loss_and_gradients_do_not_depend_on_micro_batches(case: str) -> None:
    """All four documents in one pack, in two packs another way round, and one by one."""
    torch.manual_seed(0)
    config = GRPOConfig(**VARIANTS[case])
    algo = PolicyAlgorithm(config, max_tokens=10)
    samples = samples_of(algo, groups())
    weights = algo.loss_weights(samples)
    new, old, ref = ([torch.randn(len(s), dtype=torch.float64) * 0.3 - 1 for s in samples] for _ in range(3))
    results = []
    for plan in ([[0, 1, 2, 3]], [[3, 1], [2, 0]], [[2], [0], [3], [1]]):
        leaves = [x.clone().requires_grad_() for x in new]
        total = torch.zeros((), dtype=torch.float64)
        for members in plan:
            batch = pack([samples[i] for i in members], [weights[i] for i in members])
            batch = dataclasses.replace(
                batch,
                old_logprobs=torch.cat([old[i] for i in members]),
                ref_logprobs=torch.cat([ref[i] for i in members]),
            )
            logprobs = torch.cat([leaves[i] for i in members])
            total = total + algo.loss()(logprobs, logprobs.square(), batch, slice(None)).loss
        results.append([total.detach(), *torch.autograd.grad(total, leaves)])
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-9, atol=1e-12)
    assert sum(grad.abs().sum() for grad in results[0][1:]) > 0


@pytest.mark.parametrize("case", VARIANTS)
def test_rows_of_a_batch_add_up_and_the_gradient_is_exact(case: str) -> None:
    torch.manual_seed(1)
    algo = PolicyAlgorithm(GRPOConfig(**VARIANTS[case]), max_tokens=10)
    samples = samples_of(algo, groups())
    slots = sum(len(s) for s in samples)
    old, ref = torch.randn(2, slots, dtype=torch.float64) * 0.3 - 1
    batch = batch_of(algo, samples, old_logprobs=old, ref_logprobs=ref)
    loss = algo.loss()
    logprobs = (old + 0.1 * torch.randn(slots, dtype=torch.float64)).requires_grad_()
    whole = loss(logprobs, logprobs, batch, slice(None)).loss
    trained = batch.loss_mask.nonzero()[:, 0]
    picked = loss(logprobs[trained], logprobs[trained], batch, trained).loss
    torch.testing.assert_close(picked, whole)
    if loss.separable:
        parts = [loss(logprobs[r], logprobs[r], batch, r).loss for r in (slice(0, 5), slice(5, slots))]
        torch.testing.assert_close(sum(parts), whole)
    if case != "cispo":  # its weight is detached, so its value does not say what its gradient is
        assert torch.autograd.gradcheck(lambda x: loss(x, x, batch, slice(None)).loss, logprobs)


def test_on_policy_is_minus_the_weighted_advantage_and_its_gradient() -> None:
    algo = algorithm("dapo")
    batch = batch_of(algo, samples_of(algo, groups()))
    logprobs = torch.where(batch.loss_mask, -1.0, 0.0).requires_grad_()
    loss = algo.loss()(logprobs, torch.zeros_like(logprobs), batch, slice(None)).loss
    assert loss.item() == pytest.approx(-(A1 - 3 * A1 + 2 * A3 - 2 * A3) / 8, rel=1e-5)
    loss.backward()
    torch.testing.assert_close(logprobs.grad, -batch.advantages * batch.loss_weights)


def test_overlong_is_listed_and_counted() -> None:
    """max_tokens 10, buffer 4, penalty 2: from 6 tokens on; 8 tokens cost 1, 10 cost 2."""
    algo = algorithm(overlong={"buffer_tokens": 4, "penalty": 2.0})
    sampled = groups(lengths=((6, 8), (10, 1)))
    shaped, advantages = algo.advantages(sampled, documents(sampled))
    rewards = [(r.reward, r.rewards) for group in shaped for r in group.rollouts]
    assert rewards == [
        (1.0, {"task": 1.0, "overlong": 0.0}),
        (-1.0, {"task": 0.0, "overlong": -1.0}),
        (1.0, {"task": 3.0, "overlong": -2.0}),
        (1.0, {"task": 1.0, "overlong": 0.0}),
    ]
    assert not advantages[2].any()
    with raises(ConfigError, "out-of-range: algorithm.overlong.buffer_tokens"):
        algorithm(overlong={"buffer_tokens": 11})


def kl_inputs() -> list[Tensor]:
    """Reference logprobs -1.5 on trained tokens, where the rollout's are -1: k1 is 0.5 per token."""
    return [torch.where(sample.loss_mask, torch.tensor(-1.5), torch.nan) for sample in documents(groups())]


def test_kl_in_the_reward_of_a_sequence() -> None:
    """rewards 1 - .1, 0 - .3, 3 - .2, 1 - .2 with coef 0.2; RLOO compares them."""
    algo = algorithm("rloo", kl={"coef": 0.2, "estimator": "k1", "place": "reward"})
    assert algo.needs_ref
    rollouts = documents(groups())
    shaped, advantages = algo.advantages(groups(), rollouts, ref_logprobs=kl_inputs())
    assert [r.rewards["kl"] for g in shaped for r in g.rollouts] == pytest.approx([-0.1, -0.3, -0.2, -0.2])
    assert [a[1].item() for a in advantages] == pytest.approx([1.2, -1.2, 2.0, -2.0])
    with raises(TrainError, "missing-values: ref_logprobs", needed=4):
        algo.advantages(groups(), rollouts)


def test_kl_in_the_reward_of_a_token() -> None:
    """REINFORCE++: a token pays for its own KL and that of the tokens after it, then all are whitened."""
    algo = algorithm("reinforce++", kl={"coef": 0.2, "estimator": "k1", "place": "reward"})
    samples = samples_of(algo, groups(), kl_inputs())
    returns = torch.tensor([0.9, -0.3, -0.2, -0.1, 2.8, 2.9, 0.8, 0.9])
    expected = (returns - returns.mean()) / (returns.std() + 1e-4)
    found = torch.cat([s.advantages[s.loss_mask] for s in samples])
    torch.testing.assert_close(found, expected)


def test_dynamic_sampling_keeps_groups_with_a_difference() -> None:
    equal, different = groups(rewards=((1.0, 1.0), (0.0, 1.0)))
    assert [algorithm("dapo").keep(g) for g in (equal, different)] == [False, True]
    assert algorithm("grpo").keep(equal)


def test_groups_that_lost_rollouts() -> None:
    sampled = groups()
    sampled[1] = dataclasses.replace(sampled[1], rollouts=sampled[1].rollouts[1:])
    samples = samples_of(algorithm(), sampled)
    assert [s.sample_id for s in samples] == [0, 1, 2]
    torch.testing.assert_close(samples[1].advantages[1], torch.tensor(-A1))
    assert not samples[2].advantages.any()
    assert samples_of(algorithm("reinforce++"), []) == []


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        ({"kind": "tis"}, [2.0, 1.0, 2.0, 1.0]),
        ({"kind": "mask"}, [0.0, 1.0, 2.0, 1.0]),
        ({"kind": "icepop", "level": "sequence", "low": 0.5, "high": 4.5}, [3.0, 1.0, 4.0, 1.0]),
        ({"kind": "mask", "level": "sequence"}, [0.0, 1.0, 0.0, 1.0]),
    ],
)
def test_rollout_correction_by_hand(correction: dict[str, object], expected: list[float]) -> None:
    """old / rollout is 3 for the token of document 0, 2 for both tokens of document 2 (4 as a sequence)."""
    algo = algorithm("rloo", ratio="token", aggregation="sequence_sum", rollout_correction=correction)
    samples = samples_of(algo, groups())
    old = per_rollout(samples, [-1 + math.log(3), -1.0, -1 + LN2, -1.0])
    batch = batch_of(algo, samples, old_logprobs=old)
    logprobs = old.clone().requires_grad_()
    loss = algo.loss()
    loss(logprobs, logprobs, batch, slice(None)).loss.backward()
    expected_grad = torch.where(
        batch.loss_mask,
        -batch.advantages * batch.loss_weights * per_rollout(samples, expected),
        0.0,
    )
    torch.testing.assert_close(logprobs.grad, expected_grad)
    assert loss.separable == ("level" not in correction)


def test_kl_in_the_loss_needs_the_reference() -> None:
    algo = algorithm(kl={"coef": 0.5, "estimator": "k2"})
    samples = samples_of(algo, groups())
    batch = batch_of(algo, samples)
    logprobs = torch.where(batch.loss_mask, -1.0, 0.0)
    with raises(TrainError, "missing-values: ref_logprobs"):
        algo.loss()(logprobs, logprobs, batch, slice(None))
    plain = algorithm().loss()(logprobs, logprobs, batch, slice(None)).loss
    batch = dataclasses.replace(batch, ref_logprobs=per_rollout(samples, [-1.0, -3.0, -1.0, -1.0]))
    found = algo.loss()(logprobs, logprobs, batch, slice(None)).loss
    assert (found - plain).item() == pytest.approx(0.5 * (2**2 / 2) / 4)


def test_metrics_by_hand() -> None:
    """Ratios 2, 1/2, 2, 1 on 1, 3, 2, 2 tokens; old - rollout is ln 2, 0, 0, -ln 2."""
    tokens, policy = (1, 3, 2, 2), (-1 + 2 * LN2, -1 - LN2, -1 + LN2, -1 - LN2)
    algo = algorithm(rollout_correction={"kind": "mask", "high": 1.5}, kl={"coef": 0.1, "estimator": "k2"})
    samples = samples_of(algo, groups())
    old = per_rollout(samples, [-1 + LN2, -1.0, -1.0, -1 - LN2])
    batch = batch_of(
        algo, samples, old_logprobs=old, ref_logprobs=per_rollout(samples, [-2.0, -2.0, -2.0, -2.0])
    )
    new = old + per_rollout(samples, [LN2, -LN2, LN2, 0.0])
    loss = algo.loss()
    entropy = per_rollout(samples, [1.0, 2.0, 3.0, 4.0])
    terms = loss(new, entropy, batch, slice(None)).terms
    stats = StepStats(losses=[], logprobs=[new], entropy=[entropy], terms=[terms])
    found = loss.metrics([batch], stats)
    expected = {
        "entropy": (1 + 6 + 6 + 8) / 8,
        "clip_fraction_low": 3 / 8,
        "clip_fraction_high": 3 / 8,
        "importance_ratio_mean": (2 + 1.5 + 4 + 2) / 8,
        "importance_ratio_max": 2.0,
        "kl_old": (3 * (1 - LN2) + 3 * (-0.5 + LN2)) / 8,
        "logprob_gap_mean": 3 * LN2 / 8,
        "logprob_gap_p99": LN2,
        "logprob_gap_max": LN2,
        "logprob_gap_k1": LN2 / 8,
        "logprob_gap_k3": ((1 - LN2) + 2 * (-0.5 + LN2)) / 8,
        "rollout_is_weight_mean": (0 + 3 + 2 + 1) / 8,
        "rollout_is_weight_max": 1.0,
        "rollout_masked_share": 1 / 8,
        "importance_ratio_clamped": 0.0,
        "kl_ref": sum(n * (2 + x) ** 2 / 2 for n, x in zip(tokens, policy, strict=True)) / 8,
    }
    assert found == pytest.approx(expected, rel=1e-5)
    split = [pack([s], algo.loss_weights([s])) for s in samples[:2]]
    none_trained = dataclasses.replace(split[0], loss_mask=torch.zeros_like(split[0].loss_mask))
    empty = StepStats(losses=[], logprobs=[new[:3]], entropy=[new[:3]], terms=[terms[:, :3]])
    assert loss.metrics([none_trained], empty) == {}
    with raises(TrainError, "missing-values: terms", got=0, needed=1):
        loss.metrics([batch], dataclasses.replace(stats, terms=[]))


def test_an_unresolved_config_is_refused() -> None:
    with raises(ConfigError, "missing-argument"):
        PolicyLoss(GRPOConfig())


def two_rewards(values: list[list[tuple[float, float]]], weights: tuple[float, float]) -> list[RolloutGroup]:
    """Groups of rollouts with rewards small and large, in this order, and one that has no weight."""
    made = []
    for g, pairs in enumerate(values):
        rollouts = [
            dataclasses.replace(
                rollout((1, 2), 2, weights[0] * small + weights[1] * large),
                rewards={"small": small, "large": large, "shown": float(i)},
                weights={"small": weights[0], "large": weights[1], "shown": 0.0},
            )
            for i, (small, large) in enumerate(pairs)
        ]
        made.append(group(rollouts, g))
    return made


BY_THEMSELVES = {"multi_objective_aggregation": "normalize_then_sum"}


def test_rewards_normalised_by_themselves_by_hand() -> None:
    """Group 0: only the small reward differs, by 0.1; group 1: both do, in opposite ways; group 2: neither.
    Under group_mean the two rewards' advantages are +-.05 and +-50, and the weights are 2 and 1."""
    sampled = two_rewards(
        [[(0.1, 5.0), (0.0, 5.0)], [(0.1, 0.0), (0.0, 100.0)], [(1.0, 7.0), (1.0, 7.0)]], (2.0, 1.0)
    )
    plain = algorithm("dr_grpo", **BY_THEMSELVES)
    sums = [0.1, -0.1, 0.1 - 50, 50 - 0.1, 0.0, 0.0]
    std = math.sqrt((2 * 0.1**2 + 2 * 49.9**2) / 5) + 1e-4
    _, advantages = plain.advantages(sampled, documents(sampled))
    found = [float(a[s.loss_mask].unique()) for a, s in zip(advantages, documents(sampled), strict=True)]
    assert found == pytest.approx([value / std for value in sums], rel=1e-6)
    assert found[4:] == [0.0, 0.0]

    # group_mean_std: +-sqrt(1/2) for each reward that differs, but for eps
    grpo = algorithm("grpo", **BY_THEMSELVES)
    small, large = 0.05 / (0.1 / math.sqrt(2) + 1e-4), 50 / (100 / math.sqrt(2) + 1e-4)
    sums = [2 * small, -2 * small, 2 * small - large, large - 2 * small, 0.0, 0.0]
    std = math.sqrt(sum(value**2 for value in sums) / 5) + 1e-4
    _, advantages = grpo.advantages(sampled, documents(sampled))
    found = [float(a[s.loss_mask].unique()) for a, s in zip(advantages, documents(sampled), strict=True)]
    assert found == pytest.approx([value / std for value in sums], rel=1e-6)
    # In their sum the small reward is not seen where the large one differs: there the second is the better.
    _, summed = algorithm("grpo").advantages(sampled, documents(sampled))
    assert float(summed[2].max()) == 0.0 and found[2] > 0 > found[3]


def test_rewards_normalised_by_themselves_keep_groups_whose_totals_are_equal() -> None:
    (opposite,) = two_rewards([[(1.0, 0.0), (0.0, 2.0)]], (2.0, 1.0))
    (equal,) = two_rewards([[(1.0, 2.0), (1.0, 2.0)]], (2.0, 1.0))
    options = {**BY_THEMSELVES, "overlong": {"penalty": 0.0}}
    assert [algorithm("dapo", **options).keep(group) for group in (opposite, equal)] == [True, False]
    assert [algorithm("dapo").keep(group) for group in (opposite, equal)] == [False, False]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "reinforce++"}, "unsupported-combination: multi_objective_aggregation"),
        ({"name": "dapo"}, "unsupported-combination: multi_objective_aggregation"),
        ({"overlong": {"buffer_tokens": 2}}, "unsupported-combination: multi_objective_aggregation"),
        ({"kl": {"coef": 0.1, "place": "reward"}}, "unsupported-combination: multi_objective_aggregation"),
    ],
)
def test_what_rewards_cannot_be_normalised_with_is_refused(options: dict[str, object], message: str) -> None:
    with raises(ValueError, message):
        GRPOConfig(**BY_THEMSELVES, **options)
    with raises(ValueError, "unsupported-combination: multi_objective_aggregation"):
        PPOConfig(**BY_THEMSELVES)
