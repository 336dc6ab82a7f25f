"""The models that a run trains, as one thing to save, load and export.

The policy's files lie at the top of a checkpoint, those of every other role in a folder of its name, and what
the algorithm remembers in algorithm.json. So the checkpoint of a run without other roles is one of its policy
alone, and tools that read a policy read both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import CheckpointError
from lockstep.protocols import Saved, ValueAlgorithm
from lockstep.protocols.train import FinishSave
from lockstep.ranks.context import RankContext
from lockstep.train.state.files import read_json, write_json

ALGORITHM = "algorithm.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Roles:
    """See protocols.Saved. Collective where the roles' backends are."""

    policy: Saved
    others: Mapping[str, Saved]
    algorithm: ValueAlgorithm
    """Its numbers are ALGORITHM."""
    ranks: RankContext

    def save(self, directory: Path, *, background: bool = False, in_memory: bool = False) -> FinishSave:
        """Save all of them; what is random is in the state of each, and nothing is drawn between."""
        # A backend of the user's need not know the argument.
        how = {"background": background} | ({"in_memory": True} if in_memory else {})
        finishes = {"": self.policy.save(directory, **how)}
        for role, backend in self.others.items():
            folder = directory / role
            with self.ranks.together(f"beginning the checkpoint of role {role}"):
                folder.mkdir(exist_ok=True)  # of each node that has a folder of its own
            finishes[f"{role}/"] = backend.save(folder, **how)

        numbers = self.ranks.from_first(
            lambda: write_json(directory / ALGORITHM, self.algorithm.state(), in_memory=in_memory).sha256,
            str,
            what="saving the algorithm's state",
        )

        def finish() -> dict[str, str]:
            own = {f"{prefix}{name}": sha for prefix, of in finishes.items() for name, sha in of().items()}
            return own | ({ALGORITHM: numbers} if self.ranks.is_first else {})

        return finish

    def load(self, directory: Path, *, verified: bool = False) -> None:
        """Load all of them."""
        with self.ranks.together("loading the algorithm's state"):  # else one would go on without the others
            state = read_json(directory / ALGORITHM)
            if not isinstance(state, dict) or not all(_is_number(value) for value in state.values()):
                raise CheckpointError(
                    f"damaged-file: {directory / ALGORITHM} holds no numbers by name; it is damaged",
                    path=directory / ALGORITHM,
                )
            self.algorithm.load_state(state)
        for role, backend in self.others.items():
            backend.load(directory / role, verified=verified)
        # Last: what is random in this process is in its state. Others may have been saved by another process.
        self.policy.load(directory, verified=verified)

    def export(self, directory: Path) -> None:
        """Export the policy to `directory`, and each other role beside it: export-value beside export."""
        self.policy.export(directory)
        for role, backend in self.others.items():
            backend.export(directory.with_name(f"{directory.name}-{role}"))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
