"""Sharded weights of a joint graph, which are gathered before it runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from lockstep.errors import ConfigError


def whole(weight: Tensor) -> Tensor:
    """Return a weight as a plain tensor: a DTensor is gathered over its mesh, and its gradient is reduced
    over the mesh and sharded again; any other tensor is returned as it is."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return weight
    from torch.distributed.tensor import DTensor, Partial, Replicate

    if not isinstance(weight, DTensor):
        return weight
    mesh = weight.device_mesh
    gathered = weight.redistribute(placements=[Replicate()] * mesh.ndim)
    # Partial: each rank's gradient is of its own tokens, so redistribute's backward has to add them up.
    return gathered.to_local(grad_placements=[Partial()] * mesh.ndim)


@contextlib.contextmanager
def whole_parameters(base: nn.Module, like: nn.Module) -> Iterator[None]:
    """Replace DTensors by plain Parameters while a graph is captured.

    Args:
        like: `base` itself, or the module of the same architecture that is about to run the graph. Its
            weights are taken then, with the requires_grad of `base`: those of `base` may be sharded just now,
            in the dtype of the masters.
    """
    swapped: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]] = []
    whole_of: dict[int, nn.Parameter] = {}
    of = dict(like.named_modules(remove_duplicate=False))
    for path, module in base.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            source = of[path]._parameters[name]
            assert source is not None
            plain = whole(source)
            if plain is parameter:
                continue
            if id(parameter) not in whole_of:
                whole_of[id(parameter)] = nn.Parameter(plain.detach(), requires_grad=parameter.requires_grad)
            swapped.append((module._parameters, name, parameter))
    for owner, name, parameter in swapped:
        owner[name] = whole_of[id(parameter)]
    try:
        yield
    finally:
        for owner, name, parameter in swapped:
            owner[name] = parameter


def refuse_inner_shards(base: nn.Module) -> None:
    """Refuse inner modules with shards: FSDP2 gathers a module's weights in its hooks, and no module inside
    the graph runs hooks.

    Raises:
        ConfigError: a module inside of the decoder is sharded on its own.
    """
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return
    from torch.distributed.fsdp import FSDPModule

    for name, module in base.named_modules():
        if name and isinstance(module, FSDPModule):
            raise ConfigError(
                f"unsupported-combination: {name} ({type(module).__name__}) is sharded on its own by "
                "fully_shard, and train.execution = 'joint' runs the whole decoder as one graph, without "
                "hooks inside; call fully_shard on the model alone, or set train.execution = 'compile'",
                setting="train.execution",
                name=name,
            )
