"""Held-out accuracy over wall time on one GPU: Lockstep with its own engine and with vLLM, TRL with vLLM.

    python benchmarks/learning_curves.py data --out DATA      # needs reasoning-gym, but no GPU
    python benchmarks/learning_curves.py run --model FOLDER --data DATA --gpus 0 1 2 3 --out FILE.json
    python benchmarks/learning_curves.py show FILE.json --image docs/images/learning.svg

The protocol, written down before the runs (constants are in learning_sides.py):

- Model: SmolLM2-135M-Instruct, the weights of `bundled:smollm2-135m`. Lockstep trains bfloat16 modules with
  float32 master weights. TRL trains float32 weights under bfloat16 autocast, because AdamW on bfloat16
  weights rounds most updates of this size away. vLLM runs in bfloat16 on both sides.
- Tasks: five kinds of reasoning-gym (KINDS) in equal shares, the questions as they are, under the model's
  chat template. 1,024 held-out questions, none of which occurs in training.
- Reward of both sides: 1 if the last number of a completion is the task's answer, else 0 (`reward`). No marks
  for format. Held-out accuracy is its mean over greedy completions.
- A step: 64 prompts, 8 samples each at temperature 1, at most 24 tokens; GRPO with token mean and no KL term,
  one update per batch; AdamW with betas 0.9 and 0.95, no weight decay, gradient norm at most 1, learning
  rate 2e-5 after 2 warm-up steps, falling linearly to 0 over 60 steps. Seeds 0, 1 and 2 decide the sampling
  and which 3,840 training questions a run sees; both sides see the same ones in the same order.
- Every 5 steps the held-out questions are answered by the engine of that side.
- Lockstep otherwise runs with its defaults and the batch sizes of LOCKSTEP. TRL runs with the settings of
  TRL: vLLM in the same process with CUDA graphs, micro-batches of 256, fused AdamW, no gradient
  checkpointing, its default correction of the sampler's logprobs.
- Time is wall time without evaluations, from the first step on and from the launch of the process. The
  figure of merit, per seed: the time until Lockstep has the accuracy that TRL has at 80 % of its gain, over
  TRL's own time to it, with linear interpolation between evaluations. The median of three seeds, from the
  first step on, is the result; the figure from launch stands beside it.
- The gap is |trainer's logprob - sampler's logprob| per token in nats, mean and maximum of every step:
  Lockstep's `logprob_gap`, TRL's `sampling_logp_difference`.
- One process and one GPU per run. A run that has not ended after --seconds is ended; what it has written
  counts, and is marked. A side whose packages are missing is left out, and the result says so.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from learning_sides import PROMPTS, STEPS

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "sums of digits": ("chain_sum", {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1}),
    "sums of two digits": ("chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}),
    "letter counting": ("letter_counting", {"min_words": 3, "max_words": 5}),
    "gcd": ("gcd", {"min_value": 1, "max_value": 40}),
    "equations": ("simple_equations", {"min_terms": 2, "max_terms": 2, "min_value": 1, "max_value": 9}),
}
"""Name -> task of reasoning-gym and its settings. All answers are integers."""
HELD_OUT = 1024
TIMES = ("before", "after")
SIDES = {"native": "Lockstep, native", "vllm": "Lockstep, vLLM", "trl": "TRL, vLLM"}
FIRST_PORT = 29600
BEGIN, END = "<!-- learning:begin -->", "<!-- learning:end -->"
NEEDS = {"native": ["lockstep"], "vllm": ["lockstep", "vllm"], "trl": ["trl", "datasets", "vllm"]}


def main() -> int:
    """Make the data, run the cells, or show a result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    data = commands.add_parser("data")
    data.add_argument("--out", type=Path, required=True)
    run = commands.add_parser("run")
    run.add_argument("--model", required=True, help="folder of the model, bfloat16")
    run.add_argument("--data", type=Path, required=True)
    run.add_argument("--gpus", nargs="+", default=["0"], help="each takes one run at a time; 'cpu' to try")
    run.add_argument("--sides", nargs="+", choices=list(SIDES), default=list(SIDES))
    run.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    run.add_argument(
        "--cells", nargs="+", metavar="SIDE-SEED", help="these runs, in place of sides and seeds"
    )
    run.add_argument("--steps", type=int, default=STEPS, help="other numbers are no result")
    run.add_argument("--prompts", type=int, default=PROMPTS, help="the same")
    run.add_argument("--held-out", type=int, default=HELD_OUT, help="the same")
    run.add_argument("--seconds", type=float, default=300, help="deadline of one run, start-up included")
    run.add_argument("--scratch", type=Path, help="folder of the runs (default: beside --out)")
    run.add_argument("--out", type=Path, required=True)
    show = commands.add_parser("show")
    show.add_argument("files", nargs="+", type=Path, help="a run in a later file replaces an earlier one")
    show.add_argument("--merged", type=Path, help="write one .json.gz of them all")
    show.add_argument("--image", type=Path)
    show.add_argument("--page", type=Path, help="put the tables between the marks of this page")
    args = parser.parse_args()
    return {"data": make_data, "run": run_cells, "show": show_result}[args.command](args)


def make_data(args: argparse.Namespace) -> int:
    """Write held_out.jsonl and train.jsonl: rows with prompt (a conversation), answer and kind."""
    import reasoning_gym

    draw = random.Random(0)
    held_out: list[dict[str, Any]] = []
    train: list[dict[str, Any]] = []
    shares = [HELD_OUT // len(KINDS) + (i < HELD_OUT % len(KINDS)) for i in range(len(KINDS))]
    needed = 3 * STEPS * PROMPTS // len(KINDS) + 1
    for (kind, (task, settings)), share in zip(KINDS.items(), shares, strict=True):
        rows = reasoning_gym.create_dataset(task, seed=1, size=4 * (share + needed), **settings)
        answers = {row["question"]: row["answer"] for row in rows}
        found = [
            {"prompt": [{"role": "user", "content": question}], "answer": answer, "kind": kind}
            for question, answer in answers.items()
        ]
        draw.shuffle(found)
        held_out += found[:share]
        rest = found[share:]
        train += [rest[i % len(rest)] for i in range(needed)]
        print(f"{kind}: {len(found)} questions, {share} held out")
    args.out.mkdir(parents=True, exist_ok=True)
    for name, rows in (("held_out", held_out), ("train", train)):
        draw.shuffle(rows)
        (args.out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return 0


def run_cells(args: argparse.Namespace) -> int:
    """Each side with each seed, one run per GPU at a time; 1 if one failed or is missing."""
    cells = [(side, seed) for side in reversed(args.sides) for seed in args.seeds]  # the slowest first
    if args.cells:
        cells = [(side, int(seed)) for side, _, seed in (cell.partition("-") for cell in args.cells)]
    sides = list(dict.fromkeys(side for side, _ in cells))
    scratch = args.scratch or args.out.parent / f"{args.out.stem}-runs"
    missing = {
        side: [name for name in NEEDS[side] if importlib.util.find_spec(name) is None] for side in sides
    }
    if args.gpus == ["cpu"]:
        missing = {side: [name for name in names if name != "vllm"] for side, names in missing.items()}
    report: dict[str, Any] = {
        "command": ["benchmarks/learning_curves.py", *sys.argv[1:]],
        "left_out": {side: names for side, names in missing.items() if names},
        "machine": machine(),
        "seconds": args.seconds,
        "runs": [],
    }
    for side, names in report["left_out"].items():
        print(f"left out: {side}, no package {', '.join(names)}", flush=True)
    waiting = [cell for cell in cells if not missing[cell[0]]]
    free, running = list(args.gpus), {}
    while waiting or running:
        while waiting and free:
            cell = waiting.pop(0)
            running[cell] = start(args, scratch, *cell, gpu=free.pop(0))
        time.sleep(0.2)
        for cell, (job, process) in list(running.items()):
            late = time.time() - job["launched"] > args.seconds
            if process.poll() is None and not late:
                continue
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            del running[cell]
            free.append(job["gpu"])
            report["runs"].append(run := outcome(job, process.returncode, cut=late))
            args.out.write_text(json.dumps(report) + "\n")
            brief = {name: value for name, value in run.items() if not isinstance(value, list)}
            print(json.dumps(brief), *run.get("log", []), sep="\n", flush=True)
    print("\n".join(summary(report)), flush=True)
    return int(bool(report["left_out"]) or any(run["returncode"] for run in report["runs"]))


def start(args: argparse.Namespace, scratch: Path, side: str, seed: int, *, gpu: str) -> tuple[Any, Any]:
    """Launch one run."""
    folder = scratch / f"{side}-{seed}"
    folder.mkdir(parents=True)
    job = {
        "side": side,
        "seed": seed,
        "gpu": gpu,
        "folder": str(folder),
        "model": args.model,
        "data": str(args.data.resolve()),
        "steps": args.steps,
        "prompts": args.prompts,
        "held_out": args.held_out,
        "launched": time.time(),
    }
    variables = {
        "CUDA_VISIBLE_DEVICES": "" if gpu == "cpu" else gpu,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if side == "trl":  # its vLLM's port, which would be 29500 in every run
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(FIRST_PORT + 16 * seed)}
    command = [sys.executable, str(Path(__file__).with_name("learning_sides.py")), json.dumps(job)]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | variables, start_new_session=True
        )
    return job, process


def outcome(job: dict[str, Any], returncode: int, *, cut: bool) -> dict[str, Any]:
    """The curves of one run, from its metrics.jsonl. In `evaluations`, seconds count steps only, wall_seconds
    everything since the launch, and evaluating_seconds the evaluations until then."""
    folder = Path(job["folder"])
    metrics = folder / "run" / "metrics.jsonl"
    rows = list(map(json.loads, metrics.read_text().splitlines())) if metrics.exists() else []
    found: dict[str, Any] = {name: job[name] for name in ("side", "seed", "gpu")}
    found |= {"returncode": returncode, "cut": cut, "wall_seconds": round(time.time() - job["launched"], 2)}
    if returncode:
        found["log"] = (folder / "log").read_text().splitlines()[-40:]
    steps = [row for row in rows if "reward/mean" in row]
    if not steps:
        return found
    begun = steps[0]["timestamp"] - steps[0]["time/step"]  # of the first step
    evaluating, clock, points = steps[0]["time/evaluate"], 0.0, []  # a step's row has what came before it
    for previous, row in zip([rows[0], *rows], rows, strict=False):
        if "reward/mean" in row:
            clock += row["time/step"]
        elif "evaluation" in row:
            evaluating += row["timestamp"] - previous["timestamp"]
            points.append(
                {
                    "step": row["step"],
                    "accuracy": row["eval/mean_reward"],
                    "seconds": round(clock, 3),
                    "wall_seconds": round(row["timestamp"] - job["launched"], 3),
                    "evaluating_seconds": round(evaluating, 3),
                    "tokens": row["eval/mean_completion_tokens"],
                }
            )
    names = ("logprob_gap_mean", "logprob_gap_max")
    gaps = {name: [row[name] for row in steps if row.get(name) is not None] for name in names}
    found |= {
        "startup_seconds": round(begun - job["launched"] - points[0]["evaluating_seconds"], 2),
        "step_seconds": round(statistics.median(row["time/step"] for row in steps), 4),
        "steps": len(steps),
        "before": points[0]["accuracy"],
        "after": points[-1]["accuracy"],
        "gap_mean": statistics.fmean(gaps["logprob_gap_mean"]) if gaps["logprob_gap_mean"] else None,
        "gap_max": max(gaps["logprob_gap_max"], default=None),
        "by_kind": by_kind(folder / "run" / "rollouts", Path(job["data"])),
        "evaluations": points,
        "rewards": [round(row["reward/mean"], 4) for row in steps],
        "gaps": gaps["logprob_gap_mean"],
        "seconds_of_steps": [round(row["time/step"], 4) for row in steps],
        "prompt_tokens": statistics.fmean(row["rollout/prompt_tokens_mean"] for row in steps),
        "completion_tokens": [round(row["rollout/completion_tokens_mean"], 2) for row in steps],
        "grad_norms": [round(row["grad_norm"], 4) for row in steps],
    }
    return found


def by_kind(folder: Path, data: Path) -> dict[str, dict[str, float]]:
    """Accuracy of each kind before and after, from the completions that a side wrote down."""
    rows = [json.loads(line) for line in (data / "held_out.jsonl").read_text().splitlines()]
    kinds = [(row["prompt"][0]["content"], row["kind"]) for row in rows]
    found: dict[str, dict[str, float]] = {}
    for name in TIMES:
        marks: dict[str, list[float]] = {}
        file = folder / f"evaluation-{name}.jsonl"
        for row in map(json.loads, file.read_text().splitlines() if file.exists() else []):
            kind = next(kind for question, kind in kinds if question in row["prompt"])
            marks.setdefault(kind, []).append(row["reward"])
        found[name] = {kind: round(statistics.fmean(values), 4) for kind, values in sorted(marks.items())}
    return found


def machine() -> dict[str, Any]:
    """GPUs and versions."""
    from importlib.metadata import PackageNotFoundError, version

    found: dict[str, Any] = {}
    for name in ("torch", "transformers", "vllm", "trl", "accelerate", "lockstep-rl"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        found["gpus"] = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split("\n")
    except (OSError, subprocess.CalledProcessError):
        found["gpus"] = []
    return found


def show_result(args: argparse.Namespace) -> int:
    """Print the tables of a result, and draw it."""
    report = merged([json.loads(read(file)) for file in args.files])
    print("\n".join(summary(report)))
    if args.page:
        text = args.page.read_text(encoding="utf-8")
        before, after = text.split(BEGIN)[0], text.split(END)[1]
        tables = "\n".join(summary(report))
        args.page.write_text(f"{before}{BEGIN}\n\n{tables}\n\n{END}{after}", encoding="utf-8")
    if args.merged:
        args.merged.write_bytes(gzip.compress(json.dumps(report).encode(), mtime=0))
    if args.image:
        draw(report, args.image)
    return 0


def read(file: Path) -> str:
    """The text of a .json or .json.gz file."""
    content = file.read_bytes()
    return (gzip.decompress(content) if file.suffix == ".gz" else content).decode()


def merged(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """One report of the runs of several: the last one of each side and seed, without folders and logs."""
    runs = {(run["side"], run["seed"]): run for report in reports for run in report["runs"]}
    for run in runs.values():
        run.pop("log", None)
    return {
        **reports[-1],
        "command": [[Path(word).name for word in report["command"]] for report in reports],
        "seconds": [report.get("seconds", 150) for report in reports],
        "runs": list(runs.values()),
    }


def summary(report: dict[str, Any]) -> list[str]:
    """A row per run, and the ratios."""
    lines = [
        "| side | seed | steps | before | after | step s | start-up s | gap mean | gap max |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    runs = sorted(
        (run for run in report["runs"] if "after" in run),
        key=lambda r: (list(SIDES).index(r["side"]), r["seed"]),
    )
    for run in runs:
        gaps = ["" if run[name] is None else f"{run[name]:.2g}" for name in ("gap_mean", "gap_max")]
        lines.append(
            f"| {SIDES[run['side']]} | {run['seed']} | {run['steps']}{', cut' if run['cut'] else ''} "
            f"| {run['before']:.3f} | {run['after']:.3f} | {run['step_seconds']:.2f} "
            f"| {run['startup_seconds']:.0f} | {' | '.join(gaps)} |"
        )
    ratios = []
    for side in ("native", "vllm"):
        for clock, words in (("seconds", "from the first step"), ("from_launch", "from launch")):
            each = list(ratios_of(runs, side, clock))
            if each:
                listed = ", ".join("never" if ratio == float("inf") else f"{ratio:.2f}" for ratio in each)
                ratios.append(f"| {SIDES[side]} | {words} | {statistics.median(each):.2f} | {listed} |")
    if ratios:
        lines += ["", "| time to TRL's accuracy at 80 % of its gain | clock | of TRL's, median | seeds |"]
        lines += ["|---|---|---:|---|", *ratios]
    whole = [run for run in runs if run["side"] == "native" and run["steps"] == STEPS]
    if whole:
        lines += ["", "| kind (Lockstep, native, mean of the seeds) | before | after |", "|---|---:|---:|"]
        lines += [
            f"| {kind} | "
            + " | ".join(f"{statistics.fmean(r['by_kind'][n][kind] for r in whole):.2f}" for n in TIMES)
            + " |"
            for kind in KINDS
        ]
    return lines


def ratios_of(runs: list[dict[str, Any]], side: str, clock: str) -> Iterator[float]:
    """Time of `side` over TRL's to the accuracy that TRL has at 80 % of its gain, for each seed with a whole
    run of TRL that gains; infinite where the side never has it."""
    cells = {(run["side"], run["seed"]): run for run in runs}
    for seed in sorted({run["seed"] for run in runs}):
        own, trl = cells.get((side, seed)), cells.get(("trl", seed))
        if own and trl and trl["steps"] == STEPS and trl["after"] > trl["before"]:
            target = trl["before"] + 0.8 * (trl["after"] - trl["before"])
            yield reached(own, target, clock) / reached(trl, target, clock)


def reached(run: dict[str, Any], target: float, clock: str) -> float:
    """Seconds until the curve first has `target`, with linear interpolation."""
    points = [(time_of(run, point, clock), point["accuracy"]) for point in run["evaluations"]]
    for (left, low), (right, high) in pairwise(points):
        if high >= target > low:
            return left + (right - left) * (target - low) / (high - low)
    return float("inf")


def time_of(run: dict[str, Any], point: dict[str, Any], clock: str) -> float:
    """Seconds of an evaluation: from the first step, or from the launch."""
    own: float = point["seconds"]
    return own + run["startup_seconds"] if clock == "from_launch" else own


def draw(report: dict[str, Any], image: Path) -> None:
    """Held-out accuracy over seconds, all seeds, a cross where a run was cut, and the gap over steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "learning_curves"
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.2), constrained_layout=True)
    colours = dict(zip(SIDES, ("tab:blue", "tab:cyan", "tab:orange"), strict=True))
    named: set[str] = set()
    for run in sorted(report["runs"], key=lambda run: list(SIDES).index(run["side"])):
        if "evaluations" not in run:
            continue
        side = run["side"]
        label = None if side in named else SIDES[side]
        named.add(side)
        points = [(point["seconds"], point["accuracy"]) for point in run["evaluations"]]
        left.plot(*zip(*points, strict=True), color=colours[side], label=label, linewidth=1.2)
        if run["cut"]:
            left.plot(*points[-1], "x", color=colours[side])
        steps = range(1, 1 + len(run["gaps"]))
        right.plot(steps, run["gaps"], color=colours[side], label=label, linewidth=1.2)
    left.set(xlabel="seconds of training, one H100", ylabel="held-out accuracy")
    left.legend(fontsize=8)
    right.set(xlabel="step", ylabel="mean logprob gap, nats")
    figure.savefig(image, metadata={"Date": None} if image.suffix == ".svg" else None, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
