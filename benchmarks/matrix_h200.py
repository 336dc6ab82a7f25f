"""The compatibility matrix of an 8B policy on one H200: the 8 cells of flash x compile x packing, bfloat16.

    python benchmarks/matrix_h200.py make --out /tmp/inputs
    python benchmarks/matrix_h200.py run --inputs /tmp/inputs --out benchmarks/results/matrix-h200

`make` writes recordings: the shipped corpus and the length set rl_512 (lengths.json: random ids, documents in
micro-batches that fit 4,096 slots also when padded), whole and thinned out, and rl_32 as one input. `run`
calls `lockstep matrix` and `lockstep replay` on them, each with its log, most important first; what is done
is not run again, so that it can be called in parts. With --parallel, times say nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import torch

from lockstep.packing import PackLimits, plan_micro_batches
from lockstep.recording import Recording, RecordingWriter
from lockstep.schema.batch import PackedBatch, PolicySample
from lockstep.schema.recording import InputMeta, RecordedInput

PROMPT_SHARE = 0.25
MODEL = "--model shape:llama-3.1-8b --dtype bfloat16"
CAPACITY, CHECKPOINTING = "--capacity 4096", "--activation-checkpointing"
FLASH, ALL_OFF = "--flash-attn --compile --packing", "--preset all-off"
SAMPLED = "--gradient-entries 65536 --gradient-inputs 40"
IN_BF16 = "--reference dtype=bfloat16"
CELLS = {
    # the eight, longest first
    "sdpa-compile-packed": "--no-flash-attn --compile --packing",
    "varlen-compile-packed": FLASH,
    "sdpa-eager-packed": "--no-flash-attn --no-compile --packing",
    "sdpa-eager-padded": "--no-flash-attn --no-compile --no-packing",
    "varlen-compile-padded": "--flash-attn --compile --no-packing",
    "sdpa-compile-padded": "--no-flash-attn --compile --no-packing",
    "varlen-eager-packed": "--flash-attn --no-compile --packing",
    "varlen-eager-padded": "--flash-attn --no-compile --no-packing",
}
JOBS: dict[str, tuple[str, str, str]] = {
    # name: command, recording, flags
    "all-cells-32-layers": ("matrix", "thin", f"{CAPACITY} {CHECKPOINTING} {SAMPLED} {IN_BF16}"),
    "rl_32-default-8-layers": ("replay", "rl_32", f"--num-layers 8 {ALL_OFF} {CHECKPOINTING}"),
    "rl_32-varlen-compile-packed-8-layers": ("replay", "rl_32", f"--num-layers 8 {FLASH} {CHECKPOINTING}"),
    "all-cells-2-layers": ("matrix", "thin", f"--num-layers 2 {CAPACITY} {CHECKPOINTING} {SAMPLED}"),
    "all-cells-32-layers-no-checkpointing": ("matrix", "few", f"{CAPACITY} {SAMPLED} {IN_BF16}"),
}
JOBS |= {
    f"{cell}-{layers}-layers": ("replay", "whole", f"{depth} {CAPACITY} {flags} {CHECKPOINTING}")
    for layers, depth in ((32, ""), (2, "--num-layers 2"))
    for cell, flags in CELLS.items()
}
JOBS |= {
    f"zero-{stage}-{mode or 'eager'}-{kernel}": (
        "replay",
        "rl_512",
        f"--num-layers 4 --max-inputs 5 --zero-stage {stage} {'--deepcompile' if mode else ''} {flags}",
    )
    for kernel, flags in (("sdpa", "--no-flash-attn"), ("varlen", "--flash-attn --packing"))
    for mode in ("deepcompile", "")
    for stage in (1, 3)
}


def samples_of(lengths: Sequence[int], *, vocab_size: int) -> list[PolicySample]:
    """One document per length; what follows the first quarter is trained on, advantages are +1 and -1."""
    samples = []
    for index, length in enumerate(lengths):
        generator = torch.Generator().manual_seed(index)
        mask = torch.arange(length) >= int(length * PROMPT_SHARE)
        mask[-1] = False
        samples.append(
            PolicySample(
                token_ids=torch.randint(0, vocab_size, (length,), generator=generator),
                loss_mask=mask,
                sample_id=index,
                rollout_logprobs=torch.where(mask, -1.0, 0.0),
                advantages=torch.where(mask, 1.0 if index % 2 == 0 else -1.0, 0.0),
            )
        )
    return samples


def batches_of(lengths: Sequence[int], limits: PackLimits, *, vocab_size: int) -> list[PackedBatch]:
    """Their micro-batches, tokens weighted alike."""
    samples = samples_of(lengths, vocab_size=vocab_size)
    trained = sum(sample.num_trained for sample in samples)
    return plan_micro_batches(samples, [sample.loss_mask.float() / trained for sample in samples], limits)


def write(out: Path, batches: Sequence[PackedBatch]) -> None:
    """Each input an optimizer step of its own, with the header of the shipped corpus."""
    corpus = Recording.open(None)
    longest = max(max(batch.lengths) for batch in batches)
    header = dataclasses.replace(
        corpus.header,
        capacity={
            "token_budget": max(batch.num_slots for batch in batches),
            "max_seqlen": longest,
            "max_documents": max(len(batch.sample_ids) for batch in batches),
        },
        world_size=1,
        mesh={},
        notes={"script": "benchmarks/matrix_h200.py"},
    )
    with RecordingWriter(out, header) as writer:
        for index, batch in enumerate(batches):
            meta = InputMeta(step=index, update=index, micro_batch=0, num_micro_batches=1)
            writer.add([RecordedInput(meta=meta, batch=batch, outputs=None)])
    tokens = sum(batch.num_tokens for batch in batches)
    print(f"{out}: {len(batches)} inputs, {tokens} tokens, longest document {longest}", flush=True)


def make(out: Path) -> None:
    """whole: the corpus and rl_512. thin and few: every so many inputs of both."""
    lengths = json.loads((Path(__file__).parent / "lengths.json").read_text())
    corpus = Recording.open(None)
    vocab_size = corpus.header.vocab_size
    own = [recorded.batch for recorded in corpus]
    rl_512 = batches_of(
        lengths["rl_512"], PackLimits(token_budget=4096, layout="padded"), vocab_size=vocab_size
    )
    budget = sum(lengths["rl_32"])
    write(out / "whole", own + rl_512)
    write(out / "thin", own[::44] + rl_512[::9])
    write(out / "few", own[::200] + rl_512[::40])
    write(out / "rl_512", rl_512[5::9])
    rl_32 = batches_of(lengths["rl_32"], PackLimits(token_budget=budget), vocab_size=vocab_size)
    write(out / "rl_32", rl_32 * 6)  # the first one warms up


def run(args: argparse.Namespace) -> None:
    """Every job that is not done, each with a deadline; results.json keeps the ends."""
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "results.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    names = args.only.split(",") if args.only else list(JOBS)
    todo = [name for name in names if results.get(name, {}).get("exit") not in (0, 1)]
    with ThreadPoolExecutor(args.parallel) as pool:
        running = [pool.submit(run_job, name, args) for name in todo]
        for name, ending in (future.result() for future in as_completed(running)):
            results[name] = ending
            path.write_text(json.dumps(results, indent=2) + "\n")


def run_job(name: str, args: argparse.Namespace) -> tuple[str, dict[str, object]]:
    """Run one job as a process with its log, and say how it ended."""
    command, recording, flags = JOBS[name]
    words = [command, str(args.inputs / recording), *shlex.split(f"{MODEL} {flags} {args.extra}")]
    words += ["--quiet", "--out", str(args.out / name)]
    words += ["--resume"] if command == "matrix" and (args.out / name).exists() else []
    started = time.perf_counter()
    with (args.out / f"{name}.log").open("a") as log:
        print("lockstep", *words, file=log, flush=True)
        argv = [sys.executable, "-m", "lockstep", *words]
        try:
            status = subprocess.run(argv, stdout=log, stderr=log, timeout=args.timeout).returncode
        except subprocess.TimeoutExpired:
            status = 124
    seconds = round(time.perf_counter() - started, 1)
    lines = (args.out / f"{name}.log").read_text().splitlines()
    verdict = next((line for line in reversed(lines) if line.startswith(("matrix: ", "replay: "))), lines[-1])
    print(f"{name}: exit {status}, {seconds} s: {verdict}", flush=True)
    return name, {"exit": status, "seconds": seconds, "command": shlex.join(["lockstep", *words])}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    inputs = commands.add_parser("make", help="write the recordings")
    inputs.add_argument("--out", type=Path, required=True)
    jobs = commands.add_parser("run", help="run the jobs that are not done")
    jobs.add_argument("--inputs", type=Path, required=True)
    jobs.add_argument("--out", type=Path, required=True)
    jobs.add_argument("--only", default="", help="names of jobs, joined by commas")
    jobs.add_argument("--parallel", type=int, default=1, metavar="N", help="N jobs at a time (1)")
    jobs.add_argument("--timeout", type=float, default=900.0, help="seconds of one job")
    jobs.add_argument("--extra", default="", help="flags for every job, such as --max-inputs 2")
    args = parser.parse_args()
    if args.command == "make":
        make(args.out)
    else:
        run(args)


if __name__ == "__main__":
    main()
