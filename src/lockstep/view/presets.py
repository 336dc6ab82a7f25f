"""The metrics that matter for each kind of run, with what good and bad look like."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """A chart that a kind of run has first."""

    metrics: tuple[str, ...]
    """Names of which the first that the run has is drawn."""
    title: str
    hint: str
    """What good and bad look like, in one line."""

    def metric(self, names: Collection[str]) -> str:
        """Return the first of the metrics that is in `names`; the first of all if none is."""
        return next((each for each in self.metrics if each in names), self.metrics[0])


_RL = (
    Preset(
        metrics=("reward/mean",),
        title="Reward",
        hint="Good: rises, then flattens. Bad: flat from the start (no signal), or jumps far above what the held-out accuracy shows (the reward is gamed).",
    ),
)


def presets(kind: str) -> tuple[Preset, ...]:
    """Return the charts of a kind of run, in order."""
    return _RL
