"""Logprobs of next tokens and dL/dlogprob out of logits that someone else's loss was made of.

A loss that depends on the logits x of a row only through logprob(y) = (x / temperature)[y] - logsumexp has

    dL/dx = dL/dlogprob * (onehot(y) - p) / temperature,    p = softmax(x / temperature)

so dL/dlogprob is the least-squares solution of one unknown per row, and what is left over says how far the
loss is from being such a function.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_CHUNK_ENTRIES = 1 << 24
"""Float32 entries of one working copy: 64 MiB, whatever the number of rows."""


def token_logprobs(logits: Tensor, rows: Tensor, labels: Tensor, *, temperature: float) -> Tensor:
    """[R] float32, nats: log softmax(logits[rows] / temperature)[labels].

    Args:
        logits: [S, V], any float dtype; no [R, V] copy of it is made.
        rows: [R] int64.
        labels: [R] int64.
    """
    parts = []
    for part in _chunks(rows.shape[0], logits.shape[1]):
        x = _scaled(logits, rows[part], temperature)
        picked = x.gather(1, labels[part, None])[:, 0]
        parts.append(picked - x.logsumexp(dim=1))
    return torch.cat(parts) if parts else logits.new_zeros(0, dtype=torch.float32)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenGradients:
    """dL/dlogprob of next tokens and how well it explains dL/dlogits."""

    values: Tensor
    """[R] float32."""
    unexplained: Tensor
    """Scalar float64: sum of squares of dL/dlogits less what `values` give, rows without a next token too."""
    total: Tensor
    """Scalar float64: sum of squares of dL/dlogits."""


def token_gradients(
    gradient: Tensor, logits: Tensor, rows: Tensor, labels: Tensor, *, temperature: float
) -> TokenGradients:
    """The least-squares dL/dlogprob of `labels` from dL/dlogits; the module has the formula.

    Args:
        gradient: [S, V], dL/dlogits.
        logits: [S, V], what the gradient is of.
        rows, labels: [R] int64, as in `token_logprobs`.
    """
    # float64: the difference of two sums below is of rows that are all 0 in most losses
    total = gradient.new_zeros((), dtype=torch.float64)
    for part in _chunks(gradient.shape[0], gradient.shape[1]):
        total += gradient[part].float().square().sum(dtype=torch.float64)
    inside, left = torch.zeros_like(total), torch.zeros_like(total)
    values = []
    for part in _chunks(rows.shape[0], logits.shape[1]):
        x = gradient.index_select(0, rows[part]).float()
        direction = _direction(logits, rows[part], labels[part], temperature)
        square = direction.square().sum(dim=1)
        # a token of probability 1 has no direction, and its logprob no gradient
        solved = torch.where(square > 0, (x * direction).sum(dim=1) / square, 0.0)
        inside += x.square().sum(dtype=torch.float64)
        left += x.sub_(direction.mul_(solved[:, None])).square_().sum(dtype=torch.float64)
        values.append(solved * temperature)
    gradients = torch.cat(values) if values else gradient.new_zeros(0, dtype=torch.float32)
    return TokenGradients(values=gradients, unexplained=left + (total - inside).clamp(min=0), total=total)


def _direction(logits: Tensor, rows: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """[r, V] float32: onehot - p. 1 - p[y] is the sum of the others, which loses no digits near p[y] = 1."""
    p = torch.softmax(_scaled(logits, rows, temperature), dim=1)
    p.scatter_(1, labels[:, None], 0.0)
    others = p.sum(dim=1, keepdim=True)
    return p.neg_().scatter_(1, labels[:, None], others)


def _scaled(logits: Tensor, rows: Tensor, temperature: float) -> Tensor:
    x = logits.index_select(0, rows).float()
    return x if temperature == 1.0 else x / temperature


def _chunks(rows: int, width: int) -> list[slice]:
    size = max(1, _CHUNK_ENTRIES // max(1, width))
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]
