"""How far one value travels through the source: what a reader visits who follows it from call to call.

    python scripts/follow_value.py                       # the walks of WALKS, in src
    python scripts/follow_value.py --source OTHER/src --list
    python scripts/follow_value.py --start MODULE:FUNCTION:VARIABLE [--until MODULE:FUNCTION]

The source is parsed, never run. A walk starts where FUNCTION binds VARIABLE. Statements are read in their
order, every branch of them but no `raise`, and a call is entered where it stands, depth first, if the value
is among its arguments and names, imports, annotations and constructor calls lead to a function of the
package. The walk ends after FUNCTION, or at the call of `--until`.

The value is the object itself and its parts: attributes, items and elements of it, containers of it, tensors
that torch makes of it, and what a function returns of these; a function without a body, as in a protocol, is
taken to return its arguments. A holder is an instance that was made with the value, or had it assigned to an
attribute: the value is in those attributes alone. No longer the value are parts that an annotation calls int,
float, bool, str, bytes, Path or Literal, results of arithmetic and comparisons, texts, and what a function
outside of the package and torch returns (except copies: `list`, `zip`, `replace` and their like).

room     a module that the walk enters: one of its functions was called with the value or a holder of it, and
         names the value or calls a function that does. The module of the start is one.
return   a function other than the first that the walk entered in this sense, and came out of again: the
         reader goes back to the caller. A function counts once. Those through which `--until` is reached are
         not left.
name     an identifier that the value or a holder of it bears anywhere in the walk: a variable, a parameter,
         an attribute that it is assigned to, a field of a record that it is passed for. Two variables of one
         identifier are one name. Parts that are only read, such as `run.train`, add none.

At abaf650 (`git worktree add OLD abaf650`, then with `--source OLD/src`):

    config: 39 rooms, 142 returns, 84 names
    groups: 18 rooms, 73 returns, 51 names
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

WALKS = {
    "config": ("lockstep.cli.train:start:command", "lockstep.models.load:load_model"),
    "groups": ("lockstep.loops.rl:train:sampled", None),
}
"""Name -> where the value starts, and the function that ends the walk when it is called."""

COPIES = frozenset(
    {
        *(
            "list",
            "tuple",
            "set",
            "frozenset",
            "dict",
            "zip",
            "enumerate",
            "sorted",
            "reversed",
            "iter",
            "next",
        ),
        *("map", "filter", "max", "min", "chain", "islice", "copy", "deepcopy", "replace", "asdict", "cast"),
        *("gather", "batched"),
    }
)
"""Functions outside of the package whose result is, or holds, their argument."""

PLAIN = frozenset({"int", "float", "bool", "str", "bytes", "Path"})
"""Types of plain values."""

VALUE, HOLDER = 2, 1
Function = ast.FunctionDef | ast.AsyncFunctionDef


def main(argv: list[str]) -> int:
    """Print the counts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--source", type=Path, default=Path(__file__).resolve().parents[1] / "src")
    parser.add_argument(
        "--start", metavar="MODULE:FUNCTION:VARIABLE", help="another walk than those of WALKS"
    )
    parser.add_argument("--until", metavar="MODULE:FUNCTION", help="the call that ends it")
    parser.add_argument("--list", action="store_true", help="rooms, functions and names, too")
    given = parser.parse_args(argv)
    walks = {"walk": (given.start, given.until)} if given.start else WALKS
    for name, (start, until) in walks.items():
        walk = Walk(Source(given.source), until=until)
        try:
            walk.run(start)
        except LookupError as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 1
        print(f"{name}: {len(walk.rooms)} rooms, {walk.returns} returns, {len(walk.names)} names")
        if given.list:
            print("  rooms: " + " ".join(walk.rooms))
            print("  functions: " + " ".join(walk.functions))
            print("  names: " + " ".join(sorted(walk.names)))
    return 0


@dataclass(eq=False)
class Module:
    """A parsed file: its definitions, and what its imports name."""

    name: str
    tree: ast.Module
    defined: dict[str, ast.stmt]
    imports: dict[str, str]
    """Name in this file -> "module" or "module:name"."""


@dataclass(eq=False)
class Definition:
    """A function or class, with its place."""

    module: Module
    node: Function | ast.ClassDef
    owner: Definition | None = None
    """The class of a method."""

    @property
    def label(self) -> str:
        """module:Class.name"""
        inside = f"{self.owner.node.name}." if self.owner else ""
        return f"{self.module.name}:{inside}{self.node.name}"


class Source:
    """The modules below a folder, and what names in them lead to."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._modules: dict[str, Module | None] = {}
        self._definitions: dict[ast.AST, Definition] = {}

    def module(self, name: str) -> Module | None:
        """The parsed module; None if it is not below the folder."""
        if name not in self._modules:
            base = self.root.joinpath(*name.split("."))
            files = [f for f in (base.with_suffix(".py"), base / "__init__.py") if f.is_file()]
            self._modules[name] = self._parse(name, files[0]) if files else None
        return self._modules[name]

    def _parse(self, name: str, file: Path) -> Module:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        defined: dict[str, ast.stmt] = {
            node.name: node for node in tree.body if isinstance(node, (ast.ClassDef, Function))
        }
        imports = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    path = whole if self._is_module(whole) else f"{node.module}:{alias.name}"
                    imports[alias.asname or alias.name] = path
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    imports[alias.asname or alias.name] = alias.name
        return Module(name, tree, defined, imports)

    def _is_module(self, name: str) -> bool:
        base = self.root.joinpath(*name.split("."))
        return base.with_suffix(".py").is_file() or (base / "__init__.py").is_file()

    def define(
        self, module: Module, node: Function | ast.ClassDef, owner: Definition | None = None
    ) -> Definition:
        """The one Definition of a node."""
        return self._definitions.setdefault(node, Definition(module, node, owner))

    def named(self, module: Module, name: str) -> Definition | None:
        """What a bare name in `module` leads to."""
        if isinstance(node := module.defined.get(name), (ast.ClassDef, Function)):
            return self.define(module, node)
        return self.at(module.imports.get(name, ""))

    def at(self, path: str) -> Definition | None:
        """The definition at "module:name" or "module:Class.method"."""
        where, _, name = path.partition(":")
        if not name or (module := self.module(where)) is None:
            return None
        head, _, rest = name.partition(".")
        found = self.named(module, head)
        return self.member(found, rest) if found and rest else found

    def member(self, kind: Definition | None, name: str) -> Definition | None:
        """The method or property of a class, inherited ones included."""
        for owner in self.lineage(kind):
            for node in owner.node.body:
                if isinstance(node, Function) and node.name == name:
                    return self.define(owner.module, node, owner)
        return None

    def lineage(self, kind: Definition | None) -> Iterator[Definition]:
        """A class and its bases in the package."""
        if kind is None or not isinstance(kind.node, ast.ClassDef):
            return
        yield kind
        for base in kind.node.bases:
            yield from self.lineage(self.annotated(kind.module, base)[0])

    def annotated(self, module: Module, node: ast.expr | None) -> tuple[Definition | None, bool]:
        """The class that an annotation names, and whether it is that of elements of a container."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node = ast.parse(node.value, mode="eval").body
        if isinstance(node, ast.Name):
            found = self.named(module, node.id)
            return (found if found and isinstance(found.node, ast.ClassDef) else None), False
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            return self.at(f"{module.imports.get(node.value.id, '')}:{node.attr}"), False
        if isinstance(node, ast.BinOp):
            left = self.annotated(module, node.left)
            return left if left[0] else self.annotated(module, node.right)
        if isinstance(node, ast.Subscript):
            plain, _ = self.annotated(module, node.value)
            if plain is not None:
                return plain, False
            inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            for part in reversed(inner):
                found, _ = self.annotated(module, part)
                if found is not None:
                    direct = ast.unparse(node.value).split(".")[-1] in ("Annotated", "Final", "ClassVar")
                    return found, not direct
        return None, False

    def plain(self, module: Module, node: ast.expr | None) -> bool:
        """Whether an annotation says number, text, path or flag, also by the name of an alias."""
        if isinstance(node, ast.Constant):
            return node.value is None or (
                isinstance(node.value, str) and self.plain(module, ast.parse(node.value, mode="eval").body)
            )
        if isinstance(node, ast.BinOp):
            return self.plain(module, node.left) and self.plain(module, node.right)
        if isinstance(node, ast.Subscript):
            outer = ast.unparse(node.value).split(".")[-1]
            first = node.slice.elts[0] if isinstance(node.slice, ast.Tuple) else node.slice
            return outer == "Literal" or (outer == "Annotated" and self.plain(module, first))
        if not isinstance(node, ast.Name):
            return False
        if node.id in PLAIN:
            return True
        where, _, name = module.imports.get(node.id, f"{module.name}:{node.id}").partition(":")
        home = self.module(where)
        for statement in home.tree.body if home else ():
            if isinstance(statement, ast.Assign) and getattr(statement.targets[0], "id", "") == name:
                return self.plain(home, statement.value)
        return False

    def attribute_plain(self, kind: Definition | None, name: str) -> bool:
        """Whether the class says that an attribute is a plain value."""
        for owner in self.lineage(kind):
            for node in owner.node.body:
                if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == name:
                    return self.plain(owner.module, node.annotation)
        return False

    def attribute_kind(self, kind: Definition | None, name: str) -> tuple[Definition | None, bool]:
        """The class of an attribute: its annotation in the class body, or what __init__ assigns to it."""
        for owner in self.lineage(kind):
            for node in owner.node.body:
                if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == name:
                    return self.annotated(owner.module, node.annotation)
                if isinstance(node, Function) and node.name == "__init__":
                    found = self._assigned_kind(owner, node, name)
                    if found[0] is not None:
                        return found
        return None, False

    def _assigned_kind(self, owner: Definition, init: Function, name: str) -> tuple[Definition | None, bool]:
        arguments = {a.arg: a.annotation for a in (*init.args.args, *init.args.kwonlyargs)}
        for node in ast.walk(init):
            if isinstance(node, ast.AnnAssign) and getattr(node.target, "attr", "") == name:
                return self.annotated(owner.module, node.annotation)
            if not isinstance(node, ast.Assign) or getattr(node.targets[0], "attr", "") != name:
                continue
            for part in ast.walk(node.value):
                if isinstance(part, ast.Name) and arguments.get(part.id) is not None and part is node.value:
                    return self.annotated(owner.module, arguments[part.id])
                if isinstance(part, ast.Call):
                    found, _ = self.annotated(owner.module, part.func)
                    if found is not None:
                        return found, False
        return None, False


@dataclass(frozen=True)
class Found:
    """What is known of an expression."""

    level: int = 0
    """VALUE, HOLDER, or 0: neither."""
    kind: Definition | None = None
    """Its class."""
    element: bool = False
    """The class is that of its elements."""

    def elements(self) -> Found:
        """What iterating over it, or an item of it, gives."""
        return Found(self.level, self.kind)


@dataclass
class Frame:
    """A function that is being read."""

    definition: Definition
    variables: dict[str, Found] = field(default_factory=dict)
    locals: dict[str, Function] = field(default_factory=dict)
    result: Found = field(default_factory=Found)
    named: bool = False
    """Whether it names the value, or leads to a function that does."""


class Reached(Exception):
    """The walk is at `until`."""


class Walk:
    """One walk; see the module for what it counts."""

    def __init__(self, source: Source, *, until: str | None = None) -> None:
        self.source = source
        self.rooms: dict[str, None] = {}
        self.functions: dict[str, None] = {}
        self.returns = 0
        self.names: set[str] = set()
        self._held: dict[str, dict[str, int]] = {}
        self._read: dict[tuple[object, ...], Found] = {}
        self._left: set[Definition] = set()
        self._frames: list[Frame] = []
        self._start: tuple[Definition, str] | None = None
        self._until = None if until is None else source.at(until)
        if until is not None and self._until is None:
            raise LookupError(f"no function {until}; give --until another")

    def run(self, start: str) -> None:
        """Walk from "module:function:variable".

        Raises:
            LookupError: there is no such function or variable, or the walk never comes to `until`.
        """
        path, _, variable = start.rpartition(":")
        first = self.source.at(path)
        if first is None or not isinstance(first.node, Function):
            raise LookupError(f"no function {path}; give --start another")
        self._start = (first, variable)
        frame = self._frame(first, {variable: Found(VALUE)} if variable in _parameters(first.node) else {})
        if variable in frame.variables:
            self._bear(variable, frame)
        try:
            self._body(first.node.body, frame)
        except Reached:
            for waiting in self._frames:
                self._count(waiting)
        else:
            if self._until is not None:
                raise LookupError(f"the walk from {start} never comes to {self._until.label}")
            self._count(frame)
        if variable not in self.names:
            raise LookupError(f"{path} binds no variable {variable!r}")

    # -- functions

    def _frame(self, definition: Definition, given: dict[str, Found]) -> Frame:
        node = definition.node
        assert isinstance(node, Function)
        frame = Frame(definition)
        for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            kind, element = self.source.annotated(definition.module, argument.annotation)
            frame.variables[argument.arg] = Found(0, kind, element)
        if definition.owner is not None and node.args.args:
            frame.variables[node.args.args[0].arg] = Found(0, definition.owner)
        for name, found in given.items():
            known = frame.variables.get(name, Found())
            kind, element = (found.kind, found.element) if found.kind else (known.kind, known.element)
            frame.variables[name] = Found(found.level, kind, element)
        self._frames.append(frame)
        return frame

    def _enter(self, definition: Definition, given: dict[str, Found]) -> Found:
        """Read a function with these arguments, once; what it returns."""
        node = definition.node
        assert isinstance(node, Function)
        if definition is self._until:
            raise Reached
        for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            if a.arg in given and self.source.plain(definition.module, a.annotation):
                given = given | {a.arg: Found()}
        levels = tuple(sorted((name, found.level) for name, found in given.items() if found.level))
        if (definition, levels) in self._read:
            return self._read[definition, levels]
        self._read[definition, levels] = self._returned(definition)
        frame = self._frame(definition, given)
        for name, found in given.items():
            if found.level and name not in ("self", "cls"):
                self._bear(name, frame)
        self._body(node.body, frame)
        self._frames.pop()
        if frame.named:
            self._count(frame)
            self._frames[-1].named = True
            if definition not in self._left and all(f.definition is not definition for f in self._frames):
                self._left.add(definition)
                self.returns += 1
        declared = self._returned(definition)
        kind = (
            (declared.kind, declared.element) if declared.kind else (frame.result.kind, frame.result.element)
        )
        plain = self.source.plain(definition.module, node.returns)
        self._read[definition, levels] = Found(0 if plain else frame.result.level, *kind)
        return self._read[definition, levels]

    def _returned(self, definition: Definition) -> Found:
        assert isinstance(definition.node, Function)
        return Found(0, *self.source.annotated(definition.module, definition.node.returns))

    def _count(self, frame: Frame) -> None:
        self.rooms[frame.definition.module.name] = None
        self.functions[frame.definition.label] = None

    def _bear(self, name: str, frame: Frame) -> None:
        self.names.add(name)
        frame.named = True

    # -- statements

    def _body(self, body: Sequence[ast.stmt], frame: Frame) -> None:
        for node in body:
            self._statement(node, frame)

    def _statement(self, node: ast.stmt, frame: Frame) -> None:
        if isinstance(node, Function):
            frame.locals[node.name] = node
        elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            found = self._expression(node.value, frame) if node.value else Found()
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if isinstance(node, ast.AnnAssign):
                found = Found(found.level, *self.source.annotated(frame.definition.module, node.annotation))
            for target in targets:
                if isinstance(node, ast.AugAssign):
                    old = self._expression(target, frame)
                    found = Found(max(old.level, found.level), old.kind, old.element)
                self._assign(target, found, frame, node.value)
        elif isinstance(node, ast.Raise):
            return
        elif isinstance(node, (ast.For, ast.AsyncFor)):
            self._loop(node.target, node.iter, frame)
            self._body(node.body + node.orelse, frame)
        elif isinstance(node, (ast.With, ast.AsyncWith)):
            for item in node.items:
                found = self._expression(item.context_expr, frame)
                if item.optional_vars is not None:
                    self._assign(item.optional_vars, found, frame, None)
            self._body(node.body, frame)
        elif isinstance(node, ast.Return):
            self._return(node.value, frame)
        elif isinstance(node, ast.Match):
            found = self._expression(node.subject, frame)
            for case in node.cases:
                for part in ast.walk(case.pattern):
                    if isinstance(part, (ast.MatchAs, ast.MatchStar)) and part.name:
                        self._assign(ast.Name(part.name), found.elements(), frame, None)
                self._body(case.body, frame)
        else:
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.stmt):
                    self._statement(child, frame)
                elif isinstance(child, ast.ExceptHandler):
                    self._body(child.body, frame)
                elif isinstance(child, ast.expr):
                    self._expression(child, frame)

    def _return(self, value: ast.expr | None, frame: Frame) -> None:
        if value is not None:
            found = self._expression(value, frame)
            kind = (found.kind, found.element) if found.kind else (frame.result.kind, frame.result.element)
            frame.result = Found(max(frame.result.level, found.level), *kind)

    def _loop(self, target: ast.expr, values: ast.expr, frame: Frame) -> None:
        """Bind the variables of a for; those of zip and enumerate each to its own values."""
        found = self._expression(values, frame)
        called = getattr(values.func, "id", "") if isinstance(values, ast.Call) else ""
        plain = isinstance(values, ast.Call) and not any(isinstance(a, ast.Starred) for a in values.args)
        if plain and called in ("zip", "enumerate") and isinstance(target, ast.Tuple):
            assert isinstance(values, ast.Call)
            parts = [self._expression(part, frame) for part in values.args]
            if called == "enumerate":
                parts = [Found(), parts[0]]
            for name, part in zip(target.elts, parts, strict=False):
                self._assign(name, part.elements(), frame, None)
        else:
            self._assign(target, found.elements(), frame, None)

    def _assign(self, target: ast.expr, found: Found, frame: Frame, value: ast.expr | None) -> None:
        if isinstance(target, ast.Name):
            if self._start == (frame.definition, target.id):
                found = Found(VALUE, found.kind, found.element)
            if found.level and target.id != "_":
                self._bear(target.id, frame)
            frame.variables[target.id] = found
        elif isinstance(target, ast.Starred):
            self._assign(target.value, found, frame, None)
        elif isinstance(target, (ast.Tuple, ast.List)):
            parts = value.elts if isinstance(value, ast.Tuple) else []
            for place, part in enumerate(target.elts):
                own = self._expression(parts[place], frame) if len(parts) == len(target.elts) else found
                self._assign(part, own.elements(), frame, None)
        elif isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name) and found.level:
            self._assign(target.value, Found(found.level, found.kind, True), frame, None)
        elif isinstance(target, ast.Attribute) and found.level:
            self._hold(self._expression(target.value, frame).kind, target.attr, found.level)
            self._bear(target.attr, frame)

    def _hold(self, kind: Definition | None, name: str, level: int) -> None:
        for owner in self.source.lineage(kind):
            held = self._held.setdefault(owner.label, {})
            held[name] = max(held.get(name, 0), level)

    # -- expressions

    def _expression(self, node: ast.expr, frame: Frame) -> Found:
        found = self._look(node, frame)
        frame.named |= found.level == VALUE and isinstance(node, (ast.Name, ast.Attribute))
        return found

    def _look(self, node: ast.expr, frame: Frame) -> Found:
        if isinstance(node, ast.Name):
            return frame.variables.get(node.id, Found())
        if isinstance(node, ast.Attribute):
            return self._attribute(node, frame)
        if isinstance(node, ast.Call):
            return self._call(node, frame)
        if isinstance(node, ast.Subscript):
            self._expression(node.slice, frame)
            return self._expression(node.value, frame).elements()
        if isinstance(node, (ast.Await, ast.Starred)):
            return self._expression(node.value, frame)
        if isinstance(node, (ast.Yield, ast.YieldFrom)):
            self._return(node.value, frame)
            return Found()
        if isinstance(node, ast.NamedExpr):
            found = self._expression(node.value, frame)
            self._assign(node.target, found, frame, None)
            return found
        if isinstance(node, ast.IfExp):
            self._expression(node.test, frame)
            return self._either([node.body, node.orelse], frame)
        if isinstance(node, ast.BoolOp):
            return self._either(node.values, frame)
        if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
            return self._either(node.elts, frame)
        if isinstance(node, ast.Dict):
            return self._either([part for part in (*node.keys, *node.values) if part], frame)
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)):
            for part in node.generators:
                self._loop(part.target, part.iter, frame)
                for condition in part.ifs:
                    self._expression(condition, frame)
            made = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
            return self._either(made, frame)
        if isinstance(node, ast.Lambda):
            self._expression(node.body, frame)
            return Found()
        inner = [self._expression(c, frame) for c in ast.iter_child_nodes(node) if isinstance(c, ast.expr)]
        joined = isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr)
        return max(inner, key=lambda found: found.level, default=Found()) if joined else Found()

    def _either(self, nodes: Sequence[ast.expr], frame: Frame) -> Found:
        """The one of several that is most of the value."""
        found = [self._expression(node, frame) for node in nodes]
        level = max((one.level for one in found), default=0)
        best = [one for one in found if one.level == level and one.kind] or [Found(level)]
        return Found(level, best[0].kind, best[0].element)

    def _attribute(self, node: ast.Attribute, frame: Frame) -> Found:
        base = self._expression(node.value, frame)
        kind, element = self.source.attribute_kind(base.kind, node.attr)
        held = [self._held.get(owner.label, {}) for owner in self.source.lineage(base.kind)]
        level = VALUE if base.level == VALUE else max((h.get(node.attr, 0) for h in held), default=0)
        if self.source.attribute_plain(base.kind, node.attr):
            level = 0
        member = self.source.member(base.kind, node.attr)
        if member is not None and any("property" in ast.unparse(d) for d in member.node.decorator_list):
            got = self._enter(member, {"self": base}) if base.level or self._holds(base.kind) else Found()
            return Found(max(level, got.level), got.kind, got.element)
        return Found(level, kind, element)

    def _holds(self, kind: Definition | None) -> bool:
        return any(self._held.get(owner.label) for owner in self.source.lineage(kind))

    def _call(self, node: ast.Call, frame: Frame) -> Found:
        base, callee = Found(), None
        if isinstance(node.func, ast.Attribute):
            base = self._expression(node.func.value, frame)
            callee = self.source.member(base.kind, node.func.attr) or self._class_or_module(node.func, frame)
        elif isinstance(node.func, ast.Name):
            if (inner := frame.locals.get(node.func.id)) is not None:
                callee = self.source.define(frame.definition.module, inner)
            elif node.func.id not in frame.variables:
                callee = self.source.named(frame.definition.module, node.func.id)
        else:
            self._expression(node.func, frame)
        positional = [self._expression(part, frame) for part in node.args]
        keywords = {part.arg: self._expression(part.value, frame) for part in node.keywords}
        level = max([0, *(f.level for f in positional), *(f.level for f in keywords.values())])
        if callee is None and isinstance(node.func, (ast.Name, ast.Attribute)):
            base = self._expression(node.func, frame)
            callee = self.source.member(base.kind, "__call__")
        if callee is None:
            return self._outside(node, [base, *positional, *keywords.values()], frame)
        if isinstance(callee.node, ast.ClassDef):
            return self._construct(callee, positional, keywords, frame)
        static = any("staticmethod" in ast.unparse(d) for d in callee.node.decorator_list)
        if callee.owner is not None and not static:
            positional.insert(0, base)
        given = _bound(callee.node, positional, keywords)
        local = isinstance(node.func, ast.Name) and node.func.id in frame.locals
        if local:
            given = frame.variables | given
        if level or base.level or self._holds(base.kind) or local:
            return self._enter(callee, given)
        return self._returned(callee)

    def _class_or_module(self, node: ast.Attribute, frame: Frame) -> Definition | None:
        """The function of `module.function(...)`, `Class.method(...)` and `super().method(...)`."""
        module = frame.definition.module
        if isinstance(node.value, ast.Call) and getattr(node.value.func, "id", "") == "super":
            bases = list(self.source.lineage(frame.definition.owner))[1:]
            return next((m for b in bases if (m := self.source.member(b, node.attr))), None)
        text = ast.unparse(node.value)
        if text.partition(".")[0] in frame.variables:
            return None
        if (path := module.imports.get(text)) is not None and ":" not in path:
            return self.source.at(f"{path}:{node.attr}")
        return self.source.member(self.source.named(module, text), node.attr)

    def _construct(
        self, kind: Definition, positional: list[Found], keywords: dict[str | None, Found], frame: Frame
    ) -> Found:
        init = self.source.member(kind, "__init__")
        level = max([0, *(f.level for f in positional), *(f.level for f in keywords.values())])
        if init is not None:
            if level:
                assert isinstance(init.node, Function)
                self._enter(init, _bound(init.node, [Found(0, kind), *positional], keywords))
        else:
            fields = [
                part.target.id
                for owner in reversed(list(self.source.lineage(kind)))
                for part in owner.node.body
                if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
            ]
            for name, found in [*zip(fields, positional, strict=False), *keywords.items()]:
                if found.level and name is not None:
                    self._hold(kind, name, found.level)
                    self._bear(name, frame)
        return Found(HOLDER if level else 0, kind)

    def _outside(self, node: ast.Call, found: list[Found], frame: Frame) -> Found:
        """A call that leads out of the package, or nowhere: copies, methods of the value, the rest."""
        base = found[0]
        called = ast.unparse(node.func).split(".")[-1]
        if called in ("enter_context", "partial", "submit", "run") and len(found) > 1:
            return found[1]
        if base.level == VALUE and isinstance(node.func, ast.Attribute):
            return Found(VALUE, base.kind, base.element)
        if called in ("append", "extend", "add", "put", "update") and isinstance(node.func, ast.Attribute):
            grown = max(f.level for f in found)
            if grown:
                best = max(found[1:], key=lambda f: f.level)
                self._assign(node.func.value, Found(grown, best.kind, True), frame, None)
        library = frame.definition.module.imports.get(ast.unparse(node.func).split(".")[0])
        if (called in COPIES or library == "torch") and len(found) > 1:
            level = max(f.level for f in found)
            return Found(level, *next(((f.kind, f.element) for f in found[1:] if f.kind), (None, False)))
        return Found()


def _is_empty(node: Function) -> bool:
    """Whether a body is a docstring and `...`, as in a protocol."""
    return all(isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant) for part in node.body)


def _parameters(node: Function) -> list[str]:
    return [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]


def _bound(node: Function, positional: list[Found], keywords: dict[str | None, Found]) -> dict[str, Found]:
    """Parameter -> argument; what * and ** collect is bound to their names."""
    names = [a.arg for a in (*node.args.posonlyargs, *node.args.args)]
    given = dict(zip(names, positional, strict=False))
    if node.args.vararg and len(positional) > len(names):
        given[node.args.vararg.arg] = max(positional[len(names) :], key=lambda f: f.level)
    for name, found in keywords.items():
        if name in _parameters(node):
            given[name] = found
        elif node.args.kwarg and name is not None:
            given[node.args.kwarg.arg] = found
    return given


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
