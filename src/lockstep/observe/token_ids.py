"""Token ids of a text: which of them are kept when it is truncated, and whether a model knows them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lockstep.errors import DataError


def kept_at_end(ids: Sequence[int], limit: int, *, tokenizer: Any, template: str | None) -> tuple[int, int]:
    """Return (n, m): of a longer text, ids[:n], its beginning-of-sequence tokens, and ids[m:] are kept:
    `limit` tokens in all. Models are not trained on texts that do not begin so.

    Args:
        template: the chat template that wrote the text; None: plain text.

    Example: a text that begins with bos, id 1, cut to 3 of its 5 tokens: [1, 5, 6, 7, 8] -> [1, 7, 8].
    """
    first = min(_beginning(ids, tokenizer, template), limit)
    return first, len(ids) - (limit - first)


def _beginning(ids: Sequence[int], tokenizer: Any, template: str | None) -> int:
    """The number of tokens that the tokenizer puts before plain text, where the text begins with them; else
    whether it begins with the bos token."""
    around: list[int] = tokenizer("")["input_ids"]
    number = 0
    while number < min(len(around), len(ids)) and around[number] == ids[number]:
        number += 1
    if number or tokenizer.bos_token_id is None or ids[0] != tokenizer.bos_token_id:
        return number
    # Some tokenizers name a token as bos that opens every turn (<|im_start|>): it begins no sequence.
    written = template is not None and "bos_token" in template
    return int(written or tokenizer.bos_token_id not in ids[1:])


def check_known(ids: Sequence[int], vocab_size: int, *, tokenizer: Any, model: str, where: str) -> None:
    """Refuse ids beyond the embedding of a model: its layers would fail without a word about the row.

    Args:
        model: "the model", or its name.

    Raises:
        DataError: token, row, and what to do.
    """
    if not ids or max(ids) < vocab_size:
        return
    token = next(i for i in ids if i >= vocab_size)
    raise DataError(
        f"outside-vocabulary: {where}: token id {token} ({tokenizer.convert_ids_to_tokens(token)!r}) is "
        f"outside the vocabulary of {vocab_size} entries: the tokenizer has tokens for which the embedding "
        f"of {model} has no row; add rows (transformers' resize_token_embeddings), or leave the token out",
        where=where,
        token=token,
    )
