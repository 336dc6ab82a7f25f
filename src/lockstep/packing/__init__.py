"""Pack documents into micro-batches: balanced by token count, padded to static capacities, as plain
tensors."""

from lockstep.packing.balance import balance, ring_shard
from lockstep.packing.groups import PackLimits
from lockstep.packing.packs import (
    Bucket,
    Planner,
    buckets_for,
    empty_batch,
    pack,
    plan_micro_batches,
    repack,
    split_samples,
)
from lockstep.packing.shared import RowCapacity, share, share_in_few_shapes
from lockstep.schema.batch import RingShard

__all__ = [
    "Bucket",
    "PackLimits",
    "Planner",
    "RingShard",
    "RowCapacity",
    "balance",
    "buckets_for",
    "empty_batch",
    "pack",
    "plan_micro_batches",
    "repack",
    "ring_shard",
    "share",
    "share_in_few_shapes",
    "split_samples",
]
