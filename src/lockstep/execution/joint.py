"""Execution mode `joint`: forward and backward of the whole decoder, exported once per static shape.

    capture     dynamo_graph_capture_for_export(decoder)(token ids, positions, arguments of attention)
    export      aot_export_joint_with_descriptors: one graph of forward and backward
    compile     aot_compile_joint_with_descriptors: partitioned, each half compiled
    call        hidden [1, T, C] = graph(*weights by name, *inputs); its backward takes d hidden

The graph goes from token ids to the last hidden states. Head and loss stay outside: the head is applied to a
chunk of rows at a time and makes its gradients while the logits are in cache (ops/logprobs.py), which needs
the loss as a Python function; inside of the graph it would need the float32 logits of the whole pack (4 GiB
for 8,192 slots and a vocabulary of 128k) and could not take a loss that looks at whole documents.

Weights are bound by name at each call (`_parameters[name]` of the module that has it): tied weights, weights
that were replaced and weights that FSDP2 has just gathered are the right ones, and the graph keeps none. A
weight that is a DTensor is gathered in front of the graph. The graph replaces the instance's `forward` and
nothing else, so hooks of wrappers (DDP, FSDP2 on the model as a whole) run around it, names and state dict
stay.
"""

from __future__ import annotations

import contextlib
import copy
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lockstep.errors import ConfigError
from lockstep.execution.cache import use_compile_cache
from lockstep.execution.compilers import GraphCompiler
from lockstep.execution.cuda_graph import GraphPool, RecordedStep
from lockstep.execution.graph_break import broken
from lockstep.execution.regions import decoder, decoder_layers
from lockstep.execution.shards import refuse_inner_shards, whole, whole_parameters
from lockstep.execution.watch import log_build
from lockstep.processes.garbage import no_search_for_garbage


def install_joint(
    module: nn.Module,
    *,
    compiler: str = "inductor",
    options: Mapping[str, Any] | None = None,
    cuda_graph: bool = False,
    graphs_of: JointDecoder | None = None,
) -> JointDecoder:
    """Make a causal LM's decoder run as joint graphs, in place; names and state dict do not change.

    A graph is made at the first call with its shape, so packs need a static capacity. Without gradients the
    forward half of the same graph runs, so that logprobs before and in a training step are the same numbers.

    Args:
        compiler: "inductor", or "aot_eager" for bitwise the numbers of eager code.
        options: inductor settings that the graphs are compiled with.
        cuda_graph: replay forward and backward as CUDA graphs; all shapes share their
            activations, and each keeps its inputs and one set of gradients.
        graphs_of: a decoder of the same architecture whose graphs this one runs with its own weights.

    Raises:
        ConfigError: a compiler that is not known, a module whose layers are compiled already, or CUDA graphs
            of a module that is not on CUDA.
        ModelError: the module has no list of decoder layers.
    """
    if decoder_layers(module)[0]._compiled_call_impl is not None:
        raise ConfigError(
            f"wrong-state: the layers of this {type(module).__name__} are compiled already "
            "(train.execution = 'compile'); load the model again for train.execution = 'joint'",
            setting="train.execution",
        )
    base = decoder(module)
    device = next(base.parameters()).device
    if cuda_graph and device.type != "cuda":
        raise ConfigError(
            f"missing-device: train.cuda_graph = true with a model on {device}: only CUDA has such graphs; "
            "set train.device = 'cuda', or train.cuda_graph = false"
        )
    use_compile_cache()
    joint = JointDecoder(base, GraphCompiler(compiler, options=options), graphs_of=graphs_of)
    joint.cuda_graph = cuda_graph
    vars(base)["forward"] = joint  # an attribute of the instance: no submodule, no entry of the state dict
    return joint


def joint_of(module: nn.Module) -> JointDecoder | None:
    """Return the JointDecoder that `install_joint` put into a causal LM; None: there is none."""
    forward = vars(decoder(module)).get("forward")
    return forward if isinstance(forward, JointDecoder) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderCall:
    """The arguments of one call of the decoder."""

    input_ids: Tensor
    """[1, T] packed, [B, L] padded; int64."""
    position_ids: Tensor
    """The same shape, int64."""
    kwargs: dict[str, Any]
    """Arguments of attention: cu_seqlens [D_cap + 1] int32, max_seqlen, perhaps masks [1, 1, T, T]."""

    def arguments(self) -> tuple[Tensor, Tensor, dict[str, Any]]:
        return self.input_ids, self.position_ids, self.kwargs


class JointDecoder:
    """A decoder's `forward`. See `install_joint`."""

    is_graph = True

    def __init__(
        self, base: nn.Module, compiler: GraphCompiler, *, graphs_of: JointDecoder | None = None
    ) -> None:
        self.base, self.compiler = base, compiler
        self._graphs: dict[Any, _Graph] = {} if graphs_of is None else graphs_of._graphs
        self._maker: JointDecoder = self if graphs_of is None else graphs_of._maker
        self.cuda_graph = False
        self._recorded: dict[Any, RecordedStep] = {}
        self._pool = GraphPool()
        self._dropout = any(isinstance(m, nn.Dropout) and m.p > 0 for m in base.modules())

    def __deepcopy__(self, memo: dict[int, Any]) -> JointDecoder:
        """Copy for a copy of the module, which makes its own graphs."""
        twin = JointDecoder(copy.deepcopy(self.base, memo), self.compiler)
        twin.cuda_graph = self.cuda_graph
        return twin

    def __call__(
        self, *, input_ids: Tensor, position_ids: Tensor, use_cache: bool = False, **kwargs: Any
    ) -> Any:
        """Return transformers' BaseModelOutputWithPast with the last hidden states [B, L, C] and nothing
        else.

        Raises:
            ModelError: the decoder cannot be captured as one graph; names the module and the line.
            ConfigError: an argument that cannot be an input of a graph.
        """
        from transformers.modeling_outputs import BaseModelOutputWithPast

        if use_cache:
            raise ConfigError(
                "unsupported-combination: a joint graph keeps no KV cache; generate with an engine",
                name="use_cache",
            )
        call = DecoderCall(input_ids=input_ids, position_ids=position_ids, kwargs=kwargs)
        key = self._key(call)
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._graphs[key] = self._maker._make(call, weights_of=self.base)
        hidden = self._replay(key, graph, call) if self.cuda_graph else graph.run(self.base, call)
        # The graph is one of training: it ran under enable_grad whatever the caller said.
        hidden = hidden if torch.is_grad_enabled() else hidden.detach()
        return BaseModelOutputWithPast(last_hidden_state=hidden)

    def _replay(self, key: Any, graph: _Graph, call: DecoderCall) -> Tensor:
        weights = graph.weights_of(self.base)
        recorded = self._recorded.get(key)
        if recorded is None or not recorded.fits(weights):
            step = RecordedStep(graph.function, weights, call.arguments(), pool=self._pool)
            recorded = self._recorded[key] = step
        return recorded.run(call.arguments())

    def adopt(self, other: JointDecoder) -> None:
        """Use the graphs of `other`, a decoder of the same architecture; graphs hold no weights."""
        self._graphs = other._graphs

    @property
    def num_graphs(self) -> int:
        """Graphs made so far."""
        return len(self._graphs)

    def _key(self, call: DecoderCall) -> Any:
        leaves, spec = pytree.tree_flatten(call.arguments())
        return spec, tuple(_leaf_key(leaf) for leaf in leaves), *self._maker._mode()

    def _mode(self) -> tuple[Any, ...]:
        """The other state that a graph depends on: adapters switched off change requires_grad."""
        trained = bytes(p.requires_grad for p in self.base.parameters())
        return trained, self.base.training and self._dropout

    def _make(self, call: DecoderCall, *, weights_of: nn.Module) -> _Graph:
        started, before = time.time_ns() // 1000, time.perf_counter()
        refuse_inner_shards(self.base)
        with no_search_for_garbage(), self._as_traced(), whole_parameters(self.base, weights_of):
            graph = _export(self.base, call, self.compiler)
        reason = ""
        if self._graphs:
            rows, width = call.input_ids.shape
            reason = (
                f"a joint graph for {rows} x {width} token slots, beside {len(self._graphs)} of other shapes"
            )
        log_build(started_us=started, seconds=time.perf_counter() - before, reason=reason)
        return graph

    @contextlib.contextmanager
    def _as_traced(self) -> Iterator[None]:
        """Restore the module's own forward for tracing, in train mode (so that checkpointed layers
        checkpoint) unless dropout would be baked into a graph of evaluation."""
        own = vars(self.base).pop("forward")
        modes = {m: m.training for m in self.base.modules()}
        if not self._dropout:
            self.base.train()
        try:
            yield
        finally:
            for module, mode in modes.items():
                module.training = mode
            vars(self.base)["forward"] = own


@dataclass(frozen=True, kw_only=True, slots=True)
class _Graph:
    """A compiled joint graph; it holds no weight."""

    function: Callable[..., Tensor]
    weights: tuple[tuple[str, str], ...]
    """(path of the module in the decoder, name in it) of every Parameter, then of every buffer, in the order
    of the graph's inputs; a tied weight has several names."""

    def weights_of(self, base: nn.Module) -> list[Tensor]:
        """Return the current weights of `base`, gathered where they are sharded."""
        modules = dict(base.named_modules(remove_duplicate=False))
        weights = [_weight(modules[path], name) for path, name in self.weights]
        gathered = {id(weight): whole(weight) for weight in weights}
        return [gathered[id(weight)] for weight in weights]

    def run(self, base: nn.Module, call: DecoderCall) -> Tensor:
        return self.function(*self.weights_of(base), *call.arguments())


class _Traced(nn.Module):
    """The module that is captured: tensors in, the last hidden states out."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, input_ids: Tensor, position_ids: Tensor, kwargs: dict[str, Any]) -> Tensor:
        # .forward: hooks of wrappers around the decoder are not part of it.
        output: Any = self.base.forward(
            input_ids=input_ids, position_ids=position_ids, use_cache=False, **kwargs
        )
        hidden: Tensor = output.last_hidden_state
        return hidden


def _export(base: nn.Module, call: DecoderCall, compiler: GraphCompiler) -> _Graph:
    from torch._dynamo.exc import TorchDynamoException
    from torch._dynamo.functional_export import dynamo_graph_capture_for_export
    from torch._functorch.aot_autograd import (
        aot_compile_joint_with_descriptors,
        aot_export_joint_with_descriptors,
    )

    # The three functions are not public. In torch 2.11 to 2.13 they differ only in arguments that are not
    # used here. A public export of forward and backward as one graph would take their place.
    traced, arguments = _Traced(base), call.arguments()
    with contextlib.ExitStack() as stack:
        # For a call without gradients too: logprobs before a step come from the forward half of the step's
        # own graph, and so have its bits.
        stack.enter_context(torch.enable_grad())
        stack.enter_context(_quiet())
        stack.enter_context(torch.fx.traceback.preserve_node_meta())
        # Shapes are static, also those of a second graph.
        stack.enter_context(torch._dynamo.config.patch(automatic_dynamic_shapes=False))
        stack.enter_context(compiler.settings())
        stack.callback(_forget, set(globals()))
        try:
            captured = dynamo_graph_capture_for_export(traced)(*arguments)
        except TorchDynamoException as error:
            raise broken(error, base) from error
        context = captured.meta["tracing_context"]
        stack.enter_context(torch._guards.tracing(context))
        joint = aot_export_joint_with_descriptors(stack, captured, arguments, {}, **compiler.export_options())
        weights = tuple(_split_name(name) for name in [*joint.params_spec, *joint.buffers_spec])
        distinct = {id(_weight(base.get_submodule(path), name)) for path, name in weights}
        function = aot_compile_joint_with_descriptors(
            joint, **compiler.compile_options(num_weights=len(distinct))
        )
    # The compiled backward keeps the context of its compilation; the weights in there would live on after
    # they were replaced.
    context.params_flat = context.params_flat_unwrap_subclasses = None
    return _Graph(function=function, weights=weights)


def _forget(known: set[str]) -> None:
    """Delete the captured graph, with weights and inputs, which the capture leaves in this module's
    globals."""
    for name in set(globals()) - known:
        if name.startswith("__compiled_fn"):
            del globals()[name]


def _split_name(name: str) -> tuple[str, str]:
    """ "base.layers.0.mlp.up_proj.weight" -> ("layers.0.mlp.up_proj", "weight")."""
    path, _, leaf = name.removeprefix("base.").rpartition(".")
    return path, leaf


def _weight(module: nn.Module, name: str) -> Tensor:
    parameter = module._parameters.get(name)
    tensor = module._buffers[name] if parameter is None else parameter
    assert tensor is not None
    return tensor


def _leaf_key(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype, leaf.device
    if leaf is None or isinstance(leaf, bool | int | float | str):
        return type(leaf), leaf
    raise ConfigError(
        f"unsupported-model: train.execution = 'joint' cannot take a {type(leaf).__name__} as an input of "
        "its graph; set train.attention = 'varlen' or 'sdpa', or train.execution = 'compile'"
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's warning that transformers clears a context variable in every forward."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="While compiling, we found certain side effects")
        yield
