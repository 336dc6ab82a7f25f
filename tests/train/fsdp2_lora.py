"""Checks of fsdp2_worker.py with LoRA: sharded adapters, and a frozen base in the compute dtype."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from fsdp2_tools import (
    BUCKET,
    apart,
    compare_steps,
    equal_tensors,
    folder,
    micro_batches,
    pair,
    shared_folder,
    train,
)
from safetensors.torch import load_file

from lockstep.algorithms.ppo import ValueLoss
from lockstep.config.model import LoraConfig
from lockstep.config.ppo import ValueConfig
from lockstep.execution import install_joint
from lockstep.packing.packs import repack

LORA = LoraConfig(rank=4, alpha=8.0)


def lora_steps(*, steps: int = 5, **settings: Any) -> Any:
    """Adapters only: their gradients and their norm, and the merged weights."""
    both = pair(lora=LORA, optimizer="sgd", lr=0.05, **settings)
    assert all(".lora_" in name or name == "score.weight" for name in both[1]._names), both[1]._names
    value = ValueLoss(ValueConfig(clip=0.2)) if settings.get("head") == "scalar" else None
    return compare_steps(both, steps=steps, tolerance=3e-6, loss=value)


def check_lora() -> Any:
    return lora_steps(steps=20)


def check_lora_tp() -> Any:
    return lora_steps(tp=2, shape="tiny-qwen3")


def check_lora_ring() -> Any:
    return lora_steps(ring=2)


def check_lora_ring_tp() -> Any:
    return lora_steps(ring=2, tp=2)


def check_lora_checkpointing() -> Any:
    return lora_steps(steps=2, activation_checkpointing=True, reshard_after_forward=False)


def check_lora_offloaded() -> Any:
    """Parameters on the host, and none of them changed but the adapters."""
    return lora_steps(steps=2, parameter_device="cpu")


def check_lora_optimizer_on_host() -> Any:
    return lora_steps(steps=2, optimizer_device="cpu")


def check_lora_compiled() -> Any:
    """The reference runs the same compiled layers without adapters: a graph of its own, made once."""
    return compiled("compile")


def check_lora_joint() -> Any:
    """As graphs of eager operators: what is looked at is which graphs there are, and their inputs."""
    with mock.patch("lockstep.train.base.install_joint", partial(install_joint, compiler="aot_eager")):
        return compiled("joint")


def compiled(execution: str) -> Any:
    local, backend = pair(lora=LORA, optimizer="sgd", lr=0.05, execution=execution, ref=True)
    batches = [repack(batch, BUCKET) for batch in micro_batches(0)]
    expected = local.ref.logprobs(batches)
    seen = compare_steps((local, backend), steps=2, tolerance=1e-5, bucket=BUCKET)
    assert apart(backend.ref.logprobs(batches), expected) < 1e-6
    compare_steps((local, backend), steps=1, tolerance=1e-5, bucket=BUCKET)
    return seen


def check_lora_value() -> Any:
    """A trunk with adapters, and a head that is trained whole."""
    return lora_steps(head="scalar")


def check_lora_value_tp() -> Any:
    return lora_steps(head="scalar", tp=2, steps=3)


def check_lora_ref() -> Any:
    """The reference is the base: no second copy, and no trained adapter in it."""
    local, backend = pair(lora=LORA, ref=True, lr=0.05)
    batches = micro_batches(0)
    first = local.ref.logprobs(batches)
    compare_steps((local, backend), steps=2, tolerance=1e-3)
    base, _ = pair()
    for expected in (first, local.ref.logprobs(batches), base.logprobs(batches)):
        assert apart(backend.ref.logprobs(batches), expected) < 1e-6
    assert apart(backend.ref.logprobs(batches), backend.logprobs(batches)) > 1e-3
    compare_steps((local, backend), steps=1, tolerance=1e-3)  # the adapters are on, and trained, afterwards
    return {"modules": len(list(backend.module.modules()))}


def check_lora_state() -> Any:
    """Resumed to the bit, with dropout; only adapters are in the checkpoint; exported merged; frozen weights
    are kept in the compute dtype."""
    dropping = LORA.model_copy(update={"dropout": 0.2})
    _, backend = pair(lora=dropping, dtype="bfloat16")
    stored = {p.requires_grad: p.dtype for p in backend._policy.parameters.values()}
    assert stored == {True: torch.float32, False: torch.bfloat16}, stored
    _, other = pair(lora=dropping, dtype="bfloat16")
    with shared_folder() as parent:
        train(backend, (0, 1))
        backend.save(folder(parent, "saved"))()
        dist.barrier()
        names = {name for path in (parent / "saved").glob("model*.safetensors") for name in load_file(path)}
        assert names and all(".lora_" in name for name in names), names
        expected = train(backend, (2, 3))
        other.load(parent / "saved")
        assert train(other, (2, 3)) == expected
        for which, trained in (("one", backend), ("two", other)):
            trained.save(folder(parent, which))()
        dist.barrier()
        assert equal_tensors(parent / "one", parent / "two")
        backend.export(parent / "export")
        exported = load_file(parent / "export" / "model.safetensors")
        weights = dict(backend.weights(policy_version=1).tensors())
        assert exported and all(torch.equal(exported[name], weights[name]) for name in exported)
    return {"tensors": len(names)}
