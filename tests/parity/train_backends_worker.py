"""Trains one stack after the other on the same inputs, and says how far each is from `local`.

    python train_backends_worker.py FOLDER '[["fsdp2:tp2", {"algorithm": "sft", ...}], ...]'

FOLDER holds the inputs (`make`) and what LocalBackend made of them (`reference`). test_train_backends.py runs
it once per rank.
"""

from __future__ import annotations

import json
import sys
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from parity_models import relative_error
from safetensors.torch import load_file, save_file
from torch import Tensor

from lockstep.config.model import LoraConfig, ModelConfig
from lockstep.config.train import TrainConfig
from lockstep.models.load import load_model
from lockstep.packing import RowCapacity, share
from lockstep.packing.packs import Bucket, repack
from lockstep.processes.child import relax_gc
from lockstep.ranks.context import init_ranks
from lockstep.recording import Recording
from lockstep.schema.batch import PackedBatch, PolicyBatch
from lockstep.train import BACKENDS
from lockstep_lab.replay.losses import token_loss
from lockstep_lab.train_parity.inputs import make_inputs
from lockstep_lab.train_parity.job import InputsSpec
from lockstep_lab.train_parity.stacks import parse_stack

STEPS = 20
MODEL = "shape:tiny-llama"
BUCKET = Bucket(tokens=192, documents=16, max_seqlen=96)
ROWS = RowCapacity(rows=192, keys=768, segments=32, longest=96)
"""BUCKET's, of layout shared."""
SCALAR = ("value", "rm")
"""Algorithms of models whose head gives one number per slot."""
RATES = {("value", "sgd"): 0.05, ("rm", "sgd"): 0.05} | {
    ("sft", "sgd"): 0.2,
    ("sft", "adamw"): 2e-3,
    ("grpo", "sgd"): 0.2,
    ("grpo", "adamw"): 1e-3,
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """What every stack is trained on; of each LocalBackend has made a reference."""

    algorithm: str
    optimizer: str
    dtype: str = "float32"
    layout: str = "packed"
    execution: str = "eager"
    steps: int = STEPS
    lora: bool = False

    @property
    def name(self) -> str:
        """For files and test ids."""
        return "-".join(map(str, asdict(self).values()))

    @property
    def cell(self) -> dict[str, str]:
        """As config/support.py has it, but for the backend."""
        return {"attention": "sdpa", "device": "cpu"} | {
            "dtype": self.dtype,
            "layout": self.layout,
            "execution": self.execution,
        }


def make(folder: Path) -> None:
    """The inputs of all algorithms: two micro-batches a step, and one step more than is trained. Those of
    value models are PPO's."""
    for algorithm in ("sft", "grpo", "ppo", "rm"):
        spec = InputsSpec(
            algorithm=algorithm,  # type: ignore[arg-type]
            model=ModelConfig(name=MODEL),
            batch_size=6,
            steps=STEPS + 1,
            min_packs=2,
            token_budget=192,
            max_length=48,
            out=folder / algorithm,
        )
        (folder / algorithm).mkdir()
        make_inputs(spec)
    (folder / "value").symlink_to(folder / "ppo")


def inputs(run: Run, folder: Path) -> tuple[Any, list[list[PackedBatch]]]:
    """The loss, and the micro-batches of every step."""
    place = "inputs-value" if run.algorithm == "value" else "inputs"
    recording = Recording.open(folder / run.algorithm / place)
    steps = json.loads((folder / run.algorithm / "inputs.json").read_text())["steps"]
    bucket = None if run.execution == "eager" else BUCKET
    batches = [[repack(recording[index].batch, bucket) for index in step] for step in steps]
    if run.layout == "shared":
        batches = [[share(batch, None if bucket is None else ROWS) for batch in step] for step in batches]
        shared = [(b.shared.num_rows, b.num_tokens) for step in batches for b in step if b.shared]
        assert any(rows < tokens for rows, tokens in shared), "nothing is shared"
    return token_loss(recording.header, "recorded"), batches


def build(run: Run, stack: str, **more: Any) -> Any:
    """The backend of a stack, over the same starting weights as any other."""
    settings = parse_stack(stack).train_settings() | {
        "execution": run.execution,
        "layout": run.layout,
        "optimizer": run.optimizer,
        "lr": RATES[run.algorithm, run.optimizer],
        "weight_decay": 0.01,
        "warmup_steps": 2,
        "schedule": "cosine",
        **more,
    }
    kind = BACKENDS.load(settings["backend"])
    model = load_model(
        ModelConfig(name=MODEL, dtype=run.dtype, lora=LoraConfig(rank=4) if run.lora else None),
        attention="sdpa",
        device=torch.device("cpu"),
        materialize=not kind.shards_weights,
        head="scalar" if run.algorithm in SCALAR else "logits",
    )
    return kind(TrainConfig(**settings), model=model, total_steps=STEPS + 1)


def measure(run: Run, backend: Any, folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Losses, gradient norms and trained logprobs of every step, and the first step's gradients."""
    loss, steps = inputs(run, folder)
    figures: dict[str, Any] = {"loss": [], "norm": [], "size": [], "logprobs": []}
    for number, batches in enumerate(steps[: run.steps]):
        stats = backend.forward_backward(batches, loss)
        if number == 0:
            gradients = backend.gradients()
        figures["loss"].append(sum(float(value) for value in stats.losses))
        figures["size"].append(sum(size_of(batch) for batch in batches))
        seen = [lp[b.loss_mask] for lp, b in zip(stats.logprobs, batches, strict=True)]
        figures["logprobs"].append(torch.cat(seen).double().mean().item())
        figures["norm"].append(backend.optimizer_step()["grad_norm"])
    return figures, gradients


def size_of(batch: PackedBatch) -> float:
    """What the terms of the loss add up to without their signs: GRPO's cancel, on the policy that sampled to
    exactly 0, and rounding is of the terms."""
    terms = batch.loss_weights * batch.advantages if isinstance(batch, PolicyBatch) else batch.loss_weights
    return float(terms.abs().sum())


def gradients_after(run: Run, backend: Any, folder: Path) -> dict[str, Tensor]:
    """Of the step behind the last one, from the common checkpoint."""
    loss, steps = inputs(run, folder)
    backend.load(folder / f"{run.name}.checkpoint")
    backend.forward_backward(steps[run.steps], loss)
    found: dict[str, Tensor] = backend.gradients()
    backend.drop_gradients()
    return found


def reference(run: Run, folder: Path) -> None:
    """What LocalBackend makes of it, eager and with its own accumulation."""
    backend = build(run, "local", execution="eager")
    figures, first = measure(run, backend, folder)
    (folder / f"{run.name}.json").write_text(json.dumps(figures))
    save_file({name: g.contiguous() for name, g in first.items()}, folder / f"{run.name}.first")
    (folder / f"{run.name}.checkpoint").mkdir()
    backend.save(folder / f"{run.name}.checkpoint")()
    last = gradients_after(run, backend, folder)
    save_file({name: g.contiguous() for name, g in last.items()}, folder / f"{run.name}.last")


def compare(stack: str, run: Run, folder: Path) -> dict[str, Any]:
    """Largest relative differences to the reference, over all steps."""
    backend = build(run, stack)
    found, first = measure(run, backend, folder)
    expected = json.loads((folder / f"{run.name}.json").read_text())
    assert found["size"] == expected["size"]
    seen: dict[str, Any] = {"losses": found["loss"]}
    scale = expected["size"] if run.algorithm == "grpo" else [0.0] * run.steps
    for key in ("loss", "norm", "logprobs"):
        pairs = zip(found[key], expected[key], scale, strict=True)
        # the mean of values and of scores passes through 0, where only its distance says something
        floor = 1.0 if key == "logprobs" and run.algorithm in SCALAR else 0.0
        seen[key] = max(abs(a - b) / max(abs(b), least if key == "loss" else floor) for a, b, least in pairs)
    last = gradients_after(run, backend, folder)
    for name, ours in (("first", first), ("last", last)):
        theirs = load_file(folder / f"{run.name}.{name}")
        seen[f"{name} gradients"] = gradient_error(ours, theirs)
        seen[f"{name} whole gradient"] = relative_error(theirs, ours)
    backend.close()
    return seen


def gradient_error(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest |g - r| / max(|r|, 1e-6 |all r|) of a Parameter."""
    assert ours.keys() == theirs.keys(), (sorted(ours), sorted(theirs))
    least = 1e-6 * float(torch.stack([g.double().norm() for g in theirs.values()]).norm())
    errors = (
        (ours[name].double() - g.double()).norm() / max(float(g.double().norm()), least)
        for name, g in theirs.items()
    )
    return max(map(float, errors))


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    with init_ranks(device="cpu", seconds=120.0):
        for stack, settings in json.loads(sys.argv[2]):
            run = Run(**settings)
            torch._dynamo.reset()
            result: dict[str, Any] = {"stack": stack, "run": run.name, "ranks": dist.get_world_size()}
            try:
                result["seen"] = compare(stack, run, folder)
            except Exception:
                result["error"] = traceback.format_exc()[-4000:]
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    relax_gc()
    main()
