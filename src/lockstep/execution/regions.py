"""Execution mode `compile`: every decoder layer is one compiled region, in place, so that parameter names
stay.

The layers of a model share one code object: torch compiles it once per kind of layer (a sliding window is
another kind) and per capacity bucket. Shapes are static (`dynamic=False`); packs come in buckets, so that
there are few of them.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import compilation_time_metrics, counters, get_compilation_metrics
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from lockstep.common_errors import cannot_write
from lockstep.errors import ConfigError, ModelError, TrainError
from lockstep.observe.files import cache_root
from lockstep.schema.contract import CompileReport

# Graphs of one code object: buckets x kinds of layer x (with and without gradients). torch's default of 8 is
# too few.
_RECOMPILE_LIMIT = 64


def prepare_compiler() -> None:
    """Set the cache of compiled code and the number of graphs that a layer may have; before anything is
    compiled."""
    use_compile_cache()
    # Global, because torch.compile takes no limit of its own (torch 2.11 to 2.13). Beyond it a layer compiled
    # with fullgraph=True raises.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _RECOMPILE_LIMIT)


def compile_blocks(
    module: nn.Module,
    *,
    max_recompiles: int | None = None,
    backend: str = "inductor",
    options: Mapping[str, Any] | None = None,
) -> CompileWatch:
    """Compile every decoder layer of a causal LM in place; parameter names do not change.

    A graph break inside a layer is an error (`fullgraph=True`), raised at the first forward.

    Args:
        options: inductor settings that these graphs are compiled with.

    Raises:
        ModelError: the module has no list of decoder layers.
    """
    prepare_compiler()
    settings = dict(options) if options else None
    for layer in decoder_layers(module):
        layer.compile(backend=backend, fullgraph=True, dynamic=False, options=settings)
    return CompileWatch(max_recompiles=max_recompiles)


def is_compiled(module: nn.Module) -> bool:
    """Return whether the decoder runs as compiled graphs: `compile_blocks` or `install_joint` was called."""
    forward = vars(decoder(module)).get("forward")
    # Private, in torch 2.11 to 2.13: module.compile() sets it, and nothing public says that it was called.
    return getattr(forward, "is_graph", False) or decoder_layers(module)[0]._compiled_call_impl is not None


def decoder(module: nn.Module) -> nn.Module:
    """Return the base model of a transformers causal LM, or the module itself if it is one."""
    base: nn.Module = getattr(module, getattr(module, "base_model_prefix", "") or "model", module)
    return base


def decoder_layers(module: nn.Module) -> Sequence[nn.Module]:
    """Return the decoder layers of a transformers causal LM or of its base model.

    Raises:
        ModelError: there are none.
    """
    layers = getattr(decoder(module), "layers", None)
    if not isinstance(layers, nn.ModuleList) or len(layers) == 0:
        raise ModelError(
            f"unsupported-model: {type(module).__name__} has no list of decoder layers at .model.layers"
        )
    return list(layers)


# Counters of the compilers' work in this process, as metrics, and a limit on recompiles.


# The newest: a run that compiles in every step must not fill the host's memory.
_REASONS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class _Counts:
    graphs: int = 0
    breaks: int = 0
    seconds: float = 0.0

    def __add__(self, other: _Counts) -> _Counts:
        return _Counts(
            graphs=self.graphs + other.graphs,
            breaks=self.breaks + other.breaks,
            seconds=self.seconds + other.seconds,
        )

    def since(self, start: _Counts) -> _Counts:
        return _Counts(
            graphs=self.graphs - start.graphs,
            breaks=self.breaks - start.breaks,
            seconds=self.seconds - start.seconds,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Build:
    """One joint graph; torch's own log of compilations does not know why it was made."""

    started_us: int
    seconds: float
    reason: str


_builds: deque[_Build] = deque(maxlen=_REASONS)
_build_seconds = 0.0


def log_build(*, started_us: int, seconds: float, reason: str) -> None:
    """Count a graph that was not made by torch.compile. `reason` is empty for the first one."""
    global _build_seconds
    _builds.append(_Build(started_us=started_us, seconds=seconds, reason=reason))
    _build_seconds += seconds


class CompileWatch:
    """Counts graphs, and stops a run that keeps recompiling.

    torch's counters are global. So a watch that must not see the graphs of others (a compiled engine in the
    same process) counts only inside `counting()`; a watch on which it was never called always counts.
    """

    def __init__(self, *, max_recompiles: int | None = None) -> None:
        self.max_recompiles = max_recompiles
        self._start, self._start_us = _now(), _now_us()
        self._sections = False
        self._depth = 0
        self._counted = _Counts()
        self._reasons: deque[str] = deque(maxlen=_REASONS)
        self._warm: int | None = None

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count what is compiled inside; after the first use, compilations elsewhere do not count."""
        self._sections = True
        self._depth += 1
        if self._depth == 1:
            self._start, self._start_us = _now(), _now_us()
        try:
            yield
        finally:
            if self._depth == 1:
                self._counted = self._total()
                self._reasons.extend(_reasons_since(self._start_us))
            self._depth -= 1

    def mark_warm(self) -> None:
        """Count every new graph from here on as a recompile. Only the first call has an effect."""
        if self._warm is None:
            self._warm = self._total().graphs

    def report(self) -> CompileReport:
        """Return the counts so far."""
        total = self._total()
        new = _reasons_since(self._start_us) if self._open else []
        return CompileReport(
            graphs=total.graphs,
            graph_breaks=total.breaks,
            recompiles=0 if self._warm is None else total.graphs - self._warm,
            seconds=total.seconds,
            reasons=tuple([*self._reasons, *new][-_REASONS:]),
        )

    def check(self) -> None:
        """Raise TrainError when there were more than max_recompiles since `mark_warm`."""
        if self.max_recompiles is None:
            return
        report = self.report()
        if report.recompiles > self.max_recompiles:
            reason = report.reasons[-1] if report.reasons else "torch gave no reason"
            raise TrainError(
                f"too-many-recompiles: {report.recompiles} recompiles after the first step exceed "
                f"train.max_recompiles = {self.max_recompiles}; the reason for the last one: {reason}. Set "
                "train.static_capacity = true so that packs come in few shapes, or raise "
                "train.max_recompiles"
            )

    @property
    def _open(self) -> bool:
        return self._depth > 0 or not self._sections

    def _total(self) -> _Counts:
        return self._counted + _now().since(self._start) if self._open else self._counted


def _now() -> _Counts:
    return _Counts(
        # Not public, in torch 2.11 to 2.13: torch has no other count of graphs, and reasons only in its log
        # of compilations.
        graphs=int(counters["stats"].get("unique_graphs", 0)),
        breaks=sum(counters["graph_break"].values()),
        seconds=float(sum(compilation_time_metrics.get("_compile.compile_inner", []))) + _build_seconds,
    )


def _now_us() -> int:
    return time.time_ns() // 1000


def _reasons_since(start_us: int) -> list[str]:
    """The reasons for graphs made since then, oldest first."""
    reasons = [(b.started_us, b.reason) for b in _builds if b.started_us >= start_us and b.reason]
    for metrics in get_compilation_metrics():
        started = metrics.start_time_us or 0
        if started >= start_us and metrics.recompile_reason:
            # The first line is the guard that failed; torch's hint and a stack trace follow.
            text = metrics.recompile_reason.partition("\n")[0].partition(" (HINT")[0]
            reasons.append((started, text))
    return [reason for _, reason in sorted(reasons)]


# The cache of compiled code, which processes share.


_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def compile_cache() -> Path:
    """Return $TORCHINDUCTOR_CACHE_DIR, else inductor/ in the cache of Lockstep."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    own = os.environ.get(_VARIABLE)
    # torch writes its own choice, below the temporary folder, into the variable when it first needs one.
    if own and own != os.path.abspath(default_cache_dir()):
        return Path(own)
    return cache_root() / "inductor"


def use_compile_cache() -> Path:
    """Make inductor keep its kernels and graphs in `compile_cache()`, so that the next start finds them; to
    be called before a compiler is. A second call does nothing.

    The keys are torch's own: graph, shapes, settings, torch's version and hardware. FX graph cache and AOT
    autograd cache are on unless the user turned them off (TORCHINDUCTOR_FX_GRAPH_CACHE,
    TORCHINDUCTOR_AUTOGRAD_CACHE).

    Raises:
        ConfigError: the folder cannot be made.
    """
    folder = compile_cache()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fix = f"it is the compile cache; set {_VARIABLE} to a folder that can"
        raise cannot_write(ConfigError, folder, error, fix, done="created") from error
    # The environment is the only thing that inductor reads, and its compile workers inherit it.
    os.environ[_VARIABLE] = str(folder)
    return folder


# A joint graph's forward and its backward as two CUDA graphs over static buffers: two launches for a
# micro-batch, whatever the number of kernels.
#
# The head runs between them as it always does, so a loss may be any Python function; and gradients come out
# of autograd, so hooks (of DDP, of gradient accumulation) run.
#
#     warm-up    forward and backward, twice, on a side stream
#     record     forward, then backward, into the memory pool that all shapes of a decoder share
#     replay     inputs are copied in; launch; hidden states are copied out
#                d hidden is copied in; launch; autograd copies the gradients, because they are held here too


WARM_UPS = 2


class GraphPool:
    """The memory of all CUDA graphs of one decoder: the next forward of any shape overwrites the activations
    of the last one."""

    def __init__(self) -> None:
        self.turn = 0
        self.handle: Any = None


class RecordedStep:
    """Forward and backward of one function of weights and inputs, recorded for fixed shapes and addresses.

    Args:
        function: function(*weights, *arguments) -> one tensor, differentiable by the weights.
        weights: parameters and buffers; they stay where they are.
        arguments: trees of tensors and constants; the tensors are copied.
    """

    def __init__(
        self,
        function: Callable[..., Tensor],
        weights: Sequence[Tensor],
        arguments: tuple[Any, ...],
        *,
        pool: GraphPool,
    ) -> None:
        self._function, self._weights, self._pool = function, list(weights), pool
        leaves, self._spec = pytree.tree_flatten(arguments)
        self._inputs = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._addresses = _addresses(weights)
        # By identity: a tied weight comes under several names and has one gradient.
        self._trained = list({id(w): w for w in weights if w.requires_grad}.values())
        with torch.enable_grad():
            self._d_hidden = warm_up(self._call, self._gradients_of)
            hidden, self._replay_forward = record(self._call, pool)
            self._gradients: Sequence[Tensor | None] = ()
            if self._trained:
                self._gradients, self._replay_backward = record(lambda: self._gradients_of(hidden), pool)
        self._hidden = hidden.detach()

    def fits(self, weights: Sequence[Tensor]) -> bool:
        """Return whether the weights are at the recorded addresses."""
        return self._addresses == _addresses(weights)

    def run(self, arguments: tuple[Any, ...]) -> Tensor:
        """Return function(*weights, *arguments). Its backward must come before the next run."""
        for static, leaf in zip(self._inputs, pytree.tree_leaves(arguments), strict=True):
            if isinstance(static, Tensor):
                # On the stream of the launch below, so it is in place by then without the host waiting.
                static.copy_(leaf, non_blocking=True)
        self._pool.turn += 1
        hidden: Tensor = _Replay.apply(self, *self._trained)  # type: ignore[no-untyped-call]
        return hidden

    def _call(self) -> Tensor:
        return self._function(*self._weights, *pytree.tree_unflatten(self._inputs, self._spec))

    def _gradients_of(self, hidden: Tensor, d_hidden: Tensor | None = None) -> Sequence[Tensor | None]:
        upstream = self._d_hidden if d_hidden is None else d_hidden
        if not self._trained:
            return ()
        return torch.autograd.grad(hidden, self._trained, upstream, allow_unused=True)


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, step: RecordedStep, *weights: Tensor) -> Tensor:
        ctx.step, ctx.turn = step, step._pool.turn
        step._replay_forward()
        # A copy: the next forward of any shape overwrites the recorded one, and a head may still read this.
        hidden: Tensor = step._hidden.clone()
        return hidden

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_hidden: Tensor) -> tuple[Tensor | None, ...]:
        step: RecordedStep = ctx.step
        if ctx.turn != step._pool.turn:
            raise TrainError(
                "wrong-state: train.cuda_graph = true: a later forward has overwritten the activations of "
                "this one; run each backward before the next forward, or set train.cuda_graph = false"
            )
        step._d_hidden.copy_(d_hidden)
        step._replay_backward()
        # The same tensors every time: autograd sees that they are held elsewhere, and copies what it keeps.
        return None, *step._gradients


def warm_up(
    forward: Callable[[], Tensor], backward: Callable[[Tensor, Tensor], Sequence[Tensor | None]]
) -> Tensor:
    """Run both twice on a side stream, as recording needs. Returns the buffer for d hidden."""
    # CUDA cannot record what a first call does once (allocate, choose kernels, load modules), and torch wants
    # the warm-up away from the default stream.
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            hidden = forward()
            d_hidden = torch.zeros_like(hidden)
            backward(hidden, d_hidden)
            del hidden
    torch.cuda.current_stream().wait_stream(side)
    return d_hidden


def record(function: Callable[[], Any], pool: GraphPool) -> tuple[Any, Callable[[], None]]:
    """Record a function. Returns its result, static tensors, and a function that computes them again."""
    if pool.handle is None:
        pool.handle = torch.cuda.graph_pool_handle()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool.handle):
        result = function()
    return result, graph.replay


def _addresses(weights: Sequence[Tensor]) -> list[int]:
    return [weight.data_ptr() for weight in weights]
