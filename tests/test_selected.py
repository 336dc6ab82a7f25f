"""How the exhaustive cases of a test are told from the quick ones, which `make test` runs."""

from __future__ import annotations

import pytest
from selected import exhaustive, selected


def test_what_is_not_quick_is_marked_and_keeps_its_place() -> None:
    first, second, third = exhaustive([("a", 1), ("b", 2), ("c", 3)], quick=[("b", 2)])
    assert second == ("b", 2)
    assert [(each.values, [mark.name for mark in each.marks]) for each in (first, third)] == [
        (("a", 1), ["exhaustive"]),
        (("c", 3), ["exhaustive"]),
    ]
    with pytest.raises(ValueError, match="'d'"):
        exhaustive("abc", quick="d")


@pytest.mark.parametrize("number", [1, 2])
def test_the_cases_that_are_run(request: pytest.FixtureRequest, number: int) -> None:
    cases = selected(request, "test_the_cases_that_are_run")
    assert {"number": number} in cases and len(cases) == len({case["number"] for case in cases}) <= 2
