"""Rows of layout shared: a slot has the row of its own prefix, and a trained slot a row of its own."""

from __future__ import annotations

import pytest
import torch
from raising import raises

from lockstep.errors import DataError
from lockstep.packing import PackLimits, RowCapacity, pack, plan_micro_batches, share
from lockstep.packing.shared import count_rows
from lockstep.schema.batch import PreferenceSample, TrainSample


def sample(prompt, completion, sample_id=0, kind=TrainSample):
    mask = torch.zeros(len(prompt) + len(completion), dtype=torch.bool)
    mask[len(prompt) - 1 : -1] = True
    ids = torch.tensor([*prompt, *completion])
    return kind(token_ids=ids, loss_mask=mask, sample_id=sample_id)


def packed(samples):
    return pack(samples, [torch.ones(len(s)) for s in samples])


def group(prompt, *lengths, first=0):
    return [sample(prompt, [50 + i] * n, first + i) for i, n in enumerate(lengths)]


def check(batch):
    """What layout shared promises, whatever the documents: read off the tensors alone."""
    shared = batch.shared
    real, start = batch.num_tokens, 0
    trained = shared.rows[batch.loss_mask]
    assert len(set(trained.tolist())) == len(trained), "two trained slots have one row"
    assert set(shared.rows[:real].tolist()) == set(range(shared.num_rows))
    keys_of = {}
    for q0, q1, k0, k1 in zip(
        shared.cu_rows, shared.cu_rows[1:], shared.cu_keys, shared.cu_keys[1:], strict=False
    ):
        assert q1 - q0 <= min(shared.max_rows, k1 - k0) and k1 - k0 <= shared.max_keys
        for i, row in enumerate(range(q0, q1)):
            keys_of[row] = shared.keys[k0 : k1 - (q1 - q0) + i + 1].tolist()
    for length in batch.lengths[: len(batch.sample_ids)]:
        rows = shared.rows[start : start + length].tolist()
        for position, row in enumerate(rows):
            assert keys_of[row] == rows[: position + 1], "a row attends to the rows of its own prefix"
            slot = shared.slots[row]
            assert batch.token_ids[slot] == batch.token_ids[start + position]
            assert batch.positions[slot] == position
        start += length
    assert set(keys_of) == set(range(len(shared.slots))), "a row that no segment covers"
    assert shared.cu_keys[-1] == len(shared.keys)
    # A tree has fewer segments than twice its documents, and each has a row once.
    fair = 2 * len(batch.sample_ids) + -(-len(shared.keys) // len(shared.slots))
    assert shared.ends.diff().max() <= fair, "padding is the key of one row"
    for row in range(len(shared.slots)):
        places = shared.order[shared.ends[row] : shared.ends[row + 1]]
        assert places.tolist() == (shared.keys == row).nonzero()[:, 0].tolist()


def test_the_example_of_the_record():
    shared = share(packed([sample([5, 6], [7]), sample([5, 6], [8, 9])])).shared
    assert shared.slots.tolist() == [0, 1, 2, 4, 5, 6]
    assert shared.rows.tolist() == [0, 1, 2, 0, 3, 4, 5]
    assert shared.keys.tolist() == [0, 0, 1, 2, 0, 3, 4, 5]
    assert shared.cu_rows.tolist() == [0, 1, 3, 6] and shared.cu_keys.tolist() == [0, 1, 4, 8]
    assert (shared.row_lengths, shared.key_lengths, shared.num_rows) == ((1, 2, 3), (1, 3, 4), 6)


MIXES = {
    "a group": group([1, 2, 3, 4], 3, 1, 5),
    "one-token prompts": group([1], 3, 1, 2),
    "two-token prompts": group([1, 2], 1, 1),
    "one prompt in another": [*group([1, 2, 3], 2, 2), *group([1, 2, 3, 4, 5, 6], 2, 1, first=2)],
    "nothing in common": [sample([9], [1, 2]), sample([8, 7, 6], [1])],
    "the same twice": [sample([1, 2, 3], [4, 5]), sample([1, 2, 3], [4, 5])],
    "a single document": [sample([1, 2, 3], [4])],
    "groups that are mixed": [*group([1, 2, 3], 2), *group([1, 5, 6], 4, 1), *group([1, 2, 3], 3, 1)],
    "nothing trained": [*group([1, 2, 3], 4), sample([1, 2, 3, 50], []), sample([1], [])],
}  # fmt: skip


@pytest.mark.parametrize("name", MIXES)
def test_every_mix_of_documents(name):
    batch = share(packed(MIXES[name]))
    check(batch)
    assert batch.shared.num_rows == count_rows(MIXES[name]) <= batch.num_tokens
    capacity = RowCapacity(rows=64, keys=256, segments=40, longest=16)
    padded = share(batch, capacity)
    check(padded)
    assert (padded.num_rows, len(padded.shared.keys), len(padded.shared.cu_rows)) == (64, 256, 41)


def test_a_prompt_is_computed_once_but_for_its_last_token():
    assert count_rows(group([1, 2, 3, 4], 3, 1, 5)) == 3 + (1 + 3) + (1 + 1) + (1 + 5)
    assert count_rows(group([1], 3, 1, 2)) == 3 + 3 + 3 - 3 + 3  # of one token nothing is left to share


def test_what_is_trained_in_one_document_is_not_shared():
    """A turn that one document trains on and the other has as its prompt."""
    long = sample([1, 2, 3, 4, 5], [6, 7])
    short = sample([1, 2], [3, 4, 5])
    batch = share(packed([long, short]))
    check(batch)
    assert batch.shared.num_rows == 7 + 5 - 1


def test_a_capacity_that_is_too_small():
    for change in ({"rows": 4}, {"keys": 12}, {"segments": 2}, {"longest": 3}):
        fields = {"rows": 16, "keys": 64, "segments": 20, "longest": 8} | change
        with raises(DataError, "too-long"):
            share(packed(group([1, 2, 3], 3, 2)), RowCapacity(**fields))


def plan(samples, **limits):
    batches = plan_micro_batches(
        samples, [torch.ones(len(s)) for s in samples], PackLimits(layout="shared", **limits)
    )
    assert [(b.num_rows, b.shared.num_rows) for b in batches] == [
        (len(b.shared_rows.slots), b.shared_rows.num_rows) for b in batches
    ]
    batches = [batch.with_rows() for batch in batches]
    for batch in batches:
        check(batch)
    assert sorted(i for b in batches for i in b.sample_ids) == sorted(s.sample_id for s in samples)
    return batches


def test_the_budget_counts_rows_and_a_group_stays_together():
    samples = [*group(range(1, 11), 2, 2, 2, 2), *group(range(20, 30), 2, 2, 2, 2, first=4)]
    assert sum(map(len, samples)) == 96 and count_rows(samples[:4]) == 9 + 4 * 3
    assert [b.sample_ids for b in plan(samples, token_budget=42)] == [tuple(range(8))]
    assert [b.sample_ids for b in plan(samples, token_budget=41)] == [(0, 1, 2, 3), (4, 5, 6, 7)]


def test_a_group_above_the_budget_is_cut_and_has_its_prompt_in_each_part():
    samples = group(range(1, 11), 2, 2, 2, 2)
    batches = plan(samples, token_budget=20)
    assert [b.sample_ids for b in batches] == [(0, 1), (2, 3)]
    assert [b.shared.num_rows for b in batches] == [9 + 2 * 3] * 2
    with raises(DataError, "too-long: train.token_budget"):
        plan(samples, token_budget=11)


def test_one_process_cuts_a_group_where_that_fills_a_pack():
    """Five groups of 3 shared rows and four times 26, 107 each. Two whole groups leave room for a completion
    and its prompt, 29; then three (81), a group and two more (55); the last two fit a quarter of the budget.
    Whole groups would have 256 + 256 + 128 rows."""
    samples = [s for g in range(5) for s in group([g + 1] * 4, *[25] * 4, first=4 * g)]
    packs = plan(samples, token_budget=256, static_capacity=True, max_seqlen=29)
    assert [(b.shared.num_rows, len(b.shared.slots)) for b in packs] == [(243, 256), (243, 256), (55, 64)]
    assert [b.shared.num_rows for b in plan(samples, token_budget=256)] == [214, 214, 107]


def test_one_document_of_a_step_has_the_shapes_of_the_steps_packs():
    """Alone it would have as many keys as rows, and few segments: a graph of its own."""
    samples = [*group(range(1, 11), 2, 2, 2, 2), *group(range(20, 30), 2, 2, 2, 2, first=4)]
    limits = PackLimits(token_budget=64, static_capacity=True, layout="shared", max_seqlen=12)

    def shape(samples, **whole):
        (batch,) = plan_micro_batches(samples, [torch.ones(len(s)) for s in samples], limits, **whole)
        batch = batch.with_rows()
        check(batch)
        return len(batch.shared.slots), len(batch.shared.keys), len(batch.shared.cu_rows)

    assert shape(samples) == shape(samples[3:4], whole=samples) == (64, 256, 16 + 22 + 1)
    assert shape(samples[3:4]) == (64, 64, 1 + 6 + 1)


def test_ranks_get_equal_work_from_few_groups():
    samples = [*group(range(1, 9), 8, 8, 8, 8), *group(range(20, 28), 8, 8, 8, 8, first=4)]
    batches = plan(samples, token_budget=4096, min_packs=4)
    assert len(batches) == 4 and {b.shared.num_rows for b in batches} == {7 + 2 * 9}


def test_preference_pairs_share_their_prompt_and_stay_side_by_side():
    pairs = [
        sample(prompt, [40 + i], 2 * p + i, PreferenceSample)
        for p, prompt in enumerate(([1, 2, 3], [4, 5, 6]))
        for i in range(2)
    ]
    assert [b.sample_ids for b in plan(pairs, token_budget=6)] == [(0, 1), (2, 3)]
    assert plan(pairs, token_budget=64)[0].shared.num_rows == 2 * (2 + 2 * 2)


def test_few_shapes_serve_all_packs():
    samples = [s for g in range(6) for s in group([g + 1] * (5 + g), *range(1, 9), first=8 * g)]
    batches = plan(samples, token_budget=256, static_capacity=True, max_seqlen=32, max_documents=48)
    shapes = {(b.num_rows, len(b.shared.keys), len(b.shared.cu_rows), b.shared.max_keys) for b in batches}
    assert all(b.num_rows in (64, 128, 192, 256) for b in batches) and len(shapes) <= len(batches)
    assert {b.shared.max_keys for b in batches} == {32}
