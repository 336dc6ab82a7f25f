"""The bundled model in float32: every arrangement agrees within 1e-4 nats and 1e-4 of the gradient."""

import pytest
import torch
from parity_models import largest_gap, measure, relative_error

from lockstep.config.model import ModelConfig
from lockstep.models.load import load_model
from lockstep.packing import pack
from lockstep.schema.batch import TrainSample

TEXTS = (
    "The sum of 3 and 4 is 7, and the sum of 8 and 5 is 13.",
    "Water boils at 100 degrees",
    "Once upon a time there was a small mill by the river, and the miller had three sons. " * 3,
)


@pytest.mark.slow
def test_documents_of_a_real_model_do_not_see_each_other():
    device = torch.device("cpu")
    config = ModelConfig(dtype="float32")
    loaded = {kernel: load_model(config, attention=kernel, device=device) for kernel in ("sdpa", "varlen")}
    tokenizer = loaded["sdpa"].tokenizer
    samples = []
    for index, text in enumerate(TEXTS):
        ids = torch.tensor(tokenizer(text)["input_ids"])
        mask = torch.ones(len(ids), dtype=torch.bool)
        mask[-1] = False
        samples.append(TrainSample(token_ids=ids, loss_mask=mask, sample_id=index))

    def packs_of(*groups):
        return [pack([samples[i] for i in g], [torch.ones(len(samples[i])) for i in g]) for g in groups]

    alone, alone_grads = measure(loaded["sdpa"].module, packs_of([0], [1], [2]))
    alone_grads = {name: grad.clone() for name, grad in alone_grads.items()}
    for kernel, groups, layout in (
        ("sdpa", [[2, 0, 1]], {}),
        ("varlen", [[0, 1, 2]], {}),
        ("sdpa", [[0, 1, 2]], {"layout": "padded", "padding_side": "left"}),
        ("varlen", [[0, 1, 2]], {"layout": "padded", "padding_side": "right"}),
    ):
        logprobs, grads = measure(loaded[kernel].module, packs_of(*groups), **layout)
        gap, error = largest_gap(alone, logprobs), relative_error(alone_grads, grads)
        print(f"{kernel} {groups} {layout}: {gap:.1e} nats, {error:.1e}")
        assert gap <= 1e-4
        assert error <= 1e-4
