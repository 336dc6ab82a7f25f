"""Call a user's function or class, in the run's process or in one of its own.

Imports nothing large: every reward's process loads it.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, cast

from lockstep.errors import ConfigError
from lockstep.observe.text import printable
from lockstep.protocols.reward import RewardInput

LARGEST_REWARD = 1e30
"""In size, of a reward and of a total: sums and squares of larger ones overflow."""
TEXT_LENGTH = 2000
"""Most characters of a user's text in an error."""
MATCHES = f"{__name__}:matches"


def matches(*, prompt: str, completion: str, row: Mapping[str, Any], pattern: str) -> float:
    """The reward `format`: 1 where the regular expression matches."""
    return float(re.search(pattern, completion, re.DOTALL) is not None)


def bind(name: str, kwargs: Mapping[str, Any], value: Any) -> Callable[[RewardInput], Any]:
    """Return a callable of one RewardInput: a class's instance gets the record, a function keyword arguments.

    Raises:
        ConfigError: the value cannot be called like this.
    """
    if inspect.isclass(value):
        try:
            instance: Any = value(**kwargs)
        except Exception as error:
            raise ConfigError(
                f"wrong-part: reward {name!r}: cannot be made with kwargs = {dict(kwargs)}: "
                f"{type(error).__name__}: {text_of(error)}",
                name="kwargs",
            ) from error
        if not callable(instance):
            raise ConfigError(
                f"wrong-part: reward {name!r}: instances must be callable with one RewardInput",
                name="instance",
            )
        return cast(Callable[[RewardInput], Any], instance)
    if not callable(value):
        raise ConfigError(
            f"wrong-part: reward {name!r} is {type(value).__name__}, not a function or a class",
            name=type(value).__name__,
        )
    try:
        inspect.signature(value).bind(prompt="", completion="", row={}, **kwargs)
    except TypeError as error:
        raise ConfigError(
            f"wrong-part: reward {name!r} is called with keyword arguments prompt, completion, "
            f"row{''.join(', ' + name for name in kwargs)}, which its signature {inspect.signature(value)} "
            f"does not take: {error}",
            name="signature",
        ) from error
    return KeywordCall(value, dict(kwargs))


@dataclass(frozen=True)
class KeywordCall:
    """A function that is called with keyword arguments."""

    function: Callable[..., Any]
    kwargs: Mapping[str, Any]

    def __call__(self, sample: RewardInput) -> Any:
        """Call the function for a sample."""
        return self.function(
            prompt=sample.prompt, completion=sample.completion, row=sample.row, **self.kwargs
        )


def is_async(call: Callable[[RewardInput], Any]) -> bool:
    """Return whether every call returns an awaitable."""
    function = call.function if isinstance(call, KeywordCall) else call
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004  (an instance with an async __call__)
    )


class ReadOnlyRow(dict[str, Any]):
    """A deep copy of a row for one call of a reward; writing to it is an error."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("a reward's row is read-only, as other rewards and steps see it; copy it: dict(row)")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def own_row(sample: RewardInput) -> RewardInput:
    """Return the sample with its own copy of the row."""
    return dataclasses.replace(sample, row=ReadOnlyRow(copy.deepcopy(dict(sample.row))))


def score_of(value: Any) -> float | str:
    """Return a number (bool, int, float, numpy or torch scalar) as a finite float, or a message about what is
    wrong with the value."""
    try:
        plain = value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value
        if isinstance(plain, int | float) and math.isfinite(number := float(plain)):
            if abs(number) <= LARGEST_REWARD:
                return number
            return f"returned {number:g}, which float32 cannot compute with ({LARGEST_REWARD:g} at most)"
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
    """Return str(value) or, where that raises, the type: one line that a terminal may see."""
    try:
        return printable(str(value)[:TEXT_LENGTH])
    except Exception as error:
        return f"<{type(value).__name__} whose text raises {type(error).__name__}>"
