"""The state of a run between two steps."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lockstep.ranks.context import RankContext
from lockstep.train.state.rng import rng_state


@dataclass(frozen=True, kw_only=True, slots=True)
class Boundary:
    """What any later save of this boundary writes, so that a step that is cut short leaves nothing in it.
    Weights, optimizer and the algorithm's numbers change in an update only, and need no copy here."""

    done: int
    """Steps."""
    generators: dict[str, Tensor]
    """Of this process; a reward's process has none that last: it is seeded for each sample."""
    state: dict[str, Any]
    """What the session saves as run_state.json."""

    @classmethod
    def take(cls, done: int, state: Mapping[str, Any], *, ranks: RankContext) -> Boundary:
        """Copy the state as it is now, after `done` steps or after an evaluation there."""
        generators = rng_state(all_devices=ranks.world_size == 1)
        return cls(done=done, generators=generators, state=copy.deepcopy(dict(state)))
