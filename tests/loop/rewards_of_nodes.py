"""A reward for a test of runs on several nodes: it scores a completion, and ends ranks and nodes.

`events.json` in the working directory lists [RANK, CALL, WHAT]: at the completion of this number that the
rank scores since it was started, it is killed (WHAT: rank), or its node dies (node): all that runs there and
what is in its memory. One event after the other, each once.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

from lockstep.protocols.reward import RewardInput


class EvenShare:
    """The share of even token ids."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, sample: RewardInput) -> float:
        self.calls += 1
        act(self.calls)
        ids = sample.completion_token_ids
        return sum(token % 2 == 0 for token in ids) / max(1, len(ids))


def act(calls: int) -> None:
    for number, (rank, call, what) in enumerate(json.loads(Path("events.json").read_text())):
        done = Path(f"done-{number}")
        if done.exists():
            continue
        if [rank, call] == [int(os.environ.get("RANK", "0")), calls]:
            done.touch()
            end(what)
        return


def end(what: str) -> None:
    ours = parent(os.getppid())  # the reward's process has a supervisor, which the rank started
    dying = [ours]
    if what == "node":
        supervisor = parent(ours)
        host = parent(supervisor)
        dying = [parent(host), host, supervisor, ours]
        variables = Path(f"/proc/{ours}/environ").read_bytes().split(b"\0")
        (folder,) = [v.partition(b"=")[2] for v in variables if v.startswith(b"LOCKSTEP_COPIES=")]
        shutil.rmtree(os.fsdecode(folder))
    for pid in dying:
        os.kill(pid, signal.SIGKILL)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
