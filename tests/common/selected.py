"""Mark the exhaustive cases of a parametrized test, and list the cases that this session runs."""

from __future__ import annotations

from typing import Any

import pytest


def selected(request: pytest.FixtureRequest, test: str) -> list[dict[str, Any]]:
    """Return the parameters of each case of `test` that was not deselected, in order. For module-scoped
    fixtures that do the work of all cases in one launch."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    return [
        item.callspec.params for item in items if item.module is request.module and item.originalname == test
    ]


def exhaustive(values: Any, *, quick: Any) -> list[Any]:
    """Return `values` as parameters: `make test` runs those in `quick`, `make test-all` runs all.

    Raises:
        ValueError: a quick one is not among the values.
    """
    values, quick = list(values), list(quick)
    if unknown := [value for value in quick if value not in values]:
        raise ValueError(f"quick names {unknown}, not among the values")
    return [
        value if value in quick else pytest.param(*_parts(value), marks=pytest.mark.exhaustive)
        for value in values
    ]


def _parts(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
