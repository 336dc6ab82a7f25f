"""Does a policy learn to guess a number from 1 to 32 within six turns? `examples/guessing_game.toml`.

    python benchmarks/guessing_game.py --out FOLDER --json FILE [--seeds 0 1 2] [--set --steps 3 ...]

A seed is a process of its own, and is not run again if its result is in FILE. The share of solved games is of
held-out games at temperature 1, each number equally often. On a machine with other work the CPU seconds say
more than the wall times. What follows `--set` goes to `lockstep train`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tools_demo import NOTHING_LEFT, about

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def main(argv: list[str]) -> int:
    """Train with each seed, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="a folder for the model, runs and logs")
    parser.add_argument("--json", type=Path, required=True, help="the result, to which seeds are added")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--set", nargs=argparse.REMAINDER, default=[], help="flags of `lockstep train`")
    args = parser.parse_args(argv)
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    make = [sys.executable, "guessing_game_players.py", str(out / "model")]
    subprocess.run(make, cwd=EXAMPLES, check=True)
    for seed in args.seeds:
        result = json.loads(args.json.read_text()) if args.json.exists() else about()
        if f"seed{seed}" in result:
            continue
        found = run(seed, out, args.set)
        print(f"seed {seed}:", json.dumps(found), flush=True)
        args.json.write_text(json.dumps({**result, f"seed{seed}": found}, indent=1) + "\n")
    return 0


def run(seed: int, out: Path, more: list[str]) -> dict[str, Any]:
    """Train with a seed, and return what the policy learnt."""
    folder = out / f"seed{seed}"
    own = ["guessing_game.toml", "--seed", str(seed), *more]
    words = ["train", *own, "--model.name", str(out / "model"), "--run-dir", str(folder), *NOTHING_LEFT]
    load, began = os.getloadavg()[0], time.monotonic()
    with folder.with_suffix(".log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "lockstep", *words], cwd=EXAMPLES, stdout=log, stderr=log
        )
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"seed {seed} failed; see {folder.with_suffix('.log')}")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "evaluation" not in line]
    return {
        "command": "lockstep train " + " ".join(own),
        "solved": [solved(folder, name) for name in ("before", "after")],
        "solved_in_training": [round(step["reward/environment/solved"], 3) for step in steps],
        "entropy": [round(steps[0]["entropy"], 3), round(steps[-1]["entropy"], 3)],
        "template_mismatches": sum(step["rollout/template_mismatches"] for step in steps),
        "logprob_gap_max": max(step["logprob_gap_max"] for step in steps),
        "seconds": round(time.monotonic() - began),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime),
        "load": [round(load, 1), round(os.getloadavg()[0], 1)],
    }


def solved(folder: Path, name: str) -> float:
    """Return the share of an evaluation's games that were solved."""
    text = (folder / f"rollouts/evaluation-{name}.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    return round(statistics.fmean(row["rewards"]["environment/solved"] for row in rows), 3)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
