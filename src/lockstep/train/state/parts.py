"""What a train backend passes to `save_state` and `load_state`: its state as whole tensors by name, each of
which it may store in parts.

    "model/NAME"                            weights in the compute dtype, Hugging Face names
    "master/NAME"                           float32, only where the Parameter's compute dtype is another one
    "exp_avg/NAME", "exp_avg_sq/NAME"       AdamW's moments, float32
    "updates/NAME"                          AdamW's count of updates, float32, []
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.config.train import TrainConfig
from lockstep.train.optimizer import lr_at

MODEL = "model/"
MASTER = "master/"


class TensorMeta(NamedTuple):
    """Shape and dtype of a whole tensor, however many ranks share it."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Size of the data."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How a backend lays its state out over ranks; kept in the checkpoint. A run resumes
    bitwise on the same layout."""

    backend: str
    """"local", "fsdp2", "deepspeed"."""
    mesh: Mapping[str, int]
    """Axis to size, such as {"dp": 2, "ring": 1, "tp": 2}; empty for one process."""
    stream: int = 0
    """Which random numbers this rank draws where the checkpoint has none for it: ranks that must draw the
    same ones (those of one tp group) have the same number, the first has 0."""


class Reader(Protocol):
    """One whole tensor of a checkpoint; only the requested slice is read.

    read() is the whole of it, read(slice(a, b)) rows, read(slice(None), slice(a, b)) columns: on the host, in
    `dtype`, no slice with a step.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __call__(self, *index: slice) -> Tensor: ...


class TensorParts(Protocol):
    """The live state of a backend."""

    @property
    def group(self) -> dist.ProcessGroup | None:
        """All ranks of the backend; its objects collectives must work. None: this process alone, whatever
        process groups there are."""
        ...

    def tensors(self) -> Mapping[str, TensorMeta]:
        """All names, the same in the same order on every rank. A backend that was made with total_steps = 0
        leaves the optimizer out; loading then ignores that of the checkpoint."""
        ...

    def whole(self, name: str, *, owner: int) -> Tensor | None:
        """Collective: the whole tensor on rank `owner` of the group, None on the others. Every rank calls it
        once for each name, in one order. It may be on any device, and may be live."""
        ...

    def fill(self, name: str, read: Reader) -> None:
        """Copy this rank's part of the tensor in. No collective: every rank fills at its own pace."""
        ...


class LiveTensors:
    """The state of one process that has all of it: live tensors by name."""

    group: dist.ProcessGroup | None = None

    def __init__(self, live: Mapping[str, Tensor]) -> None:
        self._live = live

    def tensors(self) -> Mapping[str, TensorMeta]:
        """See TensorParts."""
        return {name: TensorMeta(tuple(t.shape), t.dtype) for name, t in self._live.items()}

    def whole(self, name: str, *, owner: int) -> Tensor | None:
        """See TensorParts."""
        return self._live[name].detach()

    @torch.no_grad()
    def fill(self, name: str, read: Reader) -> None:
        """See TensorParts."""
        self._live[name].copy_(read())


def read_flat(read: Reader, start: int, stop: int) -> Tensor:
    """Read elements start:stop of the flattened whole tensor, [stop - start]; only the rows that hold
    them are read."""
    if len(read.shape) == 0:
        return read().reshape(-1)[start:stop]
    row = torch.Size(read.shape[1:]).numel()
    if row == 0 or start == stop:
        return torch.empty(0, dtype=read.dtype)
    first = start // row
    rows = read(slice(first, -(-stop // row)))
    return rows.reshape(-1)[start - first * row : stop - first * row]


def model_tensors(module: nn.Module, *, trained_only: bool) -> dict[str, Tensor]:
    """The live weights by name, each storage once: tied weights under their first name."""
    named = dict(module.named_parameters())
    if trained_only:
        return {name: p.detach() for name, p in named.items() if p.requires_grad}
    persistent = module.state_dict().keys()
    buffers = {name: b for name, b in module.named_buffers() if name in persistent}
    return {name: t.detach() for name, t in (named | buffers).items()}


def train_progress(
    config: TrainConfig, *, steps_done: int, total_steps: int, dtype: torch.dtype, lora: bool = False
) -> dict[str, Any]:
    """The `progress` of every backend's checkpoints. dtype: the compute dtype."""
    return {
        "step": steps_done,
        "total_steps": total_steps,
        "schedule": config.schedule,
        "lr_next": lr_at(steps_done, config=config, total_steps=total_steps),
        "optimizer": config.optimizer,
        "lora": lora,
        "dtype": str(dtype).removeprefix("torch."),
    }
