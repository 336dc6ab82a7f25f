from __future__ import annotations

import math

import pytest
import torch

from lockstep.ops.losses import kl


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [("k1", -math.log(2)), ("k2", math.log(2) ** 2 / 2), ("k3", 1 - math.log(2))],
)
def test_by_hand(estimator: str, expected: float) -> None:
    """p = 1/4, q = 1/2, so r = 2."""
    found = kl(torch.tensor([0.25]).log(), torch.tensor([0.5]).log(), estimator=estimator)
    assert found.item() == pytest.approx(expected, abs=1e-6)


def test_expectations_under_p() -> None:
    """k1 and k3 are unbiased: their mean under p is the exact KL, computed over all four outcomes."""
    p = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    q = torch.tensor([0.4, 0.1, 0.3, 0.2], dtype=torch.float64)
    exact = (p * (p / q).log()).sum()
    for estimator in ("k1", "k3"):
        torch.testing.assert_close((p * kl(p.log(), q.log(), estimator=estimator)).sum(), exact)
    assert (kl(p.log(), q.log(), estimator="k3") >= 0).all()
