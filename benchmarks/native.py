"""The embedded engine `native` and the batch-invariant path on a GPU: how fast, and equal to the bit?

    python benchmarks/native.py throughput contexts train --out benchmarks/results/native-h200.json
    python benchmarks/native.py equal chunks grpo --model shape:qwen3-8b --num-layers 8 --out ...
    python benchmarks/native.py throughput --beside vllm sglang --out ...

Random weights (`shape:` models), made on the device; no network. What is compared runs in processes of its
own (native_side.py), all on one GPU, in turns; figures are medians of pairs with their spread. Parts:

throughput  256 requests x 512 tokens with logprobs; then twice as many of ragged lengths, so that rows are
            filled again. With and without invariance, and beside the raw engines of --beside. Prefill and
            decode apart, where the host's time goes, the kernels of one decode step.
contexts    4 requests with contexts of 16k tokens, where others split keys.
equal       Samples of 512 tokens by the engine against the trainer's packed forward: nothing may differ.
grpo        20 steps of `lockstep train grpo` on the id-level task: logprob_gap_max must be 0 at each.
train       Forward and backward over `rl_32` of lengths.json: invariant against ordinary, both compiled.
chunks      Prefill in chunks, other batches, preemption, against packed training; where something differs,
            the number of layers from which on it does.

To see that it runs: --model shape:tiny-llama --small.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from native_turns import Raw, Sides, say

from lockstep_lab.suite.machine import machine

METRICS = (
    *("logprob_gap_max", "old_logprobs_reused", "contract_verified", "grad_norm"),
    *("time/step", "time/generate", "time/forward_backward"),
)
"""Of a GRPO step, kept."""


def job(args: argparse.Namespace, *, invariant: bool, **changes: Any) -> dict[str, Any]:
    """Of one side."""
    base = {
        "model": args.model,
        "num_layers": args.num_layers,
        "invariant": invariant,
        "execution": args.execution,
        "prompt_tokens": args.prompt_tokens,
        "tokens": args.tokens,
        "engine": {"max_batch": args.samples, **args.engine},
        "train": dict(args.train),
    }
    return base | changes


def both(args: argparse.Namespace, **changes: Any) -> dict[str, dict[str, Any]]:
    """With and without invariance."""
    return {
        "invariant": job(args, invariant=True, **changes),
        "ordinary": job(args, invariant=False, **changes),
    }


def throughput(args: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second, phases, kernels."""
    work = {"prompt_tokens": args.prompt_tokens, "samples": args.samples, "tokens": args.tokens}
    pool = 2 * args.samples * (args.prompt_tokens + args.tokens)
    found: dict[str, Any] = {"work": work}
    with Sides(
        args, both(args, engine={"max_batch": args.samples, "kv_cache_tokens": pool, **args.engine})
    ) as sides:
        found["ready"] = sides.ready
        for name, what in {
            "full": work,
            "ragged": work | {"samples": 2 * args.samples, "ragged": True},
        }.items():
            done = sides.pairs(args.pairs, do="generate", **what)
            speeds = {side: [a["tokens"] / a["seconds"] for a in answers] for side, answers in done.items()}
            found[name] = {side: spread(values) for side, values in speeds.items()}
            ratios = [
                o["seconds"] / i["seconds"] for i, o in zip(done["invariant"], done["ordinary"], strict=True)
            ]
            found[name]["invariant_of_ordinary"] = spread(ratios)
            found[name]["last"] = {side: answers[-1] for side, answers in done.items()}
            say(
                f"{name}: "
                + ", ".join(f"{k} {v['median']:,.0f} tok/s" for k, v in found[name].items() if k in speeds)
            )
        for engine in args.beside:
            raw = Raw(args, engine)
            raw.go()
            found["full"][engine] = spread([raw.go() for _ in range(args.pairs)])
            say(f"{engine}: {found['full'][engine]['median']:,.0f} tok/s")
            raw.side.close()
        prefill = sides.pairs(args.pairs, do="generate", **(work | {"tokens": 1}))
        for name in sides.sides:
            first = statistics.median(a["seconds"] for a in prefill[name])
            whole = args.samples * args.tokens / found["full"][name]["median"]
            decode = (whole - first) / (args.tokens - 1)
            found.setdefault("phases", {})[name] = {
                "prefill_and_first_token_seconds": first,
                "decode_step_ms": 1e3 * decode,
                "decode_tokens_per_second": args.samples / decode,
            }
            steps = min(16, args.tokens - 2)
            context = args.prompt_tokens + args.tokens // 2  # as long as in the middle of a run
            seen = sides.sides[name].ask(do="profile", **(work | {"prompt_tokens": context}), steps=steps)
            seen["busy_share"] = seen["us_per_step"] / (1e6 * decode)
            found.setdefault("decode_step", {})[name] = seen
            say(f"{name}: {found['phases'][name]}; kernels {seen['us_per_step']:.0f} us, {seen['kinds']}")
    return found


def contexts(args: argparse.Namespace) -> dict[str, Any]:
    """Few samples, long contexts."""
    tokens = min(args.tokens, 256)
    prompt = args.context - tokens
    work = {"samples": 4, "prompt_tokens": prompt, "tokens": tokens}
    engine = {"max_batch": 4, "kv_cache_tokens": 4 * args.context, **args.engine}
    found: dict[str, Any] = {"work": work}
    with Sides(args, both(args, prompt_tokens=prompt, tokens=tokens, engine=engine)) as sides:
        whole = sides.pairs(args.pairs, do="generate", **work)
        first = sides.pairs(args.pairs, do="generate", **(work | {"tokens": 1}))
        for name in sides.sides:
            prefill = statistics.median(a["seconds"] for a in first[name])
            decode = [(a["seconds"] - prefill) / (tokens - 1) for a in whole[name]]
            found[name] = {
                "prefill_seconds": spread([a["seconds"] for a in first[name]]),
                "prefill_tokens_per_second": 4 * prompt / prefill,
                "decode_step_ms": spread([1e3 * d for d in decode]),
                "decode_tokens_per_second": 4 / statistics.median(decode),
            }
            say(f"{name}: {found[name]}")
        pairs = zip(whole["invariant"], whole["ordinary"], strict=True)
        found["invariant_of_ordinary"] = spread([o["seconds"] / i["seconds"] for i, o in pairs])
        steps = min(16, tokens - 2)
        found["decode_step"] = {
            name: side.ask(do="profile", **work, steps=steps) for name, side in sides.sides.items()
        }
    return found


def equal(args: argparse.Namespace) -> dict[str, Any]:
    """Engine against trainer."""
    work = {"prompt_tokens": args.prompt_tokens, "samples": args.rollouts, "tokens": args.tokens}
    with Sides(args, {"invariant": job(args, invariant=True, temperature=0.7)}) as sides:
        found = sides.sides["invariant"].ask(do="equal", group=4, ragged=True, **work)
        found["ready"] = sides.ready["invariant"]
    say(f"{args.model}: {found['against']}")
    return {name_of(args): found}


def grpo(args: argparse.Namespace) -> dict[str, Any]:
    """`lockstep train grpo` on the id-level task; the largest gap of each step."""
    run = args.work / f"grpo-{time.time_ns()}"
    log = args.work / f"{run.name}.log"
    words = ["--recipe", str(recipe(args, run.with_suffix(".toml"))), "--run-dir", str(run)]
    command = [sys.executable, "-m", "lockstep", "train", "grpo", *words]
    started = time.perf_counter()
    with log.open("w") as file:
        ended = subprocess.run(command, stdout=file, stderr=file, timeout=args.grpo_timeout)
    path = run / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    rows = [row for row in rows if "reward/mean" in row]
    found = {
        "rc": ended.returncode,
        "seconds": time.perf_counter() - started,
        "steps": len(rows),
        "gap_max": max((row["logprob_gap_max"] for row in rows), default=None),
        "reward": [row["reward/mean"] for row in rows],
        "metrics": [{name: row.get(name) for name in METRICS} for row in rows],
    }
    if ended.returncode:
        found["log"] = log.read_text()[-1500:]
    told = ("rc", "steps", "gap_max", "seconds")
    say(f"grpo {args.model}: { {name: found[name] for name in told} }")
    return {name_of(args): found}


def recipe(args: argparse.Namespace, path: Path) -> Path:
    """The run as a TOML file; dotted keys are its tables, JSON is TOML for such values."""
    settings = {
        "steps": args.steps,
        "model.name": args.model,
        "data.source": "ids",
        "data.max_prompt_tokens": 16,
        "rollout.prompts_per_step": max(1, args.rollouts // 16),
        "rollout.group_size": 16,
        "rollout.sampling.max_tokens": args.tokens,
        "rollout.sampling.ignore_eos": True,
        "rollout.sampling.temperature": 0.7,
        "train.lr": args.lr,
        "train.attention": "varlen",
        "train.execution": args.execution,
        "train.batch_invariant": True,
        "train.token_budget": max(10112, args.tokens + 16),
        "engine.name": "native",
        "eval.before": False,
        "eval.after": False,
        "checkpoint.save_at_end": False,
        "checkpoint.export_at_end": False,
    }
    if args.num_layers is not None:
        settings["model.num_layers"] = args.num_layers
    settings |= {f"train.{name}": value for name, value in args.train.items()}
    settings |= {f"engine.{name}": value for name, value in args.engine.items()}
    lines = ['kind = "grpo"', 'rewards = [{name = "ids"}]']
    lines += [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
    path.write_text("\n".join(lines) + "\n")
    return path


def name_of(args: argparse.Namespace) -> str:
    """The model, for results of several."""
    layers = "" if args.num_layers is None else f", {args.num_layers} layers"
    return f"{args.model}{layers}"


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Forward and backward, in turns."""
    longest = 2048 // args.scale
    shape = {"prompt_tokens": longest // 2, "tokens": longest - longest // 2}
    found: dict[str, Any] = {}
    for budget in args.token_budget:
        settings = {"token_budget": budget, **args.train}
        jobs = both(args, **shape, train=settings)
        jobs |= {
            f"{e} invariant": job(args, invariant=True, **shape, train=settings, execution=e)
            for e in args.also
        }
        with Sides(args, jobs) as sides:
            sides.pairs(1, do="train", scale=args.scale)
            done = sides.pairs(args.train_pairs, do="train", scale=args.scale)
        one: dict[str, Any] = {"ready": sides.ready}
        for name, answers in done.items():
            ratios = [a["seconds"] / o["seconds"] for a, o in zip(answers, done["ordinary"], strict=True)]
            one[name] = {"ms": spread([1e3 * a["seconds"] for a in answers]), "of_ordinary": spread(ratios)}
            one[name] |= {key: answers[-1][key] for key in ("mfu", "slots", "peak_gib")}
            median, ratio = one[name]["ms"]["median"], one[name]["of_ordinary"]["median"]
            say(f"budget {budget}, {name}: {median:.1f} ms, {ratio:.3f}")
        found[str(budget)] = one
    return found


def chunks(args: argparse.Namespace) -> dict[str, Any]:
    """Every way to compute the same keys and values."""
    samples, prompt, tokens = args.rollouts, 8 * args.prompt_tokens, -(-args.tokens // 8)
    longest = prompt + tokens
    ask: dict[str, Any] = {"samples": samples, "prompt_tokens": prompt, "tokens": tokens, "group": 2}
    ask |= {"ragged": True}
    ask["variants"] = {
        "chunks of 64": {"prefill_chunk": 64},
        "chunks of 23": {"prefill_chunk": 23},
        "a quarter of the rows at a time": {"max_batch": max(1, samples // 4)},
        "a pool that preempts": {"kv_cache_tokens": max(2 * longest, samples * longest // 4)},
        "without graphs": {"eager": True},
    }
    if args.execution != "eager":  # uncompiled layers round otherwise
        del ask["variants"]["without graphs"]
    found = _chunks(args, ask, layers=args.num_layers)
    different = [name for name, one in found["against"].items() if not one["equal"]]
    if different:
        say(f"differ: {different}")
        found["first_layers_that_differ"] = _first_layers(args, ask, most=args.num_layers or args.layers)
    return {name_of(args): found}


def _chunks(args: argparse.Namespace, ask: dict[str, Any], *, layers: int | None) -> dict[str, Any]:
    shape = {name: ask[name] for name in ("prompt_tokens", "tokens")} | {"temperature": 0.7}
    with Sides(args, {"invariant": job(args, invariant=True, num_layers=layers, **shape)}) as sides:
        found = sides.sides["invariant"].ask(do="chunks", **ask)
    for name, one in found["against"].items():
        differ = f"{one['differ']} of {one['values']} differ, max {one['max']:.3g}"
        if one.get("tokens_from_the_first_other_one"):
            differ += f"; {one['tokens_from_the_first_other_one']} tokens from the first other one on"
        say(f"{layers or 'all'} layers, {name}: {differ}")
    return found


def _first_layers(args: argparse.Namespace, ask: dict[str, Any], *, most: int) -> int:
    """The fewest first layers of the model with which something differs: the same weights whatever the number
    of layers."""
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        found = _chunks(args, ask, layers=middle)
        if all(one["equal"] for one in found["against"].values()):
            low = middle
        else:
            high = middle
    return high


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, least and largest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "all": list(values)}


PARTS = {
    "throughput": throughput,
    "contexts": contexts,
    "equal": equal,
    "grpo": grpo,
    "train": train,
    "chunks": chunks,
}
SMALL = {
    "samples": 8,
    "prompt_tokens": 16,
    "tokens": 12,
    "context": 96,
    "rollouts": 16,
    "steps": 2,
    "pairs": 2,
    "train_pairs": 2,
    "scale": 16,
    "token_budget": [512],
    "layers": 2,
}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("parts", nargs="+", choices=list(PARTS))
    made.add_argument("--model", default="shape:llama-3.2-1b")
    made.add_argument("--num-layers", type=int)
    made.add_argument("--layers", type=int, default=16, help="that --model has")
    made.add_argument("--samples", type=int, default=256)
    made.add_argument("--prompt-tokens", type=int, default=64)
    made.add_argument("--tokens", type=int, default=512)
    made.add_argument("--context", type=int, default=16384, help="of contexts")
    made.add_argument("--rollouts", type=int, default=64, help="of equal and chunks, and of a GRPO step")
    made.add_argument("--steps", type=int, default=20, help="of GRPO")
    made.add_argument("--lr", type=float, default=2e-4, help="of GRPO")
    made.add_argument("--grpo-timeout", type=float, default=400)
    made.add_argument("--pairs", type=int, default=3)
    made.add_argument("--train-pairs", type=int, default=9)
    made.add_argument("--token-budget", type=int, nargs="+", default=[10112], help="of train")
    made.add_argument("--scale", type=int, default=1, help="of train: lengths divided by it")
    made.add_argument(
        "--also", nargs="*", default=[], help="executions that train measures too, such as joint"
    )
    made.add_argument("--execution", default="compile")
    made.add_argument("--engine", type=json.loads, default={}, help="JSON of more EngineConfig fields")
    made.add_argument("--train", type=json.loads, default={}, help="JSON of more TrainConfig fields")
    made.add_argument(
        "--beside", nargs="*", choices=["vllm", "sglang"], default=[], help="throughput: raw engines, too"
    )
    made.add_argument(
        "--beside-settings", type=json.loads, default={}, help="JSON: {engine: {python, env, options, ...}}"
    )
    made.add_argument("--small", action="store_true", help="sizes to see that it runs")
    made.add_argument("--out", type=Path, required=True)
    made.add_argument("--work", type=Path, help="logs (a folder beside --out)")
    return made


def main() -> int:
    args = parser().parse_args()
    if args.small:
        vars(args).update(SMALL)
    args.work = (args.work or args.out.with_suffix(".work")).resolve()
    args.work.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {}
    for part in args.parts:
        started = time.perf_counter()
        made = PARTS[part](args)
        made["command"] = " ".join(["python", "benchmarks/native.py", *sys.argv[1:]])
        made["seconds"] = time.perf_counter() - started
        found[part] = found.get(part, {}) | made
        found["machine"] = machine("cuda" if torch.cuda.is_available() else "cpu")
        args.out.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
