"""What a rank does in the tests of the watchdog: python hang_worker.py MODE. The third round hangs."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from lockstep.observe import flight
from lockstep.processes.child import relax_gc
from lockstep.ranks.context import RankContext, init_ranks


def main(mode: str) -> None:
    with init_ranks(seconds=120) as ranks:
        for step in range(3):
            flight.note(step=step, phase="optimizer")
            last = step == 2
            if last and mode == "stopped" and ranks.rank == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
            if not (last and mode == "skipped" and ranks.rank == 1):
                dist.all_reduce(torch.zeros(64))
            metrics(ranks, last and mode == "slow")


def metrics(ranks: RankContext, slow: bool) -> None:
    """The end of a step; slow: rank 1 computes for longer than the watchdog's deadline."""
    flight.note(phase="metrics")
    until = time.process_time() + 6
    while slow and ranks.rank == 1 and time.process_time() < until:
        pass
    ranks.gather(0, int, what="the step's metrics")


if __name__ == "__main__":
    relax_gc()
    main(sys.argv[1])
