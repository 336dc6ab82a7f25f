"""The execution modes `compile` and `joint` of a train backend's modules."""

from __future__ import annotations

from torch import nn

from lockstep.config.support import check_capacity
from lockstep.config.train import TrainConfig
from lockstep.execution import CompileWatch, compile_blocks, install_joint, joint_of
from lockstep.train.contract import compile_options


def compile_module(
    module: nn.Module, config: TrainConfig, *, like: nn.Module | None = None
) -> CompileWatch | None:
    """Make a causal LM run as `config.execution` says, in place. None: eager.

    Wrappers that shard its weights or add up its gradients come after this: no graph holds their hooks. A
    joint graph has no modules inside whose hooks could run, so they wrap it as a whole.

    Args:
        like: a module of the same architecture that this function has prepared; the two share their joint
            graphs.

    Raises:
        ConfigError: its layers are compiled already, or the mode does not support a setting.
        ModelError: the module has no list of decoder layers.
    """
    if config.execution == "eager":
        return None
    options = compile_options(module)
    if config.execution == "compile":
        return compile_blocks(module, max_recompiles=config.max_recompiles, options=options)
    check_capacity(config)
    graphs_of = None if like is None else joint_of(like)
    cuda_graph = config.cuda_graph and like is None
    install_joint(module, options=options, cuda_graph=cuda_graph, graphs_of=graphs_of)
    return CompileWatch(max_recompiles=config.max_recompiles)
