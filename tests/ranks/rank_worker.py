"""What a rank does in the tests of launch, ranks and collectives: python rank_worker.py MODE."""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from lockstep.processes.child import relax_gc
from lockstep.ranks.context import RankContext, RankError, init_ranks
from lockstep.ranks.guard import Desync, Guard
from lockstep.ranks.launch import leave


def report(ranks: RankContext, **values: object) -> None:
    """Into OUT/rank-N.json."""
    Path(os.environ["OUT"], f"rank-{ranks.rank}.json").write_text(json.dumps(values))


def main(mode: str) -> None:
    with init_ranks(seconds=float(os.environ.get("SECONDS_TO_WAIT", "20"))) as ranks:
        guard = Guard(ranks)
        globals()[mode](ranks, guard)


def sums(ranks: RankContext, guard: Guard) -> None:
    print(f"this is rank {ranks.rank} of {ranks.world_size}")
    print(f"stderr of rank {ranks.rank}", file=sys.stderr)
    first = torch.full((2, 3), 1.0 + ranks.rank)
    second = torch.tensor([0.5, 256.0 * ranks.rank], dtype=torch.bfloat16)
    steps = guard.add_up([first, second], step=4)
    agreed = guard.agree(4, {"input": 10 + ranks.rank}, what="step 4")
    report(
        ranks,
        first=first.flatten().tolist(),
        second=second.tolist(),
        steps=steps,
        inputs=[other["input"] for other in agreed],
        threads=os.environ["OMP_NUM_THREADS"],
        local=[ranks.local_rank, str(ranks.device)],
        position=guard.positions()[1 - ranks.rank] is not None,
        group=os.getpgrp(),
    )


def raises(ranks: RankContext, guard: Guard) -> None:
    guard.at(3, "forward and backward of input 7")
    if ranks.rank == 1:
        raise ValueError("input 7 is \x1b[31m not for me")
    dist.all_reduce(torch.zeros(1))


def killed(ranks: RankContext, guard: Guard) -> None:
    guard.at(3, "forward and backward of input 7")
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.zeros(1))


def stubborn(ranks: RankContext, guard: Guard) -> None:
    """Rank 0 ignores SIGTERM and never ends by itself; it has a child that does neither."""
    if ranks.rank == 1:
        time.sleep(1)
        sys.exit(3)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    Path(os.environ["OUT"], "pids").write_text(f"{os.getpid()} {child.pid}")
    time.sleep(300)


def in_vain(ranks: RankContext, guard: Guard) -> None:
    """Rank 0 has waited for rank 1, which hangs."""
    guard.at(3, "forward and backward of input 7")
    ranks.gather(None, None, what="both are there")
    if ranks.rank == 1:
        time.sleep(300)
    raise RankError("rank 0 of 2, at gradients: a rank did not arrive within 2 s", code="wrong-state")


def fails_with_a_bad_shutdown(ranks: RankContext, guard: Guard) -> None:
    """Of Python, which a thread of gloo can abort; here it always ends with 77."""
    atexit.register(os._exit, 77)
    raise RankError("no luck", code="wrong-state")


def interrupted_with_a_bad_shutdown(ranks: RankContext, guard: Guard) -> None:
    """By a signal that nobody asked the launcher for."""
    atexit.register(os._exit, 77)
    raise KeyboardInterrupt


def told_with_a_bad_shutdown(ranks: RankContext, guard: Guard) -> None:
    """The same, of a command that says what went wrong and has a status of its own."""
    atexit.register(os._exit, 77)
    leave(5)


def waits(ranks: RankContext, guard: Guard) -> None:
    Path(os.environ["OUT"], f"pid-{ranks.rank}").write_text(str(os.getpid()))
    guard.at(0, "a long wait")
    time.sleep(300)


def absent(ranks: RankContext, guard: Guard) -> None:
    """Rank 1 never comes to the gradients of step 2, and is still alive when rank 0 gives up."""
    guard.at(2, "forward and backward of input 9")
    if ranks.rank == 1:
        time.sleep(7)
        return
    start = time.monotonic()
    guard.seconds = 2.0
    try:
        guard.add_up([torch.zeros(5)], step=2)
    except Desync as error:
        report(ranks, text=str(error), seconds=time.monotonic() - start, step=error.step)


def late(ranks: RankContext, guard: Guard) -> None:
    """Rank 1 does not come to the agreement on step 5."""
    guard.seconds = 2.0
    guard.at(4, "forward and backward of input 9")
    if ranks.rank == 1:
        time.sleep(5)
        return
    start = time.monotonic()
    try:
        guard.agree(5, {}, what="agreement on step 5")
    except Desync as error:
        report(ranks, text=str(error), seconds=time.monotonic() - start, step=error.step)


def another_step(ranks: RankContext, guard: Guard) -> None:
    """Rank 1 is a step ahead; unguarded collectives pair up all the same."""
    tensor = torch.ones(3)
    steps = guard.add_up([tensor], step=6 + ranks.rank)
    try:
        guard.agree(6 + ranks.rank, {}, what="the next step")
        text = "agreed"
    except Desync as error:
        text = str(error)
    report(ranks, steps=steps, sum=tensor.tolist(), text=text)


def other_shapes(ranks: RankContext, guard: Guard) -> None:
    """Both gather [B, L] of their own length."""
    own = torch.zeros(2, 3 + 1000 * ranks.rank)
    parts = [torch.zeros_like(own) for _ in range(2)]
    guard.seconds = 3.0
    try:
        with guard.explained(1, "all_gather of [B, L]"):
            dist.all_gather(parts, own)
        text = "no error"
    except Desync as error:
        text = str(error)
    report(ranks, text=text)


if __name__ == "__main__":
    relax_gc()
    main(sys.argv[1])
