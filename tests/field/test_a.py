"""Wrong results that nothing reported: inputs of users, what should happen, and who says so.

Each case is a row: input, expected value, and the source of the expected value.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable
from functools import partial
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from answers import answer_logprobs, cross_entropy, orpo, rendered, simpo
from chats import TOOLS_TEMPLATE, document_texts, smollm2, trained_text, write_rows
from classifiers import save_classifier
from raising import raises
from scripted import SCRIPTED, prompts, save_scripted
from transformers import AutoTokenizer

from lockstep import loops
from lockstep.algorithms.offline import mismatched
from lockstep.cli.main import main
from lockstep.config.batch import RewardModelConfig
from lockstep.config.data import DataConfig
from lockstep.config.load import load_run
from lockstep.config.model import LoraConfig, ModelConfig
from lockstep.data.preferences import load_preferences, load_scored_pairs, load_unpaired
from lockstep.data.sft import load_sft
from lockstep.errors import DataError, ModelError
from lockstep.models.architectures import causal_lm
from lockstep.models.export import exported_folder, weights_fingerprint
from lockstep.models.load import load_model
from lockstep.models.reward import RewardModel
from lockstep.observe.flight import FlightRecorder
from lockstep.observe.run_history import read_lines
from lockstep.packing import pack
from lockstep.processes.child import JobProcess
from lockstep.ranks import watchdog
from lockstep.ranks.stacks import children_of

# 1. The tools and chat_template_kwargs of a row (more in tests/data/test_texts.py)

WEATHER = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
RAIN, YES, NO = (
    [{"role": r, "content": t}] for r, t in (("user", "Rain?"), ("assistant", "Yes"), ("assistant", "No"))
)
# (kind of run, row): what it renders is what transformers renders of RAIN (and YES) with the same variables.
RENDERED = [
    ("sft", {"messages": RAIN + YES}),
    ("sft", {"prompt": RAIN, "completion": YES}),
    ("dpo", {"prompt": RAIN, "chosen": YES, "rejected": NO}),
    ("rm", {"prompt": RAIN, "chosen": YES, "rejected": NO}),
    ("kto", {"prompt": RAIN, "chosen": YES, "rejected": NO}),
    ("grpo", {"prompt": RAIN}),
    ("grpo", {"prompt": "Rain?"}),
]


@pytest.mark.parametrize(("run", "row"), RENDERED)
def test_a_row_gives_tools_and_variables_to_the_template(run, row, tmp_path):
    more = {"tools": WEATHER, "chat_template_kwargs": {"enable_thinking": False}}
    source = write_rows(tmp_path, [{**row, **more}], kind="jsonl")
    assert document_texts(source, smollm2(), run=run, chat_template=TOOLS_TEMPLATE)[0] == (
        smollm2().apply_chat_template(
            RAIN if run == "grpo" else RAIN + YES,
            tools=WEATHER,
            enable_thinking=False,
            chat_template=TOOLS_TEMPLATE,
            tokenize=False,
            add_generation_prompt=run == "grpo",
        )
    )


# end of 1


# 2. Nulls that Arrow adds

# (format, the arguments of calls in two rows, what is learnt from the first): by hand.
ARGUMENTS = [
    ("jsonl", {"city": "Paris"}, {"zone": "CET"}, '"arguments": {"city": "Paris"}'),
    ("parquet", {"city": "Paris"}, {"zone": "CET"}, '"arguments": {"city": "Paris"}'),
    ("datasets", {"city": "Paris"}, {"zone": "CET"}, '"arguments": {"city": "Paris"}'),
    (
        "parquet",
        {"all": [{"city": "Paris"}, None]},
        {"all": [{"zone": 1}]},
        '{"all": [{"city": "Paris"}, null]}',
    ),
    ("jsonl", {"city": None}, {"zone": "CET"}, '"arguments": {"city": null}'),
]


@pytest.mark.parametrize(("kind", "first", "second", "learnt"), ARGUMENTS)
def test_nulls_of_other_rows_are_not_learnt(kind, first, second, learnt, tmp_path):
    calls = [[{"function": {"name": "weather", "arguments": arguments}}] for arguments in (first, second)]
    rows = [{"messages": [*RAIN, {"role": "assistant", "content": "", "tool_calls": call}]} for call in calls]
    source = write_rows(tmp_path, rows, kind=kind)
    text = trained_text(source, smollm2(), chat_template=TOOLS_TEMPLATE)
    assert learnt in text and text.count("null") == learnt.count("null")


# end of 2


# 3. Special tokens in the text that rewards and stops see

# (settings of the run, text and rewards of every rollout, worked out by hand)
TAGS = [
    ((), "<think>a</think><answer>7</answer>", {"format": 1.0, "math": 1.0}),
    (("--rollout.sampling.skip-special-tokens", "true"), "a7", {"format": 0.0, "math": 0.0}),
    (("--rollout.sampling.stop", "</think>"), "<think>a</think>", {"format": 0.0, "math": 0.0}),
]


@pytest.mark.parametrize(("settings", "text", "rewards"), TAGS)
def test_rewards_and_stop_strings_see_special_tokens(tiny_folder, tmp_path, settings, text, rewards):
    folder = save_scripted(tiny_folder, tmp_path / "model")
    config = tmp_path / "run.toml"
    config.write_text(SCRIPTED.format(model=folder, data=prompts(tmp_path)))
    assert main(["train", str(config), "--run-dir", str(tmp_path / "run"), *settings]) == 0
    for name in ("step-000000", "evaluation-before", "evaluation-after"):
        rows = read_lines(tmp_path / "run" / "rollouts" / f"{name}.jsonl")
        assert {row["completion"] for row in rows} == {text}
        assert [row["rewards"] for row in rows] == [rewards] * len(rows)
        assert {row["skip_special_tokens"] for row in rows} == {"skip" in "".join(settings)}


# end of 3


# 4. The end-of-sequence token after a special token

# (row, settings, what is trained): by hand; the tokenizer's eos is <|im_end|>.
ENDS = [
    ({"prompt": "6 + 1 =", "completion": "7</answer>"}, {"chat_template": "none"}, "7</answer><|im_end|>"),
    ({"prompt": "6 + 1 =", "completion": "7<|im_end|>"}, {"chat_template": "none"}, "7<|im_end|>"),
    ({"prompt": "6 + 1 =", "completion": "7</answer>"}, {}, "7</answer><|im_end|>"),
    ({"text": "x 7</answer>"}, {}, " 7</answer><|im_end|>"),
]


@pytest.mark.parametrize(("row", "settings", "trained"), ENDS)
def test_only_an_end_token_ends_a_text(row, settings, trained, tmp_path):
    source = write_rows(tmp_path, [row], kind="jsonl")
    assert trained_text(source, smollm2("<answer>", "</answer>"), **settings) == trained


# end of 4


# 5. Adapter_config.json beside a model's weights


@pytest.fixture
def with_adapter(tiny_folder: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A folder of a whole model, and a copy with an adapter that moves the logits, as peft writes it."""
    peft = pytest.importorskip("peft")
    folder = tmp_path / "merged"
    shutil.copytree(tiny_folder, folder)
    adapted = peft.get_peft_model(
        transformers.AutoModelForCausalLM.from_pretrained(tiny_folder),
        peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False),
    )
    adapted.save_pretrained(folder)
    return tiny_folder, folder


IDS = torch.arange(3, 23)[None]


def logits_of(folder: Path, **options: Any) -> torch.Tensor:
    loaded = load_model(
        ModelConfig(name=str(folder), dtype="float32"),
        attention="hf:sdpa",
        device=torch.device("cpu"),
        **options,
    )
    if loaded.source is not None:
        for name, _ in list(loaded.module.named_parameters()):
            path, _, kind = name.rpartition(".")
            values = torch.nn.Parameter(loaded.source.read(name, device=torch.device("cpu")))
            loaded.module.get_submodule(path)._parameters[kind] = values
        causal_lm(loaded.module).tie_weights()
    with torch.no_grad():
        return loaded.module(input_ids=IDS).logits  # type: ignore[no-any-return]


def test_an_adapter_beside_weights_is_not_loaded(
    with_adapter: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Expected: the logits of transformers for the folder without the adapter's files."""
    plain, folder = with_adapter
    with torch.no_grad():
        expected = transformers.AutoModelForCausalLM.from_pretrained(plain)(input_ids=IDS).logits
        over = transformers.AutoModelForCausalLM.from_pretrained(folder)(input_ids=IDS).logits
    assert (over - expected).abs().max() > 0.1  # or the adapter would show nothing
    whole, sharded = logits_of(folder), logits_of(folder, materialize=False)
    torch.testing.assert_close(whole, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(sharded, whole, atol=0, rtol=0)
    assert [r.getMessage().split(" is ")[0] for r in caplog.records if "adapter" in r.getMessage()] == [
        str(folder / "adapter_config.json")
    ]
    config = ModelConfig(name=str(folder), dtype="float32")
    served = exported_folder(config, device=torch.device("cpu"), work_dir=tmp_path / "work")
    names = {file.name for file in served.folder.iterdir()}
    assert "model.safetensors" in names and not any(name.startswith("adapter_") for name in names)
    assert weights_fingerprint(config) == weights_fingerprint(ModelConfig(name=str(plain)))
    # adapters of our own go over the same weights
    lora = config.model_copy(update={"lora": LoraConfig(rank=2)})
    fresh = load_model(lora, attention="hf:sdpa", device=torch.device("cpu")).module
    with torch.no_grad():
        torch.testing.assert_close(fresh(input_ids=IDS).logits, whole, atol=1e-5, rtol=1e-5)


def test_a_reward_model_with_an_adapter_scores_with_its_own_weights(
    tiny_folder: Path, tmp_path: Path
) -> None:
    """Expected: the scores without the adapter's files."""
    peft = pytest.importorskip("peft")
    plain, folder = tmp_path / "plain", tmp_path / "adapted"
    for each in (plain, folder):
        save_classifier(each, transformers.AutoTokenizer.from_pretrained(tiny_folder))
    adapted = peft.get_peft_model(
        transformers.AutoModelForSequenceClassification.from_pretrained(folder),
        peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False),
    )
    adapted.save_pretrained(folder)
    scores = []
    for each in (plain, folder):
        config = RewardModelConfig(name=str(each), dtype="float32")
        model = RewardModel(config, device=torch.device("cpu"))
        scores.append(model.score([model.document("short", "a", "row 1")]))
    assert scores[0] == scores[1]


@pytest.mark.parametrize("kept", [(), ("config.json",)])
def test_an_adapter_without_weights_is_refused(
    kept: tuple[str, ...], with_adapter: tuple[Path, Path], tmp_path: Path
) -> None:
    """Expected: an error that names the file and how to merge it; by hand."""
    _, folder = with_adapter
    for file in folder.iterdir():
        if not file.name.startswith("adapter_") and file.name not in kept:
            file.unlink()
    with raises(ModelError, "wrong-kind-of-file: adapter_config.json") as caught:
        logits_of(folder)
    assert "merge_and_unload" in str(caught.value)


# end of 5


# 6. Assistant turns of the prompt

EARLIER = [
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "That is two, I think."},
    {"role": "user", "content": "And 3 + 4?"},
]
CHOSEN, REJECTED = "7", "it may be 8"


def said(text):
    return {"role": "assistant", "content": text}


APART = {"prompt": EARLIER, "chosen": [said(CHOSEN)], "rejected": [said(REJECTED)]}
WHOLE = {"chosen": [*EARLIER, said(CHOSEN)], "rejected": [*EARLIER, said(REJECTED)]}
GENERATION = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content + '<|end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|end|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def loss_of_first_step(folder, row, place, *settings):
    """The loss of one step on this row alone, in training and on the same row held out."""
    place.mkdir()
    data, run = place / "rows.jsonl", place / "run"
    data.write_text(json.dumps(row))
    kind, *more = settings
    words = ["--model.name", str(folder), "--data.source", str(data), "--eval-data.source", str(data), *more]
    shared = ["--batch-size", "1", "--steps", "1", "--model.dtype", "float32", "--run-dir", str(run)]
    assert main(["train", kind, *words, *shared]) == 0
    lines = read_lines(run / "metrics.jsonl")
    (step,) = [line for line in lines if "evaluation" not in line]
    (before,) = [line for line in lines if line.get("evaluation") == "before"]
    return step["loss"], before["eval/loss"]


LAST = ("--data.train-on", "last", "--eval-data.train-on", "last")
# (run, row, loss of the answers' tokens alone: lockstep's tests/common/answers.py, float64)
ANSWERS = [
    (("dpo", "--algorithm.name", "simpo"), APART, simpo),
    (("dpo", "--algorithm.name", "simpo"), WHOLE, simpo),
    (("dpo", "--algorithm.name", "simpo"), WHOLE | {"prompt": EARLIER}, simpo),
    (("dpo", "--algorithm.name", "simpo", "--data.chat-template", GENERATION), APART, simpo),
    (("dpo", "--algorithm.name", "orpo"), APART, orpo),
    (("sft",), {"prompt": EARLIER, "completion": CHOSEN}, lambda a, b: cross_entropy([a])),
    (("sft", *LAST), {"messages": WHOLE["chosen"]}, lambda a, b: cross_entropy([a])),
]


@pytest.mark.parametrize(("run", "row", "loss"), ANSWERS)
def test_the_answer_is_what_comes_after_the_prompt(tiny_folder, tmp_path, run, row, loss):
    answers = [answer_logprobs(tiny_folder, rendered(EARLIER), text) for text in (CHOSEN, REJECTED)]
    found = loss_of_first_step(tiny_folder, row, tmp_path / "one", *run)
    assert found == pytest.approx((loss(*answers),) * 2, rel=1e-5)


def test_messages_train_on_every_assistant_turn(tiny_folder, tmp_path):
    every = [
        answer_logprobs(tiny_folder, rendered(EARLIER[:1]), EARLIER[1]["content"]),
        answer_logprobs(tiny_folder, rendered(EARLIER), CHOSEN),
    ]
    found = loss_of_first_step(tiny_folder, {"messages": WHOLE["chosen"]}, tmp_path / "one", "sft")
    assert found == pytest.approx((cross_entropy(every),) * 2, rel=1e-5)


# end of 6


# 7. The BOS token after truncation

# tests/data/test_truncation.py

# end of 7


# 8. A token across the border of prompt and completion

# (prompt, completion, borders that would merge): the ids are those of transformers' tokenizer, apart.
BORDERS = [("Answer: ", "Paris is big", 1), ("Answer: ", "Paris", 1), ("Answer:", " Paris", 0)]


@pytest.mark.parametrize(("prompt", "completion", "merged"), BORDERS)
def test_a_completion_is_encoded_as_the_policy_samples_it(prompt, completion, merged, tmp_path):
    source = write_rows(tmp_path, [{"prompt": prompt, "completion": completion}], kind="jsonl")
    loaded = load_sft(DataConfig(source=str(source), chat_template="none"), tokenizer=smollm2())
    answer = [*smollm2()(completion)["input_ids"], smollm2().eos_token_id]
    assert loaded[0].token_ids.tolist() == [*smollm2()(prompt)["input_ids"], *answer]
    assert loaded[0].num_trained == len(answer)
    assert loaded.report["merged_borders"] == merged


# end of 8


# 9. Columns that a setting names

# tests/data/test_named_columns.py

# end of 9


# 10. Pairs with different prompts

PAIR = {"prompt": "1 + 1?", "chosen": "2", "rejected": "3"}
LOADERS = {"dpo": load_preferences, "rm": partial(load_scored_pairs, pad_id=0), "kto": load_unpaired}


def asked(text):
    return {"role": "user", "content": text}


CALL = {"role": "assistant", "content": "look it up"}
# (chosen, rejected, prompt: the number of messages that both have, or None: refused)
TURNS = [
    ([asked("a"), said("x")], [asked("a"), said("y")], 1),
    ([asked("a"), said("x")], [asked("b"), said("y")], None),
    ([*EARLIER, said("x")], [*EARLIER[:2], asked("And 3 + 5?"), said("y")], None),
    ([{"role": "system", "content": "s"}, asked("a"), said("x")], [asked("a"), said("y")], None),
    ([asked("a"), said("x"), asked("b"), said("z")], [asked("a"), said("y"), asked("c"), said("z")], 1),
    ([asked("a"), said("x")], [asked("a"), said("x"), asked("b"), said("y")], 1),
    ([asked("a")], [asked("a"), said("y")], None),
    (
        [asked("a"), CALL, {"role": "tool", "content": "1"}, said("x")],
        [asked("a"), CALL, {"role": "tool", "content": "2"}, said("y")],
        1,
    ),
]


@pytest.mark.parametrize("kind", ["dpo", "rm", "kto"])
@pytest.mark.parametrize(("chosen", "rejected", "prompt"), TURNS)
def test_both_answers_of_a_pair_are_to_one_prompt(tiny_folder, tmp_path, kind, chosen, rejected, prompt):
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    rows = [PAIR, {"chosen": chosen, "rejected": rejected}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = DataConfig(source=str(tmp_path / "rows.jsonl"))
    if prompt is None:
        differs = [one != other for one, other in zip_longest(chosen, rejected)]
        with raises(DataError, "wrong-pairs: line 2", turn=differs.index(True) + 1):
            LOADERS[kind](config, tokenizer=tokenizer)
        return
    documents = LOADERS[kind](config, tokenizer=tokenizer)
    if kind == "dpo":
        for turns, sample in zip((chosen, rejected), documents[1], strict=True):
            texts = [turn["content"] + "<|end|>" for turn in turns[prompt:] if turn["role"] == "assistant"]
            assert tokenizer.decode(sample.token_ids[1:][sample.loss_mask[:-1]]) == "".join(texts)


# (the first messages of two conversations, how each is told: by hand)
APART_BY = [
    ({"content": "a" * 99 + "1"}, {"content": "a" * 99 + "2"}, ["...'" + "a" * 20 + n for n in "12"]),
    ({"name": "bob"}, {"name": "eve"}, ["'q' with name = 'bob'", "'q' with name = 'eve'"]),
    ({"name": "bob"}, {}, ["'q' with name = 'bob'", "'q' with name = None"]),
]


@pytest.mark.parametrize(("one", "other", "told"), APART_BY)
def test_prompts_that_differ_are_told_apart(tiny_folder, tmp_path, one, other, told):
    answers = {"chosen": (one, "x"), "rejected": (other, "y")}
    row = {k: [{**asked("q"), **more}, said(text)] for k, (more, text) in answers.items()}
    source = write_rows(tmp_path, [row], kind="jsonl")
    with raises(DataError, "wrong-pairs: line 1") as caught:
        load_preferences(DataConfig(source=str(source)), tokenizer=AutoTokenizer.from_pretrained(tiny_folder))
    assert all(f"user: {text}" in str(caught.value) for text in told)


def test_a_prompt_beside_whole_conversations_begins_them(tiny_folder, tmp_path):
    rows = [{"prompt": [asked("b")], **{k: [asked("a"), said(k)] for k in ("chosen", "rejected")}}]
    (tmp_path / "rows.jsonl").write_text(json.dumps(rows[0]))
    with raises(DataError, "wrong-pairs: line 1"):
        load_preferences(
            DataConfig(source=str(tmp_path / "rows.jsonl")),
            tokenizer=AutoTokenizer.from_pretrained(tiny_folder),
        )


@pytest.mark.parametrize(("prompt", "taken"), [("a", True), (" a\n", True), ("user: a", True), ("b", False)])
def test_a_text_beside_whole_conversations_is_one_of_their_messages(tiny_folder, tmp_path, prompt, taken):
    row = {"prompt": prompt, **{k: [asked("a"), said(k)] for k in ("chosen", "rejected")}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    data = DataConfig(source=str(tmp_path / "rows.jsonl"))
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    if taken:
        assert len(load_preferences(data, tokenizer=tokenizer)) == 1
        return
    with raises(DataError, "wrong-pairs: line 1") as caught:
        load_preferences(data, tokenizer=tokenizer)
    assert "'b' is in no message of the conversation" in str(caught.value)


# end of 10


# 11. The token budget of evaluations

# (eval.before_max_tokens_factor, longest completion before and after, whether the verdict says so)
BUDGETS = [(None, 5, 5, False), ("2", 7, 5, True)]


@pytest.mark.parametrize(("factor", "before", "after", "told"), BUDGETS)
def test_evaluations_have_one_budget(tiny_folder, tmp_path, capsys, factor, before, after, told):
    """A script of 7 tokens under a limit of 5."""
    folder = save_scripted(tiny_folder, tmp_path / "model")
    config = tmp_path / "run.toml"
    config.write_text(SCRIPTED.format(model=folder, data=prompts(tmp_path)))
    flags = [] if factor is None else ["--eval.before-max-tokens-factor", factor]
    flags += ["--rollout.sampling.max-tokens", "5", "--run-dir", str(tmp_path / "run")]
    assert main(["train", str(config), *flags]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    lengths = [summary[name]["mean_completion_tokens"] for name in ("eval_before", "eval_after")]
    assert lengths == [before, after]
    assert [summary[name]["max_tokens"] for name in ("eval_before", "eval_after")] == [
        5 * int(factor or 1),
        5,
    ]
    out = capsys.readouterr().out
    assert ("evaluated with at most 10 tokens before, 5 after" in out.splitlines()[-1]) == told
    assert ("evaluation before (0 steps, at most 10 tokens instead of 5)" in out) == told


# end of 11


# 12. Lockstep hang on a living run


class TwoRanks:
    """Two records of this process; rank 0 has left a gather to which rank 1 has not come."""

    def __init__(self, folder: Path) -> None:
        self.recorders = [FlightRecorder(folder, rank=rank, world_size=2) for rank in (0, 1)]
        self.labels = []
        for each in self.recorders:
            each.note(step=1, phase="metrics")
            each.introduce("0", [0, 1])
            self.labels.append(each.label("gather", group="0", shapes="[2] int64"))
            each.leave(each.enter(self.labels[-1]))
        self.enter(0)

    def enter(self, rank: int) -> None:
        self.recorders[rank].enter(self.labels[rank])

    def beat(self, rank: int) -> None:
        self.recorders[rank].note(completions=[1, 2])

    def close(self) -> None:
        for each in self.recorders:
            each.close()


@pytest.mark.parametrize(
    ("meanwhile", "expected"),
    [
        # what moved between the looks, and the last line: by hand
        (lambda ranks: ranks.enter(1), "hang: none, the run makes progress"),
        (lambda ranks: ranks.beat(1), "hang: none, the run makes progress"),
        (lambda ranks: ranks.enter(0), "hang: none, the run makes progress"),
        (lambda ranks: None, "hang: unknown, rank 1"),
    ],
    ids=["it came", "it beats", "the other goes on", "nothing"],
)
def test_hang_accuses_no_rank_that_moves(
    meanwhile: Callable[[TwoRanks], None],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ranks = TwoRanks(tmp_path / "logs/flight")
    clock = iter((0.0, 5.0))
    fake = SimpleNamespace(sleep=lambda _: meanwhile(ranks), monotonic=lambda: next(clock))
    monkeypatch.setattr(watchdog, "time", fake)
    try:
        assert main(["hang", str(tmp_path), "--no-stacks"]) == 0
    finally:
        ranks.close()
    assert capsys.readouterr().out.splitlines()[-1] == expected


def test_a_slow_step_is_no_hang(tmp_path: Path) -> None:
    """Expected: CPU time above a twentieth of a core is progress, but not inside a collective; by hand."""
    signs = {"rank": 0, "counts": (1, 1, 1.0)}
    for inside, used, moves in ((False, 1.0, True), (False, 0.1, False), (True, 4.9, False)):
        before = watchdog.Signs(**signs, inside=inside, cpu=10.0)
        now = watchdog.Signs(**signs, inside=inside, cpu=10.0 + used)
        assert bool(watchdog.progress(before, now, 5.0)) == moves


def test_children_have_names_that_a_person_can_read() -> None:
    """Expected: the role that the child was given, not the program on its command line."""
    job = JobProcess("lockstep.observe.chat_template", role="render")
    try:
        until = time.monotonic() + 60
        while not (mine := [each for each in children_of(os.getpid()) if "(lockstep:render)" in each]):
            assert time.monotonic() < until, children_of(os.getpid())
            time.sleep(0.05)
        assert not any("guard" in each for each in mine)
    finally:
        job.end()


# end of 12


# 13. Mismatched answers of KTO


def pairs_of(tmp_path, number):
    """Rows whose answers name their prompt."""
    rows = [{"prompt": f"q{i:02}", "chosen": f"good{i:02}", "rejected": f"bad{i:02}"} for i in range(number)]
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


@pytest.mark.parametrize(("shuffle", "n"), [(False, 24), (True, 24), (False, 6), (True, 8)])
def test_a_mismatched_answer_is_to_another_prompt(tiny_folder, tmp_path, shuffle, n):
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    answers = load_unpaired(DataConfig(source=pairs_of(tmp_path, 12), shuffle=shuffle), tokenizer=tokenizer)
    for step in range(24 // n):
        samples = answers.batch(step, n, seed=0)
        others = mismatched([pack(samples, [s.loss_mask.float() for s in samples])], max_length=64)
        texts = [tokenizer.decode(sample.token_ids) for sample in others]
        found = [re.fullmatch(r"<\|user\|>q(\d+)<\|end\|><\|assistant\|>\D+(\d+)<\|end\|>", t) for t in texts]
        numbers = [(int(match[1]), int(match[2])) for match in found if match]
        assert len(numbers) == n and all(prompt != answer for prompt, answer in numbers)
        if (shuffle, n) == (False, 24):  # by hand: of either answer of a pair, the bad one of the pair before
            assert numbers == [(i, (i - 1) % 12) for i in range(12) for _ in range(2)]
            assert all("bad" in text for text in texts)


@pytest.mark.parametrize(
    ("number", "more", "says"),
    [
        (4, {"data.shuffle": False}, "the 2 answers of step 1"),
        (2, {"data.prompt_template": "q"}, "are to one prompt"),
    ],
)
def test_a_step_to_one_prompt_is_refused(tiny_folder, tmp_path, number, more, says):
    data = {"data.source": pairs_of(tmp_path, number), "model.name": str(tiny_folder)}
    run = {"algorithm.name": "kto", "batch_size": 2, "run_dir": str(tmp_path / "run")}
    with raises(DataError, f"wrong-pairs: {says}"):
        loops.train(load_run(kind="dpo", overrides=data | run | more))


# end of 13
