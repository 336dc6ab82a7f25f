"""One of several ranks: its process groups, its device, its deadline, and how it says why it ends.

    with init_ranks(device="cpu") as ranks:
        ...

Ranks are started by `lockstep.ranks.launch`, torchrun or the deepspeed launcher; all of them leave RANK,
WORLD_SIZE and the address of a store in the environment.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from lockstep.errors import ConfigError, LockstepError
from lockstep.ranks.launch import ERROR_KEY, LAUNCHER_PID

CONTROL_SECONDS = 60.0
"""Deadline of what ranks tell each other about themselves, where nothing else is asked for."""
_PR_SET_PDEATHSIG = 1
_LOST_PEER = re.compile(
    r"closed by peer|pair closure|Broken pipe|Connection reset|Connection refused|remote process exited"
)


class RankError(LockstepError, RuntimeError):
    """Ranks cannot be set up, or cannot work together."""


@dataclass(frozen=True, kw_only=True)
class RankContext:
    """What a rank knows about itself. A context manager: an error that leaves it is posted to the store, so
    that the launcher can name the rank that failed first."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    backend: str
    """"gloo" or "cpu:gloo,cuda:nccl": of the default process group."""
    control: dist.ProcessGroup
    """gloo, on the host, whatever the device: small messages under a deadline."""
    store: Store
    """Shared by all ranks; the launcher's, where it hosts one, outlives every rank."""
    seconds: float
    """Deadline of every wait for another rank."""
    statement: str
    """One line: ranks, backend, devices."""

    def __enter__(self) -> RankContext:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, (SystemExit, KeyboardInterrupt)):
            self.post_error(error)
        self.close(failed=error is not None)

    def post_error(self, error: BaseException) -> None:
        """Tell the store why this rank is about to end."""
        text = "".join(traceback.format_exception(error))
        value = {
            "time": time.time(),
            "type": type(error).__name__,
            "text": text[-20_000:],
            "peer": lost_peer(error),
            "told": isinstance(error, LockstepError),
        }
        try:
            self.store.set(ERROR_KEY.format(rank=self.rank), json.dumps(value))
        except RuntimeError as gone:  # the store's host has died; the log still has it
            print(f"rank {self.rank}: the store is gone ({gone}); the error was:\n{text}", file=sys.stderr)

    def close(self, *, failed: bool = False) -> None:
        """Leave the process groups. After a failure nobody is waited for: the process is about to end, and
        tearing down a group whose collectives are out of step can block."""
        if dist.is_initialized() and not failed:
            dist.destroy_process_group()


def lost_peer(error: BaseException) -> bool:
    """Whether the error says only that another rank has gone."""
    return isinstance(error, RuntimeError) and _LOST_PEER.search(str(error)) is not None


def init_ranks(
    *,
    device: str = "cpu",
    seconds: float = CONTROL_SECONDS,
    environ: Mapping[str, str] | None = None,
) -> RankContext:
    """Join the other ranks.

    Args:
        device: "cpu" or "cuda"; with "cuda" local rank r takes GPU r. More ranks than GPUs share them, over
            gloo, because NCCL refuses two ranks on one GPU.
        seconds: deadline of every wait, from here on.

    Raises:
        ConfigError: the environment is not that of a launcher.
        RankError: the others did not come in time.
    """
    environ = os.environ if environ is None else environ
    rank, world_size, local_rank = (_number(environ, key) for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    if not 0 <= rank < world_size:
        raise ConfigError(f"RANK = {rank} is not one of WORLD_SIZE = {world_size} ranks")
    _die_with_launcher(environ)
    where, backend, statement = _placement(device, local_rank, world_size, environ)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    deadline = timedelta(seconds=seconds)
    try:
        if not dist.is_initialized():
            dist.init_process_group(backend, timeout=deadline)
        control = dist.new_group(backend="gloo", timeout=deadline)
        dist.monitored_barrier(control, timeout=deadline)
    except RuntimeError as error:  # DistStoreError and DistNetworkError are RuntimeErrors
        raise RankError(
            f"rank {rank} of {world_size}: the other ranks did not join within {seconds:g} s. Each of them "
            "must be started, with the same WORLD_SIZE, MASTER_ADDR and MASTER_PORT; look at their logs. "
            f"torch says: {error}"
        ) from error
    assert isinstance(control, dist.ProcessGroup)
    return RankContext(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        device=where,
        backend=backend,
        control=control,
        store=_store(),
        seconds=seconds,
        statement=statement,
    )


def _number(environ: Mapping[str, str], key: str) -> int:
    value = environ.get(key)
    if value is None and key == "LOCAL_RANK":
        value = environ.get("RANK")
    if value is None or not value.isdecimal():
        raise ConfigError(
            f"{key} = {value!r} in the environment is not a number; start the ranks with --ranks N, torchrun "
            "or deepspeed, which set RANK, WORLD_SIZE and LOCAL_RANK"
        )
    return int(value)


def _placement(
    device: str, local_rank: int, world_size: int, environ: Mapping[str, str]
) -> tuple[torch.device, str, str]:
    """Device, backend and what to say about them."""
    if device != "cuda":
        return torch.device(device), "gloo", f"{world_size} ranks on {device}, gloo"
    gpus = torch.cuda.device_count()
    if gpus == 0:
        raise ConfigError("device = 'cuda' on several ranks: this machine shows no GPU; set --device cpu")
    local = int(environ.get("LOCAL_WORLD_SIZE", world_size))
    if local > gpus:
        return (
            torch.device("cuda", local_rank % gpus),
            "gloo",
            f"{world_size} ranks on {gpus} GPU{'s' if gpus > 1 else ''}: several ranks share a GPU, so "
            "collectives go through gloo and the host (NCCL refuses that); times are not those of a real job",
        )
    return (
        torch.device("cuda", local_rank),
        "cpu:gloo,cuda:nccl",
        f"{world_size} ranks, one GPU each, nccl",
    )


def _store() -> Store:
    """Of the launcher, without torch's prefixes, so that the launcher can read it; else the default one."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and LAUNCHER_PID in os.environ:
        return TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            timeout=timedelta(seconds=10),
        )
    store: Any = dist.distributed_c10d._get_default_store()
    return PrefixStore("lockstep", store)


def _die_with_launcher(environ: Mapping[str, str]) -> None:
    """A launcher that was killed cannot end its ranks: on Linux the kernel does, elsewhere a thread that
    looks once a second."""
    if LAUNCHER_PID not in environ:
        return
    launcher = int(environ[LAUNCHER_PID])
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch_parent, args=(launcher,), daemon=True).start()
    if os.getppid() != launcher:  # it died before that
        raise RankError(f"the launcher (pid {launcher}) has gone")


def _watch_parent(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(1.0)
    os._exit(1)
