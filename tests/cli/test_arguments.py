"""Values of flags, and the folders of results."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.cli.arguments import (
    above_zero,
    count,
    default_out,
    numbers,
    path,
    positive,
    ranks,
    seconds,
    seed,
    steps,
)


def test_numbers_are_read() -> None:
    assert (steps("10:20"), steps("10:"), steps(":20")) == ((10, 20), (10, None), (None, 20))
    assert (numbers("3,0, 8-11,9"), numbers("7")) == ((3, 0, 8, 9, 10, 11, 9), (7,))
    assert (positive("1"), count("0"), count(" 12 "), above_zero("2.5e-3")) == (1, 0, 12, 0.0025)
    assert (seed(str(2**63 - 1)), seconds("1e9"), path("a/b")) == (2**63 - 1, 1e9, Path("a/b"))


@pytest.mark.parametrize(
    ("read", "text", "message"),
    [
        (positive, "0", "'0' is not a whole number of at least 1"),
        (positive, "three", "'three' is not a whole number of at least 1"),
        (positive, "", "'' is not a whole number of at least 1"),
        (count, "-1", "'-1' is not a whole number of at least 0"),
        (above_zero, "0", "'0' is not a number above 0"),
        (above_zero, "inf", "'inf' is not a number above 0"),
        (steps, "3-9", "'3-9' is not a range of steps, such as 10:20, 10: or :20"),
        (numbers, "", "'' is not a list of numbers such as 3,7,10-20"),
        (numbers, "1-", "'1-' is not a list of numbers such as 3,7,10-20"),
        (numbers, "-1", "'-1' is not a list of numbers such as 3,7,10-20"),
        (numbers, "1,²", "'1,²' is not a list of numbers such as 3,7,10-20"),
        (numbers, "1,5-3", "'5-3' is not a range of numbers such as 10-20"),
        (numbers, "0-99999999999", "'0-99999999999' is not a range of numbers such as 10-20"),
        (above_zero, "soon", "'soon' is not a number above 0"),
        (above_zero, "1e308", "'1e308' is not between 1e-30 and 1e+30"),
        (positive, "2147483648", "'2147483648' is too large; the maximum is 2,147,483,647"),
        (ranks, "65537", "'65537' is too large; the maximum is 65,536"),
        (seed, str(2**63), "'9223372036854775808': Input should be less than 9223372036854775808"),
        (seconds, "1e10", "'1e10': Input should be less than or equal to 1000000000"),
        (path, "", "'' is not the name of a file or folder"),
    ],
)
def test_what_is_no_such_number_is_named(read: Callable[[str], object], text: str, message: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError) as caught:
        read(text)
    assert str(caught.value) == message


def test_two_results_of_one_second_have_two_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda form: form.replace("%Y%m%d-%H%M%S", "20260101-000000"))
    first = default_out("matrix")
    first.mkdir(parents=True)
    assert [str(first), str(default_out("matrix"))] == [
        "runs/matrix-20260101-000000",
        "runs/matrix-20260101-000000-1",
    ]
