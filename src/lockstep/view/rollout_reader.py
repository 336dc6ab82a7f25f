"""Answers queries for the rollouts of one run: from its index, or from the files until the index is built."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from itertools import groupby, islice
from pathlib import Path

from lockstep.view.index import IndexUnavailable, RolloutIndex
from lockstep.view.rollout_files import RolloutFile, Row, list_files, read_at, read_rows
from lockstep.view.rollouts import Pieces, Rollout, RolloutPage, RolloutQuery, no_pieces

_SCAN_SECONDS = 0.7
"""How long files are read for one answer without an index: the page is there within 1.5 s."""
_COUNT_SECONDS = 0.2
"""The same once the page is full, and more files would only tell how many rollouts there are."""
_MOST_NAMED = 20


class RolloutReader:
    """The rollouts of one run. Its methods may be called from several threads.

    Args:
        pieces: spells token ids.
        cache: folder of the index; None: the user's cache folder.
    """

    def __init__(self, run: Path, *, pieces: Pieces = no_pieces, cache: Path | None = None) -> None:
        self._run, self._pieces = run, pieces
        self._index = RolloutIndex(run, folder=cache)
        self._stop = threading.Event()
        self._starting = threading.Lock()
        self._builder: threading.Thread | None = None
        self._why_no_index = ""

    def steps(self) -> list[int]:
        """Return the training steps of which there are rollouts, in order."""
        return [file.step for file in list_files(self._run) if file.step is not None]

    def evaluations(self) -> list[str]:
        """Return the names of the evaluations of which there are rollouts; "before" first, "after" last."""
        return [file.evaluation for file in list_files(self._run) if file.evaluation is not None]

    def first_of(self, evaluation: str, count: int) -> list[Rollout]:
        """Return the first rollouts of an evaluation, at most `count`."""
        files = [file for file in list_files(self._run) if file.evaluation == evaluation]
        rows = (row for file in files for row in read_rows(file, pieces=self._pieces, problems=[]))
        return [row.rollout for row in islice(rows, count)]

    def page(self, query: RolloutQuery) -> RolloutPage:
        """Return the rollouts that a query asks for. Files that the index does not hold yet start it in a
        thread; until it holds all, the answer comes from files that are read for a limited time."""
        files = list_files(self._run)
        indexed = self._indexed(files)
        problems = [self._why_no_index] if self._why_no_index else []
        if indexed == len(files):
            page = self._search(query, files, problems)
            if page is not None:
                return page
        return self._scan(query, files, indexed / max(1, len(files)), problems)

    def group(self, step: int, prompt_index: int, *, evaluation: str | None = None) -> list[Rollout]:
        """Return the rollouts of one prompt in a step or an evaluation, by sample; none if there are none."""
        files = list_files(self._run)
        of = [f for f in files if f.evaluation == evaluation and (evaluation or f.step == step)]
        rows = [
            row.rollout
            for file in of
            for row in read_rows(file, pieces=self._pieces, prompt_index=prompt_index, problems=[])
        ]
        return sorted((one for one in rows if one.step == step), key=lambda one: one.sample)

    def build(self, *, seconds: float) -> float:
        """Wait for the index, at most so long; return the share of the files that it holds."""
        until = time.monotonic() + seconds
        while True:
            files = list_files(self._run)
            if (indexed := self._indexed(files)) == len(files) or time.monotonic() > until:
                return indexed / max(1, len(files))
            builder = self._builder
            if builder is not None:
                builder.join(min(1.0, max(0.0, until - time.monotonic())))

    def close(self) -> None:
        """Stop building the index."""
        self._stop.set()
        if self._builder is not None:
            self._builder.join()
        self._index.close()

    def _indexed(self, files: Sequence[RolloutFile]) -> int:
        """How many of the files the index holds; the others start it."""
        try:
            holds = self._index.holds(files)
        except IndexUnavailable as error:
            self._why_no_index = f"rollouts are searched without an index: {error}"
            return 0
        if holds < len(files):
            self._start(files)
        return holds

    def _start(self, files: Sequence[RolloutFile]) -> None:
        with self._starting:
            if self._stop.is_set() or (self._builder is not None and self._builder.is_alive()):
                return
            self._builder = threading.Thread(target=self._update, args=(files,), daemon=True)
            self._builder.start()

    def _update(self, files: Sequence[RolloutFile]) -> None:
        try:
            self._index.update(files, stop=self._stop.is_set)
            self._why_no_index = ""
        except IndexUnavailable as error:
            self._why_no_index = f"rollouts are searched without an index: {error}"

    def _search(
        self, query: RolloutQuery, files: Sequence[RolloutFile], problems: list[str]
    ) -> RolloutPage | None:
        """The answer of the index; None if it cannot answer now."""
        try:
            found = self._index.find(query)
        except IndexUnavailable as error:
            problems.append(f"rollouts are searched without an index: {error}")
            return None
        rollouts = self._load(found.places, files)
        if rollouts is None:
            return None
        return RolloutPage(
            rollouts=rollouts,
            total=found.total,
            query=query,
            indexed=1.0,
            scanned=(),
            problems=(*problems, *found.problems)[:_MOST_NAMED],
        )

    def _load(
        self, places: Sequence[tuple[str, int, int]], files: Sequence[RolloutFile]
    ) -> tuple[Rollout, ...] | None:
        """The rollouts at (file name, offset, size); None if a file has changed since it was listed."""
        by_name, rollouts = {file.path.name: file for file in files}, list[Rollout]()
        for name, group in groupby(places, key=lambda place: place[0]):
            here = [(offset, size) for _, offset, size in group]
            rows = read_at(by_name[name], here, pieces=self._pieces) if name in by_name else None
            if rows is None:
                return None
            rollouts += rows
        return tuple(rollouts)

    def _scan(
        self, query: RolloutQuery, files: Sequence[RolloutFile], indexed: float, problems: list[str]
    ) -> RolloutPage:
        """The answer of the files themselves, as far as there is time."""
        wanted = [file for file in files if _has_step_of(query, file)]
        order, down = query.ranked
        if order == "step" and down:
            wanted.reverse()
        found, matched, steps, complete = self._read(query, wanted, problems)
        places = [(file.path.name, row.offset, row.size) for file, row in found[query.offset :]]
        rollouts = self._load(places, files)
        if rollouts is None:
            problems.append("a file of rollouts was replaced while it was read; load the page again")
        return RolloutPage(
            rollouts=rollouts or (),
            total=matched if complete else None,
            query=query,
            indexed=indexed,
            scanned=tuple(steps),
            problems=tuple(problems[:_MOST_NAMED]),
        )

    def _read(
        self, query: RolloutQuery, files: Sequence[RolloutFile], problems: list[str]
    ) -> tuple[list[tuple[RolloutFile, Row]], int, list[int], bool]:
        """Read files for a limited time.

        Returns:
            The best rows up to the end of the page, in order; how many matched; the steps of the rows that
            were read; and whether there was time for all.
        """
        began, last = time.monotonic(), query.offset + query.limit
        order, down = query.ranked
        found, matched, steps = list[tuple[RolloutFile, Row]](), 0, dict[int, None]()

        def best() -> list[tuple[RolloutFile, Row]]:
            if order != "step":
                found.sort(key=lambda each: _rank(getattr(each[1].rollout, order), down))
            return found[:last]

        for file in files:
            for row in read_rows(file, problems=problems):
                steps[row.rollout.step] = None
                if query.takes(row.rollout):
                    matched += 1
                    found.append((file, row))
                    if len(found) > 2 * last:
                        found = best()
                full = order == "step" and matched > last
                if time.monotonic() - began > (_COUNT_SECONDS if full else _SCAN_SECONDS):
                    return best(), matched, [*steps], False
        return best(), matched, [*steps], True


def _has_step_of(query: RolloutQuery, file: RolloutFile) -> bool:
    if file.evaluation != query.evaluation:
        return False
    return file.step is None or query.takes_step(file.step, None)


def _rank(value: float | None, down: bool) -> tuple[bool, float]:
    """Sorts None and NaN last."""
    if value is None or math.isnan(value):
        return True, 0.0
    return False, -value if down else value
