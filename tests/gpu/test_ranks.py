"""Gathered keys and sums in rank order over NCCL, on as many GPUs as the variable says:

LOCKSTEP_GPU_RANKS=2 python -m pytest tests/gpu/test_ranks.py

Whole runs, of which every gap must be 0: python benchmarks/several_gpus.py split --gpus 2 (or 4).
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from starting import run_ranks

RANKS = int(os.environ.get("LOCKSTEP_GPU_RANKS", "0"))
pytestmark = pytest.mark.skipif(RANKS < 2, reason="LOCKSTEP_GPU_RANKS is not 2 or more")
KERNEL_ERROR = 6e-3
"""Of gradients: the kernels round the shares of dk and dv to bfloat16, as the ring of p2p does."""


def test_bits_over_ranks() -> None:
    found = [
        of_rank[0]
        for of_rank in run_ranks(Path(__file__).with_name("ranks_worker.py"), ranks=RANKS, seconds=400)
    ]
    print(found)
    for of_rank in found:
        assert of_rank["sums"] == {"differ": 0, "replayed": 0}
        assert of_rank["ring"]["differ"] == of_rank["ring"]["again"] == 0
        assert of_rank["ring"]["gradient"] < KERNEL_ERROR
