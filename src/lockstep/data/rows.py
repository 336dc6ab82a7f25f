"""Where a row of data stands, for messages: line N of a .jsonl file, row N of any other source, from 1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class PlacedRow(dict[str, Any]):
    """A row that knows its place in its source."""

    __slots__ = ("where",)

    def __init__(self, values: Mapping[str, Any], *, where: str) -> None:
        super().__init__(values)
        self.where = where
        """Source and place, such as "problems.jsonl, line 31"."""


def place(row: Mapping[str, Any], source: str, position: int) -> str:
    """Return where a row stands: its own place, else by its `position` in `source`, from 0.

    Example:
        >>> place({"prompt": "1 + 1?"}, "problems.parquet", 30)
        'problems.parquet, row 31'
    """
    return row.where if isinstance(row, PlacedRow) else f"{source}, row {position + 1}"
