"""The models that a run trains, as one thing to save, load and export.

The policy's files lie at the top of a checkpoint, those of every other role in a folder of its name. So the
checkpoint of a run without other roles is one of its policy alone, and tools that read a policy read both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lockstep.protocols import Saved
from lockstep.protocols.train import FinishSave
from lockstep.ranks.context import RankContext


@dataclass(frozen=True, kw_only=True, slots=True)
class Roles:
    """See protocols.Saved. Collective where the roles' backends are."""

    policy: Saved
    others: Mapping[str, Saved]
    ranks: RankContext

    def save(self, directory: Path, *, background: bool = False) -> FinishSave:
        """Save all of them; what is random is in the state of each, and nothing is drawn between."""
        finishes = {"": self.policy.save(directory, background=background)}
        for role, backend in self.others.items():
            folder = directory / role
            self.ranks.from_first(folder.mkdir, what=f"beginning the checkpoint of role {role}")
            finishes[f"{role}/"] = backend.save(folder, background=background)

        def finish() -> dict[str, str]:
            return {
                f"{prefix}{name}": digest
                for prefix, own in finishes.items()
                for name, digest in own().items()
            }

        return finish

    def load(self, directory: Path, *, verified: bool = False) -> None:
        """Load all of them."""
        self.policy.load(directory, verified=verified)
        for role, backend in self.others.items():
            backend.load(directory / role, verified=verified)

    def export(self, directory: Path) -> None:
        """Export the policy to `directory`, and each other role beside it: export-value beside export."""
        self.policy.export(directory)
        for role, backend in self.others.items():
            backend.export(directory.with_name(f"{directory.name}-{role}"))
