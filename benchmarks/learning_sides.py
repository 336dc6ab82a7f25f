"""The sides of learning_curves.py, which holds the protocol: one GRPO run, in a process of its own.

python benchmarks/learning_sides.py JOB_AS_JSON
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import time
from pathlib import Path
from typing import Any

STEPS, PROMPTS, GROUP, MAX_TOKENS, MAX_PROMPT = 60, 64, 8, 24, 128
LEARNING_RATE, WARM_UP, BETAS = 2e-5, 2, (0.9, 0.95)
EVERY = 5
LOCKSTEP: dict[str, Any] = {
    "model.dtype": "bfloat16",
    "train.token_budget": 16384,
    "engine.max_batch": 512,
    "checkpoint.save_at_end": False,
}
TRL: dict[str, Any] = {
    "per_device_train_batch_size": 256,
    "bf16": True,
    "gradient_checkpointing": False,
    "optim": "adamw_torch_fused",
    "use_vllm": True,
    "vllm_mode": "colocate",
    "vllm_gpu_memory_utilization": 0.35,
    "vllm_max_model_length": 256,
}
ON_CPU = {
    "lockstep": {"model.dtype": "float32", "engine.name": "hf", "train.token_budget": 512},
    "trl": {"bf16": False, "use_cpu": True, "use_vllm": False, "optim": "adamw_torch"},
}
"""Without a GPU, to see that the script runs: neither engine of the protocol."""


def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """1 for each completion whose last number is the answer, else 0. Both sides call it."""
    return [float(correct(c[-1]["content"], a)) for c, a in zip(completions, answer, strict=True)]


def correct(text: str, answer: str) -> bool:
    """Whether the last number of the text is the answer."""
    numbers = re.findall(r"-?\d+", text)
    return bool(numbers) and numbers[-1] == answer


def lockstep_side(job: dict[str, Any]) -> None:
    """One GRPO run; its metrics.jsonl is read by the parent."""
    sys.path.insert(0, str(Path(__file__).parent))
    from learning_sides import reward as imported  # by a name that the rewards' process can import

    from lockstep import load_run, train_online

    data = Path(job["data"])
    seen = job["steps"] * job["prompts"]
    settings: dict[str, Any] = {
        "steps": job["steps"],
        "seed": job["seed"],
        "run_dir": str(Path(job["folder"], "run")),
        "model.name": job["model"],
        "algorithm.aggregation": "token_mean",
        "data.source": str(data / "train.jsonl"),
        "data.skip": job["seed"] * seen,
        "data.size": seen,
        "data.shuffle": False,
        "data.max_prompt_tokens": MAX_PROMPT,
        "eval_data.source": str(data / "held_out.jsonl"),
        "eval_data.max_prompt_tokens": MAX_PROMPT,
        "rollout.prompts_per_step": job["prompts"],
        "rollout.group_size": GROUP,
        "rollout.sampling.max_tokens": MAX_TOKENS,
        "engine.name": job["side"],
        "train.lr": LEARNING_RATE,
        "train.schedule": "linear",
        "train.warmup_steps": WARM_UP,
        "train.betas": list(BETAS),
        "eval.num_prompts": job["held_out"],
        "eval.every": EVERY,
        **LOCKSTEP,
    }
    settings |= ON_CPU["lockstep"] if job["gpu"] == "cpu" else {}
    train_online(load_run(kind="grpo", overrides=settings), rewards=[imported])


def trl_config(job: dict[str, Any]) -> Any:
    """Return the GRPOConfig of a run."""
    from trl import GRPOConfig

    settings = TRL | (ON_CPU["trl"] if job["gpu"] == "cpu" else {})
    samples = job["prompts"] * GROUP
    batch = min(settings["per_device_train_batch_size"], samples)
    return GRPOConfig(
        output_dir=str(Path(job["folder"], "trl")),
        seed=job["seed"],
        **(settings | {"per_device_train_batch_size": batch}),
        gradient_accumulation_steps=samples // batch,
        num_generations=GROUP,
        max_completion_length=MAX_TOKENS,
        model_init_kwargs={"dtype": "float32"},
        beta=0.0,
        loss_type="dapo",
        max_steps=job["steps"],
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="linear",
        warmup_steps=WARM_UP,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        weight_decay=0.0,
        max_grad_norm=1.0,
        temperature=1.0,
        shuffle_dataset=False,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        dataloader_num_workers=0,
    )


class TRLRun:
    """Writes rows of the names of Lockstep's metrics.jsonl for a GRPOTrainer with vLLM in its process."""

    def __init__(self, job: dict[str, Any]) -> None:
        from datasets import Dataset
        from trl import GRPOTrainer

        self.job, self.folder = job, Path(job["folder"], "run")
        (self.folder / "rollouts").mkdir(parents=True)
        seen = job["steps"] * job["prompts"]
        train = self.rows_of("train", job["seed"] * seen, seen)
        self.held_out = self.rows_of("held_out", 0, job["held_out"])
        self.evaluated: list[float] = []
        self.trainer = GRPOTrainer(
            model=job["model"],
            reward_funcs=reward,
            args=trl_config(job),
            train_dataset=Dataset.from_list(train),
            callbacks=[rows_callback(self)],
        )
        self.prompt_tokens = statistics.fmean(map(len, self.prompt_ids(train)))

    def rows_of(self, name: str, first: int, count: int) -> list[dict[str, Any]]:
        """Return rows of a file of the data."""
        lines = Path(self.job["data"], f"{name}.jsonl").read_text().splitlines()
        return list(map(json.loads, lines[first : first + count]))

    def write(self, **row: Any) -> None:
        """Append a row."""
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"timestamp": time.time(), **row}) + "\n")

    def prompt_ids(self, rows: list[dict[str, Any]]) -> list[list[int]]:
        """Return the token ids of their prompts."""
        return [
            self.trainer.processing_class.apply_chat_template(
                row["prompt"], add_generation_prompt=True, tokenize=True, return_dict=False
            )
            for row in rows
        ]

    def answers(self) -> list[list[int]]:
        """Token ids of greedy completions of the held-out questions."""
        import torch

        prompts = self.prompt_ids(self.held_out)
        if self.trainer.use_vllm:
            from vllm import SamplingParams

            self.trainer.vllm_generation.sync_weights()
            outputs = self.trainer.vllm_generation.llm.generate(
                [{"prompt_token_ids": ids} for ids in prompts],
                sampling_params=SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS),
                use_tqdm=False,
            )
            return [list(output.outputs[0].token_ids) for output in outputs]
        longest = max(map(len, prompts))
        padded = torch.tensor([[2] * (longest - len(ids)) + ids for ids in prompts])
        mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts])
        with torch.no_grad():
            found = self.trainer.model.generate(
                input_ids=padded,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=MAX_TOKENS,
                pad_token_id=2,
            )
        return [[token for token in row if token != 2] for row in found[:, longest:].tolist()]

    def evaluate(self, name: str, step: int) -> None:
        """Mark the held-out questions, and write what was answered."""
        started = time.perf_counter()
        ids = self.answers()
        texts = self.trainer.processing_class.batch_decode(ids, skip_special_tokens=True)
        marks = [float(correct(text, row["answer"])) for text, row in zip(texts, self.held_out, strict=True)]
        lines = [
            json.dumps({"completion": text, "reward": mark, "prompt": row["prompt"][0]["content"]}) + "\n"
            for text, mark, row in zip(texts, marks, self.held_out, strict=True)
        ]
        (self.folder / "rollouts" / f"evaluation-{name}.jsonl").write_text("".join(lines))
        self.write(
            **{
                "step": step,
                "evaluation": name,
                "eval/mean_reward": statistics.fmean(marks),
                "eval/mean_completion_tokens": statistics.fmean(map(len, ids)),
            }
        )
        self.evaluated.append(time.perf_counter() - started)


def rows_callback(run: TRLRun) -> Any:
    """Return the callback that writes a run's rows."""
    import torch
    from transformers import TrainerCallback

    class Rows(TrainerCallback):
        """A row per step and evaluation; the seconds of a step are those between two marks."""

        started = 0.0

        def mark(self) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.started = time.perf_counter()

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            run.evaluate("before", 0)
            self.mark()

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
            if "reward" not in logs:
                return
            before = self.started
            self.mark()
            run.write(
                **{
                    "step": state.global_step - 1,
                    "time/step": self.started - before,
                    "time/evaluate": run.evaluated[-1],
                    "reward/mean": logs["reward"],
                    "grad_norm": float(logs["grad_norm"]),
                    "rollout/completion_tokens_mean": logs["completions/mean_length"],
                    "rollout/prompt_tokens_mean": run.prompt_tokens,
                    "logprob_gap_mean": logs.get("sampling/sampling_logp_difference/mean"),
                    "logprob_gap_max": logs.get("sampling/sampling_logp_difference/max"),
                }
            )
            last = state.global_step == run.job["steps"]
            if last or state.global_step % EVERY == 0:
                run.evaluate("after" if last else "during", state.global_step)
                self.mark()

    return Rows()


def trl_side(job: dict[str, Any]) -> None:
    """GRPOTrainer with vLLM in its process."""
    TRLRun(job).trainer.train()


if __name__ == "__main__":
    job = json.loads(sys.argv[1])
    (trl_side if job["side"] == "trl" else lockstep_side)(job)
