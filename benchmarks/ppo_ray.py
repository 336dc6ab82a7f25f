"""examples/ppo_ray with four roles of one size on the GPUs of one node, placed by Ray: time, memory, speed.

    python benchmarks/ppo_ray.py --layers 12 10 8 6 --gpus 2 --out FOLDER --json FILE
    python benchmarks/ppo_ray.py --shape tiny-llama --layers 2 --gpus 0 --max-tokens 16 --out FOLDER
    python benchmarks/ppo_ray.py --pairs --layers 8 6 4 --gpus 2 --out FOLDER --json FILE \
        --set checkpoint.save-at-end=false checkpoint.export-at-end=false train.deterministic=true

Policy, reference, value model and reward model have the named shape with random weights, cut to the first
number of layers that `lockstep plan` has room for. The run file is the example's, with bfloat16, the engine
`native` in the process of each rank, and the sizes given here. `--gpus 0` is two ranks on CPUs. Written are
the seconds of each phase, tokens per second, and for each GPU the most memory that nvidia-smi saw in use.

`--pairs` is one rank with policy and reference on GPU 0, and value and reward model on GPU 1
(cluster.dedicated_gpus = true). It runs under Ray, without Ray, and where there is room without Ray on GPU 0
alone ("shared": `--layers 4` has room on 80 GB), in that order, and the file is written after each. "equal"
says which of them have the same metrics of every step to the bit, but for those of time and memory. With
`--gpus 0` both pairs are on the CPU.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from roles_gpu import write_models, write_prompts

EXAMPLE = Path(__file__).parents[1] / "examples" / "ppo_ray" / "run.toml"
PAIRS = {
    "ray": ["--cluster", "local"],
    "plain": [],
    "shared": ["--cluster.dedicated-gpus", "false"],
}
"""The runs of --pairs: what each has other than the plan."""
TIMES = re.compile(r"world/|timestamp|time/|memory/|throughput/|.*per_second")
DEADLINE = 1800.0
"""Seconds that the run may take."""


def main(argv: list[str]) -> int:
    """Write the models, plan, run, print and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 10, 8, 6, 4])
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--token-budget", type=int, default=8192)
    parser.add_argument("--apart", action="store_true", help="value and reward model in a world of their own")
    parser.add_argument("--pairs", action="store_true", help="one rank, a GPU for each pair of roles")
    parser.add_argument("--only", nargs="+", choices=list(PAIRS), default=list(PAIRS), help="runs of --pairs")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--set", nargs="*", default=[], metavar="OPTION=VALUE", help="options of the run")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if args.gpus else "cpu")
    run_file = args.out / "run.toml"
    run_file.write_text(placed(EXAMPLE.read_text(), apart=args.apart or args.pairs))
    layers, options = fitting(args, run_file, device)
    if args.gpus:
        torch.cuda.empty_cache()
    result = {
        "command": ["benchmarks/ppo_ray.py", *argv],
        "machine": torch.cuda.get_device_name() if args.gpus else platform.machine(),
        "ranks": 1 if args.pairs else args.gpus or 2,
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers", "ray")},
        "layers": layers,
        "options": options,
    }
    if args.pairs:
        result["runs"] = runs = {}
        for name in args.only:
            flags = [*options, *PAIRS[name]]
            if name == "shared" and not fits(run_file, flags):
                continue
            runs[name] = measured(args, run_file, flags, out=args.out / f"run-{name}")
            result["equal"] = [other for other in runs if numbers(runs[other]) == numbers(runs[args.only[0]])]
            write(args.json, result)
        print("equal to the bit:", *result["equal"], flush=True)
    else:
        flags = [*options, "--cluster", "local"]
        write(args.json, result | measured(args, run_file, flags, out=args.out / "run"))
    return 0


def measured(args: argparse.Namespace, run_file: Path, options: list[str], *, out: Path) -> dict[str, Any]:
    """What a training run took, and its metrics."""
    shutil.rmtree(out, ignore_errors=True)
    command = lockstep("train", str(run_file), *options, "--run-dir", str(out))
    with Memory(args.gpus) as memory:
        subprocess.run(command, cwd=args.out, check=True, timeout=DEADLINE)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "time/step" in row]
    steady = rows[1:] or rows
    names = sorted(name for name in steady[0] if name.startswith(("time/", "throughput/", "memory/")))
    result = {
        "median": {name: statistics.median(row[name] for row in steady if name in row) for name in names},
        "gpu_memory_gib": memory.most,
        "steps": rows,
    }
    print(json.dumps({name: result[name] for name in ("median", "gpu_memory_gib")}, indent=1), flush=True)
    return result


def numbers(run: dict[str, Any]) -> list[dict[str, Any]]:
    """The metrics of every step but for those of time and memory."""
    return [{name: value for name, value in row.items() if not TIMES.match(name)} for row in run["steps"]]


def write(path: Path | None, result: dict[str, Any]) -> None:
    """Write the result, if it is asked for."""
    if path is not None:
        path.write_text(json.dumps(result, indent=1) + "\n")


def placed(example: str, *, apart: bool) -> str:
    """The example's run file, with two pairs of roles, or all of them in one process."""
    pairs = '[["policy", "ref"], ["value", "reward_model"]]'
    groups = pairs if apart else '[["policy", "ref", "value", "reward_model"]]'
    return re.sub("(?m)^colocate = .*$", f"colocate = {groups}", example)


def fitting(args: argparse.Namespace, run_file: Path, device: torch.device) -> tuple[int, list[str]]:
    """The first number of layers that has room, and the run's options; SystemExit if none has."""
    for layers in args.layers:
        folder = args.out / f"{layers}-layers"
        folder.mkdir(exist_ok=True)
        words = write_models(args.shape, layers, folder, device)
        write_prompts(folder / "prompts.jsonl", words, args.prompts * args.steps)
        options = options_of(args, folder, dtype="bfloat16" if args.gpus else "float32")
        if fits(run_file, options):
            return layers, options
        shutil.rmtree(folder)
    raise SystemExit(f"--layers {args.layers}: none of them fits, see above")


def fits(run_file: Path, options: list[str]) -> bool:
    """Whether `lockstep plan` has room for it; what it says is printed."""
    planned = subprocess.run(
        lockstep("plan", str(run_file), *options), capture_output=True, text=True, check=False
    )
    print(planned.stdout + planned.stderr, flush=True)
    return not planned.returncode


def options_of(args: argparse.Namespace, folder: Path, *, dtype: str) -> list[str]:
    """What this run has other than the example."""
    values: dict[str, Any] = {
        "steps": args.steps,
        "model.name": folder / "policy",
        "model.dtype": dtype,
        "reward-model.name": folder / "reward",
        "reward-model.dtype": dtype,
        "data.source": folder / "prompts.jsonl",
        "data.prompt-column": "prompt",
        "data.max-prompt-tokens": 256,
        "rollout.prompts-per-step": args.prompts,
        "rollout.group-size": 4,
        "rollout.sampling.max-tokens": args.max_tokens,
        "rollout.sampling.ignore-eos": "true",
        "engine.name": "native",
        "train.lr": 1e-6,
        "value.lr": 1e-6,
        "train.token-budget": args.token_budget,
        "train.optimizer-device": "model",
        "checkpoint.every": 0,
        "log.tensorboard": "false",
    }
    if args.pairs:
        ranks = {"cluster.gpus": 1} if args.gpus else {}
        values |= {"train.backend": "local", "cluster.slots": 1, "cluster.dedicated-gpus": "true"} | ranks
    elif args.gpus:
        values |= {"cluster.gpus": args.gpus, "cluster.slots": 1}
    values |= dict(pair.split("=", 1) for pair in args.set)
    return [word for name, value in values.items() for word in (f"--{name}", str(value))]


def lockstep(*words: str) -> list[str]:
    """The command of this tree."""
    return [sys.executable, "-m", "lockstep", *words]


class Memory:
    """The most memory in use on each of so many GPUs, in GiB, read four times a second while inside."""

    def __init__(self, gpus: int) -> None:
        self.most = [0.0] * gpus
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Memory:
        if self.most:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        if self.most:
            self._thread.join(60)

    def _look(self) -> None:
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        while not self._end.wait(0.25):
            lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()
            self.most = [
                max(was, int(now) / 1024) for was, now in zip(self.most, lines[: len(self.most)], strict=True)
            ]


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main(sys.argv[1:]))
