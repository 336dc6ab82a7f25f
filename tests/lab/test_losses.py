from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from raising import raises
from recorded import recording_header

from lockstep.algorithms.offline import SFTLoss
from lockstep.algorithms.policy_loss import PolicyLoss
from lockstep.errors import RecordingError
from lockstep.schema.batch import PackedBatch
from lockstep.schema.recording import RecordingHeader
from lockstep_lab.replay.losses import token_loss


def header(algorithm: dict[str, Any]) -> RecordingHeader:
    return recording_header(vocab_size=9, algorithm=algorithm)


@pytest.fixture
def batch() -> PackedBatch:
    """Tokens 1, 2, 3 with both predictions trained, weights 0.5 and 0.25."""
    return PackedBatch(
        token_ids=torch.tensor([1, 2, 3]),
        positions=torch.arange(3),
        cu_seqlens=torch.tensor([0, 3], dtype=torch.int32),
        max_seqlen=3,
        labels=torch.tensor([2, 3, -100]),
        loss_mask=torch.tensor([True, True, False]),
        loss_weights=torch.tensor([0.5, 0.25, 0.0]),
        lengths=(3,),
        sample_ids=(0,),
    )


LOGPROBS = torch.tensor([-1.0, -4.0, float("nan")])


@pytest.mark.parametrize(("name", "value"), [("logprob-sum", 5.0), ("cross-entropy", 2.5), ("recorded", 1.5)])
def test_values_by_hand(batch: PackedBatch, name: Any, value: float) -> None:
    loss = token_loss(header({"name": "sft"}), name)
    assert loss.separable and not loss.entropy_grad
    assert float(loss(LOGPROBS, torch.zeros(3), batch, slice(0, 3)).loss) == value
    parts = [loss(LOGPROBS[p], torch.zeros(3)[p], batch, p).loss for p in (slice(0, 1), slice(1, 3))]
    assert float(sum(parts)) == value
    empty = dataclasses.replace(batch, loss_mask=torch.zeros(3, dtype=torch.bool))
    assert float(loss(LOGPROBS, torch.zeros(3), empty, slice(0, 3)).loss) == 0.0


def test_the_recorded_loss_is_that_of_the_algorithm() -> None:
    assert isinstance(token_loss(header({"name": "surrogate"}), "recorded"), SFTLoss)
    loss = token_loss(header({"name": "gspo", "clip_low": 0.01}), "recorded")
    assert isinstance(loss, PolicyLoss) and not loss.separable
    assert (loss.clip_low, loss.clip_high) == (0.01, 4e-4)


@pytest.mark.parametrize(
    ("algorithm", "text"),
    [
        ({"name": "grpp"}, "wrong-field: algorithm.name"),
        ({}, "wrong-field: algorithm.name"),
        ({"name": "grpo", "kl": {"coef": -1}}, "wrong-field: algorithm.kl.coef"),
        ({"name": "grpo", "nonsense": 1}, "wrong-field: algorithm.nonsense"),
    ],
)
def test_an_algorithm_that_is_none_names_the_field_and_the_way_out(
    algorithm: dict[str, Any], text: str
) -> None:
    with raises(RecordingError, text) as caught:
        token_loss(header(algorithm), "recorded")
    assert "--loss logprob-sum" in str(caught.value)
    assert token_loss(header(algorithm), "logprob-sum") is not None
