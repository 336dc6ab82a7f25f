import dataclasses
import json
import random

import pytest
import torch
from raising import raises
from sampled import FakeEngine

from lockstep.config.batch import GenerateConfig
from lockstep.config.data import DataConfig
from lockstep.config.engine import EngineConfig
from lockstep.config.model import ModelConfig
from lockstep.config.rollout import SamplingConfig
from lockstep.data.prompts import PromptMaker, load_prompts
from lockstep.engine.hf.engine import HFEngine
from lockstep.errors import ConfigError, DataError, EngineError
from lockstep.models.load import load_model
from lockstep.rollout.rows import RowFile
from lockstep.rollout.sampler import sampling_params
from lockstep.rollout.scoring import Hooks, SampleWork, check_prompts, generate_rows, prompt_batches

QUESTIONS = ["one", "two, and a little longer", "three", "four?", "five five five", "six", "seven"]


@pytest.fixture(scope="module")
def model(tiny_folder):
    config = ModelConfig(name=str(tiny_folder), dtype="float32")
    return load_model(config, attention="sdpa", device=torch.device("cpu"))


@pytest.fixture
def data(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": q, "answer": (q, 1)}) + "\n" for q in QUESTIONS))
    return DataConfig(source=str(file), shuffle=False)


def setup(model, data, **more):
    """(batches, work); ragged, because many ids end a sample, and with logprobs, which round by the batch."""
    config = GenerateConfig(
        n=3,
        rollout_batch_size=3,
        columns=("token_ids", "logprobs"),
        data=data,
        sampling=SamplingConfig(max_tokens=12, stop_token_ids=tuple(range(60, 90))),
    ).model_copy(update=more)
    prompts = load_prompts(config.data, tokenizer=model.tokenizer)
    maker = PromptMaker(config.data, model.tokenizer, ())
    work = SampleWork(
        sampling=sampling_params(config.sampling),
        n=config.n,
        seed=config.seed,
        step=-4,
        columns=config.columns,
        conversation=lambda prompt: maker.conversation(prompt.row, "")[1],
        whole_batches=True,
    )
    return prompt_batches(prompts, config), work


def sample(engine, setup, path, **hooks):
    batches, work = setup
    expected = sum(map(len, batches)) * work.n
    with RowFile(path, command="generate", identity={}, expected=expected) as sink:
        totals = generate_rows(engine, batches, work, sink=sink, hooks=Hooks(**hooks))
        if len(sink.done) == expected:
            sink.finish()
        return totals


@pytest.fixture(scope="module")
def engine(model):
    return HFEngine(EngineConfig(max_batch=6), model=model)


def test_rows_say_what_was_sampled(model, data, engine, tmp_path):
    seen = []
    path = tmp_path / "out.jsonl"
    totals = sample(engine, setup(model, data), path, on_row=lambda done, total: seen.append((done, total)))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert sorted((r["index"], r["sample"]) for r in rows) == [(i, j) for i in range(7) for j in range(3)]
    assert seen == [(i + 1, 21) for i in range(21)]
    assert totals.rows == 21 and totals.tokens == sum(len(r["token_ids"]) for r in rows)
    assert dict(totals.finish_reasons) == {
        reason: sum(r["finish_reason"] == reason for r in rows) for reason in ("stop", "length")
    }
    for row in rows:
        assert row["prompt"] == [{"role": "user", "content": QUESTIONS[row["index"]]}]
        assert row["prompt_text"] == f"<|user|>{QUESTIONS[row['index']]}<|end|><|assistant|>"
        content = [i for i in row["token_ids"] if i not in model.eos_token_ids]
        assert row["completion"] == model.tokenizer.decode(content, skip_special_tokens=False)
        assert len(row["logprobs"]) == len(row["token_ids"]) and row["row"]["answer"]
    assert len({r["seed"] for r in rows}) == 21
    assert len({tuple(r["token_ids"]) for r in rows}) > 15


def test_a_file_cut_anywhere_is_completed_to_the_bytes_of_an_uninterrupted_one(model, data, engine, tmp_path):
    made = setup(model, data)
    whole = tmp_path / "whole.jsonl"
    sample(engine, made, whole)
    meta = json.loads((tmp_path / "whole.jsonl.meta.json").read_text()) | {"complete": False}
    lines = whole.read_bytes().splitlines()
    generator = random.Random(0)
    for _ in range(12):
        path = tmp_path / "cut.jsonl"
        path.write_bytes(whole.read_bytes()[: generator.randrange(whole.stat().st_size)])
        (tmp_path / "cut.jsonl.meta.json").write_text(json.dumps(meta))
        kept = path.read_bytes().count(b"\n")
        assert sample(engine, made, path).rows == 21 - kept
        assert sorted(path.read_bytes().splitlines()) == sorted(lines)


class Fake(FakeEngine):
    """`script` may change a completion, or raise; `asked` has the prompts and seeds of each stream."""

    def __init__(self, script=lambda number, completion: completion):
        super().__init__()
        self.script, self.asked, self.aborted, self.number = script, [], False, 0

    def finished(self):
        self.asked.append([(r.prompt_token_ids, r.seeds) for r in self.requests])
        self.requests, self.number = [], 0
        return super().finished()

    def next(self, handle, sample, prompt):
        done = super().next(handle, sample, prompt)
        self.number += 1
        completion = self.script(self.number - 1, done.completion)
        if self.aborted:
            completion = dataclasses.replace(completion, finish_reason="abort")
        return dataclasses.replace(done, completion=completion)

    def abort(self):
        self.aborted = True


def test_an_unfinished_batch_is_asked_for_as_a_whole_unless_that_changes_nothing(model, data, tmp_path):
    batches, work = setup(model, data)
    for whole, sizes in ((True, [9, 3]), (False, [2, 3])):
        path = tmp_path / f"{whole}.jsonl"
        made = (batches, dataclasses.replace(work, whole_batches=whole))
        sample(Fake(), made, path)
        lines = path.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if json.loads(line)["index"] < 6][:-2]  # short of 2 and 3
        path.write_bytes(b"".join(kept))
        meta = tmp_path / f"{whole}.jsonl.meta.json"
        meta.write_text(json.dumps(json.loads(meta.read_text()) | {"complete": False}))
        engine = Fake()
        assert sample(engine, made, path).rows == 5
        assert [sum(len(seeds) for _, seeds in call) for call in engine.asked] == sizes
        assert path.read_bytes().splitlines(keepends=True)[:16] == kept
        assert sorted(path.read_bytes().splitlines(keepends=True)) == sorted(lines)


def test_what_is_finished_before_an_abort_stays(model, data, tmp_path):
    engine = Fake()
    stop = {"now": False}

    def on_row(done, total):
        if done == 4:
            stop["now"] = True
            engine.abort()

    hooks = {"on_row": on_row, "cancelled": lambda: stop["now"]}
    made = setup(model, data)
    assert sample(engine, made, tmp_path / "out.jsonl", **hooks).rows == 4
    assert len(engine.asked) == 1
    assert sample(Fake(), made, tmp_path / "out.jsonl").rows == 17


def test_a_crash_of_the_engine_keeps_what_is_finished(model, data, tmp_path):
    def script(number, completion):
        if number == 5:
            raise EngineError("died", code="wrong-state")
        return completion

    made = setup(model, data)
    with raises(EngineError, "wrong-state"):
        sample(Fake(script), made, tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_bytes().count(b"\n") == 5
    assert sample(Fake(), made, tmp_path / "out.jsonl").rows == 16


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt_token_ids": (1,)}, "another prompt"),
        ({"seed": 1}, "seeds are not the requested ones"),
        ({"logprobs": ()}, "1 tokens but 0 logprobs"),
    ],
)
def test_a_mix_up_of_the_engine_is_told_and_not_written(model, data, tmp_path, fields, message):
    engine = Fake(lambda number, c: dataclasses.replace(c, **fields) if number == 2 else c)
    with raises(EngineError, "wrong-result") as caught:
        sample(engine, setup(model, data), tmp_path / "out.jsonl")
    assert message in str(caught.value)
    assert (tmp_path / "out.jsonl").read_bytes().count(b"\n") == 2
    assert engine.aborted and not engine.waiting


def test_samples_that_never_come_are_told(model, data, tmp_path):
    class Short(Fake):
        def finished(self):
            self.waiting.pop()
            return super().finished()

    with raises(EngineError, "wrong-result") as caught:
        sample(Short(), setup(model, data), tmp_path / "out.jsonl")
    assert "did not return 1 of the requested samples" in str(caught.value)


def test_batches_take_all_prompts_in_order_or_one_batch_of_the_round(model, data):
    def indices(**more):
        taken = more.pop("data", data)
        return [[p.index for p in batch] for batch in setup(model, taken, **more)[0]]

    assert indices() == [[0, 1, 2], [3, 4, 5], [6]]
    assert indices(max_samples=4) == [[0, 1, 2], [3]]
    assert indices(max_samples=99) == [[0, 1, 2], [3, 4, 5], [6]]
    assert indices(iteration=1) == [[3, 4, 5]]
    assert indices(iteration=2) == [[6, 0, 1]]
    shuffled = data.model_copy(update={"shuffle": True})
    order = [i for batch in indices(data=shuffled) for i in batch]
    assert sorted(order) == list(range(7)) and order != list(range(7))
    rounds = [indices(data=shuffled, iteration=i)[0] for i in range(2)]
    assert rounds == [order[:3], order[3:6]]
    with raises(ConfigError, "not-enough: rollout_batch_size"):
        indices(iteration=0, rollout_batch_size=8)


def test_generated_data_without_an_end_is_bounded():
    stream = load_prompts(DataConfig(source="ids"), tokenizer=None, vocab_size=50)
    config = GenerateConfig(data=DataConfig(source="ids"), max_samples=5, rollout_batch_size=2)
    assert [[p.index for p in b] for b in prompt_batches(stream, config)] == [[0, 1], [2, 3], [4]]
    config = GenerateConfig(data=DataConfig(source="ids"), iteration=3, rollout_batch_size=2)
    assert [[p.index for p in b] for b in prompt_batches(stream, config)] == [[6, 7]]


def test_prompts_that_cannot_be_sampled_are_told_before_anything_is(model, data, tmp_path):
    batches, _ = setup(model, data)
    longest = max(len(p.token_ids) for batch in batches for p in batch)
    room = {"vocab_size": 400, "context": longest + 5}
    assert check_prompts(batches, **room, max_tokens=5) == longest + 5
    with raises(DataError, "too-long"):
        check_prompts(batches, **room, max_tokens=6)
    with raises(DataError, "outside-vocabulary"):
        check_prompts(batches, vocab_size=50, context=999, max_tokens=1)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a", "answer": 1}\n{"prompt": " \\n", "answer": 1}\n')
    with raises(DataError, "empty"):
        check_prompts(setup(model, data)[0], vocab_size=400, context=99, max_tokens=1)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"sampling": {"temperature": 0.0}, "n": 2}, "unsupported-combination: n"),
        ({"iteration": 1, "max_samples": 4}, "contradiction: max_samples"),
        ({"data": {"source": "ids"}}, "missing-setting: max_samples"),
        ({"model": {"lora": {}}}, "unsupported-combination: model.lora"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(more, message):
    with raises(ValueError, message):
        GenerateConfig.model_validate({"data": {"source": "x.jsonl"}} | more)
