"""Extract the answer from a completion."""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal

# A sign counts only where no value stands before it: "5-9" is 5 and 9, "= -4" is -4. A group of thousands is
# exactly three digits. The exponent is bounded, so that no completion can ask for a number of a billion
# digits.
_NUMBER = re.compile(
    r"(?:(?<![0-9A-Za-z.)\]])[-+\u2212])?"
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+)"
    r"(?:[eE][-+]?[0-9]{1,3}(?![0-9A-Za-z]))?"
)
_BOXED = re.compile(r"\\boxed\s*\{")
_BRACE = re.compile(r"[{}]")
_OPEN, _CLOSE = "<answer>", "</answer>"


def numbers(text: str) -> list[str]:
    """Return every number in the text, in order, as plain text: no thousands separators, no plus sign, an
    ASCII minus.

    Example:
        >>> numbers("5 - 9 = -4, or about 1,234.50.")
        ['5', '9', '-4', '1234.50']
    """
    matches = (match.group() for match in _NUMBER.finditer(text))
    return [n.replace(",", "").replace("\u2212", "-").lstrip("+") for n in matches]


def first_number(text: str) -> str | None:
    """Return the first number in the text, see `numbers`; None: there is none."""
    values = numbers(text)
    return values[0] if values else None


def last_number(text: str) -> str | None:
    """Return the last number in the text, see `numbers`; None: there is none."""
    values = numbers(text)
    return values[-1] if values else None


def last_line(text: str) -> str | None:
    """Return the last line that is not blank, stripped."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else None


def boxed(text: str) -> str | None:
    r"""Return the content of the last complete \boxed{...}, braces balanced."""
    starts = {match.end() - 1 for match in _BOXED.finditer(text)}
    found: tuple[int, int] | None = None
    opened: list[int] = []
    for brace in _BRACE.finditer(text):  # once over the text: a policy may write any number of \boxed{
        if brace.group() == "{":
            opened.append(brace.start())
        elif opened and (start := opened.pop()) in starts and (found is None or start > found[0]):
            found = start, brace.start()
    return None if found is None else text[found[0] + 1 : found[1]].strip()


def tags(text: str) -> str | None:
    """Return the content of the last <answer>...</answer>, stripped."""
    content, position = None, 0
    while (start := text.find(_OPEN, position)) >= 0 and (end := text.find(_CLOSE, start)) >= 0:
        content, position = text[start + len(_OPEN) : end].strip(), end + len(_CLOSE)
    return content


def whole(text: str) -> str | None:
    """Return the whole text, stripped; None when nothing is left."""
    return text.strip() or None


EXTRACTORS: dict[str, Callable[[str], str | None]] = {
    "text": whole,
    "first_number": first_number,
    "last_number": last_number,
    "last_line": last_line,
    "boxed": boxed,
    "tags": tags,
}


def answer_number(answer: object) -> Decimal | None:
    """Parse a dataset's answer as a number; None when it is not one number. GSM8K's "... #### 42" is 42."""
    text = str(answer).rpartition("####")[2].strip().lstrip("$")
    match = _NUMBER.fullmatch(text)
    return Decimal(numbers(text)[0]) if match else None
