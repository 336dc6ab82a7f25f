"""A process that can read Python's libraries and answer on its pipes, and nothing else.

Three layers, each used where the kernel has it: namespaces of its own (user, pid, mount, network, ipc),
Landlock (files can only be read, and only where Python and its packages lie) and a seccomp filter (only the
system calls that computing needs). Without Landlock it can read what its user can. Standard library only, as
every judge process imports it.

    start of the child:  supervise(lifeline)                  # returns in a fork, the supervised process
    after its imports:   lock(readable_places(), may_fork=True)
    in a fork of that:   lock(None, may_fork=False)
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import ctypes
import errno
import functools
import importlib
import json
import math
import operator
import os
import platform
import re
import resource
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from types import ModuleType
from typing import Any

from lockstep.processes import supervisor
from lockstep.processes.child import ROOT, package_places
from lockstep.processes.supervisor import prctl

MEMORY_LIMIT = 8 << 30
"""Bytes of address space of one process: an answer such as 9**9**9 must not take the machine with it."""

_libc = ctypes.CDLL(None, use_errno=True)

# --- The layers of a machine


@dataclass(frozen=True, kw_only=True, slots=True)
class Isolation:
    """The layers that this kernel offers to this user."""

    namespaces: tuple[str, ...]
    landlock: int
    """Its ABI version; 0: none."""
    seccomp: bool

    @property
    def missing(self) -> list[str]:
        """The missing layers."""
        absent = [f"a {name} namespace" for name in NAMESPACES if name not in self.namespaces]
        return absent + ["Landlock"] * (not self.landlock) + ["seccomp"] * (not self.seccomp)

    @property
    def sufficient(self) -> bool:
        """Whether text may be evaluated: no exec, no writes, no network, and an end of the whole tree. Files
        may be read where Landlock is missing."""
        return self.seccomp or (self.landlock > 0 and {"pid", "network"} <= set(self.namespaces))

    @property
    def warning(self) -> str | None:
        """The effect of missing layers on verifiers that evaluate text, and what to do; None: no effect."""
        if not self.sufficient:
            return "tasks that evaluate text are refused, unless allow_unsandboxed names them"
        if not self.landlock:
            return (
                "without Landlock, text that evades the check before an eval could read every file of this "
                "user (but not write or send any); use Linux 5.13 or later with landlock in "
                "/sys/kernel/security/lsm and, in a container, a seccomp profile that allows landlock_*"
            )
        return None

    def describe(self) -> str:
        """Return one line that names the layers."""
        layers = [f"{', '.join(self.namespaces)} namespaces"] if self.namespaces else []
        layers += [f"Landlock ABI {self.landlock}"] * (self.landlock > 0) + ["seccomp"] * self.seccomp
        absent = f"; missing: {', '.join(self.missing)}" if self.missing else ""
        return (" + ".join(layers) or "none") + absent


NAMESPACES = {
    "user": 0x10000000,
    "pid": 0x20000000,
    "mount": 0x00020000,
    "network": 0x40000000,
    "ipc": 0x08000000,
}
"""CLONE_NEW*."""


@lru_cache(maxsize=1)
def probe() -> Isolation:
    """Return the layers of this machine, tried once in a short-lived process."""
    code = f"import sys; sys.path.insert(0, {ROOT!r}); from lockstep.rollout import sandbox as s; s.report()"
    command = [sys.executable, "-I", "-B", "-c", code]
    ended = subprocess.run(command, env={}, capture_output=True, text=True, timeout=60, check=False)
    if ended.returncode != 0:
        return Isolation(namespaces=(), landlock=0, seccomp=False)
    layers = json.loads(ended.stdout)
    return Isolation(**{**layers, "namespaces": tuple(layers["namespaces"])})


def report() -> None:
    """Try every layer on this process and print which ones worked, for `probe`."""
    namespaces = isolate()
    reader, writer = os.pipe()
    pid = os.fork()  # a thread-free process, so a fork is safe
    if pid == 0:
        os.write(writer, json.dumps(lock((), may_fork=False)).encode())
        os._exit(0)
    os.close(writer)
    locked = json.loads(os.read(reader, 4096) or b'{"landlock": 0, "seccomp": false}')
    os.waitpid(pid, 0)
    print(json.dumps({"namespaces": namespaces, **locked}))  # noqa: T201 (JSON for a program)


def supervise(lifeline: int) -> list[str]:
    """Leave the namespaces of the parent, and go on in a fork, under a supervisor (lockstep.processes) that
    ends the whole tree. Returns the namespaces that were left.

    Args:
        lifeline: a pipe's end for reading, which only the fork reads.
    """
    namespaces = isolate()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    supervisor.supervise(lifeline)
    return namespaces


# --- Namespaces


def isolate() -> list[str]:
    """Leave the namespaces of the parent, as far as the kernel allows it; returns the names of those left.
    The pid namespace is that of this process's next child.

    The mount namespace is a copy in which nothing is unmounted: it hides no file. Only Landlock limits what
    may be read, see `lock`."""
    uid, gid = os.geteuid(), os.getegid()
    unshare = getattr(_libc, "unshare", None)
    if unshare is None:
        return []
    # All at once where possible: the kernel makes the user namespace first, and its rights cover the others.
    everything = sum(NAMESPACES.values())
    if unshare(everything) == 0:
        done = list(NAMESPACES)
    else:  # one by one, the user namespace first, which may allow the others
        done = [name for name, flag in NAMESPACES.items() if unshare(flag) == 0]
    if "user" in done:
        # Nobody inside. Without the maps the ids are unmapped, which is as good.
        for file, text in (
            ("setgroups", "deny"),
            ("uid_map", f"65534 {uid} 1"),
            ("gid_map", f"65534 {gid} 1"),
        ):
            with contextlib.suppress(OSError), open(f"/proc/self/{file}", "w", encoding="ascii") as handle:
                handle.write(text)
    return done


# --- Landlock, seccomp and limits

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _PR_CAPBSET_DROP = 38, 22, 24


def limits(*, memory: int = MEMORY_LIMIT) -> None:
    """Set limits: no files, no cores, few descriptors, a bound on memory."""
    # Soft and hard alike, so that no code in here can raise them again.
    limit_of = {
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NOFILE: 256,
    }
    for kind, value in limit_of.items():
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def lock(readable: Iterable[str] | None, *, may_fork: bool, may_serve: bool = False) -> dict[str, Any]:
    """Give up, for ever, every right that evaluating text does not need. Returns the layers that were
    installed.

    Args:
        readable: folders and files that may still be read. None: files as before.
        may_fork: whether to allow processes (never programs), and a further lock.
        may_serve: whether to allow also receiving descriptors over a socket that is there, and giving them to
            a fork as its standard output.
    """
    # The kernel demands it of a process without privileges before it takes a Landlock rule set or a filter.
    if not prctl(_PR_SET_NO_NEW_PRIVS, 1):
        return {"landlock": 0, "seccomp": False}
    # More than there are, for kernels to come; the call merely fails for a number that is not one.
    for capability in range(64):
        prctl(_PR_CAPBSET_DROP, capability)
    return {
        "landlock": _landlock(list(readable or ())) if readable is not None else 0,
        "seccomp": _seccomp(may_fork, may_serve),
    }


def _landlock(readable: Sequence[str]) -> int:
    """The ABI version; 0 where the kernel has none."""
    syscall = _libc.syscall
    # By number, as the C library has no wrappers: 444 creates a rule set (flag 1 asks for the ABI), 445 adds
    # a rule, 446 restricts this thread. The numbers are the same on x86-64 and arm64.
    abi = int(syscall(444, None, ctypes.c_size_t(0), ctypes.c_uint32(1)))
    if abi <= 0:
        return 0
    # A right that the kernel does not know is EINVAL, so each ABI's additions are asked for from that ABI on:
    # refer (2), truncate (3), ioctl on devices (5); networking (4) and scopes (6) are fields of their own.
    files = (1 << 13) - 1 | (abi >= 2) << 13 | (abi >= 3) << 14 | (abi >= 5) << 15
    attributes = struct.pack("<QQQ", files, 3 if abi >= 4 else 0, 3 if abi >= 6 else 0)
    size = 8 if abi < 4 else 16 if abi < 6 else 24
    ruleset = int(syscall(444, attributes, ctypes.c_size_t(size), ctypes.c_uint32(0)))
    if ruleset < 0:
        return 0
    try:
        for path in readable:
            _allow_reading(ruleset, path)
        return abi if syscall(446, ruleset, 0) == 0 else 0
    finally:
        os.close(ruleset)


def _allow_reading(ruleset: int, path: str) -> None:
    with contextlib.suppress(FileNotFoundError, PermissionError, NotADirectoryError):
        # O_PATH: the rule needs a reference to the place, and the place need not be readable for it.
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            # READ_FILE, and READ_DIR, which the kernel refuses in a rule for a file.
            rights = 1 << 2 | (1 << 3 if os.path.isdir(path) else 0)
            _libc.syscall(445, ruleset, 1, struct.pack("<Qi", rights, handle), 0)
        finally:
            os.close(handle)


_COMPUTE = {
    "x86_64": "0 1 3 5 6 7 8 9 10 11 12 13 14 15 17 19 20 21 23 24 25 28 35 39 60 63 72 79 89 96 97 98 99 "
    "102 104 107 108 110 131 186 202 204 217 228 229 230 231 262 267 269 270 271 273 318 332 334 439",
    "aarch64": "63 64 57 80 62 222 226 215 214 134 135 139 67 65 66 48 73 124 216 233 101 172 93 160 25 17 "
    "78 169 163 165 179 174 175 176 177 173 132 178 98 123 61 113 114 115 94 79 72 99 278 291 293 439",
}
"""System calls by number that computing makes: memory, clocks, reading, and writing to what is open."""
_FORKING = {
    "x86_64": "57 58 61 62 157 160 293 302 317 436",
    "aarch64": "59 260 129 167 164 261 277 436",
}
"""Also for a process that may fork: fork, wait4, kill, prctl, setrlimit, pipe2, seccomp, close_range."""
_SERVING = {"x86_64": "33 47 112 292", "aarch64": "24 157 212"}
"""Also for a process that may serve: dup2, dup3, recvmsg, setsid."""
_OPEN = {"x86_64": ((257, 2), (2, 1)), "aarch64": ((56, 2),)}
"""open calls: (number, index of the flags)."""
_CLONE = {"x86_64": 56, "aarch64": 220}
_NOT_THERE = {"x86_64": (435, 437), "aarch64": (435, 437)}
"""clone3, openat2: their arguments cannot be looked at; the C library falls back to the older calls."""
_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def _seccomp(may_fork: bool, may_serve: bool) -> bool:
    machine = platform.machine()
    # The filter reads the low half of 64-bit arguments at their first four bytes.
    if machine not in _AUDIT or sys.byteorder != "little":
        return False
    program = b"".join(_filter(machine, may_fork, may_serve))
    # Kept in a variable: the descriptor holds only its address, and the kernel reads it during the call.
    buffer = ctypes.create_string_buffer(program, len(program))
    descriptor = struct.pack("@HP", len(program) // 8, ctypes.addressof(buffer))
    call = _libc.prctl
    return bool(call(_PR_SET_SECCOMP, ctypes.c_ulong(2), ctypes.c_char_p(descriptor), 0, 0) == 0)


def _filter(machine: str, may_fork: bool, may_serve: bool) -> list[bytes]:
    """BPF: the numbers of _COMPUTE pass, open only for reading; everything else fails with EPERM."""
    # BPF's LD|W|ABS, JMP|JEQ|K, JMP|JSET|K and RET|K; SECCOMP_RET_ALLOW, and RET_ERRNO with its number.
    load, equal, any_bit, give = 0x20, 0x15, 0x45, 0x06
    allow, refuse = 0x7FFF0000, 0x00050000 | errno.EPERM

    def op(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
        return struct.pack("<HBBI", code, yes, no, value)

    def only_without(number: int, argument: int, bits: int) -> list[bytes]:
        """Allow `number` unless its argument has one of the bits."""
        return [
            op(equal, number, no=4),
            # seccomp_data: number at 0, architecture at 4, instruction pointer at 8, arguments from 16 on.
            op(load, 16 + 8 * argument),
            op(any_bit, bits, no=1),
            op(give, refuse),
            op(give, allow),
        ]

    numbers = " ".join([_COMPUTE[machine], *[_FORKING[machine]] * may_fork, *[_SERVING[machine]] * may_serve])
    # The architecture first: the same number is another call in 32-bit mode.
    program = [op(load, 4), op(equal, _AUDIT[machine], yes=1), op(give, refuse), op(load, 0)]
    for number in numbers.split():
        program += [op(equal, int(number), no=1), op(give, allow)]
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    for call, argument in _OPEN[machine]:
        program += only_without(call, argument, writing)
    if may_fork:
        # Also CLONE_NEWCGROUP and CLONE_NEWUTS: no new namespace
        # at all, as a user namespace gives capabilities back.
        program += only_without(_CLONE[machine], 0, sum(NAMESPACES.values()) | 0x02000000 | 0x04000000)
    for call in _NOT_THERE[machine]:
        program += [op(equal, call, no=1), op(give, 0x00050000 | errno.ENOSYS)]
    return [*program, op(give, refuse)]


def readable_places() -> list[str]:
    """Return the folders of Python, its packages and the C library, for `lock`."""
    system = [
        "/usr/lib",
        "/usr/lib64",
        "/lib",
        "/lib64",
        "/usr/local/lib",
        "/etc/ld.so.cache",
        "/etc/localtime",
    ]
    system += ["/usr/share/zoneinfo", "/dev/null", "/dev/urandom"]
    prefixes = {sys.prefix, sys.base_prefix, sys.exec_prefix}
    return [*system, *sorted(prefixes), ROOT, *package_places()]


# The grammar of text that may reach an `eval` in a verifier: literals and arithmetic, checked before
# evaluation.
#
# reasoning_gym gives answers, and some texts of rows, to Python's `eval` and to sympy's `parse_expr`, which
# is an `eval` too. `guard` puts a check before both, for every module of the package, so that a task of a
# later version is covered as well. A text that does not match raises ValueError where the evaluation would,
# and so scores as that task scores junk. Numbers and powers have bounds, so that a short text does not cost a
# whole time-out; whatever else takes long in sympy, the reward's time-out ends.


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
        raise NotInGrammar("it contains characters that are not allowed in a formula")
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
        raise NotInGrammar(f"{type(text).__name__} cannot be evaluated")
    check_literal(text)
    return builtins.eval(text.strip(), {"__builtins__": {}})


def _no_exec(*_: Any) -> None:
    raise NotInGrammar("verifiers do not run code")


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
    raise NotInGrammar(f"{type(node).__name__} is not allowed in an answer")


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
        raise NotInGrammar(f"an exponent could exceed {MAX_EXPONENT}")
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
            raise NotInGrammar(f"a number could have more than {MAX_BITS} bits")
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
