"""How long does a run stand still when one of its ranks is killed, phase by phase, and is it the same run?

    python benchmarks/heal.py                                        # two ranks of a tiny model on CPUs
    python benchmarks/heal.py --device cuda --model shape:llama-3.1-8b --layers 12 --dtype bfloat16 \
        --kill-after 3 --steps 6 --json benchmarks/results/heal-h200-x2.json

Three runs of GRPO with the same settings under fsdp2: one that nobody disturbs, without copies (what a copy
costs is the difference of the steps' times); one with cluster.peer_copy; and one with it of which a rank gets
SIGKILL after `--kill-after` steps. No run saves a checkpoint before its end, so that there is none to read.
Compared are the bytes of the exported weights and every metric of every step but times, memory and
throughput. Phases are those of summary.json: recovery_seconds. The exit status is 0 when all runs are equal.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from kills import logged_steps, outcome

from lockstep.processes.programs import role_of
from lockstep.ranks.environment import TURN


def main(argv: Sequence[str]) -> int:
    """Run, kill, compare, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--model", default="shape:tiny-llama")
    parser.add_argument("--layers", type=int, help="of the model; None: all of them")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--kill-after", type=int, default=3, help="steps that are logged before the kill")
    parser.add_argument("--rank", type=int, help="that is killed; None: the last")
    parser.add_argument("--cluster", choices=["none", "local"], default="none", help="local: under Ray")
    parser.add_argument("--deadline", type=float, default=580.0, help="seconds of each run")
    parser.add_argument("--out", type=Path, help="keeps the runs; None: a folder that is removed")
    parser.add_argument("--skip", nargs="*", default=[], choices=["plain", "copied"], help="runs left out")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--set", nargs="*", default=[], metavar="FLAG", help="more flags, without their --")
    args = parser.parse_args(argv)
    root = args.out or Path(tempfile.mkdtemp(prefix="lockstep-heal-"))
    try:
        result = {"command": ["benchmarks/heal.py", *argv], "machine": machine(args.device)}
        result |= runs(args, root)
    finally:
        if args.out is None:
            shutil.rmtree(root, ignore_errors=True)
    print(json.dumps(result, indent=1))
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if all(result["equal"].values()) else 1


def machine(device: str) -> dict[str, Any]:
    """What the figures are of."""
    found = {"cpus": f"{platform.machine()}, {os.cpu_count()} CPUs", "torch": torch.__version__}
    return found | ({"gpu": torch.cuda.get_device_name()} if device == "cuda" else {})


def runs(args: argparse.Namespace, root: Path) -> dict[str, Any]:
    """Make the runs; times of all, phases, and which are equal."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "run.toml").write_text(RUN.format(device=args.device, model=args.model, dtype=args.dtype))
    command = [sys.executable, "-m", "lockstep", "train", str(root / "run.toml")]
    command += ["--ranks", str(args.ranks)] if args.cluster == "none" else ["--cluster", "local"]
    command += ["--steps", str(args.steps), "--cluster.slots", str(args.ranks)]
    command += [] if args.layers is None else ["--model.num-layers", str(args.layers)]
    command += [f"--{word}" if "." in word else word for word in args.set]
    copies = ["--cluster.peer-copy"]
    found: dict[str, Any] = {"seconds_per_step": {}, "copy_seconds": {}, "equal": {}}
    expected: dict[str, Any] | None = None
    for name, flags in (("plain", []), ("copied", copies), ("killed", copies)):
        if name in args.skip:
            continue
        run, log = root / name, root / f"{name}.log"
        with log.open("wb") as out:
            process = subprocess.Popen([*command, *flags, "--run-dir", str(run)], stdout=out, stderr=out)
        try:
            if name == "killed":
                kill(process, run, args)
            status = process.wait(args.deadline)
        finally:
            end(process)
        if status:
            raise SystemExit(f"{name}: exit status {status}: {log.read_text()[-3000:]}")
        found["seconds_per_step"][name], found["copy_seconds"][name] = times(run)
        mine = outcome(run)
        expected = expected or mine
        found["equal"][name] = mine == expected
        print(f"{name}: {found['seconds_per_step'][name]} s a step", flush=True)
    said = [line for line in (root / "killed.log").read_text().splitlines() if "lockstep: rank" in line]
    summary = json.loads((root / "killed/summary.json").read_text())
    kept = ("restarts", "restored_from", "checkpoints_read", "copies_left_out", "recovery_seconds")
    found |= {"said": said} | {name: summary.get(name) for name in kept}
    found["stood_still_seconds"] = sum((summary.get("recovery_seconds") or {}).values())
    return found


def kill(process: subprocess.Popen[bytes], run: Path, args: argparse.Namespace) -> None:
    """SIGKILL for one rank, at a random moment of the step after `kill_after` steps."""
    deadline = time.monotonic() + args.deadline
    while logged_steps(run) < args.kill_after:
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"no step {args.kill_after} to kill a rank after")
        time.sleep(0.01)
    time.sleep(random.Random(args.kill_after).uniform(0.0, times(run)[0]))
    rank = args.ranks - 1 if args.rank is None else args.rank
    for child in psutil.process_iter():  # under Ray a rank is not below the command
        try:
            is_rank = str(run) in child.cmdline() and child.environ().get("RANK") == str(rank)
            if TURN in child.environ():  # it waits to be one
                continue
            if is_rank and role_of(child) != "guard":
                os.kill(child.pid, signal.SIGKILL)
                return
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    raise SystemExit(f"no process of rank {rank} found")


def end(process: subprocess.Popen[bytes]) -> None:
    """End a run that has not ended."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def times(run: Path) -> tuple[float, float]:
    """Medians over the steps after the first: of a step with its copy, and of what the loop waits for one."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "time/step" in line]
    later = steps[1:] or steps
    copies = [line.get("time/peer_copy", 0.0) for line in later]
    totals = [line["time/step"] + copy for line, copy in zip(later, copies, strict=True)]
    return round(statistics.median(totals), 3), round(statistics.median(copies), 3)


RUN = """
kind = "grpo"
[model]
name = "{model}"
dtype = "{dtype}"
[data]
source = "ids"
max_prompt_tokens = 64
[rollout]
prompts_per_step = 8
group_size = 4
[rollout.sampling]
max_tokens = 64
ignore_eos = true
[[rewards]]
name = "ids"
[engine]
name = "native"
[train]
backend = "fsdp2"
device = "{device}"
lr = 1e-5
token_budget = 2048
batch_invariant = true
deterministic = true
execution = "eager"
[eval]
before = false
after = false
[checkpoint]
every = 0
save_at_end = false
[log]
tensorboard = false
"""

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
