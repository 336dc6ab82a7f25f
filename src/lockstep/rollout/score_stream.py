"""Score groups of rollouts in a thread of their own while others are still sampled."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

In = TypeVar("In")
Out = TypeVar("Out")

STEP_SECONDS = 0.5
"""Longest single wait of `results`, so that Ctrl-C is seen."""


class ScoreStream(Generic[In, Out]):
    """Calls `score` with what has come until then: one call at a time, so that a slow reward that scores many
    at once gets many at once.

    Args:
        score: one result per input, in order. It has its own time limits; they bound `results`.
        on_failure: called in the thread when `score` raises: nothing more is scored.

    Example:
        >>> stream = ScoreStream(rewards.score, on_failure=engine.abort)
        >>> stream.add(0, inputs_of_group_0)  # from on_completion
        >>> scores = stream.results()
        >>> scores[0]
        [Scored(...), ...]
    """

    def __init__(self, score: Callable[[Sequence[In]], list[Out]], *, on_failure: Callable[[], None]) -> None:
        self._score, self._on_failure = score, on_failure
        self._added: queue.SimpleQueue[tuple[int, Sequence[In]] | None] = queue.SimpleQueue()
        self._scores: dict[int, list[Out]] = {}
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="rewards", daemon=True)
        self._thread.start()

    def add(self, group: int, inputs: Sequence[In]) -> None:
        """Have a group scored; returns at once."""
        self._added.put((group, inputs))

    def results(self) -> dict[int, list[Out]]:
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

    def _run(self) -> None:
        stopping = False
        while not stopping:
            batch = [self._added.get()]
            while not self._added.empty():
                batch.append(self._added.get())
            stopping = None in batch
            groups = [added for added in batch if added is not None]
            try:
                scores = iter(self._score([one for _, inputs in groups for one in inputs]) if groups else ())
            except BaseException as error:  # raised where the results are waited for
                self._failure = error
                self._on_failure()
                return
            self._scores.update(
                (group, [score for _, score in zip(inputs, scores, strict=False)]) for group, inputs in groups
            )
