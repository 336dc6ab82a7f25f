"""Generation with rollout.max_lag = 0, 1, ...: the same steps, prompts and seeds, on this machine.

    python benchmarks/partial_rollouts.py --lags 0 1 4 --out benchmarks/results/partial_rollouts.json

Lengths are geometric: any of `--stops` ids of the vocabulary ends a completion, at most `--tokens` long. The
figures are medians over the steps between the first `max(lags)` and the last, in which all rows are in use;
the runs of all lags take turns.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from lockstep import loops
from lockstep.config.load import build
from lockstep.config.run import GRPORun


def settings(args: argparse.Namespace, lag: int, folder: Path) -> dict[str, Any]:
    """The run of one lag."""
    algorithm = {"rollout_correction": {"kind": "tis"}}
    sampling = {"max_tokens": args.tokens, "stop_token_ids": list(range(100, 100 + args.stops))}
    return {
        "kind": "grpo",
        "steps": args.steps,
        "run_dir": str(folder),
        "model": {"name": args.model, "dtype": args.dtype},
        "data": {"source": "ids", "max_prompt_tokens": 32},
        "rollout": {"prompts_per_step": args.prompts, "group_size": 8, "max_lag": lag, "sampling": sampling},
        "algorithm": algorithm,
        "rewards": [{"name": "ids"}],
        "train": {"lr": 1e-5, "batch_invariant": True},
        "engine": {"name": "native", "max_batch": args.rows},
        "eval": {"before": False, "after": False},
        "checkpoint": {"save_at_end": False, "export_at_end": False},
        "log": {"tensorboard": False, "display": "off"},
    }


def measured(run: GRPORun, *, skip: int) -> dict[str, float]:
    """Medians of the steps in the middle, and what must hold in all of them."""
    loops.train(run)
    rows = [json.loads(line) for line in (Path(str(run.run_dir)) / "metrics.jsonl").read_text().splitlines()]
    assert all(row.get("logprob_gap_max", 0.0) == 0.0 for row in rows), "the gap is not 0"
    middle = rows[skip : len(rows) - skip]
    completion = [row["rollout/completion_tokens_mean"] * row["rollout/samples"] for row in middle]
    generate = [row["time/generate"] for row in middle]
    return {
        "generated_tokens_per_second": sum(completion) / sum(generate),
        "steps_per_second": len(middle) / sum(row["time/step"] for row in middle),
        "generate_seconds": statistics.median(generate),
        "step_seconds": statistics.median(row["time/step"] for row in middle),
        "lag_mean": statistics.fmean(row.get("rollout/lag_mean", 0.0) for row in middle),
        "recomputed_tokens": statistics.fmean(row.get("engine/recomputed_tokens", 0.0) for row in middle),
        "completion_tokens": statistics.fmean(completion),
    }


def main() -> None:
    """Run every lag `--tries` times, in turns, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", default="shape:tiny-llama")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--lags", type=int, nargs="+", default=[0, 1, 4])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--stops", type=int, default=3, help="of the ids; the mean length is V / stops")
    parser.add_argument("--tries", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found: dict[int, list[dict[str, float]]] = {lag: [] for lag in args.lags}
    for _ in range(args.tries):
        for lag in args.lags:
            with tempfile.TemporaryDirectory() as folder:
                run = build(settings(args, lag, Path(folder) / "run"), origin="benchmark")
                assert isinstance(run, GRPORun)
                found[lag].append(measured(run, skip=max(args.lags)))
    rows = {
        str(lag): {name: statistics.median(one[name] for one in tries) for name in tries[0]}
        for lag, tries in found.items()
    }
    first = rows[str(args.lags[0])]
    for row in rows.values():
        row["generation_speedup"] = row["generated_tokens_per_second"] / first["generated_tokens_per_second"]
        row["step_speedup"] = row["steps_per_second"] / first["steps_per_second"]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "CPU"
    options = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    report = {"device": device, "torch": torch.__version__, "options": options, "lags": rows}
    print(json.dumps(report, indent=1))
    if args.out is not None:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
