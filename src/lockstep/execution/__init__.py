"""Execution modes: which parts of a model are compiled, and counts of what the compiler did."""

from lockstep.execution.cache import compile_cache, use_compile_cache
from lockstep.execution.joint import JointDecoder, install_joint, joint_of
from lockstep.execution.regions import compile_blocks, decoder, decoder_layers, is_compiled, prepare_compiler
from lockstep.execution.watch import CompileWatch

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
