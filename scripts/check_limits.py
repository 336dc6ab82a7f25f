"""Size limits: what a reader has to hold in mind at once, and what a clone has to download.

function <= 80 lines, file <= 800 lines, <= 6 parameters (self and cls not counted), tracked files <= 12 MiB

A signature that others dictate says so in its first line: `def forward(  # signature: torch's flash op`.
Parameters of test_ functions are fixtures and cases that pytest fills in: they are not counted.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

MAX_FUNCTION_LINES = 80
MAX_FILE_LINES = 800
MAX_PARAMETERS = 6
MAX_TRACKED_BYTES = 12 * 2**20


def main() -> int:
    """Print every excess; 0 when there is none."""
    root = Path(__file__).resolve().parents[1]
    files = [path for path in tracked(root) if path.is_file()]
    excesses = [line for path in files if path.suffix == ".py" for line in check_python(path, root)]
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
    if len(rows) > MAX_FILE_LINES:
        yield f"{name}: {len(rows)} lines, at most {MAX_FILE_LINES}"
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


if __name__ == "__main__":
    sys.exit(main())
