"""A tiny Llama, packs of random documents, and a loss with hand-checkable weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.config.model import LoraConfig, ModelConfig
from lockstep.config.train import TrainConfig
from lockstep.models.load import LoadedModel, load_model
from lockstep.protocols.train import LossOutput
from lockstep.schema.batch import IGNORE_LABEL, PackedBatch
from lockstep.train.local import LocalBackend


class NegativeLogprob:
    """The plainest loss: minus the weighted sum of logprobs. Its one term is each token's probability."""

    separable = True
    entropy_grad = False
    terms = ("probability",)

    def __call__(
        self, logprobs: Tensor, entropy: Tensor, batch: PackedBatch, rows: Tensor | slice
    ) -> LossOutput:
        terms = torch.where(batch.loss_mask[rows], logprobs.detach().exp(), 0.0)[None]
        return LossOutput(-(logprobs * batch.loss_weights[rows]).sum(), terms)


class WholeSequence(NegativeLogprob):
    """The same value, but asked for in one piece."""

    separable = False


def build_batch(documents: Sequence[Sequence[int]], *, weight: float, first_id: int = 0) -> PackedBatch:
    """All but each document's first two tokens are trained, each with `weight`."""
    ids, positions, labels, mask, ends = [], [], [], [], [0]
    for document in documents:
        length = len(document)
        ids += document
        positions += range(length)
        labels += [*document[1:], IGNORE_LABEL]
        mask += [0 < i < length - 1 for i in range(length)]
        ends.append(len(ids))
    loss_mask = torch.tensor(mask)
    return PackedBatch(
        token_ids=torch.tensor(ids),
        positions=torch.tensor(positions),
        cu_seqlens=torch.tensor(ends, dtype=torch.int32),
        max_seqlen=max(map(len, documents)),
        labels=torch.tensor(labels),
        loss_mask=loss_mask,
        loss_weights=torch.where(loss_mask, weight, 0.0),
        lengths=tuple(map(len, documents)),
        sample_ids=tuple(range(first_id, first_id + len(documents))),
    )


def random_documents(count: int, *, seed: int, longest: int = 24) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(5, longest, (count,), generator=generator).tolist()
    return [torch.randint(3, 200, (n,), generator=generator).tolist() for n in lengths]


@pytest.fixture
def documents() -> Any:
    return random_documents


@pytest.fixture
def batch_of() -> Any:
    return build_batch


@pytest.fixture
def loss() -> NegativeLogprob:
    return NegativeLogprob()


@pytest.fixture
def whole_loss() -> WholeSequence:
    return WholeSequence()


@pytest.fixture
def tiny_model() -> Any:
    def make(
        dtype: str = "float32", *, lora: LoraConfig | None = None, attention: str = "sdpa", seed: int = 0
    ) -> LoadedModel:
        config = ModelConfig(name="shape:tiny-llama", dtype=dtype, lora=lora, seed=seed)
        return load_model(config, attention=attention, device=torch.device("cpu"))

    return make


@pytest.fixture
def make_backend(tiny_model: Any) -> Any:
    """A backend over a fresh tiny model; takes TrainConfig's fields and those below."""

    def make(
        *,
        dtype: str = "float32",
        lora: LoraConfig | None = None,
        ref: bool = False,
        total_steps: int = 10,
        seed: int = 0,
        temperature: float = 1.0,
        **train: Any,
    ) -> LocalBackend:
        return LocalBackend(
            TrainConfig(**{"lr": 1e-3, **train}),
            model=tiny_model(dtype, lora=lora, seed=seed),
            total_steps=total_steps,
            temperature=temperature,
            ref=ref,
        )

    return make
