"""Your own reward: a function, or a class that sees token ids too.

python examples/own_reward.py                   # the class, random weights, seconds
python examples/own_reward.py demo              # the function, SmolLM2-135M, minutes
"""

import re
import sys
from collections.abc import Mapping
from typing import Any

from lockstep.protocols.reward import RewardInput


def closeness(*, prompt: str, completion: str, row: Mapping[str, Any]) -> float:
    """1 for the right number, less the further away, 0 without a number. `async def` works as well."""
    numbers = re.findall(r"-?\d+", completion)
    return 1 / (1 + abs(int(numbers[-1]) - int(row["answer"]))) if numbers else 0.0


class Distinct:
    """Share of different ids in the completion; a class is made once, with the config's kwargs."""

    def __init__(self, target: float = 1.0) -> None:
        self.target = target

    def __call__(self, sample: RewardInput) -> float:
        """The share of `target` that was reached, at most 1."""
        ids = sample.completion_token_ids
        return min(1.0, len(set(ids)) / len(ids) / self.target) if ids else 0.0


def main(recipe: str = "tiny") -> None:
    """Name a reward in the config (module:attribute), or hand over the callable itself."""
    # Imported here, as the reward's own process imports this module too, and needs no torch.
    from lockstep import load_run, train_online

    if recipe == "tiny":
        named = {"name": "own_reward:Distinct", "kwargs": {"target": 0.9}}
        run = load_run("tiny", overrides={"rewards": [named], "steps": 5})
        summary = train_online(run)
    else:
        summary = train_online(load_run(recipe), rewards=[closeness])
    print(f"held-out mean reward {summary['eval_after']['mean_reward']:.2f}, {summary['run_dir']}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
