"""What is run of a parametrized test, for fixtures that do the work of many cases at once."""

from __future__ import annotations

from typing import Any

import pytest


def selected(request: pytest.FixtureRequest, test: str) -> list[dict[str, Any]]:
    """The parameters of each case of this test of the module that was not deselected, in order."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    return [
        item.callspec.params for item in items if item.module is request.module and item.originalname == test
    ]


def exhaustive(values: Any, *, quick: Any) -> list[Any]:
    """Parameters of a test of which `make test` runs the quick ones, and `make test-all` every one.

    Raises:
        ValueError: a quick one is not among the values.
    """
    values, quick = list(values), list(quick)
    if unknown := [value for value in quick if value not in values]:
        raise ValueError(f"quick has {unknown}, which the values have not")
    return [
        value if value in quick else pytest.param(*_parts(value), marks=pytest.mark.exhaustive)
        for value in values
    ]


def _parts(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
