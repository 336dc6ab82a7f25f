"""What rows say together, and where they are written."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from raising import raises

from lockstep.errors import ConfigError
from lockstep.observe.text import printable_lines
from lockstep_lab.replay.ranks import _rows_of_all
from lockstep_lab.replay.results import ReplayFiles, ReplayRow, aggregate, row_text


def row(index: int, *, rank: int = 0, logprob: float = 0.1) -> ReplayRow:
    return ReplayRow(
        index=index,
        step=index,
        update=index,
        micro_batch=0,
        rank=rank,
        status="ok",
        documents=1,
        tokens=4,
        longest=4,
        shortest=4,
        loss_difference=-logprob,
        logprob_max_difference=logprob,
        logprob_mean_difference=logprob,
    )


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_nan_is_the_largest_difference_wherever_it_stands(place: int) -> None:
    values = [0.1, 0.3]
    values.insert(place, math.nan)
    found = aggregate([row(i, logprob=value) for i, value in enumerate(values)])["differences"]
    assert math.isnan(found["logprob_max"])
    assert math.isnan(found["loss_max"])
    assert aggregate([row(0), row(1, logprob=0.3), row(2)])["differences"]["logprob_max"] == 0.3


def test_rows_of_other_ranks_keep_numbers_that_are_not_finite(tmp_path: Path) -> None:
    for rank, value in enumerate((math.nan, math.inf)):
        files = ReplayFiles(tmp_path / f"rank-{rank}", echo=lambda _: None)
        files.row(row(0, rank=rank, logprob=value))
        files.close()
    assert json.loads((tmp_path / "rank-0/results.jsonl").read_text())["logprob_max_difference"] == "NaN"
    first, second = _rows_of_all(tmp_path, 2)
    assert first.logprob_max_difference is not None
    assert math.isnan(first.logprob_max_difference)
    assert second.logprob_max_difference == math.inf
    assert "logprob diff max nan" in row_text(first)
    assert math.isnan(aggregate([first, second])["differences"]["logprob_max"])


def test_an_out_that_cannot_be_made_is_a_wrong_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with raises(ConfigError, "not-a-file: --out, out"):
        ReplayFiles(tmp_path / "file" / "out", echo=lambda _: None)


def test_text_for_a_terminal_keeps_its_line_ends_only() -> None:
    assert printable_lines("a\x1b[2Jb\nc\u202ed\r") == "a\\x1b[2Jb\nc\\u202ed\\r"
