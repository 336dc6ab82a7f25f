"""PPO with four roles of one size on one GPU: time by phase, memory by role beside its plan, and the gap.

    python benchmarks/roles_gpu.py --shape llama-3.1-8b --layers 12 --out FOLDER --json FILE

Policy, reference, value model and reward model have the named shape, cut to so many layers, with random
weights; they are written to FOLDER first, as a reward model is a folder. The memory of a role is that of the
tensors that its objects hold once a step is done: weights, masters, optimizer states, gradients. Beside it is
what `lockstep plan` says is always there.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from lockstep import OnlineTrainer, build_online, load_run
from lockstep.config.run import GRPORun
from lockstep.loop.machine import Machine
from lockstep.loop.memory_plan import plan_memory
from lockstep.loop.resolve import resolve
from lockstep.loops.online import OnlineParts
from lockstep.models.memory import planned_shape
from lockstep.models.shapes import random_model, shape_config
from lockstep.observe.metrics import Spans

GIB = 2**30
SPECIAL = ["<pad>", "<begin>", "<end>"]


def main(argv: list[str]) -> int:
    """Write the models, run, print and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--token-budget", type=int, default=8192)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=JSON", help="settings of the run")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    begun = time.monotonic()
    run_file = write_run(args, device)
    overrides = {key: json.loads(value) for key, value in (pair.split("=", 1) for pair in args.set)}
    run = load_run(str(run_file), overrides=overrides)
    assert isinstance(run, GRPORun)
    total = torch.cuda.get_device_properties(0).total_memory if device.type == "cuda" else 0
    machine, shape = Machine(device=str(device), total_bytes=total), partial(planned_shape, run.model)
    sized = resolve(run, shape=shape, machine=machine, manifest={}).run
    plan = plan_memory(sized, device=device)
    print(
        f"models written in {time.monotonic() - begun:.0f} s; plan {plan.peak_bytes / GIB:.1f} GiB",
        flush=True,
    )
    wait = torch.cuda.synchronize if device.type == "cuda" else None
    trainer = OnlineTrainer(build_online(run), spans=Spans(synchronize=wait))
    result: dict[str, Any] = {
        "command": ["benchmarks/roles_gpu.py", *argv],
        "machine": torch.cuda.get_device_name() if device.type == "cuda" else platform.machine(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "parameters": plan.shape.parameters,
        "run": json.loads(sized.model_dump_json()),
        "steps": [],
    }
    trainer.push(policy_version=0)
    for step in range(args.steps):
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        trainer.spans.start()
        began = time.monotonic()
        sampled = trainer.sample(step)
        metrics = trainer.update(sampled.groups, step=step).metrics
        trainer.push(policy_version=step + 1)
        spans = trainer.spans.flush()
        row = {"time/step": time.monotonic() - began, **spans, **metrics}
        if device.type == "cuda":
            row["memory/cuda_peak_gib"] = torch.cuda.max_memory_allocated() / GIB
        result["steps"].append(row)
        shown = {k: round(v, 3) for k, v in row.items() if k.startswith("time/") or "gap" in k}
        print(step, json.dumps(shown), flush=True)
        if step == 0:
            result["memory_gib"] = compare(held(trainer.parts, device), plan)
            print(json.dumps(result["memory_gib"]), flush=True)
    peak = max(row.get("memory/cuda_peak_gib", 0.0) for row in result["steps"])
    result["peak_gib"] = {"measured": peak, "plan": plan.peak_bytes / GIB}
    print(json.dumps(result["peak_gib"]))
    trainer.parts.close()
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def compare(measured: Mapping[str, int], plan: Any) -> dict[str, dict[str, float | None]]:
    """Measured and planned GiB of each role between steps, and their ratio; None: nothing is planned."""
    planned = {
        "ref": sum(p.bytes for p in plan.parts if p.name == "reference model" and p.phase == "always"),
        **{
            role: sum(
                part.bytes
                for part in plan.parts
                if part.phase == "always"
                and part.role == role
                and part.name not in ("reference model", "Python, torch, libraries", "KV cache")
            )
            for role in ("policy", "value", "reward_model")
        },
        "engine": sum(part.bytes for part in plan.parts if part.name == "KV cache"),
    }
    return {
        role: {
            "measured": round(measured[role] / GIB, 3),
            "plan": round(planned[role] / GIB, 3),
            "ratio": round(measured[role] / planned[role], 3) if planned[role] else None,
        }
        for role in planned
    }


def held(parts: OnlineParts, device: torch.device) -> dict[str, int]:
    """Bytes on the device that the objects of each role hold; what two roles share counts for the first."""
    gc.collect()
    seen: set[int] = set()
    assert parts.value is not None
    owners: dict[str, Any] = {
        "ref": parts.ref,
        "policy": parts.backend,
        "value": parts.value.backend,
        "reward_model": parts.reward_models,
        "engine": parts.engine,
    }
    policy = storages(parts.backend.module, device) if hasattr(parts.backend, "module") else {}
    of_ref = storages(getattr(parts.backend, "_ref", None), device)
    sizes: dict[str, int] = {}
    for role, owner in owners.items():
        found = of_ref if role == "ref" else storages(owner, device)
        if role == "ref":
            found = {key: size for key, size in found.items() if key not in policy}
        sizes[role] = sum(size for key, size in found.items() if key not in seen)
        seen |= found.keys()
    return sizes


def storages(owner: Any, device: torch.device) -> dict[int, int]:
    """Address and bytes of every tensor storage on the device that an object reaches by its attributes."""
    found: dict[int, int] = {}
    visited: set[int] = set()
    queue = [owner]
    while queue:
        item = queue.pop()
        if id(item) in visited or isinstance(item, type | str | bytes | int | float | None.__class__):
            continue
        visited.add(id(item))
        if isinstance(item, torch.Tensor):
            if item.device.type == device.type:
                storage = item.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
            if item.is_leaf and item.grad is not None:
                queue.append(item.grad)
        elif isinstance(item, Mapping):
            queue += item.values()
        elif isinstance(item, list | tuple | set | frozenset):
            queue += item
        elif type(item).__module__.split(".")[0] in ("lockstep", "torch", "transformers"):
            queue += vars(item).values() if hasattr(item, "__dict__") else []
            queue += [getattr(item, name, None) for name in getattr(type(item), "__slots__", ())]
    return found


def write_models(shape: str, layers: int, folder: Path, device: torch.device) -> list[str]:
    """Write policy/ and reward/ with a tokenizer of one word for each id; returns the words."""
    config = shape_config(shape)
    config.num_hidden_layers = layers
    words = [*SPECIAL, *(f"w{index}" for index in range(config.vocab_size - len(SPECIAL)))]
    raw = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=SPECIAL[0]))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token=SPECIAL[0], bos_token=SPECIAL[1], eos_token=SPECIAL[2]
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}"
    policy, reward = folder / "policy", folder / "reward"
    dtype = torch.bfloat16
    if not (policy / "tokenizer.json").is_file():
        model = random_model(config, seed=0, dtype=dtype, device=device, attention="sdpa")
        model.save_pretrained(policy)
        del model
        config.num_labels, config.pad_token_id = 1, 0
        torch.manual_seed(1)
        torch.set_default_dtype(dtype)
        with torch.device(device):
            scorer = transformers.AutoModelForSequenceClassification.from_config(config, dtype=dtype)
        torch.set_default_dtype(torch.float32)
        scorer.save_pretrained(reward)
        del scorer
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        tokenizer.save_pretrained(reward)
        tokenizer.save_pretrained(policy)
    return words


def write_prompts(path: Path, words: Sequence[str], count: int) -> None:
    """Write so many prompts of 100 to 249 random words."""
    generator = torch.Generator().manual_seed(0)
    with path.open("w") as file:
        for _ in range(count):
            length = int(torch.randint(100, 250, (1,), generator=generator))
            ids = torch.randint(3, len(words), (length,), generator=generator).tolist()
            file.write(json.dumps({"prompt": " ".join(words[i] for i in ids), "answer": ""}) + "\n")


def write_run(args: argparse.Namespace, device: torch.device) -> Path:
    """Write both models, prompts and the run's settings."""
    words = write_models(args.shape, args.layers, args.out, device)
    write_prompts(args.out / "prompts.jsonl", words, args.prompts * args.steps)
    path = args.out / "run.toml"
    path.write_text(
        f"""kind = "ppo"
steps = {args.steps}
rewards = []

[model]
name = "{args.out / "policy"}"
dtype = "bfloat16"

[data]
source = "{args.out / "prompts.jsonl"}"
max_prompt_tokens = 256

[reward_model]
name = "{args.out / "reward"}"
dtype = "bfloat16"

[algorithm.kl]
coef = 0.01
place = "reward"

[rollout]
prompts_per_step = {args.prompts}
group_size = 4

[rollout.sampling]
max_tokens = {args.max_tokens}
ignore_eos = true

[train]
lr = 1e-6
layout = "packed"
token_budget = {args.token_budget}
activation_checkpointing = true

[value]
lr = 1e-6

[eval]
before = false
after = false
"""
    )
    return path


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
