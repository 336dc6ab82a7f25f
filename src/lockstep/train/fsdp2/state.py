"""The state of a ShardedModel and its optimizer as the whole tensors of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.train.fsdp2.sharded_model import ShardedModel
from lockstep.train.optimizer import MasterOptimizer
from lockstep.train.state.parts import MASTER, MODEL, Reader, TensorMeta


class ShardedState:
    """A TensorParts: each tensor is gathered on the rank that writes it, and filled from slices.

    Where the shards are float32 they are the master weights, and a checkpoint's weights are made of them by
    the cast that every forward makes.

    Args:
        optimizer: None: the backend has none.
        trained_only: leave frozen weights and buffers out (LoRA).
    """

    def __init__(
        self, policy: ShardedModel, optimizer: MasterOptimizer | None, *, trained_only: bool
    ) -> None:
        self._policy = policy
        parameters = policy.parameters.items()
        self._weights = [name for name, p in parameters if p.requires_grad or not trained_only]
        self._buffers = {} if trained_only else policy.persistent_buffers()
        self._masters: dict[str, Tensor] = {}
        self._state: dict[str, Tensor] = {}
        if optimizer is not None:
            named = zip(optimizer.parameters, optimizer.masters, strict=True)
            self._masters = {parameter.name: master for parameter, master in named}
            self._state = optimizer.state()
        self._lists_masters = optimizer is not None and policy.dtype != torch.float32

    @property
    def group(self) -> dist.ProcessGroup:
        """All ranks."""
        return self._policy.mesh.world

    def tensors(self) -> Mapping[str, TensorMeta]:
        """See TensorParts."""
        policy = self._policy
        tensors = {MODEL + name: TensorMeta(policy.whole_shape(name), policy.dtype) for name in self._weights}
        tensors |= {MODEL + n: TensorMeta(tuple(b.shape), b.dtype) for n, b in self._buffers.items()}
        if self._lists_masters:
            tensors |= {
                MASTER + name: TensorMeta(policy.whole_shape(name), torch.float32) for name in self._masters
            }
        for key, tensor in self._state.items():
            shape = () if tensor.ndim == 0 else policy.whole_shape(_parameter_of(key))
            tensors[key] = TensorMeta(shape, tensor.dtype)
        return tensors

    @torch.no_grad()
    def whole(self, name: str, *, owner: int) -> Tensor | None:
        """See TensorParts."""
        parameter = _parameter_of(name)
        if name.startswith(MODEL):
            if parameter in self._buffers:
                return self._buffers[parameter]
            local = self._policy.local(parameter).to(self._policy.dtype)
        else:
            local = self._masters[parameter] if name.startswith(MASTER) else self._state[name]
        return local if local.ndim == 0 else self._policy.whole_on(parameter, local, owner=owner)

    @torch.no_grad()
    def fill(self, name: str, read: Reader) -> None:
        """See TensorParts."""
        parameter = _parameter_of(name)
        if name.startswith(MODEL) and parameter in self._buffers:
            self._buffers[parameter].copy_(read())
            return
        if len(read.shape) == 0:
            self._state[name].copy_(read())
            return
        part = self._policy.part(parameter)
        values = read(*part)
        if not name.startswith((MODEL, MASTER)):
            self._state[name].copy_(values)
        elif name.startswith(MASTER):
            self._masters[parameter].copy_(values)
        else:
            shard, master = self._policy.local(parameter), self._masters.get(parameter)
            if shard.dtype == self._policy.dtype:  # otherwise it is the master
                shard.copy_(values)
            if master is not None and not self._lists_masters:
                master.copy_(values)


def _parameter_of(name: str) -> str:
    return name.partition("/")[2]
