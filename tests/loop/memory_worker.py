"""`lockstep ARGV`, and its ranks, on a CPU that stands for a GPU: memory is planned, and runs out as the
environment says.

    RUNS_OUT={"rank": 1, "step": 1, "micro_batch": 1, "times": 1}

times: in so many starts.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import fork_server
import torch

from lockstep.cli.main import main
from lockstep.loop import memory_plan, resolve
from lockstep.loop.machine import Machine
from lockstep.models.memory import GIB
from lockstep.observe import flight
from lockstep.ranks import restart
from lockstep.ranks.environment import recovery


def plan_for_a_gpu() -> None:
    """Everything stays on the CPU but the plan. No CUDA context, beside which a tiny model is nothing."""
    with_sizes = resolve._with_sizes

    def planned(run: Any, *, machine: Machine, **more: Any) -> Any:
        gpu = dataclasses.replace(machine, device="cuda", gpu="NVIDIA H100 80GB HBM3", total_bytes=GIB)
        return with_sizes(run, machine=gpu, **more)

    resolve._with_sizes = planned  # type: ignore[assignment]
    memory_plan._RUNTIME_BYTES = {"cpu": 0, "cuda": 0}
    memory_plan._NCCL_BYTES = 0


def run_out(*, rank: int, step: int, micro_batch: int, times: int) -> None:
    """Raise what torch's allocator raises."""
    note, again = flight.note_micro_batch, recovery()
    if int(os.environ.get("RANK", "0")) != rank or (0 if again is None else again.number) >= times:
        return
    fork_server.follow_steps()

    def noted(index: int | None, lengths: Sequence[int]) -> None:
        note(index, lengths)
        if index == micro_batch and fork_server._step == step and torch.is_grad_enabled():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    flight.note_micro_batch = noted


if __name__ == "__main__":
    restart.python = lambda *_, **__: [sys.executable, "-u", __file__]
    plan_for_a_gpu()
    if "RUNS_OUT" in os.environ:
        run_out(**json.loads(os.environ["RUNS_OUT"]))
    sys.exit(main(sys.argv[1:]))
