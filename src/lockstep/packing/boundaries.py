"""Where the documents of a pack begin and end."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor


def cu_seqlens(lengths: Sequence[int], segments: int = 0) -> Tensor:
    """[max(segments, len(lengths)) + 1] int32: where each segment begins, and the end of the last one.

    Args:
        lengths: slots of each segment.
        segments: how many there are to be; those behind `lengths` are empty.

    Example:
        >>> cu_seqlens([2, 3], 3).tolist()
        [0, 2, 5, 5]
    """
    ends = [0, *accumulate(lengths)]
    return torch.tensor(ends + [ends[-1]] * (segments + 1 - len(ends)), dtype=torch.int32)
