"""Logical time of an engine that samples while the trainer works (rollout.schedule = "fixed").

    slot 0   ██ of step t ██│███ of step t + 1 ███│█
    slot 1   ████ of step t █████│██ of t + 2 ████│█     time: in tokens, of each slot
                                 E                B = E + K

Samples take the slots in their order, each the one that is free first, and each slot draws a token at a
time. When those of the step have ended, at E, the slots go on for as long as it takes them to draw as many
tokens as the rollouts of the step have, K. What a sample draws up to the border B follows from lengths alone,
so it does not matter in which order, how fast or how often an engine computes it: what goes beyond B is
dropped.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Entry:
    """A sample in the order in which they take slots."""

    id: str
    first: bool
    """It belongs to the step that is trained next; those come before all others."""
    begun: int
    """Tokens that were drawn before this logical time began."""
    tokens: int = 0
    """Drawn since, as far as is known."""
    over: bool = False
    """Its last one has ended it."""


class LogicalClock:
    """Says when every sample has all its tokens up to the border, and how many these are.

    Args:
        slots: samples that are drawn at the same time.
        tokens: of those rollouts of the step that had ended before.
        queue: samples that are over have all their tokens already.
    """

    def __init__(self, *, slots: int, tokens: int, queue: Sequence[Entry]) -> None:
        self._queue, self._entries = queue, {entry.id: entry for entry in queue}
        self._free = [0] * min(slots, len(queue))  # a heap: when each slot is free
        self._slots, self._before = slots, tokens
        self._limits: dict[str, int] = {}
        self._done = 0
        """Samples at the beginning of the queue whose tokens up to the border are all there."""
        self._left = sum(entry.first and not entry.over for entry in queue)
        self.border: int | None = None
        """None until the samples of the step have ended."""
        if not self._left:
            self._set_border()

    @classmethod
    def of_json(cls, about: dict[str, Any]) -> LogicalClock:
        """Return the clock that `border_json` describes."""
        queue = [Entry(id, first, begun, *drawn) for id, first, begun, *drawn in about["queue"]]
        return cls(slots=about["slots"], tokens=about["tokens"], queue=queue)

    def entry(self, id: str) -> Entry:
        """Return a sample of the queue. Raises KeyError."""
        return self._entries[id]

    def drew(self, id: str, written: int) -> None:
        """Note that a sample has `written` tokens, with those that it had begun with."""
        entry = self._entries[id]
        entry.tokens = written - entry.begun
        if self._done < len(self._queue) and self._queue[self._done] is entry:
            self._look()

    def ended(self, id: str) -> None:
        """Note that a sample's last token has ended it."""
        entry = self._entries[id]
        entry.over = True
        if entry.first:
            self._left -= 1
            if not self._left:
                self._set_border()
        self._look()

    @property
    def reached(self) -> bool:
        """Whether no token up to the border is missing."""
        return self.border is not None and self._done == len(self._queue)

    @property
    def late(self) -> str | None:
        """The first sample with tokens missing up to the border; None if it is reached, or not known yet."""
        known = self.border is not None and not self.reached
        return self._queue[self._done].id if known else None

    def limit(self, id: str) -> int:
        """New tokens of a sample up to the border, which was reached."""
        return self._limits.get(id, 0)

    def shortened(self, id: str, sample: dict[str, Any]) -> dict[str, Any]:
        """Return a sample, as the server sends it, without what goes beyond the border; all of it if the
        border was not reached, because the client had everything aborted."""
        length = self._entries[id].begun + self.limit(id)
        if not self.reached or length >= len(sample["token_ids"]):
            return sample
        shorter = {name: sample[name][:length] for name in ("token_ids", "logprobs")}
        return sample | shorter | {"finish_reason": "abort", "stop_reason": None}

    def _set_border(self) -> None:
        """The step's samples have ended: go through them."""
        total, end = self._before, 0
        while self._done < len(self._queue) and self._queue[self._done].first:
            entry = self._queue[self._done]
            stop = self._free[0] + entry.tokens
            heapq.heapreplace(self._free, stop)
            self._limits[entry.id] = entry.tokens
            total, end = total + entry.begun + entry.tokens, max(end, stop)
            self._done += 1
        self.border = end - (-total // self._slots)
        self._look()

    def _look(self) -> None:
        """Go on through the queue, up to a sample whose tokens are not all there."""
        if self.border is None:
            return
        while self._done < len(self._queue):
            room = self.border - self._free[0]
            if room <= 0:
                self._done = len(self._queue)  # no slot is free any more
                return
            entry = self._queue[self._done]
            if entry.tokens < room and not entry.over:
                return
            self._limits[entry.id] = min(entry.tokens, room)
            heapq.heapreplace(self._free, self.border - room + self._limits[entry.id])
            self._done += 1


def border_json(*, slots: int, tokens: int, queue: Iterable[Entry]) -> dict[str, Any]:
    """Return what LogicalClock.of_json makes a clock from; samples that are not over begin anew."""
    entries = [
        [each.id, each.first, each.begun, *((each.tokens, True) if each.over else ())] for each in queue
    ]
    return {"slots": slots, "tokens": tokens, "queue": entries}
