"""An error that ended a piece of work: its one line, and whether memory ran out."""

from __future__ import annotations

from lockstep.observe import memory

_LINE = 400


def error_line(error: BaseException) -> str:
    """The message's first line that is not blank, cut at 400 characters."""
    lines = (line.strip() for line in str(error).splitlines())
    line = next((line for line in lines if line), "")
    return line if len(line) <= _LINE else f"{line[: _LINE - 1]}…"


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether the error, or one that it was raised from, is an out-of-memory error."""
    while error is not None:
        if memory.is_out_of_memory(error):
            return True
        error = error.__cause__ or error.__context__
    return False
