"""What the results of all suites have, and the part of their JSON that is the same."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from lockstep.observe.files import jsonable

Status = Literal["ok", "refused", "failed", "oom", "hung", "skipped", "interrupted"]
"""How a row of a suite ended. hung: it did not come to an end in time. skipped: by a flag. interrupted: by
Ctrl-C."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SuiteRow:
    """One part of a suite."""

    name: str
    status: Status
    reason: str = ""
    """Why it is not ok."""
    seconds: float = 0.0
    """Duration of the whole process, start and loading included."""
    folder: str = ""
    """The part's folder below OUT; empty: nothing was started."""
    log: str = ""

    def fields(self) -> dict[str, Any]:
        """All fields by name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


@dataclass(frozen=True, kw_only=True, slots=True)
class SuiteResult(ABC):
    """A run of a suite."""

    settings: Mapping[str, Any]
    """What was compared, and on what, in the order in which reports show it."""
    notes: tuple[str, ...] = ()
    command: str = ""
    complete: bool = True
    """False: interrupted."""
    machine: Mapping[str, str] = field(default_factory=dict)

    @property
    @abstractmethod
    def ok(self) -> bool:
        """Whether the exit status is 0."""

    @property
    @abstractmethod
    def verdict(self) -> str:
        """The verdict, which is printed last."""

    @abstractmethod
    def details(self) -> dict[str, Any]:
        """What the suite's JSON has besides; values may be records."""

    def as_dict(self) -> dict[str, Any]:
        """The result as JSON values."""
        names = ("ok", "verdict", "complete", "command", "settings", "notes", "machine")
        values: dict[str, Any] = jsonable({name: getattr(self, name) for name in names} | self.details())
        return values
