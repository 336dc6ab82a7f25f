"""Count the words of the hand-written docs: README.md and docs/, without what scripts/gen_docs.py writes.

python scripts/count_words.py           # exit status 1 above the limit
python scripts/count_words.py --pages   # and each page's share
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

MAX_WORDS = 55_000
GENERATED = "<!-- Written by scripts/gen_docs.py"
_BLOCK = re.compile(r"<!-- (\w+):begin -->.*?<!-- \1:end -->", re.DOTALL)


def words(page: str) -> int:
    """Return the hand-written words of a page: those between blanks, tables and code blocks included."""
    return 0 if GENERATED in page else len(_BLOCK.sub("", page).split())


def main(argv: list[str]) -> int:
    """Print the sum; 1 above the limit."""
    root = Path(__file__).resolve().parents[1]
    pages = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    counts = {path.relative_to(root): words(path.read_text(encoding="utf-8")) for path in pages}
    if "--pages" in argv:
        for path, count in sorted(counts.items(), key=lambda item: item[1]):
            print(f"{count:6,} {path}")
    total = sum(counts.values())
    print(f"{total:,} words in {sum(map(bool, counts.values()))} hand-written pages, at most {MAX_WORDS:,}")
    return int(total > MAX_WORDS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
