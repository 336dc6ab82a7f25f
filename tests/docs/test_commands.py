"""Every command in README.md and docs/ is executed here, or listed with its last real output.

A fenced ```console or ```bash block follows an HTML comment that says which:

    <!-- test: run -->                  executed; each output line shown must appear, in order
    <!-- test: example: WHY -->         the same, but its numbers are examples: they depend on the machine
    <!-- test: listed: ten minutes -->  not executed (over a minute, or needs a GPU), and why; shows output

In ```console lines that begin with "$ " are commands, the rest is output; in ```bash all lines are commands.
In shown output `...` stands for anything, and a time or a speed for any other; other numbers are compared.
All blocks of a page share one scratch folder, which has the files of the repository. `lockstep` is forked
from a process that has imported torch (warm_lockstep.py); other commands, and what one starts, are new ones.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for warm_lockstep

from warm_lockstep import warm_lockstep

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TIMEOUT_SECONDS = 300

_BLOCK = re.compile(
    r"(?:^<!-- test: (?P<kind>run|example|listed)(?:: (?P<why>[^\n]+))? -->\n\n?)?"
    r"^```(?P<language>console|bash|sh|shell)\n(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
_TIME = re.compile(rf"{_NUMBER.pattern}(?= (?:s|ms|tok/s|tokens/s)(?![\w/]))|(?<=ETA )[\d:]+")


@dataclass(frozen=True)
class Block:
    """One fenced block of commands."""

    where: str
    kind: str | None
    why: str | None
    commands: tuple[str, ...]
    output: tuple[str, ...]


def blocks_of(text: str, name: str) -> list[Block]:
    found = []
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start("language")) + 1
        commands, output = _split(match["body"], console=match["language"] == "console")
        found.append(Block(f"{name}:{line}", match["kind"], match["why"], commands, output))
    return found


def _split(body: str, *, console: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    lines = body.replace("\\\n", "\0").splitlines()  # a continued line stays one command
    lines = [line.replace("\0", "\\\n") for line in lines if line.strip() and not line.startswith("#")]
    if not console:
        return tuple(lines), ()
    commands = tuple(line[2:] for line in lines if line.startswith("$ "))
    return commands, tuple(line for line in lines if not line.startswith("$ "))


def missing(shown: tuple[str, ...], real: str, *, example: bool = False) -> str | None:
    """The first shown line that the real output does not have after the lines before it; None: all there."""
    rest = iter(real.splitlines())
    for line in shown:
        pattern = re.compile(_pattern(line, varies=_NUMBER if example else _TIME))
        if line.strip() != "..." and not any(pattern.search(candidate) for candidate in rest):
            return line
    return None


def _pattern(line: str, *, varies: re.Pattern[str]) -> str:
    any_of_them = r"[-\d.,:e+]+"
    parts = [any_of_them.join(map(re.escape, varies.split(part))) for part in line.strip().split("...")]
    # A number is compared as a whole: 2 is not the end of 12, nor the beginning of 23.
    text = r"\s+".join(".*".join(parts).replace("\\ ", " ").split())
    return rf"(?<!\d){text}(?!\d)"


@pytest.fixture(scope="module")
def bin_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with warm_lockstep(tmp_path_factory.mktemp("warm")) as folder:
        yield folder


def run(block: Block, folder: Path, *, bin_folder: Path | None = None) -> str:
    """The output of a block's commands; AssertionError when one fails."""
    for path in ROOT.iterdir():
        link = folder / path.name
        if path.name not in (".git", "runs") and not link.exists():
            link.symlink_to(path)
    bins = [*([] if bin_folder is None else [str(bin_folder)]), str(Path(sys.executable).parent)]
    environment = os.environ | {"PATH": os.pathsep.join([*bins, os.environ["PATH"]]), "COLUMNS": "110"}
    environment.pop("PYTEST_ADDOPTS", None)
    script = "set -euo pipefail\n" + "\n".join(block.commands)
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, f"{block.where}: exit status {done.returncode}\n{script}\n{done.stdout}"
    return done.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_is_marked(page: Path) -> None:
    for block in blocks_of(page.read_text(encoding="utf-8"), page.name):
        assert block.kind is not None, (
            f"{block.where}: put <!-- test: run --> or <!-- test: listed: WHY --> above"
        )
        assert block.commands, f"{block.where}: no command; ```console wants '$ ' before each"
        if block.kind == "example":
            assert block.why, f"{block.where}: say why its numbers vary: <!-- test: example: WHY -->"
        if block.kind == "listed":
            assert block.why, f"{block.where}: say why it is not run: <!-- test: listed: WHY -->"
            assert block.output, f"{block.where}: show the last real output, in a ```console block"


LONG = (
    "README.md",
    "bench-step.md",
    "engine-parity.md",
    "extend.md",
    "matrix.md",
    "parity.md",
    "record-and-replay.md",
    "several-gpus.md",
    "session.md",
)
"""Pages whose commands take more than ten seconds of one core."""
RUNNABLE = [
    pytest.param(page, marks=[pytest.mark.exhaustive] if page.name in LONG else [])
    for page in PAGES
    if any(b.kind in ("run", "example") for b in blocks_of(page.read_text(encoding="utf-8"), ""))
]


@pytest.mark.slow
@pytest.mark.parametrize("page", RUNNABLE, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_do_what_the_page_shows(page: Path, tmp_path: Path, bin_folder: Path) -> None:
    for block in blocks_of(page.read_text(encoding="utf-8"), page.name):
        if block.kind in ("run", "example"):
            real = run(block, tmp_path, bin_folder=bin_folder)
            absent = missing(block.output, real, example=block.kind == "example")
            assert absent is None, f"{block.where}: {absent!r} is not in the real output:\n{real}"


PAGE = """
# Title

<!-- test: run -->
```console
$ echo "step 3/10 in 4.5 s" && \\
  echo done
step 3/10 in 1.2 s
done
```

```bash
make demo
```

<!-- test: listed: ten minutes -->
```console
$ make demo
train: finished
```
"""


def test_blocks_are_found_run_and_compared(tmp_path: Path) -> None:
    first, second, third = blocks_of(PAGE, "page.md")
    assert (first.kind, first.where) == ("run", "page.md:5")
    assert first.commands == ('echo "step 3/10 in 4.5 s" && \\\n  echo done',)
    assert (second.kind, second.commands) == (None, ("make demo",))
    assert (third.kind, third.why, third.output) == ("listed", "ten minutes", ("train: finished",))
    real = run(first, tmp_path)
    assert missing(first.output, real) is None
    assert missing(("done", "step 1/2"), real) == "step 1/2", "lines must come in order"
    assert missing(("step x",), real) == "step x"
    assert missing(("step 3/1",), real) == "step 3/1", "numbers are compared, as a whole"
    assert missing(("step 3/11 in 4.5 s",), real, example=True) is None
    assert missing(("0.5 s  12,000 tok/s  ETA 1:02",), "0.7 s  9 tok/s  ETA 0:01") is None
    with pytest.raises(AssertionError, match="exit status 3"):
        run(Block("page.md:1", "run", None, ("echo a", "exit 3", "echo b"), ()), tmp_path)
