from __future__ import annotations

from decimal import Decimal

import pytest

from lockstep.rollout.rewards import answer_number, boxed, first_number, last_line, last_number, numbers, tags


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5 - 9 = -4, or about 1,234.50.", ["5", "9", "-4", "1234.50"]),
        ("5-9", ["5", "9"]),
        ("x=-3", ["-3"]),
        ("(-7)", ["-7"]),
        ("+7 and - 4", ["7", "4"]),
        ("\u22127", ["-7"]),
        ("n-1", ["1"]),
        ("$42.", ["42"]),
        ("12,345,678.9", ["12345678.9"]),
        ("1,23 and 1,2345", ["1", "23", "1", "2345"]),
        ("1, 2, 3", ["1", "2", "3"]),
        ("1.2.3", ["1.2", "3"]),
        (".5 or -.5", [".5", "-.5"]),
        ("2e5 2e-3 2em", ["2e5", "2e-3", "2"]),
        ("3/4", ["3", "4"]),
        ("4th", ["4"]),
        ("none", []),
        ("", []),
    ],
)
def test_numbers(text: str, expected: list[str]) -> None:
    assert numbers(text) == expected
    assert first_number(text) == (expected[0] if expected else None)
    assert last_number(text) == (expected[-1] if expected else None)


def test_parts_of_a_text() -> None:
    assert boxed(r"\boxed{1}, so \boxed{\frac{1}{2}} and \boxed{") == r"\frac{1}{2}"
    assert boxed("no box") is None
    assert tags("<answer>1</answer> no, <answer>\n2 </answer>") == "2"
    assert tags("<answer>1") is None
    assert last_line("one\n two \n\n") == "two"
    assert last_line(" \n") is None


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("She has 3.\n#### 1,042", Decimal(1042)),
        ("-4", Decimal(-4)),
        (7, Decimal(7)),
        ("$2.50", Decimal("2.5")),
        ("3/4", None),
        ("four", None),
        ("5 apples", None),
        (None, None),
    ],
)
def test_the_number_an_answer_is(answer: object, expected: Decimal | None) -> None:
    assert answer_number(answer) == expected
