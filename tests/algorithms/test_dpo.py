"""DPO and its successors against hand-worked constants, and against the naive formula by autograd."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, get_args

import pytest
import torch
from pydantic import ValidationError
from raising import raises

from lockstep.algorithms.offline import DPO, RewardModel
from lockstep.config.algorithm import PREFERENCES, DPOConfig, PreferenceName, RewardModelLossConfig
from lockstep.errors import DataError, TrainError
from lockstep.ops.losses import dpo, robust_dpo
from lockstep.packing import Bucket, PackLimits, empty_batch, pack, plan_micro_batches, repack
from lockstep.protocols.train import StepStats
from lockstep.schema.batch import PreferenceBatch, PreferenceSample, ScoredSample


def sample(sample_id: int, length: int, prompt: int = 1) -> PreferenceSample:
    mask = torch.arange(length) >= prompt - 1
    mask[-1] = False
    ids = torch.arange(length) + 10 * sample_id
    return PreferenceSample(token_ids=ids, loss_mask=mask, sample_id=sample_id)


def batch_of(lengths: list[int], ref: float = 0.0) -> PreferenceBatch:
    samples = [sample(i, length) for i, length in enumerate(lengths)]
    batch = pack(samples, DPO(DPOConfig()).loss_weights(samples))
    assert isinstance(batch, PreferenceBatch)
    return dataclasses.replace(batch, ref_logprobs=torch.full((batch.num_slots,), ref))


def test_the_formula_by_hand() -> None:
    loss = dpo(torch.tensor([2.0]), torch.tensor([1.0]), beta=0.5)
    assert loss.item() == pytest.approx(math.log(1 + math.exp(-0.5)), rel=1e-6)  # 0.474077
    smooth = dpo(torch.tensor([2.0]), torch.tensor([1.0]), beta=0.5, label_smoothing=0.25)
    assert smooth.item() == pytest.approx(0.75 * 0.4740770 + 0.25 * 0.9740770, rel=1e-6)


def test_a_policy_that_is_the_reference_loses_ln_2_and_pulls_both_answers_by_half_beta() -> None:
    batch = batch_of([3, 5, 4, 2], ref=-1.0)
    logprobs = torch.where(batch.loss_mask, -1.0, 0.0).requires_grad_()
    loss = DPO(DPOConfig(beta=0.2)).loss()(logprobs, logprobs, batch, slice(0, batch.num_slots)).loss
    loss.backward()
    assert loss.item() == pytest.approx(math.log(2.0), rel=1e-6)
    # d/dlogp = -beta sigmoid(-margin) / P at chosen tokens, + at rejected ones: 0.2 * 0.5 / 2
    chosen = [-0.05, -0.05, 0.0] + [0.05] * 4 + [0.0] + [-0.05] * 3 + [0.0] + [0.05, 0.0]
    torch.testing.assert_close(logprobs.grad, torch.tensor(chosen))


def test_micro_batches_add_up_to_the_mean_over_pairs() -> None:
    algorithm, torch_seed = DPO(DPOConfig()), torch.Generator().manual_seed(0)
    samples = [sample(i, 2 + i % 5) for i in range(8)]
    weights = algorithm.loss_weights(samples)
    whole = pack(samples, weights)
    values = torch.randn(whole.num_slots, generator=torch_seed)
    by_sample = dict(zip(whole.sample_ids, whole.split(values), strict=True))

    def loss_of(batch: PreferenceBatch) -> float:
        slots = torch.cat([by_sample[i] for i in batch.sample_ids])
        batch = dataclasses.replace(batch, ref_logprobs=torch.zeros(batch.num_slots))
        rows = batch.loss_mask.nonzero()[:, 0]
        return algorithm.loss()(slots[rows], slots[rows], batch, rows).loss.item()

    parts = plan_micro_batches(samples, weights, PackLimits(token_budget=14))
    assert len(parts) > 1 and all(
        b.sample_ids[i] % 2 == 0 and b.sample_ids[i + 1] == b.sample_ids[i] + 1
        for b in parts
        for i in range(0, len(b.sample_ids), 2)
    )
    assert sum(loss_of(b) for b in parts) == pytest.approx(loss_of(whole), rel=1e-6)
    pairs = [
        math.log1p(math.exp(-0.1 * float(by_sample[i][:-1].sum() - by_sample[i + 1][:-1].sum())))
        for i in range(0, 8, 2)
    ]
    assert loss_of(whole) == pytest.approx(sum(pairs) / 4, rel=1e-5)


@pytest.mark.parametrize(
    "limits",
    [
        PackLimits(token_budget=16, layout="padded"),
        PackLimits(token_budget=32, static_capacity=True, max_seqlen=8, max_documents=8),
        PackLimits(token_budget=32, static_capacity=True, layout="padded", max_seqlen=8, max_documents=8),
        PackLimits(token_budget=64, min_packs=3),
    ],
)
def test_pairs_stay_together_in_every_layout(limits: PackLimits) -> None:
    samples = [sample(i, 2 + (3 * i) % 6) for i in range(8)]
    batches = plan_micro_batches(samples, DPO(DPOConfig()).loss_weights(samples), limits)
    found = [batch.sample_ids[i : i + 2] for batch in batches for i in range(0, len(batch.sample_ids), 2)]
    assert sorted(found) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert all(batch.num_slots <= limits.token_budget for batch in batches)
    assert len(batches) >= limits.min_packs


def test_metrics_by_hand() -> None:
    batch = batch_of([3, 3, 2, 2])
    logprobs = torch.tensor([1.0, 2.0, 0.0, 0.5, 0.5, 0.0, -1.0, 0.0, 1.0, 0.0])
    stats = StepStats(losses=[], logprobs=[logprobs], entropy=[])
    assert DPO(DPOConfig(beta=0.5)).loss().metrics([batch], stats) == pytest.approx(
        {"reward_chosen": 0.5, "reward_rejected": 0.5, "reward_margin": 0.0, "accuracy": 0.5}
    )


def test_an_empty_micro_batch_has_loss_and_gradient_0() -> None:
    batch = empty_batch(batch_of([3, 3]))
    logprobs = torch.randn(batch.num_slots, requires_grad=True)
    loss = DPO(DPOConfig()).loss()(logprobs, logprobs, batch, slice(0, batch.num_slots)).loss
    loss.backward()
    assert loss.item() == 0.0 and not logprobs.grad.any()


def test_what_is_no_pair_is_refused() -> None:
    algorithm = DPO(DPOConfig())
    with raises(DataError, "wrong-pairs", samples=3):
        algorithm.loss_weights([sample(i, 3) for i in range(3)])
    lone = [sample(0, 3), sample(2, 3)]
    with raises(DataError, "wrong-pairs", samples=[0, 2]):
        plan_micro_batches(lone, algorithm.loss_weights(lone), PackLimits(token_budget=16))
    bare = dataclasses.replace(batch_of([2, 2]), ref_logprobs=None)
    with raises(TrainError, "missing-values: ref_logprobs"):
        algorithm.loss()(torch.zeros(4), torch.zeros(4), bare, slice(0, 4))


# One pair: the chosen answer has 2 trained tokens and logprobs -1 and -2, the rejected one 1 and -2; the
# reference says -1 everywhere. Scores: chosen -1, rejected -1 by sums of log(policy / ref), -0.5 and -1 by
# means; by the policy alone -1.5 and -2 by means.
def sigmoid_loss(margin: float) -> float:
    return math.log1p(math.exp(-margin))


def log_odds(logprob: float) -> float:
    return logprob - math.log(1 - math.exp(logprob))


BY_HAND = {
    "dpo": ({"beta": 0.5}, sigmoid_loss(0.0)),
    "dpo averaged": ({"beta": 0.5, "average": True}, sigmoid_loss(0.25)),
    "robust_dpo": ({"label_smoothing": 0.2}, (0.8 * math.log(2) - 0.2 * math.log(2)) / 0.6),
    "robust_dpo averaged": (
        {"beta": 1.0, "average": True},  # e = 0.1
        (0.9 * sigmoid_loss(0.5) - 0.1 * sigmoid_loss(-0.5)) / 0.8,
    ),
    "ipo": ({}, (0.5 - 5.0) ** 2),
    "ipo summed": ({"beta": 0.25, "average": False}, (0.0 - 2.0) ** 2),
    "simpo": ({}, sigmoid_loss(2.0 * 0.5 - 1.0)),
    "simpo with a margin": ({"beta": 1.0, "margin": 0.3}, sigmoid_loss(0.5 - 0.3)),
    "orpo": ({}, 1.5 + 0.1 * sigmoid_loss(log_odds(-1.5) - log_odds(-2.0))),
}


@pytest.mark.parametrize("case", BY_HAND)
def test_each_loss_by_hand(case: str) -> None:
    options, expected = BY_HAND[case]
    algorithm = DPO(DPOConfig(name=case.split()[0], **options))
    samples = [sample(0, 3), sample(1, 2)]
    batch = pack(samples, algorithm.loss_weights(samples))
    if algorithm.config.needs_ref:
        batch = dataclasses.replace(batch, ref_logprobs=torch.full((batch.num_slots,), -1.0))
    logprobs = torch.tensor([-1.0, -2.0, math.nan, -2.0, math.nan], requires_grad=True)
    loss = algorithm.loss()(logprobs, logprobs, batch, slice(0, batch.num_slots)).loss
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    loss.backward()
    assert logprobs.grad is not None and bool(logprobs.grad.isfinite().all())


def test_orpo_of_a_certain_answer_is_finite() -> None:
    batch = pack([sample(0, 3), sample(1, 2)], DPO(DPOConfig()).loss_weights([sample(0, 3), sample(1, 2)]))
    logprobs = torch.zeros(batch.num_slots, requires_grad=True)
    loss = DPO(DPOConfig(name="orpo")).loss()(logprobs, logprobs, batch, slice(0, batch.num_slots)).loss
    loss.backward()
    assert math.isfinite(loss.item()) and bool(logprobs.grad.isfinite().all())  # type: ignore[union-attr]


def test_robust_dpo_over_flipped_labels_is_dpo_on_the_right_ones() -> None:
    chosen, rejected = torch.tensor([0.7, -2.0]), torch.tensor([-0.1, 1.0])
    noisy = 0.7 * robust_dpo(chosen, rejected, beta=0.3, label_smoothing=0.3)
    noisy += 0.3 * robust_dpo(rejected, chosen, beta=0.3, label_smoothing=0.3)
    torch.testing.assert_close(noisy, dpo(chosen, rejected, beta=0.3))


@pytest.mark.parametrize("name", [name for name in PREFERENCES if name != "kto"])
def test_the_formulas_of_trl(name: str) -> None:
    """TRL 1.16: dpo_trainer.py (sigmoid, robust, ipo), experimental CPO (simpo) and ORPO, re-expressed."""
    generator = torch.Generator().manual_seed(3)
    samples = [sample(i, 2 + (3 * i) % 5) for i in range(8)]
    algorithm = DPO(DPOConfig(name=name))
    batch = pack(samples, algorithm.loss_weights(samples))
    values, refs = -torch.rand(2, batch.num_slots, generator=generator) * 3
    if algorithm.config.needs_ref:
        batch = dataclasses.replace(batch, ref_logprobs=refs)
    got = values.clone().requires_grad_()
    algorithm.loss()(got, got, batch, slice(0, batch.num_slots)).loss.backward()

    theirs = values.clone().requires_grad_()
    sums, means, ref_sums, ref_means = [], [], [], []
    for part, ref in zip(batch.split(theirs), batch.split(refs), strict=True):
        sums.append(part[:-1].sum())
        means.append(part[:-1].mean())
        ref_sums.append(ref[:-1].sum())
        ref_means.append(ref[:-1].mean())
    logits = torch.stack([(sums[i] - ref_sums[i]) - (sums[i + 1] - ref_sums[i + 1]) for i in range(0, 8, 2)])
    chosen, rejected = torch.stack(means[::2]), torch.stack(means[1::2])
    log_sigmoid = torch.nn.functional.logsigmoid
    if name == "dpo":
        losses = -log_sigmoid(0.1 * logits)
    elif name == "robust_dpo":
        losses = (-log_sigmoid(0.1 * logits) * 0.9 + log_sigmoid(-0.1 * logits) * 0.1) / (1 - 2 * 0.1)
    elif name == "ipo":
        delta = (chosen - torch.stack(ref_means[::2])) - (rejected - torch.stack(ref_means[1::2]))
        losses = (delta - 1 / (2 * 0.1)) ** 2
    elif name == "simpo":
        losses = -log_sigmoid(2.0 * ((chosen - rejected) - 1.0 / 2.0))
    else:
        odds = (chosen - rejected) - (torch.log1p(-chosen.exp()) - torch.log1p(-rejected.exp()))
        losses = -chosen - 0.1 * log_sigmoid(odds)
    losses.mean().backward()
    torch.testing.assert_close(got.grad, theirs.grad, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "simpo", "label_smoothing": 0.1}, "no-effect: label_smoothing"),
        ({"name": "ipo", "margin": 0.5}, "no-effect: margin"),
        ({"name": "orpo", "average": False}, "unsupported-combination: average"),
        ({"name": "dpo", "label_smoothing": 0.5}, "out-of-range: label_smoothing"),
        ({"beta": 0.0}, "out-of-range: beta"),
        ({"name": "slic"}, "unknown-name: name"),
    ],
)
def test_options_without_effect_are_refused(options: dict[str, Any], message: str) -> None:
    with raises(ValidationError, message):
        DPOConfig(**options)


def test_published_values_are_filled_in_once() -> None:
    simpo = DPOConfig(name="simpo", beta=2.5).resolved()
    assert (simpo.beta, simpo.margin, simpo.average, simpo.label_smoothing) == (2.5, 1.0, True, None)
    assert simpo.resolved() == simpo and not simpo.needs_ref
    assert set(PREFERENCES) == set(get_args(PreferenceName))


def test_bradley_terry_by_hand() -> None:
    """TRL's RewardTrainer: -logsigmoid(chosen - rejected - margin).mean(), and center_rewards_coefficient
    times the mean of (chosen + rejected)^2."""
    algorithm = RewardModel(RewardModelLossConfig(center_coef=0.01))
    samples = []
    for i, (length, margin) in enumerate([(3, 0.5), (2, 0.5), (2, 0.0), (4, 0.0)]):
        mask = torch.zeros(length, dtype=torch.bool)
        mask[-1] = True
        ids = torch.arange(length)
        samples.append(ScoredSample(token_ids=ids, loss_mask=mask, sample_id=i, margin=margin))
    batch = pack(samples, algorithm.loss_weights(samples))
    values = torch.full((batch.num_slots,), math.nan)
    for slot, value in zip([2, 4, 6, 10], [2.0, 1.0, -1.0, 0.5], strict=True):
        values[slot] = value
    values.requires_grad_()
    loss = algorithm.loss()
    result = loss(values, values, batch, slice(0, batch.num_slots)).loss
    expected = (sigmoid_loss(0.5) + sigmoid_loss(-1.5) + 0.01 * (9.0 + 0.25)) / 2
    assert result.item() == pytest.approx(expected, rel=1e-6)
    result.backward()
    assert values.grad is not None and values.grad.nonzero()[:, 0].tolist() == [2, 4, 6, 10]
    stats = StepStats(losses=[], logprobs=[values.detach()], entropy=[])
    assert loss.metrics([batch], stats) == pytest.approx(
        {"reward_chosen": 0.5, "reward_rejected": 0.75, "reward_margin": -0.25, "accuracy": 0.5}
    )
    padded = repack(batch, Bucket(tokens=16, documents=8, max_seqlen=8))
    more = torch.cat([values.detach(), torch.zeros(5)])
    assert loss(more, more, padded, slice(0, 16)).loss.item() == pytest.approx(expected, rel=1e-6)
    bare = dataclasses.replace(batch, margins=None)
    with raises(TrainError, "missing-values: margins"):
        loss(values, values, bare, slice(0, batch.num_slots))
