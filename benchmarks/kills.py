"""Does a run that is killed at a random moment end, after --resume, as one that nobody disturbed?

    python benchmarks/kills.py --n 20 --recipe tiny-ppo --resume benchmarks/results/kills.json

One run is left alone. Each of the others gets SIGKILL, the whole process group at once, at a moment drawn
evenly from the time between its directory and the undisturbed run's end, and is then resumed until it ends.
Compared are the bytes of the exported weights of every trained model, and every metric of every step but
times, memory and throughput. --resume adds to what the file holds. The exit status is 0 when every run was
equal.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

DEADLINE = 300.0
"""Seconds that one run may take."""
MEASURED = ("time/", "memory/", "throughput/", "timestamp", "engine/")
"""What a metric's name begins with that is about the machine."""


def main(argv: Sequence[str]) -> int:
    """Kill, resume, compare, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--n", type=int, default=20)
    parser.add_argument("--recipe", default="tiny-ppo")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--resume", type=Path, metavar="FILE")
    parser.add_argument("--set", nargs="*", default=[], metavar="FLAG", help="more flags, without their --")
    args = parser.parse_args(argv)
    settings = [f"--{word}" if "." in word or word in ("steps", "ranks") else word for word in args.set]
    moments = random.Random(args.seed)
    root = Path(tempfile.mkdtemp(prefix="lockstep-kills-"))
    try:
        train = [sys.executable, "-m", "lockstep", "train", "--recipe", args.recipe, *settings]
        train += ["--checkpoint.every", "1", "--log.no-tensorboard"]
        alone = start([*train, "--run-dir", root / "alone"], root / "alone.log")
        until(alone, root / "alone")
        began = time.monotonic()
        wait(alone, root / "alone.log")
        seconds = time.monotonic() - began
        expected = outcome(root / "alone")
        print(f"undisturbed: {seconds:.1f} s, {sorted(expected['weights'])}", flush=True)
        cases = []
        for number in range(args.n):
            cases.append(case(train, root / str(number), moments.uniform(0.0, seconds), expected))
            print(number, json.dumps(cases[-1]), flush=True)
            shutil.rmtree(root / str(number), ignore_errors=True)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    result = {
        "command": ["benchmarks/kills.py", *argv],
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "undisturbed_seconds": round(seconds, 1),
        "cases": cases,
    }
    if args.resume is not None:
        before = json.loads(args.resume.read_text()) if args.resume.is_file() else []
        args.resume.write_text(json.dumps([*before, result], indent=1) + "\n")
    equal = sum(one["equal"] for one in cases)
    print(f"{equal} of {len(cases)} runs ended as the undisturbed one, to the bit")
    return 0 if equal == len(cases) else 1


def case(train: Sequence[Any], run: Path, moment: float, expected: dict[str, Any]) -> dict[str, Any]:
    """Kill one run `moment` seconds after it made its directory, resume it, and compare."""
    log = run.with_suffix(".log")
    process = start([*train, "--run-dir", run], log)
    until(process, run)
    ended = True
    try:
        process.wait(timeout=moment)
    except subprocess.TimeoutExpired:
        ended = False
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    done = logged_steps(run)
    saved = any((run / "checkpoints").glob("step-*"))
    if saved or not done:
        wait(start([*train[:4], "--resume", run], log), log)
    else:  # steps without a checkpoint: --resume refuses, and says to begin anew beside it
        refused = start([*train[:4], "--resume", run], log)
        if not refused.wait(timeout=DEADLINE) or "holds no checkpoint" not in log.read_text():
            raise SystemExit(f"resumed without a checkpoint: {log.read_text()[-2000:]}")
        run = run.with_name(f"{run.name}-anew")
        wait(start([*train, "--run-dir", run], log), log)
    found = outcome(run)
    return {
        "after_seconds": round(moment, 2),
        "had_ended": ended,
        "steps_logged": done,
        "had_checkpoint": saved,
        "equal": found == expected,
        "unequal": [key for key in expected if found[key] != expected[key]],
    }


def start(command: Sequence[Any], log: Path) -> subprocess.Popen[bytes]:
    """Start a command in a process group of its own."""
    with log.open("ab") as out:
        return subprocess.Popen(
            list(map(str, command)), stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )


def wait(process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until it has ended well; SystemExit with its last lines if it has not."""
    try:
        status = process.wait(timeout=DEADLINE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise SystemExit(f"no end after {DEADLINE:.0f} s: {log.read_text()[-2000:]}") from None
    if status:
        raise SystemExit(f"exit status {status}: {log.read_text()[-2000:]}")


def until(process: subprocess.Popen[bytes], run: Path) -> None:
    """Wait until a run has its directory."""
    end = time.monotonic() + DEADLINE
    while not run.is_dir() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.01)


def logged_steps(run: Path) -> int:
    """Steps that a killed run has logged."""
    metrics = run / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.is_file() else []
    return sum('"reward/mean"' in line for line in lines)


def outcome(run: Path) -> dict[str, Any]:
    """Hashes of the exported weights, and the metrics of each step."""
    exports = sorted(run.glob("export*/*.safetensors"))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = {
        f"{row['step']} {row.get('evaluation', '')}": {
            key: value for key, value in row.items() if not key.startswith(MEASURED)
        }
        for row in rows
    }
    return {
        "weights": {
            str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest() for path in exports
        },
        "metrics": steps,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
