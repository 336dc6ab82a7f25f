import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from raising import raises

from lockstep.config.data import DataConfig
from lockstep.config.model import ModelConfig
from lockstep.errors import ConfigError, DataError
from lockstep.recording import Recording
from lockstep.schema.batch import PolicyBatch, PreferenceBatch, ValueBatch
from lockstep_lab.replay.losses import token_loss
from lockstep_lab.suite.job_files import read_job_file, read_lines
from lockstep_lab.train_parity.documents import generated_rows, random_documents
from lockstep_lab.train_parity.inputs import main, make_inputs
from lockstep_lab.train_parity.job import (
    METRICS,
    InputsReport,
    InputsSpec,
    Outcome,
    ParityJob,
    StepRow,
)

TINY = ModelConfig(name="shape:tiny-llama")


def spec(out: Path, **changes: Any) -> InputsSpec:
    given = {"model": TINY, "max_samples": 10, "batch_size": 4, "min_packs": 2, "out": out}
    return InputsSpec.model_validate(given | changes)


def test_sft_inputs_are_one_recording(tmp_path: Path) -> None:
    report = make_inputs(spec(tmp_path, steps=5))
    recording = Recording.open(tmp_path / "inputs")
    assert len(report.steps) == 5 and all(len(step) >= 2 for step in report.steps), "a micro-batch per rank"
    assert [i for step in report.steps for i in step] == list(range(len(recording)))
    for step in report.steps:
        batches = [recording[index].batch for index in step]
        assert sum(len(batch.sample_ids) for batch in batches) == 4
        # the normaliser of the whole step is in the weights
        assert sum(float(batch.loss_weights.sum()) for batch in batches) == pytest.approx(1.0)
    assert report.tokens == sum(recording[i].batch.num_tokens for step in report.steps for i in step)
    assert report.documents == 10 and report.baselines is None
    assert InputsReport.model_validate_json((tmp_path / "inputs.json").read_text()) == report


def test_one_pass_where_no_steps_are_asked_for(tmp_path: Path) -> None:
    assert len(make_inputs(spec(tmp_path)).steps) == 3  # of 10 documents, 4 at a time


def test_equal_seeds_make_equal_inputs(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        (tmp_path / name).mkdir()
        make_inputs(spec(tmp_path / name, seed=seed))
    a, b, c = (
        torch.cat([recorded.batch.token_ids for recorded in Recording.open(tmp_path / name / "inputs")])
        for name in "abc"
    )
    assert torch.equal(a, b)
    assert a.shape != c.shape or not torch.equal(a, c)


def test_static_capacities_where_graphs_need_them(tmp_path: Path) -> None:
    for algorithm in ("sft", "grpo"):
        out = tmp_path / algorithm
        out.mkdir()
        given = spec(out, static_capacity=True, token_budget=1024, max_length=256, algorithm=algorithm)
        make_inputs(given)
        slots = {recorded.batch.num_slots for recorded in Recording.open(out / "inputs")}
        assert slots <= {256, 512, 768, 1024}, slots


def test_grpo_starts_from_the_starting_weights(tmp_path: Path) -> None:
    report = make_inputs(spec(tmp_path, algorithm="grpo", max_samples=16, batch_size=8, steps=5))
    recording = Recording.open(tmp_path / "inputs")
    assert report.baselines is not None and len(report.steps) == len(report.baselines) == 5
    assert report.steps[0] == report.steps[2] != report.steps[1], "the rollouts are gone through again"
    loss = token_loss(recording.header, "recorded")
    for step, baseline in zip(report.steps, report.baselines, strict=True):
        total = 0.0
        for index in step:
            batch = recording[index].batch
            assert isinstance(batch, PolicyBatch) and batch.old_logprobs is not None
            assert bool(batch.advantages.any()) and bool((batch.old_logprobs[batch.loss_mask] < 0).all())
            old = batch.old_logprobs
            total += float(loss(old, torch.zeros_like(old), batch, slice(0, batch.num_slots)).loss)
        assert total == pytest.approx(baseline, abs=1e-6)


def test_ppo_has_inputs_of_both_models(tmp_path: Path) -> None:
    report = make_inputs(spec(tmp_path, algorithm="ppo", max_samples=16, batch_size=8, steps=5))
    policy, value = (Recording.open(tmp_path / name) for name in ("inputs", "inputs-value"))
    assert (policy.header.role, value.header.role) == ("policy", "value") and len(policy) == len(value)
    loss = token_loss(value.header, "recorded")
    assert report.value_baselines is not None
    for step, baseline in zip(report.steps, report.value_baselines, strict=True):
        advantages, total = [], 0.0
        for index in step:
            actions, states = policy[index].batch, value[index].batch
            assert isinstance(actions, PolicyBatch) and isinstance(states, ValueBatch)
            assert actions.token_ids.equal(states.token_ids) and actions.loss_mask.equal(states.loss_mask)
            advantages.append(actions.advantages[actions.loss_mask])
            # gamma = lambda = 1: each token of a document returns the document's reward
            for returns, mask in zip(
                states.split(states.returns), states.split(states.loss_mask), strict=True
            ):
                assert returns[mask].std() < 1e-6 < returns[mask].abs().max()
            old = states.old_values
            assert old[states.loss_mask].abs().min() > 0
            total += float(loss(old, torch.zeros_like(old), states, slice(0, states.num_slots)).loss)
        # before its first update the loss is half the mean square of return - value, which whitening divides
        assert total == pytest.approx(baseline, abs=1e-6) and 0.4 < baseline < 0.6
        whole = torch.cat(advantages)
        assert float(whole.mean()) == pytest.approx(0.0, abs=1e-6)
        assert float(whole.std()) == pytest.approx(1.0, abs=1e-2)


def test_a_reward_model_scores_last_tokens(tmp_path: Path) -> None:
    report = make_inputs(spec(tmp_path, algorithm="rm", max_samples=12, batch_size=8, steps=2))
    recording = Recording.open(tmp_path / "inputs")
    loss = token_loss(recording.header, "recorded")
    assert recording.header.has_scores
    for step in report.steps:
        batches = [recording[index].batch for index in step]
        for batch in batches:
            assert all(mask[-1] and mask.sum() == 1 for mask in batch.split(batch.loss_mask))
        zero = [torch.zeros(batch.num_slots) for batch in batches]
        shares = [
            loss(z, z, b, slice(0, b.num_slots)).loss.item() for z, b in zip(zero, batches, strict=True)
        ]
        assert sum(shares) == pytest.approx(math.log(2.0), abs=1e-6)


def test_recorded_inputs_without_advantages_are_left_out(tmp_path: Path) -> None:
    from lockstep_lab.train_parity.inputs import _recorded, model_sizes

    corpus = Recording.open(None)
    sizes = model_sizes(TINY).model_copy(update={"vocab_size": 49152})
    plan = _recorded(corpus, spec(tmp_path, algorithm="grpo", max_samples=60, max_length=300), sizes)
    batches = [batch for batches in plan for batch in batches]
    assert 0 < sum(len(batch.sample_ids) for batch in batches) <= 60
    for batch in batches:
        assert isinstance(batch, PolicyBatch) and bool(batch.advantages.any()) and max(batch.lengths) <= 300
    with raises(DataError, f"nothing-left: --max-length, {corpus.path.name}"):
        _recorded(corpus, spec(tmp_path, algorithm="grpo", max_length=3), sizes)


def test_what_the_model_cannot_be_fed(tmp_path: Path) -> None:
    with raises(ConfigError, "no-tokenizer: --dataset, shape:tiny-llama"):
        make_inputs(spec(tmp_path, data=DataConfig(source="x.jsonl")))
    corpus = Recording.open(None).path
    with raises(ConfigError, "other-model: --recording, shape:tiny-llama"):
        make_inputs(spec(tmp_path, algorithm="grpo", recording=corpus))


def test_generated_documents() -> None:
    rows = generated_rows("reasoning_gym:chain_sum", size=3, seed=1)
    assert len(rows) == 3 and all(row["prompt"] and row["completion"] for row in rows)
    samples = random_documents(50, vocab_size=256, longest=64)
    lengths = [len(sample) for sample in samples]
    assert max(lengths) <= 64 and min(lengths) >= 4 and len(set(lengths)) > 10, "ragged"
    assert all(int(sample.token_ids.max()) < 256 for sample in samples)
    with raises(ConfigError, "unknown-name: chain_summ"):
        generated_rows("reasoning_gym:chain_summ", size=3, seed=1)


def test_as_a_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "spec.json"
    path.write_text(spec(tmp_path).model_dump_json())
    assert main([str(path)]) == 0
    assert json.loads(capsys.readouterr().out)["documents"] == 10
    path.write_text('{"out": "x", "batch_size": 0}')
    with raises(ConfigError, "out-of-range: spec.json, batch_size"):
        main([str(path)])


# --- job files ----------------------------------------------------------------------------------------------


def test_a_job_survives_its_file(tmp_path: Path) -> None:
    job = ParityJob(stack="local", inputs=tmp_path, steps=((0, 1), (2,)), out=tmp_path, gradients_at=(1,))
    assert read_job_file(job.write(), ParityJob) == job


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"steps": []}, "wrong-format: job.json"),
        ({"steps": [[0], []]}, "wrong-format: job.json"),
        ({"gradients_at": [2]}, "wrong-format: job.json"),
        ({"ranks": 0}, "out-of-range: job.json, ranks"),
        ({"train": {"lrr": 1}}, "unknown-setting: job.json, train.lrr"),
    ],
)
def test_a_job_that_cannot_be_run(tmp_path: Path, change: dict[str, Any], problem: str) -> None:
    value = {"stack": "local", "inputs": "x", "steps": [[0], [1]], "out": "x"} | change
    (tmp_path / "job.json").write_text(json.dumps(value))
    with raises(ConfigError, problem):
        read_job_file(tmp_path / "job.json", ParityJob)


def test_files_of_a_worker_that_died(tmp_path: Path) -> None:
    assert read_lines(tmp_path / METRICS, StepRow) == [] and Outcome.read(tmp_path) is None
    line = {"step": 1, "loss": "NaN", "grad_norm": 1.0, "lr": 0.1, "tokens": 1, "seconds": 1.0}
    line |= {"tokens_per_second": 1.0, "peak_memory_bytes": 1}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n" + json.dumps(line)[:30])
    (row,) = read_lines(tmp_path / METRICS, StepRow)
    assert row.loss != row.loss
    (tmp_path / "result.json").write_text("{")
    assert Outcome.read(tmp_path) is None
    with raises(ConfigError, "cannot-read: none.json"):
        read_job_file(tmp_path / "none.json", ParityJob)


def test_dpo_prefers_documents_to_spoiled_ones_and_starts_at_ln_2(tmp_path: Path) -> None:
    report = make_inputs(spec(tmp_path, algorithm="dpo", max_samples=12, batch_size=8, steps=3))
    recording = Recording.open(tmp_path / "inputs")
    loss = token_loss(recording.header, "recorded")
    for indices in report.steps:
        batches = [recording[index].batch for index in indices]
        assert all(isinstance(batch, PreferenceBatch) for batch in batches)
        assert sum(len(batch.sample_ids) for batch in batches) == 8
        for batch in batches:
            chosen, rejected = batch.split(batch.token_ids)[:2]
            half = len(chosen) // 2
            assert chosen[:half].equal(rejected[:half]) and not chosen.equal(rejected)
        start = [
            loss(batch.ref_logprobs, torch.zeros(0), batch, slice(0, batch.num_slots)).loss
            for batch in batches
        ]
        assert float(sum(start)) == pytest.approx(math.log(2.0), abs=1e-6)
