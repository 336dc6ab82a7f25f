"""Call a user's function or class, in the run's process or in a separate one.

Imports nothing large, because every reward process loads it.
"""

from __future__ import annotations

import base64
import copy
import dataclasses
import inspect
import math
import os
import queue
import re
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from datetime import time as time_of_day
from decimal import Decimal
from functools import partial
from itertools import accumulate, groupby, islice, pairwise
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar

from lockstep.errors import ConfigError, DataError
from lockstep.observe.text import printable
from lockstep.protocols.reward import RewardInput

if TYPE_CHECKING:
    import asyncio

LARGEST_REWARD = 1e30
"""Largest magnitude of a reward and of a total: sums and squares of larger numbers overflow."""
TEXT_LENGTH = 2000
"""Most characters of user text in an error."""
MATCHES = f"{__name__}:matches"


def matches(*, prompt: str, completion: str, row: Mapping[str, Any], pattern: str) -> float:
    """The reward `format`: 1 if the regular expression matches, else 0."""
    return float(re.search(pattern, completion, re.DOTALL) is not None)


class RewardFailure(RuntimeError):
    """A reward that gave no number. Its text follows the name of the reward; a note, if any, is the traceback
    in the reward's process."""


@dataclass(frozen=True, kw_only=True)
class OwnReward:
    """A user's function or object, which is called with one sample, or in batches: with the samples of one
    prompt."""

    function: Callable[..., Any]
    kwargs: Mapping[str, Any]
    form: Literal["record", "sample", "batch"]
    """Called with a RewardInput; with the keyword arguments prompt, completion and row; or with prompts,
    completions and one list per column of the rows, which is TRL's signature."""
    columns: tuple[str, ...] = ()
    """batch: parameters without a default, which must be columns of the rows."""

    @property
    def batched(self) -> bool:
        """Whether a call is about all samples of a prompt."""
        return self.form == "batch"

    @property
    def asynchronous(self) -> bool:
        """Whether every call returns an awaitable."""
        return inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(
            getattr(self.function, "__call__", None)  # noqa: B004  (an instance with an async __call__)
        )

    def __call__(self, samples: Sequence[RewardInput]) -> Any:
        """Call the function for the samples of one call, each with its own copy of the row."""
        own = [dataclasses.replace(s, row=ReadOnlyRow(copy.deepcopy(dict(s.row)))) for s in samples]
        if self.batched:
            return self.function(**self._batch(own))
        (sample,) = own
        if self.form == "record":
            return self.function(sample)
        named = {"prompt": sample.prompt, "completion": sample.completion, "row": sample.row}
        return self.function(**named, **self.kwargs)

    def values(self, result: Any, count: int) -> list[Any]:
        """Return the value of each of `count` samples that a call was about; see `score_of`.

        Raises:
            RewardFailure: a batch's result is not a list of as many values.
        """
        if not self.batched:
            return [result]
        listed = result.tolist() if hasattr(result, "tolist") else result
        if isinstance(listed, list | tuple) and len(listed) == count:
            return list(listed)
        kind = printable(type(result).__name__)
        many = f" of {len(listed)}" if isinstance(listed, list | tuple) else ""
        raise RewardFailure(
            f"returned a {kind}{many} instead of a list of {count} numbers, one per completion"
        )

    def _batch(self, samples: Sequence[RewardInput]) -> dict[str, Any]:
        """The arguments, as TRL passes them: a conversation stays one, and so does its completion."""
        rows = [sample.row for sample in samples]
        names = dict.fromkeys(name for row in rows for name in row if name not in _BATCH)
        if missing := [name for name in self.columns if name not in names]:
            raise RewardFailure(no_column(missing[0], names))
        values: dict[str, Any] = {name: [row.get(name) for row in rows] for name in names}
        talks = [isinstance(row.get("prompt"), list) for row in rows]
        values |= {
            "prompts": [row.get("prompt", sample.prompt) for row, sample in zip(rows, samples, strict=True)],
            "completions": [
                [{"role": "assistant", "content": sample.completion}] if talk else sample.completion
                for talk, sample in zip(talks, samples, strict=True)
            ],
            "completion_ids": [list(sample.completion_token_ids) for sample in samples],
            **self.kwargs,
        }
        known = inspect.signature(self.function).parameters.values()
        if any(each.kind is each.VAR_KEYWORD for each in known):
            return values
        return {each.name: values[each.name] for each in known if each.name in values}


def calls_of(samples: Sequence[RewardInput], *, batched: bool) -> list[slice]:
    """Return the part of `samples` that each call of a reward gets: one of them, or in batches the samples of
    a prompt, which stand side by side. More than that would let scores depend on what else was sampled in
    time."""
    if not batched:
        return [slice(i, i + 1) for i in range(len(samples))]
    ends = accumulate(len(list(own)) for _, own in groupby(samples, lambda s: (s.index, s.prompt)))
    return [slice(*both) for both in pairwise([0, *ends])]


_BATCH = frozenset({"prompts", "completions", "prompt", "completion", "completion_ids"})
"""Arguments of a batch that no column replaces."""


def bind(name: str, kwargs: Mapping[str, Any], value: Any) -> OwnReward:
    """Return the reward that a module's attribute is.

    Raises:
        ConfigError: the value cannot be called as a reward.
    """
    if inspect.isclass(value):
        try:
            instance: Any = value(**kwargs)
        except Exception as error:
            raise ConfigError(
                f"wrong-part: reward {name!r}: its class cannot be instantiated with kwargs = "
                f"{dict(kwargs)}: {type(error).__name__}: {text_of(error)}"
            ) from error
        if not callable(instance):
            raise ConfigError(f"wrong-part: reward {name!r}: instances must be callable with a RewardInput")
        if _takes_batches(instance):
            return OwnReward(function=instance, kwargs={}, form="batch", columns=_columns(instance, {}))
        return OwnReward(function=instance, kwargs={}, form="record")
    if not callable(value):
        raise ConfigError(f"wrong-part: reward {name!r} is {type(value).__name__}, not a function or a class")
    if _takes_batches(value):
        return OwnReward(function=value, kwargs=dict(kwargs), form="batch", columns=_columns(value, kwargs))
    try:
        inspect.signature(value).bind(prompt="", completion="", row={}, **kwargs)
    except TypeError as error:
        raise ConfigError(
            f"wrong-part: reward {name!r} is called with the keyword arguments prompt, completion, "
            f"row{''.join(', ' + name for name in kwargs)}, or in batches if it has a parameter completions, "
            f"but its signature {inspect.signature(value)} does not accept them: {error}"
        ) from error
    return OwnReward(function=value, kwargs=dict(kwargs), form="sample")


def _takes_batches(value: Callable[..., Any]) -> bool:
    try:
        names = inspect.signature(value).parameters
    except (TypeError, ValueError):  # of a builtin
        return False
    return "completions" in names and "completion" not in names


def _columns(value: Callable[..., Any], kwargs: Mapping[str, Any]) -> tuple[str, ...]:
    """The parameters that only a column can fill."""
    return tuple(
        each.name
        for each in inspect.signature(value).parameters.values()
        if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
        and each.default is each.empty
        and each.name not in _BATCH | kwargs.keys()
    )


def no_column(name: str, columns: Iterable[str]) -> str:
    """Return a message about a parameter that no column of the rows fills."""
    listed = ", ".join(printable(each[:80]) for each in islice(columns, 40))
    return f"has the parameter {name!r}, which is no column of the rows ({listed}); give it a default"


class ReadOnlyRow(dict[str, Any]):
    """A deep copy of a row for one call of a reward; writing to it is an error."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("a reward's row is read-only; to change it, copy it: dict(row)")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def score_of(value: Any) -> float | str:
    """Return a number (bool, int, float, numpy or torch scalar) as a finite float, or a message that says why
    the value is wrong."""
    try:
        plain = value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value
        if isinstance(plain, int | float) and math.isfinite(number := float(plain)):
            if abs(number) <= LARGEST_REWARD:
                return number
            return (
                f"returned {number:g}, which is too large for float32 arithmetic (at most {LARGEST_REWARD:g})"
            )
    except (Exception, GeneratorExit):  # a user's object, or an int beyond any float
        pass
    return f"returned {short_repr(value)} ({printable(type(value).__name__)}), not a finite number"


def raised(error: BaseException) -> str:
    """Return a message about an exception."""
    return f"raised {printable(type(error).__name__)}: {text_of(error)}"


def short_repr(value: Any) -> str:
    """Return the value's repr, shortened, whatever its class does."""
    try:
        return printable(repr(value)[:200])
    except Exception as error:
        return f"an object whose repr raises {type(error).__name__}"


def text_of(value: object) -> str:
    """Return str(value), or its type if that raises, as one line that is safe for a terminal."""
    try:
        return printable(str(value)[:TEXT_LENGTH])
    except Exception as error:
        return f"<{type(value).__name__} whose text raises {type(error).__name__}>"


# Calling a Python callable as a reward with a time limit, sync or async, without ever hanging the caller.
#
# A named reward has its own process, see reward_process; this is for callables, which cannot be sent to one.
# Sync functions run one after another in their own thread; async ones run together in an event loop in its
# own thread, so it does not matter whether the caller (a notebook) has a running loop. The caller waits in
# small steps that Ctrl-C interrupts. Python cannot end a thread: one that overran is left behind and
# replaced. Code that holds the interpreter lock for ever (a runaway regular expression) cannot be timed out
# this way.


T = TypeVar("T")
Call = Callable[[], Any]

LOOP_GRACE_SECONDS = 5.0
"""Grace period beyond the limits of a batch of async calls, after which the loop counts as blocked."""


STEP_SECONDS = 0.5
"""Longest single wait: a signal right before a wait is only noticed at its end."""


def _in_steps(
    wait: Callable[[float], T],
    expired: type[Exception],
    seconds: float,
    done: Callable[[], bool] = lambda: False,
) -> T:
    """Return the result of `wait(timeout)` within `seconds`, waiting in steps, so that Ctrl-C works; then
    raise `expired`. done: whether the outcome exists, so that an `expired` raised by `wait` is the outcome
    itself."""
    until = time.monotonic() + seconds
    while True:
        left = until - time.monotonic()
        try:
            return wait(min(STEP_SECONDS, max(left, 0.0)))
        except expired:
            if done():
                return wait(0.0)
            if left <= STEP_SECONDS:
                raise


class CallFailure(RuntimeError):
    """A call raised SystemExit, KeyboardInterrupt or GeneratorExit, or was left by a fork: it may end neither
    its thread nor the run."""


def _contained(error: BaseException) -> Exception:
    """Return the error as an Exception, which ends no thread."""
    return error if isinstance(error, Exception) else CallFailure(f"{type(error).__name__}: {text_of(error)}")


class CallThread:
    """One daemon thread that runs calls in order."""

    def __init__(self) -> None:
        self._calls: queue.Queue[tuple[Call, queue.Queue[tuple[bool, Any]]]] | None = None

    def run(self, call: Call, *, timeout: float) -> Any:
        """Return the call's value, or raise its error. TimeoutError after `timeout` seconds."""
        if self._calls is None:
            self._calls = queue.Queue()
            threading.Thread(target=_serve, args=(self._calls,), name="reward", daemon=True).start()
        reply: queue.Queue[tuple[bool, Any]] = queue.Queue()
        self._calls.put((call, reply))
        try:
            ok, value = _in_steps(lambda seconds: reply.get(timeout=seconds), queue.Empty, timeout)
        except BaseException as error:
            self._calls = None  # the thread is busy with a call that nobody waits for any more
            if isinstance(error, queue.Empty):
                raise TimeoutError(f"took longer than {timeout:g} s") from None
            raise
        if ok:
            return value
        raise value


def _serve(calls: queue.Queue[tuple[Call, queue.Queue[tuple[bool, Any]]]]) -> None:
    process = os.getpid()
    while True:
        call, reply = calls.get()
        try:
            outcome: tuple[bool, Any] = (True, call())
        except BaseException as error:  # carried to the caller, which raises it
            outcome = (False, _contained(error))
        if os.getpid() != process:  # the call forked, and this is the copy: nobody waits for it
            os._exit(1)
        reply.put(outcome)


class LoopThread:
    """An event loop in a daemon thread."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(
        self, calls: Sequence[Callable[[], Awaitable[Any]]], *, timeout: float, concurrency: int
    ) -> list[Any]:
        """Return one outcome per call, in order: its value, or the exception that it raised.

        At most `concurrency` calls run at a time; each may take `timeout` seconds (then a TimeoutError is
        its outcome).

        Raises:
            TimeoutError: a call blocks the event loop itself, so that nothing can be timed out one by one.
        """
        import asyncio

        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            # Daemon threads: one that hangs in a reward must not keep the program from exiting.
            threading.Thread(target=self._loop.run_forever, name="reward-async", daemon=True).start()
        limit = seconds_together(len(calls), timeout, concurrency)
        future = asyncio.run_coroutine_threadsafe(gather(calls, timeout, concurrency), self._loop)
        try:
            return _in_steps(lambda seconds: future.result(timeout=seconds), TimeoutError, limit, future.done)
        except BaseException as error:
            future.cancel()
            if isinstance(error, TimeoutError):
                # The loop is stuck in a call that never awaits; the next batch gets a new one.
                self._loop = None
                raise blocked(len(calls), limit) from None
            raise


def seconds_together(count: int, timeout: float, concurrency: int) -> float:
    """Return how long `count` async calls may take."""
    return -(-count // concurrency) * timeout + LOOP_GRACE_SECONDS


def blocked(count: int, limit: float) -> TimeoutError:
    """Return the error for calls that were not done after `limit` seconds, although each has a timeout."""
    return TimeoutError(
        f"blocks the event loop: {count} calls did not finish within {limit:g} s; await inside the "
        "function, or make it a plain function"
    )


async def gather(
    calls: Sequence[Callable[[], Awaitable[Any]]], timeout: float, concurrency: int
) -> list[Any]:
    """Return one outcome per call, in order, see LoopThread.run."""
    import asyncio

    slots = asyncio.Semaphore(concurrency)

    async def one(call: Callable[[], Awaitable[Any]]) -> Any:
        async with slots:
            try:
                async with asyncio.timeout(timeout) as limit:
                    return await call()
            except TimeoutError:
                if limit.expired():
                    raise TimeoutError(f"took longer than {timeout:g} s") from None
                raise
            except (SystemExit, KeyboardInterrupt, GeneratorExit) as error:
                raise _contained(error) from error  # the loop itself would end

    return await asyncio.gather(*(one(call) for call in calls), return_exceptions=True)


def in_process(
    reward: OwnReward, *, timeout: float, concurrency: int, stop_at_failure: bool
) -> Callable[[Sequence[RewardInput]], list[Any]]:
    """Return the scorer of a Python callable: a value or an exception for each sample. It runs in this
    process, as it cannot be sent to another."""
    loop, thread, batched = LoopThread(), CallThread(), reward.batched

    async def awaited(value: Any) -> Any:
        return await value

    def values(result: Any, samples: Sequence[RewardInput]) -> list[Any]:
        if isinstance(result, BaseException):
            raise result
        return reward.values(result, len(samples))

    def one(samples: Sequence[RewardInput]) -> list[Any]:
        result = thread.run(partial(reward, samples), timeout=timeout)
        if inspect.isawaitable(result):
            (result,) = loop.run([partial(awaited, result)], timeout=timeout, concurrency=concurrency)
        return values(result, samples)

    def together(inputs: Sequence[RewardInput]) -> list[Any]:
        calls = [partial(reward, inputs[part]) for part in calls_of(inputs, batched=batched)]
        try:
            results = iter(loop.run(calls, timeout=timeout, concurrency=concurrency))
        except TimeoutError as error:
            return [error] * len(inputs)
        return in_calls(lambda samples: values(next(results), samples), False, inputs, batched=batched)

    return together if reward.asynchronous else partial(in_calls, one, stop_at_failure, batched=batched)


def in_calls(
    score: Callable[[Sequence[RewardInput]], list[Any]],
    stop_at_failure: bool,
    inputs: Sequence[RewardInput],
    *,
    batched: bool = False,
) -> list[Any]:
    """Return a value or an exception for each sample, call by call (`calls_of`); after a failure that ends
    the run anyway, the rest is not computed (and not read)."""
    outcomes: list[Any] = []
    for part in calls_of(inputs, batched=batched):
        try:
            outcomes += score(inputs[part])
        except Exception as error:  # settled by on_error, with the row's name
            outcomes += [error] * len(inputs[part])
        failed = [each for each in outcomes[part] if isinstance(each, Exception)]
        if stop_at_failure and failed:
            return outcomes + [failed[0]] * (len(inputs) - len(outcomes))
    return outcomes


# Lossless conversion of data rows to JSON and back: verifiers use tuples and integer keys, rewards dates and
# bytes, which JSON lacks.


_TUPLE = "$tuple"
_ITEMS = "$items"
_AS_TEXT: dict[str, tuple[type, Callable[[Any], str], Callable[[str], Any]]] = {
    "$bytes": (bytes, lambda value: base64.b64encode(value).decode(), base64.b64decode),
    "$datetime": (datetime, datetime.isoformat, datetime.fromisoformat),
    "$date": (date, date.isoformat, date.fromisoformat),
    "$time": (time_of_day, time_of_day.isoformat, time_of_day.fromisoformat),
    "$decimal": (Decimal, str, Decimal),
}
"""Further types of parquet columns. A datetime is a date too, so it comes first."""
_TAGS = {_TUPLE, _ITEMS, *_AS_TEXT}


def encoded(value: Any, where: str) -> Any:
    """Convert a value to JSON's types; `decoded` restores it.

    Raises:
        DataError: it holds anything but numbers, texts, lists, tuples, mappings, bytes, dates and times.

    Example:
        >>> encoded({"edges": [(0, 1)], "colours": {3: "red"}}, "row 0")
        {'edges': [{'$tuple': [0, 1]}], 'colours': {'$items': [[3, 'red']]}}
    """
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)  # also numpy's, which are subclasses
    if isinstance(value, list):
        return [encoded(item, where) for item in value]
    if isinstance(value, tuple):
        return {_TUPLE: [encoded(item, where) for item in value]}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value) and not _TAGS & value.keys():
            return {str(key): encoded(item, f"{where}.{key}") for key, item in value.items()}
        return {_ITEMS: [[encoded(key, where), encoded(item, where)] for key, item in value.items()]}
    for tag, (known, text, _) in _AS_TEXT.items():
        if isinstance(value, known):
            return {tag: text(value)}
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return encoded(value.item(), where)
    raise DataError(
        f"wrong-type: {where}: {value!r:.80} ({type(value).__name__}) cannot be written as JSON; change it "
        "to a number, a string or a list in the data, or leave the column out"
    )


def decoded(value: Any, where: str) -> Any:
    """Restore a value that `encoded` converted.

    Raises:
        DataError: `encoded` never returns this, as in a file that was edited.
    """
    if isinstance(value, list):
        return [decoded(item, where) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value)) if len(value) == 1 else None
    if tag not in _TAGS:
        return {key: decoded(item, where) for key, item in value.items()}
    try:
        if tag == _TUPLE:
            return tuple(decoded(item, where) for item in value[_TUPLE])
        if tag == _ITEMS:
            return {decoded(key, where): decoded(item, where) for key, item in value[_ITEMS]}
        return _AS_TEXT[tag][2](value[tag])
    except (ValueError, TypeError, ArithmeticError) as error:
        raise DataError(f"wrong-row: {where}: {value!r:.80} is not a valid {tag} value: {error}") from error
