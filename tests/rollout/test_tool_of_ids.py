"""Twenty steps with a tool that returns ids: without a tokenizer, and exact."""

import json
import random

from lockstep import Environment, load_run, train_online
from lockstep.schema.rollout import Prompt

ODD, EVEN = 5, 6
"""What the tool returns. The second turn is to write ids of that kind."""


class Parity(Environment):
    def tasks(self, step, n, seed):
        draw = random.Random(f"{seed} {step}")
        return [
            Prompt(index=step * n + i, token_ids=(0,), text="", row={"kind": draw.choice((ODD, EVEN))})
            for i in range(n)
        ]

    async def run(self, task, sample):
        await sample(max_tokens=1)
        return await sample([task.row["kind"]] * 2, max_tokens=8)

    def score(self, groups):
        return [[self.right(task, trajectory) for trajectory in of_task] for task, of_task in groups]

    def right(self, task, trajectory):
        ids = trajectory.spans[-1].token_ids
        return sum(i % 2 == task.row["kind"] % 2 for i in ids) / len(ids)


def test_the_policy_learns_to_use_what_the_tool_returns(tmp_path):
    settings = {
        "steps": 20,
        "rollout.prompts_per_step": 16,
        "rollout.max_trajectory_tokens": 12,
        "rollout.sampling.max_tokens": 8,
        "train.batch_invariant": True,
        "engine.name": "native",
        "run_dir": str(tmp_path / "run"),
        "eval": {"before": False, "after": False},
        "checkpoint": {"save_at_end": False, "export_at_end": False},
        "log": {"tensorboard": False, "display": "off"},
    }
    train_online(load_run("tiny", overrides=settings), environment=Parity())
    steps = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 20
    # Of ids at random, or of one kind whatever the tool says, half are right.
    rewards = [step["reward/mean"] for step in steps]
    assert sum(rewards[:3]) / 3 < 0.55 and sum(rewards[-3:]) / 3 > 0.65
    assert all(step["logprob_gap_max"] == 0.0 for step in steps)
