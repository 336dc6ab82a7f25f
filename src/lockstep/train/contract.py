"""The kernel contract that a train backend keeps."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lockstep import invariant
from lockstep.attention import kernel_of
from lockstep.config.train import TrainConfig
from lockstep.errors import ConfigError
from lockstep.models.architectures import causal_lm
from lockstep.models.forward import kernel_contract
from lockstep.models.load import LoadedModel
from lockstep.schema.contract import KernelContract


def compile_options(module: nn.Module) -> dict[str, Any] | None:
    """Options that torch.compile needs for this module; None unless it is batch-invariant. An engine that
    computes the same bits passes the same options."""
    return invariant.inductor_options() if invariant.is_converted(module) else None


def contract_of(config: TrainConfig, model: LoadedModel, device: torch.device) -> KernelContract | None:
    """Return the kernel contract of a batch-invariant model; None when `config.batch_invariant` is off.

    Raises:
        ConfigError: it is on, and the model's modules were not converted for it.
    """
    if not config.batch_invariant:
        return None
    module = causal_lm(model.module)
    base = getattr(module, module.base_model_prefix)
    contract = kernel_contract(
        model.module,
        attention=kernel_of(base.config._attn_implementation),
        execution=config.execution,
        dtype=model.dtype,
        device=device,
    )
    if contract is None:
        raise ConfigError(
            f"not-batch-invariant: train.batch_invariant = true, but {type(module).__name__} was not "
            f"converted, or attends by another kernel than varlen ({base.config._attn_implementation!r}), or "
            f"runs under train.execution = {config.execution!r}; load it with attention 'varlen' and call "
            "lockstep.invariant.convert on it before the backend is made"
        )
    return contract
