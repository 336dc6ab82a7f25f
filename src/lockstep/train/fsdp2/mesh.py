"""Ranks as a mesh of data parallel x ring attention x tensor parallel, tensor parallel innermost.

8 ranks at ring = 2, tp = 2:

    rank            0  1  2  3  4  5  6  7
    dp              0  0  0  0  1  1  1  1      who has which micro-batches
    ring            0  0  1  1  0  0  1  1      who has which tokens of a micro-batch
    tp              0  1  0  1  0  1  0  1      who has which part of each matrix
    shard group     {0, 2, 4, 6} and {1, 3, 5, 7}: dp and ring together, over which FSDP2 shards
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lockstep.errors import ConfigError
from lockstep.ranks import process_group
from lockstep.ranks.process_group import ensure_process_group, group_timeout


@dataclass(frozen=True, kw_only=True)
class RankMesh:
    """This rank's position in the mesh, and its process groups."""

    dp: int
    ring: int
    tp: int
    dp_rank: int
    ring_rank: int
    tp_rank: int
    world: dist.ProcessGroup
    shard: DeviceMesh
    """1-D, the ranks of this tensor parallel coordinate: position dp_rank * ring + ring_rank."""
    shard_group: dist.ProcessGroup
    ring_group: dist.ProcessGroup
    tp_group: dist.ProcessGroup

    @property
    def sizes(self) -> dict[str, int]:
        """By axis."""
        return {"dp": self.dp, "ring": self.ring, "tp": self.tp}

    @property
    def shards(self) -> int:
        """Ranks that share each Parameter."""
        return self.dp * self.ring

    @property
    def shard_rank(self) -> int:
        """Position among them."""
        return self.dp_rank * self.ring + self.ring_rank


def mesh_sizes(world_size: int, *, ring: int, tp: int) -> tuple[int, int, int]:
    """(dp, ring, tp).

    Raises:
        ConfigError: ring * tp does not divide the number of ranks.
    """
    if world_size % (ring * tp):
        fits = list(range(ring * tp, 4 * ring * tp + 1, ring * tp))
        raise ConfigError(
            f"not-divisible: {world_size} ranks cannot be a mesh of dp x ring x tp with train.ring = {ring} "
            f"and train.tp = {tp}: {ring} * {tp} = {ring * tp} does not divide {world_size}. Start "
            f"{fits[0]} or a multiple of it ({', '.join(map(str, fits[1:4]))}), or set train.ring and "
            f"train.tp so that their product divides {world_size}",
            setting="train.tp",
            ranks=world_size,
        )
    return world_size // (ring * tp), ring, tp


def make_mesh(device: torch.device, *, ring: int, tp: int) -> RankMesh:
    """The mesh of all ranks; collective.

    Args:
        device: of the model; decides the kind of collectives.

    Raises:
        ConfigError: the sizes do not divide, on every rank.
    """
    ensure_process_group(device)
    sizes = mesh_sizes(dist.get_world_size(), ring=ring, tp=tp)
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("dp", "ring", "tp"))
    # One axis: fully_shard takes a mesh of two for hybrid sharding, copies along the first and shards along
    # the second. _flatten is private, in torch 2.11 to 2.13.
    shard = mesh["dp", "ring"]._flatten("shard")
    groups = {name: mesh.get_group(name) for name in ("dp", "ring", "tp")} | {"shard": shard.get_group()}
    for group in groups.values():
        # init_device_mesh takes no timeout; the default group's is what --rank-timeout says.
        dist.distributed_c10d._set_pg_timeout(group_timeout(device), group)
        # Its ranks have met in the store again, where a stranger may have taken a place.
        process_group.prove(group)
    dp_rank, ring_rank, tp_rank = (mesh.get_local_rank(name) for name in ("dp", "ring", "tp"))
    world = dist.group.WORLD
    assert world is not None
    return RankMesh(
        dp=sizes[0],
        ring=sizes[1],
        tp=sizes[2],
        dp_rank=dp_rank,
        ring_rank=ring_rank,
        tp_rank=tp_rank,
        world=world,
        shard=shard,
        shard_group=groups["shard"],
        ring_group=groups["ring"],
        tp_group=groups["tp"],
    )
