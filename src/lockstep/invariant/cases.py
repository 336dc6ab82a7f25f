"""The cases of the self-test: every op of a converted module at every shape, with random inputs and the
implementations to try in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.invariant import expert_ops, experts, row_ops
from lockstep.invariant import modules as parts
from lockstep.invariant import row_ops as linear_ops
from lockstep.ops.logprobs import merged_stats

RowOp = Callable[..., Tensor | tuple[Tensor, ...]]
"""Tensors with a row each in their first dimension -> one or more such tensors."""

_LOGITS_ELEMENTS = 2**28
"""Largest number of outputs of one product in a test."""
_BLOCK = 256
"""Entries of a block of the vocabulary: lockstep.engine.sampling."""


NUM_ROWS = {"cpu": 251, "cuda": 8192}
"""All rows together. 251 = 128 + 64 + 32 + 16 + 8 + 3: every tile, and a padded one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One op at one shape: inputs, and the implementations to try in turn, lazily."""

    name: str
    inputs: Callable[[], tuple[Tensor, ...]]
    choices: Callable[[tuple[Tensor, ...]], Iterator[tuple[str, RowOp]]]


def linear_name(part: parts.InvariantLinear) -> str:
    bias = "" if part.product_bias is None else " with bias"
    return f"linear {part.out_features}x{part.in_features}{bias}"


def cases(module: nn.Module, make: Inputs, *, split: bool) -> Iterator[Case]:
    vocab = 0
    for name, part in module.named_modules():
        if isinstance(part, parts.InvariantLinear):
            yield _linear_case(part, make)
            vocab = part.out_features if name.endswith("lm_head") else vocab
        elif isinstance(part, parts.InvariantNorm):
            yield _norm_case(part, make)
        elif isinstance(part, parts.InvariantLayerNorm):
            yield _layer_norm_case(part, make)
        elif isinstance(part, parts.InvariantMLP):
            yield _mlp_case(part, make)
        elif isinstance(part, parts.InvariantFusedMLP):
            down: Any = part.down_proj
            yield _act_case(part, down.in_features, make, of="halves")
        elif isinstance(part, parts.InvariantRotary):
            yield from _rotary_cases(part, make)
        elif isinstance(part, experts.InvariantRouter):
            yield _linear_like(
                router_name(part), (part.weight.shape[0], part.weight.shape[1]), _bias(part) is not None, make
            )
            yield _route_case(part, make)
        elif isinstance(part, experts.InvariantExperts):
            yield from _experts_cases(part, make)
    if vocab:
        yield _partial_case(vocab, make) if split else _stats_case(vocab, make)
        yield _mass_case(vocab, make)


@dataclass(frozen=True, slots=True)
class Inputs:
    """Random rows, the same every time."""

    device: torch.device
    dtype: torch.dtype

    def normal(self, *shape: int, std: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(sum(shape))
        values = torch.randn(*shape, device=self.device, generator=generator)
        return values.mul_(std).to(dtype or self.dtype)

    def rows(self, width: int) -> int:
        limit = NUM_ROWS[self.device.type]
        return limit if self.device.type == "cpu" else max(512, min(limit, _LOGITS_ELEMENTS // width))


def _linear_case(part: parts.InvariantLinear, make: Inputs) -> Case:
    size = (part.out_features, part.in_features)
    return _linear_like(linear_name(part), size, part.product_bias is not None, make)


def _linear_like(name: str, size: tuple[int, int], with_bias: bool, make: Inputs) -> Case:
    wide, narrow = size

    def choices(inputs: tuple[Tensor, ...]) -> Iterator[tuple[str, RowOp]]:
        weight = make.normal(wide, narrow, std=narrow**-0.5)
        bias = make.normal(wide) if with_bias else None
        if make.device.type == "cuda":
            yield parts.STOCK, lambda x: F.linear(x, weight, bias)
            yield "triton", lambda x: linear_ops.linear(x, weight, bias, linear_ops.TILES)
            return
        # From the fastest to the surest: at last every row is a product of its own.
        for tiles in (equal_tiles(inputs[0], weight, bias), (16,), (8,), (1,)):
            yield tiles_name(tiles), lambda x, tiles=tiles: linear_ops.linear(x, weight, bias, tiles)

    return Case(name=name, inputs=lambda: (make.normal(make.rows(wide), narrow),), choices=choices)


def equal_tiles(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[int, ...]:
    """Return the TILES whose rows are bitwise equal to those of tiles of 16 rows, for the first 128 rows of
    x."""
    x = x[: max(linear_ops.TILES)]
    reference = linear_ops.tiled_product(x, weight, bias, tiles=(16,))
    return tuple(
        tile
        for tile in linear_ops.TILES
        if torch.equal(linear_ops.tiled_product(x, weight, bias, tiles=(tile,)), reference)
    )


def tiles_name(tiles: tuple[int, ...]) -> str:
    """Return the choice of a Verdict for these tiles."""
    return f"tiles {' '.join(map(str, tiles))}"


def apply_tiles(part: Any, choice: str) -> None:
    exact = getattr(part, "exact_backward", False)
    part.stock = choice == parts.STOCK and not exact  # stock code has a stock backward
    if choice.startswith("tiles "):
        part.tiles = tiles_of(choice)


def tiles_of(choice: str) -> tuple[int, ...]:
    """The tiles of a choice; empty for others."""
    name, _, tiles = choice.partition(" ")
    return tuple(int(tile) for tile in tiles.split()) if name == "tiles" else ()


def _norm_case(part: Any, make: Inputs) -> Case:
    width, offset, last = part.weight.shape[0], part.unit_offset, part.rounded_last

    def choices(_: tuple[Tensor, ...]) -> Iterator[tuple[str, RowOp]]:
        weight = make.normal(width)
        yield _row_choice(make), lambda x: row_ops.rms_norm(x, weight, 1e-6, offset, last)

    name = f"rms_norm {width}{' with unit offset' * offset}{' rounded last' * last}"
    return Case(name=name, inputs=lambda: (make.normal(make.rows(width), width),), choices=choices)


def _layer_norm_case(part: Any, make: Inputs) -> Case:
    width = part.weight.shape[-1]
    return Case(
        name=f"standardise {width}",
        inputs=lambda: (make.normal(make.rows(width), width),),
        choices=lambda _: iter([(_row_choice(make), lambda x: row_ops.standardise(x, 1e-6))]),
    )


def _mlp_case(part: Any, make: Inputs) -> Case:
    width, activation = part.up_proj.out_features, part.activation
    op = row_ops.silu_and_mul if activation == "silu" else row_ops.gelu_and_mul

    def choices(_: tuple[Tensor, ...]) -> Iterator[tuple[str, RowOp]]:
        if make.device.type == "cuda":
            yield parts.STOCK, lambda gate, up: part.act_fn(gate) * up
        else:
            yield _row_choice(make), op

    def inputs() -> tuple[Tensor, ...]:
        both = make.normal(2, make.rows(width), width)
        return both[0], both[1]

    return Case(name=f"{activation}_and_mul {width}", inputs=inputs, choices=choices)


def _rotary_cases(part: Any, make: Inputs) -> Iterator[Case]:
    layout = part.form.layout
    for name, buffer in part.named_buffers():
        if not name.endswith("inv_freq") or "original" in name:
            continue
        width = buffer.shape[0]

        def choices(_: tuple[Tensor, ...], width: int = width) -> Iterator[tuple[str, RowOp]]:
            steps = torch.arange(width, device=make.device, dtype=torch.float32) / width
            yield _row_choice(make), lambda at: row_ops.rotary(at, 10000.0**-steps, 1.0, layout)

        def inputs() -> tuple[Tensor, ...]:
            return (torch.arange(make.rows(1), device=make.device) * 37,)

        suffix = "" if layout == "halves" else f" in {layout}"
        yield Case(name=f"rotary {width}{suffix}", inputs=inputs, choices=choices)


def _stats_case(vocab: int, make: Inputs) -> Case:
    def inputs() -> tuple[Tensor, ...]:
        rows = make.rows(vocab)
        # 7919 is prime, so labels lie all over the vocabulary.
        return make.normal(rows, vocab, std=3.0), torch.arange(rows, device=make.device) * 7919 % vocab

    def choices(_: tuple[Tensor, ...]) -> Iterator[tuple[str, RowOp]]:
        # With a temperature that is not 1, so that the multiplication by the scale is tested too.
        yield _row_choice(make), lambda logits, labels: row_ops.token_stats(logits, labels, 1 / 0.7, None)

    return Case(name=f"token_stats {vocab}", inputs=inputs, choices=choices)


def _partial_case(vocab: int, make: Inputs) -> Case:
    """The figures of a part of the vocabulary (tensor parallel), and what they are merged to."""

    def inputs() -> tuple[Tensor, ...]:
        rows = make.rows(vocab)
        return make.normal(rows, vocab, std=3.0), torch.arange(rows, device=make.device) * 7919 % (2 * vocab)

    def merged(logits: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        # Of a vocabulary of two equal parts, whose first columns are id 0 and id `vocab`.
        both = [row_ops.partial_token_stats(logits, labels, 1 / 0.7, None, start) for start in (0, vocab)]
        return merged_stats(torch.stack(both), labels)

    def choices(_: tuple[Tensor, ...]) -> Iterator[tuple[str, RowOp]]:
        yield _row_choice(make), merged

    return Case(name=f"partial_token_stats {vocab}", inputs=inputs, choices=choices)


def _mass_case(vocab: int, make: Inputs) -> Case:
    def choices(_: tuple[Tensor, ...]) -> Iterator[tuple[str, RowOp]]:
        yield _row_choice(make), lambda logits: row_ops.block_mass(logits, 1 / 0.7, None, _BLOCK)

    def inputs() -> tuple[Tensor, ...]:
        return (make.normal(make.rows(vocab), vocab, std=3.0),)

    return Case(name=f"block_mass {vocab}", inputs=inputs, choices=choices)


def _row_choice(make: Inputs) -> str:
    return "triton" if make.device.type == "cuda" else "cpu-row"


# --- experts ---

_FEW_EXPERTS = 4
"""Experts of a case on the CPU, where each expert's products are the same. A GPU's kernel has all in one."""


def router_name(part: experts.InvariantRouter) -> str:
    """Name of a router's product in the verdicts."""
    outputs, inputs = part.weight.shape
    return f"linear {outputs}x{inputs}{' with bias' if _bias(part) is not None else ''}"


def _bias(part: Any) -> Tensor | None:
    return getattr(part, "bias", None)


def _route_case(part: experts.InvariantRouter, make: Inputs) -> Case:
    num_experts, routing = part.weight.shape[0], part.routing

    def op(logits: Tensor) -> tuple[Tensor, Tensor]:
        return experts.choose_experts(logits, part.top_k, softmax=routing.softmax, normalise=part.normalise)

    name = f"route {part.top_k} of {num_experts}, softmax over {routing.softmax}"
    name += ", normalised" if part.normalise else ""
    return Case(
        name=name,
        inputs=lambda: (make.normal(make.rows(num_experts), num_experts),),
        choices=lambda _: iter([("stock" if make.device.type == "cuda" else "cpu-row", op)]),
    )


def product_name(product: experts.Product) -> str:
    """Name of a product of experts in the verdicts."""
    bias = " with bias" if product.has_bias else ""
    sizes = f"{product.num_experts}x{product.outputs}x{product.inputs}"
    return f"experts {sizes}{bias}{' inputs first' * product.inputs_first}"


def _experts_cases(part: Any, make: Inputs) -> Iterator[Case]:
    products = part.products
    for product in products.values():
        yield _product_case(product, make)
    down = products["down_proj"]
    yield _act_case(part, down.inputs, make, of="experts")
    yield _combine_case(down.outputs, make)


def _product_case(product: experts.Product, make: Inputs) -> Case:
    num_experts, wide, narrow = product.num_experts, product.outputs, product.inputs
    on_gpu, first = make.device.type == "cuda", product.inputs_first
    num_experts = num_experts if on_gpu else min(num_experts, _FEW_EXPERTS)

    def inputs() -> tuple[Tensor, ...]:
        rows = make.rows(wide)
        # 7919 is prime: neighbours have different experts, and the first expert has no rows.
        chosen = torch.arange(rows, device=make.device) * 7919 % max(1, num_experts - 1)
        return make.normal(rows, narrow), chosen + (num_experts > 1)

    def choices(given: tuple[Tensor, ...]) -> Iterator[tuple[str, RowOp]]:
        size = (num_experts, narrow, wide) if first else (num_experts, wide, narrow)
        weight = make.normal(*size, std=narrow**-0.5)
        bias = make.normal(num_experts, wide) if product.has_bias else None

        def op(x: Tensor, chosen: Tensor, tiles: tuple[int, ...] = ()) -> Tensor:
            order, inverse, ends = expert_ops.by_expert(chosen[:, None], num_experts)
            rows = expert_ops.gather_slots(x, order, inverse, 1)
            out: Tensor = expert_ops.grouped_linear(rows, weight, bias, ends, first, tiles)
            return out.index_select(0, inverse)

        if on_gpu:
            yield parts.STOCK, op
            return
        matrix = weight[-1].t() if first else weight[-1]
        for tiles in (equal_tiles(given[0], matrix, None), (16,), (8,), (1,)):
            yield tiles_name(tiles), lambda x, chosen, tiles=tiles: op(x, chosen, tiles)

    return Case(name=product_name(product), inputs=inputs, choices=choices)


def _act_case(part: Any, width: int, make: Inputs, *, of: str) -> Case:
    """The activation as experts and fused MLPs call it, on columns of one product."""
    own = part.activation == experts.CLAMPED
    own |= part.activation == "silu" and isinstance(part, experts.InvariantExperts)
    stock = make.device.type == "cuda" and not own
    return Case(
        name=f"{part.activation} of {of} {width}",
        inputs=lambda: (make.normal(make.rows(width), 2 * width, std=3.0),),
        choices=lambda _: iter([(parts.STOCK if stock else _row_choice(make), part.act)]),
    )


def _combine_case(width: int, make: Inputs) -> Case:
    """The way to the experts and back, two experts a token, each the identity."""

    def op(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        order, inverse, _ = expert_ops.by_expert(chosen, 3)
        rows = expert_ops.gather_slots(x, order, inverse, 2)
        out: Tensor = expert_ops.combine_slots(rows, weights, order, inverse)
        return out

    def inputs() -> tuple[Tensor, ...]:
        rows = make.rows(width)
        first = torch.arange(rows, device=make.device) % 3
        chosen = torch.stack((first, (first + 1) % 3), 1)
        return make.normal(rows, width), chosen, make.normal(rows, 2).abs()

    return Case(name=f"combine {width}", inputs=inputs, choices=lambda _: iter([(_row_choice(make), op)]))
