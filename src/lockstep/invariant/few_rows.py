"""Products of few rows, as decoding has them: the trainer's bits at the speed of the weights' bytes.

cuBLASLt without split-K is slow for few rows. But a tensor core adds over K in one order, so a kernel that
does not split K has the same bits whatever its tiles are, and an engine may use another one for its few rows
than the trainer for its many. `selftest.few_rows_test` compares the two for every weight shape on the device
where they run.

Products of the same rows, such as those of q, k and v, can be one launch, and the addition of the residual
its last step. Layers are not rewritten for that: `merge.MergeProducts` does it in their compiled graphs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

MOST_ROWS = 64
"""For more, cuBLASLt's kernels are as fast."""
MOST_WEIGHTS = 3
"""Of one launch: the kernel has as many slots."""


@torch.library.custom_op("lockstep::few_rows", mutates_args=())
def few_rows(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], residual: Tensor | None
) -> list[Tensor]:
    """x [..., K] @ weight [N, K].T + bias [N] for each of up to MOST_WEIGHTS weights, with at most MOST_ROWS
    rows in x; no gradient.

    Args:
        biases: one for each weight, or none.
        residual: [..., N], added to the rounded product, of one weight.
    """
    if x.is_cuda:
        from lockstep.invariant import triton_kernels

        rows = x.reshape(-1, x.shape[-1])
        added = None if residual is None else residual.reshape(rows.shape[0], -1)
        outs = triton_kernels.few_rows(rows, weights, biases, added)
        return [out.view(*x.shape[:-1], out.shape[1]) for out in outs]
    # The definition, for tests.
    outs = [F.linear(x, weight, biases[i] if biases else None) for i, weight in enumerate(weights)]
    return outs if residual is None else [residual + outs[0]]


@few_rows.register_fake
def _few_rows_fake(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], residual: Tensor | None
) -> list[Tensor]:
    return [x.new_empty(*x.shape[:-1], weight.shape[0]) for weight in weights]
