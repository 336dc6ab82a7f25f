"""What equal kernel contracts are used for, without a model: logprobs made by hand."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from raising import raises
from sampled import completion, group, rollout

from lockstep.errors import ConfigError, TrainError
from lockstep.loop.gap_check import BitwiseCheck, shared_contract
from lockstep.packing import PackLimits, plan_micro_batches
from lockstep.schema.batch import policy_samples, rollout_samples
from lockstep.schema.contract import KernelContract

CONTRACT = KernelContract(
    gemm="cpu-tiles-32",
    attention="aten flash (cpu reference)",
    attention_splits=1,
    norm="row",
    activation="row",
    logprob="serial",
    lm_head_dtype="float32",
    logits_dtype="float32",
    collectives="none",
    compile="inductor",
    dtype="float32",
    weights_dtype="float32",
    device="cpu AVX2",
    torch="2.13.0",
    threads=1,
)


def groups_of(num_groups=3, group_size=2):
    """Group g, sample s: prompt of g + 1 tokens, 3 completion tokens with logprobs -(g + s / 8 + t / 64)."""

    def sample(g, s):
        return completion(range(1, g + 2), (50, 51, 52), [-(g + s / 8 + t / 64) for t in range(3)])

    return [group([rollout(sample(g, s)) for s in range(group_size)], 100 + g) for g in range(num_groups)]


def minibatches_of(groups, *, minibatches, budget=6):
    """Samples in order, split into minibatches, each into micro-batches of one document."""
    samples = policy_samples(rollout_samples(r.trajectory for g in groups for r in g.rollouts), None)
    size = len(samples) // minibatches
    parts = [samples[i * size : (i + 1) * size] for i in range(minibatches)]
    limits = PackLimits(token_budget=budget, static_capacity=False, layout="packed")
    return [plan_micro_batches(part, [s.loss_mask.float() for s in part], limits) for part in parts]


def flat(minibatches):
    return [batch for batches in minibatches for batch in batches]


class Trainer:
    """Its logprobs are the rollout's, but for one token of one sample."""

    def __init__(self, wrong_sample=None, wrong_slot=None, value=-9.0):
        self.wrong_sample, self.wrong_slot, self.value = wrong_sample, wrong_slot, value
        self.computed = []

    def __call__(self, batches):
        found = []
        for batch in batches:
            self.computed.append(batch.sample_ids)
            logprobs = batch.rollout_logprobs.clone()
            start = 0
            for sample, length in zip(batch.sample_ids, batch.lengths, strict=False):
                if sample == self.wrong_sample:
                    logprobs[start + self.wrong_slot] = self.value
                start += length
            found.append(logprobs)
        return found


def test_the_forward_is_left_out_and_other_micro_batches_are_checked_each_step():
    groups = groups_of()
    parts = minibatches_of(groups, minibatches=3)
    check, trainer = BitwiseCheck(CONTRACT, reuse=True), Trainer()
    for step in range(5):
        check.begin(step, groups)
        with_old = check.old_logprobs(parts, trainer)
        for before, after in zip(flat(parts), flat(with_old), strict=True):
            assert torch.equal(after.old_logprobs, before.rollout_logprobs)
        check.check(with_old[0], trainer(with_old[0]))
        # The first minibatch (6 tokens) is seen in training, one of 3 tokens is computed, of 18; in the first
        # step, one of the other size too.
        share = 12 / 18 if step == 0 else 9 / 18
        assert check.metrics(18) == {"contract_verified": share, "old_logprobs_reused": 1.0}
    alone = [ids for ids in trainer.computed if ids not in ((0,), (1,))]
    assert alone == [(2,), (4,), (3,), (4,), (5,), (2,)]


def test_as_many_are_checked_as_ranks_compute_at_once():
    groups = groups_of()
    check, trainer = BitwiseCheck(CONTRACT, reuse=True, at_once=2), Trainer()
    for step in range(3):
        check.begin(step, groups)
        check.old_logprobs(minibatches_of(groups, minibatches=3), trainer)
    assert trainer.computed == [(2,), (3,), (4,), (4,), (5,), (2,), (3,)]


def test_a_wrong_bit_is_an_error_that_names_the_token_and_both_values():
    groups = groups_of()
    wrong = Trainer(wrong_sample=3, wrong_slot=2, value=-1.140625 + 2**-23)
    parts = minibatches_of(groups, minibatches=3)
    check = BitwiseCheck(CONTRACT, reuse=True)
    check.begin(0, groups)
    check.old_logprobs(parts, wrong)  # step 0 looks at samples 2 and 4
    check.begin(1, groups)
    # Sample 3: group 1, its sample 1, prompt of 2 tokens; slot 2 predicts the document's token 3.
    with pytest.raises(TrainError) as caught:
        check.old_logprobs(parts, wrong)
    message = str(caught.value)
    assert message.startswith(
        "step 1, prompt 101, sample 1, position 3 (token 1 of its completion, id 51): with the same "
        "weights, the engine's logprob is -1.140625 and the trainer's is -1.1406248807907104; 1 of 3 compared"
    )
    assert CONTRACT.hash[:12] in message and "No weights were changed" in message


@pytest.mark.parametrize("value", [float("nan"), -1.0])
def test_what_is_trained_on_first_is_checked_before_the_update(value):
    groups = groups_of()
    (batches,) = minibatches_of(groups, minibatches=1, budget=64)
    check = BitwiseCheck(CONTRACT, reuse=True)
    check.begin(7, groups)
    with raises(TrainError, "values-differ", step=7, name="prompt 102, sample 0", position=5, token=2):
        check.check(batches, Trainer(4, 4, value)(batches))
    check.check(batches, Trainer()(batches))
    assert check.metrics(18) == {"contract_verified": 1.0}


def test_without_reuse_all_are_computed_and_compared():
    groups = groups_of()
    parts = minibatches_of(groups, minibatches=2)
    check, trainer = BitwiseCheck(CONTRACT, reuse=False), Trainer()
    check.begin(0, groups)
    with_old = check.old_logprobs(parts, trainer)
    assert sorted(trainer.computed) == [(i,) for i in range(6)]
    check.check(with_old[0], [])  # compared already
    assert check.metrics(18) == {"contract_verified": 1.0}
    with raises(TrainError, "values-differ", step=0, name="prompt 102, sample 1", position=4, token=1):
        check.old_logprobs(parts, Trainer(5, 3))


def test_the_padded_tail_and_prompts_are_not_compared():
    groups = groups_of()
    (batches,) = minibatches_of(groups, minibatches=1, budget=64)
    check = BitwiseCheck(CONTRACT, reuse=True)
    check.begin(0, groups)
    found = [torch.where(b.loss_mask, b.rollout_logprobs, torch.tensor(float("nan"))) for b in batches]
    check.check(batches, found)


def test_contracts_that_differ_are_refused_by_field():
    ours = SimpleNamespace(contract=CONTRACT)
    same = SimpleNamespace(contract=dataclasses.replace(CONTRACT))
    assert shared_contract(ours, same, engine_name="native") == CONTRACT
    other = SimpleNamespace(contract=dataclasses.replace(CONTRACT, compile="eager", threads=2))
    with raises(
        ConfigError,
        "kernels-differ: train.batch_invariant",
        different=["compile: 'inductor' here, 'eager' there", "threads: 1 here, 2 there"],
    ):
        shared_contract(ours, other, engine_name="native")
    with raises(ConfigError, "wrong-part: train.batch_invariant, engine.name = 'my:Engine'"):
        shared_contract(ours, SimpleNamespace(contract=None), engine_name="my:Engine")
    with raises(ConfigError, "wrong-part: train.batch_invariant, SimpleNamespace"):
        shared_contract(SimpleNamespace(contract=None), same, engine_name="native")
