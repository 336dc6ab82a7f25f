"""Find the policy module of a foreign program, and describe the program in a recording header."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from lockstep.config.model import ModelConfig
from lockstep.errors import RecordingError
from lockstep.models.architectures import text_config
from lockstep.recording.files import fingerprint, module_tensors, write_tensors
from lockstep.recording.reader import KERNELS
from lockstep.recording.weights import save_weights
from lockstep.schema.recording import RecordingHeader

if TYPE_CHECKING:
    from lockstep.recording.seen import SeenCall

_PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "trl",
    "deepspeed",
    "peft",
    "openrlhf",
    "verl",
    "lockstep-rl",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ForeignModule:
    """The module that is hooked."""

    module: nn.Module
    path: str
    """Path of the policy in the module passed to `record`; "" if it is that module."""
    rank: int
    world_size: int
    device: torch.device
    wrapper: str
    """torch, ddp, fsdp2 or deepspeed."""
    compiled: bool
    """Whether it or a part of it is compiled."""
    compiled_around: nn.Module | None
    """The outermost compiled module that it is in, or is: its call is where torch's tracing begins."""
    temperature: float

    @property
    def reduction(self) -> str:
        """How the gradients whose dL/dlogprob is recorded are reduced over ranks."""
        if self.wrapper == "torch" or self.world_size == 1:
            return "as they are"
        return "averaged over the ranks"


def foreign_module(
    outer: nn.Module, *, rank: int | None, world_size: int | None, temperature: float
) -> ForeignModule:
    """The innermost transformers causal LM in `outer`, or what is inside its wrappers.

    Raises:
        RecordingError: several policies; a temperature that is not the module's own.
    """
    if not isinstance(outer, nn.Module):
        raise RecordingError(
            f"wrong-type: record: module is a {type(outer).__name__}; give it a torch.nn.Module"
        )
    models = {
        path: module
        for path, module in outer.named_modules()
        if isinstance(module, PreTrainedModel) and module.get_output_embeddings() is not None
    }
    inner = {
        path: module
        for path, module in models.items()
        if not any(other is not module and other in set(module.modules()) for other in models.values())
    }
    if len(inner) > 1:
        raise RecordingError(
            f"wrong-type: record: {type(outer).__name__} contains {len(inner)} causal LMs "
            f"({', '.join(inner)}); give record() the one that is trained"
        )
    path, module = next(iter(inner.items())) if inner else _unwrapped(outer)
    own = _fused_temperature(module)
    if own is not None and own != temperature:
        raise RecordingError(
            f"contradiction: record: temperature = {temperature}, but the module computes logprobs at "
            f"temperature {own}; set temperature={own}"
        )
    first = next(module.parameters(), None)
    own_rank, own_size = _ranks()
    return ForeignModule(
        module=module,
        path=path,
        rank=own_rank if rank is None else rank,
        world_size=own_size if world_size is None else world_size,
        device=torch.device("cpu") if first is None else first.device,
        wrapper=_wrapper(outer, module),
        compiled=any(_is_compiled(module) for module in outer.modules()),
        compiled_around=_compiled_around(outer, path),
        temperature=temperature,
    )


def _unwrapped(outer: nn.Module) -> tuple[str, nn.Module]:
    """The path and module inside DDP, a DeepSpeed engine or torch.compile."""
    path, module = [], outer
    while True:
        for name in ("_orig_mod", "module"):
            # Not getattr: compiled modules and DeepSpeed's
            # engine answer it with attributes of what is inside.
            inner = module._modules.get(name)
            if inner is not None and len(module._modules) == 1:
                path.append(name)
                module = inner
                break
        else:
            return ".".join(path), module


def _fused_temperature(module: nn.Module) -> float | None:
    """The temperature of the head that TRL puts into a model (`add_fused_lm_head`), if it has one."""
    function = getattr(module.forward, "__func__", module.forward)
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    if not str(getattr(function, "__globals__", {}).get("__name__")).startswith("trl."):
        return None
    cells = getattr(function, "__closure__", None)
    if cells is None or "temperature" not in names:
        return None
    # TRL replaces the model's forward by a closure, of which the temperature is a variable.
    value = cells[names.index("temperature")].cell_contents
    return float(value) if isinstance(value, (int, float)) else None


def _wrapper(outer: nn.Module, module: nn.Module) -> str:
    if any(type(m).__name__ == "DeepSpeedEngine" for m in outer.modules()):
        return "deepspeed"
    if any(isinstance(p, DTensor) for p in module.parameters()):
        return "fsdp2"
    if any(isinstance(m, nn.parallel.DistributedDataParallel) for m in outer.modules()):
        return "ddp"
    return "torch"


def _is_compiled(module: nn.Module) -> bool:
    """By torch.compile(module), or by module.compile()."""
    # Both private, in torch 2.11 to 2.13: nothing public says that a module is compiled.
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None


def _compiled_around(outer: nn.Module, path: str) -> nn.Module | None:
    names = path.split(".") if path else []
    chain = (outer.get_submodule(".".join(names[:count])) for count in range(len(names) + 1))
    return next((module for module in chain if _is_compiled(module)), None)


def _ranks() -> tuple[int, int]:
    """(rank, world_size): of torch.distributed, else of the environment."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    values = {"RANK": 0, "WORLD_SIZE": 1}
    for name in values:
        text = os.environ.get(name, "")
        if text:
            if not text.isdecimal():
                raise RecordingError(
                    f"wrong-environment: record: the environment variable {name} is {text!r}, not a number"
                )
            values[name] = int(text)
    return values["RANK"], max(values["WORLD_SIZE"], values["RANK"] + 1)


def inner_optimizer(outer: nn.Module) -> torch.optim.Optimizer | None:
    """The torch optimizer inside a DeepSpeed engine; its Parameters are not the module's."""
    current: Any = outer
    # Bounded: a wrapper that names itself as its optimizer would be followed without end.
    for _ in range(8):
        current = getattr(current, "optimizer", None)
        if current is None or isinstance(current, torch.optim.Optimizer):
            return current
    return None


# --- weights ------------------------------------------------------------------------------------------------


def save_foreign_weights(policy: ForeignModule, directory: Path, *, writes: bool) -> str:
    """Save the module's weights and config in `directory`; every rank takes part if they are sharded.

    Args:
        writes: whether this rank does; the others only compute the fingerprint.

    Returns:
        Their fingerprint.

    Raises:
        RecordingError: the weights are not all here (ZeRO-3), or cannot be written.
    """
    tensors = module_tensors(policy.module)
    # ds_numel is what DeepSpeed writes onto a partitioned Parameter: its size when whole.
    absent = [
        n for n, p in policy.module.named_parameters() if getattr(p, "ds_numel", p.numel()) != p.numel()
    ]
    if absent:
        raise RecordingError(
            f"unsupported-combination: record: weights='first', but {len(absent)} Parameters ({absent[0]}, "
            "...) are partitioned by ZeRO stage 3; set weights='none' and replay with --model"
        )
    if any(isinstance(tensor, DTensor) for tensor in tensors.values()):
        digest = _save_sharded(tensors, directory, writes=writes)
    elif writes:
        digest = save_weights(policy.module, directory)
    else:
        return fingerprint(tensors.items())
    if writes and isinstance(policy.module, PreTrainedModel):
        policy.module.config.save_pretrained(directory)
    return digest


def _save_sharded(tensors: Mapping[str, Tensor], directory: Path, *, writes: bool) -> str:
    """Gather one tensor at a time; in the end every rank has all of them on its host."""
    whole: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        whole[name] = full.to("cpu")
    digest = fingerprint(whole.items())
    if writes:
        directory.mkdir(parents=True, exist_ok=True)
        metadata = {"format": "pt", "lockstep": "lockstep-weights", "fingerprint": digest, "stored": digest}
        write_tensors(directory / "model.safetensors", whole, metadata, sync=True)
    return digest


# --- header -------------------------------------------------------------------------------------------------


def foreign_header(
    policy: ForeignModule,
    seen: SeenCall,
    *,
    capacity: Mapping[str, int],
    notes: Mapping[str, Any],
    weights: Path | None,
) -> RecordingHeader:
    """The header, as known at the first forward. `weights`: the folder that they are stored in."""
    padding, attention = seen.call.layout.padding, _attention(policy.module)
    if attention not in KERNELS:  # a recording may not choose another, see `replayable`
        notes = {**notes, "attention": attention}
    return RecordingHeader(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        framework=_framework(policy),
        versions=versions(),
        model=_model(policy, weights),
        vocab_size=_vocab_size(policy.module, seen),
        algorithm={"name": "surrogate"},
        temperature=policy.temperature,
        max_tokens=None,
        axes={
            "backend": policy.wrapper,
            "engine": None,
            "attention": attention if attention in KERNELS else None,
            "execution": "compile" if policy.compiled else "eager",
            "layout": seen.call.layout.layout,
            "padding_side": "left" if "left" in padding else "right",
            "device": policy.device.type,
            "dtype": _dtype(policy.module),
            "static_capacity": False,
            "activation_checkpointing": any(
                getattr(module, "gradient_checkpointing", False) is True for module in policy.module.modules()
            ),
        },
        capacity=capacity,
        world_size=policy.world_size,
        mesh={"dp": policy.world_size},
        device_name=_device_name(policy.device),
        notes=notes,
    )


def versions() -> dict[str, str]:
    """Versions of the relevant packages that are installed."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _framework(policy: ForeignModule) -> str:
    function = getattr(policy.module.forward, "__func__", policy.module.forward)
    source = str(getattr(function, "__globals__", {}).get("__name__", ""))
    return "trl" if source.startswith("trl.") else policy.wrapper


def _model(policy: ForeignModule, weights: Path | None) -> dict[str, Any]:
    """The recorded model; one built from a config has no name, so the folder with its stored weights is
    named."""
    stored = "" if weights is None or not isinstance(policy.module, PreTrainedModel) else weights.resolve()
    # Private: transformers says nowhere else what a model was loaded from.
    name = str(getattr(getattr(policy.module, "config", None), "_name_or_path", "") or stored)
    name = name or f"unknown:{type(policy.module).__name__}"
    dtype = _dtype(policy.module)
    known = dtype if dtype in ("bfloat16", "float16", "float32") else "auto"
    model = ModelConfig(name=name).model_dump(mode="json")
    return model | {"dtype": known}


def _dtype(module: nn.Module) -> str:
    floats = [p.dtype for p in module.parameters() if p.is_floating_point()]
    most = max(set(floats), key=floats.count) if floats else torch.float32
    return str(most).removeprefix("torch.")


def _attention(module: nn.Module) -> str:
    return f"hf:{getattr(getattr(module, 'config', None), '_attn_implementation', None) or 'sdpa'}"


def _vocab_size(module: nn.Module, seen: SeenCall) -> int:
    """Ids outside of it make an input unusable; a module without a table of so many ids may take any."""
    if isinstance(module, PreTrainedModel):
        return int(text_config(module).vocab_size)
    largest = max((m.num_embeddings for m in module.modules() if isinstance(m, nn.Embedding)), default=0)
    return largest if int(seen.call.token_ids.max()) < largest else 2**31 - 1


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
