"""Records of weights that are sent from a trainer to an engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch.distributed as dist
from torch import Tensor, nn

from lockstep.wire.buckets import TensorSpec as TensorSpec
from lockstep.wire.buckets import specs_to_json


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryReport:
    """Memory in bytes by name, of trainer and engine."""

    trainer: Mapping[str, float]
    engine: Mapping[str, float] | None
    """None: the engine does not report it."""


Transport = Literal["memory", "ipc", "collective", "disk"]
"""How a bucket reaches an engine: in the same process, by CUDA IPC, by NCCL or gloo, or in a file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightUpdate:
    """One complete version of the policy's weights.

    `shared_module` is set when trainer and engine are in one process: the engine reads the same Parameters.
    Otherwise `tensors` yields (Hugging Face checkpoint name, tensor), tied weights under each of their names.
    """

    policy_version: int
    """Number of rollout batches that the policy has been trained on, which is the loop's step count (a batch
    may be many optimizer steps). Completions, samples and engines carry the same number."""
    tensors: TensorSource
    shared_module: nn.Module | None = None
    shapes: Mapping[str, Sequence[int]] | None = None
    """Shape of each tensor that `tensors` yields, by name, so that an engine can refuse the update before it
    has changed anything. None: not known."""
    part: WeightPart | None = None
    """This rank's part of every tensor, where ranks share matrices: for an engine that they share, too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightPart:
    """One tensor parallel rank's part of the weights."""

    group: dist.ProcessGroup
    """The ranks that share every matrix."""
    plan: str
    """How matrices are split: lockstep or hf."""
    tensors: TensorSource
    shapes: Mapping[str, Sequence[int]]


class TensorSource(Protocol):
    def __call__(self) -> Iterator[tuple[str, Tensor]]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateSession:
    """One update of an engine's weights: all tensors, between `begin_update` and `finish_update`."""

    policy_version: int
    run_id: str
    """Identifies the trainer's process: version 3 of a restarted trainer is not that of the earlier one."""
    deadline: float
    """time.monotonic() by which the whole update must be done."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightBucket:
    """Some tensors, packed one after the other."""

    index: int
    specs: tuple[TensorSpec, ...]
    num_bytes: int
    transport: Transport
    data: Tensor | None = None
    """transport "memory": [num_bytes] uint8, valid until `receive` returns."""
    handle: Mapping[str, Any] | None = None
    """Plain JSON; "disk": {"path": a safetensors file with the tensors by name}; "ipc": {"key": names the
    buffer, "memory": what lockstep.wire.receive.export_handle gives}; "collective": {"group": its name,
    "address", "port", "world_size", "first_rank", "backend", "number"}, see lockstep.wire.receive."""

    def as_json(self) -> dict[str, Any]:
        """Describe the bucket for lockstep.wire.receive.Receiver in another process; its bytes are sent
        separately."""
        return {
            "index": self.index,
            "specs": specs_to_json(self.specs),
            "num_bytes": self.num_bytes,
            "transport": self.transport,
            "handle": dict(self.handle or {}),
        }
