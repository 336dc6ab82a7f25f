import json
import math
import sys
from pathlib import Path

import pytest
from raising import raises

sys.path.insert(0, str(Path(__file__).parent))
import matrix_results as made

from lockstep.errors import RecordingError
from lockstep.observe.files import write_json
from lockstep_lab.matrix.report import footnotes
from lockstep_lab.matrix.result import judge, read_matrix, read_measures

FREE: dict[str, float | None] = {"logprob": None, "gradient": None}


def test_a_result_comes_back_as_it_was(tmp_path: Path) -> None:
    endless = made.cell(name="x", comparison=made.comparison(logprob_max=math.inf), agrees=False)
    result = made.result(made.reference(), made.cell(), endless)
    write_json(tmp_path / "matrix.json", result.as_dict())
    assert read_matrix(tmp_path) == read_matrix(tmp_path / "matrix.json") == result
    assert json.loads((tmp_path / "matrix.json").read_text())["cells"][1]["speed_ratio"] == 1.5


def test_a_matrix_of_an_earlier_version_had_words_of_its_own(tmp_path: Path) -> None:
    words = {"out of memory": "oom", "timeout after 600 s": "hung", "crashed: SIGSEGV": "failed"}
    words |= {"not run": "interrupted", "ok": "ok", "refused": "refused"}
    values = made.result(*(made.cell(name=word) for word in words)).as_dict()
    for cell, word in zip(values["cells"], words, strict=True):
        cell["status"] = word
    write_json(tmp_path / "matrix.json", values)
    assert [cell.status for cell in read_matrix(tmp_path).cells] == list(words.values())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not-json: matrix.json"),
        ("[]", "wrong-type: matrix.json"),
        ('{"format": "x", "version": 1}', "version-differs: matrix.json, x, 1"),
        ('{"format": "lockstep-matrix", "version": 2}', "version-differs: lockstep-matrix, 2"),
        ('{"format": "lockstep-matrix", "version": 1}', "missing-setting: matrix.json, command"),
        (
            '{"format": "lockstep-matrix", "version": 1, "cells": [1]}',
            "missing-setting: matrix.json, command",
        ),
    ],
)
def test_files_that_are_no_matrix(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "matrix.json").write_text(text)
    with raises(RecordingError, message):
        read_matrix(tmp_path)


def test_a_missing_matrix(tmp_path: Path) -> None:
    with raises(RecordingError, "cannot-read: matrix.json"):
        read_matrix(tmp_path)


def test_float32_is_judged_by_its_largest_difference() -> None:
    near = made.comparison(logprob_max=9e-5, gradient_relative_error=9e-5)
    assert judge(near, rounds=False, yardstick=None, limits=FREE) == (True, "")
    far = made.comparison(logprob_max=2e-4, gradient_relative_error=3e-4)
    assert judge(far, rounds=False, yardstick=None, limits=FREE) == (
        False,
        "largest logprob difference 0.0002 nats, limit 0.0001 (input 1); "
        "gradient relative error 0.0003, limit 0.0001 (worst: model.w)",
    )
    assert judge(far, rounds=False, yardstick=None, limits={"logprob": 1e-3, "gradient": 1e-3})[0]
    assert not judge(near, rounds=False, yardstick=None, limits={"logprob": None, "gradient": 1e-6})[0]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_disagrees(value: float) -> None:
    for rounds in (False, True):
        for name in ("logprob_max", "gradient_relative_error"):
            bad = made.comparison(**{name: value, "logprob_rms": value if name == "logprob_max" else 0.0})
            assert not judge(bad, rounds=rounds, yardstick=None, limits=FREE)[0]


def test_16_bits_are_judged_by_the_yardstick() -> None:
    yardstick = made.comparison(logprob_rms=0.01, gradient_relative_error=0.02)
    within = made.comparison(logprob_max=1.0, logprob_rms=0.015, gradient_relative_error=0.03)
    assert judge(within, rounds=True, yardstick=yardstick, limits=FREE)[0]
    beyond = made.comparison(logprob_rms=0.0151, gradient_relative_error=0.031)
    agrees, why = judge(beyond, rounds=True, yardstick=yardstick, limits=FREE)
    assert not agrees and "RMS logprob difference 0.015 nats, limit 0.015; gradient" in why
    assert judge(beyond, rounds=True, yardstick=None, limits=FREE)[0]


def test_16_bits_without_a_yardstick_are_judged_by_depth() -> None:
    shallow, deep = made.comparison(logprob_rms=0.03), made.comparison(logprob_rms=0.14)
    assert not judge(shallow, rounds=True, yardstick=None, limits=FREE, num_layers=1)[0]
    assert judge(shallow, rounds=True, yardstick=None, limits=FREE, num_layers=2)[0]  # 0.0354
    assert judge(deep, rounds=True, yardstick=None, limits=FREE, num_layers=32)[0]  # 0.1414
    agrees, why = judge(deep, rounds=True, yardstick=None, limits=FREE, num_layers=16)
    assert not agrees and why == "RMS logprob difference 0.14 nats, limit 0.1"


def test_verdicts() -> None:
    assert made.result().verdict == "matrix: 2 cells, 2 work, largest difference 2e-06 nats (packed)"
    broken = made.cell(status="failed", comparison=None, agrees=None)
    refused = made.cell(name="flex", status="refused", comparison=None, agrees=None)
    result = made.result(made.reference(), broken, refused)
    assert result.verdict == "matrix: 3 cells, 1 work, 1 refused, 1 do not: packed (failed)"
    assert not result.ok
    assert made.result(made.reference(), refused).ok
    assert not made.result(complete=False).ok
    assert not made.result(made.reference(), made.cell(agrees=None, comparison=None)).ok


def test_measures_of_a_replay_without_backward() -> None:
    rows = [
        {"status": "ok", "forward_ms": 90.0, "backward_ms": None, "first_call": True, "tokens": 5},
        {"status": "ok", "forward_ms": 3.0, "backward_ms": None, "first_call": False, "tokens": 7},
        {"status": "oom", "tokens": 100},
        {"status": "skipped", "tokens": 100},
    ]
    found = read_measures({"compile": {"graphs": "many"}}, rows)
    assert (found.first_call_ms, found.steady_ms, found.tokens) == (90.0, 3.0, 12)
    assert (found.inputs_ok, found.inputs_failed, found.inputs_oom, found.inputs_skipped) == (2, 0, 1, 1)
    assert found.graphs is None and found.peak_memory_bytes is None


@pytest.mark.parametrize(
    ("weights", "text"),
    [
        ({"statement": "weights of x"}, "weights of x"),
        ({"statement": "w", "inputs": {"match": "3", "mismatch": None}}, "w"),
        (
            {"statement": "w", "inputs": {"match": 6, "mismatch": 0, "unknown": 0}},
            "of 6 inputs 6 on the recorded weights; the first: w",
        ),
        (
            {"statement": "w, the recorded one", "inputs": {"match": 3, "mismatch": 2, "unknown": 1}},
            "of 6 inputs 3 on the recorded weights, 2 NOT on them, 1 on weights unknown; "
            "the first: w, the recorded one",
        ),
    ],
)
def test_the_footnote_counts_the_weights_of_all_inputs(weights: dict[str, object], text: str) -> None:
    measures = read_measures({"weights": weights}, [])
    assert measures.weights == text
    result = made.result(made.reference(), made.cell(measures=measures))
    assert ("-", text) in footnotes(result)
