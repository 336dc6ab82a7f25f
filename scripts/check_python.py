"""What a later patch release of the lowest supported Python added must not be used.

pyproject.toml admits Python 3.11.0. mypy knows what came with 3.12, but neither mypy nor ruff nor
vermin knows what came with 3.11.4: on Debian 12, with 3.11.2, TarFile.extractall(filter=) is a TypeError.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

KEYWORDS = {
    ("extract", "filter"): "3.11.4",
    ("extractall", "filter"): "3.11.4",
    ("unpack_archive", "filter"): "3.11.4",
    ("getaddresses", "strict"): "3.11.10",
    ("parseaddr", "strict"): "3.11.10",
}
"""(function or method, keyword): the release that added it, as the library reference says."""

NAMES = {
    "data_filter": "3.11.4",
    "tar_filter": "3.11.4",
    "fully_trusted_filter": "3.11.4",
    "extraction_filter": "3.11.4",
    "FilterError": "3.11.4",
    "SetReparseDeferralEnabled": "3.11.9",
    "GetReparseDeferralEnabled": "3.11.9",
    "verify_generated_headers": "3.11.10",
    "ALLOW_MISSING": "3.11.13",
}
"""Functions, classes and attributes, by name: what type they belong to cannot be told from the text."""


def check(text: str, name: str) -> Iterator[str]:
    """Yield what one file uses of KEYWORDS and NAMES, with its line."""
    for node in ast.walk(ast.parse(text, filename=name)):
        if isinstance(node, ast.Call):
            function = getattr(node.func, "attr", getattr(node.func, "id", ""))
            for keyword in node.keywords:
                if since := KEYWORDS.get((function, keyword.arg or "")):
                    yield f"{name}:{node.lineno}: {function}({keyword.arg}=) came with Python {since}"
        elif isinstance(node, (ast.Attribute, ast.ImportFrom)):
            used = [node.attr] if isinstance(node, ast.Attribute) else [alias.name for alias in node.names]
            for word in used:
                if since := NAMES.get(word):
                    yield f"{name}:{node.lineno}: {word} came with Python {since}"


def main() -> int:
    """Check every Python file of src, and print what is found; 0 if nothing is."""
    root = Path(__file__).resolve().parents[1]
    files = sorted((root / "src").rglob("*.py"))
    found = [
        line
        for path in files
        for line in check(path.read_text(encoding="utf-8"), str(path.relative_to(root)))
    ]
    print("\n".join(found) if found else f"{len(files)} files run on Python 3.11.0")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
