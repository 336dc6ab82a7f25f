import datetime
import decimal
import json

import numpy as np
import pytest
from raising import raises

from lockstep.errors import DataError
from lockstep.rollout.reward_functions import decoded, encoded


@pytest.mark.parametrize(
    "value",
    [
        {"a": [(0, 1), [2, None]], "b": {3: "x", (1, 2): True}, "c": 1.5},
        {"$tuple": [1], "$items": 2},
        {"$bytes": "AA==", "when": {"$date": "x"}},
        {"image": b"\x00\xff", "day": datetime.date(2026, 1, 2), "at": datetime.time(3, 4, 5, 6)},
        [datetime.datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=datetime.UTC), decimal.Decimal("1.50")],
        {"nested": {"$tuple": ({"$items": ()},)}},
        [],
        {},
        (),
    ],
)
def test_values_come_back_as_they_were(value):
    through = decoded(json.loads(json.dumps(encoded(value, "row"))), "row")
    assert through == value and repr(through) == repr(value)


def test_scalars_of_numpy_become_pythons():
    through = encoded({"s": np.str_("x"), "i": np.int64(3), "f": np.float64(0.5), "b": np.bool_(True)}, "row")
    assert through == {"s": "x", "i": 3, "f": 0.5, "b": True}
    assert [type(item) for item in through.values()] == [str, int, float, bool]


def test_what_json_cannot_hold_is_told_with_its_place():
    with raises(DataError, "wrong-type: row 3.seen"):
        encoded({"seen": {1}}, "row 3")


@pytest.mark.parametrize("value", [{"$tuple": 3}, {"$items": [[[], 1]]}, {"$date": 3}, {"$decimal": "x"}])
def test_what_nothing_was_encoded_to_is_an_error(value):
    with raises(DataError, "wrong-row: row"):
        decoded({"a": [value]}, "row")
