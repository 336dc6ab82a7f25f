"""The default process group, for parts that need one also where nobody launched several ranks."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from lockstep.ranks import rendezvous

TIMEOUT = timedelta(minutes=10)
"""No collective waits longer."""


def group_timeout(device: torch.device) -> timedelta:
    """How long a collective of the default process group may take on this kind of device."""
    group = dist.distributed_c10d._get_default_group()
    found: timedelta = group._get_backend(device).options._timeout
    return found


def ensure_process_group(device: torch.device, *, timeout: timedelta = TIMEOUT) -> None:
    """`rendezvous.join` unless there is a default process group.

    Args:
        device: decides the backend, nccl or gloo.
        timeout: of every later collective, and of waiting for the other ranks here.
    """
    if not dist.is_initialized():
        rendezvous.join("nccl" if device.type == "cuda" else "gloo", timeout=timeout)
