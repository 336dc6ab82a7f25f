"""Counts of the work of compilers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileReport:
    """The work of torch.compile and joint graphs since a CompileWatch was made."""

    graphs: int
    """Compiled graphs (forward; each has its backward)."""
    graph_breaks: int
    recompiles: int
    """Graphs made after `mark_warm`; before it every graph counts as warm-up."""
    seconds: float
    """Wall time spent compiling."""
    reasons: tuple[str, ...]
    """The reasons for further graphs, newest last; of the last 64 compilations at most."""
