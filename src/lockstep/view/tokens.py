"""The text of single tokens, by the run's tokenizer.json. Loads no transformers."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lockstep.errors import DataError
from lockstep.observe.files import cache_root, read_plain

_TOKENIZER_BYTES = 64 * 2**20
"""Those of models with a vocabulary of 256 thousand have 35 MB."""
_BUNDLED = "bundled:"
_REPLACED = "\ufffd"


class TokenSpeller:
    """Spells the token ids of a run. Safe from several threads.

    The tokenizer is that of the run's export, of the model if it is a folder, or that in the cache of
    Lockstep or Hugging Face. It is read at the first use.

    Args:
        model: returns the model's name.
    """

    def __init__(self, run: Path, *, model: Callable[[], str]) -> None:
        self._run, self._model = run, model
        self._lock = threading.Lock()
        self._tokenizer: Any = None
        self._tried: Path | None = None

    def pieces(self, ids: Sequence[int]) -> list[str] | None:
        """Return the text of each id, which together are the text of all; None if the run has no tokenizer
        that can be read. A token that ends in the middle of a character has no text; the one that completes
        the character has it."""
        with self._lock:
            tokenizer = self._loaded()
            return None if tokenizer is None else _spell(tokenizer, ids)

    def _loaded(self) -> Any:
        # Looked for again until there is one: the export comes at the end of a run.
        if self._tokenizer is None:
            path = next((path for path in self._places() if os.path.isfile(path)), None)
            if path is not None and path != self._tried:
                self._tried, self._tokenizer = path, _load(path)
        return self._tokenizer

    def _places(self) -> Iterator[Path]:
        yield self._run / "export" / "tokenizer.json"
        name = self._model()
        if name.startswith(_BUNDLED) and "/" not in name:
            yield cache_root() / name.removeprefix(_BUNDLED) / "tokenizer.json"
        if not name or ":" in name:
            return
        # Of os.path, since a config may name anything: Path raises if a name is too long, or of no user.
        yield Path(os.path.expanduser(name)) / "tokenizer.json"
        if name.count("/") == 1 and not name.startswith((".", "/", "~")):
            from huggingface_hub import try_to_load_from_cache
            from huggingface_hub.errors import HFValidationError

            with contextlib.suppress(HFValidationError):  # it is the name of no repository
                found = try_to_load_from_cache(name, "tokenizer.json")
                if isinstance(found, str):
                    yield Path(found)


def _load(path: Path) -> Any:
    """The tokenizer of a file; None if it is none, or too large."""
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_str(read_plain(path, DataError, limit=_TOKENIZER_BYTES).decode("utf-8"))
    except (DataError, UnicodeDecodeError):
        return None
    except Exception as error:
        if type(error) is not Exception:  # the library, in Rust, raises plain ones about a file
            raise
        return None


def _spell(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text that each id adds to that of the ids before it."""
    from tokenizers.decoders import DecodeStream

    stream, size = DecodeStream(skip_special_tokens=False), tokenizer.get_vocab_size()
    return [(stream.step(tokenizer, id) or "") if 0 <= id < size else _REPLACED for id in ids]
