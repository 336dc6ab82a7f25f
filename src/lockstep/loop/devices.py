"""GPUs of their own for worlds and engines, as this rank gives them to the processes beside it."""

from __future__ import annotations

import os

import torch

from lockstep.config.cluster import NodeLayout
from lockstep.config.run import GRPORun
from lockstep.engine.remote.server import server_gpus
from lockstep.ranks.context import RankContext, local_ranks


def layout_here(run: GRPORun, ranks: RankContext) -> NodeLayout:
    """Which device of this node is whose, however its ranks were started."""
    local = 1 if ranks.world_size == 1 else local_ranks(os.environ) or ranks.world_size
    return NodeLayout(ranks=local) if run.cluster is None else run.cluster.layout(local)


def check_devices(run: GRPORun, *, ranks: RankContext) -> None:
    """Raise ConfigError if this node shows fewer GPUs than the run's processes are to have."""
    if run.cluster is not None and run.train.device != "cpu" and torch.cuda.is_available():
        run.cluster.check_devices(layout_here(run, ranks), there=torch.cuda.device_count())


def gpus_of_world(run: GRPORun, number: int, *, ranks: RankContext) -> dict[str, str]:
    """The environment that shows a process of a world beside the policy's, counted from 0, its GPU: all of
    its world on this node, of which it takes that of its local rank, so that NCCL works among them. Empty: it
    sees what its rank sees."""
    layout = layout_here(run, ranks)
    if not layout.worlds:
        return {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return {"CUDA_VISIBLE_DEVICES": server_gpus(layout.of_world(number), device="cuda", visible=visible)}


def with_own_gpus(run: GRPORun, device: str, *, ranks: RankContext) -> GRPORun:
    """The run with the GPUs that this rank's engine has for itself as engine.cuda_devices."""
    devices = layout_here(run, ranks).of_engine(ranks.local_rank)
    if not devices or not device.startswith("cuda"):
        return run
    return run.model_copy(update={"engine": run.engine.model_copy(update={"cuda_devices": devices})})
