"""Parts of the user's, and rewards, that are checked before a step computes with them."""

import sys
from pathlib import Path

import pytest
import torch
from raising import raises

from lockstep.algorithms.grpo import PolicyAlgorithm
from lockstep.cli.main import main
from lockstep.config.algorithm import GRPOConfig
from lockstep.config.rollout import RewardConfig
from lockstep.errors import ConfigError, RewardError, TrainError
from lockstep.loop.metrics import rollout_metrics
from lockstep.loop.preflight import check_attribute, check_own_attention
from lockstep.ops.advantages import group_mean_std
from lockstep.protocols.reward import RewardInput
from lockstep.rollout.rewards import RewardSet
from lockstep.schema.rollout import Completion, Prompt, Rollout, RolloutGroup, Trajectory

OWN = """
import torch
def one(rewards): return rewards
def three(rewards, mask, other): return rewards
def listed(rewards, mask): return rewards.tolist()
def fails(rewards, mask): raise ZeroDivisionError("no spread")
def terms_only(terms): return terms.ratio
def no_sequences(q, k, v): return q
def good_kernel(q, k, v, *, cu_seqlens, max_seqlen, lengths, scale, window, mask=None): return q
class Backend:
    shards_weights = external = False
    logprobs = forward_backward = optimizer_step = weights = save = load = export = close = None
    def __getattr__(self, name): return None
def engine(config): ...
engine.external = False
number = 3
class Algorithm:
    keep = advantages = loss_weights = loss = needs_ref = None
    def __init__(self, config): ...
"""
# (settings, the setting that the refusal names): what the docs (how-to/extend.md) say is called how
CALLED = [
    ({"algorithm.advantage": "field_own:one"}, "algorithm.advantage"),
    ({"algorithm.advantage": "field_own:three"}, "algorithm.advantage"),
    ({"algorithm.advantage": "field_own:number"}, "algorithm.advantage"),
    ({"algorithm.objective": "field_own:terms_only"}, "algorithm.objective"),
    ({"algorithm.name": "field_own:Algorithm"}, "algorithm.name"),
    ({"algorithm.advantage": "field_broken:f"}, "algorithm.advantage"),
    ({"train.attention": "field_own:no_sequences"}, "train.attention"),
    ({"engine.name": "field_own:engine"}, "engine.name"),
]


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "field_own.py").write_text(OWN)
    (tmp_path / "field_broken.py").write_text("def f(:\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in ("field_own", "field_broken"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(("settings", "setting"), CALLED)
def test_an_own_part_is_checked_before_anything_is_loaded(own, capsys, settings, setting):
    flags = [text for name, value in settings.items() for text in (f"--{name}", value)]
    assert main(["train", "grpo", "--recipe", "tiny", "--run-dir", "run", *flags]) == 2
    out = capsys.readouterr()
    assert setting in out.err and "Traceback" not in out.err
    assert not (own / "run").exists()


def test_an_own_kernel_of_the_documented_signature_is_taken(own):
    check_own_attention("field_own:good_kernel")


# (an estimator that can be called, what its error says)
RETURNED = [("field_own:listed", "a list instead of a tensor"), ("field_own:fails", "ZeroDivisionError")]


@pytest.mark.parametrize(("advantage", "said"), RETURNED)
def test_an_own_estimator_that_fails_is_one_error(own, advantage, said):
    algorithm = PolicyAlgorithm(GRPOConfig(advantage=advantage), max_tokens=8)
    with raises(TrainError, "wrong-result: algorithm.advantage") as caught:
        algorithm._estimated(torch.zeros(2, 2), torch.ones(2, 2, dtype=torch.bool))
    assert said in str(caught.value)


# (rewards of the samples, weight, whether they are taken): 1e30 squared is finite in float64, and a config
# takes no larger number either
HUGE = [
    ([1e30, -1e30], 1.0, True),
    ([1.7e308, 1.7e308], 1.0, False),
    ([1.7e308, -1.7e308], 1.0, False),
    ([1e31, 0.0], 1.0, False),
    ([10**400, 0], 1.0, False),
    ([1e20, 1e20], 1e20, False),
]


@pytest.mark.parametrize(("values", "weight", "taken"), HUGE)
def test_rewards_that_no_step_can_compute_with_are_named(values, weight, taken):
    given = iter(values)

    def reward(*, prompt, completion, row):
        return next(given)

    rewards = RewardSet([RewardConfig(name="ids")], functions=[reward])
    rewards._configs = tuple(c.model_copy(update={"weight": weight}) for c in rewards._configs)
    samples = [sample_of("p", index) for index in range(len(values))]
    if not taken:
        with raises(RewardError, "reward-failed" if weight == 1.0 else "not-finite"):
            rewards.score(samples)
        return
    totals = [scored.total for scored in rewards.score(samples)]
    metrics = rollout_metrics([group_of(totals)])
    assert (metrics["reward/mean"], metrics["reward/std"]) == (0.0, 1e30)
    matrix = torch.tensor([totals], dtype=torch.float64)
    # two values one deviation of n - 1 apart: -1 and 1 over sqrt(2)
    assert torch.allclose(group_mean_std(matrix), torch.tensor([[0.5**0.5, -(0.5**0.5)]]).double())


def sample_of(prompt: str, index: int) -> RewardInput:
    return RewardInput(
        prompt=prompt,
        completion="c",
        row={},
        prompt_token_ids=(1,),
        completion_token_ids=(2,),
        finish_reason="stop",
        index=index,
    )


def group_of(totals: list[float]) -> RolloutGroup:
    completion = Completion(
        prompt_token_ids=(1,),
        token_ids=(2,),
        logprobs=(-1.0,),
        finish_reason="stop",
        stop_reason=None,
        text="c",
        seed=1,
        engine="hf",
        policy_version=0,
    )
    rollouts = tuple(
        Rollout(trajectory=Trajectory.of(completion), reward=total, rewards={"r": total}, sample=index)
        for index, total in enumerate(totals)
    )
    return RolloutGroup(prompt=Prompt(index=0, token_ids=(1,), text="p"), rollouts=rollouts)


def test_a_submodule_that_a_package_imports_from_is_an_attribute_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Expected: what Python's import makes of it, by hand."""
    (tmp_path / "bonus").mkdir()
    (tmp_path / "bonus" / "__init__.py").write_text("from .scores import other\n")
    (tmp_path / "bonus" / "scores.py").write_text("other = reward = len\n")
    monkeypatch.syspath_prepend(tmp_path)
    check_attribute("bonus:scores.reward", what="reward")
    with raises(ConfigError, "wrong-part"):
        check_attribute("bonus:points.reward", what="reward")
    assert "bonus" not in sys.modules  # it was not run
