from __future__ import annotations

import pytest
import torch

from lockstep.algorithms import ALGORITHMS
from lockstep.config.algorithm import SFTConfig
from lockstep.packing import pack
from lockstep.protocols import StepStats
from lockstep.schema.batch import TrainSample

LOGPROBS = torch.tensor([-1.0, -2.0, float("nan"), -4.0, float("nan")])


def samples() -> list[TrainSample]:
    masks = ([1, 1, 0], [1, 0])
    return [
        TrainSample(token_ids=torch.arange(len(m)), loss_mask=torch.tensor(m, dtype=torch.bool), sample_id=i)
        for i, m in enumerate(masks)
    ]


@pytest.mark.parametrize(
    ("aggregation", "expected"), [("token_mean", 7 / 3), ("sequence_mean", (1.5 + 4) / 2)]
)
def test_cross_entropy_by_hand(aggregation: str, expected: float) -> None:
    sft = ALGORITHMS.load("sft")(SFTConfig(aggregation=aggregation))
    weights = sft.loss_weights(samples())
    batch = pack(samples(), weights)
    logprobs = LOGPROBS.clone().requires_grad_()
    loss = sft.loss()(logprobs, torch.zeros(5), batch, slice(None)).loss
    assert loss.item() == pytest.approx(expected)
    loss.backward()
    torch.testing.assert_close(logprobs.grad, -batch.loss_weights)
    one_by_one = sum(
        sft.loss()(LOGPROBS[a:b], torch.zeros(b - a), pack([sample], [weight]), slice(None)).loss
        for (a, b), sample, weight in zip(((0, 3), (3, 5)), samples(), weights, strict=True)
    )
    assert one_by_one.item() == pytest.approx(expected)


def test_metrics_by_hand() -> None:
    sft = ALGORITHMS.load("sft")(SFTConfig())
    batch = pack(samples(), sft.loss_weights(samples()))
    entropy = torch.tensor([1.0, 2.0, float("nan"), 6.0, float("nan")])
    found = sft.loss().metrics([batch], StepStats(losses=[], logprobs=[LOGPROBS], entropy=[entropy]))
    assert found == pytest.approx({"nll": 7 / 3, "entropy": 3.0})
