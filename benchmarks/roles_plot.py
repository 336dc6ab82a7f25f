"""Draw docs/images/roles.png from the committed results: PPO beside GRPO on the demo's task, PPO against a
reward model, and five preference losses.

    python benchmarks/roles_plot.py
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
IMAGE = Path(__file__).parent.parent / "docs/images/roles.png"
WINDOW = 5
"""Steps of a running mean."""


def main() -> None:
    """Draw the three panels."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    grpo, demo = read("demo-avx2.json.gz"), read("ppo-demo-avx2.json.gz")
    roles = read("roles-demo-h200.json.gz")
    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(13, 3.8), constrained_layout=True)
    for runs, name, colour in ((grpo["runs"], "GRPO", "tab:blue"), (demo["runs"], "PPO", "tab:orange")):
        for number, run in enumerate(runs):
            label = name if number == 0 else None
            left.plot(running_mean(run["reward_by_step"]), color=colour, alpha=0.8, label=label)
    left.set(title="demo task, seeds 0 to 2", xlabel="step", ylabel=f"mean reward, {WINDOW} steps")
    left.legend()
    steps, accuracy = zip(*roles["ppo"]["verifier"], strict=True)
    middle.plot(steps, accuracy, color="tab:green", label="verifier's accuracy")
    middle.set(title="PPO against a reward model", xlabel="step", ylabel="held-out accuracy", ylim=(0, 1))
    other = middle.twinx()
    steps, score = zip(*roles["ppo"]["reward_model_score"], strict=True)
    other.plot(steps, score, color="tab:red", linestyle="--", label="reward model's score")
    other.set_ylabel("mean score")
    middle.legend(handles=[*middle.get_lines(), *other.get_lines()], loc="lower right")
    for name in ("dpo", "ipo", "simpo", "kto", "orpo"):
        found = roles["preferences"][name]
        curve = running_mean(found["train_accuracy"])
        (line,) = right.plot(curve, alpha=0.8, label=f"{name}: {found['pair_accuracy']:.2f}")
        right.plot(len(found["train_accuracy"]) - 1, found["pair_accuracy"], "o", color=line.get_color())
    right.set(title="preference losses (dots: held-out pairs)", xlabel="step")
    right.set(ylabel="pair accuracy", ylim=(0.4, 1))
    right.legend(loc="lower right")
    figure.savefig(IMAGE, dpi=110)
    print(f"roles_plot: {IMAGE}")


def running_mean(values: list[float]) -> list[float]:
    """Of the last WINDOW values."""
    return [
        sum(part) / len(part) for part in (values[max(0, i - WINDOW + 1) : i + 1] for i in range(len(values)))
    ]


def read(name: str) -> dict[str, Any]:
    """One committed result."""
    with gzip.open(RESULTS / name) as file:
        found: dict[str, Any] = json.load(file)
    return found


if __name__ == "__main__":
    main()
