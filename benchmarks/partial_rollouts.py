"""Steps with rollout.max_lag = 0, 1, ...: the same prompts and seeds, on this machine.

    python benchmarks/partial_rollouts.py --sides 0 1 4 --out benchmarks/results/partial_rollouts.json
    python benchmarks/partial_rollouts.py --sides 0 0x2 2 2+engine --model shape:llama-3.2-1b --tokens 4096 ...

A side is a lag: trainer and engine take turns on one GPU. `2+engine`: the engine has a process, and the next
GPU, of its own, and samples while the trainer works. `0x2`: two ranks, each with an engine.

Lengths are geometric: any of `--stops` ids of the vocabulary ends a completion, at most `--tokens` long. The
figures are medians over the steps between the first `max(lags)` and the last, in which all rows are in use;
the sides take turns.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from lockstep.config.load import build, dump_toml


@dataclass(frozen=True, kw_only=True)
class Side:
    """One way to run the steps."""

    name: str
    lag: int
    ranks: int = 1
    apart: bool = False
    """The engine has a process of its own."""

    @classmethod
    def of(cls, name: str) -> Side:
        """Parse "2", "2+engine" or "0x2"."""
        found = re.fullmatch(r"(\d+)(\+engine)?(?:x(\d+))?", name)
        if found is None:
            raise SystemExit(f"--sides {name}: give a lag, as 2, 2+engine or 0x2")
        lag, apart, ranks = found.groups()
        return cls(name=name, lag=int(lag), ranks=int(ranks or 1), apart=apart is not None)


def settings(args: argparse.Namespace, side: Side, folder: Path) -> dict[str, Any]:
    """The run of one side."""
    sampling = {"max_tokens": args.tokens, "stop_token_ids": list(range(100, 100 + args.stops))}
    engine: dict[str, Any] = {"name": "native", "max_batch": args.rows // side.ranks}
    if side.apart:
        engine["process"] = "separate"
        if torch.cuda.device_count() > 1:
            engine["cuda_devices"] = [1]
    return {
        "kind": "grpo",
        "steps": args.steps,
        "run_dir": str(folder),
        "model": {"name": args.model, "dtype": args.dtype},
        "data": {"source": "ids", "max_prompt_tokens": 32},
        "rollout": {
            "prompts_per_step": args.prompts,
            "group_size": 8,
            "max_lag": side.lag,
            "sampling": sampling,
        },
        "algorithm": {"rollout_correction": {"kind": "tis"}},
        "rewards": [{"name": "ids"}],
        "train": {"lr": 1e-5, "batch_invariant": True},
        "engine": engine,
        "eval": {"before": False, "after": False},
        "checkpoint": {"save_at_end": False, "export_at_end": False},
        "log": {"tensorboard": False, "display": "off"},
    }


def measured(args: argparse.Namespace, side: Side, folder: Path, *, skip: int) -> dict[str, float]:
    """Medians of the steps in the middle, and what must hold in all of them."""
    run = build(settings(args, side, folder / "run"), origin="benchmark")
    (folder / "run.toml").write_text(dump_toml(run))
    command = [sys.executable, "-m", "lockstep", "train", str(folder / "run.toml")]
    subprocess.run([*command, "--ranks", str(side.ranks)], check=True, timeout=args.seconds)
    rows = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    assert all(row.get("logprob_gap_max", 0.0) == 0.0 for row in rows), "the gap is not 0"
    assert all(row.get("rollout/lag_max", 0.0) <= side.lag for row in rows), "the lag is above S"
    middle = rows[skip : len(rows) - skip]
    completion = [row["rollout/completion_tokens_mean"] * row["rollout/samples"] for row in middle]
    generate = [row["time/generate"] for row in middle]
    return {
        "trained_tokens_per_second": sum(completion) / sum(row["time/step"] for row in middle),
        "generated_tokens_per_second": sum(completion) / sum(generate),
        "steps_per_second": len(middle) / sum(row["time/step"] for row in middle),
        "generate_seconds": statistics.median(generate),
        "weights_seconds": statistics.median(row["time/weights"] for row in middle),
        "step_seconds": statistics.median(row["time/step"] for row in middle),
        "lag_mean": statistics.fmean(row.get("rollout/lag_mean", 0.0) for row in middle),
        "recomputed_tokens": statistics.fmean(row.get("engine/recomputed_tokens", 0.0) for row in middle),
        "completion_tokens": statistics.fmean(completion),
    }


def main() -> None:
    """Run every side `--tries` times, in turns, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", default="shape:tiny-llama")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--sides", type=Side.of, nargs="+", default=[Side.of(lag) for lag in ("0", "1", "4")])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--stops", type=int, default=3, help="of the ids; the mean length is V / stops")
    parser.add_argument("--tries", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=600.0, help="of one run, at most")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {side.name: [] for side in args.sides}
    for _ in range(args.tries):
        for side in args.sides:
            with tempfile.TemporaryDirectory() as folder:
                skip = max(1, *(one.lag for one in args.sides))
                found[side.name].append(measured(args, side, Path(folder), skip=skip))
            write(args, found)


def write(args: argparse.Namespace, found: dict[str, list[dict[str, float]]]) -> None:
    """Print and write the medians of what there is."""
    rows = {
        side: {name: statistics.median(one[name] for one in tries) for name in tries[0]}
        for side, tries in found.items()
        if tries
    }
    first = rows[args.sides[0].name]
    for row in rows.values():
        row["generation_speedup"] = row["generated_tokens_per_second"] / first["generated_tokens_per_second"]
        row["step_speedup"] = row["steps_per_second"] / first["steps_per_second"]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "CPU"
    options = {name: value for name, value in vars(args).items() if name not in ("out", "sides")}
    versions = {name: version(name) for name in ("torch", "transformers")}
    report = {"device": device, "versions": versions, "options": options, "sides": rows}
    print(json.dumps(report, indent=1), flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
