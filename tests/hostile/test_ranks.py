"""Programs that are no rank of a run: they do not reach the rendezvous, join it or have anything executed."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from pydantic import JsonValue
from raising import raises
from torch._C._distributed_c10d import PrefixStore, TCPStore

from lockstep.ranks import process_group
from lockstep.ranks.environment import SECRET
from lockstep.ranks.launch import Launch
from lockstep.ranks.process_group import RankError

RANK = """
import traceback
from lockstep.ranks.context import init_ranks
from lockstep.ranks.launch import leave
try:
    with init_ranks(seconds=30) as ranks:
        ranks.gather(None, None, what="x")
except Exception:
    traceback.print_exc()
    leave(1)
    raise
"""


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.canary),)


def listening() -> dict[int, str]:
    """Sockets of this process that listen: their ports and addresses, as the kernel writes them."""
    inodes = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the folder's own descriptor is closed by now
            inodes.add(os.readlink(f"/proc/self/fd/{name}"))
    lines = [Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    rows = [line.split() for line in (*lines[0], *lines[1])]
    places = [row[1].split(":") for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes]
    return {int(port, 16): address for address, port in places}


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    return Launch(["true"], ranks=2, log_dir=tmp_path)


def test_the_rendezvous_listens_on_loopback_only(launch: Launch) -> None:
    assert listening()[launch._port] == "0100007F"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", launch._port), timeout=5)


def test_a_process_alone_listens_on_loopback_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")  # so that it is put back as it was
        monkeypatch.delenv(name)
    before = listening()
    process_group.join("gloo", timeout=timedelta(seconds=20))
    try:
        assert {address for port, address in listening().items() if port not in before} <= {"0100007F"}
    finally:
        dist.destroy_process_group()


def test_a_stranger_in_the_place_of_a_rank_is_refused(launch: Launch, tmp_path: Path) -> None:
    """It finds the keys of the store, is faster than rank 1, and sends rank 0 a pickle that would run."""
    environment = {**os.environ, **launch.environment(0)}
    rank_0 = subprocess.Popen(
        [sys.executable, "-c", RANK],
        env=environment,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    store = TCPStore("127.0.0.1", launch._port, is_master=False, timeout=timedelta(seconds=60))
    try:
        prefix = found_prefix(store)
        dist.init_process_group(
            "gloo",
            store=PrefixStore("torch", PrefixStore(prefix, store)),
            rank=1,
            world_size=2,
            timeout=timedelta(seconds=30),
        )
        process_group._exchange(bytes(32), None)
        process_group._exchange(bytes(32), None)
        with pytest.raises(RuntimeError):
            dist.all_gather_object([None, None], Payload(tmp_path / "executed"))
        _, text = rank_0.communicate(timeout=60)
    finally:
        rank_0.kill()
        rank_0.wait()
        if dist.is_initialized():
            dist.destroy_process_group()
    assert rank_0.returncode == 1
    assert (
        "RankError: rank 0 of 2: the process that joined as rank 1 does not know the secret of this run"
        in text
    )
    assert not (tmp_path / "executed").exists()


def test_bytes_of_a_pickle_are_no_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pickled = pickle.dumps(Payload(tmp_path / "executed"))
    monkeypatch.setattr(process_group, "gather_bytes", lambda data, group=None: [data, pickled])
    for kind in (JsonValue, dict[str, float], str, tuple[int, float]):
        value = {str: "x", dict[str, float]: {"x": 0.5}}.get(kind, None if kind is JsonValue else (1, 0.5))
        with raises(RankError, "bad-reply", rank=1):
            process_group.gather_objects(value, kind)
    assert not (tmp_path / "executed").exists()


def found_prefix(store: TCPStore) -> str:
    """What rank 0 writes its keys under."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        for key in store.list_keys():
            if match := re.match(r"/?(lockstep/[0-9a-f]{64})/", key):
                return match[1]
        time.sleep(0.05)
    raise AssertionError(f"rank 0 wrote nothing: {store.list_keys()}")


def test_the_secret_is_in_no_argument_and_is_not_inherited(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = launch.environment(0)[SECRET]
    assert re.fullmatch(r"[0-9a-f]{64}", secret) and secret not in " ".join(launch.command)
    assert launch.environment(1)[SECRET] == secret != Launch(["true"], ranks=2, log_dir=Path())._secret
    monkeypatch.setenv(SECRET, secret)
    process_group.run_secret.cache_clear()
    try:
        assert process_group.run_secret() == secret and SECRET not in os.environ
    finally:
        process_group.run_secret.cache_clear()
