"""Do recipes of tinker-cookbook run unmodified and offline against `lockstep serve`?

    python benchmarks/tinker_recipes.py --work DIR --out FILE.json [--only NAME ...] [--model MODEL]

Needs `pip install --no-deps -r benchmarks/tinker_constraints.txt` beside lockstep-rl[serve]. Starts a server
with one model under two of the hub names that recipes know, and runs each recipe as its own command in a
working directory where these names are folders with the tokenizer and the data sets are folders of generated
rows, so that nothing is downloaded. FILE has each command, its exit status, seconds, the metrics of its
steps, and the recipes that cannot run here, with the reason.

- gsm8k holds sums of one digit: 70 pairs to train on, 30 others to evaluate with.
- sums.jsonl, for `sl_basic` before `rl_basic`, teaches the format of an answer by the pairs to train on.
- wikitext is this repository's documentation.
- MODEL `tiny` is two layers with random weights: it shows what runs, not what learns.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.models.source import bundled_folder

BASE, CHAT = "meta-llama/Llama-3.2-1B", "Qwen/Qwen3-8B"
"""Names that recipes look up: their renderers are plain text with roles, and chat with tools."""
ROOT = Path(__file__).resolve().parent.parent
_SMALL = ("lora_rank=8", "max_steps=3")


@dataclass(frozen=True, slots=True)
class Recipe:
    """A recipe and how it is called."""

    module: str
    arguments: tuple[str, ...]
    timeout: float = 1800.0
    after: str | None = None
    """A recipe that runs before it, and whose last weights it begins with."""


def _rl_loop(loss: str) -> Recipe:
    sizes = ("batch_size=2", "group_size=4", "max_tokens=16", *_SMALL)
    return Recipe("rl_loop", (f"model_name={BASE}", f"loss_fn={loss}", *sizes))


_PLAIN = (f"model_name={BASE}", "renderer_name=role_colon")
_PAGES = (
    "task.num_pages_min=3",
    "task.num_pages_max=4",
    "task.page_chars=2000",
    "max_trajectory_tokens=7000",
)
_TOOLS = (f"model_name={CHAT}", "renderer_name=qwen3_disable_thinking")
_SUMS = "dataset_builder.common_config"
_FORMAT = (
    f"model_name={BASE}",
    "dataset_builder=tinker_cookbook.supervised.data:FromConversationFileBuilder",
    "dataset_builder.file_path=sums.jsonl",
    f"{_SUMS}.model_name_for_tokenizer={BASE}",
    f"{_SUMS}.renderer_name=role_colon",
    f"{_SUMS}.max_length=128",
    f"{_SUMS}.batch_size=8",
    f"{_SUMS}.train_on_what=all_assistant_messages",
)
# The recipe gives its data set builder as a value, which the command line replaces only as a whole.
_GSM8K = (
    f"model_name={BASE}",
    "loss_fn=importance_sampling",
    "dataset_builder=tinker_cookbook.recipes.math_rl.math_env:Gsm8kDatasetBuilder",
    f"dataset_builder.model_name_for_tokenizer={BASE}",
    "dataset_builder.renderer_name=role_colon",
    "dataset_builder.batch_size=4",
    "dataset_builder.group_size=8",
    "dataset_builder.convo_prefix=None",
)
RECIPES: Mapping[str, Recipe] = {
    "sl_loop": Recipe("sl_loop", (f"model_name={BASE}", "batch_size=4", *_SMALL)),
    "rl_loop importance_sampling": _rl_loop("importance_sampling"),
    "rl_loop cispo": _rl_loop("cispo"),
    "rl_loop gspo": _rl_loop("gspo"),
    "math_rl": Recipe(
        "math_rl.train",
        (
            *_PLAIN,
            "loss_fn=importance_sampling",
            "groups_per_batch=4",
            "group_size=4",
            "eval_every=2",
            *_SMALL,
        ),
    ),
    "preference.dpo": Recipe("preference.dpo.train", (*_PLAIN, "batch_size=2", "max_steps=3")),
    "preference.shorter": Recipe(
        "preference.shorter.train",
        (*_PLAIN, "batch_size=2", "group_size=4", "max_tokens=16", "eval_every=0", "max_steps=3"),
    ),
    "multiplayer_rl.guess_number": Recipe(
        "multiplayer_rl.guess_number.train",
        (*_PLAIN, "batch_size=2", "group_size=2", "max_tokens=8", "eval_every=0", "max_steps=2"),
    ),
    "rl_numerics_check": Recipe(
        "rl_numerics_check.train",
        (
            *_TOOLS,
            "group_size=2",
            "groups_per_batch=2",
            *_PAGES,
            "max_tokens=48",
            "learning_rate=1e-3",
            *_SMALL,
        ),
    ),
    "sl_basic": Recipe(
        "sl_basic", (*_FORMAT, "learning_rate=5e-4", "lora_rank=8", "eval_every=0", "max_steps=12")
    ),
    "rl_basic": Recipe(
        "rl_basic",
        (*_GSM8K, "max_tokens=12", "learning_rate=3e-4", "eval_every=5", "max_steps=26", "lora_rank=8"),
        after="sl_basic",
    ),
}
NOT_HERE: Mapping[str, str] = {
    "multiplayer_rl.text_arena": "needs the textarena package",
    "multiplayer_rl.twenty_questions": "needs a second model that answers questions",
    "preference.rlhf": "trains three models; its two parts, SFT and RL against a preference model, run above",
    "code_rl, harbor_rl, search_tool": "need a sandbox service, or a search index of the network",
    "vlm_classifier, audio": "images and audio are not served",
    "verifiers_rl": "needs environments of the network",
}


def write_inputs(work: Path, model: str) -> None:
    """Write the folders that recipes find in their working directory."""
    tokenizer = bundled_folder(model.partition(":")[2]) if model.startswith("bundled:") else Path(model)
    for name in (BASE, CHAT):
        folder = work / name
        folder.mkdir(parents=True, exist_ok=True)
        for file in ("tokenizer.json", "tokenizer_config.json", "config.json", "chat_template.jinja"):
            if (tokenizer / file).exists():
                shutil.copy(tokenizer / file, folder / file)
    chance = random.Random(0)
    pairs = [(a, b) for a in range(10) for b in range(10)]
    chance.shuffle(pairs)
    sums = {"train": pairs[:70] * 12, "test": pairs[70:] * 2}
    _dataset(work / "openai/gsm8k", "main", {s: map(_sum, rows) for s, rows in sums.items()})
    ask = " Provide a numerical answer without units, written inside \\boxed{}."
    turns = [(f"What is {a} + {b}?{ask}", f"\\boxed{{{a + b}}}") for a, b in sums["train"]]
    talks = [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": reply}]}
        for q, reply in turns
    ]
    (work / "sums.jsonl").write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    words = ["river", "stone", "winter", "garden", "engine", "letter", "window", "bridge", "paper", "silver"]
    chats = [
        {
            "prompt": (question := f"Name two things: {chance.choice(words)} or {chance.choice(words)}?"),
            "prompt_id": str(number),
            "messages": [
                {"role": "user", "content": question},
                {
                    "role": "assistant",
                    "content": f"The {chance.choice(words)} and the {chance.choice(words)}.",
                },
            ],
            "category": "Chat",
        }
        for number in range(64)
    ]
    _dataset(work / "HuggingFaceH4/no_robots", "default", {"train": chats, "test": chats[:16]})
    compared = [
        {name: f"\n\nHuman: Where is the {word}?\n\nAssistant: {answer}" for name, answer in answers.items()}
        for word in words * 8
        for answers in [{"chosen": f"The {word} is here.", "rejected": "I do not know, and I will not say."}]
    ]
    _dataset(work / "Anthropic/hh-rlhf", "default", {"train": compared, "test": compared[:16]})
    text = [line for page in sorted((ROOT / "docs").rglob("*.md")) for line in page.read_text().splitlines()]
    pages = [{"text": line + "\n"} for line in text]
    splits = {"train": pages, "validation": pages[:100], "test": pages[:100]}
    _dataset(work / "Salesforce/wikitext", "wikitext-103-raw-v1", splits)


def tiny_model(folder: Path) -> str:
    """Write a model of two small layers with random weights and the bundled tokenizer; returns its folder."""
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(bundled_folder("smollm2-135m"))
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    more = {"num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 8192}
    config = Qwen3Config(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **sizes, **more)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def _sum(pair: tuple[int, int]) -> dict[str, str]:
    a, b = pair
    return {"question": f"What is {a} + {b}?", "answer": f"{a} + {b} = {a + b}\n#### {a + b}"}


def _dataset(folder: Path, config: str, splits: Mapping[str, Iterable[Mapping[str, Any]]]) -> None:
    """Write a folder that `load_dataset(NAME, CONFIG)` takes for the data set of that name."""
    (folder / config).mkdir(parents=True, exist_ok=True)
    for split, rows in splits.items():
        (folder / config / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = "".join(f"  - split: {split}\n    path: {config}/{split}.jsonl\n" for split in splits)
    header = f"configs:\n- config_name: {config}\n  default: true\n  data_files:\n{files}"
    (folder / "README.md").write_text(f"---\n{header}---\n")


@contextmanager
def served(work: Path, model: str, port: int) -> Iterator[dict[str, str]]:
    """The environment of clients of a server that runs meanwhile."""
    directory = work / "served"
    log = (work / "server.log").open("ab")
    command = [sys.executable, "-m", "lockstep", "serve", "--dir", str(directory), "--port", str(port)]
    for name in (BASE, CHAT):
        command += ["--model", f"{name}={model}"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert server.stdout is not None
        if not any(line.strip() == "serve: ready" for line in server.stdout):
            raise SystemExit(f"the server did not start; see {work / 'server.log'}")
        token = json.loads((directory / "tokens.json").read_text())["user"]
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(work / "cache"), "WANDB_MODE": "disabled"}
        url = f"http://127.0.0.1:{port}"
        yield {**os.environ, **offline, "TINKER_BASE_URL": url, "TINKER_API_KEY": token}
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(120)
        log.close()


def run(name: str, recipe: Recipe, work: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    """Run one recipe. Returns its command, exit status, seconds, and the metrics of its steps."""
    logs = work / "logs" / name.replace(" ", "_")
    shutil.rmtree(logs, ignore_errors=True)
    module = f"tinker_cookbook.recipes.{recipe.module}"
    begin = () if recipe.after is None else (f"load_checkpoint_path={_last_state(work, recipe.after)}",)
    command = [sys.executable, "-m", module, *recipe.arguments, *begin, f"log_path={logs}"]
    started = time.monotonic()
    with (work / f"{logs.name}.out").open("wb") as out:
        try:
            status: int | str = subprocess.run(
                command,
                cwd=work,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                timeout=recipe.timeout,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            status = f"not done after {recipe.timeout:g} s"
    file = logs / "metrics.jsonl"
    steps = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    kept = [{k: v for k, v in step.items() if _kept(k)} for step in steps]
    seconds = round(time.monotonic() - started, 1)
    loaded = () if recipe.after is None else (f"load_checkpoint_path=STATE OF {recipe.after}",)
    shown = " ".join(["python", "-m", module, *recipe.arguments, *loaded])
    return {"command": shown, "status": status, "seconds": seconds, "steps": kept}


def _last_state(work: Path, name: str) -> str:
    file = work / "logs" / name / "checkpoints.jsonl"
    if not file.exists():
        raise SystemExit(f"{file} does not exist: run {name} first, in the same --work")
    return str(json.loads(file.read_text().splitlines()[-1])["state_path"])


def _kept(name: str) -> bool:
    parts = ("reward", "correct", "loss", "nll", "kl_", "accuracy", "margin", "turns", "tokens")
    return name == "step" or any(part in name for part in parts)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", choices=list(RECIPES))
    parser.add_argument("--model", default="bundled:smollm2-135m")
    parser.add_argument("--port", type=int, default=8791)
    arguments = parser.parse_args()
    work = arguments.work.resolve()
    model = tiny_model(work / "tiny") if arguments.model == "tiny" else arguments.model
    write_inputs(work, model)
    found: dict[str, Any] = {
        "model": arguments.model,
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs",
        "not_here": dict(NOT_HERE),
        "recipes": {},
    }
    with served(work, model, arguments.port) as environment:
        for name in arguments.only or RECIPES:
            found["recipes"][name] = result = run(name, RECIPES[name], work, environment)
            print(
                f"{name}: status {result['status']}, {len(result['steps'])} steps, {result['seconds']} s",
                flush=True,
            )
            arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    return int(any(result["status"] != 0 for result in found["recipes"].values()))


if __name__ == "__main__":
    sys.exit(main())
