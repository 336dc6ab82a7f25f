"""Test whether a row's result depends on the other rows, or on its position among them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

RowOp = Callable[..., Tensor | tuple[Tensor, ...]]
"""Tensors with a row each in their first dimension -> one or more such tensors."""

COUNTS = {
    "cpu": (1, 2, 3, 5, 8, 17, 64, 130),
    "cuda": (1, 2, 3, 4, 8, 16, 17, 32, 64, 100, 128, 256, 512, 1000, 1024, 2048, 4096),
}
"""Numbers of rows that are compared with all rows together."""
NUM_ROWS = {"cpu": 251, "cuda": 8192}
"""All rows together. 251 = 128 + 64 + 32 + 16 + 8 + 3: every tile, and a padded one."""


def dependence(op: RowOp, *inputs: Tensor, counts: Iterable[int] | None = None) -> str | None:
    """Describe how the result of a row depends on other rows or its position; None: no dependence was found.

    Compares bitwise with the result of all rows together: the first n rows, a row alone, the rows shifted and
    reversed, and one row in every position.

    Example:
        >>> dependence(lambda x: x + x.shape[0], torch.zeros(4, 2), counts=(2,))
        'the first 2 of 4 rows alone: 4 of 4 values differ'
    """
    num_rows = inputs[0].shape[0]
    counts = COUNTS[inputs[0].device.type] if counts is None else counts
    whole = _outputs(op(*inputs))

    def differs(index: Tensor | slice) -> str | None:
        """Result of those rows alone against those rows of the whole result."""
        part = _outputs(op(*(x[index].contiguous() for x in inputs)))
        return _difference(part, [y[index] for y in whole])

    for count in counts:
        if count < num_rows and (difference := differs(slice(0, count))):
            return f"the first {count} of {num_rows} rows alone: {difference}"
    for row in sorted({1, num_rows // 2, num_rows - 1} & set(range(num_rows))):
        if difference := differs(slice(row, row + 1)):
            return f"row {row} of {num_rows} alone: {difference}"
    places = torch.arange(num_rows, device=inputs[0].device)
    for name, order in (
        ("rows shifted by 1", places.roll(1)),
        ("rows shifted by 5", places.roll(5)),
        ("rows reversed", places.flip(0)),
        ("one row in every place", places * 0),
    ):
        if difference := differs(order):
            return f"{name}: {difference}"
    return None


def _outputs(result: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def _difference(part: Sequence[Tensor], whole: Sequence[Tensor]) -> str | None:
    for left, right in zip(part, whole, strict=True):
        if not torch.equal(left, right):
            return f"{int((left != right).sum())} of {left.numel()} values differ"
    return None
