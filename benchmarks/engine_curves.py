"""Does a run learn the same whatever engine samples? Mean reward and held-out accuracy of several runs on one
plot.

    lockstep train grpo --recipe demo --run-dir RUNS/hf
    lockstep train grpo --recipe demo --run-dir RUNS/vllm --engine.name vllm \\
        --engine.python .venv-vllm/bin/python
    python benchmarks/engine_curves.py RUNS/hf RUNS/vllm --image docs/images/engines.png --out RESULT.json

Runs differ sample by sample (each engine has noise of its own), so curves are compared by eye and by their
ends: the JSON has the means of the first and last ten steps and the accuracies.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from pathlib import Path
from typing import Any

WINDOW = 5
"""Steps of the running mean that is drawn thick."""
ENDS = 10
"""Steps at either end whose mean is reported."""


def main() -> None:
    """Read, draw, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR")
    parser.add_argument("--image", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="figures as JSON")
    arguments = parser.parse_args()
    runs = [read(path) for path in arguments.runs]
    draw(runs, arguments.image)
    arguments.out.write_text(json.dumps({"cpu": processor(), "runs": runs}, indent=1) + "\n")
    for run in runs:
        accuracy = " -> ".join(f"{value:.3f}" for _, value in run["accuracy"])
        print(
            f"{run['engine']}: mean reward {run['first']:.3f} -> {run['last']:.3f} (first and last {ENDS} "
            f"steps), held-out accuracy {accuracy}, {run['seconds']:.0f} s"
        )


def read(path: Path) -> dict[str, Any]:
    """What is shown of one run directory."""
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    manifest = json.loads((path / "manifest.json").read_text())
    summary = json.loads((path / "summary.json").read_text())
    rewards = [line["reward/mean"] for line in lines if "evaluation" not in line]
    return {
        "engine": manifest["axes"]["engine"],
        "version": (manifest.get("engine") or {}).get("version"),
        "torch": manifest["torch"],
        "dtype": manifest["axes"]["dtype"],
        "rewards": rewards,
        "gaps": [line["logprob_gap_mean"] for line in lines if "evaluation" not in line],
        "accuracy": [(line["step"], line["eval/lenient_accuracy"]) for line in lines if "evaluation" in line],
        "first": statistics.fmean(rewards[:ENDS]),
        "last": statistics.fmean(rewards[-ENDS:]),
        "seconds": summary["wall_seconds"],
    }


def draw(runs: list[dict[str, Any]], image: Path) -> None:
    """One panel: rewards thin, their running means thick, accuracies as dots."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.6))
    for run, colour in zip(runs, ("#1f77b4", "#d62728", "#2ca02c"), strict=False):
        rewards = run["rewards"]
        means = [statistics.fmean(rewards[max(0, i - WINDOW + 1) : i + 1]) for i in range(len(rewards))]
        axes.plot(rewards, color=colour, alpha=0.25, linewidth=1)
        axes.plot(means, color=colour, linewidth=2, label=f"{run['engine']}: mean reward, {WINDOW} steps")
        steps, values = zip(*run["accuracy"], strict=True)
        axes.plot(steps, values, "o", color=colour, label=f"{run['engine']}: held-out accuracy")
    axes.set_xlabel("step")
    axes.set_ylim(0, 1)
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", fontsize=8)
    figure.tight_layout()
    figure.savefig(image, dpi=80)


def processor() -> str:
    """The machine's own name for it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


if __name__ == "__main__":
    main()
