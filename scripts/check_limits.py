"""Size limits: what a reader has to hold in mind at once, and what a clone has to download.

function <= 80 lines and 99 of 100 <= 50, file <= 600 lines in src and 800 elsewhere,
<= 6 parameters (self and cls not counted),
lines of raise statements <= 6.5 % of the code lines of src,
code lines of the page of lockstep view (what serves and renders it, templates, script, styles) <= 1,500,
tracked files <= 12 MiB

A signature that others dictate says so in its first line: `def forward(  # signature: torch's flash op`.
Parameters of test_ functions are fixtures and cases that pytest fills in: they are not counted.

--count prints instead how large the packages of src are: lines of code (without blank lines, comments
and docstrings; of .py files and HTML templates), of docstrings, of comments, and all lines; and
how many lines belong to raise statements.
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass
from pathlib import Path

MAX_FUNCTION_LINES = 80
MAX_FILE_LINES = 800
MAX_SOURCE_FILE_LINES = 600
MAX_PARAMETERS = 6
MAX_TRACKED_BYTES = 12 * 2**20
MAX_P99_LINES = 50
MAX_RAISE_SHARE = 0.065
MAX_PAGE_LINES = 1500
PAGE = (
    "cli/view.py",
    *(f"view/{name}" for name in ("server.py", "render.py", "export.py", "templates", "static")),
)
"""Below src/lockstep, but for the folders in static, which are vendored."""
_COMMENTS = ("//", "/*", "{#")
PACKAGES = ("lockstep", "lockstep_lab")


def main(argv: list[str]) -> int:
    """Print every excess, or with --count the sizes; 0 when there is no excess."""
    root = Path(__file__).resolve().parents[1]
    files = [path for path in tracked(root) if path.is_file()]
    if argv == ["--count"]:
        counted = {name: count_packages(files, root / "src" / name) for name in PACKAGES}
        for name, packages in counted.items():
            print(f"{name}\n{table(packages)}\n")
        sums = {name: sum(packages.values(), Lines()) for name, packages in counted.items()}
        print(table(sums))
        raised, code = raised_lines(files, root)
        print(f"\nraise statements: {raised:,} lines, {raised / code:.1%} of the code")
        return 0
    excesses = [line for path in files if path.suffix == ".py" for line in check_python(path, root)]
    excesses += check_p99(files, root / "src")
    excesses += check_raised(*raised_lines(files, root))
    excesses += check_page(files, root / "src" / "lockstep")
    excesses += check_bytes({path: path.stat().st_size for path in files}, root)
    print("\n".join(excesses) if excesses else f"limits hold in {len(files)} tracked files")
    return 1 if excesses else 0


def tracked(root: Path) -> list[Path]:
    """Files that git tracks."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, check=True, text=True)
    return [root / name for name in listed.stdout.split("\0") if name]


def check_python(path: Path, root: Path) -> Iterator[str]:
    """Excesses of one Python file."""
    text = path.read_text(encoding="utf-8")
    name = path.relative_to(root)
    rows = text.splitlines()
    most = MAX_SOURCE_FILE_LINES if is_source(path, root) else MAX_FILE_LINES
    if len(rows) > most:
        yield f"{name}: {len(rows)} lines, at most {most}"
    for node in ast.walk(ast.parse(text, filename=str(path))):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        if length > MAX_FUNCTION_LINES:
            yield f"{name}:{node.lineno}: {node.name} has {length} lines, at most {MAX_FUNCTION_LINES}"
        count = len(parameters(node))
        excused = node.name.startswith("test_") or "# signature: " in rows[node.lineno - 1]
        if count > MAX_PARAMETERS and not excused:
            yield f"{name}:{node.lineno}: {node.name} has {count} parameters, at most {MAX_PARAMETERS}"


def check_p99(files: Iterable[Path], source: Path) -> Iterator[str]:
    """The excess of the 99th percentile: the longest function but for the longest one of each hundred."""
    lengths = sorted(
        (node.end_lineno or node.lineno) - node.lineno + 1
        for path in files
        if source in path.parents and path.suffix == ".py"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    )
    if lengths and (p99 := lengths[-1 - len(lengths) // 100]) > MAX_P99_LINES:
        yield f"src: the 99th percentile of function lengths is {p99} lines, at most {MAX_P99_LINES}"


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Names of a function's parameters, without a leading self or cls and without *args and **kwargs."""
    positional = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
    if positional[:1] in (["self"], ["cls"]):
        positional = positional[1:]
    return positional + [argument.arg for argument in node.args.kwonlyargs]


def check_bytes(sizes: dict[Path, int], root: Path) -> Iterator[str]:
    """The excess of all tracked files together, with the largest of them."""
    total = sum(sizes.values())
    if total > MAX_TRACKED_BYTES:
        largest = sorted(sizes, key=lambda path: -sizes[path])[:5]
        listed = ", ".join(f"{path.relative_to(root)} {sizes[path] / 2**20:.1f}" for path in largest)
        limit = MAX_TRACKED_BYTES // 2**20
        yield f"tracked files have {total / 2**20:.1f} MiB, at most {limit}; largest: {listed}"


@dataclass(frozen=True)
class Lines:
    """How many lines of a kind there are."""

    code: int = 0
    docstring: int = 0
    comment: int = 0
    all: int = 0

    def __add__(self, other: Lines) -> Lines:
        return Lines(*(ours + theirs for ours, theirs in zip(astuple(self), astuple(other), strict=True)))


def count(text: str, *, python: bool = True) -> Lines:
    """Count the lines of a file, each as one kind: a line of code with a comment behind it is code, and a
    string that is a statement by itself, also behind an attribute, is a docstring."""
    rows = text.splitlines()
    blank = sum(not row.strip() for row in rows)
    if not python:
        comments = sum(row.lstrip().startswith(_COMMENTS) for row in rows)
        return Lines(code=len(rows) - blank - comments, comment=comments, all=len(rows))
    docs = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
        if rows[line - 1].strip()
    }
    comments = sum(
        token.type == tokenize.COMMENT and token.line.lstrip().startswith("#")
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
    )
    return Lines(
        code=len(rows) - blank - len(docs) - comments, docstring=len(docs), comment=comments, all=len(rows)
    )


def raised_lines(files: Iterable[Path], root: Path) -> tuple[int, int]:
    """(Lines of raise statements, lines of code) of the packages."""
    texts = [path.read_text(encoding="utf-8") for path in files if is_source(path, root)]
    return sum(map(raise_lines, texts)), sum(count(text).code for text in texts)


def check_raised(raised: int, code: int) -> Iterator[str]:
    """The excess of the lines of raise statements: kinds of errors that recur are functions, and refused
    combinations of settings are rows of a table."""
    if raised > MAX_RAISE_SHARE * code:
        yield (
            f"src: {raised:,} of {code:,} lines of code belong to raise statements, at most "
            f"{MAX_RAISE_SHARE:.1%}; see src/lockstep/common_errors.py and config/rules.py"
        )


def check_page(files: Iterable[Path], source: Path) -> Iterator[str]:
    """The excess of the lines of the page of lockstep view."""
    places = [source / name for name in PAGE]
    of = [path for path in files if path in places or path.parent in places]
    lines = sum(count(path.read_text(encoding="utf-8"), python=path.suffix == ".py").code for path in of)
    if lines > MAX_PAGE_LINES:
        yield f"{source.name}/view: the page has {lines:,} lines of code, at most {MAX_PAGE_LINES:,}"


def is_source(path: Path, root: Path) -> bool:
    """Whether a file is Python of one of the packages."""
    return path.suffix == ".py" and any(root / "src" / name in path.parents for name in PACKAGES)


def raise_lines(text: str) -> int:
    """Count the lines of raise statements."""
    return sum(
        (node.end_lineno or node.lineno) - node.lineno + 1
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Raise)
    )


def count_packages(files: Iterable[Path], source: Path) -> dict[str, Lines]:
    """The lines of each package below `source`; "." is the files beside the packages."""
    packages: dict[str, Lines] = {}
    for path in files:
        if source in path.parents and path.suffix in (".py", ".html", ".j2"):
            name = path.relative_to(source).parts[0] if path.parent != source else "."
            lines = count(path.read_text(encoding="utf-8"), python=path.suffix == ".py")
            packages[name] = packages.get(name, Lines()) + lines
    return packages


def table(packages: Mapping[str, Lines]) -> str:
    """One row per package, the largest first, and their sum."""
    rows = sorted(packages.items(), key=lambda row: -row[1].code)
    rows.append(("all", sum(packages.values(), Lines())))
    head = f"{'package':<12} {'code':>7} {'docstring':>9} {'comment':>8} {'lines':>7}"
    return "\n".join(
        [
            head,
            *(f"{name:<12} {n.code:>7,} {n.docstring:>9,} {n.comment:>8,} {n.all:>7,}" for name, n in rows),
        ]
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
