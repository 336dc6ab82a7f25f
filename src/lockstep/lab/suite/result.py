"""What the results of all suites have, and the part of their JSON that is the same."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


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

    def facts(self) -> dict[str, Any]:
        """The fields that every suite's JSON has."""
        return {
            "ok": self.ok,
            "verdict": self.verdict,
            "complete": self.complete,
            "command": self.command,
            "settings": dict(self.settings),
            "notes": list(self.notes),
            "machine": dict(self.machine),
        }
