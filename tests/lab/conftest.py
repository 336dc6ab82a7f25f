"""A recording in memory: what lockstep.recording.Recording looks like to a replay, without its files."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from recorded import recording_header

from lockstep import invariant
from lockstep.algorithms.policy_loss import PolicyLoss
from lockstep.config.algorithm import GRPOConfig
from lockstep.config.model import ModelConfig
from lockstep.config.train import TrainConfig
from lockstep.models.load import load_model
from lockstep.packing import Bucket, pack
from lockstep.recording.files import fingerprint, module_tensors
from lockstep.recording.weights import save_weights
from lockstep.schema.batch import PackedBatch, PolicyBatch, PolicySample
from lockstep.schema.recording import InputMeta, RecordedInput, RecordedOutputs, RecordingHeader
from lockstep.train.local import LocalBackend

LENGTHS = ((5, 12, 30), (9, 9), (40, 3))
"""Documents of the inputs of one optimizer step."""


@dataclasses.dataclass
class MemoryRecording:
    path: Path
    header: RecordingHeader
    inputs: list[RecordedInput]

    @property
    def metas(self) -> tuple[InputMeta, ...]:
        return tuple(recorded.meta for recorded in self.inputs)

    @property
    def lengths(self) -> tuple[tuple[int, ...], ...]:
        return tuple(r.batch.lengths[: len(r.batch.sample_ids)] for r in self.inputs)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> RecordedInput:
        return self.inputs[index]


def policy_batch(lengths: Sequence[int], *, seed: int, bucket: Bucket | None = None) -> PackedBatch:
    """Random documents, whose completions are all but their first two tokens."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for index, length in enumerate(lengths):
        mask = (torch.arange(length) >= 1) & (torch.arange(length) < length - 1)
        floats = torch.rand(2, length, generator=generator) - 0.5
        samples.append(
            PolicySample(
                token_ids=torch.randint(3, 256, (length,), generator=generator),
                loss_mask=mask,
                sample_id=index,
                rollout_logprobs=torch.where(mask, floats[0] - 5.0, 0.0),
                advantages=torch.where(mask, floats[1].mean() * 4, 0.0),
            )
        )
    batch = pack(samples, [torch.full((n,), 1 / sum(lengths)) for n in lengths], bucket=bucket)
    assert isinstance(batch, PolicyBatch)
    # With the policy's own logprobs as old ones every ratio would be 1, and the loss the same for any policy.
    return dataclasses.replace(batch, old_logprobs=batch.rollout_logprobs)


def record_steps(
    path: Path,
    *,
    dtype: str = "float32",
    bucket: Bucket | None = None,
    seed: int = 0,
    num_updates: int = 2,
    **axes: Any,
) -> MemoryRecording:
    """A run of `num_updates` optimizer steps over LENGTHS; the weights of every step are stored in `path`."""
    config = ModelConfig(name="shape:tiny-llama", dtype=dtype, seed=seed)
    settings = {"layout": "packed", "execution": "eager"} | axes
    train = TrainConfig(device="cpu", lr=0.05, static_capacity=bucket is not None, **settings)
    model = load_model(config, attention=train.attention, device=torch.device("cpu"))
    if train.batch_invariant:
        invariant.convert(model.module)
    backend = LocalBackend(train, model=model, total_steps=num_updates, temperature=0.8)
    options = GRPOConfig().resolved()
    inputs = []
    for update in range(num_updates):
        weights = fingerprint(module_tensors(model.module).items())
        save_weights(model.module, path / f"weights/step-{update:06d}")
        batches = [policy_batch(each, seed=10 * update + i, bucket=bucket) for i, each in enumerate(LENGTHS)]
        stats = backend.forward_backward(batches, PolicyLoss(options))
        norm = backend.optimizer_step()["grad_norm"]
        for index, batch in enumerate(batches):
            meta = InputMeta(
                step=update,
                update=update,
                micro_batch=index,
                num_micro_batches=len(batches),
                weights=weights,
                checkpoint=f"weights/step-{update:06d}",
            )
            outputs = RecordedOutputs(
                loss=float(stats.losses[index]), logprobs=stats.logprobs[index], grad_norm=norm
            )
            inputs.append(RecordedInput(meta=meta, batch=batch, outputs=outputs))
    header = recording_header(
        model=config.model_dump(),
        vocab_size=256,
        algorithm=options.model_dump(),
        temperature=0.8,
        max_tokens=64,
        axes={
            "backend": "local",
            "attention": train.attention,
            "execution": train.execution,
            "layout": train.layout,
            "padding_side": train.padding_side,
            "device": "cpu",
            "dtype": dtype,
            "static_capacity": bucket is not None,
            "activation_checkpointing": train.activation_checkpointing is True,
            "batch_invariant": bool(train.batch_invariant),
        },
        contract=None if backend.contract is None else backend.contract.as_json(),
        capacity={"token_budget": 128, "max_seqlen": 64, "max_documents": 8},
    )
    return MemoryRecording(path, header, inputs)


@pytest.fixture
def record(tmp_path: Path) -> Callable[..., MemoryRecording]:
    """record_steps into this test's folder; axes are those of TrainConfig."""

    def make(**options: Any) -> MemoryRecording:
        return record_steps(tmp_path / "recordings", **({"attention": "sdpa"} | options))

    return make


@pytest.fixture(scope="session")
def recording(tmp_path_factory: pytest.TempPathFactory) -> MemoryRecording:
    """Two steps of three inputs, sdpa, eager, packed, float32. Not to be changed."""
    return record_steps(tmp_path_factory.mktemp("recording"), attention="sdpa")
