from __future__ import annotations

import json
import shutil
import threading
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from loop_runs import everything
from raising import raises

from lockstep import loops
from lockstep.config.load import load_run
from lockstep.config.run import GRPORun
from lockstep.errors import CheckpointError, ConfigError
from lockstep.loop.peer_checkpoint import PeerCheckpoints
from lockstep.loop.policy import Policy
from lockstep.observe.metrics import MetricsLog
from lockstep.protocols.train import FinishSave
from lockstep.ranks.context import RankContext
from lockstep.ranks.environment import COPIES, PEER_SERVER, RESTART, Recovery, recovery
from lockstep.ranks.in_memory_checkpoint import is_in_memory
from lockstep.train.state.files import Layout, LiveTensors
from lockstep.train.state.save_load import load_state, save_state

LAYOUT = Layout(backend="local", mesh={})


class Backend:
    """Only what a copy asks of a backend, over the real files."""

    def __init__(self, value: float) -> None:
        self.weight = torch.full((50,), value)
        self.gate: Callable[[], None] = lambda: None
        """Called in the thread that writes."""

    def _state(self) -> dict[str, Any]:
        return {"parts": LiveTensors({"model/w": self.weight}), "progress": {"step": 0}, "layout": LAYOUT}

    def save(self, directory: Path, *, background: bool = False) -> FinishSave:
        finish = save_state(directory, background=background, **self._state())

        def finished() -> dict[str, str]:
            self.gate()
            return finish()

        return finished

    def load(self, directory: Path, *, verified: bool = False) -> None:
        load_state(directory, verified=verified, **self._state())

    def export(self, directory: Path) -> None: ...


@pytest.fixture
def copies(tmp_path: Path) -> PeerCheckpoints:
    said: list[str] = []
    folder = tmp_path / "lockstep-copies-a1b2c3d4"  # so named, it is known to be in memory
    folder.mkdir()
    made = PeerCheckpoints(folder, ranks=RankContext.alone(), say=said.append)
    made.said = said  # type: ignore[attr-defined]
    return made


def save(copies: PeerCheckpoints, step: int, backend: Backend, *, busy: bool = False) -> None:
    copies.save(step, backend, {"tokens": step * 10, "gap": float("nan")}, busy=busy)
    copies.wait()


def names(copies: PeerCheckpoints) -> list[str]:
    return sorted(path.name for path in copies.folder.iterdir())


def test_the_last_copy_comes_back_and_older_ones_go(copies):
    for step in (1, 2, 3):
        save(copies, step, Backend(float(step)))
        assert names(copies) == [f"step-{n:06d}" for n in (step - 1, step) if n]
    found = copies.newest()
    assert found is not None
    path, state = found
    assert (path.name, state["step"], state["tokens"]) == ("step-000003", 3, 30) and state["gap"] != state[
        "gap"
    ]
    backend = Backend(0.0)
    with raises(CheckpointError, "hash-differs"):  # nothing was hashed
        backend.load(path, verified=False)
    backend.load(path, verified=True)
    assert backend.weight.tolist() == [3.0] * 50
    records = json.loads((path / "state.json").read_text())["files"]
    assert {record["sha256"] for record in records.values()} == {""}, "nothing is hashed"


def test_a_step_goes_without_a_copy_while_another_is_written(copies):
    slow, go = Backend(1.0), threading.Event()
    slow.gate = lambda: go.wait(60) and None
    copies.save(1, slow, {}, busy=False)
    copies.save(2, Backend(2.0), {}, busy=False)
    assert copies.left_out == 1 and names(copies) == ["step-000001"] and copies.newest() is None
    go.set()
    copies.wait()
    save(copies, 3, Backend(3.0), busy=True)
    assert copies.left_out == 2 and names(copies) == ["step-000001"]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (CheckpointError("memory is full", code="no-space"), "memory is full"),
        (MemoryError(), "MemoryError()"),
        (ValueError("no state"), "ValueError('no state')"),
    ],
)
def test_a_copy_that_fails_leaves_the_one_before(copies, error, text):
    def fail() -> None:
        raise error

    broken = Backend(2.0)
    broken.gate = fail
    save(copies, 1, Backend(1.0))
    save(copies, 2, broken)
    found = copies.newest()
    assert found is not None and found[0].name == "step-000001"
    save(copies, 3, Backend(3.0))
    assert copies.said == [f"no copy of step 2 in memory: rank 0: {text}"]  # type: ignore[attr-defined]
    assert names(copies) == ["step-000001", "step-000003"]


def test_a_damaged_copy_is_said_and_not_used(copies):
    save(copies, 1, Backend(1.0))
    state = copies.folder / "step-000001/state.json"
    text = state.read_text()
    state.write_text(" " * len(text))
    assert copies.newest() is None
    assert "cannot be used" in copies.said[0]  # type: ignore[attr-defined]
    state.write_text(text[:-1])
    assert copies.newest() is None, "a file that is too short is no copy at all"


def test_no_room_for_a_second_copy_is_refused_before_the_first_step(copies, monkeypatch):
    usage = namedtuple("usage", "total used free")
    copies.begin(0, Backend(0.0), {})
    size = sum(path.stat().st_size for path in (copies.folder / "step-000000").iterdir())
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(2**30, 2**30 - size, size - 1))
    monkeypatch.setattr("lockstep.train.state.save_load.require_free_space", lambda *_: None)
    with pytest.raises(ConfigError, match=f"has {size} bytes, .* only {size - 1} are free") as refused:
        copies.begin(0, Backend(0.0), {})
    assert refused.value.data == {"code": "no-space", "setting": "cluster.peer_copy"}


def test_a_folder_on_another_machine_is_refused(tmp_path):
    copies = PeerCheckpoints(tmp_path / "elsewhere", ranks=RankContext.alone(), say=print)
    with pytest.raises(ConfigError) as refused:
        copies.begin(0, Backend(0.0), {})
    assert refused.value.data == {"code": "no-such-file", "setting": "cluster.peer_copy"}


class Killed(BaseException):
    """Nothing in the run expects it."""


@pytest.fixture
def dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GRPORun]:
    """A run that ended amid step 3, with a checkpoint of step 2 and copies in memory; what is started next is
    its restart."""
    (tmp_path / "memory").mkdir()
    monkeypatch.setenv(COPIES, str(tmp_path / "memory"))
    run = tiny(tmp_path / "run")
    pack = Policy.pack

    def killed(self: Policy, step: int, *args: Any, **kwargs: Any) -> Any:
        if step == 3:
            raise Killed
        return pack(self, step, *args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Policy, "pack", killed)
        loops.train(run)
    for thread in threading.enumerate():  # those of a process that is killed would have ended with it
        if thread.name.startswith("copy-"):
            thread.join(120)
    restart = Recovery(number=1, most=3, run_dir=str(tmp_path / "run"), died=0.0)
    for name, value in restart.environment().items():
        monkeypatch.setenv(name, value)
    recovery.cache_clear()
    yield run
    recovery.cache_clear()


def tiny(folder: Path, **changed: Any) -> GRPORun:
    settings = {"steps": 4, "rollout.prompts_per_step": 2, "rollout.group_size": 2, "log.tensorboard": False}
    settings |= {"rollout.sampling.max_tokens": 4, "checkpoint.every": 2, "eval.num_prompts": 2}
    settings |= {"checkpoint.background": False, "run_dir": str(folder)} | changed
    run = load_run("tiny", overrides=settings)
    assert isinstance(run, GRPORun)
    return run


def healed(run: GRPORun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The summary of the run, which went on as one that nobody disturbed."""
    assert run.run_dir is not None
    summary = loops.train(run, resume=run.run_dir)
    recovery.cache_clear()
    for name in (COPIES, RESTART):
        monkeypatch.delenv(name)
    loops.train(tiny(tmp_path / "alone"))
    found, expected = everything(run.run_dir), everything(tmp_path / "alone")
    assert found.pop("summary").keys() > expected.pop("summary").keys()
    assert found == expected
    return summary


def test_a_restart_goes_on_from_memory(dead, tmp_path, monkeypatch):
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step-000002"]
    summary = healed(dead, tmp_path, monkeypatch)
    assert (summary["restarts"], summary["restored_from"], summary["checkpoints_read"]) == (1, "memory", 0)
    assert (tmp_path / "run/checkpoints/step-000004").is_dir()


def test_a_restart_goes_on_on_another_host(dead, tmp_path, monkeypatch):
    (tmp_path / "run/lock").write_text('{"pid": 1, "started": "1", "host": "the node that died"}')
    assert healed(dead, tmp_path, monkeypatch)["restarts"] == 1


def test_only_a_restart_of_the_run_takes_its_lock(dead, tmp_path):
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    (tmp_path / "other/lock").write_text('{"pid": 1, "started": "1", "host": "another"}')
    with raises(ConfigError, "locked"):
        loops.train(tiny(tmp_path / "other"), resume=tmp_path / "other")


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_copy_that_outlives_a_node_comes_after_the_lines_of_its_steps(tmp_path, monkeypatch, nodes):
    """What a node that dies had not yet sent to a common disk is lost."""
    (tmp_path / "memory").mkdir()
    monkeypatch.setenv(COPIES, str(tmp_path / "memory"))
    if nodes == 2:
        monkeypatch.setenv(PEER_SERVER, json.dumps({"address": "10.0.0.1", "port": 1, "token": ""}))
    monkeypatch.setattr(PeerCheckpoints, "begin", lambda *_: None)
    order: list[str] = []
    sync = MetricsLog.sync
    monkeypatch.setattr(MetricsLog, "sync", lambda log: order.append("sync") or sync(log))
    monkeypatch.setattr(PeerCheckpoints, "save", lambda *_, **__: order.append("copy"))
    loops.train(tiny(tmp_path / "run", **{"checkpoint.every": 0, "checkpoint.export_at_end": False}))
    assert order == [*(["sync", "copy"] * 4 if nodes == 2 else ["copy"] * 4), "sync"]


def test_without_copies_it_goes_on_from_the_checkpoint(dead, tmp_path, monkeypatch):
    shutil.rmtree(tmp_path / "memory")
    summary = healed(dead, tmp_path, monkeypatch)
    assert (summary["restored_from"], summary["checkpoints_read"]) == ("checkpoint", 1)


def test_without_either_it_ends_rather_than_lose_steps(dead, tmp_path):
    shutil.rmtree(tmp_path / "memory")
    shutil.rmtree(tmp_path / "run/checkpoints/step-000002")
    with pytest.raises(CheckpointError) as ended:
        loops.train(dead, resume=tmp_path / "run")
    assert ended.value.code == "incomplete"


@pytest.mark.parametrize(
    ("path", "held"),
    [
        ("/dev/shm/lockstep-copies-a1b2c3d4/step-000003/value/state.json", True),
        ("runs/lockstep-copies-a1b2c3d4/checkpoints/step-000003/state.json", False),
        ("runs/lockstep-copies-of-runs/step-000003/state.json", False),
    ],
)
def test_a_file_in_memory_is_known_by_the_launchers_folder_alone(path: str, held: bool) -> None:
    assert is_in_memory(Path(path)) is held
