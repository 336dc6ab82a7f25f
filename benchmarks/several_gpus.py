"""GRPO on several GPUs: the default path's parity, the step of 8B, and how a step shrinks with GPUs.

    python benchmarks/several_gpus.py parity --gpus 4 --out benchmarks/results/several-gpus-h100-x4.json
    python benchmarks/several_gpus.py 8b scaling --gpus 4 --out FILE
    python benchmarks/several_gpus.py parity --gpus 2 --cpu          # the same runs, tiny, on a CPU

Every run is `lockstep train grpo` in a process of its own, on ids and random weights: prompts of 4 to 16
tokens, groups of 8, 512 tokens a sample, the end ignored. It is planned for 1,000 steps and killed after a
few; figures are medians over the steps past the first.

A parity row passes if the gap between trainer and engine is exactly 0 in every step, and the norm of the
first gradient is within 2 % of the eager, packed run on one GPU. The samples are the same there, because the
engine is batch-invariant; what differs is the order of sums. A row of `split` (tensor parallel, and a ring
that gathers keys) passes if every gap is 0.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

COMMON = """
    --data.source ids --rewards ids --data.max-prompt-tokens 140 --rollout.group-size 8
    --rollout.sampling.ignore-eos true --train.lr 1e-6 --eval.before false --eval.after false
    --checkpoint.save-at-end false --checkpoint.export-at-end false --checkpoint.every 0
    --log.tensorboard false
"""
BIG, SMALL, TINY = "shape:llama-3.1-8b", "shape:llama-3.2-1b", "shape:tiny-llama"
RELATIVE = 0.02


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run."""

    name: str
    gpus: int
    flags: tuple[str, ...]
    steps: int = 4
    """That are measured."""
    planned: int = 1000
    """That the run is started with; 0: as many as are measured."""
    seconds: int = 180
    cell: dict[str, str] = field(default_factory=dict)


def jobs(part: str, *, gpus: int, model: str | None, tokens: int, own: Sequence[str]) -> Iterator[Job]:
    """The runs of a part."""
    counts = [n for n in (1, 2, 4, 8) if n <= gpus]
    if part == "parity":
        small = model or SMALL
        few = ("--rollout.prompts-per-step", "8", "--rollout.sampling.max-tokens", str(min(tokens, 64)))
        layers = () if small == TINY else ("--model.num-layers", "4")
        for n in counts:
            for execution in ("eager", "compile"):
                for layout in ("packed", "shared"):
                    cell = {"execution": execution, "layout": layout}
                    named = (f"--train.{axis}={value}" for axis, value in cell.items())
                    flags = ("--model.name", small, *layers, *few, *backend(n), *named, *own)
                    name = f"parity {n} {execution} {layout}"
                    yield Job(name=name, gpus=n, flags=flags, steps=2, planned=0, cell=cell)
    elif part == "8b":
        flags = ("--model.name", model or BIG, "--rollout.prompts-per-step", "16", *length(tokens))
        yield Job(name=f"8b {gpus}", gpus=gpus, flags=(*flags, *backend(gpus), *own), seconds=270)
    elif part == "scaling":
        for n, prompts in [*((n, 32) for n in reversed(counts)), (gpus, 32 * gpus)]:
            flags = ("--model.name", model or SMALL, "--rollout.prompts-per-step", str(prompts))
            yield Job(
                name=f"1b {n} gpus, {prompts} prompts",
                gpus=n,
                flags=(*flags, *length(tokens), *backend(n), *own),
            )
    elif part == "split":
        layers = ("--model.name", model or BIG, *(() if model == TINY else ("--model.num-layers", "8")))
        for name, shape in (("1b", ("--model.name", model or SMALL)), ("8b, 8 layers", layers)):
            for axis, n in itertools.product(("tp", "ring"), dict.fromkeys((2, gpus))):
                flags = (*shape, "--rollout.prompts-per-step", "32", *length(tokens), *backend(gpus))
                split = (f"--train.{axis}", str(n))
                yield Job(name=f"{name}, {axis} {n}", gpus=gpus, flags=(*flags, *split, *own), steps=3)


def length(tokens: int) -> tuple[str, ...]:
    """The flag of completions of so many tokens."""
    return ("--rollout.sampling.max-tokens", str(tokens))


def backend(ranks: int) -> tuple[str, ...]:
    """Flags of a run on so many ranks."""
    return ("--ranks", str(ranks))


def run(job: Job, *, folder: Path, devices: Sequence[int], cpu: bool) -> dict[str, Any]:
    """Run one job on these devices; its figures, or how it ended."""
    place = folder / job.name.replace(" ", "-").replace(",", "")
    kind = (
        ("--model.dtype", "float32", "--train.device", "cpu", "--train.batch-invariant", "true")
        if cpu
        else ()
    )
    command = [sys.executable, "-m", "lockstep", "train", "grpo", *COMMON.split()]
    command += ["--steps", str(job.planned or job.steps), "--run-dir", str(place), *job.flags, *kind]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, devices)), "HF_HUB_OFFLINE": "1"}
    began = time.monotonic()
    with (folder / f"{place.name}.log").open("w") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)
        status = wait(process, place / "metrics.jsonl", job)
    found: dict[str, Any] = {
        "name": job.name,
        "gpus": job.gpus,
        "command": " ".join(["lockstep", *command[3:]]).replace(str(place), "RUN"),
        "status": status,
        "seconds": round(time.monotonic() - began, 1),
        **job.cell,
    }
    metrics = place / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.is_file() else []
    rows = [row for row in rows if "time/step" in row]
    if rows:
        found |= figures(rows)
    if status:
        found["end"] = (folder / f"{place.name}.log").read_text().splitlines()[-8:]
    print(json.dumps({key: value for key, value in found.items() if key != "command"}), flush=True)
    return found


def wait(process: subprocess.Popen[bytes], metrics: Path, job: Job) -> int:
    """Wait until the run ends, or has done the steps that are measured; the exit status, 0 for the latter."""
    deadline = time.monotonic() + job.seconds
    while process.poll() is None:
        done = len(metrics.read_text().splitlines()) if metrics.is_file() else 0
        late = time.monotonic() > deadline
        if late or (job.planned and done >= job.steps):
            process.kill()  # its ranks end with it
            process.wait()
            return 124 if late else 0
        time.sleep(0.2)
    return process.returncode


def figures(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the steps past warm-up, and the gap and the gradient of each step."""
    warm = rows[1:] or rows

    def median(name: str) -> float:
        values = [row[name] for row in warm if row.get(name) is not None]
        return round(statistics.median(values), 4) if values else float("nan")

    names = [name for name in warm[0] if name.startswith(("time/", "memory/", "throughput/"))]
    return {
        "steps": len(rows),
        "gap_max": [row.get("logprob_gap_max") for row in rows],
        "loss": [row.get("loss") for row in rows],
        "grad_norm": [row.get("grad_norm") for row in rows],
        "first_step_seconds": round(rows[0]["time/step"], 2),
        **{name: median(name) for name in names},
    }


def judged(found: list[dict[str, Any]]) -> None:
    """Mark each parity row as passed or not; see the top."""
    truth = next(
        row for row in found if row["gpus"] == 1 and row["execution"] == "eager" and row["layout"] == "packed"
    )
    for row in found:
        equal = row["status"] == 0 and all(gap == 0 for gap in row["gap_max"])
        near = equal and abs(row["grad_norm"][0] / truth["grad_norm"][0] - 1) <= RELATIVE
        where = {
            "backend": "fsdp2" if row["gpus"] > 1 else "local",
            "engine": "native",
            "attention": "varlen",
        }
        row |= where | {"device": "cuda", "dtype": "bfloat16", "passed": near}


def machine() -> dict[str, Any]:
    """Versions and device."""
    import torch
    import transformers

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {
        "date": datetime.date.today().isoformat(),
        "machine": f"{max(1, torch.cuda.device_count())} x {gpu}",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="+", choices=("parity", "8b", "scaling", "split"))
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--model", help="another shape")
    parser.add_argument("--tokens", type=int, default=512, help="of each completion")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--logs", type=Path, help="keep the logs of runs here")
    parser.add_argument("--only", default="", help="runs whose names match this expression")
    args, own = parser.parse_known_args()
    result: dict[str, Any] = machine() | {"command": " ".join(["python", *sys.argv]), "runs": {}}
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.logs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for part in args.parts:
            model = TINY if args.cpu and args.model is None else args.model
            todo = [
                j
                for j in jobs(part, gpus=args.gpus, model=model, tokens=args.tokens, own=own)
                if re.search(args.only, j.name)
            ]
            # Timed runs have the machine to themselves; parity rows share its GPUs.
            alone = part != "parity"
            found: list[dict[str, Any]] = []
            while todo:
                batch: list[tuple[Job, list[int]]] = []
                free = list(range(args.gpus))
                while todo and len(free) >= todo[0].gpus and not (alone and batch):
                    job = todo.pop(0)
                    batch.append((job, free[: job.gpus]))
                    free = free[job.gpus :]
                with ThreadPoolExecutor(len(batch)) as pool:
                    found += pool.map(
                        lambda pair: run(pair[0], folder=folder, devices=pair[1], cpu=args.cpu), batch
                    )
            if part == "parity":
                judged(found)
                result["cells"] = found
            else:
                result["runs"][part] = found
            if part == "split":
                for row in found:
                    row["passed"] = row["status"] == 0 and all(gap == 0 for gap in row["gap_max"])
            if args.out is not None:
                args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
