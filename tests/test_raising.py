"""tests/common/raising.py: an error of another code, value or field is not the one that was expected."""

import pytest
from raising import raises

from lockstep.errors import ConfigError


def fail() -> None:
    raise ConfigError(
        "no", code="out-of-range", setting="train.lr", path="/run/m.jsonl, line 2", sizes=[1, 2]
    )


def test_only_the_expected_error_passes() -> None:
    for what in ("out-of-range", "out-of-range: train.lr", "out-of-range: m.jsonl, line 2, 1"):
        with raises(ConfigError, what):
            fail()
    with raises(ConfigError, "out-of-range", sizes=[1, 2]):
        fail()
    for what, fields in (
        ("no-effect", {}),
        ("out-of-range: train", {}),
        ("out-of-range: train.lr, line 3", {}),
        ("out-of-range", {"sizes": [1]}),
        ("out-of-range", {"step": 1}),
    ):
        with pytest.raises(AssertionError), raises(ConfigError, what, **fields):
            fail()
