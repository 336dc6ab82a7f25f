"""A reward for tests of runs on several ranks: it scores a completion, and at one moment of a run it does to
one rank what the environment says.

    AT=RANK:CALL:ACTION      such as 1:20:kill, at the 20th completion that rank 1 scores

ACTION: kill, stop (SIGSTOP), raise, terminate (SIGTERM to the launcher). Only once in a folder, however often
the run is started again.
"""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

from lockstep.protocols.reward import RewardInput


class EvenShare:
    """The share of even token ids, with noise: a resumed run must draw the same."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, sample: RewardInput) -> float:
        self.calls += 1
        self.act()
        ids = sample.completion_token_ids
        return sum(token % 2 == 0 for token in ids) / max(1, len(ids)) + random.random()

    def act(self) -> None:
        rank, call, action = os.environ.get("AT", "-1:0:none").split(":")
        if rank != os.environ.get("RANK", "0") or int(call) != self.calls or Path("acted").exists():
            return
        Path("acted").touch()
        ours = parent(os.getppid())  # the reward's process has a supervisor, which the rank started
        if action == "kill":
            os.kill(ours, signal.SIGKILL)
        if action == "stop":
            os.kill(ours, signal.SIGSTOP)
        if action == "raise":
            raise ValueError(f"no reward on rank {rank}")
        if action == "terminate":
            os.kill(parent(parent(ours)), signal.SIGTERM)  # the rank has a supervisor, too


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
