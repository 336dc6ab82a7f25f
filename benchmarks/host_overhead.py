"""How much of a step the loop itself takes: everything that is not generation, reward, forward, backward or
optimizer, by the spans of a run's metrics.jsonl.

    python benchmarks/host_overhead.py --json results/host_overhead.json      a GRPO run of SmolLM2-135M, then
    python benchmarks/host_overhead.py --metrics runs/demo/metrics.jsonl      a run that is there already

The last line says whether the median share is below the target (3 %); the exit status is 0 when it is.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TARGET = 0.03
"""Largest median share of a step's wall time that the loop may take."""

WARM_UP = 1
"""First steps that are left out: caches are cold."""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0 when the target is met."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--metrics", type=Path, help="metrics.jsonl of a finished run; default: make one")
    parser.add_argument("--steps", type=int, default=8, help="of the run that is made (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="torch threads of it (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    args = parser.parse_args(argv)
    if args.metrics is not None:
        result = measure(args.metrics)
    else:
        if args.steps <= WARM_UP:
            parser.error(f"--steps {args.steps}: the first {WARM_UP} are left out; ask for more")
        with tempfile.TemporaryDirectory() as folder:
            result = measure(make_run(Path(folder) / "run", steps=args.steps, threads=args.threads))
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    report(result)
    return 0 if result["met"] else 1


def make_run(run_dir: Path, *, steps: int, threads: int) -> Path:
    """The demo recipe for a few steps, logging what it logs by default; its metrics.jsonl."""
    from lockstep import load_run, train_online

    run = load_run(
        "demo",
        overrides={
            "run_dir": str(run_dir),
            "steps": steps,
            "train.num_threads": threads,
            "eval.before": False,
            "eval.after": False,
            "eval.every": 0,
            "checkpoint.every": 0,
            "checkpoint.save_at_end": False,
            "checkpoint.export_at_end": False,
        },
    )
    train_online(run)  # type: ignore[arg-type]
    return run_dir / "metrics.jsonl"


def measure(metrics: Path) -> dict[str, Any]:
    """Shares of the steps after the first, and where the host's time went (seconds per step, medians)."""
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    steps = [row for row in rows if "evaluation" not in row][WARM_UP:]
    if not steps:
        sys.exit(f"{metrics}: fewer than {WARM_UP + 1} steps; nothing to measure")
    shares = sorted(row["time/host_share"] for row in steps)
    names = sorted({name for row in steps for name in row if name.startswith("time/")} - {"time/host_share"})
    median = statistics.median(shares)
    return {
        "target": TARGET,
        "met": median < TARGET,
        "steps": len(steps),
        "host_share": {"median": median, "min": shares[0], "max": shares[-1]},
        "seconds": {n.removeprefix("time/"): statistics.median(r.get(n, 0.0) for r in steps) for n in names},
        "versions": versions(),
    }


def versions() -> dict[str, Any]:
    """What the numbers depend on."""
    import torch

    import lockstep

    return {
        "lockstep": lockstep.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu_count": os.cpu_count(),
    }


def report(result: dict[str, Any]) -> None:
    """A line per span, then the verdict."""
    step = result["seconds"]["step"]
    for name, seconds in sorted(result["seconds"].items(), key=lambda item: -item[1]):
        print(f"{name:18} {seconds:9.4f} s  {seconds / step:7.2%}")
    share = result["host_share"]
    print(
        f"host overhead: {'met' if result['met'] else 'NOT met'}, median {share['median']:.2%} of a step "
        f"(min {share['min']:.2%}, max {share['max']:.2%}, {result['steps']} steps), target < {TARGET:.0%}"
    )


if __name__ == "__main__":
    sys.exit(main())
