"""Low-rank adapters through peft, injected into the transformers module: its class and layout stay."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, cast

import torch
from torch import Tensor, nn

from lockstep.common_errors import missing_package
from lockstep.config.model import ALL_LINEAR, AUTO, LoraConfig
from lockstep.errors import ConfigError
from lockstep.invariant.experts import ExpertAdapters, Experts, Router, install_adapters
from lockstep.models.architectures import architecture_of, causal_lm, text_config
from lockstep.models.heads import scalar_head
from lockstep.models.source import WeightSource

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

_ADAPTER = "default"
_BASE = ".base_layer."
_LORA = ".lora_"
_KINDS: tuple[Literal["A", "B"], ...] = ("A", "B")


def add_lora(module: nn.Module, config: LoraConfig, *, seed: int) -> None:
    """Put LoRA layers into `module`: from now on only they, and a scalar head, are trained. They start as a
    no-op (B = 0).

    Raises:
        ConfigError: peft is not installed, or one of `target_modules` is no linear module of the decoder.
    """
    if importlib.util.find_spec("peft") is None:
        raise missing_package("model.lora", "peft", extra="lora")
    import peft

    targets = targets_of(module, config)
    if (
        targets == config.target_modules
    ):  # else they are ours: a shared expert's may be called as experts' tensors
        check_targets(module, targets)
    adapter = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]  # peft only multiplies by it
        lora_dropout=config.dropout,
        target_modules=list(targets),
        target_parameters=list(config.target_parameters) or None,
        bias="none",
    )
    _check_parameters(module, config)
    device = next(module.parameters()).device
    # A's random start must depend on the seed alone, and must not move the caller's generator.
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        # Not get_peft_model: its wrapper is another class with another state dict, and code that looks
        # for a transformers model would find peft's.
        peft.inject_adapter_in_model(adapter, module, adapter_name=_ADAPTER)
    install_adapters(module)
    if (scores := scalar_head(module)) is not None:  # a fresh one has everything to learn
        scores.requires_grad_(True)


def targets_of(module: nn.Module, config: LoraConfig) -> tuple[str, ...]:
    """Return the names that `config.target_modules` means for a module: with "auto" those of its
    architecture's record, without a record all linear modules."""
    linear = _linear_names(module)
    if config.target_modules == (AUTO,) and (record := architecture_of(text_config(module))) is not None:
        return tuple(name for name in (*record.attention_linears, *record.mlp_linears) if name in linear)
    return tuple(linear) if config.target_modules in ((ALL_LINEAR,), (AUTO,)) else config.target_modules


def check_targets(module: nn.Module, targets: Sequence[str]) -> None:
    """Check that every target names linear modules of the decoder, as peft looks for them: by the whole path,
    or by its end.

    peft itself ignores a target that it does not find, if it finds another.

    Raises:
        ConfigError: a target names no module, or one that is not adapted.
    """
    linear = set(_linear_names(module))
    for target in targets:
        found = [
            (path, part)
            for path, part in module.named_modules()
            if path == target or path.endswith(f".{target}")
        ]
        for path, part in found:
            if not isinstance(part, nn.Linear) or path.rpartition(".")[2] not in linear:
                raise _unfit(target, f"is a {type(part).__name__}", linear)
        if target.rpartition(".")[2] in _expert_names(module):
            raise _unfit(target, "is of experts: name it in model.lora.target_parameters", linear)
        if not found:
            raise _unfit(target, "is not a module of this model", linear)


def _check_parameters(module: nn.Module, config: LoraConfig) -> None:
    """Check config.target_parameters, of which peft ignores those that it does not find.

    Raises:
        ConfigError: the model has no experts with such a Parameter, or a GPU's kernel does not take the rank.
    """
    names = [name for name, parameter in module.named_parameters() if parameter.ndim == 3]
    for target in config.target_parameters:
        if not any(f".{name}".endswith(f".{target}") for name in names):
            known = sorted({".".join(name.split(".")[-2:]) for name in names if ".experts." in name})
            raise ConfigError(
                f"unknown-name: model.lora.target_parameters: {target!r} is no Parameter of this model's "
                f"experts; it has {', '.join(known) or 'none'}"
            )
    first = next(module.parameters())
    if config.target_parameters and first.is_cuda and config.rank * first.element_size() % 16:
        raise ConfigError(
            f"not-divisible: model.lora.rank = {config.rank}: torch's grouped_mm needs rows of a multiple of "
            f"16 bytes; set model.lora.rank to a multiple of {16 // first.element_size()}"
        )


def _expert_names(module: nn.Module) -> set[str]:
    """Names of experts' Parameters, and of what holds them or the router."""
    paths = [path for path, part in module.named_modules() if isinstance(part, Experts | Router)]
    inside = [name for path in paths for name, _ in module.get_submodule(path).named_parameters()]
    return {*inside, *(path.rpartition(".")[2] for path in paths)}


def _unfit(target: str, why: str, linear: Iterable[str]) -> ConfigError:
    return ConfigError(
        f"unknown-name: model.lora.target_modules: {target!r} {why}; only linear modules of the decoder can "
        f"have adapters: {', '.join(sorted(linear))}"
    )


def add_lora_without_weights(
    module: nn.Module, config: LoraConfig, *, seed: int, source: WeightSource
) -> WeightSource:
    """Put LoRA layers into a module whose Parameters are on the meta device; returns the source of its
    weights and of the adapters, those that `add_lora` would have made. Adapters are small: all of them stay
    in host memory.

    Args:
        source: of the weights of the module as it was.

    Raises:
        ConfigError: see `add_lora`.
    """
    if config.target_parameters:
        raise ConfigError(
            "unsupported-combination: model.lora.target_parameters with a train backend that shards weights: "
            "no parity test covers the two; set train.backend = 'local', or leave target_parameters out"
        )
    own = {part: part.weight for part in module.modules() if isinstance(part, nn.Linear)}
    for part, weight in own.items():  # peft makes an adapter beside the weight; these have no memory
        # A tensor of one element, expanded: the shape, dtype and device that peft reads, without the memory.
        stand_in = torch.empty((), dtype=weight.dtype).expand(weight.shape)
        part.weight = nn.Parameter(stand_in, requires_grad=weight.requires_grad)
    try:
        add_lora(module, config, seed=seed)
    finally:
        for part, weight in own.items():
            weight.requires_grad_(part.weight.requires_grad)
            part.weight = weight
    adapters: dict[str, Tensor] = {}
    for name, parameter in list(module.named_parameters()):
        if _LORA in name:
            adapters[name] = parameter.detach()
            path, _, kind = name.rpartition(".")
            empty = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
            module.get_submodule(path)._parameters[kind] = empty
    return _AdaptedSource(source, adapters)


class _AdaptedSource:
    """A WeightSource of a module with LoRA layers."""

    def __init__(self, base: WeightSource, adapters: Mapping[str, Tensor]) -> None:
        self._base, self._adapters, self.device = base, adapters, base.device

    def read(self, name: str, *, device: torch.device) -> Tensor:
        """See WeightSource."""
        if name in self._adapters:
            return self._adapters[name].to(device, copy=True)
        return self._base.read(base_name(name), device=device)

    def read_part(self, name: str, *, dim: int, start: int, stop: int, device: torch.device) -> Tensor:
        """See WeightSource."""
        if name in self._adapters:
            return self._adapters[name].narrow(dim, start, stop - start).to(device, copy=True)
        return self._base.read_part(base_name(name), dim=dim, start=start, stop=stop, device=device)


def base_name(name: str) -> str:
    """Return the name that a weight has in a module without LoRA layers."""
    while _BASE in name:  # experts with two adapted Parameters have two
        name = name.replace(_BASE, ".")
    return name


def is_adapter(name: str) -> bool:
    """Return whether a Parameter of this name is an adapter's."""
    return _LORA in name


def adapter_place(path: str) -> tuple[str, Literal["A", "B"] | None]:
    """Return the path of the linear that a module with Parameters is, or is beside, in a module without LoRA
    layers, and which of its adapters it is (None: the linear itself).

    Example:
        >>> adapter_place("model.layers.0.mlp.up_proj.lora_A.default")
        ('model.layers.0.mlp.up_proj', 'A')
    """
    for kind in _KINDS:
        if path.endswith(f".lora_{kind}.{_ADAPTER}"):
            return path.removesuffix(f".lora_{kind}.{_ADAPTER}"), kind
    return path.removesuffix(_BASE.rstrip(".")), None


def has_lora(module: nn.Module) -> bool:
    """Return whether `add_lora` was called on the module."""
    return hasattr(module, "peft_config")


def copy_structure(source: nn.Module, target: nn.Module) -> None:
    """Give `target`, a bare module of the same architecture, LoRA layers as `source` has, with new values."""
    if has_lora(source):
        import peft

        configs = cast(dict[str, peft.PeftConfig], source.peft_config)
        peft.inject_adapter_in_model(copy.deepcopy(configs[_ADAPTER]), target, adapter_name=_ADAPTER)
        install_adapters(target)


@contextlib.contextmanager
def without_lora(module: nn.Module) -> Iterator[None]:
    """Inside, the module computes with its base weights: the frozen reference policy without extra memory."""
    layers = _lora_layers(module)
    for _, layer in layers:
        # Layer by layer: peft's own switch belongs to its wrapper, and there is none here.
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
        if not is_adapter(name):
            merged[base_name(name)] = tensor
    for path, layer in _lora_layers(module):
        if isinstance(layer, ExpertAdapters):
            name = f"{base_name(path + _BASE)}{layer.parameter_name}"
            a, b, scaling = layer.factors()
            first = cast(Experts, layer.get_base_layer()).inputs_first
            pair = (b.transpose(1, 2), a.transpose(1, 2)) if first else (a, b)
            merged[name] = merged_weight(merged[name], *pair, scaling=scaling)
            continue
        base = cast(nn.Linear, layer.get_base_layer()).weight
        a, b = (cast(nn.Linear, part[_ADAPTER]).weight for part in (layer.lora_A, layer.lora_B))
        merged[f"{path}.weight"] = merged_weight(base, a, b, scaling=layer.scaling[_ADAPTER])
    return merged


def merged_weight(base: Tensor, a: Tensor, b: Tensor, *, scaling: float) -> Tensor:
    """Return base + scaling * b @ a, computed in float32, in the dtype of base.

    Args:
        base: [outputs, inputs], of experts [E, outputs, inputs].
        a: [rank, inputs], or [E, rank, inputs].
        b: [outputs, rank], or [E, outputs, rank].
    """
    # In float32: updates are small beside the weights, and so are rounded once, at the end.
    return (base.float() + scaling * (b.float() @ a.float())).to(base.dtype)


def adapted_weights(module: nn.Module) -> dict[str, tuple[str, str, float]]:
    """Name of each adapted weight, as the module has it -> names of its A and B, and alpha / rank."""
    return {
        f"{path}{_BASE}weight": (
            f"{path}.lora_A.{_ADAPTER}.weight",
            f"{path}.lora_B.{_ADAPTER}.weight",
            layer.scaling[_ADAPTER],
        )
        for path, layer in _lora_layers(module)
    }


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
            if isinstance(m, nn.Linear) and m is not head and not is_adapter(p)
        }
    )
