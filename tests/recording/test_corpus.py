"""The shipped corpus is what the docs say it is, and a replay of it compares like with like."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from lockstep.cli.main import main
from lockstep.recording import Recording, corpus_path
from lockstep.schema.batch import PolicyBatch

MIB = 2**20


@pytest.fixture(scope="module")
def corpus() -> Recording:
    return Recording.open()


def test_what_is_in_it(corpus: Recording) -> None:
    tokens = [sum(lengths) for lengths in corpus.lengths]
    assert corpus.path == corpus_path() and len(corpus) == 256
    assert corpus.header.world_size >= 2 and {meta.rank for meta in corpus.metas} == {0, 1}
    assert {meta.update for meta in corpus.metas} == set(range(16))
    assert statistics.median(map(len, corpus.lengths)) >= 4
    assert statistics.median(tokens) >= 400
    assert (min(tokens), max(tokens)) == (240, 2226)
    assert corpus.header.model["name"] == "bundled:smollm2-135m"
    files = [path for path in corpus.path.rglob("*") if path.is_file()]
    assert 0 < sum(path.stat().st_size for path in files) <= 2 * MIB


def test_every_input_is_valid(corpus: Recording) -> None:
    checked = list(corpus.validate())
    assert len(checked) == len(corpus)
    assert [found.problem for found in checked if found.problem is not None] == []


def test_inputs_are_whole(corpus: Recording) -> None:
    """Every rank has every step's micro-batches, and what a GRPO run knows of each document is there."""
    rewards, signs, times, with_gradient = set(), set(), [], 0
    for recorded, lengths in zip(corpus, corpus.lengths, strict=True):
        meta, batch, outputs = recorded.meta, recorded.batch, recorded.outputs
        assert isinstance(batch, PolicyBatch) and outputs is not None and outputs.logprobs is not None
        assert meta.world_size == 2 and meta.mesh == {"dp": meta.rank} and meta.outcome == "finished"
        assert len(meta.documents) == len(batch.sample_ids) == len(lengths)
        for number, document in enumerate(meta.documents):
            assert document["finish_reason"] in ("stop", "length") and "prompt_index" in document
            rewards.add(document["reward"])
            first = int(batch.cu_seqlens[number])
            trained = batch.loss_mask[first : first + lengths[number]]
            advantages = batch.advantages[first : first + lengths[number]][trained]
            assert len(advantages) > 0 and bool((advantages == advantages[0]).all())
            signs.add(float(advantages[0].sign()))
        with_gradient += bool(batch.advantages.any())
        assert bool((batch.rollout_logprobs[batch.loss_mask] <= 0).all())
        assert bool((outputs.logprobs[batch.loss_mask] <= 0).all()) and outputs.loss is not None
        times.append((meta.rank, meta.update, meta.time))
    assert with_gradient == 64
    assert len(rewards) > 1 and signs == {-1.0, 0.0, 1.0}
    for rank in (0, 1):
        own = [(update, time) for r, update, time in times if r == rank]
        assert own == sorted(own) and own[0][1] > 1.7e9 and own[-1][1] > own[0][1] + 60
    updates = {meta.update for meta in corpus.metas}
    keys = [tuple(meta.key) for meta in corpus.metas]
    counts = {(meta.update, meta.rank): meta.num_micro_batches for meta in corpus.metas}
    expected = [
        (update, micro_batch, rank)
        for update in sorted(updates)
        for micro_batch in range(max(counts[update, rank] for rank in (0, 1)))
        for rank in (0, 1)
        if micro_batch < counts[update, rank]
    ]
    assert keys == expected and updates == set(range(len(updates)))


@pytest.mark.slow
def test_the_shortest_input_gives_the_recorded_logprobs(
    corpus: Recording, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command of a newcomer: no training run, no arguments but which input."""
    index = min(range(len(corpus)), key=lambda each: sum(corpus.lengths[each]))
    out = tmp_path / "out"
    assert main(["replay", "--inputs", str(index), "--out", str(out), "--no-backward"]) == 0
    (row,) = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert (row["index"], row["weights"], row["status"]) == (index, "match", "ok")
    assert 0 <= row["logprob_max_difference"] < 1e-4
    assert abs(row["loss_difference"]) < 1e-6
    summary = json.loads((out / "summary.json").read_text())
    assert summary["weights"]["matches"] is True
    assert f"{summary['weights']['fingerprint']}, the recorded one" in capsys.readouterr().out
