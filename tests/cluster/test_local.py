"""This machine as a provider, through the same launch as Ray's."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
from raising import raises

from lockstep.cluster.jobs import placement_of
from lockstep.cluster.launch import LocalProvider, check_nodes, launch_on
from lockstep.config.cluster import ClusterConfig
from lockstep.errors import ConfigError
from lockstep.protocols.cluster import Answers, Node, Placement, World

T = TypeVar("T")


def test_ranks_get_their_places(tmp_path: Path) -> None:
    script = "import os; print(*(os.environ[n] for n in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'GROUP_RANK')))"
    placement = Placement(nodes=1, per_node=2)
    provider = LocalProvider(log_dir=tmp_path)
    assert launch_on(provider, ["-c", script], placement=placement, log_dir=tmp_path) == 0
    assert [(tmp_path / f"rank-{rank}.log").read_text() for rank in (0, 1)] == ["0 0 2 0\n", "1 1 2 0\n"]


def test_a_rank_that_dies_ends_the_others_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = "import os, time; os.environ['RANK'] == '1' and os.abort(); time.sleep(600)"
    placement = Placement(nodes=1, per_node=2)
    provider = LocalProvider(log_dir=tmp_path)
    assert launch_on(provider, ["-c", script], placement=placement, log_dir=tmp_path) == 134
    assert "rank 1 of 2 was killed by SIGABRT" in capsys.readouterr().err


class HalfDeaf(LocalProvider):
    """The node of rank 1 never answers."""

    def ask(self, world: World, question: Callable[[int], T]) -> Answers[T]:
        given = super().ask(world, question).given
        return Answers(given=given[:1], missing={1: "its memory is full"})


def test_a_node_that_does_not_answer_is_said_once_and_stands_in_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = (
        "import os, time; from pathlib import Path; from lockstep.observe import flight; "
        "flight.start(Path(os.environ['LOCKSTEP_FLIGHT_DIR']), rank=int(os.environ['RANK']), world_size=2); "
        "time.sleep(600)"
    )
    placement = Placement(nodes=1, per_node=2)
    provider = HalfDeaf(log_dir=tmp_path)
    status = launch_on(provider, ["-c", script], placement=placement, log_dir=tmp_path, watch=2.0)
    said = capsys.readouterr().err
    assert status == 1 and "no rank has made progress" in said
    assert said.count("the node of rank 1 does not answer: its memory is full") == 1
    report = json.loads((tmp_path / "hang.json").read_text())
    assert report["cause"] == "node does not answer" and report["culprits"] == [1]
    assert report["missing"] == {"1": "its memory is full"}


def test_a_place_that_is_not_there_is_refused(tmp_path: Path) -> None:
    provider = LocalProvider(log_dir=tmp_path)
    with raises(ConfigError, "not-enough: cluster.nodes"):
        check_nodes(provider, Placement(nodes=2, per_node=1))
    with raises(ConfigError, "not-enough: cluster.nodes"):
        check_nodes(provider, Placement(nodes=1, per_node=1, gpus=True))


def test_what_is_beside_the_ranks_must_be_on_their_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = LocalProvider(log_dir=tmp_path)
    has = Node(name="a", address="10.0.0.1", cpus=64, gpus=4)
    monkeypatch.setattr(provider, "nodes", lambda: [has, has])
    config = ClusterConfig(nodes=2, gpus=2, colocate=(("policy",), ("ref",)), dedicated_gpus=True)
    placement = placement_of(config)
    assert placement.ranks == 4 and placement.devices == 4
    check_nodes(provider, placement)
    with raises(ConfigError, "not-enough: cluster.nodes"):
        check_nodes(provider, placement_of(config.model_copy(update={"engine_gpus": 1})))
