"""Environment variables of ranks. No torch: the launcher has none."""

from __future__ import annotations

import functools
import itertools
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

LAUNCHER_PID = "LOCKSTEP_LAUNCHER_PID"
"""In the environment of ranks that `launch_ranks` started: the process that started them."""
SECRET = "LOCKSTEP_RANKS_SECRET"
"""In the environment of ranks, never in an argument, which everybody on the machine can read: the secret that
ranks prove to each other to know. `launch_ranks` draws one; under torchrun the user may set one on every
node."""
FLIGHT_DIR = "LOCKSTEP_FLIGHT_DIR"
"""In the environment of ranks that are watched: the folder for their flight records. Who starts them ends
them when none makes progress for the deadline, so their own deadlines are later (BACKSTOP_SECONDS)."""
BACKSTOP_SECONDS = 30.0
"""How much later than the watchdog a watched rank gives up by itself."""
WAIT_SECONDS = 1800.0
"""How long a rank of a training run waits for another unless set otherwise; long enough for slow rewards."""
COPIES = "LOCKSTEP_COPIES"
"""In the environment of ranks that are restarted after a death (cluster.peer_copy): the folder for copies of
their state (lockstep.ranks.in_memory_checkpoint)."""
COPY_PLACE = "LOCKSTEP_COPY_PLACE"
"""In the environment of such ranks on several nodes, until their node's host has read it: where the host
makes such a folder in the node's own memory (lockstep.loop.peer_checkpoint_server)."""
PEER_SERVER = "LOCKSTEP_PEER_CHECKPOINT_SERVER"
"""In the environment of those ranks: address, port and token, as JSON, of the peer checkpoint server of their
node. Removed at the start, so that no child of a rank inherits it."""
WARM_SPARES = "LOCKSTEP_WARM_SPARES"
"""In the environment of such ranks on a cluster, until their node's host has read it: keep warm spares there
(lockstep.ranks.warm_spares)."""
TURN = "LOCKSTEP_TURN"
"""In the environment of a spare: the named pipe that tells it which rank it becomes."""
RESTART = "LOCKSTEP_RESTART"
"""In the environment of ranks that were restarted after a death: lockstep.ranks.environment.Recovery."""


# What a restarted rank knows of the death before it, and how long each phase of the restart has taken.


@dataclass(kw_only=True, slots=True)
class Recovery:
    """A restart of all ranks."""

    number: int
    """From 1."""
    most: int
    """cluster.max_restarts."""
    run_dir: str | None
    """The run to resume; None: it had not begun."""
    died: float
    """When the launcher noticed the death, in Unix seconds."""
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds since the end of the previous phase, or since the death."""

    @property
    def resume(self) -> Path | None:
        """The folder of the run to resume."""
        return None if self.run_dir is None else Path(self.run_dir)

    @property
    def seconds(self) -> float:
        """Seconds from the death to the end of the last phase."""
        return sum(self.phases.values())

    def mark(self, phase: str) -> None:
        """Record that a phase ends now."""
        self.phases[phase] = time.time() - self.died - self.seconds

    def environment(self) -> dict[str, str]:
        """Return the environment that tells new ranks about the restart."""
        return {RESTART: json.dumps(asdict(self))}

    def __str__(self) -> str:
        phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.phases.items())
        return f"restart {self.number} of {self.most}: {self.seconds:.1f} s from the death on ({phases})"


@functools.cache
def recovery() -> Recovery | None:
    """Return the restart that this process belongs to; None: the first start."""
    text = os.environ.get(RESTART)
    return None if text is None else Recovery(**json.loads(text))


def visible_gpus() -> int:
    """Return the number of NVIDIA GPUs that CUDA_VISIBLE_DEVICES leaves to this process."""
    there = len(list(Path("/dev").glob("nvidia[0-9]*")))
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return there
    # CUDA ends the list at the first entry that names no device.
    entries = itertools.takewhile(lambda entry: entry not in ("", "-1"), map(str.strip, named.split(",")))
    return min(there, len(list(entries)))


def in_launcher() -> bool:
    """Return whether torchrun, the deepspeed launcher or `launch_ranks` started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def without_local_rank(argv: Sequence[str]) -> list[str]:
    """Return argv without the `--local_rank=N` that the deepspeed launcher puts before all other arguments;
    the environment has the same number as LOCAL_RANK.

    Example:
        >>> without_local_rank(["--local_rank=1", "replay", "--ranks", "2"])
        ['replay', '--ranks', '2']
    """
    rest = list(argv)
    while rest and rest[0].partition("=")[0] in ("--local_rank", "--local-rank"):
        del rest[: 1 if "=" in rest[0] else 2]
    return rest


def threads_per_rank(ranks: int) -> int:
    """Return the cores that this process may use, divided by `ranks`; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // ranks)
