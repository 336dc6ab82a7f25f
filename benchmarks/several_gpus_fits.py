"""Runs of `several_gpus.py fits`: does what nobody has sized by hand fit, and does it need what was planned?

Runs on text need folders: policy/ and reward/ have the weights of the shape, every layer the same random
ones, and share their files. The tokenizer has one word for each id. All documents have their full length, as
the plan assumes.
"""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GIB = 2**30
SPECIAL = ("<pad>", "<begin>", "<end>")
ROWS = 256
"""Documents, pairs and prompts: more than the steps that are measured take."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """What a machine can take; small: to see on a CPU that everything runs."""

    prompts: int = 16
    tokens: int = 512
    document: int = 8192
    pair: int = 1024
    batch: int = 16

    @classmethod
    def small(cls) -> Sizes:
        return cls(prompts=4, tokens=16, document=64, pair=48, batch=4)


def runs(model: str, sizes: Sizes, *, folder: Path) -> Iterator[tuple[str, int, str, tuple[str, ...]]]:
    """(name, GPUs, kind of run, flags): nothing about memory, backend, or kernels.

    Args:
        model: one shape for all; empty: each run's own.
        folder: of `write_folder`.
    """
    texts = ("--model.name", str(folder / "policy"))
    prompts = (
        "--data.task",
        "min_tokens=140",
        "max_tokens=140",
        "--rollout.sampling.max-tokens",
        str(sizes.tokens),
    )
    half = ("--rollout.prompts-per-step", str(max(2, sizes.prompts // 2)))

    def shape(name: str) -> tuple[str, ...]:
        return ("--model.name", model or f"shape:{name}")

    whole = (*shape("qwen3-14b"), *prompts, "--rollout.prompts-per-step", str(sizes.prompts))
    yield "14b grpo", 4, "grpo", whole
    documents = ("--data.source", str(folder / "documents.jsonl"), "--data.max-length", str(sizes.document))
    yield "8b sft 8192", 4, "sft", (*texts, *documents, "--batch-size", str(sizes.batch))
    pairs = ("--data.source", str(folder / "pairs.jsonl"), "--data.max-length", str(sizes.pair))
    yield "8b dpo", 4, "dpo", (*texts, *pairs, "--batch-size", str(2 * sizes.batch))
    yield "8b ppo, four roles", 4, "ppo", (*texts, *half, *_roles(folder, sizes))
    yield "3b grpo", 1, "grpo", (*shape("llama-3.2-3b"), *prompts, *half)
    yield "8b lora grpo", 1, "grpo", (*shape("llama-3.1-8b"), "--model.lora.rank", "16", *prompts, *half)


def _roles(folder: Path, sizes: Sizes) -> tuple[str, ...]:
    return (
        *("--recipe", str(folder / "ppo.toml"), "--data.source", str(folder / "prompts.jsonl")),
        *("--algorithm.kl.coef", "0.01"),
        *("--rollout.sampling.max-tokens", str(sizes.tokens)),
    )


def write_folder(shape: str, sizes: Sizes, *, folder: Path) -> None:
    """Write policy/, reward/, and the rows of the runs on text."""
    from lockstep.models.shapes import shape_config

    config = shape_config(shape.removeprefix("shape:"))
    words = [*SPECIAL, *(f"w{index}" for index in range(config.vocab_size - len(SPECIAL)))]
    for name in ("policy", "reward"):
        (folder / name).mkdir(parents=True, exist_ok=True)
        _write_tokenizer(words, folder / name)
    _write_weights(config, folder)
    _write_rows(words, sizes, folder)
    recipe = f'kind = "ppo"\nrewards = []\n[reward_model]\nname = {json.dumps(str(folder / "reward"))}\n'
    (folder / "ppo.toml").write_text(recipe)


def _write_tokenizer(words: Sequence[str], folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=SPECIAL[0]))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token=SPECIAL[0], bos_token=SPECIAL[1], eos_token=SPECIAL[2]
    )
    tokenizer.save_pretrained(folder)


def _write_weights(config: Any, folder: Path) -> None:
    """Write the policy's weights, a file for each layer, and link those that the reward model has too."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    sizes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    torch.manual_seed(0)
    drawn: dict[str, torch.Tensor] = {}
    files: dict[str, dict[str, torch.Tensor]] = {}
    for name, size in sizes.items():
        layer = name.split(".layers.")[-1].partition(".")[0] if ".layers." in name else name
        same = name.replace(f".layers.{layer}.", ".layers.0.")
        if same not in drawn:
            drawn[same] = torch.ones(size) if "norm" in name else torch.randn(size).mul_(0.02)
            drawn[same] = drawn[same].bfloat16()
        files.setdefault(f"model-{layer}.safetensors", {})[name] = drawn[same]
    index = {}
    for file, tensors in files.items():
        save_file(tensors, folder / "policy" / file, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, file)
    score = {"score.weight": torch.randn(1, config.hidden_size).mul_(0.02).bfloat16()}
    save_file(score, folder / "reward" / "score.safetensors", metadata={"format": "pt"})
    of_reward = {name: file for name, file in index.items() if name != "lm_head.weight"}
    for file in dict.fromkeys(of_reward.values()):
        (folder / "reward" / file).hardlink_to(folder / "policy" / file)
    _write_config(config, "ForCausalLM", index, folder / "policy")
    config.num_labels, config.pad_token_id = 1, 0
    _write_config(
        config,
        "ForSequenceClassification",
        of_reward | {"score.weight": "score.safetensors"},
        folder / "reward",
    )


def _write_config(config: Any, head: str, index: Mapping[str, str], folder: Path) -> None:
    config.architectures = [type(config).__name__.removesuffix("Config") + head]
    config.dtype = "bfloat16"
    config.save_pretrained(folder)
    total = sum((folder / file).stat().st_size for file in set(index.values()))
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": dict(index)})
    (folder / "model.safetensors.index.json").write_text(text)


def _write_rows(words: Sequence[str], sizes: Sizes, folder: Path) -> None:
    import random

    draw = random.Random(0)

    def text(count: int) -> str:
        return " ".join(words[draw.randrange(len(SPECIAL), len(words))] for _ in range(count))

    prompt, answer = sizes.pair // 4, sizes.pair
    rows = {
        "documents": lambda: {"text": text(sizes.document)},
        "pairs": lambda: {
            "prompt": text(prompt),
            "chosen": " " + text(answer),
            "rejected": " " + text(answer),
        },
        "prompts": lambda: {"prompt": text(140), "answer": ""},
    }
    for name, row in rows.items():
        lines = (json.dumps(row()) for _ in range(ROWS))
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


@dataclass(slots=True)
class Driver:
    """What nvidia-smi shows of the devices while a run is on."""

    devices: Sequence[str]
    peak_gib: float = 0.0
    """Of the fullest, of all processes on it."""
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> Driver:
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        assert self._thread is not None
        self._thread.join()

    def _watch(self) -> None:
        query = ["nvidia-smi", f"--id={','.join(self.devices)}", "--query-gpu=memory.used"]
        while not self._stop.wait(0.5):
            try:
                shown = subprocess.run(
                    [*query, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=20
                ).stdout
            except FileNotFoundError:  # a machine without GPUs
                return
            sizes = [int(word) / 1024 for word in shown.split() if word.isdigit()]
            self.peak_gib = max([self.peak_gib, *sizes])


def memory_of(run: Path, rows: Sequence[Mapping[str, Any]], *, shown: float) -> dict[str, Any]:
    """What a run planned, by its manifest, and what it took, in GiB.

    Args:
        rows: of metrics.jsonl, all steps: memory must do for the first, too.
        shown: at most, by nvidia-smi.
    """
    file = run / "manifest.json"
    manifest = json.loads(file.read_text()) if file.is_file() else {}
    plan = manifest.get("axes", {}).get("memory", {})
    planned = {name: round(size / GIB, 2) for name, size in plan.get("allocated_by_phase", {}).items()}

    def peak(name: str) -> float | None:
        values = [row[name] for row in rows if row.get(name) is not None]
        return round(max(values), 2) if values else None

    found: dict[str, Any] = {"plan": plan.get("line"), "plans": len(manifest.get("plans", []))}
    phases = {}
    for phase, size in planned.items():
        measured = peak(f"memory/{phase}_peak_gib")
        off = None if measured is None else round(size / measured - 1, 4)
        phases[phase] = {"planned": size, "measured": measured, "planned_over_measured": off}
    found["phases"] = phases
    whole, reserved = peak("memory/cuda_peak_gib"), peak("memory/cuda_reserved_gib")
    if plan and whole is not None:
        allocated, total = plan["allocated_bytes"] / GIB, plan["peak_bytes"] / GIB
        found |= {
            "allocated": {
                "planned": round(allocated, 2),
                "measured": whole,
                "planned_over_measured": round(allocated / whole - 1, 4),
            },
            "beside": {
                "planned": round(total - allocated, 2),
                "fragmentation": round((reserved or 0) - whole, 2),
                "context_and_nccl": round(shown - (reserved or 0), 2),
            },
            "shown": round(shown, 2),
        }
    return found
