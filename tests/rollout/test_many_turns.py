"""Many turns with the native engine and a trainer: the bits and the gradients of one document."""

import asyncio
import dataclasses
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "engine" / "native"))

from native_parts import policy

from lockstep.algorithms.grpo import PolicyAlgorithm
from lockstep.algorithms.ppo import PPO
from lockstep.config.algorithm import GRPOConfig
from lockstep.config.engine import EngineConfig
from lockstep.config.ppo import PPOConfig
from lockstep.config.train import TrainConfig
from lockstep.engine.build import make_engine
from lockstep.ops.losses import loss_weights
from lockstep.packing import split_samples
from lockstep.packing.packs import Bucket, pack
from lockstep.rollout.environment import Environment, TrajectoryRules
from lockstep.rollout.episodes import at_once, run_episodes
from lockstep.schema.batch import RolloutSample, policy_samples, rollout_samples, trajectory_slices
from lockstep.schema.rollout import Prompt, Rollout, RolloutGroup, SamplingParams, Span, Trajectory
from lockstep.train.local import LocalBackend

TURNS = 20
RULES = TrajectoryRules(
    sampling=SamplingParams(max_tokens=4, temperature=0.7, ignore_eos=True),
    max_tokens=TURNS * 7,
    max_turns=TURNS,
    wait_seconds=60.0,
)


class Tools(Environment):
    """Replies with three tokens, sooner or later, until there is no room."""

    async def run(self, task, sample):
        await sample()
        while True:
            reply = tuple(10 + (task.index + sample.trajectory.turns + i) % 30 for i in range(3))
            if (task.index + sample.trajectory.turns) % 3:
                await asyncio.sleep(0.001)
            await sample(reply)


def sampled(model, tasks=2, **settings):
    engine = make_engine(EngineConfig(name="native", prefill_chunk=64, **settings), model=model)
    prompts = [Prompt(index=i, token_ids=tuple(range(3, 5 + 4 * i)), text="") for i in range(tasks)]
    found = run_episodes(
        engine,
        Tools(),
        at_once([(prompt, (11, 12)) for prompt in prompts]),
        rules=RULES,
        on_end=lambda *_: None,
    )
    stats = engine.stats()
    engine.close()
    return [trajectory for group in found for trajectory in group], stats


def by_hand(trajectory):
    """The document, token by token."""
    ids, mask, logprobs = [], [], []
    for span in trajectory.spans:
        for i, token in enumerate(span.token_ids):
            written = span.author == "policy"
            ids.append(token)
            mask.append(written)
            logprobs.append(span.logprobs[i] if written else 0.0)
    # Entry t is about token t + 1.
    return RolloutSample(
        token_ids=torch.tensor(ids),
        loss_mask=torch.tensor([*mask[1:], False]),
        rollout_logprobs=torch.tensor([*logprobs[1:], 0.0]),
    )


def trained(model, samples, config):
    """Loss, gradients and logprobs of one micro-batch with advantages 1, -1, ..."""
    for parameter in model.module.parameters():
        parameter.grad = None
    signs = [sample.loss_mask.float() * (-1.0) ** i for i, sample in enumerate(samples)]
    documents = policy_samples(samples, signs)
    algorithm = PolicyAlgorithm(config, max_tokens=RULES.max_tokens)
    bucket = Bucket(tokens=1024, documents=16, max_seqlen=256)
    batch = pack(documents, algorithm.loss_weights(documents), bucket=bucket)
    options = TrainConfig(attention="varlen", execution="eager")
    trainer = LocalBackend(options, model=model, total_steps=1, temperature=0.7)
    stats = trainer.forward_backward([batch], algorithm.loss())
    grads = {name: p.grad.clone() for name, p in model.module.named_parameters() if p.grad is not None}
    return stats.losses[0], grads, stats.logprobs[0][batch.loss_mask]


def test_twenty_turns_have_the_bits_of_one_document_wherever_their_keys_were():
    model = policy("tiny-llama", "float32")
    kept, stats = sampled(model, max_batch=8)
    assert {(t.turns, t.end) for t in kept} == {(TURNS, "turns")}
    assert stats.recomputed_tokens == 0 and stats.cached_tokens > 0.8 * stats.prompt_tokens
    short, stats = sampled(model, max_batch=2, kv_cache_tokens=180)
    assert stats.recomputed_tokens > 0
    assert [t.spans for t in short] == [t.spans for t in kept]

    config = GRPOConfig().resolved()
    samples = rollout_samples(kept)
    loss, grads, logprobs = trained(model, samples, config)
    hand = [dataclasses.replace(by_hand(t), sample_id=i) for i, t in enumerate(kept)]
    wanted, wanted_grads, _ = trained(model, hand, config)
    assert loss == wanted and grads.keys() == wanted_grads.keys()
    assert all(torch.equal(grads[name], wanted_grads[name]) for name in grads)
    assert any(bool(grad.any()) for grad in grads.values())
    engines = torch.cat([sample.rollout_logprobs[sample.loss_mask] for sample in samples])
    assert len(engines) == 4 * TURNS * 4 and torch.equal(engines, logprobs)


# branches


def spans(*parts):
    """Alternately a context or reply, and what the policy wrote."""
    made = []
    for number, ids in enumerate(parts):
        author = "policy" if number % 2 else "tool" if number else "prompt"
        logprobs = tuple(-0.1 * i for i in range(1, len(ids) + 1)) if author == "policy" else ()
        version = 0 if author == "policy" else None
        made.append(Span(author=author, token_ids=tuple(ids), logprobs=logprobs, policy_version=version))
    return tuple(made)


def trajectory(*parts):
    return Trajectory(
        spans=parts[-1],
        earlier=parts[:-1],
        finish_reason="stop",
        stop_reason=None,
        text="",
        seed=0,
        engine="test",
    )


WHOLE = trajectory(spans((1, 2), (3, 4, 5), (6,), (7, 8)))
CUT = trajectory(spans((1, 2), (3, 4, 5)), spans((9, 9, 3, 4, 5, 6), (7, 8)))
"""The same, with another context for the second turn."""
OTHER = trajectory(spans((1, 2), (5, 5)))


def group(first):
    rollouts = tuple(
        Rollout(trajectory=t, reward=r, rewards={"one": r})
        for t, r in ((first, 1.0), (OTHER, 0.0), (first, 0.5))
    )
    return RolloutGroup(prompt=Prompt(index=0, token_ids=(1, 2), text=""), rollouts=rollouts)


def test_documents_of_a_branched_trajectory_and_where_they_are():
    samples = rollout_samples([CUT, OTHER, CUT])
    assert [(s.sample_id, s.trajectory, s.num_trained) for s in samples] == [
        (0, 0, 3),
        (1, 0, 2),
        (2, 1, 2),
        (3, 2, 3),
        (4, 2, 2),
    ]
    assert trajectory_slices(samples) == [slice(0, 2), slice(2, 3), slice(3, 5)]
    assert [len(part) for part in split_samples(samples, 3)] == [2, 1, 2]
    plain = rollout_samples([WHOLE, OTHER])
    assert [s.trajectory for s in plain] == [-1, -1]
    assert trajectory_slices(plain) == [slice(0, 1), slice(1, 2)]


@pytest.mark.parametrize("aggregation", ["sequence_mean", "sequence_sum", "token_mean", "constant"])
def test_weights_count_trajectories(aggregation):
    """By hand: three trajectories, of 5, 2 and 5 tokens."""
    samples = rollout_samples([CUT, OTHER, CUT])
    weights = loss_weights(
        [s.loss_mask for s in samples],
        aggregation=aggregation,
        max_tokens=10,
        sequences=trajectory_slices(samples),
    )
    wanted = {
        "sequence_mean": [1 / 15, 1 / 15, 1 / 6, 1 / 15, 1 / 15],
        "sequence_sum": [1 / 3] * 5,
        "token_mean": [1 / 12] * 5,
        "constant": [1 / 30] * 5,
    }[aggregation]
    for weight, sample, each in zip(weights, samples, wanted, strict=True):
        torch.testing.assert_close(weight, sample.loss_mask.float() * each)


@pytest.mark.parametrize("advantage", ["group_mean_std", "group_mean", "batch_mean_std"])
def test_every_part_gets_what_the_whole_trajectory_would_get(advantage):
    found, wanted = [], []
    for first, into in ((CUT, found), (WHOLE, wanted)):
        one = group(first)
        samples = rollout_samples(r.trajectory for r in one.rollouts)
        algorithm = PolicyAlgorithm(GRPOConfig(advantage=advantage), max_tokens=10)
        _, advantages = algorithm.advantages([one], samples)
        into.append(torch.cat([a[s.loss_mask] for a, s in zip(advantages, samples, strict=True)]))
    assert torch.equal(found[0], wanted[0]) and bool(found[0].any())


def test_gae_runs_over_the_parts_in_order():
    found, wanted = [], []
    for first, into in ((CUT, found), (WHOLE, wanted)):
        one = group(first)
        samples = rollout_samples(r.trajectory for r in one.rollouts)
        count = iter(range(100))
        values = []
        for sample in samples:
            value = torch.zeros(len(sample))
            value[sample.loss_mask] = torch.tensor([0.1 * next(count) for _ in range(sample.num_trained)])
            values.append(value)
        algorithm = PPO(PPOConfig(), max_tokens=10)
        estimates = algorithm.estimates([one], samples, values=values)
        for each in (estimates.advantages, estimates.returns):
            into.append(torch.cat([a[s.loss_mask] for a, s in zip(each, samples, strict=True)]))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)) and bool(found[0].any())
