"""Does the policy of the recipe tools-demo learn to use its tool, and does it need the tool's result?

    python benchmarks/tools_demo.py --out FOLDER --json FILE [--parts seed0 seed1 seed2 noise]

seedN   `lockstep train grpo --recipe tools-demo` with seed N: the warm start, evaluation, RL, evaluation.
noise   RL from the warm start of seed 0, with random numbers in the place of the tool's results.

Each part is a process of its own and is not run again if its result is in FILE. On a machine with other work
the CPU seconds say more than the wall times.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
NOTHING_LEFT = ["--checkpoint.save-at-end", "False", "--checkpoint.export-at-end", "False"]


class NoisyCalculator:
    """The recipe's tool, but for its result."""

    def multiply(self, a: int, b: int) -> int:
        """Multiply two whole numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        return random.randint(10_000, 998_001)


def main(argv: list[str]) -> int:
    """Run the parts, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="a folder for runs and logs")
    parser.add_argument("--json", type=Path, required=True, help="the result, to which parts are added")
    parser.add_argument("--parts", nargs="+", default=["seed0", "seed1", "seed2", "noise"])
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    for part in args.parts:
        result = json.loads(args.json.read_text()) if args.json.exists() else {}
        if part in result:
            continue
        found = run(part, args.out)
        print(part, json.dumps(found))
        result = json.loads(args.json.read_text()) if args.json.exists() else {}
        args.json.write_text(json.dumps({**about(), **result, part: found}, indent=1) + "\n")
    return 0


def run(part: str, out: Path) -> dict[str, Any]:
    """Train a part, and return what it did."""
    folder = (out / part).resolve()
    if part == "noise":
        words = [str(out / "seed0/config.toml"), "--environment.name", "tools_demo:NoisyCalculator"]
    else:
        seed = int(part.removeprefix("seed"))
        words = ["grpo", "--recipe", "tools-demo", "--seed", str(seed), "--data.seed", str(seed + 1)]
    summary_file = folder.with_suffix(".summary.json")
    words = ["train", *words, "--run-dir", str(folder), "--json", str(summary_file), *NOTHING_LEFT]
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    load, began = os.getloadavg()[0], time.monotonic()
    with folder.with_suffix(".log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "lockstep", *words],
            stdout=log,
            stderr=log,
            env={**os.environ, "PYTHONPATH": path},
        )
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{part} failed; see {folder.with_suffix('.log')}")
    summary = json.loads(summary_file.read_text())
    return {
        "command": "lockstep " + " ".join(words),
        **figures(folder, summary, seconds=time.monotonic() - began),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime),
        "peak_gib": round(usage.ru_maxrss / 2**20, 2),
        "load": [round(load, 1), round(os.getloadavg()[0], 1)],
    }


def figures(folder: Path, summary: dict[str, Any], *, seconds: float) -> dict[str, Any]:
    """Accuracies, the reward of each step, and wall times by part."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "evaluation" not in line]
    after = next(line for line in lines if line.get("evaluation") == "after")
    evaluation = steps[0]["time/evaluate"] + after["timestamp"] - steps[-1]["timestamp"]
    warm_start = summary.get("warm_start", {}).get("wall_seconds")
    return {
        "accuracy": [summary[name]["strict_accuracy"] for name in ("eval_before", "eval_after")],
        "as_the_tool": [as_the_tool(folder, name) for name in ("before", "after")],
        "rewards": [round(step["reward/mean"], 3) for step in steps],
        "template_mismatches": sum(step["rollout/template_mismatches"] for step in steps),
        "logprob_gap_max": max(step["logprob_gap_max"] for step in steps),
        "seconds": {
            "all": round(seconds),
            "warm_start": warm_start and round(warm_start),
            "rl": round(sum(step["time/step"] for step in steps)),
            "evaluation": round(evaluation),
        },
    }


def as_the_tool(folder: Path, name: str) -> dict[str, float]:
    """Return the share of an evaluation's trajectories that called the tool, and of these the share whose
    last number is the tool's last result."""
    from transformers import AutoTokenizer

    model = re.search(r'name = "(.*/export)"', (folder / "config.toml").read_text())
    assert model is not None, "the run began from a warm start"
    tokenizer = AutoTokenizer.from_pretrained(model[1])
    rows = [
        json.loads(line) for line in (folder / f"rollouts/evaluation-{name}.jsonl").read_text().splitlines()
    ]
    called, equal = 0, 0
    for row in rows:
        texts, at = {"tool": "", "policy": ""}, 0
        for author, length in row.get("spans", ()):
            texts[author] = tokenizer.decode(row["token_ids"][at : at + length])
            at += length
        results, answers = (re.findall(r"\d+", texts[author]) for author in ("tool", "policy"))
        called += bool(results)
        equal += bool(results) and results[-1:] == answers[-1:]
    return {"called": round(called / len(rows), 3), "equal": round(equal / called, 3) if called else 0.0}


def about() -> dict[str, Any]:
    """The machine and the versions."""
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return {
        "machine": f"{os.cpu_count()} cores of {cpu[1] if cpu else platform.processor()}",
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "versions": {name: version(name) for name in ("torch", "transformers")}
        | {"python": platform.python_version()},
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
