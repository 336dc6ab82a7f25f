"""Text from files, servers, models and users, made safe for a terminal."""

from __future__ import annotations

import sys
import unicodedata
from typing import TextIO

from lockstep.errors import redacted

# Unicode's categories: control, format, unassigned, private, surrogate, line and paragraph separators.
_UNSAFE = ("Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp")


def printable(text: str) -> str:
    """Escape control, format, surrogate and unassigned characters, so that the text stays on one line.

    Example:
        >>> printable("a\\x1b]0;b\\n")
        'a\\\\x1b]0;b\\\\n'
    """
    if text.isprintable():
        return text
    return "".join(_escaped(c) if unicodedata.category(c) in _UNSAFE else c for c in text)


def printable_lines(text: str) -> str:
    """Escape as `printable`, except line ends."""
    return "\n".join(map(printable, text.split("\n")))


def printable_text(text: str) -> str:
    """Escape as `printable`, except line ends and tabs: for completions and other text that has them on
    purpose."""
    return "\n".join("\t".join(map(printable, line.split("\t"))) for line in text.split("\n"))


def echo(text: object = "", *, end: str = "\n", file: TextIO | None = None, flush: bool = False) -> None:
    """Print, with control characters escaped and secrets taken out. All output for users goes through here.

    Args:
        file: None: stdout.
    """
    print(
        printable_text(redacted(str(text))), end=end, file=sys.stdout if file is None else file, flush=flush
    )


def counted(number: int, noun: str) -> str:
    """ "1 shape", "2 shapes", "1,000 shapes"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _escaped(character: str) -> str:
    if character in "\n\r\t":
        return {"\n": "\\n", "\r": "\\r", "\t": "\\t"}[character]
    code = ord(character)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"
