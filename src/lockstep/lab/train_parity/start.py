"""The models of a parity run as they start, in the `local` backend, which scores the inputs with them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lockstep.config.ppo import ValueConfig
from lockstep.config.train import TrainConfig
from lockstep.lab.train_parity.job import InputsSpec, Role
from lockstep.models.load import load_model
from lockstep.train.local import LocalBackend


@contextmanager
def starting_backend(spec: InputsSpec, role: Role = "policy", **options: Any) -> Iterator[LocalBackend]:
    """Load the starting weights of a model; in float32 on a CPU, whatever the stacks compute in.

    Args:
        options: of LocalBackend, such as the temperature.
    """
    config = spec.model if role == "policy" else ValueConfig().model(spec.model)
    if spec.device == "cpu":
        config = config.model_copy(update={"dtype": "float32"})
    head: Any = "logits" if role == "policy" else "scalar"
    model = load_model(config, attention="sdpa", device=torch.device(spec.device), head=head)
    train = TrainConfig(token_budget=spec.token_budget, device=spec.device, attention="sdpa")
    backend = LocalBackend(train, model=model, total_steps=0, **options)
    try:
        yield backend
    finally:
        backend.close()
