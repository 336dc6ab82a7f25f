"""Does a run that is killed at a random moment end, after --resume, as one that nobody disturbed?

    python benchmarks/kills.py --n 20 --recipe tiny-ppo --resume benchmarks/results/kills.json.gz
    python benchmarks/kills.py --n 20 --ranks 2 --target one --resume benchmarks/results/kills.json.gz
    python benchmarks/kills.py --n 20 --ranks 2 --target one --peer-copy --resume benchmarks/results/heal.json
    python benchmarks/kills.py --n 20 --signal INT

One run is left alone. Each of the others gets SIGKILL, at a moment drawn evenly from the time between its
directory and the undisturbed run's end: the whole process group at once, or with --target one a single
process of the run, drawn evenly from those kinds that live then (the command itself, a supervisor, a rank, a
worker that scores). --signal INT or TERM goes to the group, and lets it save. A run that does not end well
by itself is resumed until it does, or begun again by --restart where it has no checkpoint. Compared are the
bytes of the exported weights of every trained model, and every metric of every step but times, memory and
throughput; and the ledger must have lost no sample and trained none twice. The reward is a function that
draws random numbers in a worker. With --ranks the run is fsdp2's. --resume adds to what the file holds. With
--peer-copy no checkpoint is saved before the end, and a death of a rank must heal by itself
(cluster.peer_copy): only a run whose command was killed is begun anew. The exit status is 0 when every run
was equal.
"""

from __future__ import annotations

import argparse
import gzip
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

import psutil
import torch

from lockstep.observe.metrics import check_ledger
from lockstep.processes.programs import role_of
from lockstep.ranks.environment import TURN

DEADLINE = 300.0
"""Seconds that one run may take."""
MEASURED = ("time/", "memory/", "throughput/", "timestamp", "engine/")
"""What a metric's name begins with that is about the machine."""
REWARD = """
import random

def score(prompt, completion, row, **more):
    return float(len(completion) % 7) / 7.0 + random.random()
"""


def main(argv: Sequence[str]) -> int:
    """Kill, resume, compare, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--n", type=int, default=20)
    parser.add_argument("--recipe", default="tiny-ppo")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--ranks", type=int, default=1, help="of fsdp2, if more than one")
    parser.add_argument("--target", choices=["group", "one"], default="group", help="what is killed")
    parser.add_argument("--signal", choices=["KILL", "INT", "TERM"], default="KILL", help="to a group")
    parser.add_argument("--peer-copy", action="store_true", help="heal from host memory")
    parser.add_argument("--resume", type=Path, metavar="FILE")
    parser.add_argument("--set", nargs="*", default=[], metavar="FLAG", help="more flags, without their --")
    args = parser.parse_args(argv)
    settings = [f"--{word}" if "." in word or word in ("steps", "ranks") else word for word in args.set]
    moments = random.Random(args.seed)
    root = Path(tempfile.mkdtemp(prefix="lockstep-kills-"))
    try:
        train = [sys.executable, "-m", "lockstep", "train", "--recipe", args.recipe, *settings]
        train += ["--checkpoint.every", "0" if args.peer_copy else "1", "--log.no-tensorboard"]
        (root / "kills_reward.py").write_text(REWARD)
        os.environ["PYTHONPATH"] = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
        train += ["--rewards", "kills_reward:score"]
        if args.ranks > 1:
            train += ["--ranks", str(args.ranks), "--train.backend", "fsdp2", "--train.device", "cpu"]
            train += ["--cluster.peer-copy"] if args.peer_copy else []
        alone = start([*train, "--run-dir", root / "alone"], root / "alone.log")
        until(alone, root / "alone")
        began = time.monotonic()
        wait(alone, root / "alone.log")
        seconds = time.monotonic() - began
        expected = outcome(root / "alone")
        cases: list[dict[str, Any]] = []
        print(f"undisturbed: {seconds:.1f} s, {sorted(expected['weights'])}", flush=True)
        result: dict[str, Any] = {
            "command": ["benchmarks/kills.py", *argv],
            "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
            "versions": {"torch": torch.__version__, "python": platform.python_version()},
            "undisturbed_seconds": round(seconds, 1),
            "cases": cases,
        }
        known = args.resume is not None and args.resume.is_file()
        before = json.loads(gzip.decompress(args.resume.read_bytes())) if known else []
        for number in range(args.n):
            moment = moments.uniform(0.0, seconds)
            one = moments if args.target == "one" else None
            send = signal.Signals[f"SIG{args.signal}"]
            cases.append(case(train, root / str(number), moment, expected, one=one, send=send))
            print(number, json.dumps(cases[-1]), flush=True)
            shutil.rmtree(root / str(number), ignore_errors=True)
            if args.resume is not None:
                args.resume.write_bytes(gzip.compress(json.dumps([*before, result]).encode(), mtime=0))
    finally:
        shutil.rmtree(root, ignore_errors=True)
    equal = sum(each["equal"] for each in cases)
    print(f"{equal} of {len(cases)} runs ended as the undisturbed one, to the bit")
    return 0 if equal == len(cases) else 1


def case(
    train: Sequence[Any],
    run: Path,
    moment: float,
    expected: dict[str, Any],
    *,
    one: random.Random | None,
    send: signal.Signals,
) -> dict[str, Any]:
    """Kill a run, or one of its processes, `moment` seconds after it made its directory, resume it, and
    compare."""
    log = run.with_suffix(".log")
    process = start([*train, "--run-dir", run], log)
    until(process, run)
    killed, recovered = "nothing: it had ended", True
    try:
        process.wait(timeout=moment)
    except subprocess.TimeoutExpired:
        killed, victim = chosen(process.pid, one)
        if one is None:
            killed += f" by {send.name}"
            os.killpg(process.pid, send)
        else:
            victim.kill()
        recovered = ended(process, log) == 0
    done = logged_steps(run)
    saved = any((run / "checkpoints").glob("step-*"))
    if not recovered:
        run = resumed(train, run, log, saved=saved, done=done)
    found = outcome(run)
    return {
        "after_seconds": round(moment, 2),
        "killed": killed,
        "recovered": recovered and killed != "nothing: it had ended",
        "restarts": restarts(run),
        "steps_logged": done,
        "had_checkpoint": saved,
        "equal": found == expected,
        "unequal": [key for key in expected if found[key] != expected[key]],
    }


def chosen(pid: int, one: random.Random | None) -> tuple[str, psutil.Process]:
    """What to kill of the run that process `pid` is: its kind, and a process."""
    driver = psutil.Process(pid)
    if one is None:
        return "group", driver
    kinds = {"driver": [driver]}
    for child in driver.children(recursive=True):
        try:
            words, waits = " ".join(child.cmdline()), TURN in child.environ()
            guards = role_of(child) == "guard"
        except psutil.NoSuchProcess:
            continue
        if words:
            kinds.setdefault("waiting" if waits else "supervisor" if guards else kind_of(words), []).append(
                child
            )
    kind = one.choice(sorted(kinds))
    return kind, one.choice(kinds[kind])


def kind_of(words: str) -> str:
    """Kind of a process of a run by its command line."""
    return "rank" if "lockstep train" in words else "worker"


def resumed(train: Sequence[Any], run: Path, log: Path, *, saved: bool, done: int) -> Path:
    """Have a run that was killed end well; returns its directory, another one where it had to begin anew."""
    if not (run / "config.toml").is_file():  # killed before it had begun
        wait(start([*train, "--run-dir", run], log), log)
        return run
    ranks = train[train.index("--ranks") : train.index("--ranks") + 2] if "--ranks" in train else []
    again = [*train[:4], "--resume", run, *ranks]
    if saved or not done:
        wait(start(again, log), log)
        return run
    # Steps without a checkpoint: --resume refuses, and says to begin again. Ranks whose command was killed
    # may have saved one since.
    if not ended(start(again, log), log):
        return run
    if f"train --restart {run}" not in log.read_text():
        raise SystemExit(f"resumed without a checkpoint: {log.read_text()[-2000:]}")
    wait(start([*train[:4], "--restart", run, *ranks], log), log)
    return run


def start(command: Sequence[Any], log: Path) -> subprocess.Popen[bytes]:
    """Start a command in a process group of its own."""
    with log.open("ab") as out:
        return subprocess.Popen(
            list(map(str, command)), stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )


def ended(process: subprocess.Popen[bytes], log: Path) -> int:
    """Wait until it has ended; returns its exit status. SystemExit with its last lines if it does not end."""
    try:
        return process.wait(timeout=DEADLINE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise SystemExit(f"no end after {DEADLINE:.0f} s: {log.read_text()[-2000:]}") from None


def wait(process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until it has ended well; SystemExit with its last lines if it has not."""
    status = ended(process, log)
    if status:
        raise SystemExit(f"exit status {status}: {log.read_text()[-2000:]}")


def until(process: subprocess.Popen[bytes], run: Path) -> None:
    """Wait until a run has its directory."""
    end = time.monotonic() + DEADLINE
    while not run.is_dir() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.01)


def restarts(run: Path) -> int | None:
    """How often a run that has ended was healed; None: it makes no copies."""
    summary = json.loads((run / "summary.json").read_text())
    return summary.get("restarts")


def logged_steps(run: Path) -> int:
    """Steps that a killed run has logged."""
    metrics = run / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.is_file() else []
    return sum('"reward/mean"' in line for line in lines)


def outcome(run: Path) -> dict[str, Any]:
    """Hashes of the exported weights, the metrics of each step, and what its ledger says went wrong."""
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
        "ledger": list(check_ledger(run).problems),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
