"""Low-rank adapters through peft, injected into the transformers module: its class and layout stay."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from lockstep.config.model import LoraConfig
from lockstep.errors import ConfigError
from lockstep.models.causal_lm import causal_lm
from lockstep.models.scalar import scalar_head

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

_ADAPTER = "default"


def add_lora(module: nn.Module, config: LoraConfig, *, seed: int) -> None:
    """Put LoRA layers into `module`: from now on only they, and a scalar head, are trained. They start as a
    no-op (B = 0).

    Raises:
        ConfigError: peft is not installed, or no linear module has one of the names of `target_modules`.
    """
    if importlib.util.find_spec("peft") is None:
        raise ConfigError("model.lora needs the package peft: pip install lockstep-rl[lora]")
    import peft

    every_linear = config.target_modules == ("all-linear",)
    adapter = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]  # peft only multiplies by it
        lora_dropout=config.dropout,
        target_modules=_linear_names(module) if every_linear else list(config.target_modules),
        bias="none",
    )
    device = next(module.parameters()).device
    # A's random start must depend on the seed alone, and must not move the caller's generator.
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        try:
            peft.inject_adapter_in_model(adapter, module, adapter_name=_ADAPTER)
        except ValueError as error:
            raise ConfigError(
                f"model.lora.target_modules = {list(config.target_modules)} does not fit the model "
                f"({error}); its linear modules are {_linear_names(module)}"
            ) from error
    if (scores := scalar_head(module)) is not None:  # a fresh one has everything to learn
        scores.requires_grad_(True)


def has_lora(module: nn.Module) -> bool:
    """Return whether `add_lora` was called on the module."""
    return hasattr(module, "peft_config")


def copy_structure(source: nn.Module, target: nn.Module) -> None:
    """Give `target`, a bare module of the same architecture, LoRA layers as `source` has, with new values."""
    if has_lora(source):
        import peft

        configs = cast(dict[str, peft.PeftConfig], source.peft_config)
        peft.inject_adapter_in_model(copy.deepcopy(configs[_ADAPTER]), target, adapter_name=_ADAPTER)


@contextlib.contextmanager
def without_lora(module: nn.Module) -> Iterator[None]:
    """Inside, the module computes with its base weights: the frozen reference policy without extra memory."""
    layers = _lora_layers(module)
    for _, layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for _, layer in layers:
            layer.enable_adapters(True)


@torch.no_grad()
def merged_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """Return Hugging Face name -> weight with LoRA merged in: base + (alpha / rank) * B @ A, in float32.

    Tensors without an adapter are the module's own, not copies; tied weights keep all their names.
    Without LoRA it is `module.state_dict()`.
    """
    merged: dict[str, Tensor] = {}
    for name, tensor in module.state_dict().items():
        if ".lora_" not in name:
            merged[name.replace(".base_layer.", ".")] = tensor
    for path, layer in _lora_layers(module):
        base = cast(nn.Linear, layer.get_base_layer()).weight
        a, b = (cast(nn.Linear, part[_ADAPTER]).weight for part in (layer.lora_A, layer.lora_B))
        delta = layer.scaling[_ADAPTER] * (b.float() @ a.float())
        merged[f"{path}.weight"] = (base.float() + delta).to(base.dtype)
    return merged


def _lora_layers(module: nn.Module) -> list[tuple[str, LoraLayer]]:
    if not has_lora(module):
        return []
    from peft.tuners.lora import LoraLayer

    return [(path, layer) for path, layer in module.named_modules() if isinstance(layer, LoraLayer)]


def _linear_names(module: nn.Module) -> list[str]:
    """Last names of all linear modules but the head."""
    head = scalar_head(module) or causal_lm(module).get_output_embeddings()
    return sorted(
        {
            p.rpartition(".")[2]
            for p, m in module.named_modules()
            if isinstance(m, nn.Linear) and m is not head
        }
    )
