"""Runs as they are on a machine that need not be there."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, TypeVar

from lockstep.config.run import RunConfig
from lockstep.loop.machine import Machine
from lockstep.loop.resolve import Resolved, resolve
from lockstep.models.memory import planned_shape

Run = TypeVar("Run", bound=RunConfig)


def resolved_on(
    run: Run, device: str = "cpu", *, manifest: Mapping[str, Any] | None = None, **machine: Any
) -> Resolved[Run]:
    """The run on a device."""
    there = Machine(device=device, **machine)
    return resolve(run, shape=partial(planned_shape, run.model), machine=there, manifest=manifest or {})


def moved(resolved: Resolved[Run], device: str) -> Resolved[Run]:
    """The same run on another device, with the choices of the first."""
    return Resolved.from_axes(resolved.given, {**resolved.axes, "device": device})
