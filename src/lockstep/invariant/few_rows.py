"""Products of few rows, as decoding has them: the trainer's bits at the speed of the weights' bytes.

cuBLASLt without split-K is slow for few rows. But a tensor core adds over K in one order, so a kernel that
does not split K has the same bits whatever its tiles are, and an engine may use another one for its few rows
than the trainer for its many. `selftest.few_rows_test` compares the two for every weight shape on the device
where they run.

Products of the same rows, such as those of q, k and v, can be one launch, and the addition of the residual
its last step. Layers are not rewritten for that: `MergeProducts` does it in their compiled graphs.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

MOST_ROWS = 64
"""For more, cuBLASLt's kernels are as fast."""
MOST_WEIGHTS = 3
"""Of one launch: the kernel has as many slots."""


@torch.library.custom_op("lockstep::few_rows", mutates_args=())
def few_rows(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], residual: Tensor | None
) -> list[Tensor]:
    """x [..., K] @ weight [N, K].T + bias [N] for each of up to MOST_WEIGHTS weights, with at most MOST_ROWS
    rows in x; no gradient.

    Args:
        biases: one for each weight, or none.
        residual: [..., N], added to the rounded product, of one weight.
    """
    if x.is_cuda:
        from lockstep.invariant import triton_kernels

        rows = x.reshape(-1, x.shape[-1])
        added = None if residual is None else residual.reshape(rows.shape[0], -1)
        outs = triton_kernels.few_rows(rows, weights, biases, added)
        return [out.view(*x.shape[:-1], out.shape[1]) for out in outs]
    # The definition, for tests.
    outs = [F.linear(x, weight, biases[i] if biases else None) for i, weight in enumerate(weights)]
    return outs if residual is None else [residual + outs[0]]


@few_rows.register_fake
def _few_rows_fake(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], residual: Tensor | None
) -> list[Tensor]:
    return [x.new_empty(*x.shape[:-1], weight.shape[0]) for weight in weights]


_OP = torch.ops.lockstep.few_rows.default


class MergeProducts(CustomGraphPass):
    """A pass over inductor's graphs that gives one launch to products of the same rows, and the addition of a
    residual to the product before it. No bit changes."""

    def __call__(self, graph: Graph) -> None:
        products: dict[tuple[Any, bool], list[Node]] = {}
        for node in _products(graph):
            x, weights, biases = _arguments(node)
            if all(value.op in ("placeholder", "get_attr") for value in (*weights, *biases)):
                products.setdefault((x, bool(biases)), []).append(node)
        for nodes in products.values():
            for at in range(0, len(nodes), MOST_WEIGHTS):
                if len(same := nodes[at : at + MOST_WEIGHTS]) > 1:
                    _merge(graph, same)
        for node in list(graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)):
            _fold_addition(graph, node)

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,))


def _products(graph: Graph) -> list[Node]:
    return list(graph.find_nodes(op="call_function", target=_OP))


def _arguments(product: Node) -> tuple[Node, list[Node], list[Node]]:
    """x, weights and biases."""
    x, weights, biases, _ = product.args
    return cast("Node", x), cast("list[Node]", weights), cast("list[Node]", biases)


def _merge(graph: Graph, nodes: list[Node]) -> None:
    """Replace products of one weight each by one of all. Their weights are inputs of the graph, so the first
    one's place has all of them."""
    weights = [weight for node in nodes for weight in _arguments(node)[1]]
    biases = [bias for node in nodes for bias in _arguments(node)[2]]
    with graph.inserting_before(nodes[0]):
        merged = graph.call_function(_OP, (nodes[0].args[0], weights, biases, None))
        merged.meta["val"] = [node.meta["val"][0] for node in nodes]
        outs = [graph.call_function(operator.getitem, (merged, i)) for i in range(len(nodes))]
    for node, out in zip(nodes, outs, strict=True):
        out.meta["val"] = node.meta["val"][0]
        for item in list(node.users):
            item.replace_all_uses_with(out)
            graph.erase_node(item)
        graph.erase_node(node)


def _fold_addition(graph: Graph, addition: Node) -> None:
    """residual + product -> a product that ends with the addition, where nothing else reads the product."""
    if len(addition.args) != 2 or addition.kwargs:
        return
    for out, other in (addition.args, addition.args[::-1]):
        if not isinstance(out, Node) or not isinstance(other, Node) or out.target is not operator.getitem:
            continue
        product = cast("Node", out.args[0])
        if product.target is not _OP or len(_arguments(product)[1]) != 1 or product.args[3] is not None:
            continue
        one_reader = len(out.users) == 1 and len(product.users) == 1 and other is not out
        like, val = other.meta["val"], addition.meta["val"]
        if not one_reader or like.shape != val.shape or like.dtype != val.dtype:
            continue
        with graph.inserting_before(addition):
            whole = graph.call_function(_OP, (*product.args[:3], other))
            whole.meta["val"] = [val]
            item = graph.call_function(operator.getitem, (whole, 0))
            item.meta["val"] = val
        addition.replace_all_uses_with(item)
        for node in (addition, out, product):
            graph.erase_node(node)
        return
