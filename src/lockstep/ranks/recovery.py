"""What a rank that was started again knows of the death that it heals, and how long each phase has taken."""

from __future__ import annotations

import functools
import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from lockstep.ranks.environment import RESTART


@dataclass(kw_only=True, slots=True)
class Recovery:
    """A restart of all ranks."""

    number: int
    """From 1."""
    most: int
    """cluster.max_restarts."""
    run_dir: str | None
    """The run to go on with; None: it had not begun."""
    died: float
    """Unix seconds, as the launcher saw it."""
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds from the end of the phase before, or from the death."""

    @property
    def resume(self) -> Path | None:
        """The folder of the run to go on with."""
        return None if self.run_dir is None else Path(self.run_dir)

    @property
    def seconds(self) -> float:
        """From the death to the end of the last phase."""
        return sum(self.phases.values())

    def mark(self, phase: str) -> None:
        """Note that a phase ends now."""
        self.phases[phase] = time.time() - self.died - self.seconds

    def environment(self) -> dict[str, str]:
        """What the ranks that are started now get."""
        return {RESTART: json.dumps(asdict(self))}

    def __str__(self) -> str:
        phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.phases.items())
        return f"restart {self.number} of {self.most}: {self.seconds:.1f} s from the death on ({phases})"


@functools.cache
def recovery() -> Recovery | None:
    """Return the restart that this process belongs to; None: it is of the first start."""
    text = os.environ.get(RESTART)
    return None if text is None else Recovery(**json.loads(text))
