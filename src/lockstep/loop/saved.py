"""What a checkpoint of a run holds: its models, and under rollout.max_lag the rollouts that were begun for
later steps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import cast

from pydantic import TypeAdapter, ValidationError

from lockstep.common_errors import damaged
from lockstep.errors import CheckpointError
from lockstep.loop.policy import Policy
from lockstep.loop.remote_roles import RemoteCritic
from lockstep.loop.roles import Critic, Roles
from lockstep.observe.files import read_plain
from lockstep.protocols import Algorithm, Saved, ValueAlgorithm
from lockstep.protocols.train import FinishSave
from lockstep.ranks.context import RankContext
from lockstep.rollout.partial import PartialRollouts
from lockstep.rollout.shares import SentShare
from lockstep.train.state.files import write_json

_STATE = TypeAdapter(SentShare)
_FILES = "rollouts-*.json"
_MOST_BYTES = 1 << 34
"""Of a file: 16 bytes a token, and the texts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedRollouts:
    """The models of a run and its begun rollouts, as one thing that a checkpoint holds; see protocols.Saved.
    Each rank writes its own rollouts-RANK.json, and reads those of all."""

    models: Saved
    rollouts: PartialRollouts
    ranks: RankContext

    def save(self, directory: Path, *, background: bool = False) -> FinishSave:
        """Save all of it; the rollouts are those of this moment."""
        finish_models = self.models.save(directory, background=background)
        state, file = self.rollouts.state(), directory / _FILES.replace("*", f"{self.ranks.rank:05d}")

        def finish() -> dict[str, str]:
            return finish_models() | {
                file.name: write_json(file, _STATE.dump_python(state, mode="json")).sha256
            }

        return finish

    def load(self, directory: Path, *, verified: bool = False) -> None:
        """Load all of it. Raises CheckpointError: a file is missing or damaged."""
        with self.ranks.fail_together("loading the begun rollouts"):
            files = sorted(directory.glob(_FILES))
            if not files:
                raise CheckpointError(f"no-such-file: {directory / _FILES} is missing", path=directory)
            self.rollouts.restore([_read(file) for file in files])
        self.models.load(directory, verified=verified)  # last: it sets the generators

    def export(self, directory: Path) -> None:
        """Export the models."""
        self.models.export(directory)


def _read(file: Path) -> SentShare:
    raw = read_plain(file, CheckpointError, root=file.parent, limit=_MOST_BYTES)
    try:
        return _STATE.validate_json(raw)
    except ValidationError as error:
        raise damaged(CheckpointError, file, str(error.errors()[0]["msg"]), path=file) from error


def saved(
    policy: Policy,
    critic: Critic | RemoteCritic | None,
    algorithm: Algorithm | None,
    rollouts: PartialRollouts | None,
    ranks: RankContext,
) -> Saved:
    """Return what a checkpoint of a run holds."""
    models: Saved = policy.backend
    if critic is not None:
        value = cast(ValueAlgorithm, algorithm)
        models = Roles(policy=models, others={"value": critic.backend}, algorithm=value, ranks=ranks)
    return models if rollouts is None else SavedRollouts(models=models, rollouts=rollouts, ranks=ranks)
