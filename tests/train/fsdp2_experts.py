"""Checks of fsdp2_worker.py with train.ep: experts split over ranks, beside all of them on every rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from fsdp2_tools import (
    compare_steps,
    equal_tensors,
    fixtures,
    folder,
    gradient_error,
    load,
    micro_batches,
    pair,
    settings,
    shared_folder,
    train,
)
from pytest import raises
from safetensors.torch import load_file

from lockstep import invariant
from lockstep.errors import ConfigError
from lockstep.train.fsdp2.backend import FSDP2Backend

MOE = "tiny-qwen3-moe"
SHAPES = (MOE, "tiny-gpt-oss", "tiny-qwen2-moe", "tiny-mixtral")


def of_experts(ep: int, *, shape: str = MOE, **train: Any) -> FSDP2Backend:
    """Batch-invariant."""
    model = load(shape=shape, weights=False, attention="varlen")
    invariant.convert(model.module, device=torch.device("cpu"))
    config = settings(ep=ep, attention="varlen", router_aux_loss=0.01, **train)
    return FSDP2Backend(config, model=model, total_steps=4)


def compare_sizes(shape: str, sizes: tuple[int, ...]) -> dict[str, float]:
    """Logprobs of all sizes have the same bits, gradients are within 1e-6, and of the last size both have the
    same bits twice. Three micro-batches: the last turn has ranks without rows."""
    batches = micro_batches(0)
    seen: list[Any] = []
    for ep in (*sizes, sizes[-1]):
        backend = of_experts(ep, shape=shape)
        scored = backend.logprobs(batches)
        stats = backend.forward_backward(batches, fixtures.NegativeLogprob())
        gradients = backend.gradients()
        metrics = {k: v for k, v in backend.optimizer_step().items() if k.startswith("experts/")}
        weights = dict(backend.weights(policy_version=1).tensors())
        seen.append((ep, scored, stats.logprobs, gradients, metrics, weights))
    _, scored, logprobs, gradients, metrics, weights = seen[0]
    error = 0.0
    for ep, *found in seen[1:]:
        assert all(map(torch.equal, found[0], scored)), (shape, ep, "logprobs")
        assert all(map(torch.equal, found[1], logprobs)), (shape, ep, "logprobs in training")
        error = max(error, gradient_error(found[2], gradients))
        counted = {k: v for k, v in found[3].items() if "loss" not in k}
        assert counted == {k: v for k, v in metrics.items() if "loss" not in k}, (found[3], metrics)
        assert {n: w.shape for n, w in found[4].items()} == {n: w.shape for n, w in weights.items()}
    assert metrics["experts/dropped_tokens"] == 0.0 and metrics["experts/load_max"] > 1.0
    assert error < 1e-6, (shape, error)
    for key in (3, 5):
        once, again = seen[-2][key], seen[-1][key]
        assert once.keys() == again.keys() and all(torch.equal(once[n], again[n]) for n in once)
    return {shape: error}


def check_experts() -> Any:
    return compare_sizes(MOE, (1, 2))


def check_experts_of_families() -> Any:
    sizes = (1, 2) if dist.get_world_size() == 2 else (1, 2, 4)
    return [compare_sizes(shape, sizes) for shape in SHAPES]


def check_experts_steps() -> Any:
    return compare_steps(pair(shape=MOE, optimizer="sgd", lr=0.05, ep=2), steps=3, tolerance=1e-5)


def check_experts_checkpointing() -> Any:
    both = pair(shape=MOE, optimizer="sgd", lr=0.05, ep=2, activation_checkpointing=True, ref=True)
    return compare_steps(both, steps=2, tolerance=1e-5)


def check_experts_settings() -> Any:
    """Gradients reduced in each backward, gathered weights kept, states on the host."""
    apart = {"reduce_gradients": "per_micro_batch", "reshard_after_forward": False}
    both = pair(shape="tiny-gpt-oss", optimizer="sgd", lr=0.05, ep=2, **apart, parameter_device="cpu")
    return compare_steps(both, steps=2, tolerance=1e-5)


def check_experts_state() -> Any:
    """A checkpoint does not depend on ep, any ep resumes it, and an export has whole experts."""
    with shared_folder() as parent:
        backend, whole = of_experts(2), of_experts(1)
        train(backend, [0])
        backend.save(folder(parent, "of_ep"))()
        whole.load(parent / "of_ep")
        whole.save(folder(parent, "of_one"))()
        resumed = of_experts(dist.get_world_size())
        resumed.load(parent / "of_one")
        resumed.save(folder(parent, "again"))()
        dist.barrier()
        assert equal_tensors(parent / "of_ep", parent / "of_one")
        assert equal_tensors(parent / "of_ep", parent / "again")
        assert train(resumed, [1])[:3] == train(backend, [1])[:3]  # losses; the norm is of sums in an order
        backend.export(parent / "export")
        dist.barrier()
        own = dict(backend.weights(policy_version=1).tensors())
        exported = load_file(parent / "export" / "model.safetensors")
        name = next(n for n in own if n.endswith("experts.down_proj"))
        expert = exported[name.replace(".down_proj", ".7.down_proj.weight")]
        assert torch.equal(expert, own[name][7])
    return None


def check_experts_refused() -> Any:
    size = dist.get_world_size()
    with raises(ConfigError, match=rf"^train.ep = 3 does not divide {size} ranks"):
        of_experts(3)
    with raises(ConfigError, match=r"^train.ep = 2 splits experts .* llama has no experts"):
        of_experts(2, shape="tiny-llama")
    return None
