"""The compiled execution modes of a backend that holds whole weights."""

from __future__ import annotations

from torch import nn

from lockstep.config.train import TrainConfig
from lockstep.errors import ConfigError
from lockstep.execution import CompileWatch, compile_blocks, install_joint
from lockstep.train.contract import compile_options


def compile_policy(module: nn.Module, ref: nn.Module | None, config: TrainConfig) -> CompileWatch | None:
    """Make `module`, and the frozen reference if it is a module of its own, run as `config.execution` says;
    in place. None: eager.

    Raises:
        ConfigError: a setting that the mode cannot do.
        ModelError: the module has no list of decoder layers.
    """
    if config.execution == "eager":
        return None
    if config.execution == "compile":
        if ref is not None:
            compile_blocks(ref, options=compile_options(ref))
        return compile_blocks(module, max_recompiles=config.max_recompiles, options=compile_options(module))
    if config.static_capacity is False:
        raise ConfigError(
            "train.static_capacity = false with train.execution = 'joint' makes one graph of the whole "
            "decoder for every length of a pack; leave it out, or set train.execution = 'compile'"
        )
    joint = install_joint(module, options=compile_options(module), cuda_graph=config.cuda_graph)
    if ref is not None:
        install_joint(ref, options=compile_options(ref), graphs_of=joint)
    return CompileWatch(max_recompiles=config.max_recompiles)
