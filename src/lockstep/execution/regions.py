"""Execution mode `compile`: every decoder layer is one compiled region, in place, so that parameter names
stay.

The layers of a model share one code object: torch compiles it once per kind of layer (a sliding window is
another kind) and per capacity bucket. Shapes are static (`dynamic=False`); packs come in buckets, so that
there are few of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lockstep.errors import ModelError
from lockstep.execution.cache import use_compile_cache
from lockstep.execution.watch import CompileWatch

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
