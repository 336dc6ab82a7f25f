"""Scores groups of trajectories in a thread, while others are still being sampled."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

from lockstep.errors import RewardError
from lockstep.rollout.environment import Trajectories
from lockstep.rollout.rewards import Scored

Score = Callable[[Sequence[Trajectories]], Sequence[Sequence[Scored | float | None]]]
STEP_SECONDS = 0.5
"""Longest single wait of `ScoreStream.results`, so that Ctrl-C is noticed."""


class ScoreStream:
    """Calls `score` in a thread with all groups that have arrived, one call at a time, so that a slow reward
    gets large batches.

    Args:
        score: returns one list of scores per group, in order. Its own time limits bound `results`.
        on_failure: called in the thread when `score` raises: nothing more is scored.

    Example:
        >>> stream = ScoreStream(environment.score, on_failure=engine.abort)
        >>> stream.add(0, (task_0, trajectories_0))
        >>> scores = stream.results()
        >>> scores[0]
        [Scored(...), ...]
    """

    def __init__(self, score: Score, *, on_failure: Callable[[], None]) -> None:
        self._score, self._on_failure = score, on_failure
        self._added: queue.SimpleQueue[tuple[int, Trajectories] | None] = queue.SimpleQueue()
        self._scores: dict[int, Sequence[Scored | float | None]] = {}
        self._failure: BaseException | None = None
        # A daemon: a reward that never returns must not keep a process alive that wants to end.
        self._thread = threading.Thread(target=self._run, name="rewards", daemon=True)
        self._thread.start()

    def add(self, number: int, group: Trajectories) -> None:
        """Queue a group for scoring; return at once."""
        self._added.put((number, group))

    def results(self) -> dict[int, Sequence[Scored | float | None]]:
        """Wait for the scores of every group that was added. Raises what `score` raised."""
        self.stop()
        while self._thread.is_alive():
            self._thread.join(STEP_SECONDS)
        if self._failure is not None:
            raise self._failure
        return self._scores

    def stop(self) -> None:
        """Take no more groups; the thread ends when those that were added are scored."""
        self._added.put(None)

    @property
    def failed(self) -> bool:
        """Whether `score` raised."""
        return self._failure is not None

    def _scored(self, groups: Sequence[Trajectories]) -> list[Sequence[Scored | float | None]]:
        """The scores of the groups. Raises RewardError: there is not one for each trajectory."""
        scores = [list(of_group) for of_group in self._score(groups)] if groups else []
        got, wanted = [len(of_group) for of_group in scores], [len(group[1]) for group in groups]
        if got != wanted:
            raise RewardError(
                f"wrong-result: the environment's score returned lists of {got} rewards for groups of "
                f"{wanted} trajectories; return one list per group with one reward per trajectory"
            )
        return list(scores)

    def _run(self) -> None:
        stopping = False
        while not stopping:
            batch = [self._added.get()]
            while not self._added.empty():
                batch.append(self._added.get())
            stopping = None in batch
            groups = [added for added in batch if added is not None]
            try:
                scores = self._scored([group for _, group in groups])
            except BaseException as error:  # raised where the results are waited for
                self._failure = error
                self._on_failure()
                return
            self._scores.update(zip((number for number, _ in groups), scores, strict=True))
