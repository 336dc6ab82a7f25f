"""Execution mode `compile`: every decoder layer is one compiled region, in place, so that parameter names
stay.

The layers of a model share one code object: torch compiles it once per kind of layer (a sliding window is
another kind) and per capacity bucket. Shapes are static (`dynamic=False`); packs come in buckets, so that
there are few of them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch._dynamo.utils import counters, get_compilation_metrics

from lockstep.errors import ModelError, TrainError

# Graphs of one code object: buckets x kinds of layer x (with and without gradients). torch's default of 8 is
# too few.
_RECOMPILE_LIMIT = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileReport:
    """What torch.compile did since a CompileWatch was made."""

    graphs: int
    """Compiled graphs (forward; each has its backward)."""
    graph_breaks: int
    recompiles: int
    """Graphs made after `mark_warm`; before it every graph counts as warm-up."""
    seconds: float
    """Wall time spent compiling."""
    reasons: tuple[str, ...]
    """Why torch compiled again, newest last; of the last 64 compilations at most."""


class CompileWatch:
    """Counts graphs, and stops a run that keeps recompiling.

    torch's counters are of the process: of two watches that are alive at once each sees the other's graphs
    too.
    """

    def __init__(self, *, max_recompiles: int | None = None) -> None:
        self.max_recompiles = max_recompiles
        self._start = _graphs()
        self._breaks = _breaks()
        self._seconds = _seconds()
        self._warm: int | None = None
        self._made_us = time.time_ns() // 1000

    def mark_warm(self) -> None:
        """From here on a new graph is a recompile. Only the first call counts."""
        if self._warm is None:
            self._warm = _graphs()

    def report(self) -> CompileReport:
        """What happened so far."""
        graphs = _graphs()
        return CompileReport(
            graphs=graphs - self._start,
            graph_breaks=_breaks() - self._breaks,
            recompiles=0 if self._warm is None else graphs - self._warm,
            seconds=_seconds() - self._seconds,
            reasons=self._reasons(),
        )

    def _reasons(self) -> tuple[str, ...]:
        mine = [m for m in get_compilation_metrics() if (m.start_time_us or 0) >= self._made_us]
        # The first line is the guard that failed; torch's hint and a stack trace follow.
        texts = (m.recompile_reason.partition("\n")[0] for m in mine if m.recompile_reason)
        return tuple(text.partition(" (HINT")[0] for text in texts)

    def check(self) -> None:
        """Raises TrainError when there were more than max_recompiles since `mark_warm`."""
        if self.max_recompiles is None:
            return
        report = self.report()
        if report.recompiles > self.max_recompiles:
            reason = report.reasons[-1] if report.reasons else "torch gave no reason"
            raise TrainError(
                f"{report.recompiles} recompiles after the first step exceed train.max_recompiles = "
                f"{self.max_recompiles}; the last one because: {reason}. Set train.static_capacity = true so "
                "that packs come in few shapes, or raise train.max_recompiles"
            )


def compile_blocks(
    module: nn.Module, *, max_recompiles: int | None = None, backend: str = "inductor"
) -> CompileWatch:
    """Compile every decoder layer of a causal LM in place; parameter names do not change.

    A graph break inside a layer is an error (`fullgraph=True`), raised at the first forward.

    Raises:
        ModelError: the module has no list of decoder layers.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _RECOMPILE_LIMIT)
    for layer in decoder_layers(module):
        layer.compile(backend=backend, fullgraph=True, dynamic=False)
    return CompileWatch(max_recompiles=max_recompiles)


def is_compiled(module: nn.Module) -> bool:
    """Whether `compile_blocks` was called on the module."""
    return decoder_layers(module)[0]._compiled_call_impl is not None


def decoder_layers(module: nn.Module) -> Sequence[nn.Module]:
    """The decoder layers of a transformers causal LM or of its base model.

    Raises:
        ModelError: there are none.
    """
    base = getattr(module, getattr(module, "base_model_prefix", "") or "model", module)
    layers = getattr(base, "layers", None)
    if not isinstance(layers, nn.ModuleList) or len(layers) == 0:
        raise ModelError(f"{type(module).__name__} has no list of decoder layers at .model.layers")
    return list(layers)


def _graphs() -> int:
    return int(counters["stats"].get("unique_graphs", 0))


def _breaks() -> int:
    return sum(counters["graph_break"].values())


def _seconds() -> float:
    from torch._dynamo.utils import compilation_time_metrics

    return float(sum(compilation_time_metrics.get("_compile.compile_inner", [])))
