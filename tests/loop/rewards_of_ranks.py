"""A reward for tests of runs on several ranks: it scores a completion, and at one moment of a run it does to
one rank what the environment says.

    AT=RANK:STEP:ACTION      such as 1:2:kill

ACTION: kill, raise, terminate (SIGTERM to the launcher), interrupt (SIGINT to the launcher). Only once in a
folder, however often the run is started again.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import lockstep.loop.online
from lockstep.protocols.reward import RewardInput

_step = -1
_sample = lockstep.loop.online.OnlineTrainer.sample


def _noticed(self: Any, step: int) -> Any:
    global _step
    _step = step
    return _sample(self, step)


lockstep.loop.online.OnlineTrainer.sample = _noticed  # type: ignore[method-assign]


class EvenShare:
    """The share of even token ids."""

    def __call__(self, sample: RewardInput) -> float:
        self.act()
        ids = sample.completion_token_ids
        return sum(token % 2 == 0 for token in ids) / max(1, len(ids))

    def act(self) -> None:
        rank, step, action = os.environ.get("AT", "-1:0:none").split(":")
        if rank != os.environ.get("RANK", "0") or int(step) != _step or Path("acted").exists():
            return
        Path("acted").touch()
        if action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if action == "raise":
            raise ValueError(f"no reward on rank {rank}")
        if action in ("terminate", "interrupt"):
            os.kill(os.getppid(), signal.SIGTERM if action == "terminate" else signal.SIGINT)
