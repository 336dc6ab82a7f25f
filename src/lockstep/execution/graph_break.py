"""Explain why a module could not be captured as one graph, with the module and the line."""

from __future__ import annotations

import inspect
from types import CodeType
from typing import Any

from torch import nn

from lockstep.errors import ModelError


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
