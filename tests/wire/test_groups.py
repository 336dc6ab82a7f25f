"""A group beside the default one, in real processes."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

from lockstep.wire.receive import GroupError, Rendezvous, announce, connect_group, host_store

PEER = """
import sys, time, torch
from lockstep.wire.receive import Rendezvous, connect_group
port, rank, size, count = map(int, sys.argv[1:])
rendezvous = Rendezvous(name="g", address="127.0.0.1", port=port, world_size=size, backend="gloo")
group = connect_group(rendezvous, rank=rank, seconds=30)
for _ in range(count):
    data = torch.zeros(8)
    group.broadcast(data, deadline=time.monotonic() + 30)
    print(data.tolist(), flush=True)
print("left", flush=True)
time.sleep(60)
"""


def rendezvous(port: int, size: int, *, backend: str = "gloo") -> Rendezvous:
    return Rendezvous(name="g", address="127.0.0.1", port=port, world_size=size, backend=backend)


def peer(port: int, *, rank: int, size: int, count: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PEER, *map(str, (port, rank, size, count))],
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_a_broadcast_beside_a_default_group_and_a_rank_that_does_not_come_to_the_next_one() -> None:
    store = host_store()
    before = dist.is_initialized()
    peers = [peer(store.port, rank=rank, size=3, count=count) for rank, count in ((1, 2), (2, 1))]
    try:
        group = connect_group(rendezvous(store.port, 3), rank=0, seconds=30, store=store)
        assert dist.is_initialized() == before
        group.broadcast(torch.arange(8.0), deadline=time.monotonic() + 30)
        for process in peers:
            assert process.stdout is not None
            assert process.stdout.readline() == f"{[float(i) for i in range(8)]}\n"
        assert peers[1].stdout is not None and peers[1].stdout.readline() == "left\n"
        started = time.monotonic()
        with pytest.raises(GroupError) as caught:
            group.broadcast(torch.ones(50_000_000), deadline=started + 2)
        assert "rank 0 of 3, did not begin: engine worker 1 did not arrive" in str(caught.value)
        assert group.missing(1) == [2]
        group.abort()
    finally:
        for process in peers:
            process.kill()
            process.wait()


def test_a_wait_is_given_up_when_the_other_side_is_known_to_have_failed() -> None:
    store = host_store()
    process = peer(store.port, rank=1, size=2, count=0)
    try:
        group = connect_group(rendezvous(store.port, 2), rank=0, seconds=30, store=store)
        cancel = threading.Event()
        threading.Timer(0.5, cancel.set).start()
        started = time.monotonic()
        with pytest.raises(GroupError, match="engine worker 0 did not arrive"):
            group.broadcast(torch.ones(50_000_000), deadline=started + 100, cancel=cancel)
        group.abort()
    finally:
        process.kill()
        process.wait()


def test_nobody_joins() -> None:
    store = host_store()
    group = connect_group(rendezvous(store.port, 3), rank=0, seconds=1, store=store)
    with pytest.raises(GroupError, match="engine worker 0, engine worker 1 did not arrive"):
        group.broadcast(torch.zeros(1), deadline=time.monotonic() + 0.2)


def test_the_trainer_does_not_come() -> None:
    store = host_store()
    group = connect_group(rendezvous(store.port, 2), rank=1, seconds=1)
    with pytest.raises(GroupError, match="the trainer did not arrive"):
        group.broadcast(torch.zeros(1), deadline=time.monotonic() + 0.2)


def test_the_trainer_calls_it_off() -> None:
    store = host_store()
    ends = [connect_group(rendezvous(store.port, 3), rank=rank, seconds=1) for rank in (0, 1)]
    with pytest.raises(GroupError, match="engine worker 1 did not arrive"):
        ends[0].broadcast(torch.zeros(1), deadline=time.monotonic() + 0.2)
    with pytest.raises(GroupError, match="cancelled by the trainer"):
        ends[1].broadcast(torch.zeros(1), deadline=time.monotonic() + 60)


def test_marks_for_workers_that_know_of_none() -> None:
    store = host_store()
    group = connect_group(rendezvous(store.port, 4), rank=0, seconds=1, store=store)
    announce(
        {"group": "g", "address": "127.0.0.1", "port": store.port, "first_rank": 2, "number": 0}, receivers=2
    )
    assert group.missing(0) == [0, 1]


def test_no_store_where_one_is_looked_for() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(GroupError, match="could not join"):
        connect_group(rendezvous(port, 2), rank=1, seconds=1)


def test_the_store_listens_on_its_address_only() -> None:
    store = host_store()
    with socket.create_connection(("127.0.0.1", store.port), timeout=5):
        pass
    with socket.socket() as probe, pytest.raises(OSError):
        probe.settimeout(2)
        probe.connect(("127.0.0.2", store.port))


def test_an_unknown_backend() -> None:
    with pytest.raises(GroupError, match="neither"):
        connect_group(rendezvous(1, 1, backend="mpi"), rank=0, seconds=1, store=host_store())


SLOW_ABORT = """
import sys, time
from lockstep.wire.receive import Group

class Slow:
    def abort(self):
        time.sleep(1.0)
        print("aborted", flush=True)

group = object.__new__(Group)
group.name, group._group, group._work = "slow", Slow(), None
group.abort()
print("goes on", flush=True)
"""


def test_the_end_of_a_process_waits_for_an_abort():
    # In the place of nccl, which needs a GPU: its abort fails once CUDA shuts down.
    ended = subprocess.run([sys.executable, "-c", SLOW_ABORT], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout.splitlines()) == (0, ["goes on", "aborted"]), ended.stderr
