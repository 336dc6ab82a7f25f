"""The default process group, for code that needs one also in a single process."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from lockstep.ranks import rendezvous

TIMEOUT = timedelta(minutes=10)
"""Deadline of every collective."""


def group_timeout(device: torch.device) -> timedelta:
    """Return the timeout of the default process group's collectives on this kind of device."""
    # Private, in torch 2.11 to 2.13: a group does not say publicly which timeout it was made with.
    group = dist.distributed_c10d._get_default_group()
    timeout: timedelta = group._get_backend(device).options._timeout
    return timeout


def ensure_process_group(device: torch.device, *, timeout: timedelta = TIMEOUT) -> None:
    """Make the default process group with `rendezvous.join`, unless there is one.

    Args:
        device: decides the backend, nccl or gloo.
        timeout: of every later collective, and of waiting for the other ranks here.
    """
    if not dist.is_initialized():
        rendezvous.join("nccl" if device.type == "cuda" else "gloo", timeout=timeout)
