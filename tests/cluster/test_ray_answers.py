"""What the provider makes of Ray's answers, with a Ray that is made up: test_ray.py has a real one."""

from __future__ import annotations

import concurrent.futures
import importlib.util
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from raising import raises

from lockstep.cluster import launch, ray
from lockstep.cluster.launch import ClusterError
from lockstep.cluster.ray import RayProvider, _Member
from lockstep.protocols.cluster import Answers, Placement, RankEnded, World

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed: pip install 'lockstep-rl[cluster]'", allow_module_level=True)


class LostError(Exception):
    """As ray.exceptions.RayError."""


class UnavailableError(LostError):
    """As ray.exceptions.ActorUnavailableError."""


def provider(answers: list[Any]) -> tuple[RayProvider, World]:
    """One whose ranks' nodes answer so: "late" never comes, an error is raised."""

    def get(call: Any) -> Any:
        if isinstance(call, Exception):
            raise call
        return call

    made_up = SimpleNamespace(
        wait=lambda calls, **_: ([c for c in calls if c != "late"], [c for c in calls if c == "late"]),
        get=get,
        exceptions=SimpleNamespace(RayError=LostError),
    )
    made = object.__new__(RayProvider)
    made._ray = made_up
    members = [SimpleNamespace(call=lambda *_, answer=answer: answer) for answer in answers]
    placement = Placement(nodes=len(answers), per_node=1)
    return made, World(placement=placement, log_dir=Path(), members=members)


def test_a_node_that_fails_or_is_late_is_left_out_by_name_and_reason() -> None:
    made, world = provider([10, LostError("the actor died:\n  out of memory"), "late", 13])
    assert made.ask(world, lambda rank: rank) == Answers(
        given=[10, 13], missing={1: "the actor died: out of memory", 2: "no answer within 10 s"}
    )


def test_an_end_is_told_until_it_has_been_heard(tmp_path: Path) -> None:
    """A signal may raise in the launcher after it was told and before it was noted."""
    answer: concurrent.futures.Future[tuple[bytes, bytes, int | None]] = concurrent.futures.Future()
    answer.set_result((b"bye", b"", 3))
    member = _Member(actor=None, local_rank=0)
    member.answer = answer
    made, _ = provider([])
    world = World(placement=Placement(nodes=1, per_node=1), log_dir=tmp_path, members=[member])
    ended = [RankEnded(rank=0, status=3)]
    assert list(made.watch(world)) == ended and list(made.watch(world)) == ended
    assert (tmp_path / "rank-0.log").read_bytes() == b"bye", "its text is taken once"


def places(monkeypatch: pytest.MonkeyPatch, answers: list[Any], *, new: Any) -> tuple[RayProvider, list[Any]]:
    """A provider whose nodes' actors answer so, and actors that it has killed; new: what one in the place of
    another answers. A list of answers is of one call after the other."""

    def actor(answer: Any) -> Any:
        asked = iter(answer if isinstance(answer, list) else itertools.repeat(answer))
        return SimpleNamespace(facts=SimpleNamespace(remote=lambda: next(asked)), answer=answer)

    made, _ = provider([])
    killed: list[Any] = []
    late = type("GetTimeoutError", (LostError,), {})

    def get(call: Any, *, timeout: float) -> Any:
        if call == "late":
            raise late
        if isinstance(call, Exception):
            raise call
        return call

    made._ray.get, made._ray.kill, made._ray.nodes = get, killed.append, list
    made._ray.exceptions.RayActorError, made._ray.exceptions.GetTimeoutError = LostError, late
    made._ray.exceptions.ActorUnavailableError = UnavailableError
    monkeypatch.setattr(launch, "START_SECONDS", 0.0)
    made._config, made._group = SimpleNamespace(node_seconds=1.0), None  # type: ignore[assignment]
    made._actors = [actor(answer) for answer in answers]
    monkeypatch.setattr(RayProvider, "_actor", lambda *_: actor(new))
    return made, killed


def test_a_node_is_asked_for_what_is_beside_its_ranks_and_shows_all_of_it_to_them() -> None:
    placement = Placement(nodes=2, per_node=2, gpus=True, per_rank=3)
    assert ray._bundle(placement) == {"CPU": 6, "GPU": 6}
    there = {"gpus": ["GPU-a", "GPU-b", "GPU-c", "GPU-d", "GPU-e", "GPU-f"], "cpus": 24}
    shown = {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b,GPU-c,GPU-d,GPU-e,GPU-f"}
    assert ray._devices(there, placement) == shown and ray._threads(there, placement) == 12
    on_cpus = Placement(nodes=1, per_node=2, per_rank=2)
    assert ray._bundle(on_cpus) == {"CPU": 4} and ray._devices(there, on_cpus) == {}


def test_nodes_that_live_stay_and_others_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    made, killed = places(monkeypatch, ["a", LostError("its node has died"), "late"], new="n")
    before = list(made._actors)
    made._fill_places(Placement(nodes=3, per_node=1), made._living(), until=1e12)
    assert [actor.answer for actor in made._actors] == ["a", "n", "n"]
    assert made._actors[0] is before[0] and killed == before[1:]


def test_no_node_in_the_place_of_another_is_an_error_and_nobody_waits_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, killed = places(monkeypatch, ["a", LostError("its node has died")], new="late")
    with raises(ClusterError, "not-enough: cluster.node_seconds"):
        made._fill_places(Placement(nodes=2, per_node=1), made._living(), until=0.0)
    assert made._actors[1] in killed and made._actors[0] not in killed


def test_a_node_that_cannot_be_reached_for_a_moment_keeps_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the copies in its memory."""
    made, killed = places(monkeypatch, ["a", [UnavailableError(), UnavailableError(), "b"]], new="n")
    before = list(made._actors)
    monkeypatch.setattr(launch, "START_SECONDS", 120.0)
    assert made._living() == before and killed == []


def test_a_node_that_is_not_reached_in_time_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    made, killed = places(monkeypatch, ["a", UnavailableError()], new="n")
    assert made._living() == [made._actors[0], None] and killed == [made._actors[1]]


def test_the_wait_for_another_node_begins_when_the_dead_one_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """To know it may take as long as cluster.node_seconds."""
    made, _ = places(monkeypatch, ["a"], new="n")
    made._group, clock = object(), [0.0]

    def living(_: RayProvider) -> list[Any]:
        clock[0] += 120.0
        return [None]

    until: list[float] = []
    monkeypatch.setattr(RayProvider, "_living", living)
    monkeypatch.setattr(RayProvider, "_fill_places", lambda *_, **how: until.append(how["until"]))
    monkeypatch.setattr(RayProvider, "_start", lambda *_: None)
    monkeypatch.setattr(ray, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    made.start(Placement(nodes=1, per_node=1), [{}], [])
    assert until == [121.0]
