"""`raises`: what an error is, by its code and what it names."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

import pytest
from pydantic import ValidationError

from lockstep.config.problems import data_of
from lockstep.errors import LockstepError


@contextlib.contextmanager
def raises(
    kind: type[BaseException] | tuple[type[BaseException], ...], what: str, /, **fields: Any
) -> Iterator[pytest.ExceptionInfo[Any]]:
    """Expect an error of `kind` in the body.

    Args:
        what: its code, or "code: value, value". Each value is one of its fields, an item of one, or words of
            its message. Of a path its last part is enough, and of "FILE, line 3" either part. Of several
            problems of one config, one must be it.
        fields: what it says of them: fields with these values, or values that stand in its message.

    Example:
        with raises(ConfigError, "no-effect: train.tp_plan"):
            load_run(kind="grpo", overrides={"train.tp_plan": "hf"})
    """
    with pytest.raises(kind) as caught:
        yield caught
    found = problems(caught.value)
    text = str(caught.value)
    assert any(_is(data, what, fields, text) for data in found), (
        f"expected {what!r} {fields}, got {found}: {text}"
    )


def _is(data: dict[str, Any], what: str, fields: dict[str, Any], message: str) -> bool:
    code, _, values = what.partition(": ")
    known = {text for name, value in data.items() if name != "code" for text in _texts(value)}
    named = [value for value in values.split(", ") if value]
    same = all(
        data[name] == value if name in data else all(stands(text, message) for text in _leaves(value))
        for name, value in fields.items()
    )
    return data["code"] == code and same and all(value in known or stands(value, message) for value in named)


def stands(value: str, message: str) -> bool:
    """Whether words stand in a message: not as a part of longer words, numbers or dotted names."""
    return re.search(rf"(?<![\w.]){re.escape(value)}(?![\w]|\.\w)", message) is not None


def _leaves(value: Any) -> Iterator[str]:
    """The texts of a value: of each item of a list or a table, or of itself."""
    if isinstance(value, dict):
        value = list(value.items())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    else:
        yield str(value)


def _texts(value: Any) -> Iterator[str]:
    """The text of a field, or of each item of a list or a table, and its parts."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _texts(item)
    else:
        text = str(value)
        yield from (text, *PurePath(text).name.split(", "), *text.split(", "))


def problems(error: BaseException) -> list[dict[str, Any]]:
    """Code and fields of an error, or of each of its problems."""
    if isinstance(error, ValidationError):
        details = error.errors(include_url=False)
        return [data_of(".".join(map(str, detail["loc"])), detail) for detail in details]
    if isinstance(error, LockstepError):
        return [error.data, *error.fields.get("problems", [])]
    return []
