"""Environments of the user's, from tasks to the optimizer step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from raising import raises

from lockstep import Environment
from lockstep.config.load import load_run
from lockstep.config.run import GRPORun
from lockstep.errors import ConfigError, DataError, RewardError
from lockstep.loops import train_online
from lockstep.observe.run_history import read_lines
from lockstep.rollout.environment import Sampler, Trajectories
from lockstep.schema.batch import rollout_samples
from lockstep.schema.rollout import Prompt, Trajectory

REPLY = (7, 8, 9)


class Asks(Environment):
    """The policy writes up to four tokens, is told REPLY, and goes on with the rest of its budget."""

    def __init__(self, reply: Sequence[int] = REPLY) -> None:
        self.reply, self.seen = tuple(reply), list[Trajectory]()

    def tasks(self, step: int, n: int, seed: int) -> list[Prompt]:
        return [
            Prompt(index=step * n + i, token_ids=(step + 1, i + 1, 3), text=f"task {i}") for i in range(n)
        ]

    async def run(self, task: Prompt, sample: Sampler) -> Trajectory:
        await sample(max_tokens=4)
        return await sample(self.reply)

    def score(self, groups: Sequence[Trajectories]) -> list[list[float]]:
        self.seen += [trajectory for _, trajectories in groups for trajectory in trajectories]
        return [[float(sum(t.token_ids) % 5) for t in trajectories] for _, trajectories in groups]


def run_of(folder: Path, **settings: Any) -> GRPORun:
    small = {
        "steps": 3,
        "rollout.prompts_per_step": 2,
        "rollout.group_size": 4,
        "train.score_all_every": 1,
        "rollout.sampling.max_tokens": 12,
        "eval.before": False,
        "eval.after": False,
        "log.tensorboard": False,
        "log.display": "off",
        "checkpoint.export_at_end": False,
        "run_dir": str(folder),
    }
    run = load_run("tiny", overrides=small | settings)
    assert isinstance(run, GRPORun)
    return run


def test_trajectories_of_two_turns_are_trained_on_what_the_policy_wrote(tmp_path: Path) -> None:
    environment = Asks()
    summary = train_online(run_of(tmp_path / "run"), environment=environment)
    assert summary["outcome"] == "finished"
    assert len(environment.seen) == 3 * 2 * 4
    for trajectory in environment.seen:
        assert [span.author for span in trajectory.spans] == ["prompt", "policy", "tool", "policy"]
        assert [len(span.token_ids) for span in trajectory.spans] == [3, 4, 3, 5]  # 12 after the prompt
        assert trajectory.spans[2].token_ids == REPLY
        (document,) = rollout_samples([trajectory])
        # Entry t is about token t + 1: prompt 0-2, first turn 3-6, reply 7-9, second turn 10-14.
        assert document.loss_mask.nonzero().flatten().tolist() == [2, 3, 4, 5, 9, 10, 11, 12, 13]
    steps = list(read_lines(tmp_path / "run" / "metrics.jsonl"))
    assert [step["input/trained_tokens"] for step in steps] == [2 * 4 * 9] * 3
    # The trainer reads the same context as the engine did, over both turns and the reply between them.
    assert all(step["logprob_gap_max"] < 1e-4 for step in steps)
    assert all(step["grad_norm"] > 0 for step in steps)
    assert all(step["reward/environment"] == step["reward/mean"] for step in steps)
    rows = list(read_lines(tmp_path / "run" / "rollouts" / "step-000000.jsonl"))
    assert [row["spans"] for row in rows] == [[["policy", 4], ["tool", 3], ["policy", 5]]] * 8


def test_the_same_environment_goes_on_exactly_when_it_is_resumed(tmp_path: Path) -> None:
    train_online(run_of(tmp_path / "whole"), environment=Asks())
    train_online(run_of(tmp_path / "cut", steps=2), environment=Asks())
    resumed = run_of(tmp_path / "cut", steps=3)
    train_online(resumed, resume=tmp_path / "cut", environment=Asks())
    whole, cut = (
        [
            {k: v for k, v in line.items() if not k.startswith(("time", "throughput/", "memory/", "engine/"))}
            for line in read_lines(tmp_path / name / "metrics.jsonl")
        ]
        for name in ("whole", "cut")
    )
    assert whole == cut


def test_a_reply_beyond_the_budget_ends_its_trajectory_and_a_reward_that_is_no_number_the_run(
    tmp_path: Path,
) -> None:
    environment = Asks(reply=[5] * 8)
    train_online(run_of(tmp_path / "long", steps=1), environment=environment)
    assert {(len(t.spans), t.end, t.finish_reason) for t in environment.seen} == {(2, "tokens", "length")}
    (step,) = read_lines(tmp_path / "long" / "metrics.jsonl")
    assert step["rollout/truncated"] == 1.0 and step["input/trained_tokens"] == 2 * 4 * 4

    class Infinite(Asks):
        def score(self, groups: Sequence[Trajectories]) -> list[list[float]]:
            return [[float("nan") for _ in trajectories] for _, trajectories in groups]

    with raises(RewardError, "not-finite"):
        train_online(run_of(tmp_path / "nan"), environment=Infinite())


def test_a_reward_model_is_not_for_an_environment_of_ones_own(tmp_path: Path, tiny_folder: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    settings = {"data.source": str(tmp_path / "prompts.jsonl"), "model.name": str(tiny_folder)}
    settings["reward_model.name"] = str(tiny_folder)
    with raises(ConfigError, "no-effect: reward_model.name"):
        train_online(run_of(tmp_path / "run", **settings), environment=Asks())


def test_a_run_with_an_environment_is_resumed_with_the_same_one(tmp_path: Path) -> None:
    train_online(run_of(tmp_path / "run", steps=1), environment=Asks())
    for other in (None, type("Other", (Asks,), {})()):
        with raises(ConfigError, "values-differ") as caught:
            train_online(run_of(tmp_path / "run", steps=2), resume=tmp_path / "run", environment=other)
        assert "was started with the environment Asks" in str(caught.value)


def test_what_the_environment_takes_the_place_of_is_not_read(tmp_path: Path) -> None:
    nowhere = {"data.source": str(tmp_path / "nowhere.jsonl"), "steps": 1}
    summary = train_online(run_of(tmp_path / "run", **nowhere), environment=Asks())
    assert summary["outcome"] == "finished"
    with raises(ConfigError, "contradiction"):
        train_online(run_of(tmp_path / "two"), environment=Asks(), rewards=[lambda **_: 1.0])
    with raises(ConfigError, "nothing-to-do: eval.before") as caught:
        train_online(run_of(tmp_path / "evaluates", **{"eval.after": True}), environment=Asks())
    assert "held_out of Asks returned no tasks" in str(caught.value)
    with raises(DataError, "too-long"):
        train_online(run_of(tmp_path / "long", **{"data.max_prompt_tokens": 2}), environment=Asks())


class Talks(Asks):
    """Replies until there is no room for another turn."""

    async def run(self, task: Prompt, sample: Sampler) -> Trajectory:
        await sample()
        while True:
            await sample(self.reply)


class Branches(Asks):
    """The second turn has another context, in which the first one is repeated."""

    async def run(self, task: Prompt, sample: Sampler) -> Trajectory:
        trajectory = await sample()
        return await sample.branch((5, *trajectory.token_ids, 6))


def test_turns_and_trajectories_have_limits_of_their_own(tmp_path: Path) -> None:
    limits = {
        "steps": 1,
        "rollout.sampling.max_tokens": 4,
        "rollout.max_trajectory_tokens": 20,
        "rollout.max_turns": 3,
    }
    run = run_of(tmp_path / "turns", **limits)
    assert run.longest_unit == run.longest_sequence == run.data.max_prompt_tokens + 20
    assert run.eval_tokens(2) == (8, 40)
    by_turns, by_tokens = Talks(), Talks()
    train_online(run, environment=by_turns)
    assert {(t.turns, t.added_tokens, t.end) for t in by_turns.seen} == {(3, 4 + 3 + 4 + 3 + 4, "turns")}
    (step,) = read_lines(tmp_path / "turns" / "metrics.jsonl")
    assert step["rollout/turns"] == step["rollout/turns_max"] == 3
    assert step["rollout/ended_turns"] == step["rollout/truncated"] == 1.0 and step["rollout/ended_done"] == 0
    assert step["input/longest_document"] == 3 + 18 and step["time/environment"] > 0
    assert step["engine/recomputed_tokens"] == 8 * (7 + 14)  # hf keeps no keys between turns
    run = run_of(tmp_path / "tokens", **limits | {"rollout.max_trajectory_tokens": 13})
    train_online(run, environment=by_tokens)
    # 4 + 3 + 4, and no room for 3 more and a token
    assert {(t.turns, t.added_tokens, t.end) for t in by_tokens.seen} == {(2, 11, "tokens")}


def test_a_branched_trajectory_is_trained_once_and_counts_once(tmp_path: Path) -> None:
    limits = {"steps": 1, "rollout.sampling.max_tokens": 4, "rollout.max_trajectory_tokens": 20}
    environment = Branches()
    train_online(run_of(tmp_path / "run", **limits), environment=environment)
    (step,) = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert step["rollout/samples"] == step["rollout/branches"] == 8
    assert step["input/documents"] == 16 and step["input/trained_tokens"] == 8 * (4 + 4)
    assert step["logprob_gap_max"] < 1e-4
    rows = list(read_lines(tmp_path / "run" / "rollouts" / "step-000000.jsonl"))
    assert [row["spans"] for row in rows] == [[["policy", 4], ["prompt", 9], ["policy", 4]]] * 8
