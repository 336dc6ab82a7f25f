"""KTO against hand-worked constants, and against TRL's formula by autograd."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from raising import raises

from lockstep.algorithms.offline import KTO, baseline, mismatched, pair_accuracy, with_baseline
from lockstep.config.algorithm import DPOConfig
from lockstep.errors import TrainError
from lockstep.ops.losses import kto
from lockstep.packing import Bucket, PackLimits, empty_batch, pack, plan_micro_batches, repack
from lockstep.protocols.train import StepStats
from lockstep.schema.batch import UnpairedBatch, UnpairedSample


def config(**options: Any) -> DPOConfig:
    return DPOConfig(name="kto", **options)


def sample(sample_id: int, length: int, *, prompt: int = 1, desirable: bool | None = None) -> UnpairedSample:
    mask = torch.arange(length) >= prompt - 1
    mask[-1] = False
    good = sample_id % 2 == 0 if desirable is None else desirable
    ids = torch.arange(length) + 10 * sample_id
    return UnpairedSample(token_ids=ids, loss_mask=mask, sample_id=sample_id, desirable=good)


def batch_of(samples: list[UnpairedSample], z0: float, ref: float = 0.0, **options: Any) -> UnpairedBatch:
    batch = pack(samples, KTO(config(**options)).loss_weights(samples))
    refs = torch.full((batch.num_slots,), ref)
    return dataclasses.replace(with_baseline(batch, z0), ref_logprobs=refs)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_the_formula_by_hand() -> None:
    losses = kto(
        torch.tensor([2.0, 1.0]),
        torch.tensor([True, False]),
        torch.tensor([0.5, 0.5]),
        beta=0.2,
        weights=(1.5, 1),
    )
    # 1.5 (1 - sigmoid(0.2 * 1.5)), 1 - sigmoid(0.2 * -0.5)
    torch.testing.assert_close(losses, torch.tensor([1.5 * 0.4255575, 0.5249792]))


def test_the_mean_over_answers_and_its_gradient_by_hand() -> None:
    batch = batch_of([sample(0, 3), sample(1, 2), sample(2, 2)], 0.25, ref=-1.0)
    logprobs = torch.tensor([-1.0, -0.5, math.nan, -2.0, math.nan, -1.0, math.nan], requires_grad=True)
    loss = KTO(config(beta=0.5)).loss()(logprobs, logprobs, batch, slice(0, batch.num_slots)).loss
    # log ratios: 0.5, -1, 0; margins beta (0.5 - 0.25), beta (0.25 + 1), beta (0 - 0.25)
    parts = [sigmoid(-0.125), sigmoid(-0.625), sigmoid(0.125)]
    assert loss.item() == pytest.approx(sum(parts) / 3, rel=1e-6)
    loss.backward()
    slopes = [0.5 * p * (1 - p) / 3 for p in parts]  # towards a good answer, away from a bad one
    expected = [-slopes[0], -slopes[0], 0, slopes[1], 0, -slopes[2], 0]
    torch.testing.assert_close(logprobs.grad, torch.tensor(expected))


def test_the_formula_of_trl() -> None:
    """TRL 1.16, trainer/kto_trainer.py, `_compute_loss`, re-expressed; its KL is given."""
    generator = torch.Generator().manual_seed(3)
    samples = [sample(i, 2 + (3 * i) % 5, desirable=i in (0, 1, 4)) for i in range(6)]
    batch = batch_of(samples, 0.7)
    values, refs = -torch.rand(2, batch.num_slots, generator=generator) * 3
    batch = dataclasses.replace(batch, ref_logprobs=refs)
    ours, theirs = (values.clone().requires_grad_() for _ in range(2))
    algorithm = KTO(config(desirable_weight=1.3, undesirable_weight=0.9))
    algorithm.loss()(ours, ours, batch, slice(0, batch.num_slots)).loss.backward()

    ratios = torch.stack(
        [p[:-1].sum() - r[:-1].sum() for p, r in zip(batch.split(theirs), batch.split(refs), strict=True)]
    )
    chosen, rejected = ratios[[0, 1, 4]], ratios[[2, 3, 5]]
    chosen_losses = 1 - torch.sigmoid(0.1 * (chosen - 0.7))
    rejected_losses = 1 - torch.sigmoid(0.1 * (0.7 - rejected))
    torch.cat((1.3 * chosen_losses, 0.9 * rejected_losses), 0).nanmean().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_micro_batches_in_every_layout_add_up_to_the_mean_over_answers() -> None:
    samples = [sample(i, 3 + i % 4) for i in range(8)]
    algorithm, weights = KTO(config()), KTO(config()).loss_weights(samples)
    values = {
        s.sample_id: torch.randn(len(s), generator=torch.Generator().manual_seed(s.sample_id))
        for s in samples
    }

    def loss_of(batch: UnpairedBatch) -> float:
        slots = torch.zeros(batch.num_slots)
        slots[: batch.num_tokens] = torch.cat([values[i] for i in batch.sample_ids])
        batch = dataclasses.replace(with_baseline(batch, 0.3), ref_logprobs=torch.zeros(batch.num_slots))
        rows = batch.loss_mask.nonzero()[:, 0]
        return algorithm.loss()(slots[rows], slots[rows], batch, rows).loss.item()

    whole = loss_of(pack(samples, weights))
    for limits in (
        PackLimits(token_budget=14),
        PackLimits(token_budget=16, layout="padded"),
        PackLimits(token_budget=32, layout="shared"),
        PackLimits(token_budget=32, static_capacity=True, max_seqlen=8, max_documents=8),
    ):
        parts = plan_micro_batches(samples, weights, limits)
        assert len(parts) > 1
        assert sum(map(loss_of, parts)) == pytest.approx(whole, rel=1e-6)
    bucket = Bucket(tokens=64, documents=12, max_seqlen=16)
    assert loss_of(repack(pack(samples, weights, bucket=bucket), None)) == pytest.approx(whole, rel=1e-6)


def test_each_prompt_gets_the_answer_to_the_one_before() -> None:
    samples = [sample(0, 4, prompt=2), sample(1, 3, prompt=1), sample(2, 5, prompt=3)]
    weights = KTO(config()).loss_weights(samples)
    batches = plan_micro_batches(samples[::-1], weights[::-1], PackLimits(token_budget=7))
    others = mismatched(batches, max_length=4)
    assert [s.token_ids.tolist() for s in others] == [[0, 1, 23, 24], [10, 2, 3], [20, 21, 22, 11]]
    assert [s.loss_mask.tolist() for s in others] == [
        [False, True, True, False],
        [True, True, False],
        [False, False, True, False],
    ]
    assert [s.sample_id for s in mismatched(batches, max_length=3)] == [0, 1], (
        "no answer is left of the third"
    )


def test_answers_in_runs_of_one_prompt_get_the_nearest_before_to_another() -> None:
    """Prompts a a b a c c a, each with an answer of its own; by hand, with the first after the last."""
    prompts, expected = [1, 1, 2, 1, 3, 3, 1], [5, 5, 1, 2, 3, 3, 5]
    samples = [
        dataclasses.replace(sample(i, 2, prompt=1), token_ids=torch.tensor([prompt, 10 + i]))
        for i, prompt in enumerate(prompts)
    ]
    batch = pack(samples, KTO(config()).loss_weights(samples))
    found = [s.token_ids.tolist() for s in mismatched([batch], max_length=4)]
    assert found == [[prompt, 10 + other] for prompt, other in zip(prompts, expected, strict=True)]


def test_the_baseline_is_the_mean_over_the_step_and_at_least_0() -> None:
    samples = [sample(i, 3) for i in range(3)]
    batches = plan_micro_batches(samples, KTO(config()).loss_weights(samples), PackLimits(token_budget=6))
    policy = [torch.full((batch.num_slots,), 0.5) for batch in batches]
    ref = [torch.full((batch.num_slots,), 0.2) for batch in batches]
    assert baseline(batches, policy, ref) == pytest.approx(0.6)  # two tokens an answer, 0.3 each
    assert baseline(batches, ref, policy) == 0.0
    assert baseline([], [], []) == 0.0


def test_metrics_by_hand() -> None:
    batch = batch_of([sample(0, 3), sample(1, 3), sample(2, 2)], 0.25)
    logprobs = torch.tensor([1.0, 2.0, 0.0, 0.5, 0.5, 0.0, -1.0, 0.0])
    stats = StepStats(losses=[], logprobs=[logprobs], entropy=[])
    assert KTO(config(beta=0.5)).loss().metrics([batch], stats) == pytest.approx(
        {"kl": 0.25, "reward_chosen": 0.5, "reward_rejected": 0.5, "reward_margin": 0.0, "accuracy": 0.5}
    )
    alone = batch_of([sample(0, 3)], 0.0)
    stats = StepStats(losses=[], logprobs=[torch.ones(3)], entropy=[])
    assert KTO(config()).loss().metrics([alone], stats) == pytest.approx({"kl": 0.0, "reward_chosen": 0.2})


def test_pairs_of_one_prompt_decide_the_accuracy_where_there_are_any() -> None:
    rewards, good = [1.0, 0.5, 0.4, 3.0], [True, False, True, False]
    assert pair_accuracy(rewards, good, [(1,), (1,), (2,), (2,)]) == 0.5
    assert pair_accuracy(rewards, good, [(1,), (2,), (3,), (4,)]) == 0.25


def test_an_empty_micro_batch_has_loss_and_gradient_0() -> None:
    batch = empty_batch(batch_of([sample(0, 3), sample(1, 3)], 0.5))
    logprobs = torch.randn(batch.num_slots, requires_grad=True)
    loss = KTO(config()).loss()(logprobs, logprobs, batch, slice(0, batch.num_slots)).loss
    loss.backward()
    assert loss.item() == 0.0 and logprobs.grad is not None and not logprobs.grad.any()


def test_what_is_missing_is_named() -> None:
    loss, samples = KTO(config()).loss(), [sample(0, 2), sample(1, 2)]
    bare = pack(samples, KTO(config()).loss_weights(samples))
    with raises(TrainError, "missing-values: kl_baseline"):
        loss(torch.zeros(4), torch.zeros(4), bare, slice(0, 4))
    with raises(TrainError, "missing-values: ref_logprobs"):
        loss(torch.zeros(4), torch.zeros(4), with_baseline(bare, 0.0), slice(0, 4))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "dpo", "desirable_weight": 1.3}, "no-effect: desirable_weight"),
        ({"name": "kto", "average": True}, "no-effect: average"),
        ({"name": "kto", "label_smoothing": 0.1}, "no-effect: label_smoothing"),
        ({"name": "kto", "desirable_weight": 0, "undesirable_weight": 0}, "nothing-to-do: desirable_weight"),
    ],
)
def test_options_without_effect_are_refused(options: dict[str, Any], message: str) -> None:
    with raises(ValidationError, message):
        DPOConfig(**options)
