"""The API's losses against float64 code of their own: the value, and the gradient by every logprob."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from raising import raises

from lockstep.errors import DataError
from lockstep.packing import pack
from lockstep.schema.batch import RolloutSample, TrainSample, policy_samples
from lockstep.serve.losses import make_loss

N = 200


def expected(name: str, x: float, q: float, a: float, w: float, mean: float) -> tuple[float, float]:
    """Loss and slope of one token, written out case by case; mean: of x - q over the tokens with w > 0."""
    if name == "cross_entropy":
        return -w * x, -w
    if name == "dro":
        return 0.1 * (x - q) ** 2 - a * x, 0.2 * (x - q) - a
    ratio = math.exp(mean if name == "gspo" else x - q)
    if name == "importance_sampling":
        return -ratio * a, -ratio * a
    bounded = min(max(ratio, 0.7), 1.5)
    if name == "cispo":
        return -bounded * a * x, -bounded * a
    if ratio * a <= bounded * a:
        return -ratio * a, -ratio * a
    return -bounded * a, 0.0


@pytest.mark.parametrize(
    ("name", "shift"),
    [
        ("cross_entropy", 0.0),
        ("importance_sampling", 0.0),
        ("ppo", 0.0),
        ("cispo", 0.0),
        ("dro", 0.0),
        ("gspo", 0.0),
        ("gspo", 1.0),  # the ratio of the sequence is above its bound
        ("gspo", -1.0),
    ],
)
def test_loss_and_gradient(name: str, shift: float) -> None:
    rng = np.random.default_rng(0)
    x, a, w = -3 * rng.random(N), rng.normal(size=N), rng.normal(size=N)
    q = x - shift + rng.normal(size=N)  # ratios on both sides of both bounds
    x, q, a, w = (torch.tensor(values, dtype=torch.float32) for values in (x, q, a, w))
    zero, mask = torch.zeros(1), torch.ones(N + 1, dtype=torch.bool)
    mask[-1] = False
    ids = torch.zeros(N + 1, dtype=torch.int64)
    if name == "cross_entropy":
        batch = pack([TrainSample(token_ids=ids, loss_mask=mask)], [torch.cat([w, zero])])
    else:
        rollout = RolloutSample(token_ids=ids, loss_mask=mask, rollout_logprobs=torch.cat([q, zero]))
        batch = pack(policy_samples([rollout], [torch.cat([a, zero])]), [torch.cat([w.clamp(min=0), zero])])
    config = (
        {"clip_low_threshold": 0.7, "clip_high_threshold": 1.5} if name in ("ppo", "cispo", "gspo") else {}
    )
    config = {"beta": 0.2} if name == "dro" else config

    logprobs = x.clone().requires_grad_()
    loss = make_loss(name, config)(logprobs, torch.zeros(N), batch, slice(0, N)).loss
    loss.backward()

    mean = math.fsum((x.double() - q.double())[w > 0].tolist()) / int((w > 0).sum())
    rows = [expected(name, *map(float, row), mean) for row in zip(x, q, a, w, strict=True)]
    assert float(loss.detach()) == pytest.approx(math.fsum(row[0] for row in rows), rel=1e-6)
    slopes = torch.tensor([row[1] for row in rows], dtype=torch.float64)
    assert logprobs.grad is not None
    assert float(((logprobs.grad.double() - slopes) / slopes.abs().clamp(min=1)).abs().max()) <= 1e-6


def test_defaults_are_those_of_the_api() -> None:
    loss = make_loss("ppo", {})
    assert (loss.low, loss.high) == (0.8, 1.2)
    loss = make_loss("gspo", {})
    assert (loss.low, loss.high) == (0.9997, 1.0004)


def test_what_is_not_served_is_refused_by_name() -> None:
    for name in ("stable_reinforce", "custom", "nonsense"):
        with raises(DataError, "refused: is not served", loss_fn=name):
            make_loss(name, {})
    with raises(DataError, "unknown-name: takes", setting="beta"):
        make_loss("ppo", {"beta": 0.1})
    with raises(DataError, "out-of-range: at least 0", setting="clip_low_threshold"):
        make_loss("ppo", {"clip_low_threshold": math.nan})
    with raises(DataError, "missing-field: dro needs it", setting="beta"):
        make_loss("dro", {})
    with raises(DataError, "contradiction: is above", low=1.5):
        make_loss("cispo", {"clip_low_threshold": 1.5})
