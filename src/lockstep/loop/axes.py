"""What "auto" means on this machine: resolved once, logged, written to the manifest; the config stays as
it was."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lockstep.config.train import TrainConfig
from lockstep.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Axes:
    """The choices of a run after resolution."""

    device: str
    backend: str
    engine: str | None
    attention: str
    execution: str
    layout: str
    static_capacity: bool


def resolve_axes(train: TrainConfig, *, engine: str | None) -> Axes:
    """Resolve `train`'s auto values.

    Raises:
        ConfigError: train.device names a device that this machine does not have.
    """
    device = train.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(
            f"train.device = {device!r}, but torch {torch.__version__} sees no CUDA device; set "
            "train.device = 'cpu', "
            "or install a CUDA build of torch and a driver (`lockstep doctor` shows what it finds)"
        )
    attention = train.attention
    if attention == "auto":
        attention = "varlen" if device.startswith("cuda") else "sdpa"
    static = train.static_capacity
    return Axes(
        device=device,
        backend=train.backend,
        engine=engine,
        attention=attention,
        execution=train.execution,
        layout=train.layout,
        static_capacity=train.execution != "eager" if static is None else static,
    )


def resolved_train(train: TrainConfig, axes: Axes) -> TrainConfig:
    """`train` with every auto replaced: what the backend is given."""
    return train.model_copy(
        update={"device": axes.device, "attention": axes.attention, "static_capacity": axes.static_capacity}
    )
