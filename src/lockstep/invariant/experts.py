"""The parts of a mixture of experts, with forwards of our own: routers that break ties by index, and experts
that are computed sorted, by one grouped product for each of their two matrices.

transformers' blocks, their names and Parameters stay: `install` swaps the classes of a block's router and
experts, as `modules` does for others. `convert` then makes them row-invariant, which on a GPU they are as
they are.

    block(x) ─► router: logits ─► softmax ─► k largest, in order
                 └► experts: rows by expert ─► gate, up ─► act ─► down ─► sum over slots, float32
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.errors import ModelError
from lockstep.invariant.expert_exchange import ExpertExchange
from lockstep.invariant.expert_ops import (
    by_expert,
    clamped_swiglu,
    combine_slots,
    gather_slots,
    grouped_linear,
    router_softmax,
    sigmoid_product,
    swiglu,
)
from lockstep.invariant.forms import FORMS, ExpertBlock, GroupedExperts, TopRouter
from lockstep.invariant.modules import ACTIVATIONS, Invariant, swap
from lockstep.invariant.row_ops import TILES, gelu_and_mul, linear

PRODUCTS = ("gate_up_proj", "down_proj")
"""The Parameters of experts that rows are multiplied with, in order."""
CLAMPED = "clamped_swiglu"
"""The activation of GPT-OSS's experts; of others it is a value of ACTIVATIONS."""


class Router:
    """logits, weights [T, k] and experts [T, k] of each token, the largest weight first; of equal ones, the
    expert of the lower index."""

    weight: Tensor
    hidden_dim: int
    top_k: int
    routing: TopRouter
    normalise: bool
    watched: bool = False
    """Whether the trainer reads `seen`."""
    seen: tuple[Tensor, Tensor] | None = None
    """Logits [T, E] and experts [T, k] of the last forward."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.logits(hidden_states.reshape(-1, self.hidden_dim))
        weights, experts = choose_experts(
            logits, self.top_k, softmax=self.routing.softmax, normalise=self.normalise
        )
        # Not where activation checkpointing runs it again in backward: nobody would read `seen`, which would
        # keep the layer's activations until the next forward.
        # Private, in torch 2.11 to 2.13: nothing public says that a backward is running.
        if self.watched and (torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1):
            self.seen = logits, experts
        return logits, weights.to(logits.dtype) if self.routing.rounded else weights, experts

    def logits(self, rows: Tensor) -> Tensor:
        """[T, E] of [T, C]."""
        return F.linear(rows, self.weight, getattr(self, "bias", None))


def choose_experts(logits: Tensor, k: int, *, softmax: str, normalise: bool) -> tuple[Tensor, Tensor]:
    """Return weights and indices [T, k] of the experts with the largest logits [T, E]; see TopRouter.

    Example:
        >>> choose_experts(torch.zeros(1, 4), 2, softmax="all", normalise=True)
        (tensor([[0.5000, 0.5000]]), tensor([[0, 1]]))
    """
    # Not topk, which breaks ties in no defined order.
    scores = logits if softmax == "chosen" else router_softmax(logits)
    ranked, experts = scores.sort(dim=-1, descending=True, stable=True)
    weights, experts = ranked[:, :k], experts[:, :k]
    if softmax == "chosen":
        weights = router_softmax(weights)
    if normalise:
        total = weights[:, 0]
        for slot in range(1, k):
            total = total + weights[:, slot]
        weights = weights / total[:, None]
    return weights, experts


class InvariantRouter(Invariant, Router):
    """A router whose logits are row-invariant; `tiles` and `stock` as of an InvariantLinear."""

    tiles: tuple[int, ...]
    stock: bool

    def logits(self, rows: Tensor) -> Tensor:
        """See Router."""
        if self.stock:
            return super().logits(rows)
        out: Tensor = linear(rows, self.weight, getattr(self, "bias", None), self.tiles)
        return out


@dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    """The sizes of one grouped product of experts."""

    num_experts: int
    outputs: int
    inputs: int
    has_bias: bool = False
    inputs_first: bool = False


class Experts:
    """The weighted sum of a token's experts, [T, C] of rows [T, C], experts and weights [T, k]."""

    gate_up_proj: Tensor
    down_proj: Tensor
    num_experts: int
    inputs_first: bool
    """Layout of the weights: [E, K, N] instead of [E, N, K]."""
    activation: str
    tiles: Mapping[str, tuple[int, ...]] = MappingProxyType({})
    """Row counts of products on the CPU, by name in `products`; without one, one product for each expert."""
    adapters: Mapping[str, ExpertAdapters] = MappingProxyType({})
    """By name of the Parameter that each is beside; the modules are around this one."""
    exchange: ExpertExchange | None = None
    """Expert parallel: gate_up_proj and down_proj are of this rank's experts alone, `num_experts` of all."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        order, inverse, ends = by_expert(top_k_index, self.num_experts)
        rows = gather_slots(hidden_states, order, inverse, top_k_index.shape[1])
        if self.exchange is None:
            rows = self._products(rows, ends)
        else:
            rows = self.exchange(rows, ends, self._products)
        out: Tensor = combine_slots(rows, top_k_weights, order, inverse)
        return out

    def _products(self, rows: Tensor, ends: Tensor) -> Tensor:
        gate_up = self._product(rows, "gate_up_proj", ends)
        return self._product(self.act(gate_up), "down_proj", ends)

    def _product(self, rows: Tensor, name: str, ends: Tensor) -> Tensor:
        bias, tiles = getattr(self, f"{name}_bias", None), self.tiles.get(name, ())
        out: Tensor = grouped_linear(rows, getattr(self, name), bias, ends, self.inputs_first, tiles)
        adapter = self.adapters.get(name)
        if adapter is None or adapter.disable_adapters:
            return out
        a, b, scaling = adapter.factors()
        for kind, weight in (("A", a), ("B", b)):
            rows = grouped_linear(rows, weight, None, ends, False, self.tiles.get(f"{name}.lora_{kind}", ()))
        return out + rows * scaling

    @property
    def products(self) -> dict[str, Product]:
        """Sizes of the grouped products, those of adapters included."""
        found: dict[str, Product] = {}
        for name in PRODUCTS:
            num_experts, outputs, inputs = getattr(self, name).shape
            if self.inputs_first:
                outputs, inputs = inputs, outputs
            found[name] = Product(
                num_experts=num_experts,
                outputs=outputs,
                inputs=inputs,
                has_bias=getattr(self, f"{name}_bias", None) is not None,
                inputs_first=self.inputs_first,
            )
            if (adapter := self.adapters.get(name)) is not None:
                for kind, weight in zip("AB", adapter.factors()[:2], strict=True):
                    _, outputs, inputs = weight.shape
                    found[f"{name}.lora_{kind}"] = Product(
                        num_experts=num_experts, outputs=outputs, inputs=inputs
                    )
        return found

    def act(self, gate_up: Tensor) -> Tensor:
        """[R, N] of gate and up, [R, 2 N]."""
        own: Any = self
        if self.activation == CLAMPED:
            out: Tensor = clamped_swiglu(gate_up, own.alpha, own.limit)
            return out
        if self.activation == "silu":
            return swiglu(gate_up)  # type: ignore[no-any-return]
        gate, up = gate_up.chunk(2, dim=-1)
        if gate_up.is_cuda or self.activation not in ACTIVATIONS.values():
            return own.act_fn(gate) * up  # type: ignore[no-any-return]
        return gelu_and_mul(gate, up)  # type: ignore[no-any-return]


class InvariantExperts(Invariant, Experts):
    """Experts of row-invariant products."""


class ExpertAdapters:
    """The module that peft puts around experts for low-rank adapters of one of their Parameters (a
    ParamWrapper, around another one if both have them). peft's own forward adds B A to the weights of all
    experts; here experts multiply with A and B."""

    parameter_name: str
    num_experts: int
    disable_adapters: bool
    lora_A: nn.ModuleDict
    lora_B: nn.ModuleDict
    scaling: dict[str, float]
    base_layer: nn.Module

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.base_layer(*inputs)  # type: ignore[no-any-return]

    def factors(self) -> tuple[Tensor, Tensor, float]:
        """A [E, r, K] and B [E, N, r], and alpha / rank. peft stores A as [E r, K] and B as [N, r E]."""
        ((name, a),) = self.lora_A.items()
        left: Any = a.weight
        right: Any = self.lora_B[name].weight
        down = left.view(self.num_experts, -1, left.shape[1])
        up = right.view(right.shape[0], -1, self.num_experts).permute(2, 0, 1).contiguous()
        return down, up, self.scaling[name]


class InvariantSharedBlock(Invariant):
    """Qwen2-MoE's block: the experts, and a shared one under a gate of its own."""

    gate: nn.Module
    experts: nn.Module
    shared_expert: nn.Module
    shared_expert_gate: nn.Module

    def forward(self, hidden_states: Tensor) -> Tensor:
        rows = hidden_states.view(-1, hidden_states.shape[-1])
        _, weights, chosen = self.gate(rows)
        gate = self.shared_expert_gate(rows)
        shared = sigmoid_product(gate, self.shared_expert(rows))
        return (self.experts(rows, chosen, weights) + shared).view_as(hidden_states)  # type: ignore[no-any-return]


def install(module: nn.Module) -> int:
    """Swap the routers and experts of a causal LM, in place. Idempotent.

    Returns:
        How many blocks with experts it has.

    Raises:
        ModelError: a router or experts of a family that is not known.
    """
    blocks = 0
    for name, part in module.named_modules():
        form = FORMS.get(type(part).__name__)
        if isinstance(form, ExpertBlock):
            blocks += 1
        elif isinstance(part, Router | Experts):
            continue
        elif isinstance(form, TopRouter):
            _install_router(part, form)
        elif isinstance(form, GroupedExperts):
            _install_experts(part)
        elif type(part).__name__.endswith(("TopKRouter", "Experts", "SparseMoeBlock")):
            raise ModelError(
                f"unsupported-model: {name} ({type(part).__name__}): experts of this family are not supported"
            )
    return blocks


def install_adapters(module: nn.Module) -> None:
    """Swap the adapters that peft has put around installed experts, in place. Idempotent."""
    for part in module.modules():
        if hasattr(part, "parameter_name") and hasattr(part, "lora_A"):
            wrapper: Any = part
            base: Any = wrapper.get_base_layer()
            if isinstance(base, Experts):
                if not isinstance(part, ExpertAdapters):
                    swap(part, ExpertAdapters)
                # Not registered as modules of the experts, which they are around.
                base.adapters = {**base.adapters, wrapper.parameter_name: wrapper}


def _install_router(part: Any, routing: TopRouter) -> None:
    normalise = bool(part.norm_topk_prob) if routing.normalise is None else routing.normalise
    swap(part, Router, routing=routing, normalise=normalise)


def _install_experts(part: Any) -> None:
    swap(part, Experts)
    part.inputs_first = bool(getattr(part, "is_transposed", False))
    if hasattr(part, "limit"):
        part.activation = CLAMPED
    else:
        part.activation = ACTIVATIONS.get(part.config.hidden_act, part.config.hidden_act)


def swap_router(part: Any) -> None:
    """Make an installed router row-invariant; it uses all tiles until the self-test finds which are equal."""
    swap(part, InvariantRouter, tiles=TILES, stock=False)


def swap_experts(part: Any) -> None:
    """Make installed experts row-invariant, as `swap_router`."""
    swap(part, InvariantExperts, tiles=dict.fromkeys(part.products, TILES))


def swap_shared_block(part: Any) -> None:
    """Swap a block with a shared expert."""
    swap(part, InvariantSharedBlock)


def routers(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the installed routers of a module, with their names."""
    for name, part in module.named_modules():
        if isinstance(part, Router):
            yield name, part


def check_routers(module: nn.Module, read: Callable[[str], Tensor] | None = None) -> None:
    """Refuse router weights that are not finite: every token would get experts at random.

    Args:
        read: gives a Parameter that is on the meta device, by name; None: those are not looked at.

    Raises:
        ModelError: names the Parameter.
    """
    for name, part in routers(module):
        for kind, value in part.named_parameters():
            if value.is_meta and read is None:
                continue
            value = read(f"{name}.{kind}") if value.is_meta and read else value
            if not bool(torch.isfinite(value).all()):
                bad = int((~torch.isfinite(value)).sum())
                raise ModelError(
                    f"not-finite: {name}.{kind} has {bad} of {value.numel()} values that are NaN or "
                    "infinite; the weight file is damaged, download it again"
                )
