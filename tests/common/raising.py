"""`raises`: what an error is, by its code and what it is about; never by its words."""

from __future__ import annotations

import contextlib
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
        what: its code, or "code: value, value" where each value is that of one of its fields, or of an item
            of one. Of a path its last part is enough, and of "FILE, line 3" either part. Of several problems
            of one config, one must be it.
        fields: fields that must have these values.

    Example:
        with raises(ConfigError, "no-effect: train.tp_plan"):
            load_run(kind="grpo", overrides={"train.tp_plan": "hf"})
    """
    with pytest.raises(kind) as caught:
        yield caught
    found = problems(caught.value)
    assert any(_is(data, what, fields) for data in found), f"expected {what!r} {fields}, got {found}"


def _is(data: dict[str, Any], what: str, fields: dict[str, Any]) -> bool:
    code, _, values = what.partition(": ")
    known = {text for name, value in data.items() if name != "code" for text in _texts(value)}
    named = set(values.split(", ")) if values else set()
    same = all(data.get(name) == value for name, value in fields.items())
    return data["code"] == code and named <= known and same


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
