"""The hand-written docs stay within their limit; generated pages and blocks do not count."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


count_words = load_script("count_words")


def test_the_docs_are_within_their_limit(capsys: pytest.CaptureFixture[str]) -> None:
    assert count_words.main(["--pages"]) == 0, capsys.readouterr().out


def test_what_is_generated_does_not_count() -> None:
    assert count_words.words("# A page\n\nof five words\n") == 6
    assert count_words.words("one\n<!-- x:begin -->\n\n| two | three |\n\n<!-- x:end -->\nfour") == 2
    assert count_words.words("<!-- Written by scripts/gen_docs.py; edit the source. -->\n# A page\n") == 0
