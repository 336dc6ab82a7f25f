"""The grammar of text that may reach an `eval` in a verifier: literals and arithmetic, checked before
evaluation.

reasoning_gym gives answers, and some texts of rows, to Python's `eval` and to sympy's `parse_expr`, which is
an `eval` too. `guard` puts a check before both, for every module of the package, so that a task of a later
version is covered as well. A text that does not match raises ValueError where the evaluation would, and so
scores as that task scores junk. Numbers and powers have bounds, so that a short text does not cost a whole
time-out; whatever else takes long in sympy, the reward's time-out ends.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import math
import operator
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from types import ModuleType
from typing import Any

MAX_LITERAL, MAX_FORMULA = 100_000, 10_000
"""Characters. reasoning_gym's curricula go up to 30,200 (a matrix of 100 x 100), and 4,600 (a product of ten
polynomials)."""
MAX_BITS = 100_000
"""Largest result of arithmetic on constants, in binary digits: 9**9**9**9 would fit into no memory."""
MAX_EXPONENT = 100
"""Of what holds a variable: the highest degree in reasoning_gym's curricula, ten polynomials of degree 10."""
MAX_TERMS = 1000
"""Of a product or power that sympy expands to compare it: (1+x)**30*(1+y)**30 has 961, for 1 to 2 s."""

FUNCTIONS = {
    *("sqrt", "cbrt", "root", "exp", "log", "ln", "Abs", "abs", "erf", "erfi", "Si", "Ci", "Ei", "li"),
    *("sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos", "atan", "asec", "acsc", "acot"),
    *("sinh", "cosh", "tanh", "asinh", "acosh", "atanh"),
}
"""Functions that a formula may call, by sympy's names."""
_NAME = re.compile(r"[A-Za-z][0-9]*(_[0-9A-Za-z]{1,2})?|pi|oo|alpha|beta|gamma|theta|phi")
_FORMULA = re.compile(r"[0-9A-Za-z_.,+\-*/^%() \t\n]*")
_Operations = dict[type[ast.AST], Callable[..., Any]]


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
        raise NotInGrammar(f"it is not an expression ({type(error).__name__})") from None


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


_Number = int | float | complex | Fraction


@dataclass(frozen=True, slots=True)
class _Symbolic:
    """Bounds of an expression that holds a variable or a function."""

    reach: float = 1.0
    """At least its absolute value if every variable were 1: x**(1000*y/y) has an exponent of 1000."""
    terms: int = 1
    """Upper bound of the number of summands when it is expanded."""


def _size(node: ast.expr, *, formula: bool) -> _Number | _Symbolic:
    """The value of constants, or the bounds of an expression with variables."""
    match node:
        case ast.Constant(value=bool() | int() | float() | complex() as value):
            return value
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            inner = _size(operand, formula=formula)
            return inner if isinstance(inner, _Symbolic) else _computed(op, inner)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _combined(_size(left, formula=formula), op, _size(right, formula=formula))
        case ast.Name(id=name) if formula and _NAME.fullmatch(name):
            return _Symbolic()
        case ast.Call(func=ast.Name(id=name), args=[*args], keywords=[]) if formula and name in FUNCTIONS:
            return _called(name, [_size(argument, formula=True) for argument in args])
    raise NotInGrammar(f"{type(node).__name__} has no place in an answer")


def _combined(left: _Number | _Symbolic, op: ast.operator, right: _Number | _Symbolic) -> _Number | _Symbolic:
    if not isinstance(left, _Symbolic) and not isinstance(right, _Symbolic):
        return _computed(op, left, right)
    if isinstance(op, ast.Pow):
        return _power(_symbolic(left), right)
    if isinstance(op, ast.Div) and not isinstance(right, _Symbolic):
        op, right = ast.Mult(), _computed(op, 1, right)
    a, b = _symbolic(left), _symbolic(right)
    if isinstance(op, ast.Add | ast.Sub):
        return _Symbolic(a.reach + b.reach, a.terms + b.terms)
    if a.terms > 1 and b.terms > 1 and a.terms * b.terms > MAX_TERMS:
        raise NotInGrammar(f"a product has more than {MAX_TERMS} terms")
    return _Symbolic(a.reach * b.reach if isinstance(op, ast.Mult) else math.inf, a.terms * b.terms)


def _power(base: _Symbolic, exponent: _Number | _Symbolic) -> _Symbolic:
    times = _symbolic(exponent).reach
    if not times <= MAX_EXPONENT:  # also NaN
        raise NotInGrammar(f"an exponent may come to more than {MAX_EXPONENT}")
    terms = math.comb(base.terms + math.ceil(times) - 1, math.ceil(times)) if base.terms > 1 else 1
    if terms > MAX_TERMS:
        raise NotInGrammar(f"a power has more than {MAX_TERMS} terms")
    bounded = isinstance(exponent, int | float | Fraction) and exponent >= 0 and base.reach <= MAX_EXPONENT
    return _Symbolic(base.reach**times if bounded else math.inf, terms)


def _called(name: str, arguments: Sequence[_Number | _Symbolic]) -> _Symbolic:
    match name, arguments:
        case "root", [base, index]:
            return _power(_symbolic(base), _combined(1, ast.Div(), index))
        case "sqrt" | "Abs" | "abs", [argument]:
            return _Symbolic(max(1.0, _symbolic(argument).reach))
        case "sin" | "cos", [_]:
            return _Symbolic()
    return _Symbolic(math.inf)  # log(exp(1000)) is 1000


def _symbolic(size: _Number | _Symbolic) -> _Symbolic:
    if isinstance(size, _Symbolic):
        return size
    return _Symbolic(math.inf if _bits(size) > 1000 else float(_absolute(size)))


def _absolute(number: _Number) -> Any:
    return abs(number)


def _bits(number: _Number) -> int:
    match number:
        case int():
            return number.bit_length()
        case Fraction():
            return number.numerator.bit_length() + number.denominator.bit_length()
    return 64


def _computed(op: ast.operator | ast.unaryop, *numbers: _Number) -> _Number:
    bits = [max(1, _bits(number)) for number in numbers]
    try:
        match op:
            case ast.Pow():
                size = bits[0] * _absolute(numbers[1])
            case ast.LShift():
                size = bits[0] + _absolute(numbers[1])
            case _:
                size = sum(bits)
        if not size <= MAX_BITS:
            raise NotInGrammar(f"a number may have more than {MAX_BITS} binary digits")
        value: _Number = _OPERATIONS[type(op)](*numbers)
    except (ArithmeticError, TypeError) as error:
        raise NotInGrammar(f"a number cannot be computed ({error})") from None
    return value


def _quotient(a: Any, b: Any) -> Any:
    return Fraction(a, b) if isinstance(a, int | Fraction) and isinstance(b, int | Fraction) else a / b


_UNARY: _Operations = {ast.UAdd: operator.pos, ast.USub: operator.neg, ast.Invert: operator.invert}
_BINARY: _Operations = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _quotient,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.BitAnd: operator.and_,
}
_OPERATIONS = _UNARY | _BINARY
