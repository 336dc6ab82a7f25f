"""The sides of against_trl.py: one optimizer step per line on stdin, one line of JSON back.

python benchmarks/against_trl_sides.py SIDE SETTINGS_AS_JSON
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

LR = 1e-6  # small: the length of completions must not drift while it is measured
MAX_TOKENS = 128
GROUP_SIZE = 8
PROMPTS_PER_STEP = 8
DOCUMENTS_PER_STEP = 32
MAX_LENGTH = 512


def share_of_digits(text: str) -> float:
    """The reward of both sides: share of characters that are digits or blanks; it varies in any group."""
    return sum(c.isdigit() or c.isspace() for c in text) / max(1, len(text))


class Times:
    """Wall seconds and CPU seconds (all threads of this process) between two marks."""

    def __init__(self) -> None:
        self._marks: dict[str, tuple[float, float]] = {}

    def mark(self, name: str) -> None:
        self._marks[name] = (time.perf_counter(), time.process_time())

    def between(self, part: str, first: str, last: str) -> dict[str, float]:
        (wall, cpu), (wall_end, cpu_end) = self._marks[first], self._marks[last]
        return {f"{part}_s": wall_end - wall, f"{part}_cpu_s": cpu_end - cpu}


class Channel:
    """Requests and answers; whatever else a library prints goes to stderr."""

    def __init__(self) -> None:
        self._out: TextIO = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def wait(self) -> None:
        """Returns when a step is asked for; ends the process when the other end is closed."""
        if not sys.stdin.readline():
            self._out.close()
            os._exit(0)

    def answer(self, **values: Any) -> None:
        self._out.write(json.dumps(values) + "\n")
        self._out.flush()


# --- ours -------------------------------------------------------------------------------------------------


def lockstep_grpo(settings: dict[str, Any], channel: Channel) -> None:
    from lockstep.config.run import GRPORun
    from lockstep.loops.online import OnlineTrainer, build_online

    run = GRPORun.model_validate(
        {
            "steps": settings["steps"],
            "model": {"name": "bundled:smollm2-135m", "dtype": "bfloat16"},
            "data": {
                "source": settings["prompts"],
                "chat_template": "none",
                "shuffle": False,
                "size": PROMPTS_PER_STEP * settings["steps"],
                "max_prompt_tokens": 200,
            },
            "rollout": {
                "prompts_per_step": PROMPTS_PER_STEP,
                "group_size": GROUP_SIZE,
                "sampling": {"max_tokens": MAX_TOKENS, "temperature": 1.0},
            },
            "algorithm": {"name": "grpo", "aggregation": "token_mean"},
            "train": {"lr": LR, "token_budget": settings["token_budget"]},
            "eval": {"num_prompts": 1},
        }
    )
    parts = build_online(run, rewards=[lambda prompt, completion, row: share_of_digits(completion)])
    trainer = OnlineTrainer(parts)
    trainer.push(policy_version=0)
    times = Times()
    channel.answer(dtype=str(parts.model.dtype), eos=parts.model.eos_token_ids, train=run.train.model_dump())
    for step in range(run.steps):
        channel.wait()
        trainer.spans.start()  # the wait for this request is no overhead of the loop
        times.mark("start")
        groups = trainer.sample(step).groups
        times.mark("sampled")
        metrics = trainer.update(groups, step=step).metrics
        trainer.push(policy_version=step + 1)
        times.mark("end")
        trajectories = [rollout.trajectory for group in groups for rollout in group.rollouts]
        tokens = sum(t.policy_tokens for t in trajectories)
        channel.answer(
            **times.between("generate", "start", "sampled"),
            **times.between("train", "sampled", "end"),
            **times.between("total", "start", "end"),
            completion_tokens=tokens,
            trained_tokens=tokens,
            prompt_tokens=sum(len(t.prompt_token_ids) for t in trajectories),
            stopped=sum(t.finish_reason == "stop" for t in trajectories),
            grad_norm=metrics["grad_norm"],
            spans=trainer.spans.flush(),
        )


def lockstep_sft(settings: dict[str, Any], channel: Channel) -> None:
    from functools import partial

    import torch

    from lockstep.algorithms import ALGORITHMS
    from lockstep.config.run import SFTRun
    from lockstep.loop.build import build_backend, load_policy
    from lockstep.loop.machine import find_machine
    from lockstep.loop.resolve import resolve
    from lockstep.models.memory import planned_shape
    from lockstep.packing import Planner
    from lockstep.schema.batch import TrainSample

    run = SFTRun.model_validate(
        {
            "steps": settings["steps"],
            "model": {"name": "bundled:smollm2-135m", "dtype": "bfloat16"},
            "data": {"max_length": MAX_LENGTH},
            "batch_size": DOCUMENTS_PER_STEP,
            "train": {"lr": LR, "token_budget": settings["token_budget"]},
        }
    )
    shape = partial(planned_shape, run.model)
    policy = load_policy(resolve(run, shape=shape, machine=find_machine(run), manifest={}))
    resolved, model = policy.resolved, policy.model
    algorithm = ALGORITHMS.load("sft")(run.algorithm)
    backend = build_backend(resolved, model, total_steps=run.steps, temperature=1.0, ref=False)
    plan = Planner(
        token_budget=resolved.token_budget,
        layout=resolved.layout,
        static_capacity=resolved.static_capacity,
        max_seqlen=MAX_LENGTH,
        max_documents=DOCUMENTS_PER_STEP,
    )
    documents = json.loads(Path(settings["documents"]).read_text())
    times = Times()
    channel.answer(dtype=str(model.dtype), train=run.train.model_dump())
    for step in range(run.steps):
        channel.wait()
        times.mark("start")
        samples = []
        rows = documents[step * DOCUMENTS_PER_STEP : (step + 1) * DOCUMENTS_PER_STEP]
        for index, ids in enumerate(rows):
            mask = torch.ones(len(ids), dtype=torch.bool)
            mask[-1] = False  # the mask belongs to the slot that predicts: a last token predicts nothing
            samples.append(TrainSample(token_ids=torch.tensor(ids), loss_mask=mask, sample_id=index))
        batches = plan(samples, algorithm.loss_weights(samples))
        stats = backend.forward_backward(batches, algorithm.loss())
        update = backend.optimizer_step()
        metrics = algorithm.metrics(batches, stats)
        times.mark("end")
        channel.answer(
            **times.between("total", "start", "end"),
            trained_tokens=sum(int(batch.loss_mask.sum()) for batch in batches),
            slots=sum(batch.num_slots for batch in batches),
            loss=metrics["nll"],
            grad_norm=update["grad_norm"],
        )


# --- TRL --------------------------------------------------------------------------------------------------


def _stepper(channel: Channel, times: Times, describe: Callable[[], dict[str, Any]]) -> Any:
    """A callback that lets the trainer take one step per request."""
    from transformers import TrainerCallback

    class Stepper(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            channel.wait()
            times.mark("start")

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            times.mark("end")
            channel.answer(**times.between("total", "start", "end"), **describe())

    return Stepper()


def _trl_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """What both TRL trainers are given: its defaults, but no logging, no checkpoints, no recomputation."""
    return {
        "output_dir": settings["scratch"],
        "max_steps": settings["steps"],
        "per_device_train_batch_size": settings["batch"],
        "learning_rate": LR,
        "lr_scheduler_type": "constant",
        "use_cpu": True,
        "bf16": settings["autocast"],
        "model_init_kwargs": {"dtype": "bfloat16"},
        "gradient_checkpointing": False,
        "dataloader_num_workers": 0,
        "dataloader_pin_memory": False,
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
    }


def _about(trainer: Any) -> dict[str, Any]:
    shown = (
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "bf16",
        "gradient_checkpointing",
        "optim",
        "loss_type",
    )
    return {
        "dtype": str(next(trainer.model.parameters()).dtype),
        "attention": trainer.model.config._attn_implementation,
        **{name: str(getattr(trainer.args, name)) for name in shown},
    }


def trl_grpo(settings: dict[str, Any], channel: Channel) -> None:
    from datasets import load_dataset
    from trl import GRPOConfig, GRPOTrainer

    samples = PROMPTS_PER_STEP * GROUP_SIZE
    config = GRPOConfig(
        **_trl_settings(settings),
        gradient_accumulation_steps=samples // settings["batch"],
        num_generations=GROUP_SIZE,
        max_completion_length=MAX_TOKENS,
        shuffle_dataset=False,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        beta=0.0,
    )
    rows = load_dataset("json", data_files=settings["prompts"], split="train", cache_dir=settings["scratch"])
    seen: dict[str, Any] = {}

    times = Times()

    def describe() -> dict[str, Any]:
        generate = times.between("generate", "generate_start", "generate_end")
        train = times.between("train", "start", "end")  # less generation: rewards, loss, optimizer
        for unit in ("s", "cpu_s"):
            train[f"train_{unit}"] -= generate[f"generate_{unit}"]
        return seen | generate | train

    trainer = GRPOTrainer(
        model=settings["folder"],
        reward_funcs=lambda completions, **_: [share_of_digits(text) for text in completions],
        args=config,
        train_dataset=rows,
        callbacks=[_stepper(channel, times, describe)],
    )
    generate = trainer._generate_single_turn

    def timed(prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        times.mark("generate_start")
        result = generate(prompt_ids, *args, **kwargs)
        times.mark("generate_end")
        completions = result[0]
        tokens = sum(map(len, completions))
        seen.update(
            completion_tokens=tokens,
            trained_tokens=tokens,
            prompt_tokens=sum(map(len, prompt_ids)),
            stopped=sum(ids[-1] in trainer.eos_token_ids for ids in completions),
        )
        return result

    trainer._generate_single_turn = timed
    channel.answer(**_about(trainer), eos=trainer.eos_token_ids)
    trainer.train()


def trl_sft(settings: dict[str, Any], channel: Channel, *, packing: bool) -> None:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    documents = json.loads(Path(settings["documents"]).read_text())
    # packed rows hold 512 tokens, about four documents: 8 rows are about as many tokens as 32 documents
    rows = DOCUMENTS_PER_STEP // 4 if packing else DOCUMENTS_PER_STEP
    batch = min(settings["batch"], rows)
    config = SFTConfig(
        **_trl_settings(settings | {"batch": batch}),
        gradient_accumulation_steps=rows // batch,
        max_length=MAX_LENGTH,
        packing=packing,
    )
    seen = {"trained_tokens": 0, "slots": 0}

    def describe() -> dict[str, Any]:
        answer = dict(seen)
        seen.update(trained_tokens=0, slots=0)
        return answer

    trainer = SFTTrainer(
        model=settings["folder"],
        args=config,
        train_dataset=Dataset.from_dict({"input_ids": documents}),
        callbacks=[_stepper(channel, Times(), describe)],
    )
    compute_loss = trainer.compute_loss

    def counting(model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        seen["trained_tokens"] += int((inputs["labels"][..., 1:] != -100).sum())
        seen["slots"] += inputs["input_ids"].numel()
        return compute_loss(model, inputs, *args, **kwargs)

    trainer.compute_loss = counting
    channel.answer(**_about(trainer), packing=packing, padding_free=trainer.padding_free)
    trainer.train()


SIDES: dict[str, Callable[[dict[str, Any], Channel], None]] = {
    "lockstep_grpo": lockstep_grpo,
    "lockstep_sft": lockstep_sft,
    "trl_grpo": trl_grpo,
    "trl_sft_padded": lambda settings, channel: trl_sft(settings, channel, packing=False),
    "trl_sft_packed": lambda settings, channel: trl_sft(settings, channel, packing=True),
}


if __name__ == "__main__":
    SIDES[sys.argv[1]](json.loads(sys.argv[2]), Channel())
