"""A minimal reproduction of a finding: OUT/repro.py, plain torch, and OUT/repro.safetensors beside it.

The module, kernel or decoder layer where the difference begins is run once more in both cells, its arguments
and parameters are saved as they were (layout, pads and all), and the script computes the same formula from
them. Where there is no formula, the script compares what was recorded.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.attention import kernel_of
from lockstep.errors import LockstepError
from lockstep.execution import decoder_layers, is_compiled
from lockstep.models.architectures import causal_lm
from lockstep.models.forward import head_of
from lockstep.observe.files import jsonable, write_atomic
from lockstep.observe.tensor_file import save_tensors
from lockstep.schema.batch import PackedBatch
from lockstep_lab.bisect.arms import Arm, Outcome, run
from lockstep_lab.bisect.capture import KERNEL, Call, Capture, Key, token_rows
from lockstep_lab.bisect.divergence import HEAD, Finding

SCRIPT, TENSORS = "repro.py", "repro.safetensors"
_SOURCE = Path(__file__).with_name("repro_script.py")
"""The script with the formulas of all kinds."""
_ACTIVATIONS = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "GELUActivation": "gelu",
    "GELU": "gelu",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    """The part of the model that the script computes."""

    kind: str
    """Of compute_KIND in repro_script.py; recorded: there is no formula."""
    path: str
    """The module whose call is computed again."""
    wrt: str | None = None
    """Differentiate by this saved tensor; None: the output itself."""
    needs: tuple[str, ...] = ()
    """Other paths whose calls are needed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Saved:
    """What one arm contributes to the script."""

    tensors: Mapping[str, Tensor | None]
    """By name; None: the call has none, and the script does without it."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Facts of this arm."""
    shared: Mapping[str, Any] = field(default_factory=dict)
    """Facts of the module, the same in both arms."""

    def __or__(self, other: _Saved) -> _Saved:
        return _Saved(
            tensors={**self.tensors, **other.tensors},
            facts={**self.facts, **other.facts},
            shared={**self.shared, **other.shared},
        )


def write_repro(finding: Finding, batch: PackedBatch, directory: Path) -> Path:
    """Write the script and its tensors; return the script's path.

    Args:
        batch: the input that differs, an exact pack.
        directory: exists.
    """
    plan = _plan(finding)
    saved_arms = [_save(arm, finding, batch, plan) for arm in finding.arms]
    if any(one is None for one in saved_arms):
        plan = _Plan(kind="recorded", path=finding.first.key.path)
        saved_arms = [_save(arm, finding, batch, plan) for arm in finding.arms]
    arms = [one for one in saved_arms if one is not None]
    tensors = _merged([one.tensors for one in arms])
    first = finding.first
    meta = {
        "what": str(first.key),
        "kind": plan.kind,
        "wrt": plan.wrt,
        "parameters": [plan.wrt] if first.key.tensor.startswith("parameter ") else [],
        "reported": first.max_abs if first.max_abs is not None else 0.0,
        "device": finding.arms[0].backend.device.type,
        "sides": {
            name: {"label": arm.label, **one.facts}
            for name, arm, one in zip("ab", finding.arms, arms, strict=True)
        },
        **arms[0].shared,
    }
    save_tensors(tensors, directory / TENSORS)
    body = (
        f"Cell a: {finding.arms[0].label}\nCell b: {finding.arms[1].label}\n"
        f"{finding.description}.\ntorch {torch.__version__}."
    )
    title = f"Two ways to compute {first.key} that should agree, and differ by {meta['reported']:.6e}."
    text = _script(plan.kind).replace("{title}", _plain(title)).replace("{body}", _plain(body))
    text = text.replace("{meta}", json.dumps(jsonable(meta), indent=1))
    path = directory / SCRIPT
    write_atomic(path, text)
    return path


def _script(kind: str) -> str:
    """The script with the functions that one kind needs."""
    source = _SOURCE.read_text(encoding="utf-8")
    parts = ast.parse(source).body
    functions = {part.name: part for part in parts if isinstance(part, ast.FunctionDef)}
    needed = {f"compute_{kind}"} & functions.keys()
    todo = [part for part in parts if getattr(part, "name", None) in {None, *needed}]
    while todo:
        used = {node.id for node in ast.walk(todo.pop()) if isinstance(node, ast.Name)}
        new = used & functions.keys() - needed
        needed |= new
        todo += [functions[name] for name in new]
    lines = source.splitlines(keepends=True)
    starts = [0, *(part.lineno - 1 for part in parts[1:]), len(lines)]
    kept = zip(parts, pairwise(starts), strict=True)
    return "".join(
        line
        for part, (start, end) in kept
        if getattr(part, "name", None) in {None, *needed}
        for line in lines[start:end]
    )


def _plain(text: str) -> str:
    """Escape a model's text, which must not end the script's docstring."""
    text = "".join(c if c.isprintable() or c == "\n" else "?" for c in text)
    return text.replace("\\", "/").replace('"""', "'''")


def _plan(finding: Finding) -> _Plan:
    key = finding.first.key
    module = finding.arms[0].module
    modules = dict(module.named_modules())
    if key.path == HEAD:
        return _Plan(kind="head", path=HEAD)
    if key.direction == "forward":
        return _forward_plan(key, modules, module)
    nothing = _Plan(kind="recorded", path=key.path)
    if key.tensor.startswith("parameter "):
        kind = _kind(modules.get(key.path))
        wrt = key.tensor.removeprefix("parameter ")
        return (
            _Plan(kind=kind, path=key.path, wrt=wrt)
            if kind in ("linear", "rmsnorm", "embedding")
            else nothing
        )
    if key.path.endswith(KERNEL) and key.tensor in ("q", "k", "v"):
        return _Plan(kind="kernel", path=key.path, wrt=key.tensor)
    parent, _, last = key.path.rpartition(".")
    if key.path.endswith(KERNEL):
        return (
            _Plan(kind="linear", path=f"{parent}.o_proj", wrt="x")
            if f"{parent}.o_proj" in modules
            else nothing
        )
    if last == "v_proj":
        return _Plan(kind="kernel", path=f"{parent}.{KERNEL}", wrt="v")
    users = [p for p in finding.consumers if _kind(modules.get(p)) in ("linear", "rmsnorm", "activation")]
    return _Plan(kind=_kind(modules[users[0]]), path=users[0], wrt="x") if len(users) == 1 else nothing


def _forward_plan(key: Key, modules: Mapping[str, nn.Module], module: nn.Module) -> _Plan:
    parent, _, last = key.path.rpartition(".")
    if last == KERNEL and key.tensor == "output":
        return _Plan(kind="kernel", path=key.path)
    if last == KERNEL:
        source = f"{parent}.{key.tensor}_norm"
        source = source if source in modules else f"{parent}.{key.tensor}_proj"
        kind = "rope" if key.tensor in "qk" else "recorded"
        return _Plan(kind=kind, path=source, needs=(parent,))
    called_module = modules.get(key.path)
    if any(called_module is layer for layer in decoder_layers(module)):
        return _Plan(kind="block", path=key.path)
    return _Plan(kind=_kind(called_module), path=key.path)


def _kind(module: nn.Module | None) -> str:
    """The formula for a module, by its class; "recorded" where there is none."""
    if module is None:
        return "recorded"
    name = type(module).__name__
    if isinstance(module, nn.Embedding):
        return "embedding"
    if type(module) is nn.Linear:
        return "linear"
    if name.endswith("RMSNorm"):
        return "rmsnorm"
    if name in _ACTIVATIONS:
        return "activation"
    if name.endswith("MLP") and type(getattr(module, "act_fn", None)).__name__ in _ACTIVATIONS:
        return "mlp"
    if name.endswith("RotaryEmbedding") and isinstance(getattr(module, "inv_freq", None), Tensor):
        return "rotary"
    return "recorded"


def _save(arm: Arm, finding: Finding, batch: PackedBatch, plan: _Plan) -> _Saved | None:
    """Save one arm's tensors; None: the call does not have the arguments that the formula needs."""
    key = finding.first.key
    last_norm = _last_norm(arm.module) if plan.kind == "head" else ""

    def whole(candidate: Key) -> bool:
        return candidate == key or (candidate.path == last_norm and candidate.direction == "forward")

    outcome = run(arm, batch, capture=True, whole=whole, calls=frozenset((plan.path, *plan.needs)))
    capture = outcome.capture
    assert capture is not None
    recorded = _recorded(key, outcome)
    config = arm.backend.config
    fitted = arm.fit(batch)
    rows, _ = token_rows(fitted, layout=config.layout, padding_side=config.padding_side)
    base = _Saved(tensors={"recorded": recorded, "rows": rows}, facts={"compiled": is_compiled(arm.module)})
    if plan.kind == "recorded":
        return base
    if plan.kind == "head":
        own = _save_head(arm, fitted, outcome, last_norm)
    else:
        call = capture.calls.get(plan.path)
        if call is None or (plan.wrt is not None and call.grad_output is None):
            return None
        if plan.wrt is not None:
            base |= _Saved(tensors={"grad_out": call.grad_output})
        if plan.wrt is not None and key.tensor.startswith("parameter "):
            base |= _Saved(tensors={"rows": None})
        own = _SAVERS[plan.kind](_Context(arm=arm, call=call, capture=capture, plan=plan, key=key))
    return None if own is None else base | own


def _recorded(key: Key, outcome: Outcome) -> Tensor:
    if key.path == HEAD:
        return outcome.logprobs[:, None]
    if key.tensor.startswith("parameter "):
        name = f"{key.path}.{key.tensor.removeprefix('parameter ')}"
        gradient = outcome.gradients[name]
        return gradient.reshape(gradient.shape[0], -1)
    return outcome.tensors[key].values


@dataclass(frozen=True, kw_only=True, slots=True)
class _Context:
    arm: Arm
    call: Call
    capture: Capture
    plan: _Plan
    key: Key

    @property
    def module(self) -> nn.Module:
        return self.arm.module.get_submodule(self.plan.path)

    @property
    def x(self) -> Tensor | None:
        """The first tensor that the module was called with."""
        candidates = [
            self.call.arguments.get(n) for n in ("arg0", "hidden_states", "input", "x", "input_ids")
        ]
        return next((value for value in candidates if isinstance(value, Tensor)), None)


def _save_module(context: _Context) -> _Saved | None:
    """Save x, weight and bias of a linear layer, RMSNorm or activation."""
    module, x = context.module, context.x
    if x is None:
        return None
    own = dict(module.named_parameters(recurse=False))
    shared: dict[str, Any] = {}
    if context.plan.kind == "rmsnorm":
        shared = _norm_facts(module)
    if context.plan.kind == "activation":
        shared = {"activation": _ACTIVATIONS[type(module).__name__]}
    return _Saved(tensors={"x": x, "weight": own.get("weight"), "bias": own.get("bias")}, shared=shared)


def _norm_facts(module: nn.Module) -> dict[str, Any]:
    gemma = type(module).__name__.startswith("Gemma")
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return {"norm": "gemma" if gemma else "llama", "eps": float(eps) if eps is not None else 1e-6}


def _save_embedding(context: _Context) -> _Saved | None:
    """Save only the rows of ids that occur, unless the weight's own gradient is the finding."""
    module, x = context.module, context.x
    if x is None or not isinstance(module, nn.Embedding):
        return None
    scale = getattr(module, "scalar_embed_scale", None)
    weight: Tensor = module.weight
    if context.plan.wrt is None:
        used, x = x.unique(return_inverse=True)
        weight = weight.index_select(0, used)
    shared = {"scale": None if scale is None else float(scale)}
    return _Saved(tensors={"x": x, "weight": weight}, shared=shared)


def _save_mlp(context: _Context) -> _Saved | None:
    if context.x is None:
        return None
    facts = {"activation": _ACTIVATIONS[type(context.module.act_fn).__name__]}
    return _Saved(tensors={"x": context.x} | _parameters(context.module), shared=facts)


def _parameters(module: nn.Module) -> dict[str, Tensor | None]:
    return {f"p/{name}": parameter for name, parameter in module.named_parameters()}


def _save_rope(context: _Context) -> _Saved | None:
    attention = context.capture.calls.get(context.plan.needs[0])
    if attention is None:
        return None
    cos, sin = (attention.arguments.get(f"position_embeddings.{i}") for i in range(2))
    if cos is None or sin is None:
        return None
    x = context.call.output.flatten(2)
    return _Saved(tensors={"x": x, "cos": cos, "sin": sin}, shared={"head_dim": cos.shape[-1]})


def _save_rotary(context: _Context) -> _Saved | None:
    module, arguments = context.module, context.call.arguments
    positions = arguments.get("position_ids", arguments.get("arg1"))
    if not isinstance(positions, Tensor):
        return None
    facts = {
        "which": int(context.key.tensor.rpartition(".")[2] or 0) if "." in context.key.tensor else 0,
        "scaling": float(getattr(module, "attention_scaling", 1.0)),
        "dtype": str(context.call.output.dtype).removeprefix("torch."),
    }
    return _Saved(tensors={"x": positions, "inv_freq": module.get_buffer("inv_freq")}, shared=facts)


def _save_kernel(context: _Context) -> _Saved | None:
    arguments = context.call.arguments
    tensors = {name: arguments.get(name) for name in "qkv"}
    kernel = _save_call(context.call.kind.removeprefix("attention kernel "), arguments, compiled=False)
    return None if kernel is None else _Saved(tensors=tensors) | kernel


def _save_call(kernel: str, arguments: Mapping[str, Any], *, compiled: bool) -> _Saved | None:
    """Describe the kernel's call, and the tensors that say which token attends to which."""
    window = arguments.get("sliding_window")
    masks = arguments.get("masks") or {}
    mask = masks.get(window or 0)
    lengths = arguments.get("lengths")
    if kernel in ("varlen", "flex"):
        variant = kernel
    elif kernel == "sdpa" and "cu_seqlens" in arguments:
        by_document = lengths is not None and mask is None
        variant = "dense" if arguments.get("dense") else "per_document" if by_document else "masked"
    elif kernel in ("sdpa", "eager"):
        variant, mask = "dense", arguments.get("attention_mask")
    else:
        return None
    facts = {
        "variant": variant,
        "scale": arguments.get("scaling"),
        "window": window,
        "max_seqlen": arguments.get("max_seqlen", 0),
        "lengths": None if lengths is None else list(lengths),
        "compiled": compiled,
    }
    mask = mask if isinstance(mask, Tensor) else None
    return _Saved(tensors={"cu_seqlens": arguments.get("cu_seqlens"), "mask": mask}, facts=facts)


def _save_block(context: _Context) -> _Saved | None:
    layer, arguments = context.module, context.call.arguments
    cos, sin = (arguments.get(f"position_embeddings.{i}") for i in range(2))
    attention = getattr(layer, "self_attn", None)
    if context.x is None or cos is None or sin is None or attention is None:
        return None
    config = attention.config
    # What a layer passes to its kernel: transformers sets window and scale in the attention module.
    window = getattr(attention, "sliding_window", None)
    if config.model_type == "mistral":
        window = getattr(config, "sliding_window", None)
    name = kernel_of(config._attn_implementation).removeprefix("hf:")
    called = {**arguments, "sliding_window": window, "scaling": attention.scaling}
    kernel = _save_call(name, called, compiled=is_compiled(context.arm.module))
    activation = _ACTIVATIONS.get(type(getattr(layer.mlp, "act_fn", None)).__name__)
    if kernel is None or activation is None:
        return None
    tensors = {"x": context.x, "cos": cos, "sin": sin} | _parameters(layer)
    shared = _norm_facts(layer.get_submodule("input_layernorm"))
    shared |= {"activation": activation, "head_dim": attention.head_dim}
    return kernel | _Saved(tensors=tensors, shared=shared)


def _last_norm(module: nn.Module) -> str:
    prefix = causal_lm(module).base_model_prefix
    return f"{prefix}.norm"


def _save_head(arm: Arm, fitted: PackedBatch, outcome: Outcome, last_norm: str) -> _Saved | None:
    norm_output = outcome.tensors.get(Key("forward", last_norm, "output"))
    if norm_output is None:
        return None
    mask = fitted.loss_mask[: fitted.num_tokens].to(norm_output.values.device)
    head = head_of(arm.module)
    tensors = {
        "rows": None,
        "x": norm_output.values[mask],
        "labels": fitted.labels[fitted.loss_mask],
        "weight": head.weight,
        "bias": head.bias,
    }
    temperature = arm.backend.temperature or 1.0
    shared = {"softcap": head.softcap, "scale": head.logit_scale, "temperature": temperature}
    return _Saved(tensors=tensors, shared=shared)


_SAVERS: dict[str, Callable[[_Context], _Saved | None]] = {
    "linear": _save_module,
    "rmsnorm": _save_module,
    "activation": _save_module,
    "embedding": _save_embedding,
    "mlp": _save_mlp,
    "rope": _save_rope,
    "rotary": _save_rotary,
    "kernel": _save_kernel,
    "block": _save_block,
}


def _merged(arms: Sequence[Mapping[str, Tensor | None]]) -> dict[str, Tensor]:
    """Name each tensor by its arm, or once by "both" where the two are equal."""
    merged = {}
    hosts = [{n: v.detach().to("cpu").contiguous() for n, v in arm.items() if v is not None} for arm in arms]
    for name in dict.fromkeys([*hosts[0], *hosts[1]]):
        x, y = hosts[0].get(name), hosts[1].get(name)
        if name != "recorded" and x is not None and y is not None and _same(x, y):
            merged[f"both/{name}"] = x.clone()
            continue
        for letter, tensor in (("a", x), ("b", y)):
            if tensor is not None:
                merged[f"{letter}/{name}"] = tensor.clone()
    if not merged:
        raise LockstepError("nothing-left: nothing was captured that could reproduce the difference")
    return merged


def _same(x: Tensor, y: Tensor) -> bool:
    return x.dtype == y.dtype and x.shape == y.shape and torch.equal(x, y)
