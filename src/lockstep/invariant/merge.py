"""A pass over inductor's graphs: fewer launches for products of few rows.

Imported only where layers are compiled: it loads inductor.
"""

from __future__ import annotations

import operator
from typing import Any, cast

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

from lockstep.invariant.few_rows import MOST_WEIGHTS

_OP = torch.ops.lockstep.few_rows.default


class MergeProducts(CustomGraphPass):
    """Gives one launch to products of the same rows, and the addition of a residual to the product before it.
    No bit changes."""

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
