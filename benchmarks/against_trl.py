"""How fast are a GRPO step and an SFT step on a CPU against TRL's trainers?

    python benchmarks/against_trl.py grpo --pairs 7 --out benchmarks/results/cpu_grpo.json
    python benchmarks/against_trl.py sft --pairs 9 --out benchmarks/results/cpu_sft.json

Model: SmolLM2-135M (bundled), bfloat16 on every side. One child process per side, all on this machine and
only one of them at work at a time: this process asks for one optimizer step after the other, in
alternation. Seconds count from the call for rollouts (GRPO) or for packs (SFT) to the end of the optimizer
step; loading and warm-up steps do not.

grpo   8 prompts of 16 to 200 tokens, 8 samples each, natural stops with at most 128 new tokens,
       temperature 1, one update per rollout batch, the same prompts in the same order and the same reward
       on both sides.
sft    documents of lognormal lengths from 16 to 512 tokens, every token but a document's first is
       predicted. TRL trains twice: padded (its default) and packed (packing=True).

ratio = (TRL seconds / TRL tokens) / (our seconds / our tokens) of a pair; above 1 we are faster. Tokens are
those that carry loss; generated tokens for `generate`. The same from the CPU time of the processes is beside
it: on a busy machine it is the better figure with --threads 1 (idle OpenMP threads spin).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PROMPT_TOKENS = (16, 200)
DOCUMENT_TOKENS = (16, 512)
TASKS = {
    "chain_sum": {"min_terms": 2, "max_terms": 6},
    "letter_counting": {"min_words": 3, "max_words": 20},
    "spell_backward": {},
    "leg_counting": {},
    "number_sorting": {"min_numbers": 3, "max_numbers": 12},
    "word_sorting": {"min_words": 3, "max_words": 20},
    "family_relationships": {},
    "basic_arithmetic": {},
}


# --- data -------------------------------------------------------------------------------------------------


def prompt_texts(tokenizer: Any, count: int) -> list[str]:
    """Chat prompts of reasoning_gym's questions as plain text, spread evenly over PROMPT_TOKENS."""
    import reasoning_gym

    low, high = PROMPT_TOKENS
    by_length: dict[int, list[str]] = {}
    for name, settings in TASKS.items():
        for row in reasoning_gym.create_dataset(name, seed=7, size=400, **settings):
            for messages in (
                [{"role": "user", "content": row["question"]}],
                [
                    {"role": "system", "content": "Answer briefly."},
                    {"role": "user", "content": row["question"]},
                ],
            ):
                text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
                # the template's default system prompt would put every short question above 30 tokens
                text = text.replace(DEFAULT_SYSTEM, "")
                by_length.setdefault(len(tokenizer(text)["input_ids"]), []).append(text)
    rng = random.Random(0)
    chosen: dict[str, None] = {}
    known = sorted(n for n in by_length if low <= n <= high)
    while len(chosen) < count:
        wanted = rng.uniform(low, high)
        nearest = min(known, key=lambda n: abs(n - wanted))
        chosen.setdefault(rng.choice(by_length[nearest]))
    return list(chosen)


DEFAULT_SYSTEM = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
)


def document_ids(tokenizer: Any, count: int) -> list[list[int]]:
    """Token ids of task text, cut to lognormal lengths in DOCUMENT_TOKENS."""
    import reasoning_gym

    rng = random.Random(1)
    rows = reasoning_gym.create_dataset("family_relationships", seed=3, size=4000)
    stream = tokenizer("\n".join(f"{row['question']} {row['answer']}" for row in rows))["input_ids"]
    low, high = DOCUMENT_TOKENS
    documents = []
    for _ in range(count):
        length = min(high, max(low, round(rng.lognormvariate(4.8, 0.8))))
        start = rng.randrange(len(stream) - length)
        documents.append(stream[start : start + length])
    return documents


# --- children ---------------------------------------------------------------------------------------------


class Side:
    """A child process that takes one optimizer step per request."""

    def __init__(self, name: str, settings: dict[str, Any], *, threads: int, log: Path) -> None:
        self.name = name
        environment = os.environ | {
            "OMP_NUM_THREADS": str(threads),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        self._log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "against_trl_sides.py"), name, json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                text=True,
            )
        self.about = self._answer()

    def step(self) -> dict[str, float]:
        assert self._process.stdin is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} died; the end of its log:\n{self._log.read_text()[-3000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer


# --- measuring --------------------------------------------------------------------------------------------


def alternate(sides: list[Side], *, warm_up: int, pairs: int) -> list[dict[str, Any]]:
    """`pairs` rounds in which every side steps once; the order is turned around every second round."""
    rounds = []
    for number in range(-warm_up, pairs):
        order = sides if number % 2 == 0 else sides[::-1]
        load = os.getloadavg()[0]
        steps = {side.name: side.step() for side in order}
        print(json.dumps({"round": number, "load": load, **steps}), flush=True)
        if number >= 0:
            rounds.append({"load": load, "steps": {side.name: steps[side.name] for side in sides}})
    return rounds


def spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    quarter = len(ordered) // 4
    return {
        "median": statistics.median(ordered),
        "min": ordered[0],
        "quartile_1": ordered[quarter],
        "quartile_3": ordered[-1 - quarter],
        "max": ordered[-1],
    }


def per_token(step: dict[str, float], part: str, clock: str) -> float:
    tokens = step["completion_tokens"] if part == "generate" else step["trained_tokens"]
    return step[f"{part}_{clock}"] / tokens


def summary(rounds: list[dict[str, Any]], parts: list[str], clock: str) -> dict[str, Any]:
    """Milliseconds per token of every side and part, and the ratio of every TRL side to ours."""
    ours, *theirs = rounds[0]["steps"]

    def values(side: str, part: str) -> list[float]:
        return [per_token(r["steps"][side], part, clock) for r in rounds]

    def ratios(side: str, part: str) -> list[float]:
        return [a / b for a, b in zip(values(side, part), values(ours, part), strict=True)]

    return {
        "ms_per_token": {
            side: {part: spread([1e3 * value for value in values(side, part)]) for part in parts}
            for side in (ours, *theirs)
        },
        "ratio": {side: {part: spread(ratios(side, part)) for part in parts} for side in theirs},
    }


def machine() -> dict[str, Any]:
    flags: set[str] = set()
    model = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        fields = [line.split(":", 1) for line in info.read_text().splitlines() if ":" in line]
        flags = {flag for key, value in fields if key.strip() == "flags" for flag in value.split()}
        model = next((value.strip() for key, value in fields if key.strip() == "model name"), model)
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        **{flag: flag in flags for flag in ("avx512f", "avx512_bf16", "amx_tile", "amx_bf16", "avx512_fp16")},
    }


def versions() -> dict[str, str]:
    names = ("torch", "transformers", "trl", "accelerate", "datasets", "reasoning-gym")
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=HERE, check=False
    )
    return {"python": platform.python_version(), "lockstep_commit": commit.stdout.strip()} | {
        name: importlib.metadata.version(name) for name in names
    }


# --- the two comparisons ----------------------------------------------------------------------------------


def grpo_sides(args: argparse.Namespace, folder: Path, scratch: Path) -> list[Side]:
    from transformers import AutoTokenizer

    steps = args.warm_up + args.pairs
    prompts = scratch / "prompts.jsonl"
    texts = prompt_texts(AutoTokenizer.from_pretrained(folder), 8 * steps + 1)
    prompts.write_text("".join(json.dumps({"prompt": text, "answer": ""}) + "\n" for text in texts))
    settings = {"folder": str(folder), "prompts": str(prompts), "steps": steps, "scratch": str(scratch)}
    ours = settings | {"token_budget": args.token_budget}
    theirs = settings | {"batch": args.trl_batch, "autocast": args.trl_autocast}
    return _start(args, scratch, {"lockstep_grpo": ours, "trl_grpo": theirs})


def sft_sides(args: argparse.Namespace, folder: Path, scratch: Path) -> list[Side]:
    from transformers import AutoTokenizer

    steps = args.warm_up + args.pairs
    documents = scratch / "documents.json"
    ids = document_ids(AutoTokenizer.from_pretrained(folder), 32 * steps * 2)
    documents.write_text(json.dumps(ids))
    settings = {"folder": str(folder), "documents": str(documents), "steps": steps, "scratch": str(scratch)}
    ours = settings | {"token_budget": args.token_budget}
    theirs = settings | {"batch": args.trl_batch, "autocast": args.trl_autocast}
    sides = {
        "lockstep_sft": ours,
        "trl_sft_padded": theirs,
        "trl_sft_packed": theirs | {"batch": args.trl_packed_batch},
    }
    return _start(args, scratch, sides)


def _start(args: argparse.Namespace, scratch: Path, sides: dict[str, dict[str, Any]]) -> list[Side]:
    return [
        Side(name, settings, threads=args.threads, log=scratch / f"{name}.log")
        for name, settings in sides.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["grpo", "sft"])
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--warm-up", type=int, default=1, help="steps of every side that do not count")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--token-budget", type=int, default=2048, help="ours: token slots of a micro-batch")
    parser.add_argument("--trl-batch", type=int, default=8, help="TRL: per_device_train_batch_size")
    parser.add_argument(
        "--trl-packed-batch",
        type=int,
        default=1,
        help="TRL, packed: rows per batch (joined to one row under a dense mask: 1 is fastest)",
    )
    parser.add_argument("--trl-autocast", action="store_true", help="TRL: bf16=True over bfloat16 weights")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    from lockstep.models.source import bundled_folder

    folder = bundled_folder("smollm2-135m")
    with tempfile.TemporaryDirectory() as scratch:
        start = grpo_sides if args.what == "grpo" else sft_sides
        sides = start(args, folder, Path(scratch))
        rounds = alternate(sides, warm_up=args.warm_up, pairs=args.pairs)
        about = {side.name: side.about for side in sides}
        for side in sides:
            side.close()
    parts = ["generate", "train", "total"] if args.what == "grpo" else ["total"]
    report = {
        "command": " ".join(["python", "benchmarks/against_trl.py", *sys.argv[1:]]),
        "machine": machine(),
        "threads": args.threads,
        "versions": versions(),
        "sides": about,
        "wall": summary(rounds, parts, "s"),
        "cpu_time": summary(rounds, parts, "cpu_s"),
        "rounds": rounds,
    }
    for clock in ("wall", "cpu_time"):
        for side, ratio in report[clock]["ratio"].items():
            print(f"{clock} {side} / ours:", {part: round(r["median"], 2) for part, r in ratio.items()})
    if args.out:
        args.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
