"""Which role's memory is on the device in which part of a step: one table for the run and for its plan.

    policy          optimizer's states    in its update
    ref             weights               while it scores
    value           weights               while it scores and is trained
                    optimizer's states    in its update
    reward_model    weights               while it scores, beside generation

Roles that do not sleep are there all the time. Parts in host memory come back for the calls that use them:
see lockstep.models.rest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from lockstep.config.run import GRPORun, SleepingRole
from lockstep.models.memory_shape import MemoryPart, Phase
from lockstep.protocols import TrainBackend
from lockstep.protocols.train import RestingBackend, RestPart

AWAKE: Mapping[tuple[SleepingRole, RestPart], tuple[Phase, ...]] = {
    ("policy", "states"): ("update",),
    ("ref", "ref"): ("train",),
    ("value", "weights"): ("train", "update"),
    ("value", "states"): ("update",),
    ("reward_model", "weights"): ("generate",),
}
"""Of each part that can sleep, the phases of the memory plan in which it is on the device."""
VALUE_PREFIX = "value model: "
"""What names of the value model's parts begin with in a plan."""
_PARTS: Mapping[str, RestPart] = {
    "parameters": "weights",
    "parameters, this rank's": "weights",
    "reward model: parameters": "weights",
    "reward models: parameters": "weights",
    "float32 master weights": "states",
    "optimizer states": "states",
    "reference model": "ref",
    "reference model, this rank's": "ref",
}
"""Names of a memory plan. A part of another name counts as always there."""


def put_to_sleep(run: GRPORun, *roles: SleepingRole, backend: TrainBackend) -> None:
    """Begin the schedule for those of `roles`, all of one backend, that sleep in this run. Called as soon as
    they are built: the next one to be loaded has their memory."""
    parts = [part for role, part in AWAKE if role in roles and role in run.sleep]
    if parts:
        cast(RestingBackend, backend).rest(*parts)


def sleeping_parts(parts: Sequence[MemoryPart], run: GRPORun) -> Iterator[MemoryPart]:
    """The plan of a run on a GPU with what sleeps in the phases in which it is awake, and in host memory."""
    for part in parts:
        kind = _PARTS.get(part.name.removeprefix(VALUE_PREFIX))
        role = cast(SleepingRole, "ref" if kind == "ref" else part.role)
        phases = AWAKE.get((role, kind)) if kind is not None and part.phase == "always" else None
        if phases is None:
            yield part
        elif role not in run.sleep:
            yield dataclasses.replace(part, setting=f"{part.setting} or sleep = ['{role}', ...]")
        else:
            for phase in phases:
                yield dataclasses.replace(part, role=role, phase=phase)
            yield dataclasses.replace(part, role=role, phase="host", name=f"{part.name}, asleep")
