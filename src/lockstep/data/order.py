"""The rows of a batch: a pure function of (number of rows, step, batch size, seed), so there is no state to
save."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from lockstep.errors import DataError


def batch_rows(num_rows: int, *, step: int, n: int, seed: int, shuffle: bool = True) -> list[int]:
    """Return the row numbers of batch `step`; all distinct.

    Shuffled: an epoch is num_rows // n batches of a permutation drawn from (seed, epoch); its last num_rows
    % n rows are left out, so that no batch holds a row twice. Not shuffled: rows in order, cyclically.

    Raises:
        DataError: n exceeds num_rows.

    Example:
        >>> batch_rows(5, step=2, n=2, seed=0, shuffle=False)
        [4, 0]
    """
    if n > num_rows:
        raise DataError(
            f"not-enough: a batch of {n} needs {n} distinct rows, but the set has {num_rows}; take a "
            "smaller batch",
            needed=n,
            rows=num_rows,
        )
    if not shuffle:
        return [(step * n + i) % num_rows for i in range(n)]
    epoch, batch = divmod(step, num_rows // n)
    order = _permutation(num_rows, seed, epoch)
    return [int(row) for row in order[batch * n : (batch + 1) * n]]


@lru_cache(maxsize=4)
def _permutation(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(num_rows)
