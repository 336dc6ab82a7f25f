"""Reports of the RL loop about its engine: for the manifest, for the metrics, and when memory runs out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch

from lockstep.errors import EngineError, LockstepError, TrainError
from lockstep.protocols.engine import EngineStats, InferenceEngine, receives_weights
from lockstep.protocols.transfer import WeightTransfer
from lockstep.ranks.context import RankContext
from lockstep.transfer import memory_report


def engine_report(engine: InferenceEngine, transfer: WeightTransfer) -> dict[str, Any]:
    """Return the manifest's fields: the weight transport and, for an external engine, its version, command
    and environment."""
    described = engine.describe() if receives_weights(engine) else {}
    return {"transport": transfer.transport, **described}


def report_lines(report: Mapping[str, Any]) -> list[str]:
    """Return the report as lines for the display; none for an engine inside this process."""
    if set(report) == {"transport"}:
        return []
    scalars = [f"{key} {value}" for key, value in report.items() if not isinstance(value, Mapping | list)]
    lines = ["engine: " + ", ".join(scalars)]
    environment = report.get("environment")
    if isinstance(environment, Mapping) and environment:
        lines.append("engine environment: " + " ".join(f"{k}={v}" for k, v in sorted(environment.items())))
    return lines


_Reading = tuple[EngineStats, EngineStats]


class EngineMeter:
    """Throughput and cache use of the engines of all ranks between two readings."""

    def __init__(self, engine: InferenceEngine, *, ranks: RankContext) -> None:
        self._engine, self._ranks = engine, ranks
        self._before = engine.stats()

    def start(self) -> None:
        """Start counting from here."""
        self._before = self._engine.stats()

    def metrics(self) -> dict[str, float]:
        """Return engine/* since `start`. Collective."""
        now = self._engine.stats()
        everyone = self._ranks.gather((self._before, now), _Reading, what="the engines' figures")
        values = _rates(everyone)
        if any(stats.kv_cache_use is not None for _, stats in everyone):
            values["engine/kv_cache_use"] = max(stats.kv_cache_use or 0.0 for _, stats in everyone)
        if self._engine.external:
            values["engine/restarts"] = float(sum(stats.restarts for _, stats in everyone))
        return values


def _rates(readings: list[_Reading]) -> dict[str, float]:
    """Ranks sample in parallel: their tokens are added up, and the slowest one's seconds count."""

    def added(name: str) -> list[float]:
        return [getattr(after, name) - getattr(before, name) for before, after in readings]

    seconds, prompts = max(added("generate_seconds")), sum(added("prompt_tokens"))
    return {
        "engine/tokens_per_second": sum(added("completion_tokens")) / seconds if seconds > 0 else 0.0,
        "engine/cache_hit_rate": sum(added("cached_tokens")) / prompts if prompts > 0 else 0.0,
    }


@contextlib.contextmanager
def explain_out_of_memory(
    side: Literal["engine", "trainer"],
    *,
    engine: InferenceEngine,
    transfer: WeightTransfer,
    device: str,
) -> Iterator[None]:
    """Add to an out-of-memory error whose it was and what engine and trainer held around the last weight
    update; for an engine that shares a GPU with the trainer."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        others = isinstance(error, LockstepError) and not isinstance(error, EngineError | TrainError)
        if others or transfer.transport == "shared" or not memory_report.ran_out_of_memory(error):
            raise
        text = memory_report.explain(
            side,
            before=transfer.before,
            after=transfer.after,
            now=memory_report.take_memory_report(engine, device=torch.device(device)),
        )
        kind = EngineError if side == "engine" or isinstance(error, EngineError) else TrainError
        raise kind(f"{error}\n{text}") from error
