"""Does one tree train and replay as another one does? For changes that must not change a number.

    python benchmarks/same_as_before.py OLD NEW [--only tiny replay ...] [--json FILE]

OLD and NEW are checkouts of this repository. The same commands run with the src/ of each, on this machine:

tiny, invariant, ppo, sft, dpo, fsdp2, demo
        Training runs: `tiny`; `tiny` with engine native, batch-invariant; `tiny-ppo`; SFT and DPO of
        SmolLM2-135M cut to two layers; `tiny` under fsdp2 on two ranks; five steps of OLD's recipe `demo`.
        Every field that OLD writes to metrics.jsonl but times, speeds and memory must be equal; what only NEW
        has is listed.
replay  40 inputs of the shipped recording, forward and backward. Every field of results.jsonl but times and
        memory must be equal, and the kept logprobs and gradients bit for bit.
speed   `tiny` with 40 steps in 5 alternating pairs: the median ratio of a step's seconds, NEW / OLD, must lie
        between 0.98 and 1.02.
native, training
        On a GPU, of the 1B Llama shape, batch-invariant: generation of 256 x 512 tokens by the embedded
        engine, and forward and backward of `rl_32` of lengths.json, each in 5 alternating pairs; same limits.

The exit status is 0 when all that was asked for holds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from native_turns import Side
from safetensors.numpy import load_file

TIMED = re.compile(r"seconds|_ms$|per_second|memory|timestamp|^time/|^perf/|^mfu")
"""Names of what no two runs have alike."""
PACKED = ("--train.layout", "packed")
"""Named, as "auto" has become shared on a CPU, where sums over tokens have another order."""
TINY = ("train", "grpo", "--recipe", "tiny", *PACKED)
CUT = ("--model.num-layers", "2", "--model.dtype", "float32", "--steps", "4", "--batch-size", "4", *PACKED)
RUNS: dict[str, tuple[str, ...]] = {
    "tiny": TINY,
    "invariant": (*TINY, "--engine.name", "native", "--train.batch-invariant", "true"),
    "ppo": ("train", "ppo", "--recipe", "tiny-ppo", *PACKED),
    "sft": ("train", "sft", "--data.source", "answers.jsonl", *CUT),
    "dpo": ("train", "dpo", "--data.source", "pairs.jsonl", *CUT),
    "fsdp2": (*TINY, "--train.backend", "fsdp2", "--ranks", "2"),
    "demo": ("train", "demo.toml", "--steps", "5", *PACKED),
}
SCORED = ("--train.score-all-every", "1")
"""For a tree that has it: its metrics are over all groups, also those without a signal."""
PAIRS, STEPS = 5, 40
RATIO = (0.98, 1.02)


def main(argv: list[str]) -> int:
    """Run what was asked for; 0 when it holds."""
    parts: dict[str, Callable[[Path, Path, Path], dict[str, Any]]] = {
        **{name: lambda old, new, at, name=name: compare_run(name, old, new, at) for name in RUNS},
        "replay": compare_replay,
        "speed": compare_speed,
        "native": lambda old, new, at: compare_sides("generate", old, new, at),
        "training": lambda old, new, at: compare_sides("train", old, new, at),
    }
    on_cpu = [name for name in parts if name not in ("native", "training")]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--only", nargs="+", choices=list(parts), default=on_cpu, metavar="PART")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    given = parser.parse_args(argv)
    result: dict[str, Any] = {
        "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "torch": torch.__version__,
        "command": ["benchmarks/same_as_before.py", *argv],
        "commits": [commit_of(tree) for tree in (given.old, given.new)],
        "parts": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        for name in given.only:
            work = Path(folder, name)
            work.mkdir()
            result["parts"][name] = part = parts[name](given.old.resolve(), given.new.resolve(), work)
            print(f"{name}: {'holds' if part['holds'] else 'DOES NOT HOLD'}, {part['text']}", flush=True)
            if given.json is not None:
                given.json.write_text(json.dumps(result, indent=1) + "\n")
    bad = [name for name, part in result["parts"].items() if not part["holds"]]
    print(f"not the same: {', '.join(bad)}" if bad else f"the same in all of: {', '.join(given.only)}")
    return 1 if bad else 0


def commit_of(tree: Path) -> str:
    """The commit that is checked out."""
    command = ["git", "-C", str(tree), "rev-parse", "HEAD"]
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    return ended.stdout.strip() or "not a checkout"


def lockstep(tree: Path, words: tuple[str, ...], work: Path) -> None:
    """Run a command of `tree` in the folder `work`; RuntimeError with its output when it fails."""
    environment = os.environ | {
        "PYTHONPATH": str(tree / "src"),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-m", "lockstep", *words]
    ended = subprocess.run(
        command, cwd=work, env=environment, capture_output=True, text=True, check=False, timeout=3600
    )
    if ended.returncode:
        raise RuntimeError(f"{tree}: lockstep {' '.join(words)}\n{ended.stdout}\n{ended.stderr}")


def compare_run(name: str, old: Path, new: Path, work: Path) -> dict[str, Any]:
    """A training run in both trees."""
    texts = [f"{i} and {i + 1} are {2 * i + 1}" for i in range(32)]
    answers = [{"prompt": f"Add {i} and {i + 1}.", "completion": text} for i, text in enumerate(texts)]
    pairs = [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": "No."} for row in answers]
    for file, rows in (("answers.jsonl", answers), ("pairs.jsonl", pairs)):
        (work / file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    shutil.copy(old / "src" / "lockstep" / "recipes" / "demo.toml", work)
    sides = []
    for side, tree in (("old", old), ("new", new)):
        online = RUNS[name][1] not in ("sft", "dpo")
        scored = SCORED if online and has_setting(tree, "score_all_every") else ()
        lockstep(tree, (*RUNS[name], *scored, "--run-dir", side), work)
        sides.append(rows_of(work / side / "metrics.jsonl"))
    added = sorted({name for a, b in zip(*sides, strict=False) for name in b.keys() - a.keys()})
    compared = f"{len(sides[0])} lines of metrics.jsonl" + (f" (new: {', '.join(added)})" if added else "")
    return judged(differences(*sides), compared)


def has_setting(tree: Path, name: str) -> bool:
    """Whether [train] of `tree` has the setting."""
    return f"    {name}:" in (tree / "src" / "lockstep" / "config" / "train.py").read_text()


def compare_replay(old: Path, new: Path, work: Path) -> dict[str, Any]:
    """40 inputs of the shipped recording in both trees."""
    words = ("replay", "--max-inputs", "40", "--keep-outputs", "--gradient-inputs", "40")
    for side, tree in (("old", old), ("new", new)):
        lockstep(tree, (*words, "--out", side), work)
    apart = differences(rows_of(work / "old" / "results.jsonl"), rows_of(work / "new" / "results.jsonl"))
    ours, theirs = (load_file(work / side / "outputs.safetensors") for side in ("new", "old"))
    apart += [f"outputs: {name}" for name in sorted(ours.keys() ^ theirs.keys())]
    apart += [
        f"outputs: {name}"
        for name in sorted(ours.keys() & theirs.keys())
        if ours[name].tobytes() != theirs[name].tobytes()
    ]
    return judged(apart, f"40 inputs, {len(ours)} kept tensors")


def compare_speed(old: Path, new: Path, work: Path) -> dict[str, Any]:
    """The seconds of a step of `tiny`, in alternation."""
    ratios = []
    for pair in range(PAIRS):
        medians = []
        for side, tree in (("old", old), ("new", new)):
            out = f"{side}-{pair}"
            lockstep(tree, (*TINY, "--steps", str(STEPS), "--eval.no-before", "--run-dir", out), work)
            rows = [row for row in rows_of(work / out / "metrics.jsonl") if "evaluation" not in row]
            medians.append(statistics.median(row["time/step"] for row in rows[5:]))
        ratios.append(medians[1] / medians[0])
    median = statistics.median(ratios)
    text = f"seconds of a step, new / old: median {median:.3f} of {[round(ratio, 3) for ratio in ratios]}"
    return {"holds": RATIO[0] <= median <= RATIO[1], "text": text, "ratios": ratios}


def compare_sides(do: str, old: Path, new: Path, work: Path) -> dict[str, Any]:
    """The seconds of what benchmarks/native_side.py of each tree does on one GPU, in alternation."""
    longest = 2048 - 64  # of rl_32
    job = {"model": "shape:llama-3.2-1b", "invariant": True, "prompt_tokens": 64, "tokens": longest}
    job["engine"] = {"max_batch": 256, "kv_cache_tokens": 2 * 256 * (64 + 512)}
    asked = {"do": do, "samples": 256, "prompt_tokens": 64, "tokens": 512}
    (work / "job.json").write_text(json.dumps(job))
    sides = [
        Side(
            [sys.executable, str(tree / "benchmarks" / "native_side.py"), str(work / "job.json")],
            work / f"{name}.log",
            {"PYTHONPATH": os.pathsep.join([str(tree / "src"), os.environ.get("PYTHONPATH", "")])},
        )
        for name, tree in (("old", old), ("new", new))
    ]
    for side in sides:
        side.answer()  # ready
    for side in sides:
        side.ask(**asked)
    seconds = [[side.ask(**asked)["seconds"] for side in sides] for _ in range(PAIRS)]
    for side in sides:
        side.close()
    ratios = [mine / theirs for theirs, mine in seconds]
    median = statistics.median(ratios)
    text = f"seconds, new / old: median {median:.3f} of {[round(ratio, 3) for ratio in ratios]}"
    return {"holds": RATIO[0] <= median <= RATIO[1], "text": text, "seconds": seconds}


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def differences(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[str]:
    """What OLD has and NEW has not, or not equal, in words."""
    if len(old) != len(new):
        return [f"{len(old)} and {len(new)} lines"]
    found = []
    for number, (a, b) in enumerate(zip(old, new, strict=True)):
        for name in sorted(a):
            if not TIMED.search(name) and a.get(name, "-") != b.get(name, "-"):
                found.append(f"line {number}: {name} {a.get(name, '-')} -> {b.get(name, '-')}")
    return found


def judged(apart: list[str], compared: str) -> dict[str, Any]:
    """The result of a part."""
    text = f"{compared} equal" if not apart else f"{len(apart)} differences, first: {'; '.join(apart[:3])}"
    return {"holds": not apart, "text": text, "differences": apart[:100]}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
