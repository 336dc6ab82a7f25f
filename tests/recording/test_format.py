"""Batches come back to the bit, and what is kept of them is as small as it can be."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import recordings
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raises
from recordings import assert_same, batch, documents, recorded
from safetensors import safe_open

from lockstep.errors import RecordingError
from lockstep.observe.files import parse_json
from lockstep.packing import Bucket, pack
from lockstep.recording import Recording
from lockstep.recording.entries import InputEntry, checked
from lockstep.recording.format import decode, encode
from lockstep.schema.batch import ScoredSample


def through(one: Any, vocab_size: int = recordings.VOCAB) -> Any:
    """Encoded and decoded, without a file."""
    encoded = encode(one, vocab_size=vocab_size)
    entry = checked(InputEntry, parse_json(encoded.entry.encode(), "entry", RecordingError), where="entry")
    assert entry.problem() is None
    sizes = entry.sizes()
    assert sizes == {name: len(column) for name, column in encoded.columns.items()}
    columns = {name: bytearray(column.tobytes()) for name, column in encoded.columns.items()}
    ids_type = encoded.columns["token_ids"].dtype.str
    return decode(entry, columns, encoded.others.__getitem__, ids_type=ids_type)


@pytest.mark.parametrize("policy", [True, False])
@pytest.mark.parametrize("capacity", [None, 17, 24, 60])
def test_batches_come_back_to_the_bit(policy: bool, capacity: int | None) -> None:
    one = recorded(3, 1, content=batch(policy=policy, capacity=capacity))
    assert_same(one, through(one))


@pytest.mark.parametrize("capacity", [None, 24])
def test_trajectories_and_versions_come_back(capacity: int | None) -> None:
    content = batch((5, 9, 3), capacity=capacity)
    slots = torch.arange(content.num_slots)
    numbers = torch.where(slots < 14, 7, 0)  # documents 0 and 1
    current = (slots % 3 == 0) & (slots < 17)
    content = dataclasses.replace(content, trajectories=numbers, current=current, step_tokens=40)
    one = recorded(0, content=content)
    assert_same(one, through(one))
    assert len(encode(one, vocab_size=recordings.VOCAB).columns["current"]) == 3
    for field, wrong in (("trajectories", torch.where(slots < 13, 7, 0)), ("current", slots[:-1] > 3)):
        bad = dataclasses.replace(one, batch=dataclasses.replace(content, **{field: wrong}))
        with raises(RecordingError, f"wrong-shape: {field}"):
            encode(bad, vocab_size=recordings.VOCAB)


def test_entries_of_earlier_versions_are_read() -> None:
    entry = parse_json(
        encode(recorded(0), vocab_size=recordings.VOCAB).entry.encode(), "entry", RecordingError
    )
    assert {"trajectories", "current", "step_tokens"}.isdisjoint(entry)
    found = checked(InputEntry, entry, where="entry")
    assert (found.trajectories, found.current, found.step_tokens) == ([], False, None)


@pytest.mark.parametrize("bucket", [None, Bucket(tokens=24, documents=8, max_seqlen=8)])
def test_a_reward_models_pairs_may_score_their_last_tokens(bucket: Bucket | None) -> None:
    samples = []
    for number, (length, margin) in enumerate(((5, 0.25), (4, 0.25), (3, 0.0), (6, 0.0))):
        mask = torch.zeros(length, dtype=torch.bool)
        mask[-1 if number else -2] = True
        ids = torch.arange(1, length + 1)
        samples.append(ScoredSample(token_ids=ids, loss_mask=mask, sample_id=number, margin=margin))
    content = pack(samples, [torch.full((len(s),), 0.5) for s in samples], bucket=bucket)
    one = recorded(0, content=content)
    assert_same(one, through(one))
    plain = dataclasses.replace(one, batch=dataclasses.replace(content, margins=None))
    with raises(RecordingError, "wrong-shape: loss_mask"):
        encode(plain, vocab_size=recordings.VOCAB)


def test_the_worked_example_of_the_batch_module() -> None:
    """[5 6 7 8 2] and [9 10] at capacity 8 with 4 document slots, see lockstep.schema.batch."""
    samples = documents((5, 2), seed=0, policy=False)
    samples = [
        dataclasses.replace(
            samples[0],
            token_ids=torch.tensor([5, 6, 7, 8, 2]),
            loss_mask=torch.tensor([False, True, True, True, False]),
        ),
        dataclasses.replace(
            samples[1], token_ids=torch.tensor([9, 10]), loss_mask=torch.tensor([True, False])
        ),
    ]
    weights = [torch.full((5,), 0.25), torch.full((2,), 0.5)]
    content = pack(samples, weights, bucket=Bucket(tokens=8, documents=4, max_seqlen=5))
    one = recorded(0, content=content, outputs=False, rng=None)
    encoded = encode(one, vocab_size=11)
    assert encoded.columns["token_ids"].dtype == np.uint8
    assert encoded.columns["token_ids"].tolist() == [5, 6, 7, 8, 2, 9, 10]
    assert encoded.columns["loss_mask"].tolist() == [0b0101110]
    assert encoded.columns["loss_weights"].tolist() == [0.25, 0.5]
    back = through(one, 11).batch
    assert back.labels.tolist() == [6, 7, 8, 2, -100, 10, -100, -100]
    assert back.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 0]
    assert back.cu_seqlens.tolist() == [0, 5, 7, 8, 8]
    assert back.loss_weights.tolist() == [0, 0.25, 0.25, 0.25, 0, 0.5, 0, 0]
    assert_same(one, through(one, 11))


def test_what_is_kept_of_a_float_field_is_the_least_that_gives_every_bit_back() -> None:
    content = batch((6, 6), capacity=16)
    trained = int(content.loss_mask.sum())
    varied = torch.where(content.loss_mask, torch.arange(16.0) + 1, 0.0)
    everywhere = torch.arange(16.0)
    everywhere[12:] = 0
    minus_zero = torch.zeros(16)
    minus_zero[15] = -0.0
    one = recorded(
        0,
        content=dataclasses.replace(
            content, loss_weights=varied, advantages=everywhere, rollout_logprobs=minus_zero
        ),
        outputs=False,
    )
    columns = encode(one, vocab_size=recordings.VOCAB).columns
    sizes = {name: len(columns[name]) for name in ("loss_weights", "advantages", "rollout_logprobs")}
    assert sizes == {"loss_weights": trained, "advantages": 12, "rollout_logprobs": 16}
    assert_same(one, through(one))


def test_special_floats_keep_their_bits_and_scalars_too() -> None:
    content = batch((4, 4), capacity=None)
    values = torch.zeros(8)
    values[content.loss_mask] = torch.tensor(
        [math.nan, math.inf, -math.inf, 1e-45, -0.0, 1.0][: int(content.loss_mask.sum())]
    )
    one = recorded(0, content=dataclasses.replace(content, rollout_logprobs=values))
    one = dataclasses.replace(
        one, outputs=dataclasses.replace(one.outputs, loss=math.nan, grad_norm=math.inf)
    )
    back = through(one)
    assert math.isnan(back.outputs.loss) and back.outputs.grad_norm == math.inf
    assert_same(one, back)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(256, "u1"), (257, "u2"), (65536, "u2"), (65537, "i4")])
def test_ids_are_kept_in_the_narrowest_integer(vocab_size: int, dtype: str) -> None:
    ids = torch.tensor([0, vocab_size - 1, 3])
    sample = dataclasses.replace(documents((3,), seed=0)[0], token_ids=ids)
    one = recorded(0, content=pack([sample], [torch.ones(3)]))
    assert encode(one, vocab_size=vocab_size).columns["token_ids"].dtype == np.dtype(dtype)
    assert_same(one, through(one, vocab_size))


def _changed(name: str) -> dict[str, Any]:
    content = batch()
    tensor = getattr(content, name).clone()
    tensor[1] = tensor[1] + 1 if name != "loss_mask" else True
    return {name: tensor}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_changed("labels"), "wrong-shape: labels"),
        (_changed("positions"), "wrong-shape: positions"),
        (_changed("cu_seqlens"), "wrong-shape: cu_seqlens"),
        ({"loss_mask": torch.ones(24, dtype=torch.bool)}, "wrong-shape: loss_mask"),
        ({"token_ids": batch().token_ids.int()}, "wrong-shape: token_ids"),
        ({"token_ids": torch.where(torch.arange(24) == 20, 1, batch().token_ids)}, "wrong-shape: token_ids"),
        ({"token_ids": batch().token_ids - 400}, "wrong-shape: token_ids"),
        ({"advantages": batch().advantages.double()}, "wrong-shape: advantages"),
        ({"advantages": torch.zeros(23)}, "wrong-shape: advantages"),
        ({"lengths": (5, 9, 4, 6)}, "wrong-shape: positions"),
        ({"lengths": (5, 9, 3)}, "wrong-shape: lengths"),
        ({"sample_ids": ()}, "empty"),
        ({"max_seqlen": 8}, "out-of-range: max_seqlen"),
    ],
)
def test_a_batch_that_would_not_come_back_is_refused(change: dict[str, Any], named: str) -> None:
    one = recorded(0, content=dataclasses.replace(batch(), **change), outputs=False)
    with raises(RecordingError, named):
        encode(one, vocab_size=recordings.VOCAB)


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    tail=st.integers(0, 50),
    policy=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_pack_comes_back(lengths: list[int], tail: int, policy: bool, seed: int) -> None:
    samples = documents(tuple(lengths), seed=seed, policy=policy)
    bucket = Bucket(tokens=sum(lengths) + tail, documents=len(lengths) + 60, max_seqlen=40)
    one = recorded(1, 1, content=pack(samples, [torch.rand(n) for n in lengths], bucket=bucket))
    assert_same(one, through(one))


def test_the_safetensors_library_reads_our_files(tmp_path: Any) -> None:
    inputs = recordings.write(tmp_path, recordings.run_inputs(1, 1), world_size=1)
    path, _ = Recording.open(tmp_path).source(0)
    with safe_open(path, framework="pt") as file:
        ids = file.get_tensor("token_ids").to(torch.int64)
        pixels = file.get_tensor("1/extras/pixel_values")
        assert file.metadata()["format"] == "lockstep-recording"
    assert ids.tolist() == [i for one in inputs for i in one.batch.token_ids[: one.batch.num_tokens].tolist()]
    assert torch.equal(pixels, inputs[1].extras["pixel_values"])
