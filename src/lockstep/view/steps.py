"""One step of a run: where its time and memory went."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """Part of a timeline."""

    phase: str
    """generate, reward, pack, ...; "idle": none of the timers ran."""
    start: float
    """Seconds since the step began."""
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTimeline:
    """What one rank did during a step."""

    rank: int
    bars: tuple[Bar, ...]
    note: str = ""
    """What the bars are, where they are not the timers of the step."""


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
    """GiB by part, from the plan that was in force."""
    memory_used: Mapping[str, float]
    """GiB, peaks of this step."""
    problems: tuple[str, ...] = ()


_BETWEEN = ("evaluate", "save", "peer_copy")


def step_detail(step: int, metrics: Mapping[str, float]) -> StepDetail:
    """Return a step from its metrics."""
    seconds = metrics.get("time/step")
    bars, at = [], 0.0
    for name, value in metrics.items():
        phase = name.removeprefix("time/")
        if name.startswith("time/") and phase not in ("step", "host", "host_share", *_BETWEEN) and value > 0:
            bars.append(Bar(phase=phase, start=at, seconds=value))
            at += value
    if seconds is not None and seconds > at:
        bars.append(Bar(phase="idle", start=at, seconds=seconds - at))
    problems = () if metrics else (f"metrics.jsonl has no step {step}",)
    return StepDetail(
        step=step,
        seconds=seconds,
        timeline=(RankTimeline(rank=0, bars=tuple(bars)),) if bars else (),
        between=tuple(
            Bar(phase=name, start=0.0, seconds=metrics[f"time/{name}"])
            for name in _BETWEEN
            if f"time/{name}" in metrics
        ),
        metrics=metrics,
        batch={
            name: value
            for name, value in metrics.items()
            if name.startswith("input/") or name in ("rollout/samples", "rollout/tokens")
        },
        memory_planned={},
        memory_used={name: value for name, value in metrics.items() if name.startswith("memory/")},
        problems=problems,
    )
