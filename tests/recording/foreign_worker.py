"""One rank of the runs of test_foreign_frameworks.py, each twice: without a recording and with one.

    foreign_worker.py '[[KIND, OUT, {argument of record(): value}], ...]'

KIND: ddp, fsdp2, ddp-compiled, deepspeed1 (or another ZeRO stage). The folder OUT gets rank-R.json, the
gradients of the first step and the recording.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parent))
from foreign_parts import VOCAB, tiny_policy, unpadded

import lockstep
from lockstep.processes.child import relax_gc
from lockstep.ranks.process_group import ensure_process_group

STEPS, MICRO_BATCHES, TEMPERATURE = 2, 2, 0.9


def batch(step: int, micro_batch: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro_batch + rank)
    ids = torch.randint(3, VOCAB, (2, 9 + rank + step), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, -(2 + rank) :] = 0
    return ids, mask


def loss_of(module: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    logits = module(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1] / TEMPERATURE
    chosen = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    advantages = torch.tensor([[1.5], [-0.5]])
    return -(torch.exp(chosen - chosen.detach() / 2) * advantages * mask[:, 1:]).sum()


class Torch:
    """DDP or FSDP2 around the module, SGD, gradients accumulated over micro-batches."""

    def __init__(self, kind: str) -> None:
        self.inner = tiny_policy().train()
        self.inner.gradient_checkpointing_enable()
        if kind == "fsdp2":
            for layer in self.inner.model.layers:
                fully_shard(layer)
            self.module: nn.Module = fully_shard(self.inner)
        else:
            self.module = DistributedDataParallel(self.inner)
            if kind == "ddp-compiled":
                self.module = torch.compile(self.module, backend="eager")  # type: ignore[assignment]
        self.optimizer = torch.optim.SGD(self.inner.parameters(), lr=1e-2, foreach=False)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.inner.named_parameters():
            gradient = parameter.grad
            assert gradient is not None
            yield name, gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


class DeepSpeed:
    """An engine with ZeRO 1; it steps at every MICRO_BATCHES-th step()."""

    def __init__(self, kind: str) -> None:
        import deepspeed

        self.deepspeed = deepspeed
        self.inner = tiny_policy().train()
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": MICRO_BATCHES,
            "zero_optimization": {"stage": int(kind.removeprefix("deepspeed"))},
            "zero_allow_untested_optimizer": True,
        }
        optimizer = torch.optim.AdamW(self.inner.parameters(), lr=1e-2)
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # a minute of compiling
        self.module, *_ = deepspeed.initialize(model=self.inner, optimizer=optimizer, config=config)

    def backward(self, loss: Tensor) -> None:
        self.module.backward(loss)
        if not self.module.is_gradient_accumulation_boundary():
            self.module.step()

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.inner.named_parameters():
            yield name, self.deepspeed.utils.safe_get_full_grad(parameter)

    def step(self) -> None:
        self.module.step()


def train(make: Callable[[], Any], directory: Path | None, options: dict[str, Any]) -> dict[str, Any]:
    rank = dist.get_rank()
    part = make()
    handle = None if directory is None else lockstep.record(part.module, directory, **options)
    losses, fed, gradients = [], [], {}
    for step in range(STEPS):
        for micro_batch in range(MICRO_BATCHES):
            ids, mask = batch(step, micro_batch, rank)
            fed.append(unpadded(ids, mask))
            with torch.no_grad():
                part.module(input_ids=ids, use_cache=False)  # old logprobs
            loss = loss_of(part.module, ids, mask)
            part.backward(loss)
            losses.append(float(loss.detach()))
        if step == 0:
            gradients = {name: gradient.clone().contiguous() for name, gradient in part.gradients()}
        part.step()
    if handle is not None:
        handle.close()
    return {"losses": losses, "fed": fed, "gradients": gradients}


def run(kind: str, out: Path, options: dict[str, Any]) -> dict[str, Any]:
    def make() -> Torch | DeepSpeed:
        return DeepSpeed(kind) if kind.startswith("deepspeed") else Torch(kind)

    options = {"temperature": TEMPERATURE, **options}
    plain = train(make, None, options)
    recorded = train(make, out / "recording", options)
    same = all(torch.equal(plain["gradients"][n], g) for n, g in recorded["gradients"].items())
    if dist.get_rank() == 0:
        save_file(recorded["gradients"], out / "gradients.safetensors")
    return {"plain": plain["losses"], "recorded": recorded["losses"], "fed": recorded["fed"], "same": same}


def main() -> None:
    ensure_process_group(torch.device("cpu"), timeout=timedelta(seconds=120))
    os.environ.setdefault("LOCAL_RANK", "0")
    for kind, folder, options in json.loads(sys.argv[1]):
        torch._dynamo.reset()
        result = run(kind, Path(folder), options)
        (Path(folder) / f"rank-{dist.get_rank()}.json").write_text(json.dumps(result))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    relax_gc()
    main()
