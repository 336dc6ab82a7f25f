"""The rows that a run leaves out of its data: left_out.jsonl in its folder, and counts in its manifest."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from lockstep.data.lazy import LazyItems, LeftOut
from lockstep.errors import CheckpointError
from lockstep.observe.files import json_lines, write_atomic
from lockstep.observe.run_dir import RunDir
from lockstep.observe.run_history import read_lines
from lockstep.observe.text import printable

NAMED = 100
"""Rows at fault that the manifest names."""
_SHOWN = 5
"""Rows at fault that are shown as they come."""
_SECONDS = 10.0
"""Between two updates of the manifest."""


class RowLog:
    """Writes down what is left out before the batch without it is trained on, so that a run that goes on need
    not read the rows of earlier steps again.

    Args:
        writes: whether this process does; every rank knows the same rows.
        say: shows a line.
    """

    def __init__(
        self, items: LazyItems[Any], run_dir: RunDir, *, writes: bool, say: Callable[[str], None]
    ) -> None:
        self._items, self._dir, self._writes, self._say = items, run_dir, writes, say
        self._named: list[str] = []
        self._news: list[LeftOut] = []
        self._manifest_at = 0.0
        self._stale = False

    def resume(self, steps: int) -> None:
        """Take over what the run has found so far, which is all of its first `steps` steps.

        Raises:
            CheckpointError: left_out.jsonl is damaged.
            DataError: it is of other data.
        """
        path = self._dir.left_out
        rows = read_lines(path) if path.exists() else []
        known: dict[int, str] = {}
        for row in rows:
            number, state = row.get("item"), row.get("state")
            if not isinstance(number, int) or not isinstance(state, str):
                raise CheckpointError(
                    f"wrong-field: {path}: a line has item {number!r:.80} and state {state!r:.80}, no number "
                    "and text; remove the file, and the rows of the steps that are done are read again"
                )
            known[number] = state
        self._news = [each for each in self._items.pop_news() if each.number not in known]
        self._named = [str(row["why"]) for row in rows if row["state"] == "bad" and row.get("why")][:NAMED]
        self._stale = bool(known)
        if path.exists() and self._writes:
            self._drop_torn_line()
        # The file of a run that has left nothing out so far is empty; without it the rows are read again.
        if path.exists() or not steps:
            self._items.trust(known, steps=steps)
            self.write()

    def _drop_torn_line(self) -> None:
        """Remove the last line if its write was cut short: its batch was not trained on."""
        path = self._dir.left_out
        with self._dir.writing(path):
            content = path.read_bytes()
            if content and not content.endswith(b"\n"):
                os.truncate(path, content.rfind(b"\n") + 1)

    def write(self) -> None:
        """Write what was left out since the last call, before the batch without it is trained on."""
        news, self._news = [*self._news, *self._items.pop_news()], []
        bad = [each.why for each in news if each.state == "bad" and each.why]
        for why in bad[: max(_SHOWN - len(self._named), 0)]:
            self._say(f"row skipped: {printable(why)}")
        self._named += bad[: NAMED - len(self._named)]
        if self._writes and self._items.selective and not self._items.whole:
            self._append([{"item": each.number, "state": each.state, "why": each.why} for each in news])
        self._stale |= bool(news)
        if self._stale and time.monotonic() - self._manifest_at > _SECONDS:
            self._update_manifest()

    def _append(self, lines: list[dict[str, Any]]) -> None:
        path = self._dir.left_out
        with self._dir.writing(path):
            if not path.exists():
                # At once: half of a file would count as all that was found.
                write_atomic(path, json_lines(lines))
            elif lines:
                with path.open("a", encoding="utf-8") as file:
                    file.write(json_lines(lines))
                    file.flush()
                    os.fsync(file.fileno())

    def _update_manifest(self) -> None:
        if self._writes:
            counts = {name: n for name, n in self._items.counts.items() if n and name != "absent"}
            self._dir.update_manifest({"rows": counts | {"bad_rows": self._named}})
        self._stale, self._manifest_at = False, time.monotonic()

    def close(self) -> None:
        """Write the last counts, and end the threads that make items."""
        self._items.close()
        if self._stale:
            self._update_manifest()
