"""One step of a run: where its time and its memory went.

A run logs how long each phase of a step took on rank 0, but not when it began: rank 0's bars are in the
order of the loop. The bars of other ranks come from their flight records, which have the last 400
collectives of each with their times; so only recent steps have them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from lockstep.errors import DataError
from lockstep.observe import flight
from lockstep.observe.flight import Collective, Flight
from lockstep.ranks.hang import find_records
from lockstep.view.curves import Curves

IDLE = "idle"
_ORDER = (
    *("data", "generate", "reward", "pack", "values", "logprobs", "forward_backward", "optimizer", "value"),
    *("weights", "verify", "sleep", "record", "log"),
)
_BETWEEN = ("evaluate", "save", "peer_copy")
"""Before the step, and no part of its time."""
_SUMS = ("step", "host", "host_share", *_BETWEEN)
_GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """Part of a timeline."""

    phase: str
    """generate, reward, pack, ...; IDLE: on rank 0 outside of all timers, on other ranks in a collective."""
    start: float
    """Seconds since the step began."""
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTimeline:
    """What one rank did during a step."""

    rank: int
    bars: tuple[Bar, ...]
    note: str = ""
    """What the bars are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepDetail:
    """One step."""

    step: int
    seconds: float | None
    """Wall time of the step."""
    timeline: tuple[RankTimeline, ...]
    between: tuple[Bar, ...]
    """Evaluation, checkpoint and copy between the step before and this one; no part of `seconds`."""
    metrics: Mapping[str, float]
    batch: Mapping[str, float]
    """Sizes: rollouts, tokens, micro-batches, slots, ..."""
    memory_planned: Mapping[str, float]
    """GiB, of the memory plan; empty if the run has none."""
    memory_used: Mapping[str, float]
    """GiB, peaks of this step."""
    problems: tuple[str, ...] = ()


def step_detail(run: Path, step: int, curves: Curves, *, manifest: Mapping[str, Any]) -> StepDetail:
    """Return one step; what is missing of it is in its problems.

    Args:
        manifest: manifest.json of the run.
    """
    metrics = curves.at(step)
    problems = () if metrics else (f"metrics.jsonl has no step {step}",)
    first = _first_rank(metrics)
    others, why = _other_ranks(run, step, began=_began(step, curves), first=first)
    batch = (
        "rollout/samples",
        "rollout/tokens",
        "rollout/prompt_tokens_mean",
        "rollout/completion_tokens_mean",
    )
    return StepDetail(
        step=step,
        seconds=metrics.get("time/step"),
        timeline=(*first, *others),
        between=tuple(
            Bar(phase=name, start=0.0, seconds=metrics[f"time/{name}"])
            for name in _BETWEEN
            if f"time/{name}" in metrics
        ),
        metrics=metrics,
        batch={name: v for name, v in metrics.items() if name.startswith("input/") or name in batch},
        memory_planned=_planned(manifest),
        memory_used={name: value for name, value in metrics.items() if name.startswith("memory/")},
        problems=(*problems, *curves.problems, *why),
    )


def _first_rank(metrics: Mapping[str, float]) -> list[RankTimeline]:
    timers = {
        name.removeprefix("time/"): seconds
        for name, seconds in metrics.items()
        if name.startswith("time/") and name.removeprefix("time/") not in _SUMS and seconds > 0
    }
    ranked = sorted(timers, key=lambda name: _ORDER.index(name) if name in _ORDER else len(_ORDER))
    bars, at = list[Bar](), 0.0
    for phase in ranked:
        bars.append(Bar(phase=phase, start=at, seconds=timers[phase]))
        at += timers[phase]
    left = metrics.get("time/step", 0.0) - at
    if left > 0:
        bars.append(Bar(phase=IDLE, start=at, seconds=left))
    note = "timers of the step, in the order of the loop: when each began was not logged"
    return [RankTimeline(rank=0, bars=tuple(bars), note=note)] if bars else []


def _began(step: int, curves: Curves) -> float | None:
    """Unix seconds at which a step began: its line is written at its end."""
    times = {int(number): time for number, time in zip(curves.steps[-500:], curves.times[-500:], strict=True)}
    seconds = curves.at(step).get("time/step")
    if step not in times or seconds is None or curves.started is None:
        return None
    return float(curves.started + times[step] - seconds)


def _other_ranks(
    run: Path, step: int, *, began: float | None, first: Sequence[RankTimeline]
) -> tuple[list[RankTimeline], tuple[str, ...]]:
    """The timelines of the ranks from 1 on, as far as their records still have the step; what is wrong.

    Args:
        began: Unix seconds.
        first: rank 0's timeline.
    """
    if began is None or not first:
        return [], ()
    try:
        flights = flight.read_all(find_records(run))
    except DataError as error:
        return [], () if error.code == "wrong-kind-of-file" else (str(error),)
    found = []
    for each in flights:
        bars = _bars(each, step, began=began, first=first[0].bars) if each.rank else []
        if bars:
            note = (
                "from the flight record: idle is time in collectives, which wait for other ranks; between "
                "collectives that do not name their phase, the phase is rank 0's at that time"
            )
            found.append(RankTimeline(rank=each.rank, bars=tuple(bars), note=note))
    return found, ()


def _bars(each: Flight, step: int, *, began: float, first: Sequence[Bar]) -> list[Bar]:
    """What a rank did between its collectives of a step; none if the record no longer has all of them."""
    seconds = first[-1].start + first[-1].seconds
    own = [one for one in each.collectives if one.ended is not None and began <= one.began <= began + seconds]
    own.sort(key=lambda one: one.began)
    if not own or (each.collectives[0].number > 1 and each.collectives[0].began >= began):
        return []
    bars, at = list[Bar](), 0.0
    for one in own:
        start, end = max(at, one.began - began), max(at, _end(one) - began)
        if start > at:
            phase = _phase(one, step) or _phase_at(first, (at + start) / 2)
            bars.append(Bar(phase=phase, start=at, seconds=start - at))
        if end > start:
            bars.append(Bar(phase=IDLE, start=start, seconds=end - start))
        at = end
    if at < seconds:
        bars.append(Bar(phase=_phase_at(first, (at + seconds) / 2), start=at, seconds=seconds - at))
    return _merged(bars)


def _end(one: Collective) -> float:
    return one.began if one.ended is None else one.ended


def _phase(one: Collective, step: int) -> str | None:
    """The phase in which a collective was called, if its purpose is "step 3: generate"; None if it has a
    purpose of its own, such as "the step's boundary"."""
    head, colon, phase = one.purpose.partition(": ")
    return phase if colon and head == f"step {step}" else None


def _phase_at(bars: Sequence[Bar], at: float) -> str:
    return next((bar.phase for bar in bars if at <= bar.start + bar.seconds), bars[-1].phase)


def _merged(bars: Sequence[Bar]) -> list[Bar]:
    """Bars of the same phase, one after the other, as one."""
    merged = [*bars[:1]]
    for before, bar in pairwise(bars):
        if before.phase == bar.phase:
            start = merged[-1].start
            merged[-1] = Bar(phase=bar.phase, start=start, seconds=bar.start + bar.seconds - start)
        else:
            merged.append(bar)
    return merged


def _planned(manifest: Mapping[str, Any]) -> dict[str, float]:
    axes = manifest.get("axes")
    memory = axes.get("memory") if isinstance(axes, dict) else None
    names = {"peak": "peak_bytes", "allocated": "allocated_bytes", "of": "total_bytes"}
    found = {name: memory.get(key) for name, key in names.items()} if isinstance(memory, dict) else {}
    return {name: value / _GIB for name, value in found.items() if isinstance(value, int)}
