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
import inspect
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from lockstep.common_errors import unknown
from lockstep.errors import ConfigError, ModelError
from lockstep.execution.regions import (
    GraphPool,
    RecordedStep,
    decoder,
    decoder_layers,
    log_build,
    use_compile_cache,
)
from lockstep.processes.child import gc_paused


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
            f"wrong-state: the layers of this {type(module).__name__} are already compiled (train.execution "
            "= 'compile'); load the model again for train.execution = 'joint'"
        )
    base = decoder(module)
    device = next(base.parameters()).device
    if cuda_graph and device.type != "cuda":
        raise ConfigError(
            f"missing-device: train.cuda_graph = true needs a model on CUDA, not on {device}; set "
            "train.device = 'cuda', or train.cuda_graph = false"
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
                "unsupported-combination: a joint graph keeps no KV cache; generate with an engine"
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
        with gc_paused(), self._as_traced(), whole_parameters(self.base, weights_of):
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
        f"unsupported-model: train.execution = 'joint' cannot use a {type(leaf).__name__} as a graph input; "
        "set train.attention = 'varlen' or 'sdpa', or train.execution = 'compile'"
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's warning that transformers clears a context variable in every forward."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="While compiling, we found certain side effects")
        yield


# Explain why a module could not be captured as one graph, with the module and the line.


def broken(error: Exception, base: nn.Module) -> ModelError:
    """Return the error about a decoder whose capture raised `error` (of torch's compiler)."""
    # Where Dynamo (torch 2.11 to 2.13) keeps the frames of the code that it traced; it is no public
    # attribute.
    stack = list(getattr(error, "real_stack", None) or [])
    reason = str(error).strip().partition("\n")[0].strip()
    detail = next(
        (line.strip() for line in str(error).splitlines() if line.strip().startswith("Explanation:")), ""
    ).removeprefix("Explanation:")
    text = f"train.execution = 'joint' needs {type(base).__name__} as one graph, and it breaks"
    module = _module_of(stack, base)
    if module:
        text += f" in {module}"
    where: dict[str, Any] = {"module": module}
    if stack:
        frame = stack[-1]
        where |= {"path": frame.filename, "line": frame.lineno}
        text += f" at {frame.filename}:{frame.lineno} ({(frame.line or frame.name).strip()})"
    text += f": {reason}{' -' + detail if detail else ''}"
    text = f"{text.rstrip('.')}. Change that line, or set train.execution = 'compile' or 'eager'"
    return ModelError(text, code="unsupported-model", setting="train.execution", **where)


def _module_of(stack: list[Any], base: nn.Module) -> str:
    """The module whose forward is innermost in the stack, such as "layers.1.mlp (LlamaMLP)"."""
    codes = [(name, module, _code(module)) for name, module in base.named_modules() if name]
    for frame in reversed(stack):
        modules = [(name, module) for name, module, code in codes if code and _holds(code, frame)]
        if modules:
            name, module = modules[0]
            others = f" and {len(modules) - 1} more" if len(modules) > 1 else ""
            return f"{name} ({type(module).__name__}{others})"
    return ""


def _code(module: nn.Module) -> CodeType | None:
    function = inspect.unwrap(getattr(module.forward, "__func__", module.forward))
    return getattr(function, "__code__", None)


def _holds(code: CodeType, frame: Any) -> bool:
    lines = [line for _, _, line in code.co_lines() if line is not None]
    return bool(code.co_filename == frame.filename and min(lines) <= frame.lineno <= max(lines))


# Sharded weights of a joint graph, which are gathered before it runs.


def whole(weight: Tensor) -> Tensor:
    """Return a weight as a plain tensor: a DTensor is gathered over its mesh, and its gradient is reduced
    over the mesh and sharded again; any other tensor is returned as it is."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return weight
    from torch.distributed.tensor import DTensor, Partial, Replicate

    if not isinstance(weight, DTensor):
        return weight
    mesh = weight.device_mesh
    gathered = weight.redistribute(placements=[Replicate()] * mesh.ndim)
    # Partial: each rank's gradient is of its own tokens, so redistribute's backward has to add them up.
    return gathered.to_local(grad_placements=[Partial()] * mesh.ndim)


@contextlib.contextmanager
def whole_parameters(base: nn.Module, like: nn.Module) -> Iterator[None]:
    """Replace DTensors by plain Parameters while a graph is captured.

    Args:
        like: `base` itself, or the module of the same architecture that is about to run the graph. Its
            weights are taken then, with the requires_grad of `base`: those of `base` may be sharded just now,
            in the dtype of the masters.
    """
    swapped: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]] = []
    whole_of: dict[int, nn.Parameter] = {}
    of = dict(like.named_modules(remove_duplicate=False))
    for path, module in base.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            source = of[path]._parameters[name]
            assert source is not None
            plain = whole(source)
            if plain is parameter:
                continue
            if id(parameter) not in whole_of:
                whole_of[id(parameter)] = nn.Parameter(plain.detach(), requires_grad=parameter.requires_grad)
            swapped.append((module._parameters, name, parameter))
    for owner, name, parameter in swapped:
        owner[name] = whole_of[id(parameter)]
    try:
        yield
    finally:
        for owner, name, parameter in swapped:
            owner[name] = parameter


def refuse_inner_shards(base: nn.Module) -> None:
    """Refuse inner modules with shards: FSDP2 gathers a module's weights in its hooks, and no module inside
    the graph runs hooks.

    Raises:
        ConfigError: a module inside of the decoder is sharded on its own.
    """
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return
    from torch.distributed.fsdp import FSDPModule

    for name, module in base.named_modules():
        if name and isinstance(module, FSDPModule):
            raise ConfigError(
                f"unsupported-combination: {name} ({type(module).__name__}) is sharded separately by "
                "fully_shard, but train.execution = 'joint' runs the whole decoder as one graph without "
                "hooks inside; call fully_shard on the model only, or set train.execution = 'compile'"
            )


# The compilers of joint graphs: the partitioner and the compilers of the two halves.


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
            raise unknown("compiler of joint graphs", name, COMPILERS, at="compiler: ")
        if options and name != "inductor":
            raise ConfigError(
                f"unknown-setting: compiler {name!r} takes no options, got {sorted(options)}; set 'inductor'"
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
