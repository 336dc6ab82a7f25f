"""Execution modes: what of a model is compiled, and what the compiler did."""

from lockstep.execution.regions import (
    CompileReport,
    CompileWatch,
    compile_blocks,
    decoder_layers,
    is_compiled,
)

__all__ = ["CompileReport", "CompileWatch", "compile_blocks", "decoder_layers", "is_compiled"]
