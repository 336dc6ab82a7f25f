"""What the manifest and the display of a run say of its engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.protocols.engine import InferenceEngine, receives_weights
from lockstep.protocols.transfer import WeightTransfer


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
