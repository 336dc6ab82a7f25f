"""Sides of a bisection over a tiny model, made without a recording."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from lockstep.algorithms.offline import SFTLoss
from lockstep.config.model import ModelConfig
from lockstep.config.train import TrainConfig
from lockstep.models.load import load_model
from lockstep.packing import pack
from lockstep.schema.batch import PackedBatch, TrainSample
from lockstep.train.local import LocalBackend
from lockstep_lab.bisect.arms import Arm


def batch_of(lengths: Sequence[int], *, seed: int = 0) -> PackedBatch:
    samples = []
    for index, length in enumerate(lengths):
        generator = torch.Generator().manual_seed(100 * seed + index)
        mask = torch.arange(length) < length - 1
        ids = torch.randint(3, 256, (length,), generator=generator)
        samples.append(TrainSample(token_ids=ids, loss_mask=mask, sample_id=index))
    return pack(samples, [0.1 * (1 + i) * torch.ones(n) for i, n in enumerate(lengths)])


def arm_of(name: str, *, model: str = "shape:tiny-llama", dtype: str = "float32", **train: Any) -> Arm:
    config = TrainConfig(**({"attention": "sdpa", "device": "cpu"} | train))
    loaded = load_model(
        ModelConfig(name=model, dtype=dtype), attention=config.attention, device=torch.device("cpu")
    )
    backend = LocalBackend(config, model=loaded, total_steps=0)
    return Arm(name=name, label=f"{config.attention} {config.layout}", backend=backend, loss=SFTLoss())


@torch.no_grad()
def perturb(arm: Arm, parameter: str, *, scale: float = 1e-3) -> None:
    weight = arm.module.get_parameter(parameter)
    weight += scale * torch.randn(weight.shape, generator=torch.Generator().manual_seed(7)).to(weight.dtype)


def shift_rope(arm: Arm, layer: int, *, token: int) -> None:
    """One layer rotates one token of every row as if it were the first."""

    def hook(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        turned = [x.clone() for x in kwargs["position_embeddings"]]
        for x in turned:
            if x.shape[1] > token:
                x[:, token] = x[:, 0]
        return args, {**kwargs, "position_embeddings": tuple(turned)}

    attention = arm.module.model.layers[layer].self_attn
    attention.register_forward_pre_hook(hook, with_kwargs=True)


def leak(arm: Arm, layer: int) -> None:
    """In one layer every document sees the one before it: two by two they are one."""

    def hook(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        bounds = kwargs["cu_seqlens"].tolist()
        merged = [*bounds[:-1:2], bounds[-1]]
        lengths = tuple(b - a for a, b in pairwise(merged))
        changed = {
            "cu_seqlens": torch.tensor(merged, dtype=torch.int32),
            "max_seqlen": max(lengths),
            "lengths": lengths,
        }
        return args, {**kwargs, **changed}

    attention = arm.module.model.layers[layer].self_attn
    attention.register_forward_pre_hook(hook, with_kwargs=True)


def scale_gradient(arm: Arm, path: str, *, factor: float = 1.01) -> None:
    """The gradient that comes back to a module's output is wrong."""
    module = arm.module.get_submodule(path)

    def hook(_: Any, args: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda g: g * factor)

    module.register_forward_hook(hook)
