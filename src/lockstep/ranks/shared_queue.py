"""A queue of work that all ranks take from: whoever has room takes the next item."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.ranks.context import RankContext, RankError

QUEUE_KEY = "queue/{name}"


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedQueue:
    """The numbers 0 to length - 1, each of which one rank gets: a counter in the ranks' store, which adds in
    one piece. Nobody waits for another rank.

    Args:
        name: the same on every rank, and that of no other queue of the run's processes.
    """

    ranks: RankContext
    name: str
    length: int

    def take(self) -> int | None:
        """Return the next number; None if none is left. Raises RankError: the store is gone."""
        number = self._add(1) - 1
        return number if number < self.length else None

    def close(self) -> None:
        """Leave nothing to take, such as after an error: the step fails, and others need not work on it.
        Raises as `take`."""
        self._add(self.length)

    def _add(self, count: int) -> int:
        try:
            return int(self.ranks.store.add(QUEUE_KEY.format(name=self.name), count))
        except RuntimeError as error:
            raise RankError(
                f"rank {self.ranks.rank} of {self.ranks.world_size}: the ranks' store is gone, so there is "
                f"nothing to take from queue {self.name!r} (torch says: {error})",
                code="peer-failed",
            ) from error
