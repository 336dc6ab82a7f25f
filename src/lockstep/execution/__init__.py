"""Execution modes: which parts of a model are compiled, and counts of what the compiler did."""

from lockstep.execution.joint import JointDecoder, install_joint, joint_of
from lockstep.execution.regions import (
    CompileWatch,
    compile_blocks,
    compile_cache,
    decoder,
    decoder_layers,
    is_compiled,
    prepare_compiler,
    use_compile_cache,
)

__all__ = [
    "CompileWatch",
    "JointDecoder",
    "compile_blocks",
    "compile_cache",
    "decoder",
    "decoder_layers",
    "install_joint",
    "is_compiled",
    "joint_of",
    "prepare_compiler",
    "use_compile_cache",
]
