"""The default process group, for parts that need one also where nobody launched several ranks."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

TIMEOUT = timedelta(minutes=10)
"""No collective waits longer."""
_LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def group_timeout(device: torch.device) -> timedelta:
    """How long a collective of the default process group may take on this kind of device."""
    group = dist.distributed_c10d._get_default_group()
    found: timedelta = group._get_backend(device).options._timeout
    return found


def ensure_process_group(device: torch.device, *, timeout: timedelta = TIMEOUT) -> None:
    """Make the default process group unless there is one: the launcher's (torchrun, deepspeed), or of this
    process alone, on a free port.

    Nothing but the environment is asked who the ranks are; MPI is not.

    Args:
        device: decides the backend, nccl or gloo.
        timeout: of every later collective, and of waiting for the other ranks here.
    """
    if dist.is_initialized():
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    if all(name in os.environ for name in _LAUNCHER):
        dist.init_process_group(backend, timeout=timeout)
        return
    store = TCPStore("127.0.0.1", 0, 1, is_master=True, timeout=timeout)
    dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
