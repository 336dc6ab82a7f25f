"""SFT steps of a 1B policy by every train stack on 2 and 4 GPUs: do they agree, how fast, how much memory?

    python benchmarks/train_stacks.py --out benchmarks/results/train_stacks-h200.json

Documents of random ids with the lengths of `rl_512` (lengths.json), 64 of them a step. Each stack is a job of
lockstep_lab.train_parity.worker in processes of its own with a deadline of its own, most important first.
What the JSON has already is not run again, so that it can be called in parts (--budget SECONDS ends a part).

The learning rate is one at which training is stable. At 1e-4 AdamW's first steps throw this random model
about (losses 12.2, 11.9, 12.8, 10.9, 14.0, gradient norms up to 60), and rounding grows to 1.2 % of the loss
within twelve steps: that says something of the steps, not of the stacks.

It works on a CPU too:

    python benchmarks/train_stacks.py --model shape:tiny-llama --device cpu --gpus 2 --documents 4 \\
        --max-length 64 --steps 4 --out /tmp/stacks/cpu.json
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lockstep.algorithms.offline import SFT
from lockstep.config.algorithm import SFTConfig
from lockstep.config.model import ModelConfig
from lockstep.config.train import TrainConfig
from lockstep.errors import ConfigError
from lockstep.observe.files import write_json
from lockstep.packing import PackLimits, plan_micro_batches
from lockstep.schema.batch import TrainSample
from lockstep_lab.suite.job_files import read_lines
from lockstep_lab.suite.machine import machine
from lockstep_lab.suite.process import ProcessRunner, line_that_matters, read_tail
from lockstep_lab.train_parity.compare import compare
from lockstep_lab.train_parity.inputs import inputs_header, model_sizes, write_inputs
from lockstep_lab.train_parity.job import METRICS, InputsSpec, Outcome, ParityJob, StepRow
from lockstep_lab.train_parity.stacks import parse_stack

LENGTHS = Path(__file__).parent / "lengths.json"
ORDER = ("deepspeed:zero2", "fsdp2", "deepspeed:zero3", "fsdp2:tp2", "fsdp2:ring2", "fsdp2:tp2+ring2")
REFERENCE = "local"
LIMIT = 0.01
"""Largest relative difference of a bfloat16 loss."""
WARM_UP = 3
"""Steps that are left out of medians."""
GIB = 1024**3


def parser() -> argparse.ArgumentParser:
    """Every flag."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--model", default="shape:llama-3.2-1b")
    made.add_argument("--dtype", default="bfloat16")
    made.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    made.add_argument("--gpus", default="4,2", help="numbers of ranks, most important first (4,2)")
    made.add_argument("--stacks", default=",".join(ORDER))
    made.add_argument("--steps", type=int, default=12)
    made.add_argument("--documents", type=int, default=64, help="of a step")
    made.add_argument("--max-length", type=int, default=4096)
    made.add_argument("--token-budget", type=int, default=16384)
    made.add_argument("--lr", type=float, default=2e-5)
    made.add_argument("--timeout", type=float, default=75.0, help="seconds of a stack")
    made.add_argument("--budget", type=float, default=480.0, help="seconds after which nothing more is begun")
    made.add_argument("--out", type=Path, required=True, help="the JSON; logs lie in a folder beside it")
    made.add_argument("--work", type=Path, help="inputs and jobs (a folder beside --out)")
    return made


def main() -> int:
    """0: every stack that ran agrees with the reference."""
    args = parser().parse_args()
    args.work = (args.work or args.out.with_suffix(".work")).resolve()
    logs = args.out.with_suffix("")
    for folder in (args.work, logs):
        folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    steps = make_inputs(args)
    rows: dict[str, Any] = read_rows_done(args.out)
    for stack, gpus in plan(args):
        key = f"{stack} on {gpus}"
        if rows.get(key, {}).get("status") == "ok":
            continue
        if time.monotonic() - began > args.budget:
            print(f"{key}: not begun, --budget {args.budget:g} s is spent", flush=True)
            continue
        rows[key] = run(args, stack, gpus, steps, logs=logs)
        print(brief(key, rows[key]), flush=True)
        write_json(args.out, result(args, rows))
    found = result(args, rows)
    write_json(args.out, found)
    print(table(rows))
    print(found["verdict"])
    return 0 if found["ok"] else 1


def plan(args: argparse.Namespace) -> list[tuple[str, int]]:
    """(stack, ranks): the reference behind the first two, then all by importance."""
    counts = [int(word) for word in args.gpus.split(",")]
    found: list[tuple[str, int]] = []
    for gpus in counts:
        for name in args.stacks.split(","):
            try:
                parse_stack(name).ranks_for(gpus, default=gpus)
            except ConfigError:
                continue
            found.append((name, gpus))
    return [*found[:2], (REFERENCE, 1), *found[2:]]


def make_inputs(args: argparse.Namespace) -> list[list[int]]:
    """OUT.work/inputs: micro-batches of each step; the same again when they are there."""
    kept = args.work / "steps.json"
    if kept.exists():
        return json.loads(kept.read_text())
    config = ModelConfig(name=args.model)
    sizes = model_sizes(config)
    lengths = [min(n, args.max_length) for n in json.loads(LENGTHS.read_text())["rl_512"]]
    generator, algorithm = np.random.default_rng(0), SFT(SFTConfig())
    limits = PackLimits(token_budget=args.token_budget, min_packs=max(map(int, args.gpus.split(","))))
    updates = []
    for step in range(args.steps):
        start = step * args.documents
        these = [lengths[(start + i) % len(lengths)] for i in range(args.documents)]
        samples = [document(generator, n, sizes.vocab_size, i) for i, n in enumerate(these)]
        updates.append(plan_micro_batches(samples, algorithm.loss_weights(samples), limits))
    spec = InputsSpec(model=config, token_budget=args.token_budget, max_length=args.max_length, out=args.work)
    header = inputs_header(spec, sizes, algorithm=SFTConfig().model_dump(mode="json"))
    steps = [list(step) for step in write_inputs(args.work / "inputs", header, updates)]
    kept.write_text(json.dumps(steps))
    return steps


def document(generator: np.random.Generator, length: int, vocab_size: int, index: int) -> TrainSample:
    """Ids by Zipf's law over the whole vocabulary, all of them trained on."""
    weights = 1.0 / np.arange(1, vocab_size + 1)
    ids = generator.choice(vocab_size, size=length, p=weights / weights.sum())
    mask = torch.ones(length, dtype=torch.bool)
    mask[-1] = False
    return TrainSample(token_ids=torch.from_numpy(ids), loss_mask=mask, sample_id=index)


def run(
    args: argparse.Namespace, name: str, gpus: int, steps: Sequence[Sequence[int]], *, logs: Path
) -> dict[str, Any]:
    """One stack: its row of the result."""
    stack = parse_stack(name)
    stem = f"{stack.log_stem}-{gpus}"
    out, log = args.work / f"{stem}-{time.time_ns()}", logs / f"{stem}.log"
    out.mkdir()
    job = ParityJob(
        stack=name,
        ranks=gpus,
        device=args.device,
        model=ModelConfig(name=args.model, dtype=args.dtype),
        train=TrainConfig(lr=args.lr, token_budget=args.token_budget, **stack.train_settings()),
        inputs=args.work / "inputs",
        steps=tuple(tuple(step) for step in steps),
        out=out,
        timeout=args.timeout,
        wait=max(10.0, args.timeout / 2),
    )
    command = [sys.executable, "-u", "-m", "lockstep_lab.train_parity.worker", str(job.write())]
    log.unlink(missing_ok=True)
    ending = ProcessRunner().run(command, log=log, timeout=args.timeout + 20)
    rows, outcome = read_lines(out / METRICS, StepRow), Outcome.read(out)
    found: dict[str, Any] = {
        "stack": name,
        "gpus": gpus,
        "status": outcome.status if outcome is not None else "failed",
        "seconds": ending.seconds,
        "folder": out.name,
        "log": f"{logs.name}/{log.name}",
    }
    if outcome is None or outcome.status != "ok" or ending.returncode != 0:
        late = ending.timed_out or ending.returncode == 124
        found["status"] = "hung" if late else "failed" if found["status"] == "ok" else found["status"]
        found["reason"] = (outcome.reason if outcome else "") or line_that_matters(read_tail(log))
    if outcome is not None:
        found |= {key: getattr(outcome, key) for key in ("attention", "dtype", "statement", "load_seconds")}
    return found | measures(rows)


def measures(rows: Sequence[StepRow]) -> dict[str, Any]:
    """Speed and memory of the steps behind the warm-up, and the losses."""
    steady = rows[WARM_UP:] or rows
    if not steady:
        return {}
    times = [row.seconds for row in steady]
    speeds = [row.tokens_per_second for row in steady]
    return {
        "steps": len(rows),
        "tokens": sum(row.tokens for row in rows),
        "ms_per_step": 1000 * statistics.median(times),
        "ms_per_step_range": [1000 * min(times), 1000 * max(times)],
        "tokens_per_second": statistics.median(speeds),
        "peak_gib": max(row.peak_memory_bytes for row in rows) / GIB,
        "rows": [row.model_dump() for row in rows],
    }


def result(args: argparse.Namespace, rows: dict[str, Any]) -> dict[str, Any]:
    """The JSON: rows with their differences to the reference, machine, versions, command."""
    reference = rows.get(f"{REFERENCE} on 1", {})
    for row in rows.values():
        if row is reference or not row.get("rows") or not reference.get("rows"):
            continue
        ours, theirs = ([StepRow.model_validate(r) for r in of["rows"]] for of in (row, reference))
        # logprobs of an earlier part are on another machine
        folders = (args.work / row["folder"], args.work / reference["folder"])
        comparison = compare(ours, theirs, folders=folders, relative_to_loss=True)
        assert comparison is not None
        known = row.get("comparison", {}).get("logprob")
        row["comparison"] = dataclasses.asdict(comparison)
        row["comparison"]["logprob"] = row["comparison"]["logprob"] or known
        row["agrees"] = bool(comparison.loss.max <= LIMIT)
    worse = [key for key, row in rows.items() if row["status"] != "ok" or row.get("agrees") is False]
    done = [row for row in rows.values() if row["status"] == "ok"]
    verdict = f"train stacks: {len(done)} of {len(plan(args))} done, losses within {LIMIT:g}"
    if worse:
        verdict += f" but: {', '.join(worse)}"
    return {
        "ok": not worse,
        "verdict": verdict,
        "command": shlex.join(["python", "benchmarks/train_stacks.py", *sys.argv[1:]]),
        "settings": {key: str(value) for key, value in vars(args).items() if key != "work"},
        "limit": LIMIT,
        "fsdp2_tokens_per_second_over_deepspeed": ratios(rows),
        "warm_up": WARM_UP,
        "machine": machine(args.device)
        | {"gpus": str(torch.cuda.device_count() if args.device == "cuda" else 0)},
        "rows": rows,
    }


def ratios(rows: dict[str, Any]) -> dict[str, float]:
    """fsdp2's speed over each deepspeed stack's on as many GPUs."""
    found = {}
    for key, row in rows.items():
        fsdp2 = rows.get(f"fsdp2 on {row['gpus']}", {})
        if row["stack"].startswith("deepspeed") and row["status"] == fsdp2.get("status") == "ok":
            found[key] = fsdp2["tokens_per_second"] / row["tokens_per_second"]
    return found


def table(rows: dict[str, Any]) -> str:
    """Markdown."""
    lines = [
        "| stack | GPUs | tokens/s | ms/step | peak GiB | max loss difference | max grad norm difference |"
    ]
    lines.append("|---|---:|---:|---:|---:|---:|---:|")
    for row in rows.values():
        if "tokens_per_second" not in row:
            lines.append(f"| {row['stack']} | {row['gpus']} | {row['status']} | | | | |")
            continue
        far = row.get("comparison")
        cells = [f"{far['loss']['max']:.1e}", f"{far['grad_norm']['max']:.1e}"] if far else ["reference", ""]
        cells = [f"{row['ms_per_step']:.1f}", f"{row['peak_gib']:.2f}", *cells]
        lines.append(
            f"| {row['stack']} | {row['gpus']} | {row['tokens_per_second']:,.0f} | {' | '.join(cells)} |"
        )
    return "\n".join(lines)


def read_rows_done(path: Path) -> dict[str, Any]:
    """Of an earlier part."""
    found: dict[str, Any] = json.loads(path.read_text()).get("rows", {}) if path.exists() else {}
    return found


def brief(key: str, row: dict[str, Any]) -> str:
    """One line."""
    if "tokens_per_second" not in row:
        return f"{key}: {row['status']}: {row.get('reason', '')} ({row['seconds']:.0f} s)"
    return (
        f"{key}: {row['status']}, {row['tokens_per_second']:,.0f} tokens/s, {row['ms_per_step']:.1f} ms/step,"
        f" {row['peak_gib']:.2f} GiB, last loss {row['rows'][-1]['loss']:.5f} ({row['seconds']:.0f} s)"
        + (f": {row['reason']}" if row.get("reason") else "")
    )


if __name__ == "__main__":
    sys.exit(main())
