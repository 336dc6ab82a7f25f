"""Does a run with a fixed schedule end with the same bits, however often its processes are killed?

    python benchmarks/kills_fixed.py --runs 25 --json benchmarks/results/kills_fixed.json

rollout.max_lag = 2, schedule = "fixed", an engine in a process of its own. One run is left alone. Each of
the others gets up to 8 SIGKILLs at points that are drawn with --seed: a call of a function in a step of the
trainer, at which it kills itself or, where it says "whom", the engine that samples meanwhile. A run that
ended is resumed from its last checkpoint, of which there is one after every step; an engine that dies while
the trainer waits for it is restarted by the run itself. A point whose call does not come is no kill.
Compared are the bytes of weights, optimizer and generators, the metrics but times, the rollouts and the
ledger. The exit status is 0 when every run was equal.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "loop"))

from loop_runs import FILE, FORWARD, OPTIMIZER, Commands, everything, kill

STEPS, KILLS = 10, 8
ENGINE = "lockstep.engine.local_server.server"
"""In the command line of the engine's process."""
OF_ENGINE = {"signal": "SIGKILL", "whom": ENGINE}
RUN = f"""
kind = "grpo"
steps = {STEPS}
[model]
name = "shape:tiny-llama"
dtype = "float32"
[data]
source = "ids"
max_prompt_tokens = 16
[rollout]
prompts_per_step = 4
group_size = 4
max_lag = 2
schedule = "fixed"
slots = 6
[rollout.sampling]
max_tokens = 48
stop_token_ids = {list(range(100, 108))}
[algorithm.rollout_correction]
kind = "tis"
[[rewards]]
name = "ids"
[train]
lr = 3e-3
token_budget = 128
batch_invariant = true
deterministic = true
device = "cpu"
[engine]
name = "native"
process = "separate"
max_batch = 12
[eval]
before = false
after = false
[checkpoint]
every = 1
export_at_end = false
background = false
[log]
tensorboard = false
"""
UPDATE: tuple[dict[str, Any], ...] = (
    kill(FORWARD),
    kill(FORWARD, call=2, when="backward"),
    kill(FORWARD, call=3, when="after"),
    kill(OPTIMIZER),
    kill(OPTIMIZER, when="after"),
)
"""Inside an update."""
POLL = "lockstep.engine.remote.driver:EventStreams.poll"
OTHERS: tuple[dict[str, Any], ...] = (
    kill("lockstep.rollout.partial:PartialRollouts.step"),
    kill("lockstep.rollout.partial:PartialRollouts.step", when="after"),
    kill("lockstep.rollout.partial:PartialRollouts.commit", when="after"),
    kill("lockstep.rollout.background:Background.end"),
    kill("lockstep.rollout.background:Background.end", when="after"),
    kill(POLL, call=2, when="after"),
    kill("lockstep.engine.local_server.engine:LocalServerDriver.begin", when="after"),
    kill("lockstep.engine.local_server.engine:LocalServerDriver.finish"),
    kill("lockstep.observe.run_dir:RunDir.write_rollouts", when="after"),
    kill("lockstep.observe.metrics:JsonlWriter.write", when="after"),
    kill("lockstep.loop.checkpoint:CheckpointManager._publish"),
    kill("lockstep.loop.checkpoint:CheckpointManager._publish", when="after"),
    kill(FILE, call=5),
    # of the engine
    kill(POLL, call=2, when="after", send=OF_ENGINE),
    kill(FORWARD, send=OF_ENGINE),
    kill(OPTIMIZER, send=OF_ENGINE),
    kill("lockstep.engine.local_server.engine:LocalServerDriver.begin", when="after", send=OF_ENGINE),
    kill("lockstep.rollout.partial:PartialRollouts.commit", when="after", send=OF_ENGINE),
)


def points(draw: random.Random) -> list[dict[str, Any]]:
    """8 points of a run, in order of their steps; step 0 has no checkpoint to go on from."""
    steps = sorted(draw.sample(range(1, STEPS), KILLS))
    return [draw.choice(UPDATE if draw.random() < 0.3 else OTHERS) | {"step": step} for step in steps]


def main(argv: Sequence[str]) -> int:
    """Kill, resume, compare, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=25)
    parser.add_argument("--first", type=int, default=0, help="number of the first run")
    parser.add_argument("--seed", type=int, default=0, help="of the points")
    parser.add_argument("--json", type=Path, metavar="FILE", help="what it has is added to")
    args = parser.parse_args(argv)
    commands, cases = Commands(), list[dict[str, Any]]()
    known = args.json is not None and args.json.is_file()
    result = json.loads(args.json.read_text()) if known else {"runs": cases}
    cases = result["runs"]
    result["machine"] = f"{platform.machine()}, {os.cpu_count()} CPUs"
    result["versions"] = {"torch": torch.__version__, "python": platform.python_version()}
    try:
        with tempfile.TemporaryDirectory(prefix="lockstep-kills-") as folder:
            root = Path(folder)
            (root / "run.toml").write_text(RUN)
            commands("train", root / "run.toml", "--run-dir", root / "alone", cwd=root)
            expected = outcome(root / "alone")
            for number in range(args.first, args.first + args.runs):
                draw = random.Random(f"{args.seed} {number}")
                cases.append({"run": number, **case(commands, root, root / str(number), draw, expected)})
                print(json.dumps(cases[-1]), flush=True)
                if args.json is not None:
                    args.json.write_text(text(result))
    finally:
        commands.close()
    kills = [point for each in cases for point in each["kills"]]
    inside = sum(point["target"] in (FORWARD, OPTIMIZER) for point in kills)
    equal = sum(each["equal"] for each in cases)
    print(
        f"{len(kills)} kills, {inside} of them inside updates: {equal} of {len(cases)} runs equal, to the bit"
    )
    return 0 if equal == len(cases) else 1


def text(result: dict[str, Any]) -> str:
    """JSON with a run per line."""
    runs = ",\n".join(json.dumps(run) for run in result["runs"])
    head = json.dumps({name: value for name, value in result.items() if name != "runs"})
    return f'{head[:-1]}, "runs": [\n{runs}\n]}}\n'


def case(
    commands: Commands, root: Path, run: Path, draw: random.Random, expected: dict[str, Any]
) -> dict[str, Any]:
    """Run with kills at points that are drawn, and compare."""
    began, note = time.monotonic(), run.with_suffix(".kills")
    note.touch()
    argv: tuple[str | Path, ...] = ("train", root / "run.toml", "--run-dir", run)
    orders, resumes = points(draw), 0
    while True:
        last = max(map(int, note.read_text().split()), default=0)
        left = [noted(order, note) for order in orders if order["step"] > last]
        ended = commands(*argv, cwd=root, signals=left, code=None)
        if not ended.code:
            break
        if ended.code != -9 and "process-died" not in ended.err:
            raise SystemExit(f"{orders}: exit status {ended.code}: {ended.err[-2000:]}")
        argv, resumes = ("train", "--resume", run), resumes + 1
    steps = set(map(int, note.read_text().split()))
    found = outcome(run)
    return {
        "kills": [order for order in orders if order["step"] in steps],
        "not_reached": [order for order in orders if order["step"] not in steps],
        "resumes": resumes,
        "equal": found == expected,
        "unequal": [name for name in expected if found[name] != expected[name]],
        "seconds": round(time.monotonic() - began, 1),
    }


def noted(order: dict[str, Any], note: Path) -> dict[str, Any]:
    """The order, noted when it is carried out."""
    send = order["send"]
    return order | {"send": ({"signal": send} if isinstance(send, str) else send) | {"note": str(note)}}


def outcome(run: Path) -> dict[str, Any]:
    """What must be equal."""
    found = everything(run)
    for row in found["metrics"]:
        row.pop("rollout/cached_tokens", None)  # a restarted engine has other keys to share
    rows = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
    ledger = [{name: value for name, value in row.items() if name != "attempt"} for row in rows]
    return {**found, "ledger": ledger}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
