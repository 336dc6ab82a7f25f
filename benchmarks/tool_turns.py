"""What tools that wait cost on one GPU: tokens/s of many trajectories with a tool that takes half a second,
with one that takes none, and without turns; keys that are computed again; the gap between engine and trainer;
and the share of a step that the checks of the tokens take.

    python benchmarks/tool_turns.py waiting --out FILE.json    1,024 trajectories of 4 turns of 128 tokens
    python benchmarks/tool_turns.py checks --out FILE.json     20 turns of 400 tokens, with a tokenizer
    python benchmarks/tool_turns.py vllm --out FILE.json       3 steps with vLLM as its own server

`waiting` samples the same tasks in turns, `--repeats` times each: with a tool of 0 s, of `--seconds`, and in
one turn of as many tokens. After each with a tool that waits, the policy is trained on a part of the groups.
`checks` is a run with an environment of the user's (benchmarks/repeat_game.py), whose turns end at a random
token: the model has random weights.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, PreTrainedTokenizerFast

from lockstep import Builder, Environment, load_run, train_online
from lockstep.loop.metrics import rollout_metrics
from lockstep.loop.policy import estimate
from lockstep.models.export import export_hf
from lockstep.models.shapes import random_model, shape_config
from lockstep.rollout.environment import Sampler
from lockstep.schema.batch import rollout_samples
from lockstep.schema.rollout import Prompt, RolloutGroup, Trajectory

CUDA = torch.cuda.is_available()
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
AIMS = {"waits_to_none": 0.90, "waits_to_one_turn": 0.85, "recomputed_share": 0.05, "checks_share": 0.02}


class Waits(Environment):
    """Several turns, between which a tool takes its time and returns ids. The reward is the share of even
    ids."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.turns, self.seconds = args.turns, 0.0

    def tasks(self, step: int, n: int, seed: int) -> list[Prompt]:
        """Random prompts, the same in each step."""
        draw = random.Random(seed)
        length, vocab = self.args.prompt_tokens, 250
        ids = [tuple(draw.randrange(vocab) for _ in range(length)) for _ in range(n)]
        return [Prompt(index=step * n + i, token_ids=ids[i], text="") for i in range(n)]

    async def run(self, task: Prompt, sample: Sampler) -> Trajectory:
        """See Environment."""
        tokens = self.args.tokens * self.args.turns // self.turns
        trajectory = await sample(max_tokens=tokens)
        for _ in range(self.turns - 1):
            trajectory = await sample(await self.tool(trajectory), max_tokens=tokens)
        return trajectory

    async def tool(self, trajectory: Trajectory) -> Sequence[int]:
        """Ids that depend on what the policy wrote."""
        if self.seconds:
            await asyncio.sleep(self.seconds)
        return [1 + i % 200 for i in trajectory.token_ids[-self.args.reply_tokens :]]

    def score(self, groups: Any) -> list[list[float]]:
        """See Environment."""
        return [[even(trajectory) for trajectory in of_task] for _, of_task in groups]


def even(trajectory: Trajectory) -> float:
    ids = [i for span in trajectory.spans if span.author == "policy" for i in span.token_ids]
    return sum(i % 2 == 0 for i in ids) / len(ids)


def settings(args: argparse.Namespace, **more: Any) -> dict[str, Any]:
    """Of a run with `Waits`."""
    context = args.turns * (args.tokens + args.reply_tokens)
    return {
        "model.name": args.model,
        "model.dtype": "bfloat16" if CUDA else "float32",
        "data.source": "ids",
        "data.max_prompt_tokens": args.prompt_tokens,
        "rewards": [{"name": "ids"}],
        "rollout.prompts_per_step": args.prompts,
        "rollout.group_size": args.group,
        "rollout.max_turns": args.turns,
        "rollout.max_trajectory_tokens": context,
        "rollout.sampling.max_tokens": args.turns * args.tokens,
        "rollout.sampling.ignore_eos": True,
        "train.attention": "varlen",
        "train.batch_invariant": True,
        "train.token_budget": max(16384 if CUDA else 0, args.prompt_tokens + context),
        "engine.name": "native",
        "engine.max_batch": args.batch,
        "eval": {"before": False, "after": False},
        **more,
    }


def waiting(args: argparse.Namespace, write: Any) -> dict[str, Any]:
    """Tokens/s of the three, in turns."""
    sides = {"none": (args.turns, 0.0), "waits": (args.turns, args.seconds), "one_turn": (1, 0.0)}
    environment = Waits(args)
    with Builder(load_run(kind="grpo", overrides=settings(args, steps=100))) as build:
        build.environment(environment)
        algorithm = build.algorithm()
        policy = build.policy(algorithm)
        build.roles(policy, environment, algorithm)
        engine = build.engine(policy)
        rollouts = build.rollouts(engine, environment, algorithm)
        engine.load(policy, version=0)
        found: dict[str, Any] = {name: [] for name in sides} | {"steps": []}
        trained = 0
        for repeat in range(-1, args.repeats):  # the first compiles, and does not count
            for name, (turns, seconds) in sides.items():
                if repeat < 0 and name != "waits":
                    continue
                environment.turns, environment.seconds = turns, seconds
                began = time.perf_counter()
                sampled = rollouts.sample(max(0, repeat))
                took = time.perf_counter() - began
                run = figures(sampled.groups, sampled.counts, seconds=took)
                say(f"{'warm up' if repeat < 0 else repeat} {name}: {run['tokens_per_second']:,.0f} tokens/s")
                if repeat >= 0:
                    found[name].append(run)
                if name == "waits":
                    metrics = step(policy, algorithm, sampled.groups[: args.trained_groups], trained)
                    trained += 1
                    engine.load(policy, version=trained)
                    found["steps"].append(metrics)
                    say(f"step {trained}: gap {metrics['logprob_gap_max']}, {metrics['seconds']:.1f} s")
                write(found)
        contract = getattr(engine.engine, "contract", None)
    rates = {name: statistics.median(run["tokens_per_second"] for run in found[name]) for name in sides}
    summary = {
        "tokens_per_second": rates,
        "waits_to_none": rates["waits"] / rates["none"],
        "waits_to_one_turn": rates["waits"] / rates["one_turn"],
        "recomputed_share": max(run["recomputed_share"] for run in found["waits"]),
        "gap": max(metrics["logprob_gap_max"] for metrics in found["steps"]),
        "batch_invariant": contract is not None,
    }
    return found | {"summary": summary}


def figures(groups: Sequence[RolloutGroup], counts: dict[str, float], *, seconds: float) -> dict[str, float]:
    """What one round of sampling took."""
    trajectories = [rollout.trajectory for group in groups for rollout in group.rollouts]
    policy = sum(len(s.token_ids) for t in trajectories for s in t.spans if s.author == "policy")
    everything = sum(len(s.token_ids) for t in trajectories for s in t.spans)
    again = counts.get("engine/recomputed_tokens", 0.0)
    return {
        "seconds": seconds,
        "trajectories": len(trajectories),
        "policy_tokens": policy,
        "tokens": everything,
        "tokens_per_second": policy / seconds,
        "turns": statistics.fmean(t.turns for t in trajectories),
        "recomputed_tokens": again,
        "recomputed_share": again / everything,
        "environment_seconds": statistics.fmean(t.wait_seconds for t in trajectories),
    }


def step(policy: Any, algorithm: Any, groups: Sequence[RolloutGroup], number: int) -> dict[str, float]:
    """Train on the groups."""
    began = time.perf_counter()
    samples = rollout_samples(r.trajectory for group in groups for r in group.rollouts)
    estimates = estimate(algorithm, groups, samples)
    minibatches = policy.pack(number, samples, estimates, algorithm)
    updates = [policy.update(batches, minibatches.loss) for batches in minibatches]
    metrics = rollout_metrics(estimates.groups) | policy.metrics(minibatches, updates)
    kept = {
        name: value
        for name, value in metrics.items()
        if name.startswith(("logprob_gap", "grad_norm", "input/"))
    }
    return {**kept, "trajectories": len(samples), "seconds": time.perf_counter() - began}


def checks(args: argparse.Namespace, write: Any) -> dict[str, Any]:
    """Steps of long conversations, and how much of them the checks take."""
    with TemporaryDirectory(dir=args.work) as work:
        folder = with_tokenizer(args.model, Path(work) / "model")
        vocab = AutoConfig.from_pretrained(folder).vocab_size
        turn = args.long_tokens
        context = args.long_turns * (turn + 40)
        overrides = settings(args) | {
            "steps": args.steps,
            "model.name": str(folder),
            "environment.name": "repeat_game:Repeats",
            "environment.isolation": "shared",
            "environment.max_live": args.long_prompts * args.long_group,
            "data.source": rows(Path(work) / "rows.jsonl"),
            "data.chat_template": TEMPLATE,
            "data.max_prompt_tokens": 256,
            "rewards": [],
            "rollout.prompts_per_step": args.long_prompts,
            "rollout.group_size": args.long_group,
            "rollout.max_turns": args.long_turns,
            "rollout.max_trajectory_tokens": context,
            "rollout.sampling.max_tokens": turn + 16,
            "rollout.sampling.min_tokens": turn - 2,
            "rollout.sampling.stop_token_ids": list(range(1000, vocab, 2)),  # half of them end a turn
            "train.token_budget": context + 256,
            "checkpoint": {"save_at_end": False, "export_at_end": False},
            "log": {"tensorboard": False, "display": "off"},
            "run_dir": str(Path(work) / "run"),
        }
        began = time.perf_counter()
        train_online(load_run(kind="grpo", overrides=overrides))
        lines = (Path(work) / "run/metrics.jsonl").read_text().splitlines()
        found = {"steps": [json.loads(line) for line in lines], "seconds": time.perf_counter() - began}
    write(found)
    share = statistics.median(m["time/token_checks"] / m["time/step"] for m in found["steps"])
    last = found["steps"][-1]
    trajectories = args.long_prompts * args.long_group
    summary = {
        "checks_share": share,
        "checks_ms_per_trajectory": 1000 * last["time/token_checks"] / trajectories,
        "step_seconds": last["time/step"],
        "turns": last["rollout/turns"],
        "template_mismatches": sum(m["rollout/template_mismatches"] for m in found["steps"]),
        "gap": max(m["logprob_gap_max"] for m in found["steps"]),
    }
    say(str(summary))
    return found | {"summary": summary}


def with_tokenizer(model: str, folder: Path) -> Path:
    """A folder with random weights of this shape, and a tokenizer that the repository's pages have taught."""
    pages = sorted(str(path) for path in Path(__file__).parents[1].glob("docs/**/*.md"))
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=32_000,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train(pages, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    config = shape_config(model.removeprefix("shape:"))
    config.vocab_size = len(tokenizer)
    config.bos_token_id = config.eos_token_id = config.pad_token_id = tokenizer.eos_token_id
    module = random_model(
        config,
        seed=0,
        dtype=torch.bfloat16 if CUDA else torch.float32,
        device=torch.device("cuda:0" if CUDA else "cpu"),
        attention="sdpa",
    )
    export_hf(module, tokenizer, folder)
    return folder


def rows(path: Path) -> str:
    """A file of prompts."""
    draw = random.Random(0)
    words = ["the", "sum", "of", "all", "lines", "is", "two", "and", "seven"]
    made = [{"prompt": " ".join(draw.choices(words, k=60))} for _ in range(4096)]
    path.write_text("".join(json.dumps(row) + "\n" for row in made))
    return str(path)


def vllm(args: argparse.Namespace, write: Any) -> dict[str, Any]:
    """The environment of `waiting` in a run with vLLM as its own server."""
    if importlib.util.find_spec("vllm") is None and args.python is None:
        return {"skipped": "vLLM is not installed, and --python names no interpreter that has it"}
    environment = Waits(args)
    environment.seconds = args.seconds
    with TemporaryDirectory(dir=args.work) as work:
        overrides = settings(args) | {
            "steps": 3,
            "engine.name": "vllm",
            "engine.python": args.python or sys.executable,
            "engine.memory_fraction": 0.4 if CUDA else None,
            "train.batch_invariant": False,
            "rollout.prompts_per_step": args.trained_groups,
            "checkpoint": {"save_at_end": False, "export_at_end": False},
            "log": {"tensorboard": False, "display": "off"},
            "run_dir": str(Path(work) / "run"),
        }
        train_online(load_run(kind="grpo", overrides=overrides), environment=environment)
        lines = (Path(work) / "run/metrics.jsonl").read_text().splitlines()
    found = {"steps": [json.loads(line) for line in lines]}
    write(found)
    summary = {
        "steps": len(found["steps"]),
        "turns": found["steps"][-1]["rollout/turns"],
        "gap_mean": max(m["logprob_gap_mean"] for m in found["steps"]),
    }
    say(str(summary))
    return found | {"summary": summary}


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0 when every aim is reached."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("waiting", "checks", "vllm"))
    parser.add_argument("--model", default="shape:llama-3.2-1b")
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--batch", type=int, default=256, help="engine.max_batch")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128, help="of a turn")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--reply-tokens", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=0.5, help="that the tool takes")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--trained-groups", type=int, default=16)
    parser.add_argument("--long-turns", type=int, default=20)
    parser.add_argument("--long-tokens", type=int, default=400)
    parser.add_argument("--long-prompts", type=int, default=4)
    parser.add_argument("--long-group", type=int, default=8)
    parser.add_argument("--steps", type=int, default=1, help="of `checks`")
    parser.add_argument("--python", help="an interpreter that has vLLM")
    parser.add_argument("--work", type=Path, help="folder for temporary files")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    sys.path.insert(0, str(Path(__file__).parent))
    head = {
        "part": args.part,
        "command": ["python", "benchmarks/tool_turns.py", *(argv or sys.argv[1:])],
        "arguments": {name: str(value) for name, value in vars(args).items()},
        "device": torch.cuda.get_device_name() if CUDA else "cpu",
        "versions": {name: metadata.version(name) for name in ("torch", "transformers", "tokenizers")},
    }

    def write(found: dict[str, Any]) -> None:
        args.out.write_text(json.dumps(head | found, indent=1) + "\n", encoding="utf-8")

    began = time.perf_counter()
    found = {"waiting": waiting, "checks": checks, "vllm": vllm}[args.part](args, write)
    write(found | {"wall_seconds": time.perf_counter() - began})
    summary = found.get("summary", {})
    missed = [
        name
        for name, aim in AIMS.items()
        if name in summary and (summary[name] > aim) == name.endswith("share")
    ]
    if summary.get("gap"):
        missed.append("gap")
    print(json.dumps(summary))
    print(f"missed: {', '.join(missed)}" if missed else found.get("skipped", "every aim is reached"))
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
