"""An environment of your own, with two turns: the policy guesses a number, is told whether that was too low
or too high, and guesses again. The reward is higher the closer the second guess is.

python examples/own_environment.py              # random weights, under a minute
"""

import random
from collections.abc import Sequence

from lockstep import Environment, load_run, train_online
from lockstep.rollout.environment import Sampler, Trajectories
from lockstep.schema.rollout import Prompt, Trajectory

NUMBERS = 32
TOO_LOW, TOO_HIGH, RIGHT = 1, 2, 3
"""Token ids of the reply. With a tokenizer, reply with `tokenizer.encode(...)`."""


class Guess(Environment):
    """Guess a number below NUMBERS in two turns."""

    def tasks(self, step: int, n: int, seed: int) -> list[Prompt]:
        """n numbers: the same ones whenever the step is sampled again."""
        draw = random.Random(f"{seed} {step}")
        return [
            Prompt(index=step * n + i, token_ids=(0,), text="guess", row={"number": draw.randrange(NUMBERS)})
            for i in range(n)
        ]

    async def run(self, task: Prompt, sample: Sampler) -> Trajectory:
        """Two turns of one token each, and the reply between them."""
        trajectory = await sample(max_tokens=1)
        guess, number = trajectory.token_ids[-1] % NUMBERS, task.row["number"]
        reply = RIGHT if guess == number else TOO_LOW if guess < number else TOO_HIGH
        return await sample([reply], max_tokens=1)

    def score(self, groups: Sequence[Trajectories]) -> list[list[float]]:
        """1 for the number, less by 1 / NUMBERS for each that the second guess is away."""
        return [[self.reward(task, trajectory) for trajectory in of_task] for task, of_task in groups]

    def reward(self, task: Prompt, trajectory: Trajectory) -> float:
        """Of one trajectory."""
        return 1 - abs(trajectory.token_ids[-1] % NUMBERS - task.row["number"]) / NUMBERS

    def held_out(self, n: int) -> Sequence[Prompt]:
        """For the evaluations before and after."""
        return self.tasks(-1, n, seed=0)


def main(steps: int = 60) -> None:
    """Train, and print the mean reward before and after."""
    settings = {
        "steps": steps,
        "rollout.prompts_per_step": 16,
        "rollout.sampling.max_tokens": 8,
        "checkpoint.export_at_end": False,
        "eval.num_prompts": 64,
    }
    summary = train_online(load_run("tiny", overrides=settings), environment=Guess())
    before, after = summary["eval_before"], summary["eval_after"]
    print(f"held-out mean reward {before['mean_reward']:.3f} -> {after['mean_reward']:.3f}")


if __name__ == "__main__":
    main()
