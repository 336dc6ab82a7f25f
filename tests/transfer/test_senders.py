"""Weights to workers in other processes, by files and by broadcast, and what is said when one fails."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from holder import Holder, Source, digests, some_weights
from raising import raises

from lockstep.config.engine import EngineConfig
from lockstep.errors import EngineError
from lockstep.transfer import make_transfer, senders
from lockstep.transfer.buckets import BucketTransfer
from lockstep.transfer.senders import DiskSender, Packer, own_address

CPU = torch.device("cpu")


def transfer_to(engine: Holder, work_dir: Path, **settings) -> BucketTransfer:
    config = EngineConfig(name="holder:Holder", **{"update_seconds": 60.0, **settings})
    made = make_transfer(config, engine, device="cpu", work_dir=work_dir)
    assert isinstance(made, BucketTransfer)
    made._packer = Packer(bucket_bytes=300, device=CPU)  # several buckets of these few weights
    return made


@pytest.mark.parametrize(
    ("transport", "workers"), [("disk", 1), ("disk", 2), ("collective", 1), ("collective", 2)]
)
def test_every_worker_gets_every_weight_to_the_bit(transport: str, workers: int, tmp_path: Path) -> None:
    engine = Holder(transport, workers=workers)
    try:
        transfer = transfer_to(engine, tmp_path)
        for version in (1, 2):  # the second goes through what the first has opened
            weights = some_weights(seed=version)
            source = Source(weights)
            transfer.push(source, engine, policy_version=version)
            assert engine.held == digests(weights)
            assert not engine.dirty and engine.log[-1] == "finish"
            assert engine.session.policy_version == version and engine.session.run_id == transfer.run_id
        # embed of 640 bytes has a bucket for itself, and so has lm_head; 3 * (128 + 28) bytes are two.
        assert engine.log == 2 * ["begin", *(f"receive {i}" for i in range(4)), "finish"]
        transfer.close()
    finally:
        engine.close()


def files(folder: Path) -> set[str]:
    return {str(path) for path in folder.rglob("*")}


def test_files_are_in_shared_memory_and_gone_afterwards(tmp_path: Path) -> None:
    engine = Holder("disk")
    before = files(senders.SHARED_MEMORY)
    try:
        transfer = transfer_to(engine, tmp_path)
        transfer.push(Source(some_weights()), engine, policy_version=1)
        assert engine.handle["path"].startswith("/dev/shm/lockstep-weights-")
        assert not Path(engine.handle["path"]).exists()
        transfer.close()
        assert not {
            f
            for f in files(senders.SHARED_MEMORY) - before
            if "lockstep-weights" in f and f in engine.handle["path"]
        }
        assert not Path(engine.handle["path"]).parent.exists()
    finally:
        engine.close()


@pytest.mark.parametrize("why", ["full", "missing"])
def test_files_are_in_the_work_dir_where_shared_memory_has_no_room(
    why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why == "full":
        usage = type("Usage", (), {"free": 1000})()
        monkeypatch.setattr(senders.shutil, "disk_usage", lambda path: usage)
    else:
        monkeypatch.setattr(senders, "SHARED_MEMORY", tmp_path / "nowhere")
    engine = Holder("disk")
    try:
        transfer = transfer_to(engine, tmp_path / "engine")
        transfer.push(Source(some_weights()), engine, policy_version=1)
        assert engine.handle["path"].startswith(str(tmp_path / "engine/lockstep-weights-"))
        assert engine.held == digests(some_weights())
        transfer.close()
        assert files(tmp_path / "engine") == set()
    finally:
        engine.close()


def test_files_that_are_removed_under_way_are_named(tmp_path: Path) -> None:
    engine = Holder("disk")
    try:
        transfer = transfer_to(engine, tmp_path)

        class Removing(DiskSender):
            def _file(self, packed):
                manager = super()._file(packed)
                path = manager.__enter__()
                path.unlink()
                self.kept = manager

                class Made:
                    __enter__ = lambda self: path  # noqa: E731
                    __exit__ = lambda self, *args: manager.__exit__(*args)  # noqa: E731

                return Made()

        transfer._sender = Removing(tmp_path)
        with raises(EngineError, "wrong-state"):
            transfer.push(Source(some_weights()), engine, policy_version=1)
        assert engine.dirty
    finally:
        engine.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("todo", "says"),
    [
        (
            "die-before-2",
            "transfer-failed",
        ),
        (
            "raise-before-2",
            "transfer-failed",
        ),
        (  # a worker that waits for the hanging one may say so or not come to that
            "hang-before-2",
            "transfer-failed",
        ),
    ],
)
def test_a_receiver_that_fails_amid_a_collective_is_named_in_time(
    todo: str, says: str, tmp_path: Path
) -> None:
    engine = Holder("collective", workers=2, todo=(todo,))
    try:
        # One that fails is heard of long before the deadline; one that hangs, then.
        seconds = 8.0 if "hang" in todo else 120.0
        transfer = transfer_to(engine, tmp_path, update_seconds=seconds)
        source = Source(some_weights())
        started = time.monotonic()
        with raises(EngineError, says):
            transfer.push(source, engine, policy_version=1)
        assert time.monotonic() - started < 60
        assert engine.dirty and engine.log[-1] == "fail"
        assert "hang" in todo or engine.log[-2] == "receive 2"  # on a busy machine the deadline comes earlier
        assert source.read == len(some_weights()), "other ranks still gather: all tensors are gone through"
        # The trainer is not stuck: started again, the engine gets everything, by a new group.
        before = engine.handle["group"]
        engine.close()
        engine.start()
        engine.restarts += 1
        weights = some_weights(seed=3)
        transfer._config = EngineConfig(name="holder:Holder", update_seconds=60.0)
        transfer.push(Source(weights), engine, policy_version=2)
        assert engine.held == digests(weights) and not engine.dirty
        assert engine.handle["group"] != before
    finally:
        engine.close()


@pytest.mark.slow
def test_a_receiver_that_stops_amid_a_broadcast_is_given_up_at_the_deadline(tmp_path: Path) -> None:
    engine = Holder("collective")
    large = {"a": torch.zeros(1), "b": torch.ones(300_000_000 // 4)}
    try:
        transfer = transfer_to(engine, tmp_path, update_seconds=60.0)
        transfer.push(Source({"a": torch.zeros(1)}), engine, policy_version=1)
        transfer._config = EngineConfig(name="holder:Holder", update_seconds=4.0)
        process = engine.processes[0]
        threading.Timer(0.3, lambda: os.kill(process.pid, signal.SIGSTOP)).start()
        started = time.monotonic()
        while time.monotonic() < started + 30:
            try:
                transfer.push(Source(large), engine, policy_version=2)
            except EngineError as error:
                assert "a worker did not answer" in str(error)
                assert "the trainer's side" in str(error)
                break
        else:
            raise AssertionError("the worker was stopped, and every push succeeded")
        assert engine.dirty
    finally:
        os.kill(engine.processes[0].pid, signal.SIGCONT)
        engine.close()


@pytest.mark.slow
def test_a_server_that_was_started_again_unnoticed_is_met_by_a_new_group(tmp_path: Path) -> None:
    engine = Holder("collective")
    try:
        transfer = transfer_to(engine, tmp_path)
        transfer.push(Source(some_weights()), engine, policy_version=1)
        group = engine.handle["group"]
        transfer.push(Source(some_weights()), engine, policy_version=2)
        assert engine.handle["group"] == group
        begin = engine.begin_update

        def begin_update(session):
            engine.close()
            engine.start()
            engine.restarts += 1
            begin(session)

        engine.begin_update = begin_update  # as a server's: it looks whether it still lives
        transfer.push(Source(some_weights(seed=5)), engine, policy_version=3)
        assert engine.held == digests(some_weights(seed=5)) and engine.handle["group"] != group
    finally:
        engine.close()


def test_own_address() -> None:
    assert own_address(None) == own_address("http://localhost:8000") == "127.0.0.1"
    assert own_address("http://127.0.0.1:1") == "127.0.0.1"
    assert own_address("http://127.0.0.5:1").startswith("127.")
    with raises(EngineError, "unreachable: engine.url"):
        own_address("http://no-such-host.invalid:8000")
