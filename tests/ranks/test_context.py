"""What ranks agree on: alone, and as real processes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from raising import raises

from lockstep.errors import ConfigError, RewardError
from lockstep.ranks import context
from lockstep.ranks.context import PeerFailed, RankContext, is_peer_failure
from lockstep.ranks.launch import launch_command

WORKER = Path(__file__).with_name("context_worker.py")


def test_a_process_alone_agrees_with_itself() -> None:
    ranks = RankContext.alone()
    assert (ranks.rank, ranks.world_size, ranks.is_first) == (0, 1, True)
    assert ranks.gather(3, what="x") == [3]
    assert ranks.broadcast("a", what="x") == "a"
    assert ranks.any(True, what="x") and not ranks.any(False, what="x")
    assert ranks.gather_results(lambda: 5, what="x") == [5]
    assert ranks.on_rank_zero(lambda: 6, what="x") == 6
    ranks.require_same({"a": 1}, what="x")
    ranks.at("here", step=3)
    with raises(RewardError, "wrong-state"), ranks.fail_together("x"):
        raise RewardError("as it was", code="wrong-state")
    with pytest.raises(ValueError, check=lambda error: error.args == ("mine",)), ranks:
        ranks.gather_results(lambda: int_or_error("mine"), what="x")


def int_or_error(text: str) -> int:
    raise ValueError(text)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What 3 ranks report, by rank."""
    out = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, str(WORKER), str(out)]
    assert launch_command(command, ranks=3, timeout=300, log_dir=out / "logs") == 0
    return [json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(3)]


def test_values_are_gathered_broadcast_and_made(found: list[dict[str, Any]]) -> None:
    for rank, own in enumerate(found):
        assert own["gathered"] == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
        assert (
            own["typed"] == "[(0, nan, PosixPath('x')), (1, nan, PosixPath('x')), (2, nan, PosixPath('x'))]"
        )
        assert own["broadcast"] == "from 0"
        assert own["any"] == [True, False]
        assert own["each"] == [0, 10, 20]
        assert own["first"] == ["made once", rank == 0]


def test_an_error_of_one_rank_is_an_error_of_all(found: list[dict[str, Any]]) -> None:
    for rank, own in enumerate(found):
        assert own["reward"] == ["RewardError", "rank 1: reward 'x' of row 3 failed"]
        if rank == 2:
            assert own["other"] == ["KeyError", "'mine'"]
        else:
            assert own["other"] == ["PeerFailed", "scoring: rank 2 failed with KeyError: 'mine'"]
        assert own["unsent"][0] == "PeerFailed" and "rank 1 failed with RankError" in own["unsent"][1]
        assert own["together"] == ["RewardError", "rank 0: no folder"]
        assert own["after"] == [0, 1, 2], "the ranks are still in step"


def test_what_differs_is_named_on_every_rank(found: list[dict[str, Any]]) -> None:
    (text,) = {own["same"][1] for own in found}
    assert {own["same"][0] for own in found} == {"ConfigError"}
    assert "\n  train.lr: 0.1 on ranks 0, 2, 0.2 on rank 1" in text
    assert "\n  only: None on ranks 0, 1, True on rank 2" in text
    assert "steps" not in text


def test_a_rank_that_does_not_come_is_waited_for_no_longer_than_asked(found: list[dict[str, Any]]) -> None:
    for own in found[:2]:
        kind, text = own["late"]
        assert kind == "RankError" and "at waiting for rank 2" in text
        assert own["seconds"] < 10


def test_who_only_lost_another_is_not_to_blame() -> None:
    assert is_peer_failure(PeerFailed("rank 1 failed", code="wrong-state"))
    assert is_peer_failure(RuntimeError("Connection closed by peer [127.0.0.1]"))
    assert not is_peer_failure(ConfigError("x", code="wrong-state"))


@pytest.mark.parametrize(("rank", "name"), [(0, "rank0"), (99, "rank99"), (100, "r100"), (12345, "r12345")])
def test_the_name_of_a_rank_is_not_cut_off(
    rank: int, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Expected: at most six characters, by hand: Linux cuts a name after 15, rank100 to rank10."""
    named: list[str] = []
    for part in (context.flight, "start"), (context, "record_collectives"):
        monkeypatch.setattr(*part, lambda *_, **__: None)
    monkeypatch.setattr(context, "name_process", named.append)
    context.record(tmp_path, rank=rank, world_size=20000)
    assert named == [name]
