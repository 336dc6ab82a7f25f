"""Ranks that sample with engines that may be started again."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from lockstep.config.engine import EngineConfig
from lockstep.ranks.context import RankContext, RankError
from lockstep.transfer.buckets import BucketTransfer
from lockstep.transfer.senders import MemorySender


def test_a_rank_that_lost_another_in_a_recovery_waits_for_it_once() -> None:
    """Expected: one collective, by hand: each waits for the whole deadline of the ranks."""
    asked = []

    def gone(flag: bool, *, what: str) -> bool:
        asked.append(flag)
        raise RankError("rank 1 is gone", code="lost")

    transfer = BucketTransfer(EngineConfig(verify="off"), MemorySender(), device=torch.device("cpu"))
    spread = SimpleNamespace(weights=lambda policy_version: SimpleNamespace(shared_module=None))
    transfer._last = cast(Any, (spread, "engine", 7))
    ranks = cast(RankContext, SimpleNamespace(world_size=2, any=gone))
    with pytest.raises(RankError, match="rank 1 is gone"):
        transfer.serve(transfer._recover, ranks=ranks)
    assert asked == [True]
