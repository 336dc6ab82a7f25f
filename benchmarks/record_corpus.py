"""Makes the shipped corpus: the inputs of a GRPO run of the bundled model on two data-parallel ranks.

    python benchmarks/record_corpus.py rows --out rows.jsonl
    torchrun --nproc-per-node 2 benchmarks/record_corpus.py run --rows rows.jsonl --out runs/corpus
    python benchmarks/record_corpus.py finish runs/corpus/recordings --out corpus
    tar --sort=name --owner=0 --group=0 --numeric-owner --mtime=2026-11-20 -c corpus \\
        | xz --lzma2=preset=9e,lc=2,lp=2,pb=2 > src/lockstep/recording/corpus.tar.xz  # numbers of four bytes

`run` trains SmolLM2-135M on arithmetic and word problems: every rank samples half of the prompts, trains on
half of the micro-batches, and gradients are added over ranks. `finish` replays the inputs of the first
updates on the bundled weights (float32, sdpa) and writes what those make of them, so that a replay compares
like with like. Ids, masks, rewards, advantages and rollout logprobs stay those of the run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.algorithms import ALGORITHMS
from lockstep.config.algorithm import GRPOConfig
from lockstep.config.data import DataConfig
from lockstep.config.engine import EngineConfig
from lockstep.config.model import ModelConfig
from lockstep.config.record import RecordConfig
from lockstep.config.rollout import RolloutConfig, SamplingConfig
from lockstep.config.run import GRPORun
from lockstep.config.train import TrainConfig
from lockstep.loop.run_recorders import recording_header
from lockstep.loops.online import OnlineParts, OnlineTrainer, build_online
from lockstep.models.load import load_model
from lockstep.packing import pack
from lockstep.protocols.train import StepStats, TokenLoss
from lockstep.recording import Recording, RecordingWriter
from lockstep.recording.files import fingerprint, module_tensors
from lockstep.recording.recorder import Recorder, RecorderSettings
from lockstep.rollout.rewards import last_number
from lockstep.rollout.sampler import GroupSampler, SampleKey
from lockstep.schema.batch import PackedBatch, TrainSample
from lockstep.schema.recording import RecordedOutputs
from lockstep.schema.rollout import RolloutGroup
from lockstep.train.local import LocalBackend

SEQUENCES = 4  # of one micro-batch, in sample order: lengths then differ as the tasks do
PROMPTS, GROUP_SIZE = 16, 4
_NUMBER, _STEPS = "Answer with the number.", "Think step by step, then give the number."
TASKS = (
    # task, its settings, what follows the question, worked examples in front of it, share
    ("chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}, _NUMBER, 0, 4),
    ("products", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}, _NUMBER, 0, 3),
    ("simple_equations", {}, _STEPS, 0, 4),
    ("lcm", {"min_value": 2, "max_value": 12}, _STEPS, 0, 2),
    ("gsm_symbolic", {}, _STEPS, 0, 2),
    ("gsm_symbolic", {}, _STEPS, 3, 1),
)


def reward(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
    """1 for the right last number, 0.1 for any number."""
    found = last_number(completion)
    if found is None:
        return 0.0
    return 1.0 if float(found) == float(row["answer"]) else 0.1


def write_rows(path: Path, *, count: int) -> None:
    """Questions of several lengths, in a fixed random order."""
    import reasoning_gym

    rows = []
    shares = sum(share for *_, share in TASKS)
    for seed, (task, settings, suffix, shots, share) in enumerate(TASKS):
        size = count * share // shares
        entries = list(reasoning_gym.create_dataset(task, size=size + shots, seed=seed, **settings))
        shown = "".join(f"{e['question']}\nAnswer: {e['answer']}\n\n" for e in entries[size:])
        for entry in entries[:size]:
            prompt = f"{shown}{entry['question']}\n{suffix}"
            rows.append({"prompt": prompt, "answer": str(entry["answer"]), "task": task})
    random.Random(7).shuffle(rows)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def run_config(rows: Path, *, steps: int, device: str, model: str) -> GRPORun:
    return GRPORun(
        name="corpus",
        steps=steps,
        seed=11,
        model=ModelConfig(name=model, dtype="float32"),
        data=DataConfig(source=str(rows), max_prompt_tokens=640, overlong_prompts="drop"),
        rollout=RolloutConfig(
            prompts_per_step=PROMPTS,
            group_size=GROUP_SIZE,
            sampling=SamplingConfig(temperature=1.0, max_tokens=224),
        ),
        train=TrainConfig(
            device=device, attention="sdpa", lr=2e-5, warmup_steps=2, betas=(0.9, 0.95), token_budget=4096
        ),
        engine=EngineConfig(max_batch=64),
        record=RecordConfig(enabled=True, weights="none"),
    )


class DataParallel:
    """A TrainBackend over one LocalBackend per rank: deals micro-batches out, adds gradients up."""

    def __init__(self, inner: Any, local: LocalBackend, recorder: Recorder) -> None:
        self.inner, self.local, self.recorder = inner, local, recorder
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def forward_backward(self, batches: Sequence[PackedBatch], loss: TokenLoss) -> StepStats:
        """Every rank makes the call with the same list and gets the statistics of the whole list."""
        own = self.inner.forward_backward(list(batches)[self.rank :: self.world], loss)
        mine = [[t.cpu() for t in column] for column in (own.losses, own.logprobs, own.entropy, own.terms)]
        everyone: list[Any] = [None] * self.world
        dist.all_gather_object(everyone, mine)
        columns = [
            [everyone[i % self.world][column][i // self.world] for i in range(len(batches))]
            for column in range(4)
        ]
        return StepStats(losses=columns[0], logprobs=columns[1], entropy=columns[2], terms=columns[3])

    def optimizer_step(self) -> dict[str, float]:
        """The same step on every rank: gradients are added, loss_weights hold the normaliser."""
        for parameter in self.local.module.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
        return self.inner.optimizer_step()


def fixed_packs(samples: Sequence[TrainSample], loss_weights: Sequence[Tensor]) -> list[PackedBatch]:
    """SEQUENCES consecutive samples to a micro-batch, however long they are."""
    return [
        pack(samples[i : i + SEQUENCES], loss_weights[i : i + SEQUENCES])
        for i in range(0, len(samples), SEQUENCES)
    ]


def sample(parts: OnlineParts, step: int) -> list[RolloutGroup]:
    """The groups of a step, in prompt order, the same on every rank; each rank samples its share."""
    rank, world = dist.get_rank(), dist.get_world_size()
    run = parts.run
    prompts = parts.prompts.batch(step, PROMPTS, run.seed)
    sampler = GroupSampler(engine=parts.engine, rewards=parts.rewards)
    own = sampler.groups(
        prompts[rank::world],
        SampleKey(run_seed=run.seed, step=step),
        sampling=run.rollout.sampling,
        group_size=GROUP_SIZE,
    ).groups
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, own)
    return [everyone[i % world][i // world] for i in range(PROMPTS)]


def train(args: argparse.Namespace) -> None:
    """One rank of the run."""
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = args.out / "rows.jsonl"
    if rank == 0:
        args.out.mkdir(parents=True)
        rows.write_bytes(args.rows.read_bytes())
    dist.barrier()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    run = run_config(rows, steps=args.steps, device=device, model=args.model)
    parts = build_online(run, rewards=[reward])
    header = recording_header(parts.resolved, model=parts.model, plan=parts.plan)
    header = dataclasses.replace(
        header,
        world_size=world,
        mesh={"dp": world},
        capacity={**header.capacity, "max_documents": SEQUENCES},
        notes={"script": "benchmarks/record_corpus.py", "tasks": sorted({task for task, *_ in TASKS})},
    )
    settings = RecorderSettings(
        config=run.record, header=header, rank=rank, world_size=world, mesh={"dp": rank}
    )
    recorder = Recorder(args.out / "recordings", settings, module=parts.model.module)
    backend = DataParallel(recorder.around(parts.backend), parts.backend, recorder)
    parts = dataclasses.replace(parts, backend=backend, plan=fixed_packs, recorder=recorder)
    trainer = OnlineTrainer(parts)
    trainer.push(policy_version=0)
    for step in range(args.steps):
        started = time.perf_counter()
        recorder.begin_step(step)
        groups = sample(parts, step)
        metrics = trainer.update(groups, step=step).metrics
        trainer.push(policy_version=step + 1)
        if rank == 0:
            names = ("reward/mean", "grad_norm", "logprob_gap_max")
            shown = "  ".join(f"{name} {metrics[name]:.3g}" for name in names)
            print(f"step {step}: {shown}  {time.perf_counter() - started:.1f} s", flush=True)
    recorder.close()
    dist.barrier()
    dist.destroy_process_group()


def finish(args: argparse.Namespace) -> None:
    """The inputs of the run's first updates with what the bundled weights make of them."""
    recording = Recording.open(args.recording)
    first = [index for index, meta in enumerate(recording.metas) if meta.update < args.updates]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    head = recording.header
    model = load_model(
        ModelConfig(name=head.model["name"], dtype="float32"), attention="sdpa", device=torch.device(device)
    )
    config = TrainConfig(device=device, attention="sdpa")
    backend = LocalBackend(config, model=model, total_steps=0, temperature=head.temperature)
    algorithm = ALGORITHMS.load(head.algorithm["name"])(
        GRPOConfig(**head.algorithm), max_tokens=head.max_tokens
    )
    loss = algorithm.loss()
    weights = fingerprint(module_tensors(model.module).items())
    head = dataclasses.replace(
        head,
        axes={**head.axes, "device": device, "dtype": "float32", "attention": "sdpa", "execution": "eager"},
        notes={
            **head.notes,
            "outputs": "of the bundled weights, not of the run's: float32, sdpa, eager, packed",
        },
    )
    writers = {
        rank: RecordingWriter(args.out, head, rank=rank, shard_inputs=len(first))  # one shard compresses best
        for rank in range(head.world_size)
    }
    for number, index in enumerate(first):
        each = recording[index]
        stats = backend.forward_backward([each.batch], loss)
        backend.drop_gradients()
        outputs = RecordedOutputs(loss=float(stats.losses[0]), logprobs=stats.logprobs[0].cpu())
        meta = dataclasses.replace(each.meta, weights=weights, checkpoint=None)
        writers[meta.rank].add([dataclasses.replace(each, meta=meta, outputs=outputs)])
        if number % 100 == 0:
            print(f"{number} of {len(first)}", flush=True)
    for writer in writers.values():
        writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    rows = commands.add_parser("rows")
    rows.add_argument("--out", type=Path, required=True)
    run = commands.add_parser("run")
    run.add_argument("--rows", type=Path, required=True)
    run.add_argument("--out", type=Path, required=True)
    run.add_argument("--steps", type=int, default=64)
    run.add_argument("--model", default="bundled:smollm2-135m")
    end = commands.add_parser("finish")
    end.add_argument("recording", type=Path)
    end.add_argument("--out", type=Path, required=True)
    end.add_argument("--updates", type=int, default=16)
    args = parser.parse_args()
    if args.command == "rows":
        write_rows(args.out, count=2048)
    elif args.command == "run":
        train(args)
    else:
        finish(args)


if __name__ == "__main__":
    main()
