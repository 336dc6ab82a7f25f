from __future__ import annotations

from typing import Any

import pytest
import torch

from lockstep.config.train import TrainConfig
from lockstep.models.forward import decoder_inputs
from lockstep.schema.batch import IGNORE_LABEL
from lockstep.train.loss_module import LogprobModule, LossModule


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["packed", pytest.param("padded", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("attention", ["sdpa", "varlen"])
def test_the_whole_module_is_one_graph_and_computes_what_the_chunked_head_computes(
    tiny_model: Any, documents: Any, batch_of: Any, loss: Any, attention: str, layout: Any
) -> None:
    """fullgraph: what DeepCompile is given holds no closure, no host-side list and no graph break."""
    batch = batch_of(documents(3, seed=2), weight=1 / 30)
    labels = torch.where(batch.loss_mask, batch.labels, IGNORE_LABEL)
    reference = tiny_model(attention=attention).module
    chunked = LossModule(reference, config=TrainConfig(layout=layout), temperature=0.7, compiled=False)
    chunked(batch, slice(0, batch.num_slots), labels, loss).backward()

    policy = tiny_model(attention=attention).module
    whole = torch.compile(LogprobModule(policy, temperature=0.7), backend="aot_eager", fullgraph=True)
    inputs = decoder_inputs(policy, batch, layout=layout, compiled=True)
    logprobs, entropy = whole(inputs.token_ids, inputs.positions, labels, inputs.cells, **inputs.kwargs)
    loss(logprobs, entropy, batch, slice(0, batch.num_slots)).loss.backward()

    torch.testing.assert_close(logprobs, chunked.tokens[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy, chunked.tokens[1], rtol=1e-5, atol=1e-5)
    for (name, ours), theirs in zip(policy.named_parameters(), reference.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        error = float((ours.grad - theirs.grad).norm() / theirs.grad.norm())
        assert error < 1e-5, (name, error)
