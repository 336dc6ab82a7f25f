"""Generation of samples of very different lengths on several GPUs, against its lower bound.

    python benchmarks/ragged.py --gpus 4 --out benchmarks/results/ragged-h100-x4.json
    python benchmarks/ragged.py --gpus 2 --cpu --samples 32 --max-batch 8 --mean 24 --most 96

Ranks take groups of prompts from one queue as they have room. A sample ends at a length that nothing but
this script knows: log-normal (sigma 0.8), a function of the sample's seed. The wall time of a step's
generation, by `time/generate`, is divided by the larger of the mean of the ranks' busy times (their engine
had a sample) and the time that the longest sample took by itself, from its row to its end.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from several_gpus import COMMON, SMALL, TINY, machine

SIGMA = 0.8
TARGET = 1.08
GROUP = 8


def length(seed: int, *, mean: float, most: int) -> int:
    """Tokens of a sample. mean: of the distribution, before it is cut at `most`."""
    drawn = random.Random(seed).lognormvariate(math.log(mean) - SIGMA**2 / 2, SIGMA)
    return max(1, min(most, round(drawn)))


def worker(argv: list[str]) -> int:
    """Be a rank of `lockstep ARGV`, whose samples end as `length` says. Writes a line for each generation to
    busy-RANK.jsonl: the engine's busy seconds, and the longest sample's."""
    from lockstep.cli.main import main
    from lockstep.engine.native import engine as native
    from lockstep.engine.native.scheduler import Admission, Sample

    mean, most = float(os.environ["RAGGED_MEAN"]), int(os.environ["RAGGED_MOST"])
    path = Path(os.environ["RAGGED_FOLDER"]) / f"busy-{os.environ['RANK']}.jsonl"
    add, bring_up, run = Sample.add, native.Generation._bring_up, native.NativeEngine._run
    end = native.NativeEngine._end
    began: dict[int, float] = {}
    step: dict[str, Any] = {"busy": 0.0, "longest": 0.0, "samples": 0, "tokens": 0}

    def ending(self: Sample, token: int, logprob: float, on_token: Any) -> Any:
        found = add(self, token, logprob, on_token)
        tokens = len(self.state.token_ids)
        if found is None and tokens >= length(self.state.seed, mean=mean, most=most):
            found = "length", None
        if found is not None:
            step["longest"] = max(step["longest"], time.perf_counter() - began[self.state.seed])
            step["samples"] += 1
            step["tokens"] += tokens
        return found

    def timed_bring_up(self: native.Generation, admission: Admission, abort: Any) -> None:
        for sample in self.scheduler.rows:
            began.setdefault(sample.state.seed, time.perf_counter())
        bring_up(self, admission, abort)

    def timed_run(self: native.NativeEngine) -> Any:
        started = time.perf_counter()
        ended = run(self)
        step["busy"] += time.perf_counter() - started
        return ended

    def written_end(self: native.NativeEngine) -> None:
        end(self)
        with path.open("a") as file:
            file.write(json.dumps(step) + "\n")
        step.update(busy=0.0, longest=0.0, samples=0, tokens=0)

    Sample.add = ending  # type: ignore[method-assign]
    native.Generation._bring_up = timed_bring_up  # type: ignore[method-assign]
    native.NativeEngine._run = timed_run  # type: ignore[method-assign]
    native.NativeEngine._end = written_end  # type: ignore[method-assign]
    return main(argv)


def command(args: argparse.Namespace, folder: Path) -> list[str]:
    """The training run of all ranks."""
    prompts = args.samples * args.gpus // GROUP
    flags = [
        *("--model.name", TINY if args.cpu else SMALL, "--run-dir", str(folder / "run")),
        *("--rollout.prompts-per-step", str(prompts), "--rollout.sampling.max-tokens", str(args.most)),
        *("--engine.max-batch", str(args.max_batch), "--steps", "1000", "--train.backend", "fsdp2"),
    ]
    if args.cpu:
        flags += ["--model.dtype", "float32", "--train.device", "cpu", "--train.batch-invariant", "true"]
        flags += ["--engine.name", "native"]
    return ["train", "grpo", *COMMON.split(), *flags]


def ranks(args: argparse.Namespace, argv: Sequence[str], folder: Path) -> int:
    """Start the ranks; returns their exit status."""
    from lockstep.ranks.launch import launch_command

    own = [sys.executable, str(Path(__file__).resolve()), "--worker", *argv]
    return launch_command(own, ranks=args.gpus, timeout=args.seconds, log_dir=folder / "logs")


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file that may still be written, or is not there yet."""
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def figures(folder: Path, *, gpus: int) -> list[dict[str, Any]]:
    """One row for each step that is done."""
    walls = [row["time/generate"] for row in rows_of(folder / "run/metrics.jsonl")]
    busy = [rows_of(folder / f"busy-{rank}.jsonl") for rank in range(gpus)]
    found: list[dict[str, Any]] = []
    for wall, *of_ranks in zip(walls, *busy, strict=False):  # the step that is going on has no wall time yet
        mean = statistics.fmean(rank["busy"] for rank in of_ranks)
        longest = max(rank["longest"] for rank in of_ranks)
        row = {"wall": round(wall, 3), "ratio": round(wall / max(mean, longest), 4)}
        for name in ("longest", "busy", "samples", "tokens"):
            row[name] = [round(rank[name], 3) for rank in of_ranks]
        found.append(row)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["--worker"]:
        return worker(argv[1:])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--samples", type=int, default=512, help="of a rank, a multiple of 8")
    parser.add_argument("--max-batch", type=int, default=128)
    parser.add_argument("--mean", type=float, default=600.0, help="tokens of a sample")
    parser.add_argument("--most", type=int, default=4096, help="tokens of a sample")
    parser.add_argument("--steps", type=int, default=3, help="the first is not counted")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--start", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.start is not None:
        return ranks(args, command(args, args.start), args.start)
    result: dict[str, Any] = machine() | {"command": " ".join(["python", *sys.argv]), "target": TARGET}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        environ = os.environ | {
            "RAGGED_MEAN": str(args.mean),
            "RAGGED_MOST": str(args.most),
            "RAGGED_FOLDER": temporary,
            "HF_HUB_OFFLINE": "1",
        }
        log = (folder / "log").open("w")
        started = subprocess.Popen(
            [sys.executable, __file__, *argv, "--start", temporary], env=environ, stdout=log, stderr=log
        )
        deadline = time.monotonic() + args.seconds
        while started.poll() is None and time.monotonic() < deadline:
            time.sleep(0.2)
            if len(figures(folder, gpus=args.gpus)) >= args.steps:
                break
        ended = started.poll()
        if ended is None:
            started.send_signal(signal.SIGKILL)  # its ranks end with it
            started.wait()
        found = figures(folder, gpus=args.gpus)
        if len(found) < args.steps:
            print("\n".join((folder / "log").read_text().splitlines()[-20:]), file=sys.stderr)
    for row in found:
        print(json.dumps(row), flush=True)
    ratios = [row["ratio"] for row in found[1:]]
    result |= {"steps": found, "ratio": statistics.median(ratios) if ratios else None}
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wall time of generation / lower bound: {result['ratio']} (target {TARGET})")
    return 0 if ratios else 1


if __name__ == "__main__":
    sys.exit(main())
