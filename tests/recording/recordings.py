"""Recordings for tests: small, with everything a recording can hold."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from recorded import recording_header
from torch import Tensor

from lockstep.packing import Bucket, pack
from lockstep.recording import RecordingWriter
from lockstep.schema.batch import PackedBatch, PolicyBatch, PolicySample, TrainSample
from lockstep.schema.recording import InputMeta, RecordedInput, RecordedOutputs, RecordingHeader

VOCAB = 300


def header(**changes: Any) -> RecordingHeader:
    fields = {
        "created": "2026-01-02T03:04:05Z",
        "versions": {"torch": "2.13.0"},
        "model": {"name": "shape:tiny-llama", "dtype": "float32"},
        "vocab_size": VOCAB,
        "algorithm": {"name": "grpo"},
        "max_tokens": 16,
        "axes": {"attention": "sdpa"},
        "capacity": {"token_budget": 64, "max_seqlen": 32, "max_documents": 4},
        "notes": {"made": "by a test"},
    }
    return recording_header(**fields | changes)


def documents(lengths: tuple[int, ...], *, seed: int, policy: bool = True) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    found: list[Any] = []
    for number, length in enumerate(lengths):
        mask = torch.arange(length) >= length // 3
        mask[-1] = False
        ids = torch.randint(VOCAB, (length,), generator=generator)
        if not policy:
            found.append(TrainSample(token_ids=ids, loss_mask=mask, sample_id=number))
            continue
        found.append(
            PolicySample(
                token_ids=ids,
                loss_mask=mask,
                sample_id=10 * seed + number,
                rollout_logprobs=torch.where(mask, -torch.rand(length, generator=generator), 0.0),
                advantages=torch.where(mask, number - 0.7, 0.0),
                policy_version=seed,
            )
        )
    return found


def batch(
    lengths: tuple[int, ...] = (5, 9, 3), *, seed: int = 0, policy: bool = True, capacity: int | None = 24
) -> Any:
    samples = documents(lengths, seed=seed, policy=policy)
    bucket = None if capacity is None else Bucket(tokens=capacity, documents=len(lengths) + 5, max_seqlen=12)
    return pack(samples, [torch.full((len(s),), 0.125) for s in samples], bucket=bucket)


def recorded(
    update: int,
    micro_batch: int = 0,
    rank: int = 0,
    *,
    content: PackedBatch | None = None,
    outputs: bool = True,
    **changes: Any,
) -> RecordedInput:
    """One input whose content follows from its key."""
    seed = 100 * update + 10 * micro_batch + rank
    content = batch(seed=seed) if content is None else content
    generator = torch.Generator().manual_seed(seed)
    logprobs = torch.where(content.loss_mask, -torch.rand(content.num_slots, generator=generator), 0.0)
    if isinstance(content, PolicyBatch) and micro_batch == 1:
        content = dataclasses.replace(content, old_logprobs=logprobs * 2, ref_logprobs=logprobs * 3)
    meta: dict[str, Any] = {
        "step": update // 2,
        "update": update,
        "micro_batch": micro_batch,
        "num_micro_batches": 2,
        "rank": rank,
        "world_size": 2,
        "mesh": {"dp": rank},
        "time": 1_760_000_000.25 + update,
        "weights": "lsw1-" + "0" * 31 + str(update % 10),
        "checkpoint": "weights/step-000000",
        "documents": tuple(
            {"reward": 0.1 * i, "finish_reason": "stop"} for i in range(len(content.sample_ids))
        ),
    }
    extras = {"pixel_values": torch.randn(2, 3, generator=generator).bfloat16()} if micro_batch == 1 else {}
    given: dict[str, Any] = {
        "batch": content,
        "outputs": RecordedOutputs(
            loss=-0.1 * seed,
            logprobs=logprobs,
            entropy=logprobs.abs() + 1 if micro_batch == 0 else None,
            grad_norm=1.5 if micro_batch else None,
            fingerprints={"logits": "lsw1-abc"},
        ),
        "rng": generator.get_state() if micro_batch == 0 and rank == 0 else None,
        "extras": extras,
    }
    if not outputs:
        given["outputs"] = None
        meta["outcome"] = "pending"
    for name, value in changes.items():
        (given if name in given else meta)[name] = value
    return RecordedInput(meta=InputMeta(**meta), **given)


def key_order(inputs: list[RecordedInput]) -> list[RecordedInput]:
    return sorted(inputs, key=lambda r: r.meta.key)


def write(
    directory: Path, inputs: list[RecordedInput], *, shard_inputs: int = 4, **changes: Any
) -> list[RecordedInput]:
    """A closed recording of these inputs, step by step; the inputs in the order of a reader."""
    ranks = sorted({r.meta.rank for r in inputs})
    for rank in ranks:
        with RecordingWriter(
            directory,
            header(**{"world_size": 2, **changes}),
            rank=rank,
            shard_inputs=shard_inputs,
            ranks=ranks,
        ) as writer:
            for update in sorted({r.meta.update for r in inputs}):
                writer.finish([r for r in inputs if r.meta.rank == rank and r.meta.update == update])
    return key_order(inputs)


def run_inputs(updates: int = 5, ranks: int = 2) -> list[RecordedInput]:
    return [recorded(u, m, r) for u in range(updates) for m in range(2) for r in range(ranks)]


def assert_same(one: RecordedInput, other: RecordedInput) -> None:
    """Equal to the bit, types included."""
    assert one.meta == other.meta
    assert (one.outputs is None) == (other.outputs is None)
    for record, twin in ((one.batch, other.batch), (one.outputs, other.outputs), (one, other)):
        if record is None:
            continue
        assert type(record) is type(twin)
        for field in dataclasses.fields(record):
            mine, theirs = getattr(record, field.name), getattr(twin, field.name)
            if isinstance(mine, Tensor) or isinstance(theirs, Tensor):
                assert_same_bits(mine, theirs, field.name)
            elif field.name == "extras":
                assert mine.keys() == theirs.keys()
                for name in mine:
                    assert_same_bits(mine[name], theirs[name], name)
            elif field.name not in ("batch", "outputs"):
                assert repr(mine) == repr(theirs), field.name


def assert_same_bits(one: Any, other: Any, name: str) -> None:
    assert isinstance(one, Tensor) and isinstance(other, Tensor), name
    assert one.dtype == other.dtype and one.shape == other.shape, name
    assert bytes(one.contiguous().flatten().view(torch.uint8).numpy()) == bytes(
        other.contiguous().flatten().view(torch.uint8).numpy()
    ), name
