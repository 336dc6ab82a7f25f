"""Whether a loss falls, where a figure goes, and how far apart two of them are: pure functions."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

WINDOW = 5
STANDARD_ERRORS = 3.0

Trend = Literal["falls", "does not fall", "too few steps"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Falls:
    """Whether a loss falls, and by how much."""

    trend: Trend
    first: float
    """Mean of the first `window` losses."""
    last: float
    standard_error: float
    """Standard error of the difference of the two means."""
    window: int


def falls(losses: Sequence[float]) -> Falls:
    """The mean of the last 5 below that of the first 5 by more than 3 standard errors; of fewer than 10
    steps, the last and the first half. A loss that is not finite does not fall.

    Example:
        >>> falls([4.0, 3.9, 3.8, 3.7, 3.6, 3.0, 2.9, 2.8, 2.7, 2.6]).trend
        'falls'
    """
    window = min(WINDOW, len(losses) // 2)
    if window < 2:
        nan = math.nan
        return Falls(trend="too few steps", first=nan, last=nan, standard_error=nan, window=window)
    head, tail = losses[:window], losses[-window:]
    first, last = math.fsum(head) / window, math.fsum(tail) / window
    if not all(map(math.isfinite, losses)):
        return Falls(trend="does not fall", first=first, last=last, standard_error=math.nan, window=window)
    error = math.sqrt((statistics.variance(head) + statistics.variance(tail)) / window)
    trend: Trend = "falls" if first - last > STANDARD_ERRORS * error else "does not fall"
    return Falls(trend=trend, first=first, last=last, standard_error=error, window=window)


def direction(values: Sequence[float]) -> str:
    """Return "falls", "rises" or "flat", by the test of `falls` in both directions; or why it cannot be said.

    Example:
        >>> direction([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
        'rises'
    """
    if not all(map(math.isfinite, values)):
        return "not finite"
    down = falls(values).trend
    if down == "does not fall":
        return "rises" if falls([-value for value in values]).trend == "falls" else "flat"
    return down


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Differences of one figure over the steps."""

    max: float
    """NaN as soon as one difference is."""
    mean: float
    at: int
    """Step, from 1, of the largest."""


def relative(value: float, reference: float, *, floor: float = 0.0) -> float:
    """|value - reference| / max(|reference|, floor); 0 when they are equal, NaN when one is not finite."""
    if not (math.isfinite(value) and math.isfinite(reference)):
        return math.nan
    difference = abs(value - reference)
    if difference == 0:
        return 0.0
    scale = max(abs(reference), floor)
    return difference / scale if scale > 0 else math.inf


def spread(differences: Sequence[float]) -> Spread:
    """The largest and the mean difference; NaN is larger than everything."""
    at = max(
        range(len(differences)),
        key=lambda i: (math.isnan(differences[i]), differences[i] if differences[i] == differences[i] else 0),
    )
    return Spread(
        max=differences[at], mean=math.fsum(differences) / len(differences) if differences else 0.0, at=at + 1
    )


def ratio(value: float) -> str:
    """A relative difference, as --threshold has it: 0.0123 -> "0.0123", small ones in powers of ten."""
    if math.isnan(value):
        return "NaN"
    return f"{value:.3g}" if value >= 1e-3 or value == 0 else f"{value:.1e}"
