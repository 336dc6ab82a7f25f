"""Items of a data set, made of their rows when they come near, in an order that depends on (seed, epoch)
alone.

    items = LazyItems(len(source), make, config=config)     # looks at the first rows at once
    items.batch(step, n, seed)                              # and meanwhile the next ones are made

An epoch is a permutation of all rows without those that are left out: dropped, excluded, or at fault. Which
these are is known only when their turn comes; but it depends on the rows alone, so a batch is a pure function
of (step, n, seed), whoever asks, in whatever order, with any number of workers.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, Literal, TypeVar, cast

import numpy as np

from lockstep.config.data import DataConfig
from lockstep.data.rows import BATCH_ROWS, FIRST_ROWS
from lockstep.errors import ConfigError, DataError, LockstepError

T = TypeVar("T")
Result = TypeVar("Result")

MAKE_SECONDS = 900.0
"""Deadline for the items of a batch: a row of 50 MB takes a minute."""
STATES = (
    *("unseen", "kept", "truncated", "excluded", "dropped_overlong", "dropped_untrained", "dropped_equal"),
    *("bad", "absent"),
)
LAST_KEPT = 2
"""States with places up to this one are those of items that are in the set, as far as is known."""

State = Literal[
    "kept",
    "truncated",
    "excluded",
    "dropped_overlong",
    "dropped_untrained",
    "dropped_equal",
    "bad",
    "absent",
]
"""absent: the row has fewer items than others have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome(Generic[T]):
    """The result of making an item from a row."""

    item: T | None = None
    """None: it is left out."""
    state: State = "kept"
    error: LockstepError | None = None
    """The error of a row at fault."""
    tokens: int = 0
    trained: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftOut:
    """An item that is not in the set."""

    number: int
    state: State
    why: str
    """The message of its error; "" for one that a setting leaves out."""


Make = Callable[[Sequence[int]], list[Outcome[T]]]
"""Makes the items with these numbers. Called by several threads at once."""


class EndOfStream(Exception):
    """A row beyond the last was asked for."""

    def __init__(self, rows: int) -> None:
        super().__init__(f"the source has {rows} rows")
        self.rows = rows


class LazyItems(Generic[T]):
    """A set of items. Only one thread may ask it.

    Args:
        length: items, those that will be left out included.
        selective: whether a setting leaves items out, so that which ones is only known when they are made.
        first: items that are looked at, at once. A set of no more is made whole, and kept.

    Raises:
        LockstepError: an item of the first ones is at fault, and `data.on_bad_row` is "fail".
    """

    of_row = 1
    """Items that a row may have."""
    _open_end = False
    """Whether there may be more items than `length`."""

    def __init__(
        self, length: int, make: Make[T], *, config: DataConfig, selective: bool, first: int = FIRST_ROWS
    ) -> None:
        self.config = config
        self.whole = length <= first and not self._open_end
        """Whether all items were made, and are kept."""
        self._make = make
        self._states = np.zeros(length, np.uint8)
        self._left_out = 0
        self.examined = 0
        """Items that were made, or are known to be left out."""
        self._items: dict[int, T] = {}
        self._making: dict[int, Future[dict[int, Outcome[T]]]] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._orders: dict[tuple[int, int], tuple[int, np.ndarray]] = {}
        self._resolved: dict[tuple[int, int], int] = {}
        """By (n, seed): of how many first steps it is known which items they have."""
        self._selective = selective or config.on_bad_row == "skip"
        self._trusted = 0
        self._news: list[LeftOut] = []
        self.tokens = self.trained = 0
        """Tokens of the items that were made, each item counted once."""
        self.first_bad: LockstepError | None = None
        self.sampled = self.take(range(first if self._open_end else min(length, first)))
        """The items of the first rows, without those left out; if all are, the first ones behind them."""
        at = first
        while not self.sampled and (self._open_end or at < self.rows):
            stop = at + BATCH_ROWS
            self.sampled = self.take(range(at, stop if self._open_end else min(stop, self.rows)))
            at = stop
        self.whole = self.whole or (not self._open_end and self.rows <= first)
        if not self.whole:
            self._items.clear()

    @classmethod
    def of(cls, items: Sequence[T], *, shuffle: bool) -> LazyItems[T]:
        """Return a set of items that are there."""

        def make(numbers: Sequence[int]) -> list[Outcome[T]]:
            return [Outcome(item=items[number]) for number in numbers]

        config = DataConfig(shuffle=shuffle, workers=0)
        return cls(len(items), make, config=config, selective=False, first=len(items))

    @property
    def selective(self) -> bool:
        """Whether items may be left out."""
        return self._selective

    @property
    def has_end(self) -> bool:
        """Whether it is known how many items there are."""
        return not self._open_end

    @property
    def rows(self) -> int:
        """Items, those that are left out included."""
        return len(self._states)

    def __len__(self) -> int:
        """Items without those that are known to be left out."""
        return self.rows - self._left_out

    @property
    def counts(self) -> Counter[str]:
        """The number of items in each state, by its name."""
        found = np.bincount(self._states, minlength=len(STATES))
        counts = Counter(dict(zip(STATES, map(int, found), strict=True)))
        if self._open_end:
            del counts["unseen"]  # nobody knows
        return counts

    def __getitem__(self, index: int) -> T:
        """Item number `index` of those that are in the set as far as is known. IndexError beyond the last."""
        while True:
            number = int(np.flatnonzero(self._states <= LAST_KEPT)[index])
            if found := self.take([number]):
                return found[0]

    def __iter__(self) -> Iterator[T]:
        """All of them in the order of their rows."""
        for first in range(0, self.rows, BATCH_ROWS):
            yield from self.take(range(first, min(first + BATCH_ROWS, self.rows)))
            self._forget(())

    def make_all(self) -> None:
        """Make all items, and keep them."""
        self.whole = True
        for first in range(0, self.rows, BATCH_ROWS):
            self._ensure(range(first, min(first + BATCH_ROWS, self.rows)))

    def made(self) -> Mapping[int, T]:
        """Return the items that are there, by number."""
        return dict(self._items)

    def take(self, numbers: Sequence[int]) -> list[T]:
        """Return the items with these numbers, without those left out. Raises the error of an item at fault,
        see `on_bad_row`."""
        self._ensure(numbers)
        return [self._items[number] for number in numbers if number in self._items]

    # --- batches --------------------------------------------------------------------------------------------

    def batch(self, step: int, n: int, seed: int) -> list[T]:
        """Return the n items of batch `step` (from 0), all different.

        Raises:
            DataError: n exceeds the set, or an item is at fault.
        """
        self._resolve_before(step, n, seed)
        items = self._resolve(step, n, seed)
        if not self.whole:
            self._look_ahead(step, n, seed)
        return items

    def numbers(self, step: int, n: int, seed: int) -> np.ndarray:
        """Return the numbers of the items of batch `step`, as far as is known which are left out."""
        self._check_enough(n)
        count = len(self)
        if not self.config.shuffle:
            order = self._order(seed, -1)
            return order[(step * n + np.arange(n)) % count]
        epoch, batch = divmod(step, count // n)
        return self._order(seed, epoch)[batch * n : (batch + 1) * n]

    def _check_enough(self, n: int) -> None:
        if n > len(self):
            raise DataError(
                f"not-enough: a batch of {n} needs {n} distinct rows, but the set has {len(self)}; take a "
                "smaller batch"
            )

    def _order(self, seed: int, epoch: int) -> np.ndarray:
        """The numbers of an epoch in order; epoch -1: those of the rows."""
        count = len(self)
        known, order = self._orders.get((seed, epoch), (-1, None))
        if order is None or known != count:
            order = np.arange(self.rows) if epoch < 0 else permutation(self.rows, seed, epoch)
            order = order[self._states[order] <= LAST_KEPT]
            while len(self._orders) >= 2:
                del self._orders[next(iter(self._orders))]
            self._orders[seed, epoch] = (count, order)
        return order

    def _resolve(self, step: int, n: int, seed: int) -> list[T]:
        while True:
            numbers = list(map(int, self.numbers(step, n, seed)))
            items = self.take(numbers)
            if len(items) == n:
                self._resolved[n, seed] = max(self._resolved.get((n, seed), 0), step + 1)
                return items

    def _resolve_before(self, step: int, n: int, seed: int) -> None:
        """Find out which items the steps before have: it decides which this one has."""
        if not self._selective or (self.examined == self.rows and not self._open_end):
            return
        for earlier in range(max(self._resolved.get((n, seed), 0), self._trusted), step):
            self._resolve(earlier, n, seed)
            self._forget(())

    def trust(
        self, left_out: Mapping[int, str], *, steps: int | None, why: Mapping[int, str] | None = None
    ) -> None:
        """Take over what an earlier process has found: the states of items that are left out, all of those of
        the first `steps` steps; None: all that there are, which count as news.

        Args:
            why: the messages of items at fault, as far as they are known.
        """
        for number, state in left_out.items():
            if not 0 <= number < self._reach(number) or state not in STATES[LAST_KEPT + 1 :]:
                raise DataError(
                    f"wrong-field: item {number} of {self.rows:,} rows of data.source = "
                    f"{self.config.source!r} cannot be left out as {state!r}"
                )
            if self._states[number] <= LAST_KEPT:
                self._set_state(number, state)
                self._items.pop(number, None)
                if steps is None:
                    self._news.append(
                        LeftOut(number=number, state=cast(State, state), why=(why or {}).get(number, ""))
                    )
        self._trusted = sys.maxsize if steps is None else max(self._trusted, steps)

    def pop_news(self) -> list[LeftOut]:
        """Return what was left out since the last call."""
        news, self._news = self._news, []
        return news

    # --- making ---------------------------------------------------------------------------------------------

    def _ensure(self, numbers: Sequence[int]) -> None:
        """Make those that are neither there nor known to be left out."""
        self._reach(max(numbers, default=0))
        wanted = [n for n in numbers if n not in self._items and self._states[n] <= LAST_KEPT]
        for number in wanted:
            if number in self._making and number not in self._items:
                self._absorb(self._waited(number), wanted)
        missing = [n for n in wanted if n not in self._items and self._states[n] <= LAST_KEPT]
        for first in range(0, len(missing), BATCH_ROWS):
            part = missing[first : first + BATCH_ROWS]
            self._absorb(self._made(part), part)

    def _waited(self, number: int) -> dict[int, Outcome[T]]:
        future = self._making[number]
        try:
            outcomes = future.result(timeout=MAKE_SECONDS)
        except concurrent.futures.TimeoutError as error:
            raise DataError(
                f"deadline: the rows around number {number + 1} of data.source = {self.config.source!r} were "
                f"not read, rendered and tokenised within {MAKE_SECONDS:g} s; look for a row that is very "
                "long, or for a disk that does not answer"
            ) from error
        for made in outcomes:
            self._making.pop(made, None)
        return outcomes

    def _absorb(self, outcomes: Mapping[int, Outcome[T]], wanted: Collection[int]) -> None:
        self._reach(max(outcomes))
        for number, outcome in outcomes.items():
            if outcome.error is not None:
                # That of a later batch waits until its turn: with other workers it would not be known yet.
                if self.config.on_bad_row == "skip" or number in wanted:
                    self._reject(number, outcome.error)
                continue
            if self._states[number] == 0:
                self.tokens += outcome.tokens
                self.trained += outcome.trained
                self._set_state(number, outcome.state)
                if outcome.item is None:
                    self._news.append(LeftOut(number=number, state=outcome.state, why=""))
            if outcome.item is not None:
                self._items[number] = outcome.item

    def _reject(self, number: int, error: LockstepError) -> None:
        if self.config.on_bad_row == "fail":
            raise error
        self.first_bad = self.first_bad or error
        if self._states[number] <= LAST_KEPT:
            self._set_state(number, "bad")
            self._news.append(LeftOut(number=number, state="bad", why=str(error)))

    def _reach(self, number: int) -> int:
        """Return the number of items. If it is not known, make room for item `number` first."""
        return self.rows

    def _set_state(self, number: int, state: str) -> None:
        code = STATES.index(state)
        self.examined += int(self._states[number] == 0)
        self._left_out += code > LAST_KEPT
        self._states[number] = code

    def _look_ahead(self, step: int, n: int, seed: int) -> None:
        """Have the items of the next steps made, and forget those of earlier ones."""
        workers, steps = self.config.workers, self.config.prefetch
        if not workers:
            self._forget(())
            return
        with contextlib.suppress(DataError):  # fewer rows than a batch: told when it is asked for
            ahead = [int(i) for s in range(step + 1, step + 1 + steps) for i in self.numbers(s, n, seed)]
            self._forget(ahead)
            missing = [i for i in dict.fromkeys(ahead) if i not in self._items and i not in self._making]
            # Few at a time would cost an exchange with the process that renders for each.
            few = len(missing) < min(BATCH_ROWS, len(ahead) // 2)
            if not missing or (few and not set(missing).intersection(ahead[:n])):
                return
            self._pool = self._pool or ThreadPoolExecutor(workers, thread_name_prefix="data")
            size = min(BATCH_ROWS, -(-len(missing) // workers))
            for first in range(0, len(missing), size):
                part = missing[first : first + size]
                future = self._pool.submit(self._made, part)
                self._making.update(dict.fromkeys(part, future))

    def outcomes(self, numbers: Sequence[int]) -> list[Outcome[T]]:
        """Return what the rows of these items become, without taking any notice of it."""
        return self._make(numbers)

    def _made(self, numbers: Sequence[int]) -> dict[int, Outcome[T]]:
        return dict(zip(numbers, self._make(numbers), strict=True))

    def _forget(self, kept: Sequence[int]) -> None:
        """Drop the items that are not needed any more. Of those that are being made some may come late."""
        if not self.whole:
            needed = set(kept)
            self._items = {number: item for number, item in self._items.items() if number in needed}
            for number in [number for number in self._making if number not in needed]:
                del self._making[number]

    def close(self) -> None:
        """End the workers."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None
        self._making.clear()


@lru_cache(maxsize=2)
def permutation(length: int, seed: int, epoch: int) -> np.ndarray:
    """Return the numbers below `length` in an order drawn from (seed, epoch)."""
    order = np.random.default_rng([seed, epoch]).permutation(length)
    order.flags.writeable = False
    return order


def attempted(function: Callable[..., Result], first: Any, *others: Any) -> Result | LockstepError:
    """Return what the function makes of its arguments, or the error of the row; an error in place of the
    first stays one."""
    if isinstance(first, LockstepError):
        return first
    try:
        return function(first, *others)
    except (ConfigError, DataError) as error:
        if error.code == "deadline":
            raise  # of the machine, it may be, and not of the row
        return error
