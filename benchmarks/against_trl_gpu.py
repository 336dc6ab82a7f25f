"""How fast is a GRPO step on one GPU against TRL with vLLM in the same process?

    python benchmarks/against_trl_gpu.py --sides lockstep --out benchmarks/results/NAME.json
    python benchmarks/against_trl_gpu.py --trl-batch 8 16 32 64 --liger --out ...
    python benchmarks/against_trl_gpu.py --sides lockstep --prompt-tokens 830 --set train.layout=packed

Model: the shape of Llama 3.2 1B with a vocabulary of 49,152 words, random weights, bfloat16; both sides load
the same folder. 32 prompts of --prompt-tokens words, 8 completions of 512 tokens each (the end is ignored),
temperature 1, token mean, no KL term, one update per rollout batch, lr 1e-6, optimizer included. The reward
is the share of different words in a completion: it varies in nearly every group, which is checked (--signal).

Each side is a process of its own, one after the other on the same GPU: --steps steps, the first --warm-up
left out, medians. Lockstep runs with its defaults but train.token_budget = 16384 and what --set says, in a
run of --planned steps (train.execution = "auto" compiles where a run's steps pay for it) that is ended after
--steps; its gap must be 0 in every step. TRL runs once for each --trl-batch (its micro-batch), with --liger
also with Liger's kernels; its best counts.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

PROMPTS, GROUP, TOKENS, VOCABULARY = 32, 8, 512, 49152
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]


def main() -> int:
    """Run the sides that were asked for; 1 if a run failed a check."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sides", nargs="+", choices=["lockstep", "trl"], default=["lockstep", "trl"])
    parser.add_argument("--prompt-tokens", type=int, default=140)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warm-up", type=int, default=3, help="steps that do not count")
    parser.add_argument("--planned", type=int, default=400, help="steps of Lockstep's run, ended early")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings of Lockstep's run"
    )
    parser.add_argument("--trl-batch", type=int, nargs="+", default=[32], help="TRL: micro-batches to try")
    parser.add_argument("--liger", action="store_true", help="TRL: with Liger's kernels as well")
    parser.add_argument("--layers", type=int, default=16, help="of the model; fewer to see that it runs")
    parser.add_argument("--signal", type=float, default=0.95, help="least share of groups with a signal")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        job = json.loads(args.child)
        if job["side"] == "trl":
            print(json.dumps(trl_side(job)), flush=True)
        else:
            lockstep_side(job)
        return 0
    report: dict[str, Any] = {"command": ["benchmarks/against_trl_gpu.py", *sys.argv[1:]], "runs": []}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "model")
        make_model(folder, layers=args.layers)
        base = {"folder": str(folder), "scratch": scratch, **vars(args), "out": None}
        jobs = [{**base, "side": "lockstep"}] if "lockstep" in args.sides else []
        if "trl" in args.sides:
            ligers = (False, True) if args.liger else (False,)
            jobs += [
                {**base, "side": "trl", "batch": b, "use_liger": u} for u in ligers for b in args.trl_batch
            ]
        for job in jobs:
            report["runs"].append(run := measured(job))
            print({name: value for name, value in run.items() if not isinstance(value, list)}, flush=True)
            if args.out:
                args.out.write_text(json.dumps(report) + "\n")
    medians = {
        side: [r["median"] for r in report["runs"] if r["side"] == side and "median" in r]
        for side in args.sides
    }
    if medians.get("lockstep") and medians.get("trl"):
        report["ratio"] = min(medians["trl"]) / medians["lockstep"][0]
        print(f"TRL at its best / Lockstep: {report['ratio']:.2f}")
    report["machine"] = machine()
    if args.out:
        args.out.write_text(json.dumps(report) + "\n")
    return int(any(run.get("failed") for run in report["runs"]))


def machine() -> dict[str, str]:
    """The GPU, and versions."""
    import torch
    import transformers

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {"device": name, "torch": torch.__version__, "transformers": transformers.__version__}


def measured(job: dict[str, Any]) -> dict[str, Any]:
    """One side in a process of its own; its seconds per step, or the end of what it said."""
    command = [sys.executable, os.path.abspath(__file__), "--child", json.dumps(job, default=str)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    about = {name: job[name] for name in ("side", "batch", "use_liger") if name in job}
    if ended.returncode:
        return {**about, "failed": True, "log": (ended.stdout + ended.stderr)[-3000:].splitlines()}
    answer = json.loads(ended.stdout.splitlines()[-1])
    counted = answer["seconds"][job["warm_up"] :]
    return {**about, **answer, "median": statistics.median(counted)}


def make_model(folder: Path, *, layers: int) -> None:
    """Random weights of the shape, and a tokenizer whose tokens are words."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = SPECIAL + [f"w{i}" for i in range(VOCABULARY - len(SPECIAL))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=8192,
        rope_theta=500000.0,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    fast.save_pretrained(folder)


def prompts(job: dict[str, Any]) -> list[str]:
    """PROMPTS texts for each step."""
    draw = random.Random(0)
    words = range(VOCABULARY - len(SPECIAL))
    count = PROMPTS * job["steps"]
    return [" ".join(f"w{draw.choice(words)}" for _ in range(job["prompt_tokens"])) for _ in range(count)]


def different_words(text: str) -> float:
    """The reward of both sides."""
    words = str(text).split()
    return len(set(words)) / max(1, len(words))


def different_words_of_row(prompt: Any, completion: Any, row: Any = None, **_: Any) -> float:
    """The same as Lockstep calls it."""
    return different_words(completion)


def lockstep_side(job: dict[str, Any]) -> None:
    """`train_online`, read from its metrics.jsonl while it runs."""
    from lockstep import load_run, train_online

    data, run_dir = Path(job["scratch"], "prompts.jsonl"), Path(job["scratch"], f"run-{time.time_ns()}")
    data.write_text("".join(json.dumps({"prompt": text, "answer": ""}) + "\n" for text in prompts(job)))
    settings: dict[str, Any] = {
        "steps": job["planned"],
        "model.name": job["folder"],
        "model.dtype": "bfloat16",
        "data.source": str(data),
        "data.max_prompt_tokens": job["prompt_tokens"] + 8,
        "rollout.prompts_per_step": PROMPTS,
        "rollout.group_size": GROUP,
        "rollout.sampling.max_tokens": TOKENS,
        "rollout.sampling.ignore_eos": True,
        "rollout.sampling.temperature": 1.0,
        "algorithm.aggregation": "token_mean",
        "train.lr": 1e-6,
        "train.token_budget": 16384,
        "eval.num_prompts": 1,
        "eval.before": False,
        "eval.after": False,
        "checkpoint.every": 0,
        "run_dir": str(run_dir),
    }
    for pair in job["set"]:
        name, _, text = pair.partition("=")
        try:
            settings[name] = json.loads(text)
        except ValueError:
            settings[name] = text
    sys.path.insert(0, str(Path(__file__).parent))
    from against_trl_gpu import different_words_of_row as reward  # by a name that its process can import

    metrics = run_dir / "metrics.jsonl"
    answer = threading.Thread(target=answer_after, args=(metrics, job), daemon=True)
    answer.start()
    train_online(load_run(kind="grpo", overrides=settings), rewards=[reward])
    raise AssertionError(f"the run ended before its step {job['steps']}")


def answer_after(metrics: Path, job: dict[str, Any]) -> None:
    """Print the figures of the first steps, and end the process: the rest of the run, and its export, are not
    measured."""
    rows: list[dict[str, Any]] = []
    while len(rows) < job["steps"]:
        time.sleep(0.5)
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        rows = [row for row in map(json.loads, lines) if "time/generate" in row and "reward/mean" in row]
    rows = rows[: job["steps"]]
    signal = statistics.mean(1 - row["reward/groups_without_signal"] for row in rows)
    gaps = [row.get("logprob_gap_max") for row in rows]
    manifest = json.loads((metrics.parent / "manifest.json").read_text())
    found = {
        "axes": manifest["axes"],
        "seconds": [row["time/step"] for row in rows],
        "generate": [row["time/generate"] for row in rows],
        "forward_backward": [row["time/forward_backward"] for row in rows],
        "gaps": gaps,
        "gap_max": max((gap for gap in gaps if gap is not None), default=None),
        "signal": signal,
        "failed": signal < job["signal"] or any(gap for gap in gaps),
        "last": [rows[-1]],
    }
    print(json.dumps(found), flush=True)
    os._exit(0)


def trl_side(job: dict[str, Any]) -> dict[str, Any]:
    """GRPOTrainer with vLLM in its process."""
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    settings = GRPOConfig(
        output_dir=str(Path(job["scratch"], "trl")),
        per_device_train_batch_size=job["batch"],
        gradient_accumulation_steps=PROMPTS * GROUP // job["batch"],
        num_generations=GROUP,
        max_completion_length=TOKENS,
        bf16=True,
        gradient_checkpointing=False,
        beta=0.0,
        loss_type="dapo",
        max_steps=job["steps"],
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        learning_rate=1e-6,
        temperature=1.0,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.35,
        vllm_max_model_length=2048,
        optim="adamw_torch_fused",
        use_liger_kernel=job["use_liger"],
        model_init_kwargs={"dtype": "bfloat16"},
        generation_kwargs={"ignore_eos": True},
        dataloader_num_workers=0,
        warmup_steps=0,
        lr_scheduler_type="constant",
    )
    seconds: list[float] = []

    class Clock(TrainerCallback):
        started = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            torch.cuda.synchronize()
            self.started = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - self.started)

    def reward(completions: list[Any], **_: Any) -> list[float]:
        return [different_words(completion) for completion in completions]

    trainer = GRPOTrainer(
        model=job["folder"],
        reward_funcs=reward,
        args=settings,
        train_dataset=Dataset.from_dict({"prompt": prompts(job)}),
        callbacks=[Clock()],
    )
    trainer.train()
    return {"seconds": seconds, "peak_gib": torch.cuda.max_memory_allocated() / 2**30}


if __name__ == "__main__":
    sys.exit(main())
