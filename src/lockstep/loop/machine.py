"""The machine that a run starts on: its devices, the memory of its GPUs, and the processes that hold some."""

from __future__ import annotations

import math
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.config.cluster import ClusterConfig, NodeLayout
from lockstep.config.run import RunConfig
from lockstep.errors import ConfigError
from lockstep.models.memory import gib
from lockstep.observe.text import printable
from lockstep.ranks.context import RankContext, local_ranks

_SMI = ("nvidia-smi", "--query-compute-apps=gpu_uuid,pid,used_memory", "--format=csv,noheader,nounits")
_SMI_SECONDS = 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The devices and the memory that a run finds at its start."""

    device: str
    """cpu, cuda or cuda:N: of this rank."""
    ranks: int = 1
    """The number of ranks that share a step."""
    gpu: str = ""
    """Name of the device, of all ranks' the smallest; empty: a CPU."""
    total_bytes: int = 0
    """Memory to plan with: of the device, or this rank's share of it; the least of all ranks. Under
    train.plan_for_free what is free of it. 0: a CPU."""
    free_bytes: int = 0
    """Free memory of this rank's device at the start; 0: not known."""
    unequal: str = ""
    """A line for the user where the ranks' devices differ in size."""
    engine_gpus: tuple[int, ...] = ()
    """Devices that this rank's engine has for itself."""


def find_machine(run: RunConfig, ranks: RankContext | None = None) -> Machine:
    """Return what `run` finds on this rank. Collective.

    Raises:
        ConfigError: train.device names a device that this machine does not have.
    """
    ranks = ranks or RankContext.alone()
    device = _device(run.train.device, ranks)
    return Machine(
        device=device,
        ranks=ranks.world_size,
        engine_gpus=layout_here(run.cluster, ranks).of_engine(ranks.local_rank),
        **_gpu_memory(torch.device(device), ranks, plan_for_free=run.train.plan_for_free),
    )


def layout_here(cluster: ClusterConfig | None, ranks: RankContext) -> NodeLayout:
    """Return the assignment of this node's devices, however its ranks were started."""
    local = 1 if ranks.world_size == 1 else local_ranks(os.environ) or ranks.world_size
    return NodeLayout(ranks=local) if cluster is None else cluster.layout(local)


def check_devices(cluster: ClusterConfig | None, device: str, *, ranks: RankContext) -> None:
    """Raise ConfigError if this node has fewer GPUs than the run's processes need. device: of this rank."""
    if cluster is not None and device != "cpu":
        cluster.check_devices(layout_here(cluster, ranks), there=torch.cuda.device_count())


def _device(named: str, ranks: RankContext) -> str:
    """Return the device that train.device means on this rank."""
    if ranks.world_size > 1:
        return str(ranks.device)
    if named == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(named)
    except RuntimeError as error:
        raise ConfigError(
            f"wrong-format: train.device = {named!r} is not a device; set auto, cpu, cuda or cuda:N"
        ) from error
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ConfigError(
            f"missing-device: train.device = {named!r}, but torch {torch.__version__} sees {count} CUDA "
            "devices; set train.device = 'cpu', or install a CUDA build of torch and a driver (`lockstep "
            "doctor` shows the detected devices)"
        )
    return named


def _gpu_memory(device: torch.device, ranks: RankContext, *, plan_for_free: bool) -> dict[str, Any]:
    """Return what a Machine says about GPUs. Collective: every rank decides by the same numbers."""
    if device.type != "cuda":
        return {}
    sharing = 1
    if ranks.world_size > 1:
        local = local_ranks(os.environ) or ranks.world_size
        sharing = max(1, math.ceil(local / torch.cuda.device_count()))
    # Blocks that torch's allocator keeps for this process are as good as free.
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    own: dict[str, Any] = {
        "name": torch.cuda.get_device_name(device),
        "total": torch.cuda.get_device_properties(device).total_memory // sharing,
        "free": (torch.cuda.mem_get_info(device)[0] + kept) // sharing,
    }
    everyone = ranks.gather(own, dict[str, Any], what="comparing the GPUs' memory")
    least = min(everyone, key=lambda gpu: gpu["total"])
    free = min(gpu["free"] for gpu in everyone)
    return {
        "gpu": least["name"],
        "total_bytes": free if plan_for_free else least["total"],
        "free_bytes": own["free"],
        "unequal": _unequal(everyone),
    }


def _unequal(gpus: Sequence[Mapping[str, Any]]) -> str:
    """The sizes of GPUs by rank, where they differ."""
    ranks_of: dict[tuple[str, int], list[int]] = {}
    for rank, gpu in enumerate(gpus):
        ranks_of.setdefault((gpu["name"], gpu["total"]), []).append(rank)
    if len({total for _, total in ranks_of}) < 2:
        return ""
    listed = [
        f"{name} with {gib(total)} on rank{'s' if len(on) > 1 else ''} {', '.join(map(str, on))}"
        for (name, total), on in ranks_of.items()
    ]
    return f"GPUs of different sizes: {'; '.join(listed)}. The memory plan goes by the smallest"


def check_free(needed: int, free: int, *, device: torch.device) -> None:
    """Raise ConfigError if other processes hold memory that this rank's plan needs.

    Args:
        needed: bytes of the plan, without the CUDA context, which is there already.
        free: bytes.
    """
    if needed <= free:
        return
    raise ConfigError(
        f"out-of-memory: the memory plan needs {gib(needed)} on {device} beside the CUDA context, but only "
        f"{gib(free)} are free: {'; '.join(_holders(device))}. End what holds it, choose other GPUs with "
        "CUDA_VISIBLE_DEVICES, or plan with what is free: --plan-for-free",
        setting="train.plan_for_free",
        needed_bytes=needed,
        free_bytes=free,
    )


def _holders(device: torch.device) -> Iterator[str]:
    """Yield which processes hold memory of a GPU, as far as the driver shows them."""
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    try:
        listed = subprocess.run(
            _SMI, capture_output=True, text=True, errors="replace", timeout=_SMI_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        yield f"who holds the rest is not known (nvidia-smi: {printable(str(error))})"
        return
    rows = [[word.strip() for word in line.split(",")] for line in listed.stdout.splitlines()]
    others = [row for row in rows if len(row) == 3 and row[0].endswith(uuid) and row[1] != str(os.getpid())]
    for _, pid, used in others:
        held = gib(int(used) * 2**20) if used.isdecimal() else "an unknown size"
        yield f"pid {printable(pid)} holds {held}"
    if not others:
        yield "nvidia-smi shows no process that holds the rest (in a container it shows none outside)"
