"""Draw sentences of the docs, the help texts and the error messages, to be read for their English.

python scripts/draw_sentences.py --seed "$(git rev-parse HEAD)"
python scripts/draw_sentences.py --seed ... --skip 30          # the thirty after those
"""

from __future__ import annotations

import argparse
import ast
import itertools
import random
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("docs", "help", "errors")
_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z`])")
_BOLD = re.compile(r"\*\*([^*`]+)\*\*")
_BULLET = re.compile(r"(?:[-*]|\d+\.) ")
_LEAST_WORDS = 6


def prose(page: Path) -> Iterator[str]:
    """The sentences of a page: neither code, nor tables, nor headings."""
    text = re.sub(r"```.*?```|<!--.*?-->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", _BOLD.sub(r"\1", text))
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[|#]|[-*] |\d+\. ))", text):
        if not re.match(r"\s*[|#!]", block):
            yield from _END.split(_BULLET.sub("", " ".join(block.split())))


def helps() -> Iterator[str]:
    """The sentences of the reference of the config, which `--help` shows, too."""
    for line in (ROOT / "docs/reference/config.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("| `"):
            yield from _END.split(line.strip("| ").split(" | ")[-1])


def messages(module: Path) -> Iterator[str]:
    """The messages of the raise statements of a module, with the names of what they format in braces."""
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            text = _text(node.exc.args[0])
            if text is not None:
                yield text


def _text(node: ast.expr) -> str | None:
    """A literal text, or None."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        parts = (
            part.value if isinstance(part, ast.Constant) else f"{{{ast.unparse(part.value)}}}"  # type: ignore[attr-defined]
            for part in node.values
        )
        return "".join(map(str, parts))
    return None


def drawn(kind: str, seed: str) -> list[tuple[str, str]]:
    """All sentences of a kind with their file, in an order that the seed gives."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    pages = [page for page in pages if "reference" not in page.parts]
    sources = {
        "docs": ((page, sentence) for page in pages for sentence in prose(page)),
        "help": ((ROOT / "docs/reference/config.md", sentence) for sentence in helps()),
        "errors": ((m, s) for m in sorted((ROOT / "src").rglob("*.py")) for s in messages(m)),
    }
    unique = {s: str(file.relative_to(ROOT)) for file, s in sources[kind] if len(s.split()) >= _LEAST_WORDS}
    found = sorted((file, sentence) for sentence, file in unique.items())
    random.Random(f"{seed} {kind}").shuffle(found)
    return found


def main() -> None:
    """Print them, numbered."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", required=True, help="the hash of a commit")
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--skip", type=int, default=0, help="sentences that were drawn before")
    given = parser.parse_args()
    rows = zip(*(drawn(kind, given.seed) for kind in KINDS), strict=False)
    taken = itertools.islice(itertools.chain.from_iterable(rows), given.skip, given.skip + given.count)
    for number, (file, sentence) in enumerate(taken, given.skip + 1):
        print(f"{number:3}. {file}\n     {sentence}")


if __name__ == "__main__":
    main()
