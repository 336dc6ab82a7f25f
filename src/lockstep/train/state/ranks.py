"""Ranks that save and load together: if one of them fails, all stop."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator

import torch.distributed as dist

from lockstep.errors import CheckpointError, LockstepError
from lockstep.ranks.process_group import gather_objects


class StateRanks:
    """The ranks of a group; None is this process alone, and then nothing is collective."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    def gather(self, value: str | None) -> list[str | None]:
        """Gather a value of every rank on every rank."""
        if self.size == 1:
            return [value]
        return gather_objects(value, str | None, group=self._group)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """A context that every rank leaves, after which all of them know whether one failed; no collectives
        inside.

        Raises:
            CheckpointError: on every rank that did not fail itself, naming those that did; a rank that failed
                raises its own error, with its number if it is a CheckpointError.
        """
        failure: Exception | None = None
        try:
            yield
        # Whatever it is, the others must hear of it: they would wait in the next collective.
        except Exception as error:
            failure = error
        if self.size == 1:
            if failure is not None:
                raise failure
            return
        data = failure.data if isinstance(failure, LockstepError) else {"code": "peer-failed"}
        told = self.gather(None if failure is None else json.dumps([f"{failure}", data]))
        messages = [None if text is None else json.loads(text)[0] for text in told]
        failed = [f"rank {rank} of {self.size}: {m}" for rank, m in enumerate(messages) if m is not None]
        if failure is not None and not isinstance(failure, (CheckpointError, OSError)):
            raise failure
        if failed:
            # Often all ranks find the same fault: it is said once.
            text = failed[0] if len(set(messages)) > 1 or len(failed) == 1 else f"every rank: {messages[0]}"
            first = next(json.loads(text)[1] for text in told if text is not None)
            raise CheckpointError(text, **first) from failure
