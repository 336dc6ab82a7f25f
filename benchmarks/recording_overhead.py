"""How much of a step recording takes: the fingerprint of the weights, inputs and outputs, by the spans of a
run's metrics.jsonl (time/record against time/step).

    python benchmarks/recording_overhead.py --json results/recording_overhead.json    a recorded GRPO run
    python benchmarks/recording_overhead.py --metrics runs/demo/metrics.jsonl         a run that is there

The last line says whether the median share is at most the target (2 %); the exit status is 0 when it is.
Spans are wall time: other work on the machine makes both times longer, so its load is written beside them.
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

TARGET = 0.02
"""Largest median share of a step's wall time that recording may take."""

WARM_UP = 1
"""First steps that are left out of the median: caches are cold, and weights are stored in the first."""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0 when the target is met."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--metrics", type=Path, help="metrics.jsonl of a recorded run; default: make one")
    parser.add_argument("--steps", type=int, default=6, help="of the run that is made (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="torch threads of it (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    args = parser.parse_args(argv)
    if args.metrics is not None:
        result = measure(args.metrics)
    else:
        if args.steps <= WARM_UP:
            parser.error(f"--steps {args.steps}: the first {WARM_UP} are left out; ask for more")
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / "run"
            load = [round(os.getloadavg()[0], 2)]
            make_run(run, steps=args.steps, threads=args.threads)
            files = [p for p in (run / "recordings").rglob("*.safetensors") if "weights" not in p.parts]
            result = measure(run / "metrics.jsonl") | {
                "bytes_per_step": sum(p.stat().st_size for p in files) // args.steps,
                "command": f"benchmarks/recording_overhead.py --steps {args.steps} --threads {args.threads}",
                "load_average": [*load, round(os.getloadavg()[0], 2)],
            }
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    report(result)
    return 0 if result["met"] else 1


def make_run(run_dir: Path, *, steps: int, threads: int) -> None:
    """The demo recipe for a few steps, every input recorded."""
    from lockstep import load_run, train_online

    run = load_run(
        "demo",
        overrides={
            "run_dir": str(run_dir),
            "steps": steps,
            "record.enabled": True,
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


def measure(metrics: Path) -> dict[str, Any]:
    """Shares of the steps after the first, and seconds per step (medians)."""
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    steps = [row for row in rows if "evaluation" not in row and "time/record" in row]
    if len(steps) <= WARM_UP:
        sys.exit(f"{metrics}: fewer than {WARM_UP + 1} recorded steps; nothing to measure")
    first, steps = steps[0], steps[WARM_UP:]
    shares = sorted(row["time/record"] / row["time/step"] for row in steps)
    median = statistics.median(shares)
    return {
        "target": TARGET,
        "met": median <= TARGET,
        "steps": len(steps),
        "share": {"median": median, "min": shares[0], "max": shares[-1]},
        "seconds": {
            "record": statistics.median(row["time/record"] for row in steps),
            "step": statistics.median(row["time/step"] for row in steps),
            "record_first_step_with_weights": first["time/record"],
        },
        "micro_batches": statistics.median(row["input/micro_batches"] for row in steps),
        "tokens": statistics.median(row["input/tokens"] for row in steps),
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
    """Seconds, then the verdict."""
    seconds, share = result["seconds"], result["share"]
    print(
        f"record {seconds['record']:.4f} s of a step of {seconds['step']:.4f} s; "
        f"{seconds['record_first_step_with_weights']:.4f} s in the first step, with the weights"
    )
    print(
        f"recording overhead: {'met' if result['met'] else 'NOT met'}, median {share['median']:.2%} of a "
        f"step (min {share['min']:.2%}, max {share['max']:.2%}, {result['steps']} steps), "
        f"target <= {TARGET:.0%}"
    )


if __name__ == "__main__":
    sys.exit(main())
