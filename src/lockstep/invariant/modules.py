"""The classes of a converted module's parts: subclasses with another forward, swapped in as `__class__`.

Swapping the class keeps names, parameters, hooks and deep copies as they are, and torch.compile compiles the
layers of one class once, which replaced functions on instances would prevent.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.invariant.few_rows import MOST_ROWS, few_rows
from lockstep.invariant.forms import LayerNorm, RMSNorm, Rotary
from lockstep.invariant.row_ops import (
    TILES,
    gelu_and_mul,
    linear,
    partial_token_stats,
    rms_norm,
    rotary,
    silu_and_mul,
    standardise,
    tiled_product,
    token_stats,
)
from lockstep.ops.logprobs import HeadKernels

STOCK = "stock"
FEW_ROWS, PADDED = "few-rows", "padded"
_PADDED_ROWS = 128
"""The fewest rows for which cuBLASLt without split-K has good kernels: on one H200 in bfloat16, 8192 to 2048
features take 184 us for 4 rows and 16 us for 128; 4096 to 1024 90 and 9 us."""

ACTIVATIONS: dict[str, str] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
"""transformers' names of activations -> the op that computes them."""


class Invariant:
    """Marks a part that was converted."""


class InvariantLinear(Invariant, nn.Linear):
    """nn.Linear through lockstep::linear, or stock where the self-test found that invariant."""

    tiles: tuple[int, ...]
    """Row counts of products on the CPU."""
    stock: bool
    """Whether F.linear is used."""
    exact_backward: bool
    few_rows: str | None
    """How products of at most MOST_ROWS rows are computed: FEW_ROWS: by the op of that name; PADDED: stock,
    with more rows; None: as others. Only an engine sets it."""

    @property
    def product_bias(self) -> Tensor | None:
        """The bias that belongs to the product; None: there is none, or it is added elsewhere."""
        return self.bias

    def forward(self, input: Tensor) -> Tensor:
        return self.product(input)

    def product(self, input: Tensor) -> Tensor:
        """input @ weight.T + product_bias."""
        bias = self.product_bias
        if self.few_rows is not None and input.numel() <= MOST_ROWS * self.in_features:
            if self.few_rows == FEW_ROWS:
                out: Tensor = few_rows(input, [self.weight], [] if bias is None else [bias], None)[0]
                return out
            return _padded_linear(input, self.weight, bias)
        if self.stock:
            return F.linear(input, self.weight, bias)
        out = linear(input, self.weight, bias, self.tiles, self.exact_backward)
        return out


def _padded_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    padded = F.pad(rows, (0, 0, 0, _PADDED_ROWS - rows.shape[0]))
    return F.linear(padded, weight, bias)[: rows.shape[0]].view(*x.shape[:-1], weight.shape[0])


def linears(module: nn.Module) -> Iterator[tuple[str, InvariantLinear]]:
    """Yield the converted linears of a module, with their names."""
    for name, part in module.named_modules():
        if isinstance(part, InvariantLinear):
            yield name, part


class InvariantAdapted(Invariant):
    """A linear with a low-rank adapter of peft's: base(x) + scaling * B(A(x)). The parts are linears, which
    are converted themselves; the rest is elementwise."""

    base_layer: nn.Module
    disable_adapters: bool
    lora_A: nn.ModuleDict
    lora_B: nn.ModuleDict
    scaling: dict[str, float]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base_layer(x)
        if self.disable_adapters:
            return out
        for name, down in self.lora_A.items():
            out = out + self.lora_B[name](down(x)) * self.scaling[name]
        return out


class InvariantNorm(Invariant):
    """RMSNorm over the last dimension."""

    weight: Tensor
    norm_eps: float
    unit_offset: bool
    rounded_last: bool

    def forward(self, hidden_states: Tensor) -> Tensor:
        options = (self.norm_eps, self.unit_offset, self.rounded_last)
        out: Tensor = rms_norm(hidden_states, self.weight, *options)
        return out


class InvariantLayerNorm(Invariant):
    """LayerNorm over the last dimension, without a bias."""

    weight: Tensor
    norm_eps: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        normed: Tensor = standardise(hidden_states, self.norm_eps)
        return (self.weight.float() * normed).to(hidden_states.dtype)


class InvariantMLP(Invariant):
    """down(act(gate(x)) * up(x)). On CUDA act and product are elementwise in stock code, too."""

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module
    act_fn: Callable[[Tensor], Tensor]
    activation: str

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        if x.is_cuda:
            hidden = self.act_fn(gate) * up
        else:
            hidden = (silu_and_mul if self.activation == "silu" else gelu_and_mul)(gate, up)
        out: Tensor = self.down_proj(hidden)
        return out


class InvariantFusedMLP(Invariant):
    """down(act(gate) * up) of gate and up from one linear."""

    gate_up_proj: nn.Module
    down_proj: nn.Module
    activation_fn: Callable[[Tensor], Tensor]
    activation: str

    def act(self, gate_up: Tensor) -> Tensor:
        """[..., N] of gate and up, [..., 2 N]."""
        gate, up = gate_up.chunk(2, dim=-1)
        if gate_up.is_cuda:
            return self.activation_fn(gate) * up
        return (silu_and_mul if self.activation == "silu" else gelu_and_mul)(gate, up)  # type: ignore[no-any-return]

    def forward(self, hidden_states: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.act(self.gate_up_proj(hidden_states)))
        return out


class InvariantRotary(Invariant):
    """cos and sin of the positions, the same in eager code and in any graph."""

    form: Rotary

    def forward(
        self, x: Tensor, position_ids: Tensor, layer_type: str | None = None
    ) -> tuple[Tensor, Tensor]:
        prefix = "" if layer_type is None else f"{layer_type}_"
        scaling = float(getattr(self, f"{prefix}attention_scaling"))
        inv_freq = getattr(self, f"{prefix}inv_freq").to(x.device)
        cos, sin = rotary(position_ids, inv_freq, scaling, self.form.layout)
        return (cos.to(x.dtype), sin.to(x.dtype)) if self.form.rounded else (cos, sin)


@functools.cache
def converted_class(mixin: type, original: type) -> type:
    """Return the subclass of `original` with `mixin`'s forward, under the name that FSDP policies look
    for."""
    return type(original.__name__, (mixin, original), {"__module__": original.__module__})


def swap_linear(part: nn.Linear, *, exact_backward: bool) -> None:
    """Swap a linear; it uses all tiles until the self-test finds which are equal."""
    swap(part, InvariantLinear, tiles=TILES, stock=False, exact_backward=exact_backward, few_rows=None)


def swap_adapted(part: nn.Module) -> None:
    """Swap a linear that peft wrapped."""
    swap(part, InvariantAdapted)


def swap_norm(part: nn.Module, form: RMSNorm) -> None:
    """Swap an RMSNorm."""
    epsilon = float(getattr(part, form.epsilon))
    options = {"unit_offset": form.unit_offset, "rounded_last": form.rounded_last}
    swap(part, InvariantNorm, norm_eps=epsilon, **options)


def swap_layer_norm(part: nn.Module, form: LayerNorm) -> None:
    """Swap a layer norm."""
    swap(part, InvariantLayerNorm, norm_eps=float(getattr(part, form.epsilon)))


def swap_mlp(part: nn.Module, activation: str) -> None:
    """Swap a gated MLP; `activation` is a value of ACTIVATIONS."""
    swap(part, InvariantMLP, activation=activation)


def swap_fused_mlp(part: nn.Module, activation: str) -> None:
    """Swap a gated MLP with one linear for gate and up."""
    swap(part, InvariantFusedMLP, activation=activation)


def swap_rotary(part: nn.Module, form: Rotary) -> None:
    """Swap a rotary embedding."""
    swap(part, InvariantRotary, form=form)


def swap(part: nn.Module, mixin: type, **attributes: Any) -> None:
    """Give a part the forward of `mixin`, and attributes."""
    part.__class__ = converted_class(mixin, type(part))  # type: ignore[arg-type]
    for name, value in attributes.items():
        setattr(part, name, value)


# Logits and token figures of a converted head, for lockstep.ops.logprobs and for engines.


def head_kernels(linear: nn.Linear) -> HeadKernels | None:
    """Return the kernels of a language-model head; None: it is not converted."""
    if not isinstance(linear, InvariantLinear):
        return None
    tiles, stock, few = linear.tiles, linear.stock, linear.few_rows

    def logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
        if few is not None and hidden.shape[0] <= MOST_ROWS:
            if few == PADDED:
                return out.copy_(_padded_linear(hidden, weight, bias))
            from lockstep.invariant import triton_kernels

            biases = [] if bias is None else [bias]
            return triton_kernels.few_rows(hidden, [weight], biases, None, outs=[out])[0]
        if stock:
            if bias is None:
                return torch.mm(hidden, weight.t(), out=out)
            return torch.addmm(bias, hidden, weight.t(), out=out)
        if hidden.is_cuda:
            from lockstep.invariant import triton_kernels

            return triton_kernels.matmul(hidden, weight.t(), bias, out=out)
        return tiled_product(hidden, weight, bias, tiles=tiles, out=out)

    def stats(
        logits: Tensor, labels: Tensor, scale: float, cap: float | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        figures: tuple[Tensor, Tensor, Tensor] = token_stats(logits, labels, scale, cap)
        return figures

    def partial(logits: Tensor, labels: Tensor, scale: float, cap: float | None, start: int) -> Tensor:
        figures: Tensor = partial_token_stats(logits, labels, scale, cap, start)
        return figures

    return HeadKernels(logits=logits, stats=stats, partial=partial)
