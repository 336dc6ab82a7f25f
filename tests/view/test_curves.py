"""Columns of metrics.jsonl, and what charts draw of them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.view.curves import CurveReader, thin, trailing_mean


def write(run: Path, rows: list[dict[str, Any]], mode: str = "w") -> None:
    with (run / "metrics.jsonl").open(mode) as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def test_columns_of_metrics_that_come_and_go(tmp_path: Path) -> None:
    rows = [
        {"step": 0, "evaluation": "before", "timestamp": 100.0, "eval/mean_reward": 0.25, "eval/none": None},
        {"step": 0, "timestamp": 101.0, "loss": 1, "weights_hash": "12"},
        {"step": 1, "timestamp": 102.5, "loss": "NaN", "entropy": 3.0},
        {"step": 2, "timestamp": 104.0, "entropy": None, "loss": 2.0, "flag": True},
        {"step": "three", "loss": 9.0},
    ]
    write(tmp_path, rows)
    curves = CurveReader(tmp_path).read()
    assert curves.names == ("loss", "entropy", "flag")
    assert curves.steps.tolist() == [0, 1, 2] and curves.times.tolist() == [1.0, 2.5, 4.0]
    np.testing.assert_array_equal(curves.columns["loss"], [1, math.nan, 2])
    np.testing.assert_array_equal(curves.columns["entropy"], [math.nan, 3, math.nan])
    assert curves.not_finite == {"loss": (1,)}
    assert [(row["step"], row["seconds"]) for row in curves.evaluations] == [(0, 0.0)]
    assert curves.at(2) == {"loss": 2.0, "flag": 1.0} and curves.at(7) == {}
    assert math.isnan(curves.at(1)["loss"])
    drawn = curves.json(["loss", "eval/mean_reward", "nope"], x="time")
    assert drawn["names"] == ["loss", "entropy", "flag"] and drawn["steps"] == 3
    expected = {"x": [1.0, 4.0], "y": [1.0, 2.0], "step": [0, 2], "raw": True, "not_finite": [1]}
    assert drawn["series"]["loss"] == expected
    assert drawn["series"]["eval/mean_reward"]["y"] == [0.25] and "nope" not in drawn["series"]


def test_a_run_that_goes_on_and_one_that_goes_back(tmp_path: Path) -> None:
    reader = CurveReader(tmp_path)
    assert len(reader.read().steps) == 0
    write(tmp_path, [{"step": n, "timestamp": n, "a": float(n)} for n in range(450)])  # some batches
    first = reader.read(started=0.0)
    assert reader.read(started=0.0) is first
    write(tmp_path, [{"step": 450, "timestamp": 450, "b": 1.0}], mode="a")
    second = reader.read(started=0.0)
    assert len(first.columns["a"]) == 450 and "b" not in first.columns  # what was given out stays
    assert second.steps.tolist() == [*range(451)] and second.times[-1] == 450
    assert math.isnan(second.columns["a"][450]) and np.isnan(second.columns["b"][:450]).all()
    write(tmp_path, [{"step": 0, "timestamp": 500.0, "a": 7.0}])
    third = reader.read(started=0.0)
    assert third.steps.tolist() == [0] and third.columns["a"].tolist() == [7.0] and third.names == ("a",)
    (tmp_path / "metrics.jsonl").unlink()
    assert reader.read().names == ()


def test_thinning_keeps_the_ends_and_every_extreme() -> None:
    values = np.sin(np.arange(10_007) / 700)
    values[1234], values[9_999] = 50.0, -50.0
    kept = thin(values, 200)
    assert len(kept) <= 202 and kept[0] == 0 and kept[-1] == 10_006
    assert {1234, 9_999} <= set(kept.tolist()) and kept.tolist() == sorted(set(kept.tolist()))
    # Bucket by bucket against a loop.
    width = math.ceil(len(values) / 99)
    for start in range(0, len(values), width):
        bucket = range(start, min(start + width, len(values)))
        inside = [index for index in kept.tolist() if index in bucket]
        assert values[inside].min() == values[bucket.start : bucket.stop].min()
        assert values[inside].max() == values[bucket.start : bucket.stop].max()
    assert thin(values[:5], 5).tolist() == [0, 1, 2, 3, 4]


def test_a_smaller_range_shows_all_values(tmp_path: Path) -> None:
    write(tmp_path, [{"step": n, "timestamp": n, "a": float(n % 7)} for n in range(3000)])
    curves = CurveReader(tmp_path).read()
    whole = curves.json(["a"], points=100)["series"]["a"]
    assert not whole["raw"] and len(whole["x"]) <= 102
    assert all(y == x % 7 for x, y in zip(whole["x"], whole["y"], strict=True))
    part = curves.json(["a"], points=100, within=(1000, 1049), smooth=7)["series"]["a"]
    assert part["raw"] and part["step"] == [*range(1000, 1050)] and part["smooth"] == [3.0] * 50


def test_a_mean_that_no_float_holds_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, [{"step": step, "timestamp": 1.0, "loss": 1.7e308} for step in range(2)])
    drawn = CurveReader(tmp_path).read().json(["loss"], smooth=2)["series"]["loss"]
    assert (drawn["y"], drawn["smooth"]) == ([1.7e308, 1.7e308], [1.7e308, None])


def test_trailing_mean() -> None:
    values = np.array([1.0, 2.0, 6.0, 1e30, 4.0, 8.0])
    expected = [1.0, 1.5, 4.0, 5e29, 5e29, 6.0]
    assert trailing_mean(values, 2).tolist() == pytest.approx(expected)
    assert trailing_mean(np.array([]), 3).tolist() == []
