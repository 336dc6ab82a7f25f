"""The compilers of joint graphs: the partitioner and the compilers of the two halves."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch.fx import GraphModule

from lockstep.errors import ConfigError, unknown_name

COMPILERS: tuple[str, ...] = ("inductor", "aot_eager")


class GraphCompiler:
    """Two calls around the export of a joint graph.

    inductor    what torch.compile does with the graph of a whole model: its decompositions, joint passes,
                min-cut partitioner and code generator. A second process finds the code in the FX graph cache.
    aot_eager   the graph's aten operators one by one: bitwise the numbers of eager code, the default
                partitioner, no C++ compiler.

    Args:
        options: inductor settings that hold while the graph is compiled.

    Raises:
        ConfigError: an unknown name, or options for a compiler that has none.
    """

    def __init__(self, name: str, *, options: Mapping[str, Any] | None = None) -> None:
        if name not in COMPILERS:
            raise ConfigError(
                f"unknown-name: compiler: {unknown_name('compiler of joint graphs', name, COMPILERS)}",
                name=name,
            )
        if options and name != "inductor":
            raise ConfigError(
                f"unknown-setting: compiler {name!r} has no options, got {sorted(options)}; set 'inductor'",
                name=name,
            )
        self.name, self._options = name, dict(options or {})

    @contextlib.contextmanager
    def settings(self) -> Iterator[None]:
        """Apply the compiler's settings, from export to the end of compilation."""
        if self.name == "aot_eager":
            yield
            return
        import torch._inductor.config

        with torch._inductor.config.patch(self._options):
            yield

    def export_options(self) -> dict[str, Any]:
        """Return keyword arguments of aot_export_joint_with_descriptors."""
        if self.name == "aot_eager":
            return {}
        from torch._inductor.decomposition import select_decomp_table

        # torch.compile passes inductor's decompositions itself; an export has none unless it is given them.
        return {"decompositions": select_decomp_table()}

    def compile_options(self, *, num_weights: int) -> dict[str, Any]:
        """Return keyword arguments of aot_compile_joint_with_descriptors.

        Args:
            num_weights: how many inputs of the forward, the first ones, stay where they are in memory.
        """
        if self.name == "aot_eager":
            return {}
        from torch._inductor.compile_fx import partition_fn

        return {
            "partition_fn": partition_fn,
            "fw_compiler": _forward_compiler(num_weights),
            "bw_compiler": _backward_compiler,
        }


def _forward_compiler(num_weights: int) -> Callable[[GraphModule, Sequence[Any]], Any]:
    def compile_forward(graph: GraphModule, inputs: Sequence[Any]) -> Any:
        # The first output is the caller's, with the strides that it has in eager code; the others are saved
        # for backward and may be laid out freely.
        graph.graph.output_node().meta["user_visible_output_idxs"] = [0]
        return _inductor(graph, inputs, static_input_idxs=range(min(num_weights, len(inputs))))

    return compile_forward


def _backward_compiler(graph: GraphModule, inputs: Sequence[Any]) -> Any:
    from torch._inductor.utils import count_tangents

    graph.graph.output_node().meta["user_visible_output_idxs"] = []
    return _inductor(graph, inputs, static_input_idxs=range(count_tangents(graph)), is_backward=True)


def _inductor(graph: GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
    # Private, in torch 2.11 to 2.13. compile_fx, which torch.compile calls, takes a graph of forward alone
    # and makes and partitions the joint one itself; here both halves are there already.
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.utils import BoxedBool

    # CUDA graphs of our own (execution/cuda_graph.py), not inductor's.
    return compile_fx_inner(graph, inputs, cudagraphs=BoxedBool(False), **options)
