from __future__ import annotations

from raising import raises

from lockstep.data.lazy import LazyItems
from lockstep.errors import DataError


def batch_rows(num_rows: int, *, step: int, n: int, seed: int, shuffle: bool = True) -> list[int]:
    return LazyItems.of(range(num_rows), shuffle=shuffle).batch(step, n, seed)


def test_an_epoch_holds_every_row_once_and_epochs_differ() -> None:
    epochs = [
        [row for step in range(4) for row in batch_rows(12, step=4 * e + step, n=3, seed=7)] for e in (0, 1)
    ]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(12))
    assert epochs[0] != epochs[1]
    assert epochs[0] != list(range(12))


def test_batches_depend_on_the_seed_and_on_nothing_before_them() -> None:
    late = batch_rows(50, step=1234, n=8, seed=1)
    for step in range(20):
        batch_rows(50, step=step, n=8, seed=1)
    assert batch_rows(50, step=1234, n=8, seed=1) == late
    assert batch_rows(50, step=1234, n=8, seed=2) != late


def test_no_row_twice_in_a_batch_whatever_the_remainder() -> None:
    used = set()
    for step in range(300):
        rows = batch_rows(11, step=step, n=4, seed=0)
        assert len(set(rows)) == 4
        used |= set(rows)
    assert used == set(range(11))


def test_in_order_goes_round() -> None:
    assert [batch_rows(5, step=s, n=2, seed=0, shuffle=False) for s in range(3)] == [[0, 1], [2, 3], [4, 0]]


def test_a_batch_larger_than_the_set_is_refused() -> None:
    with raises(DataError, "not-enough", needed=4, rows=3):
        batch_rows(3, step=0, n=4, seed=0)
