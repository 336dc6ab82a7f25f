"""Convert a transformers causal LM, in place, into one whose rows do not depend on other rows.

Names, parameters and state dict stay as they are. A part that cannot be invariant is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lockstep.errors import ModelError
from lockstep.invariant import experts
from lockstep.invariant import modules as parts
from lockstep.invariant.forms import FORMS, ExpertBlock, FusedMLP, GatedMLP, LayerNorm, RMSNorm, Rotary
from lockstep.invariant.modules import Invariant, InvariantLinear
from lockstep.invariant.selftest import Verdict, self_test

_KINDS: dict[str, type] = {
    "linear": parts.InvariantLinear,
    "adapted linear": parts.InvariantAdapted,
    "rms_norm": parts.InvariantNorm,
    "layer_norm": parts.InvariantLayerNorm,
    "mlp": parts.InvariantMLP,
    "fused mlp": parts.InvariantFusedMLP,
    "rotary": parts.InvariantRotary,
    "router": experts.Router,
    "experts": experts.Experts,
    "shared expert": experts.InvariantSharedBlock,
}
_CONTAINERS = ("Model", "ForCausalLM", "DecoderLayer", "Attention", "ModuleList", "ModuleDict")
"""Ends of class names of modules that hold others, or whose own forward is elementwise."""
_EXACT = ("Embedding", "ScaledWordEmbedding", "Identity")
"""Ends of class names of modules that move numbers, or multiply each by a constant."""
_ROTARY_KINDS = ("default", "linear", "llama3", "yarn", "proportional", "longrope", "dynamic")
"""Rotary embeddings whose frequencies do not depend on the length of what they are called with, the last two
for documents within the model's positions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The parts that `convert` swapped and left, and the verdicts of the self-test."""

    replaced: Mapping[str, int] = field(default_factory=dict)
    """Parts that were swapped, by kind: "linear", "adapted linear", "rms_norm", "layer_norm", "mlp",
    "fused mlp", "rotary", "router", "experts", "shared expert"."""
    stock: Mapping[str, int] = field(default_factory=dict)
    """Parts left as they are, by class, because their rows are independent: embeddings, containers."""
    verdicts: Mapping[str, Verdict] = field(default_factory=dict)
    """Verdicts of the self-test, by op and shape."""


def convert(
    module: nn.Module,
    *,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    exact_backward: bool = False,
) -> Report:
    """Swap every linear (LoRA's too), norm, MLP, rotary embedding and mixture of experts of a causal LM for
    its row-invariant form, and run the self-test, which decides what stays stock. Idempotent.

    Args:
        module: a transformers causal LM of an architecture that Lockstep supports.
        device: where it will run; None: where its parameters are. While they are on the meta device there is
            no self-test: call `self_test` before the first forward.
        dtype: of weights and activations; None: that of its parameters.
        exact_backward: make the gradients of linears' inputs row-invariant as well, except the head's;
            slower, and not needed by Lockstep's loop.

    Raises:
        ModelError: a part that cannot be batch-invariant, or weights of several dtypes, and nothing was
            changed; or an op that failed the self-test.
    """
    experts.install(module)
    todo = [(name, part, _kind(name, part)) for name, part in _parts(module)]
    _check_dtypes(todo)
    replaced: dict[str, int] = {}
    stock: dict[str, int] = {}
    for name, part, kind in todo:
        if kind is None:
            stock[type(part).__name__] = stock.get(type(part).__name__, 0) + 1
            continue
        replaced[kind] = replaced.get(kind, 0) + 1
        if isinstance(part, Invariant):
            continue
        if kind == "linear":
            parts.swap_linear(part, exact_backward=exact_backward)  # type: ignore[arg-type]
        elif kind == "adapted linear":
            parts.swap_adapted(part)
        elif kind == "rms_norm":
            parts.swap_norm(part, FORMS[type(part).__name__])  # type: ignore[arg-type]
        elif kind == "layer_norm":
            parts.swap_layer_norm(part, FORMS[type(part).__name__])  # type: ignore[arg-type]
        elif kind == "mlp":
            parts.swap_mlp(part, _activation(name, part))
        elif kind == "fused mlp":
            parts.swap_fused_mlp(part, _activation(name, part))
        elif kind == "router":
            experts.swap_router(part)
        elif kind == "experts":
            experts.swap_experts(part)
        elif kind == "shared expert":
            experts.swap_shared_block(part)
        else:
            parts.swap_rotary(part, FORMS[type(part).__name__])  # type: ignore[arg-type]
    device = device or next(module.parameters()).device
    verdicts = {} if device.type == "meta" else self_test(module, device=device, dtype=dtype)
    return Report(replaced=replaced, stock=stock, verdicts=verdicts)


def is_converted(module: nn.Module) -> bool:
    """Return whether `convert` was called on the module, or on a module inside it."""
    return any(isinstance(part, Invariant) for part in module.modules())


def kernels_of(module: nn.Module, *, device: torch.device | None = None) -> dict[str, str]:
    """Return the kernels of the converted forward, for the kernel contract.

    Args:
        device: where it runs; None: where its parameters are.

    Returns:
        gemm (with the shapes of each, where there are several), norm, activation, logprob.

    Raises:
        ModelError: the module is not converted.
    """
    if not is_converted(module):
        raise ModelError(
            f"not-batch-invariant: {type(module).__name__} has not been converted: call "
            "lockstep.invariant.convert first"
        )
    cuda = (device or next(module.parameters()).device).type == "cuda"
    shapes: dict[str, set[str]] = {}
    for _, part in parts.linears(module):
        shape = f"{part.out_features}x{part.in_features}{'' if part.product_bias is None else ' with bias'}"
        shapes.setdefault(_plan(part, cuda=cuda), set()).add(shape)
    plans = [
        plan + (f" ({', '.join(sorted(names))})" if len(shapes) > 1 else "") for plan, names in shapes.items()
    ]
    where = "triton-row" if cuda else "cpu-row"
    activations = {_activation_plan(p, cuda=cuda) for p in module.modules() if isinstance(p, _GATED)}
    return {
        "gemm": " + ".join(sorted([*plans, *_expert_plans(module, cuda=cuda)])),
        "norm": " + ".join(f"{name} {where}" for name in _norms(module)),
        "activation": " + ".join(sorted(activations)),
        "logprob": f"token_stats {where}",
    }


_GATED = (parts.InvariantMLP, parts.InvariantFusedMLP, experts.InvariantExperts)


def _activation_plan(part: Any, *, cuda: bool) -> str:
    if not cuda:
        return f"{part.activation} cpu-row"
    own = isinstance(part, experts.InvariantExperts) and part.activation == "silu"
    return f"{part.activation} {'triton-row' if own else 'stock'}"


def _norms(module: nn.Module) -> list[str]:
    kinds = {"rms_norm": parts.InvariantNorm, "layer_norm": parts.InvariantLayerNorm}
    return [name for name, kind in kinds.items() if any(isinstance(p, kind) for p in module.modules())]


def _expert_plans(module: nn.Module, *, cuda: bool) -> list[str]:
    """The kernels of experts' products."""
    found = [part for part in module.modules() if isinstance(part, experts.InvariantExperts)]
    if cuda:
        return ["grouped_mm"] if found else []
    tiles = {tiles for part in found for tiles in part.tiles.values()}
    return [f"experts cpu-tiles-{'-'.join(map(str, sizes))}" for sizes in tiles]


def _plan(part: InvariantLinear, *, cuda: bool) -> str:
    if part.stock:
        return "cublaslt-without-split-k" if cuda else "stock"
    return "triton-persistent" if cuda else f"cpu-tiles-{'-'.join(map(str, part.tiles))}"


def _parts(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules, except those that a converted MLP calls through its op (its activation), the containers
    of embeddings' adapters, and what is in those of experts."""
    adapters = [part for part in module.modules() if isinstance(part, experts.ExpertAdapters)]
    inside = {id(p) for part in adapters for kind in (part.lora_A, part.lora_B) for p in kind.modules()}
    for name, part in module.named_modules():
        if id(part) not in inside and not name.endswith(
            (".act_fn", ".activation_fn", ".lora_embedding_A", ".lora_embedding_B")
        ):
            yield name, part


def _kind(name: str, part: nn.Module) -> str | None:
    """The kind of conversion of a part; None: it is left as it is."""
    for kind, class_ in _KINDS.items():
        if isinstance(part, class_):
            if isinstance(part, experts.Experts):
                _check_experts(name, part)
            return kind
    label = type(part).__name__
    if isinstance(part, nn.Linear):
        if type(part) is not nn.Linear:
            raise _refused(name, part, "this kind of linear layer is not supported")
        return "linear"
    if isinstance(part, experts.ExpertAdapters):
        return None
    if hasattr(part, "lora_A"):
        _check_adapters(name, part)
        return "adapted linear"
    match FORMS.get(label):
        case RMSNorm():
            return "rms_norm"
        case LayerNorm():
            return "layer_norm"
        case GatedMLP():
            _activation(name, part)
            return "mlp"
        case FusedMLP():
            _activation(name, part)
            return "fused mlp"
        case Rotary():
            _check_rotary(name, part)
            return "rotary"
        case ExpertBlock(shared=shared):
            return "shared expert" if shared else None
    if isinstance(part, nn.Dropout) and part.p == 0.0:
        return None
    if label.endswith(_CONTAINERS) or label.endswith(_EXACT):
        return None
    raise _refused(name, part, "no row-invariant form of it is known")


def _check_experts(name: str, part: Any) -> None:
    known = {*parts.ACTIVATIONS.values(), experts.CLAMPED}
    if part.activation not in known:
        why = f"activation {part.activation!r} is not one of {', '.join(sorted(known))}"
        raise _refused(name, part, why)


def _check_adapters(name: str, part: Any) -> None:
    if not isinstance(part.get_base_layer(), nn.Linear) or part.merged or part.lora_variant:
        raise _refused(name, part, "its adapters are not plain LoRA on a linear layer")


def _activation(name: str, part: Any) -> str:
    config = part.config
    act = getattr(config, "hidden_activation", None) or config.hidden_act
    if act not in parts.ACTIVATIONS:
        raise _refused(name, part, f"activation {act!r} is not one of {', '.join(sorted(parts.ACTIVATIONS))}")
    return parts.ACTIVATIONS[act]


def _check_rotary(name: str, part: Any) -> None:
    kinds = part.rope_type.values() if isinstance(part.rope_type, dict) else [part.rope_type]
    for kind in kinds:
        if kind not in _ROTARY_KINDS:
            raise _refused(
                name, part, f"the frequencies of rope_type {kind!r} depend on the longest sequence of a batch"
            )


def _check_dtypes(todo: list[tuple[str, nn.Module, str | None]]) -> None:
    seen: dict[torch.dtype, str] = {}
    for name, part, kind in todo:
        if kind in ("linear", "rms_norm", "layer_norm"):
            for label, parameter in part.named_parameters(recurse=False):
                seen.setdefault(parameter.dtype, f"{name}.{label}")
    if len(seen) > 1:
        which = ", ".join(f"{name} is {str(dtype).removeprefix('torch.')}" for dtype, name in seen.items())
        raise ModelError(
            f"not-batch-invariant: batch-invariant ops need weights of one dtype, but {which}; set "
            "model.dtype, or train.batch_invariant = false"
        )


def _refused(name: str, part: nn.Module, why: str) -> ModelError:
    label = f"{name} ({type(part).__name__})" if name else type(part).__name__
    return ModelError(
        f"not-batch-invariant: {label} cannot be batch-invariant: {why}; set train.batch_invariant = false"
    )
