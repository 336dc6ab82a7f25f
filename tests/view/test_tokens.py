"""Token ids as text."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from lockstep.view.tokens import TokenSpeller


def byte_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer of 256 tokens, so that most characters need several."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: n for n, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def test_pieces_are_the_text_and_a_character_comes_whole(tmp_path: Path) -> None:
    speller = TokenSpeller(tmp_path / "run", model=lambda: str(tmp_path / "model"))
    assert speller.pieces([1]) is None  # the export comes at the end of a run
    byte_tokenizer(tmp_path / "model")
    ids = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json")).encode("aß 終🙂").ids
    pieces = speller.pieces(ids)
    assert pieces == ["a", "", "ß", " ", "", "", "終", "", "", "", "🙂"]
    assert speller.pieces([*ids[:1], 10**9]) == ["a", "\ufffd"]


def test_a_tokenizer_that_is_damaged_is_none(tmp_path: Path) -> None:
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "tokenizer.json").write_text("{}")
    assert TokenSpeller(tmp_path, model=lambda: "").pieces([1, 2]) is None


@pytest.mark.parametrize("name", ["<a>/b", "x" * 5000, "~nobody-has-this-name/x", "a\0/b", "-a/b"])
def test_a_model_of_any_name_has_no_tokenizer(tmp_path: Path, name: str) -> None:
    assert TokenSpeller(tmp_path, model=lambda: name).pieces([1, 2]) is None
