"""Weights on their way from a trainer to an engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightUpdate:
    """One complete version of the policy's weights.

    `shared_module` is set when trainer and engine live in one process: the engine reads the very Parameters.
    Otherwise `tensors` yields (Hugging Face checkpoint name, tensor), tied weights under every name they
    go by.
    """

    policy_version: int
    """Rollout batches that the policy has been trained on, as the loop counts its steps (a batch may be many
    optimizer steps). Completions, samples and engines carry the same number."""
    tensors: TensorSource
    shared_module: nn.Module | None = None


class TensorSource(Protocol):
    def __call__(self) -> Iterator[tuple[str, Tensor]]: ...
