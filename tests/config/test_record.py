"""What is recorded: wrong settings say so before a model is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
from raising import raises

from lockstep.cli.train import parse
from lockstep.config.load import dump_toml, load_resumed, load_run
from lockstep.config.record import RecordConfig
from lockstep.errors import ConfigError


def record(*flags: str) -> RecordConfig:
    return parse(["grpo", "--recipe", "tiny", *flags]).run.record


def test_nothing_is_recorded_unless_asked_for() -> None:
    assert not record().enabled and not record("--record-weights", "none").enabled


@pytest.mark.parametrize(
    "flags", [("--record",), ("--record", "true"), ("--record=true",), ("--record.enabled",)]
)
def test_one_flag_turns_it_on(flags: tuple[str, ...]) -> None:
    assert record(*flags).enabled


@pytest.mark.parametrize("flags", [("--no-record",), ("--record", "false"), ("--record.no-enabled",)])
def test_and_off(flags: tuple[str, ...]) -> None:
    assert not record("--record", *flags).enabled


@pytest.mark.parametrize("flag", ["--record-weights", "--record.weights"])
def test_weights(flag: str) -> None:
    assert record().weights == "first" and record().weights_every is None
    assert record(flag, "none").weights_every is None
    assert record(flag, "every 12").weights_every == 12
    assert record(f"{flag}=every 12").weights == "every 12"


@pytest.mark.parametrize(
    "weights", ["sometimes", "every 0", "every", "every -1", "every 1.5", "every  3", "10", ""]
)
def test_other_weights_are_refused(weights: str) -> None:
    with raises(ConfigError, "wrong-format: record.weights"):
        record("--record-weights", weights)


def test_a_range_that_is_empty_is_refused() -> None:
    with raises(ConfigError, "nothing-to-do: record.last_step"):
        record("--record.first-step", "3", "--record.last-step", "2")
    with raises(ConfigError, "nothing-to-do: record.first_step"):
        record("--record", "--record.first-step", "10")
    with raises(ConfigError, "out-of-range: record.every"):
        record("--record.every", "0")
    with raises(ConfigError, "out-of-range: record.first_step"):
        record("--record.first-step", "-1")


def test_a_range_may_go_beyond_the_run() -> None:
    config = record("--record", "--record.first-step", "3", "--record.last-step", "1000000")
    assert [config.covers(step) for step in (2, 3, 4, 10**6, 10**6 + 1)] == [False, True, True, True, False]
    assert RecordConfig().covers(0) and RecordConfig().covers(10**9)


def test_a_resumed_run_may_record_something_else(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(dump_toml(load_run("tiny")))
    resumed = load_resumed(tmp_path, {"record.enabled": True, "record.every": 3})
    assert resumed.record.enabled and resumed.record.every == 3
