"""What may reach an `eval` in a verifier: literals and arithmetic, checked before anything is evaluated.

reasoning_gym gives answers, and some texts of rows, to Python's `eval` and to sympy's `parse_expr`, which is
an `eval` too. `guard` puts a check before both, for every module of the package, so that a task of a later
version is covered as well. A text that does not match raises ValueError where the evaluation would, and so
scores as that task scores junk.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import math
import re
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

MAX_LITERAL, MAX_FORMULA = 1_000_000, 10_000
"""Characters."""
MAX_BITS = 100_000
"""Largest number that arithmetic on constants may come to, in binary digits: 9**9**9**9 has no place."""
MAX_EXPONENT_BITS = 10

FUNCTIONS = {
    *("sqrt", "cbrt", "root", "exp", "log", "ln", "Abs", "abs", "erf", "erfi", "Si", "Ci", "Ei", "li"),
    *("sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos", "atan", "asec", "acsc", "acot"),
    *("sinh", "cosh", "tanh", "asinh", "acosh", "atanh"),
}
"""Functions that a formula may call, by sympy's names."""
_NAME = re.compile(r"[A-Za-z][0-9]*(_[0-9A-Za-z]{1,2})?|pi|oo|alpha|beta|gamma|theta|phi|lambda")
_FORMULA = re.compile(r"[0-9A-Za-z_.,+\-*/^%() \t\n]*")
_ARITHMETIC = (
    ast.Add | ast.Sub | ast.Mult | ast.Div | ast.FloorDiv | ast.Mod | ast.Pow | ast.LShift | ast.RShift
    | ast.BitOr | ast.BitXor | ast.BitAnd
)  # fmt: skip


class NotInGrammar(ValueError):
    """The text is not of the form that answers have, so it is not evaluated."""


def check_literal(text: str) -> None:
    """Pass Python literals (numbers, texts, lists, tuples, sets and dicts of them) and arithmetic on numbers.

    Raises:
        NotInGrammar: anything else, such as a name, an attribute or a call.

    Example:
        >>> check_literal("[['_', 'Q'], [1, 0x2 << 3]]")
    """
    _literal(_parsed(text, MAX_LITERAL))


def check_formula(text: str) -> None:
    """Pass formulas: numbers, variables of one letter, operators, brackets and elementary functions.

    Raises:
        NotInGrammar: anything else, such as an attribute, a text in quotes, another name or another call.

    Example:
        >>> check_formula("-2*x**3*cos(x) + sqrt(3)/2 + C")
    """
    if not _FORMULA.fullmatch(text):
        raise NotInGrammar("it has characters that no formula has")
    _formula(_parsed(text, MAX_FORMULA))


def guard() -> None:
    """Put the checks before every `eval` of reasoning_gym's modules and before sympy's `parse_expr`."""
    importlib.import_module("sympy.physics.units")  # parses names of units, which are not in the grammar
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "reasoning_gym" and isinstance(module, ModuleType):
            vars(module).update(eval=_checked_eval, exec=_no_exec)
    from sympy.parsing import sympy_parser

    if not hasattr(sympy_parser.stringify_expr, "__wrapped__"):
        sympy_parser.stringify_expr = _checked(sympy_parser.stringify_expr)


def _checked_eval(text: Any, *scopes: Any) -> Any:
    if not isinstance(text, str):
        raise NotInGrammar(f"{type(text).__name__} is not evaluated")
    check_literal(text)
    return builtins.eval(text.strip(), {"__builtins__": {}})


def _no_exec(*_: Any) -> None:
    raise NotInGrammar("a verifier runs no code")


def _checked(stringify: Callable[..., str]) -> Callable[..., str]:
    """sympy's first step from text to code, behind the check."""

    @functools.wraps(stringify)
    def checked(text: str, *rest: Any) -> str:
        check_formula(text)
        return stringify(text, *rest)

    return checked


def _parsed(text: str, limit: int) -> ast.expr:
    if len(text) > limit:
        raise NotInGrammar(f"it is longer than {limit} characters")
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise NotInGrammar(f"it is no expression ({type(error).__name__})") from None


def _literal(node: ast.expr) -> None:
    match node:
        case ast.List(elts=parts) | ast.Tuple(elts=parts) | ast.Set(elts=parts):
            for part in parts:
                _literal(part)
        case ast.Dict(keys=keys, values=values):
            for part in (*filter(None, keys), *values):
                _literal(part)
        case ast.Constant(value=str() | bytes() | None):
            pass
        case _:
            _size(node, formula=False)


def _formula(node: ast.expr) -> None:
    _size(node, formula=True)


def _size(node: ast.expr, *, formula: bool) -> float | None:
    """Bound the binary digits of the value; None: it holds a variable."""
    match node:
        case ast.Constant(value=bool() | int() | float() | complex() as value):
            return float(value.bit_length()) if isinstance(value, int) else 64.0
        case ast.UnaryOp(op=ast.UAdd() | ast.USub() | ast.Invert(), operand=operand):
            return _size(operand, formula=formula)
        case ast.BinOp(left=left, op=op, right=right) if isinstance(op, _ARITHMETIC):
            return _combined(_size(left, formula=formula), op, _size(right, formula=formula))
        case ast.Name(id=name) if formula and _NAME.fullmatch(name):
            return None
        case ast.Call(func=ast.Name(id=name), args=[*args], keywords=[]) if formula and name in FUNCTIONS:
            for argument in args:
                _size(argument, formula=True)
            return None
    raise NotInGrammar(f"{type(node).__name__} has no place in an answer")


def _combined(left: float | None, op: ast.operator, right: float | None) -> float | None:
    if isinstance(op, ast.Pow | ast.LShift):
        if right is not None and right != 64.0 and right > MAX_EXPONENT_BITS + (6 if left is not None else 0):
            raise NotInGrammar("an exponent is too large")
        if left is None or right is None:
            return None
        size = left * 2**right if isinstance(op, ast.Pow) else left + 2**right
    elif left is None or right is None:
        return None
    else:
        size = left + right if isinstance(op, ast.Mult | ast.Div) else max(left, right) + 1
    if not math.isfinite(size) or size > MAX_BITS:
        raise NotInGrammar("a number is too large")
    return size
