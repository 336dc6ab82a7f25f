"""A Python interpreter for the policy, in the verifiers' sandbox.

    ToolHost("lockstep.environments.python_tool:PythonTool")

Each sample has an interpreter of its own, which keeps its names between calls: 512 MiB and 5 s for a call, no
files to write, no network, no programs. The code shares its process with nothing that tells a reward.
"""

from __future__ import annotations

import ast
import contextlib
import io
import linecache
import traceback
from typing import Any

MEMORY_BYTES = 512 << 20
PRINTED_CHARACTERS = 1 << 20
"""What one call may print; the rest is counted and left out."""
_FILE = "<python>"
# Loaded once for all interpreters.
_PRELOADED = (
    *("collections", "datetime", "decimal", "fractions", "functools", "itertools", "json", "math"),
    *("operator", "random", "re", "statistics", "string"),
)
for _name in _PRELOADED:
    __import__(_name)


class PythonTool:
    """A tool that runs Python code."""

    _isolation = "sandbox"
    _memory_bytes = MEMORY_BYTES
    _restarts = True
    """After a call that took too long, the next one gets a new interpreter."""
    _repeatable = True
    """Its code can only compute, so that a resumed run may run it again."""

    def __init__(self) -> None:
        self._names: dict[str, Any] = {"__name__": "__main__"}

    def python(self, code: str) -> str:
        """Run Python code. Returns what it prints and the value of the last expression; names stay defined
        between calls. There are no files, no network and no other programs.

        Args:
            code: The code to run.
        """
        printed = _Printed()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            try:
                value = self._run(code)
                if value is not None:
                    print(repr(value))  # noqa: T201 (as an interpreter does)
            except BaseException as error:  # SystemExit too: the interpreter stays
                print(_shown(error), end="")  # noqa: T201
        return printed.text

    def _run(self, code: str) -> Any:
        linecache.cache[_FILE] = (len(code), None, code.splitlines(keepends=True), _FILE)  # for tracebacks
        tree = ast.parse(code, _FILE)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, _FILE, "exec"), self._names)
        if not isinstance(last, ast.Expr):
            return None
        return eval(compile(ast.Expression(last.value), _FILE, "eval"), self._names)


class _Printed(io.StringIO):
    """Keeps the beginning of what is printed."""

    def __init__(self) -> None:
        super().__init__()
        self._left, self._lost = PRINTED_CHARACTERS, 0

    def write(self, text: str) -> int:
        """Write what there is room for."""
        super().write(text[: self._left])
        self._lost += max(0, len(text) - self._left)
        self._left = max(0, self._left - len(text))
        return len(text)

    @property
    def text(self) -> str:
        return self.getvalue() + (f"\n[{self._lost} more characters were printed]" if self._lost else "")


def _shown(error: BaseException) -> str:
    """The traceback, from the policy's own code on."""
    here = error.__traceback__
    while here is not None and here.tb_frame.f_code.co_filename != _FILE:
        here = here.tb_next
    try:
        return "".join(traceback.format_exception(type(error), error, here))
    except Exception:  # its text raises
        return f"{type(error).__name__}\n"
