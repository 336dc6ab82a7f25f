"""The tools that the rows of a source are shown, and the columns that tell their tasks apart."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.errors import DataError, unknown_name
from lockstep.observe.text import printable

Schemas = Sequence[Mapping[str, Any]]
"""Tools as JSON schemas."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowTools:
    """The tools of a run's environments, in place of the rows' own."""

    schemas: Mapping[str, Schemas]
    """By name of the environment."""
    reads: Mapping[str, Sequence[str] | None] = field(default_factory=dict)
    """The columns that `reset` of each environment gets; None: all."""
    column: str | None = None
    """Where a row names its environment; None: there is one, for all rows."""

    def name(self, row: Mapping[str, Any], where: str) -> str:
        """Return the name of a row's environment.

        Raises:
            DataError: the row names none, or one that the run does not have.
        """
        if self.column is None:
            return next(iter(self.schemas))
        if self.column not in row:
            raise DataError(
                f"missing-column: {where}: there is no column {self.column!r}, which names the row's "
                "environment; add it, or set environment.column",
                where=where,
            )
        value = row[self.column]
        if not isinstance(value, str) or value not in self.schemas:
            known = unknown_name("environment", printable(str(value)[:80]), self.schemas)
            raise DataError(
                f"unknown-name: {where}: column {self.column!r}: {known}; correct the row, or add the class "
                "to environment.classes",
                where=where,
            )
        return value

    def of(self, row: Mapping[str, Any], where: str) -> Schemas:
        """Return the tools of a row. Raises as `name`."""
        return self.schemas[self.name(row, where)]

    def task_of(self, row: Mapping[str, Any], where: str) -> str:
        """Return what the environment of a row makes of it beside its text: the columns that `reset` gets, as
        JSON; "": none. Raises as `name`."""
        name = self.name(row, where)
        columns = self.reads.get(name, ())
        found = {key: row[key] for key in (row if columns is None else columns) if key in row}
        return json.dumps(found, sort_keys=True, default=str) if found else ""
