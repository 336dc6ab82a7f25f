"""Capture what every module of a policy computes for the real tokens of a batch, forward and backward.

A Capture is a context around one forward (and backward) of a module. It sees, in the order of execution,

    forward    the output of every submodule; q, k, v and the output of every attention kernel
    backward   the gradient at each of these tensors

as `[tokens, ...]`: rows of real documents, in the order of the documents, whatever the layout was. By default
only a sketch of each tensor is kept (16 random projections per token), from which the norm of a difference of
two captures can be estimated to a few percent; `whole` names the tensors that are kept as they are, and
`calls` the modules whose arguments are kept.

Nothing inside a compiled block can be captured: a hook there would be traced and would break or change the
graph. There the block is the grain, and its call is wrapped from outside.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.attention import kernel_of
from lockstep.config.train import Layout
from lockstep.execution import decoder_layers, is_compiled
from lockstep.models.architectures import causal_lm
from lockstep.models.forward import dense_shape
from lockstep.schema.batch import PackedBatch

SKETCH = 16
KERNEL = "kernel"
"""Last part of the path of an attention kernel, which is no module: "model.layers.0.self_attn.kernel"."""


class Key(NamedTuple):
    """Which tensor: in which direction, of which module, and which of its tensors."""

    direction: Literal["forward", "backward"]
    path: str
    tensor: str
    """output, or output.0 where there are several; q, k, v of a kernel; a parameter's name (backward)."""

    def __str__(self) -> str:
        what = self.path if self.tensor == "output" else f"{self.path} [{self.tensor}]"
        return what if self.direction == "forward" else f"gradient at {what}"


@dataclass(frozen=True, kw_only=True, slots=True)
class CapturedTensor:
    """One tensor of one module."""

    kind: str
    """Class of the module, or "attention kernel NAME"."""
    shape: tuple[int, ...]
    """[tokens, ...]."""
    values: Tensor
    """[tokens, features] whole, or [tokens, SKETCH] projections of them; float32 or float64."""
    whole: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One call of a module or of an attention kernel, as it was: layout, pads and all."""

    kind: str
    arguments: Mapping[str, Any]
    """By name; nested tuples as NAME.0, NAME.1."""
    output: Tensor
    grad_output: Tensor | None = None


def token_rows(
    batch: PackedBatch,
    *,
    layout: Layout,
    padding_side: Literal["left", "right"] = "right",
) -> tuple[Tensor, tuple[int, int]]:
    """Locate real tokens: index [tokens] into the flattened rows, and the (B, L) of the rows."""
    lengths = batch.lengths[: len(batch.sample_ids)]
    assert layout != "shared", "cells of a bisection have a row for each token"
    if layout != "padded":
        return torch.arange(sum(lengths)), (1, batch.num_slots)
    rows, width = dense_shape(batch)
    firsts = [
        row * width + (width - length if padding_side == "left" else 0) for row, length in enumerate(lengths)
    ]
    index = [torch.arange(first, first + n) for first, n in zip(firsts, lengths, strict=True)]
    return torch.cat(index), (rows, width)


def reverse_documents(rows: Tensor, lengths: Sequence[int]) -> Tensor:
    """Rows of documents that lie in the order of `lengths`, as rows in the opposite order of documents."""
    return torch.cat(list(reversed(rows.split(list(lengths)))))


class Capture:
    """See the module.

    Args:
        module: the causal LM that runs inside the context.
        rows: of `token_rows`.
        shape: of `token_rows`.
        whole: tensors that are kept as they are; None: none.
        calls: paths whose calls are kept.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        rows: Tensor,
        shape: tuple[int, int],
        whole: Callable[[Key], bool] | None = None,
        calls: frozenset[str] = frozenset(),
    ) -> None:
        self.tensors: dict[Key, CapturedTensor] = {}
        self.calls: dict[str, Call] = {}
        self.consumers: dict[str, list[str]] = {}
        """Path -> the modules that were called with its output, the same tensor."""
        self.module = module
        device = next(module.parameters()).device
        self._rows, self._shape = rows.to(device), shape
        self._whole, self._call_paths = whole, calls
        self._undo: list[Callable[[], None]] = []
        self._producers: dict[int, tuple[weakref.ref[Tensor], str]] = {}
        self._arguments: dict[str, dict[str, Any]] = {}
        self._names = {id(m): name for name, m in module.named_modules()}

    def __enter__(self) -> Capture:
        compiled = is_compiled(self.module)
        layers = list(decoder_layers(self.module))
        inside = {id(m) for layer in layers for m in layer.modules()} if compiled else set()
        base = getattr(self.module, causal_lm(self.module).base_model_prefix)
        for name, module in self.module.named_modules():
            if module is self.module or module is base or id(module) in inside:
                continue
            if isinstance(module, nn.ModuleList):
                continue
            before = module.register_forward_pre_hook(functools.partial(self._before, name), with_kwargs=True)
            after = module.register_forward_hook(functools.partial(self._after, name))
            self._undo += [before.remove, after.remove]
        if compiled:
            for layer in layers:
                self._wrap_block(layer)
        else:
            self._wrap_kernel(layers[0])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for undo in reversed(self._undo):
            undo()
        self._undo = []
        self._producers, self._arguments = {}, {}

    # --- where it hooks in ----------------------------------------------------------------------------------

    def _wrap_block(self, layer: nn.Module) -> None:
        """Wrap the call that torch.nn.Module makes; the compiled call itself stays as it is."""
        # Private, in torch 2.11 to 2.13: hooks of a compiled module would be compiled with it.
        inner: Any = layer._compiled_call_impl
        name = self._names[id(layer)]

        def call(*args: Any, **kwargs: Any) -> Any:
            self._before(name, layer, args, kwargs)
            output = inner(*args, **kwargs)
            self._after(name, layer, args, output)
            return output

        layer._compiled_call_impl = call
        self._undo.append(lambda: setattr(layer, "_compiled_call_impl", inner))

    def _wrap_kernel(self, layer: nn.Module) -> None:
        """transformers looks the kernel up by name at every call."""
        import sys

        from transformers import AttentionInterface

        base = getattr(self.module, causal_lm(self.module).base_model_prefix)
        name = base.config._attn_implementation or "eager"
        # Private: `register` could replace the kernel, and nothing public takes a new one out again.
        mapping = AttentionInterface._global_mapping
        inner = mapping.get(name)
        if inner is None:  # "eager" is a function of each modelling file
            attention = getattr(layer, "self_attn", layer)
            inner = getattr(sys.modules[type(attention).__module__], "eager_attention_forward", None)
        if inner is None:
            return
        original, had = inner, name in mapping

        def kernel(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self._kernel_call(original, name, module, args, kwargs)

        def undo() -> None:
            if had:
                mapping[name] = original
            else:
                del mapping[name]

        mapping[name] = kernel
        self._undo.append(undo)

    # --- what it sees ---------------------------------------------------------------------------------------

    def _before(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if _in_backward():
            return
        for value in (*args, *kwargs.values()):
            producer = self._producers.get(id(value)) if isinstance(value, Tensor) else None
            if producer is not None and producer[0]() is value:
                self.consumers.setdefault(producer[1], []).append(path)
        if path in self._call_paths and path not in self._arguments:
            self._arguments[path] = _flat_arguments(args, kwargs)

    def _after(self, path: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if _in_backward():  # a checkpointed block computes its inside again
            return
        tensors = _tensors(output)
        for name, tensor in tensors.items():
            self._see(Key("forward", path, name), type(module).__name__, tensor, tensor.shape[:2])
            self._producers[id(tensor)] = (weakref.ref(tensor), path)
        if path in self._arguments and path not in self.calls and tensors:
            self._keep_call(path, type(module).__name__, self._arguments[path], next(iter(tensors.values())))

    def _kernel_call(
        self, kernel: Callable[..., Any], name: str, module: nn.Module, args: Any, kwargs: dict[str, Any]
    ) -> Any:
        if _in_backward():
            return kernel(module, *args, **kwargs)
        path = f"{self._names.get(id(module), type(module).__name__)}.{KERNEL}"
        kind = f"attention kernel {kernel_of(name).removeprefix('hf:')}"
        arguments = dict(zip(("q", "k", "v", "attention_mask"), args, strict=False))
        for letter, long in (("q", "query"), ("k", "key"), ("v", "value")):
            arguments.setdefault(letter, kwargs.get(long))
        for letter in "qkv":
            heads = arguments[letter].transpose(1, 2)
            self._see(Key("forward", path, letter), kind, heads, heads.shape[:2], at=arguments[letter])
        output = kernel(module, *args, **kwargs)
        self._see(Key("forward", path, "output"), kind, output[0], output[0].shape[:2])
        if path in self._call_paths and path not in self.calls:
            self._keep_call(path, kind, {**arguments, **kwargs}, output[0])
        return output

    def _see(
        self, key: Key, kind: str, tensor: Tensor, lead: torch.Size, *, at: Tensor | None = None
    ) -> None:
        """Record `tensor` [B, L, ...], and its gradient when it comes; `at`: the tensor that gets it, of
        which `tensor` is a view with its second and third axis swapped."""
        if tuple(lead) != self._shape or not tensor.is_floating_point() or key in self.tensors:
            return
        self._record(key, kind, tensor)
        # The hook is on what the kernel gets: a view made here
        # is no part of the graph, so no gradient comes to it.
        leaf = tensor if at is None else at
        if not leaf.requires_grad:
            return
        backward = key._replace(direction="backward")

        def receive(grad: Tensor) -> None:
            self._record(backward, kind, grad if at is None else grad.transpose(1, 2))

        leaf.register_hook(receive)

    def _record(self, key: Key, kind: str, tensor: Tensor) -> None:
        if key in self.tensors:
            return
        with torch.no_grad():
            real = tensor.detach().flatten(0, 1).index_select(0, self._rows)
            whole = self._whole is not None and self._whole(key)
            flat = real.flatten(1)
            flat = flat.clone() if whole else flat
            if not whole:
                flat = sketch(flat)
        self.tensors[key] = CapturedTensor(kind=kind, shape=tuple(real.shape), values=flat, whole=whole)

    def _keep_call(self, path: str, kind: str, arguments: dict[str, Any], output: Tensor) -> None:
        copies = {n: v.detach().clone() if isinstance(v, Tensor) else v for n, v in arguments.items()}
        self.calls[path] = Call(kind=kind, arguments=copies, output=output.detach().clone())
        if output.requires_grad:

            def receive(grad: Tensor) -> None:
                call = self.calls[path]
                self.calls[path] = Call(
                    kind=kind, arguments=copies, output=call.output, grad_output=grad.detach().clone()
                )

            output.register_hook(receive)


def sketch(flat: Tensor) -> Tensor:
    """[tokens, features] -> [tokens, SKETCH], linear, so that the norm of a difference is kept in the mean;
    as it is where there are no more features than that."""
    wide = flat if flat.dtype == torch.float64 else flat.float()
    if flat.shape[1] <= SKETCH:
        return wide.clone()
    projected: Tensor = wide @ _projection(flat.shape[1]).to(wide)
    return projected


@functools.lru_cache(maxsize=64)
def _projection(features: int) -> Tensor:
    """[features, SKETCH]; seeded by its shape, so that two captures agree."""
    generator = torch.Generator().manual_seed(features)
    # Drawn on the host: a GPU's generator gives other numbers, and captures of both are compared.
    return torch.randn(features, SKETCH, generator=generator).div(SKETCH**0.5)


def _in_backward() -> bool:
    # Private, in torch 2.11 to 2.13: nothing public says that a backward is running.
    return torch._C._current_graph_task_id() != -1


def _tensors(output: Any) -> dict[str, Tensor]:
    """The tensors of a module's output by name."""
    if isinstance(output, Tensor):
        return {"output": output}
    if isinstance(output, tuple | list):
        tensors = {f"output.{i}": x for i, x in enumerate(output) if isinstance(x, Tensor)}
        return {"output": next(iter(tensors.values()))} if len(tensors) == 1 else tensors
    return {}


def _flat_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in [*((f"arg{i}", x) for i, x in enumerate(args)), *kwargs.items()]:
        if isinstance(value, tuple | list) and any(isinstance(x, Tensor) for x in value):
            flat |= {f"{name}.{i}": x for i, x in enumerate(value)}
        else:
            flat[name] = value
    return flat
