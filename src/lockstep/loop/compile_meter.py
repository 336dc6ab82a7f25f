"""Counts of torch.compile's work in a step, over all ranks."""

from __future__ import annotations

from lockstep.protocols import TrainBackend
from lockstep.ranks.context import RankContext

_COUNTED = ("graphs", "recompiles", "graph_breaks", "seconds")


class CompileMeter:
    """compile/* per step: what a backend's `compile_report` counted since the last reading.

    Args:
        backend: the train backend; one without compiled parts has no metrics.
        ranks: each compiles for itself; the largest count is reported, because the others waited for it.
    """

    def __init__(self, backend: TrainBackend, *, ranks: RankContext) -> None:
        self._report = backend.compile_report
        self._ranks = ranks
        self._before = dict.fromkeys(_COUNTED, 0.0)

    def metrics(self) -> dict[str, float]:
        """Return the counts since the last call; empty where the backend does not compile. Collective where
        it does."""
        report = self._report()
        if report is None:
            return {}
        now = {name: float(getattr(report, name)) for name in _COUNTED}
        own = {name: now[name] - self._before[name] for name in _COUNTED}
        self._before = now
        everyone = self._ranks.gather(own, dict[str, float], what="the step's compilations")
        return {f"compile/{name}": max(counts[name] for counts in everyone) for name in _COUNTED}
