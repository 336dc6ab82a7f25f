"""The outputs of a replay, kept for a comparison with another one: OUT/outputs.safetensors."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.observe.tensor_file import save_tensors
from lockstep.schema.batch import PackedBatch

FILE = "outputs.safetensors"
GRADIENT_ENTRIES = 2**20
"""Entries kept of one parameter's gradient."""


@dataclass(slots=True)
class KeptOutputs:
    """Logprobs of every input, and the sum of the first inputs' gradients.

    Names: "logprobs/INDEX" is [trained tokens] float32 in document order; "gradients/NAME" is [entries]
    float32: all entries of the parameter in their order, or, of larger ones, those at `gradient_places`.
    """

    gradient_inputs: int
    """The number of inputs whose gradients are added up: the first ones that have any."""
    entries: int = GRADIENT_ENTRIES
    logprobs: dict[int, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    summed: list[int] = field(default_factory=list)
    """Indices of the inputs in `gradients`."""
    total: int = 0
    """Entries of all parameters together."""

    def add_logprobs(self, index: int, logprobs: Tensor, batch: PackedBatch) -> None:
        """Keep logprobs [T] of `batch`, which is on the host."""
        used = batch.num_tokens
        self.logprobs[index] = logprobs[:used].cpu().float()[batch.loss_mask[:used]]

    @property
    def wants_gradients(self) -> bool:
        """Whether another input's gradients are to be added."""
        return len(self.summed) < self.gradient_inputs

    def add_gradients(self, index: int, gradients: Mapping[str, Tensor]) -> None:
        """Add one input's gradients, by parameter name, on any device."""
        self.summed.append(index)
        self.total = sum(gradient.numel() for gradient in gradients.values())
        for name, gradient in gradients.items():
            flat = gradient.detach().reshape(-1)
            indices = gradient_places(name, flat.numel(), self.entries)
            if indices is not None:
                flat = flat[indices.to(flat.device)]
            kept = flat.to("cpu", torch.float32, copy=True)
            if name in self.gradients:
                self.gradients[name] += kept
            else:
                self.gradients[name] = kept

    def summary(self) -> dict[str, Any]:
        """What was kept, as summary.json has it."""
        kept = sum(gradient.numel() for gradient in self.gradients.values())
        return {
            "file": FILE,
            "logprobs": len(self.logprobs),
            "gradient_inputs": list(self.summed),
            "gradients": f"{kept} of {self.total} entries",
        }

    def write(self, directory: Path) -> None:
        """Write OUT/outputs.safetensors."""
        tensors = {f"logprobs/{index}": value for index, value in self.logprobs.items()}
        tensors |= {f"gradients/{name}": value for name, value in self.gradients.items()}
        save_tensors({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / FILE)


def gradient_places(name: str, numel: int, entries: int = GRADIENT_ENTRIES) -> Tensor | None:
    """[entries] int64: which entries of a flat gradient are kept, the same in every replay; None: all.

    Drawn with replacement, seeded by the parameter's name.
    """
    if numel <= entries:
        return None
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randint(numel, (entries,), generator=generator).sort().values
