"""Do memory, file descriptors, threads and step time stay flat over hundreds of GRPO steps?

    python benchmarks/soak.py --out benchmarks/results/soak.json
    python benchmarks/soak.py --engine vllm --model FOLDER --steps 100

Samples end at random (a stop id), so every step has other lengths; one sample of each step is maximal: it
stops at nothing, after the most tokens that the run allows. Every step is read where its sampling begins:
resident memory, descriptors and threads of this process and of all that it started, wall and CPU time since
the reading before. The last quarter of the steps is compared with the first, warm-up left out, by medians;
the slope is a least-squares line through all of them. The exit status is 0 when all is flat.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from lockstep.protocols.engine import Finished, Handle
from lockstep.schema.rollout import GenerationRequest
from lockstep_lab.suite.machine import machine

WARM_UP = 10
"""First steps that are left out: caches, pools and buffers grow to their size."""
MIB = 1 << 20

LIMITS = {"resident_mib": 16.0, "descriptors": 0.0, "threads": 0.0}
"""Largest growth from the first quarter's median to the last's. Resident memory wanders by 5 MiB from step to
step; 1,500 ids and logprobs kept of each step, 90 KiB as Python objects, would be 32 MiB more."""
TIME_LIMIT = 1.10
"""Largest ratio of the quarters' median CPU seconds per step: wall time is also other people's."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """Where one step's sampling begins."""

    step: int
    resident_mib: float
    descriptors: int
    threads: int
    wall: float
    cpu: float
    """Seconds of the process tree since it began."""


Engine: type
"""What `module:Class` of a run's config names."""
READINGS: list[Reading] = []
LENGTHS: dict[int, list[int]] = {}
"""Of each step: completion tokens, sample by sample."""


def read(step: int) -> Reading:
    """Of this process and all its descendants, by /proc."""
    pids = family(os.getpid())
    pages = descriptors = threads = ticks = 0
    for pid in pids:
        folder = Path("/proc", str(pid))
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            pages += int((folder / "statm").read_text().split()[1])
            descriptors += len(os.listdir(folder / "fd"))
        except (FileNotFoundError, ProcessLookupError):
            continue  # ended meanwhile
        ticks += int(fields[11]) + int(fields[12])
        threads += int(fields[17])
    return Reading(
        step=step,
        resident_mib=pages * os.sysconf("SC_PAGE_SIZE") / MIB,
        descriptors=descriptors,
        threads=threads,
        wall=time.perf_counter(),
        cpu=ticks / os.sysconf("SC_CLK_TCK"),
    )


def family(root: int) -> list[int]:
    """`root` and its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


class Ragged:
    """In front of an engine's class: takes a reading, and makes the last sample of the first request maximal.

    The others stop where the run's sampling parameters say, at a random token.
    """

    def submit_all(self, requests: Sequence[GenerationRequest]) -> list[Handle]:
        """Submit the last sample of the first request by itself, without an end of its own."""
        READINGS.append(read(self.stats().policy_version))  # type: ignore[attr-defined]
        first, *others = requests
        endless = dataclasses.replace(first.sampling, stop_token_ids=(), ignore_eos=True)
        rest = dataclasses.replace(first, seeds=first.seeds[:-1])
        last = dataclasses.replace(first, seeds=first.seeds[-1:], sampling=endless)
        *handles, self._last = super().submit_all([rest, *others, last])  # type: ignore[misc]
        self._first, self._number = handles[0], len(first.seeds) - 1
        return handles

    def finished(self) -> Iterator[Finished]:
        """Yield the samples under the handles of the requests that were asked for."""
        lengths = LENGTHS[self.stats().policy_version] = []  # type: ignore[attr-defined]
        for done in super().finished():  # type: ignore[misc]
            if done.handle is self._last:
                done = dataclasses.replace(done, handle=self._first, sample=self._number)
            lengths.append(len(done.completion.token_ids))
            yield done


def ragged_class(engine: str, *, server: bool) -> type:
    """The class of engine `engine` with Ragged in front of it."""
    where = {
        "hf": "lockstep.engine.hf.engine:HFEngine",
        "native": "lockstep.engine.native:NativeEngine",
        "vllm": f"lockstep.engine.vllm.{'server:VLLMServer' if server else 'engine:VLLMEngine'}",
        "sglang": "lockstep.engine.sglang.engine:SGLangServer",
    }[engine]
    module, _, name = where.partition(":")
    return type("RaggedEngine", (Ragged, getattr(importlib.import_module(module), name)), {})


def soak(run_dir: Path, *, engine: str, steps: int, model: str, settings: dict[str, Any]) -> dict[str, Any]:
    """A run of `steps` steps; what `judge` makes of its readings.

    Args:
        settings: EngineConfig fields.
    """
    from lockstep import load_run, train_online

    global Engine
    Engine = ragged_class(engine, server="python" in settings or "url" in settings)
    sys.modules["soak"] = sys.modules[__name__]  # as which `module:Class` finds it, also as a script
    READINGS.clear()
    LENGTHS.clear()
    overrides = OVERRIDES | {
        "run_dir": str(run_dir),
        "steps": steps,
        "model.name": model,
        "checkpoint.every": max(1, steps // 10),
        "engine.name": "soak:Engine",
    }
    overrides |= {f"engine.{name}": value for name, value in settings.items()}
    train_online(load_run("tiny", overrides=overrides))  # type: ignore[arg-type]
    by_step = {reading.step: reading for reading in READINGS}  # the last of each: a check may sample before
    return judge([by_step[step] for step in sorted(by_step)]) | {"lengths": describe_lengths()}


OVERRIDES: dict[str, Any] = {
    "rollout.prompts_per_step": 8,
    "rollout.group_size": 4,
    "rollout.sampling.max_tokens": 192,
    "rollout.sampling.ignore_eos": False,
    # 8 of 256 ids: 32 tokens on average. The learning rate leaves it so.
    "rollout.sampling.stop_token_ids": list(range(16, 32, 2)),
    "train.lr": 1e-6,
    "train.token_budget": 1024,
    "data.max_prompt_tokens": 64,
    "data.task.min_tokens": 1,
    "data.task.max_tokens": 64,
    "eval.before": False,
    "eval.after": False,
    "checkpoint.keep_last": 2,
}


def describe_lengths() -> dict[str, Any]:
    """Completion tokens over all steps."""
    steps = list(LENGTHS.values())
    longest = max(map(max, steps))
    return {
        "median": statistics.median(length for each in steps for length in each),
        "shortest": min(map(min, steps)),
        "longest": longest,
        "steps_with_a_maximal_sample": sum(max(each) == longest for each in steps),
        "step_tokens": {"least": min(map(sum, steps)), "most": max(map(sum, steps))},
    }


def judge(readings: Sequence[Reading], *, warm_up: int = WARM_UP) -> dict[str, Any]:
    """First against last quarter and the slope of each figure, and whether all are flat."""
    kept = readings[warm_up:]
    quarter = len(kept) // 4
    if quarter < 2:
        raise SystemExit(f"{len(readings)} steps are too few: {warm_up} warm up, and a quarter needs two")
    series: dict[str, list[float]] = {
        name: [float(getattr(reading, name)) for reading in kept] for name in LIMITS
    }
    for name in ("wall", "cpu"):
        at = [getattr(reading, name) for reading in kept]
        series[f"{name}_seconds"] = [after - before for before, after in itertools.pairwise(at)]
    figures = {}
    for name, values in series.items():
        first, last = statistics.median(values[:quarter]), statistics.median(values[-quarter:])
        slope = statistics.linear_regression(range(len(values)), values).slope
        figures[name] = {
            "first_quarter": first,
            "last_quarter": last,
            "per_1000_steps": 1000 * slope,
            "max": max(values),
        }
        if name in LIMITS:
            figures[name]["flat"] = last - first <= LIMITS[name]
        elif name == "cpu_seconds":
            figures[name]["flat"] = last <= TIME_LIMIT * first
    flat = all(figure.get("flat", True) for figure in figures.values())
    thinned = readings[:: max(1, len(readings) // 50)]
    resident = [[reading.step, round(reading.resident_mib, 1)] for reading in thinned]
    return {"flat": flat, "steps": len(readings), "figures": figures, "resident_mib_by_step": resident}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0 when all is flat."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=["hf", "native", "vllm", "sglang"], default="hf")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--model", default="shape:tiny-llama", help="(%(default)s)")
    parser.add_argument("--settings", type=json.loads, default={}, help="JSON of EngineConfig fields")
    parser.add_argument("--out", type=Path, help="write the result to this file")
    args = parser.parse_args(argv)
    load = [round(os.getloadavg()[0], 2)]
    with tempfile.TemporaryDirectory() as folder:
        found = soak(
            Path(folder) / "run",
            engine=args.engine,
            steps=args.steps,
            model=args.model,
            settings=args.settings,
        )
    found |= {
        "engine": args.engine,
        "model": args.model,
        "machine": machine("cuda" if torch.cuda.is_available() else "cpu"),
        "threads_setting": os.environ.get("OMP_NUM_THREADS"),
        "load_average": [*load, round(os.getloadavg()[0], 2)],
        "command": " ".join(["python", "benchmarks/soak.py", *(sys.argv[1:] if argv is None else argv)]),
    }
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for name, figure in found["figures"].items():
        print(f"{name:14} " + "  ".join(f"{key} {value:.5g}" for key, value in figure.items()))
    print(f"soak: {'flat' if found['flat'] else 'NOT flat'} over {found['steps']} steps; {found['lengths']}")
    return 0 if found["flat"] else 1


if __name__ == "__main__":
    sys.exit(main())
