"""The KV cache: keys and values of all running samples, one pair of tensors per layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lockstep.models.memory import available_bytes, total_bytes

SCRATCH = 0
"""The cache row that rows without a sample write to: they fill a batch up to a static size."""
_FRACTION = {"cuda": 0.45, "cpu": 0.25}
"""Default of engine.memory_fraction: on a GPU the trainer's optimizer and activations need the rest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KVShape:
    """Shape, dtype and device of the keys and values of a token."""

    layers: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def token_bytes(self) -> int:
        """Bytes of one token, keys and values of all layers."""
        return 2 * self.layers * self.heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """A copy of `count` rows, from `source` on to `target` on."""

    source: int
    target: int
    count: int


class KVCache:
    """keys[layer] and values[layer] are [P, K, H]; P - 1 tokens of samples and the scratch row."""

    def __init__(self, shape: KVShape, capacity: int) -> None:
        def rows() -> Tensor:  # a tensor each: views of one storage would be aliased inputs of a graph
            size = (capacity + 1, shape.heads, shape.head_dim)
            tensor = torch.zeros(size, dtype=shape.dtype, device=shape.device)
            torch._dynamo.mark_dynamic(tensor, 0)  # a larger cache is no reason to compile again
            return tensor

        self.capacity = capacity
        self.num_bytes = (capacity + 1) * shape.token_bytes
        self.keys = [rows() for _ in range(shape.layers)]
        self.values = [rows() for _ in range(shape.layers)]
        self._device = shape.device

    def move(self, moves: Sequence[Move]) -> None:
        """Do all moves at once: a source may overlap any target."""
        if not moves:
            return
        sources = [np.arange(move.source, move.source + move.count) for move in moves]
        targets = [np.arange(move.target, move.target + move.count) for move in moves]
        rows = np.concatenate([*sources, *targets])
        index = upload(rows, torch.empty(rows.size, dtype=torch.int64, device=self._device))
        source, target = index.chunk(2)
        for tensor in (*self.keys, *self.values):
            tensor.index_copy_(0, target, tensor.index_select(0, source))


def upload(array: npt.NDArray[Any], to: Tensor) -> Tensor:
    """Copy the entries, in order, over those of `to`, without waiting for a GPU."""
    entries = torch.from_numpy(array).view(-1)
    return to.copy_(entries.pin_memory() if to.is_cuda else entries, non_blocking=True)


def most_tokens(shape: KVShape, fraction: float | None, *, held: int = 0) -> int:
    """Tokens that fit into `fraction` of the device's memory, and into nine tenths of what is free there; on
    a CPU, of the host's memory within its cgroup.

    Args:
        held: bytes of the cache that the new one replaces.
    """
    share = _FRACTION[shape.device.type] if fraction is None else fraction
    if shape.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(shape.device)
        cached = torch.cuda.memory_reserved(shape.device) - torch.cuda.memory_allocated(shape.device)
        # What torch has reserved and not handed out is free for it, though not for the driver.
        free += cached
    else:
        free, total = available_bytes(shape.device)[0], total_bytes()
    return int(min(share * total, 0.9 * (free + held))) // shape.token_bytes - 1
