"""What the provider makes of Ray's answers, with a Ray that is made up: test_ray.py has a real one."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.cluster.ray import RayProvider
from lockstep.protocols.cluster import Answers, Placement, World

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed: pip install 'lockstep-rl[cluster]'", allow_module_level=True)


class LostError(Exception):
    """As ray.exceptions.RayError."""


def provider(answers: list[Any]) -> tuple[RayProvider, World]:
    """One whose ranks' nodes answer so: "late" never comes, an error is raised."""

    def get(call: Any) -> Any:
        if isinstance(call, Exception):
            raise call
        return call

    ray = SimpleNamespace(
        wait=lambda calls, **_: ([c for c in calls if c != "late"], [c for c in calls if c == "late"]),
        get=get,
        exceptions=SimpleNamespace(RayError=LostError),
    )
    made = object.__new__(RayProvider)
    made._ray = ray
    members = [SimpleNamespace(call=lambda *_, answer=answer: answer) for answer in answers]
    placement = Placement(nodes=len(answers), per_node=1)
    return made, World(placement=placement, log_dir=Path(), members=members)


def test_a_node_that_fails_or_is_late_is_left_out_by_name_and_reason() -> None:
    made, world = provider([10, LostError("the actor died:\n  out of memory"), "late", 13])
    assert made.ask(world, lambda rank: rank) == Answers(
        given=[10, 13], missing={1: "the actor died: out of memory", 2: "no answer within 10 s"}
    )
