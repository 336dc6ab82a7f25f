"""How much cheaper is the update of a GRPO step when groups without a signal are left out?

    python benchmarks/groups_without_signal.py --threads 1 --json FILE

One step of `demo` is sampled, and its rewards are then set: a quarter, half or three quarters of its groups
have equal rewards. Updates with every group and without those are timed in turn, from packing to the
optimizer step: wall seconds, and CPU seconds of the process, which other work on the machine hardly moves.
The last line has the medians of the ratios of CPU seconds.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from lockstep import OnlineTrainer, build_online, load_run
from lockstep.config.run import GRPORun
from lockstep.schema.rollout import RolloutGroup

SHARES = (0.25, 0.5, 0.75)
FULL, LEFT_OUT = 0, 1
"""Numbers of steps: step 0 scores all groups."""


def main(argv: list[str]) -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", default="demo")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the result to this file")
    args = parser.parse_args(argv)
    run = load_run(args.recipe, overrides={"train.num_threads": args.threads})
    assert isinstance(run, GRPORun)
    trainer = OnlineTrainer(build_online(run))
    trainer.push(policy_version=0)
    groups = trainer.sample(0).groups
    update(trainer, groups, step=FULL)  # warm-up
    shares = {str(share): measure(trainer, groups, share, pairs=args.pairs) for share in SHARES}
    trainer.parts.close()
    result = {
        "command": ["benchmarks/groups_without_signal.py", *argv],
        "machine": {"cpu": cpu_name(), "cores": os.cpu_count(), "threads": args.threads},
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "dtype": trainer.parts.resolved.dtype,
        "without_signal": shares,
    }
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    ratios = ", ".join(
        f"{share} of the groups: {one['cpu_seconds']['median']:.2f}" for share, one in shares.items()
    )
    print(f"CPU seconds of an update, left out / all; without signal {ratios}")
    return 0


def measure(
    trainer: OnlineTrainer, groups: tuple[RolloutGroup, ...], share: float, *, pairs: int
) -> dict[str, Any]:
    """Updates with all groups and without some, in turn, and their ratios."""
    silent = round(share * len(groups))
    given = [rewarded(group, signal=index >= silent) for index, group in enumerate(groups)]
    full, left_out = [], []
    for _ in range(pairs):
        full.append(update(trainer, given, step=FULL))
        left_out.append(update(trainer, given, step=LEFT_OUT))
    found: dict[str, Any] = {"all": full, "left_out": left_out}
    for kind in ("cpu_seconds", "seconds"):
        ratios = [ours[kind] / theirs[kind] for ours, theirs in zip(left_out, full, strict=True)]
        found[kind] = {"median": statistics.median(ratios), "ratios": ratios}
    return found


def rewarded(group: RolloutGroup, *, signal: bool) -> RolloutGroup:
    """The group with rewards 0 and 1 in turn, or 1 throughout."""
    rollouts = [
        dataclasses.replace(rollout, reward=float(number % 2 if signal else 1))
        for number, rollout in enumerate(group.rollouts)
    ]
    return dataclasses.replace(group, rollouts=tuple(rollouts))


def update(trainer: OnlineTrainer, groups: Any, *, step: int) -> dict[str, float]:
    """Seconds of the update, and what it computed."""
    started, cpu_started = time.perf_counter(), time.process_time()
    metrics = trainer.update(groups, step=step).metrics
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
    names = ("scored_share", "input/slots", "input/trained_tokens")
    return {"seconds": seconds, "cpu_seconds": cpu_seconds} | {name: metrics[name] for name in names}


def cpu_name() -> str:
    """As the kernel says it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
