import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raises

from lockstep.errors import DataError
from lockstep.packing import Bucket, PackLimits, buckets_for, pack, plan_micro_batches, repack
from lockstep.schema.batch import PackedBatch, PolicyBatch, PolicySample, TrainSample


def sample(ids, mask=None, sample_id=0):
    mask = [True] * (len(ids) - 1) + [False] if mask is None else mask
    return TrainSample(token_ids=torch.tensor(ids), loss_mask=torch.tensor(mask), sample_id=sample_id)


def samples_of(lengths):
    return [sample(list(range(1, n + 1)), sample_id=i) for i, n in enumerate(lengths)]


def ones(samples):
    return [torch.ones(len(s)) for s in samples]


def test_the_example_of_the_schema():
    samples = [sample([5, 6, 7, 8, 2], [False, True, True, True, False], 7), sample([9, 10], sample_id=3)]
    weights = [torch.full((5,), 0.5), torch.full((2,), 0.25)]
    batch = pack(samples, weights, bucket=Bucket(tokens=8, documents=4, max_seqlen=5))
    assert type(batch) is PackedBatch
    assert batch.token_ids.tolist() == [5, 6, 7, 8, 2, 9, 10, 0]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 0]
    assert batch.cu_seqlens.tolist() == [0, 5, 7, 8, 8] and batch.cu_seqlens.dtype == torch.int32
    assert batch.labels.tolist() == [6, 7, 8, 2, -100, 10, -100, -100]
    assert batch.loss_mask.tolist() == [False, True, True, True, False, True, False, False]
    assert batch.loss_weights.tolist() == [0, 0.5, 0.5, 0.5, 0, 0.25, 0, 0]
    assert (batch.lengths, batch.sample_ids, batch.max_seqlen) == ((5, 2, 1), (7, 3), 5)
    assert [x.tolist() for x in batch.split(batch.token_ids)] == [[5, 6, 7, 8, 2], [9, 10]]


def test_without_a_bucket_there_is_no_tail():
    batch = pack(samples_of([3, 2]), ones(samples_of([3, 2])))
    assert (batch.num_slots, batch.max_seqlen, batch.lengths) == (5, 3, (3, 2))
    assert batch.cu_seqlens.tolist() == [0, 3, 5]


def test_tail_is_split_into_documents_of_max_seqlen():
    batch = pack(samples_of([3]), ones(samples_of([3])), bucket=Bucket(tokens=12, documents=5, max_seqlen=4))
    assert batch.lengths == (3, 4, 4, 1)
    assert batch.cu_seqlens.tolist() == [0, 3, 7, 11, 12, 12]
    assert batch.positions.tolist() == [0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 3, 0]


def test_policy_samples_make_a_policy_batch():
    first = PolicySample(
        token_ids=torch.tensor([1, 2]),
        loss_mask=torch.tensor([True, False]),
        rollout_logprobs=torch.tensor([-0.5, 0.0]),
        advantages=torch.tensor([2.0, 0.0]),
        policy_version=7,
    )
    batch = pack([first], [torch.ones(2)], bucket=Bucket(tokens=3, documents=2, max_seqlen=2))
    assert type(batch) is PolicyBatch
    assert batch.rollout_logprobs.tolist() == [-0.5, 0, 0] and batch.advantages.tolist() == [2, 0, 0]
    assert batch.policy_versions == (7,)
    with raises(DataError, "wrong-batch"):
        pack([first, sample([1, 2])], [torch.ones(2)] * 2)


@pytest.mark.parametrize(
    ("bucket", "message"),
    [
        (Bucket(tokens=6, documents=9, max_seqlen=4), "too-long: tokens"),
        (Bucket(tokens=8, documents=9, max_seqlen=3), "too-long: max_seqlen"),
        (Bucket(tokens=8, documents=2, max_seqlen=4), "too-long: documents"),
    ],
)
def test_overflow_is_an_error(bucket, message):
    with raises(DataError, message):
        pack(samples_of([4, 3]), [torch.ones(4), torch.ones(3)], bucket=bucket)


def test_an_empty_sample_is_named():
    empty = TrainSample(
        token_ids=torch.zeros(0, dtype=torch.int64), loss_mask=torch.zeros(0, dtype=torch.bool), sample_id=9
    )
    with raises(DataError, "empty"):
        pack([empty], [torch.zeros(0)])


def test_buckets_are_quarters_of_the_budget():
    buckets = buckets_for(token_budget=10112, max_seqlen=2048, max_documents=32)
    assert [(b.tokens, b.documents) for b in buckets] == [(2560, 34), (5056, 35), (7616, 36), (10112, 37)]
    assert [b.tokens for b in buckets_for(token_budget=1000, max_seqlen=600, max_documents=4)] == [768, 1000]


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 100), min_size=1, max_size=40),
    static=st.booleans(),
    layout=st.sampled_from(["packed", "padded"]),
    limit=st.none() | st.integers(1, 10),
)
def test_plan_loses_nothing_and_covers_every_slot(lengths, static, layout, limit):
    samples = samples_of(lengths)
    limits = PackLimits(token_budget=256, static_capacity=static, layout=layout, max_documents=limit)
    batches = plan_micro_batches(samples, ones(samples), limits)
    assert sorted(i for b in batches for i in b.sample_ids) == list(range(len(lengths)))
    for batch in batches:
        assert sum(batch.lengths) == batch.num_slots == batch.cu_seqlens[-1] <= 256
        assert max(batch.lengths) <= batch.max_seqlen
        assert limit is None or len(batch.sample_ids) <= limit
        for index, ids in zip(batch.sample_ids, batch.split(batch.token_ids), strict=True):
            assert torch.equal(ids, samples[index].token_ids)
        if layout == "padded":
            assert len(batch.sample_ids) * batch.max_seqlen <= 256
    assert sum(int(b.loss_mask.sum()) for b in batches) == sum(lengths) - len(lengths)
    if static:
        assert len({(b.num_slots, b.cu_seqlens.shape, b.max_seqlen) for b in batches}) <= 4


def test_one_process_fills_static_capacities_instead_of_balancing_packs():
    """12 documents of 50 in capacities of 64, 128, 192 and 256: five, five and two have 256 + 256 + 128;
    four in each pack would have three times 256."""
    samples = samples_of([50] * 12)
    limits = PackLimits(token_budget=256, static_capacity=True, max_seqlen=64)

    def slots(**changed):
        limits_ = dataclasses.replace(limits, **changed)
        return sorted(b.num_slots for b in plan_micro_batches(samples, ones(samples), limits_))

    assert slots() == [128, 256, 256]
    assert slots(min_packs=3) == [256, 256, 256]  # ranks wait for the fullest
    assert slots(static_capacity=False) == [200, 200, 200]
    assert slots(max_documents=4) == [256, 256, 256]


@pytest.mark.parametrize("layout", ["packed", "shared"])
def test_a_part_of_a_step_has_room_for_as_many_documents_as_the_whole(layout):
    """So that it has the shapes, and the graphs, of one of the at most four capacities."""
    limits = PackLimits(
        token_budget=256, static_capacity=True, layout=layout, max_seqlen=16, max_documents=64
    )

    def rooms(samples, **whole):
        batches = plan_micro_batches(samples, ones(samples), limits, **whole)
        batches = [batch.with_rows() for batch in batches]
        cu = [b.cu_seqlens if b.shared is None else b.shared.cu_rows for b in batches]
        ends = [b.num_slots if b.shared is None else len(b.shared.keys) for b in batches]
        return {len(c) - 1 - -(-end // 16) for c, end in zip(cu, ends, strict=True)}

    samples = samples_of([7] * 60)
    assert rooms(samples) == rooms(samples[:9], whole=samples) == rooms(samples[:1], whole=samples) == {64}
    assert rooms(samples[:9]) == {16}


def test_plan_refuses_a_document_beyond_the_runs_longest():
    samples = samples_of([3, 9])
    limits = PackLimits(token_budget=64, static_capacity=True, max_seqlen=8)
    with raises(DataError, "too-long: max_seqlen", sample=1):
        plan_micro_batches(samples, ones(samples), limits)


@pytest.mark.parametrize("kind", ["sft", "policy"])
def test_repack_is_the_pack_of_the_same_documents_with_another_tail(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    samples, weights = [], []
    for index, length in enumerate((5, 2, 7)):
        ids = torch.randint(3, 90, (length,), generator=generator)
        mask = torch.arange(length) < length - 1
        floats = torch.rand(3, length, generator=generator) * mask
        fields = {"token_ids": ids, "loss_mask": mask, "sample_id": index + 4}
        if kind == "policy":
            extra = {"rollout_logprobs": floats[0], "advantages": floats[1], "policy_version": index}
            samples.append(PolicySample(**fields, **extra))
        else:
            samples.append(TrainSample(**fields))
        weights.append(floats[2])
    small = Bucket(tokens=20, documents=6, max_seqlen=8)
    large = Bucket(tokens=64, documents=20, max_seqlen=8)
    packed = pack(samples, weights, bucket=small)
    for bucket in (None, small, large):
        expected, found = pack(samples, weights, bucket=bucket), repack(packed, bucket)
        assert type(found) is type(expected)
        for field in dataclasses.fields(expected):
            a, b = getattr(expected, field.name), getattr(found, field.name)
            if isinstance(a, torch.Tensor):
                assert a.dtype == b.dtype and torch.equal(a, b), field.name
            else:
                assert a == b, field.name


def test_repack_refuses_what_the_bucket_does_not_hold() -> None:
    sample = TrainSample(token_ids=torch.arange(9), loss_mask=torch.zeros(9, dtype=torch.bool))
    packed = pack([sample], [torch.zeros(9)])
    with raises(DataError, "too-long: tokens"):
        repack(packed, Bucket(tokens=8, documents=4, max_seqlen=16))
