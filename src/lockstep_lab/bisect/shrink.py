"""The smallest input on which a cell still crashes: fewest documents, then fewest tokens, then fewest layers.

The search knows nothing of models: it asks `attempt` whether a smaller trial still crashes in the same way.
Documents go by delta debugging (Zeller and Hildebrandt, "Simplifying and isolating failure-inducing input",
2002), lengths and layers by bisection, which takes for granted that more of either does not cure a crash;
where it does, what is found is smaller than before and crashes, but need not be the smallest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

MAX_TRIALS = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class Crash:
    """How a trial ended."""

    type: str
    """Class of the error, "SIGSEGV" and the like, "timeout", or "out of memory"."""
    line: str
    """File and line of the innermost frame; empty for what has none."""
    message: str = ""
    """First line of the error's text."""
    traceback: str = ""

    @property
    def signature(self) -> tuple[str, str]:
        """The key by which two crashes are the same. Memory may run out anywhere."""
        return self.type, "" if self.type == "out of memory" else self.line

    def __str__(self) -> str:
        at = f" at {self.line}" if self.line else ""
        return f"{self.type}{at}" + (f": {self.message}" if self.message else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """A part of the input and of the model to run."""

    parts: tuple[tuple[int, int], ...]
    """(index of a document, how many of its last tokens)."""
    num_layers: int
    """The model's first layers."""

    @property
    def tokens(self) -> int:
        return sum(length for _, length in self.parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shrunk:
    """The smallest trial that crashes like the whole input."""

    trial: Trial
    crash: Crash
    trials: int
    """Number of trials run."""
    complete: bool
    """False: the budget of trials was used up."""


class _Spent(Exception):
    """The budget of trials is used up."""


class _Search:
    def __init__(self, attempt: Callable[[Trial], Crash | None], max_trials: int) -> None:
        self._attempt, self._max = attempt, max_trials
        self._known: dict[Trial, bool] = {}
        self.trials = 0
        self.best: tuple[Trial, Crash] | None = None

    def crashes(self, trial: Trial) -> bool:
        """Whether a trial crashes like the first one; the smallest that does is kept."""
        if trial in self._known:
            return self._known[trial]
        if self.trials >= self._max:
            raise _Spent
        self.trials += 1
        crash = self._attempt(trial)
        same = crash is not None and (self.best is None or crash.signature == self.best[1].signature)
        self._known[trial] = same
        if same and crash is not None:
            self.best = trial, crash
        return same


def shrink(
    lengths: Sequence[int],
    num_layers: int,
    attempt: Callable[[Trial], Crash | None],
    *,
    max_trials: int = MAX_TRIALS,
) -> Shrunk | None:
    """Shrink an input that crashes a cell; None: the whole input does not crash.

    Args:
        lengths: of the input's documents.
        num_layers: of the model.
        attempt: how a trial crashes; None: it does not.
        max_trials: the search ends with the smallest so far.
    """
    search = _Search(attempt, max(1, max_trials))
    whole = Trial(parts=tuple(enumerate(lengths)), num_layers=num_layers)
    if not search.crashes(whole):
        return None
    complete = True
    try:
        trial = _fewest_documents(whole, search)
        trial = _fewest_tokens(trial, search)
        _fewest_layers(trial, search)
    except _Spent:
        complete = False
    assert search.best is not None
    return Shrunk(trial=search.best[0], crash=search.best[1], trials=search.trials, complete=complete)


def _fewest_documents(trial: Trial, search: _Search) -> Trial:
    """The longest alone; else ddmin, which is 1-minimal: no single document can be left out."""
    parts, pieces = trial.parts, 2
    longest = replace(trial, parts=(max(parts, key=lambda part: part[1]),))
    if len(parts) > 1 and search.crashes(longest):
        return longest
    while len(parts) >= 2:
        chunks = _chunks(parts, pieces)
        rests = [tuple(p for p in parts if p not in chunk) for chunk in chunks] if pieces > 2 else []
        smaller = next((c for c in chunks if search.crashes(replace(trial, parts=c))), None)
        if smaller is not None:
            parts, pieces = smaller, 2
            continue
        smaller = next((r for r in rests if search.crashes(replace(trial, parts=r))), None)
        if smaller is not None:
            parts, pieces = smaller, max(pieces - 1, 2)
            continue
        if pieces >= len(parts):
            break
        pieces = min(2 * pieces, len(parts))
    return replace(trial, parts=parts)


def _chunks(parts: tuple[tuple[int, int], ...], count: int) -> list[tuple[tuple[int, int], ...]]:
    bounds = [len(parts) * i // count for i in range(count + 1)]
    return [parts[start:end] for start, end in pairwise(bounds) if end > start]


def _fewest_tokens(trial: Trial, search: _Search) -> Trial:
    """All documents together first, so that what their lengths have in common stays; then each alone."""

    def capped(most: int) -> Trial:
        return replace(trial, parts=tuple((i, min(n, most)) for i, n in trial.parts))

    longest = max(n for _, n in trial.parts)
    trial = capped(_smallest(longest, lambda most: search.crashes(capped(most))))
    for position in range(len(trial.parts)):
        index, length = trial.parts[position]
        if len(trial.parts) == 1 or length == 1:
            continue

        def cut(n: int, position: int = position, index: int = index, now: Trial = trial) -> Trial:
            return replace(now, parts=(*now.parts[:position], (index, n), *now.parts[position + 1 :]))

        if search.crashes(cut(length - 1)):  # else it is as short as it gets
            trial = cut(_smallest(length - 1, lambda n, cut=cut: search.crashes(cut(n))))  # type: ignore[misc]
    return trial


def _fewest_layers(trial: Trial, search: _Search) -> Trial:
    fewest = _smallest(trial.num_layers, lambda n: search.crashes(replace(trial, num_layers=n)))
    return replace(trial, num_layers=fewest)


def _smallest(known: int, crashes: Callable[[int], bool]) -> int:
    """The smallest number from 1 on that crashes, by bisection; `known` does."""
    if known == 1 or crashes(1):
        return 1
    low, high = 1, known
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if crashes(middle) else (middle, high)
    return high
