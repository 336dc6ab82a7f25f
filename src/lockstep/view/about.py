"""What a run is: its config, versions, plan, evaluations, warnings, reports, and how to resume it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lockstep.view.rollouts import Rollout


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One setting of the resolved config."""

    key: str
    """Dotted."""
    value: str
    """As TOML."""
    default: str | None
    """As TOML; None: it has none."""
    differs: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class LogLine:
    """An error or a warning of a log."""

    rank: int
    time: str
    """UTC, as in the log."""
    level: Literal["error", "warning"]
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """A report of matrix, parity, bench or hang that belongs to the run."""

    kind: Literal["matrix", "parity", "bench", "hang"]
    name: str
    """Path below the run or the folder that was given: its place under /run/ID/report/."""
    path: Path
    html: bool
    """Else JSON."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluatedPrompt:
    """A held-out prompt with its completions before and after training."""

    prompt: str
    before: Rollout | None
    after: Rollout | None


@dataclass(frozen=True, kw_only=True, slots=True)
class About:
    """What a run is."""

    config: tuple[Setting, ...]
    versions: Mapping[str, str]
    axes: Mapping[str, str]
    """What `auto` settings became."""
    contract: Mapping[str, Any] | None
    """The kernel contract; None: the run has none."""
    plan: Mapping[str, Any]
    """The memory plan; empty: none was made."""
    evaluations: tuple[Mapping[str, Any], ...]
    """Results, oldest first."""
    samples: tuple[EvaluatedPrompt, ...]
    log: tuple[LogLine, ...]
    resume: str | None
    """The command; None: the run is finished or still running."""
    reports: tuple[Report, ...]
    problems: tuple[str, ...] = ()
