"""What becomes of the texts of users' rows: tools, nulls, ends, borders, templates.

The right value is transformers' rendering of the same row, or worked out by hand.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from chats import TOOLS_TEMPLATE, document_texts, trained_text, write_rows
from classifiers import save_classifier
from raising import raises
from tokenizers import AddedToken
from transformers import AutoTokenizer

from lockstep.cli.main import main
from lockstep.config.batch import RewardModelConfig
from lockstep.config.data import DataConfig
from lockstep.data.chat import ChatFormat
from lockstep.data.prompts import load_prompts
from lockstep.data.sft import load_sft
from lockstep.errors import DataError
from lockstep.models.reward import RewardModel
from lockstep.models.source import bundled_folder
from lockstep.rollout.rows import read_parquet
from lockstep.rollout.select import Choice, PairChoice, select, select_pairs, sft_row

TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
]
ASK = [{"role": "user", "content": "Rain?"}]
YES, NO = [{"role": "assistant", "content": "Yes."}], [{"role": "assistant", "content": "No."}]


def called(**arguments: Any) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """SmolLM2's."""
    return AutoTokenizer.from_pretrained(bundled_folder("smollm2-135m"))


@pytest.fixture
def tagged() -> Any:
    """SmolLM2's, with tags as special tokens."""
    tokenizer = AutoTokenizer.from_pretrained(bundled_folder("smollm2-135m"))
    tags = ("<think>", "</think>", "<answer>", "</answer>", "<|end|>", "<|user|>", "<|assistant|>")
    tokenizer.add_special_tokens(
        {"extra_special_tokens": [AddedToken(tag, special=True, normalized=False) for tag in tags]}
    )
    return tokenizer


# The tools and chat_template_kwargs of a row

PAIR = {"prompt": ASK, "chosen": YES, "rejected": NO}
ROWS = {
    "sft": ({"messages": [*ASK, *YES]}, [YES]),
    "sft, prompt": ({"prompt": ASK, "completion": YES}, [YES]),
    "dpo": (PAIR, [YES, NO]),
    "dpo, whole": ({"chosen": [*ASK, *YES], "rejected": [*ASK, *NO]}, [YES, NO]),
    "rm": (PAIR, [YES, NO]),
    "kto, label": ({"prompt": ASK, "completion": YES, "label": True}, [YES]),
    "kto, pairs": (PAIR, [YES, NO]),
    "grpo": ({"prompt": ASK}, None),
    "grpo, text": ({"prompt": "Rain?"}, None),
    "grpo, messages": ({"messages": ASK}, None),
}


@pytest.mark.parametrize(
    ("case", "given"),
    [
        *((case, "tools") for case in ROWS),
        *((case, "chat_template_kwargs") for case in ("sft", "rm", "kto, pairs", "grpo")),
        *(("grpo", given) for given in ("tools as JSON", "enable_thinking")),
    ],
)
def test_the_row_decides_what_the_template_gets(
    case: str, given: str, tokenizer: Any, tmp_path: Path
) -> None:
    row, answers = ROWS[case]
    column, value, variables = {
        "tools": ("tools", TOOLS, {"tools": TOOLS}),
        "tools as JSON": ("tools", json_text(TOOLS), {"tools": TOOLS}),
        "chat_template_kwargs": (
            "chat_template_kwargs",
            {"enable_thinking": False},
            {"enable_thinking": False},
        ),
        "enable_thinking": ("enable_thinking", False, {"enable_thinking": False}),
    }[given]
    rows = [{**row, column: value}]
    if case == "kto, label":
        rows.append({"prompt": "a", "completion": "b", "label": False})
    texts = document_texts(
        write_rows(tmp_path, rows, kind="jsonl"),
        tokenizer,
        run=case.partition(",")[0],
        chat_template=TOOLS_TEMPLATE,
        chat_template_kwargs={"enable_thinking": True},
    )
    expected = [
        tokenizer.apply_chat_template(
            [*ASK, *answer],
            chat_template=TOOLS_TEMPLATE,
            tokenize=False,
            add_generation_prompt=answers is None,
            **{"enable_thinking": True, **variables},
        )
        for answer in (answers or [[]])
    ]
    assert texts[: len(expected)] == expected


def json_text(value: Any) -> str:
    import json

    return json.dumps(value)


PLAIN_TEMPLATE = "{% for m in messages %}{{ '<|im_start|>' + m.role + m.content + '<|im_end|>' }}{% endfor %}"
IGNORED = [
    ({"tools": TOOLS}, ["column 'tools' is ignored: the chat template never reads it"]),
    ({"tools": []}, ["column 'tools' is ignored: the chat template never reads it"]),
    ({"tools": None, "chat_template_kwargs": None}, []),
    (
        {"chat_template_kwargs": {"enable_thinking": True}},
        ["column 'chat_template_kwargs.enable_thinking' is ignored: the chat template never reads it"],
    ),
    ({"images": ["a.png"]}, ["column 'images' is ignored: only text is read"]),
    (
        {"functions": [], "parallel_tool_calls": False},
        [
            "column 'functions' is ignored: write it as tools = [{type = 'function', function = ...}]",
            "column 'parallel_tool_calls' is ignored: samples are not limited to one call",
        ],
    ),
    ({"id": 7, "source": "own"}, []),
]


@pytest.mark.parametrize(("columns", "notes"), IGNORED)
@pytest.mark.parametrize("run", ["sft", "grpo"])
def test_columns_that_nothing_reads_are_named_once(
    run: str, columns: dict[str, Any], notes: list[str], tokenizer: Any, tmp_path: Path
) -> None:
    rows = [{"messages": ASK if run == "grpo" else [*ASK, *YES], **columns}] * 3
    path = write_rows(tmp_path, rows, kind="jsonl")
    config = DataConfig(source=str(path), chat_template=PLAIN_TEMPLATE)
    loaded = (load_prompts if run == "grpo" else load_sft)(config, tokenizer=tokenizer)
    assert loaded.notes == tuple(f"{path}: {note}" for note in notes)


def test_keys_of_messages_that_the_template_never_reads_are_named(tokenizer: Any, tmp_path: Path) -> None:
    path = write_rows(tmp_path, [{"messages": [*ASK, called(city="Paris")]}], kind="jsonl")
    loaded = load_sft(DataConfig(source=str(path), chat_template=PLAIN_TEMPLATE), tokenizer=tokenizer)
    assert loaded.notes == (f"{path}: 'tool_calls' of messages is ignored: the chat template never reads it",)


def test_a_column_that_a_setting_names_is_not_said_to_be_ignored(tokenizer: Any, tmp_path: Path) -> None:
    path = write_rows(tmp_path, [{"prompt": "a", "labels": "7"}], kind="jsonl")
    assert load_prompts(DataConfig(source=str(path), answer_column="labels"), tokenizer=tokenizer).notes == ()


@pytest.mark.parametrize("tools", ["weather", ["weather"], [7], {"name": "weather"}])
def test_tools_that_are_no_schemas_are_refused(tools: Any, tokenizer: Any, tmp_path: Path) -> None:
    path = write_rows(tmp_path, [{"messages": [*ASK, *YES], "tools": tools}], kind="jsonl")
    with raises(DataError, "wrong-row: line 1", name="tools"):
        load_sft(DataConfig(source=str(path), chat_template=TOOLS_TEMPLATE), tokenizer=tokenizer)


def test_verl_rows_give_the_answer(tokenizer: Any, tmp_path: Path) -> None:
    row = {"data_source": "own", "prompt": ASK, "reward_model": {"style": "rule", "ground_truth": "72"}}
    path = write_rows(tmp_path, [row], kind="parquet")
    assert load_prompts(DataConfig(source=str(path)), tokenizer=tokenizer)[0].row["answer"] == "72"


@pytest.mark.parametrize(("weights", "trained"), [((0, 1), "Two<|im_end|>"), ((1, 0), "One<|im_end|>")])
def test_turns_of_weight_0_are_not_trained(
    weights: tuple[int, int], trained: str, tokenizer: Any, tmp_path: Path
) -> None:
    turns = [
        {"role": "assistant", "content": text, "weight": weight}
        for text, weight in zip(("One", "Two"), weights, strict=True)
    ]
    path = write_rows(tmp_path, [{"messages": [*ASK, turns[0], *ASK, turns[1]]}], kind="jsonl")
    assert trained_text(path, tokenizer) == trained


def test_arguments_as_json_text_are_rendered_as_objects(tokenizer: Any, tmp_path: Path) -> None:
    turn = called(city="Paris")
    turn["tool_calls"][0]["function"]["arguments"] = '{"city": "Paris"}'
    path = write_rows(tmp_path, [{"messages": [*ASK, turn]}], kind="jsonl")
    template = TOOLS_TEMPLATE.replace("call.function |", "call.function.arguments |")
    assert trained_text(path, tokenizer, chat_template=template) == '{"city": "Paris"}<|im_end|>'


# Nulls that Arrow adds

NULLS = [
    # (tool calls' arguments of two rows, arguments that are learnt from the first)
    ({"city": "Paris"}, {"zone": "CET"}, {"city": "Paris"}),
    ({"at": {"city": "Paris"}}, {"at": {"zone": "CET"}}, {"at": {"city": "Paris"}}),
    ({"all": [{"city": "Paris"}]}, {"all": [{"zone": 1}]}, {"all": [{"city": "Paris"}]}),
    ({"all": ["a", None]}, {"zone": "CET"}, {"all": ["a", None]}),
]


@pytest.mark.parametrize(
    ("case", "kind", "first", "second", "learnt"),
    [
        *(("sft", kind, *arguments) for kind in ("parquet", "datasets") for arguments in NULLS),
        *((case, "parquet", *NULLS[0]) for case in ("dpo", "kto, pairs", "grpo")),
    ],
)
def test_nulls_that_another_row_adds_are_dropped(
    case: str, kind: str, first: Any, second: Any, learnt: Any, tokenizer: Any, tmp_path: Path
) -> None:
    def row(arguments: Any) -> dict[str, Any]:
        begin, last = [*ASK, called(**arguments)], {"role": "tool", "content": "5 C"}
        tools = [{"type": "function", "function": {"name": "weather", "parameters": arguments}}]
        return {
            "sft": {"messages": [*begin, last, *YES], "tools": tools},
            "dpo": {"prompt": [*begin, last], "chosen": YES, "rejected": NO, "tools": tools},
            "kto, pairs": {"prompt": [*begin, last], "chosen": YES, "rejected": NO, "tools": tools},
            "grpo": {"prompt": [*begin, last], "tools": tools},
        }[case]

    source = write_rows(tmp_path, [row(first), row(second)], kind=kind)
    run = case.partition(",")[0]
    text = document_texts(source, tokenizer, run=run, chat_template=TOOLS_TEMPLATE)[0]
    whole = row(learnt)
    messages = whole.get("messages") or [*whole["prompt"], *whole.get("chosen", [])]
    assert text == tokenizer.apply_chat_template(
        messages,
        tools=whole["tools"],
        chat_template=TOOLS_TEMPLATE,
        tokenize=False,
        add_generation_prompt=run == "grpo",
    )


def test_a_null_that_json_lines_hold_is_kept(tokenizer: Any, tmp_path: Path) -> None:
    path = write_rows(tmp_path, [{"messages": [*ASK, called(city=None)]}], kind="jsonl")
    assert '"arguments": {"city": null}' in trained_text(path, tokenizer, chat_template=TOOLS_TEMPLATE)


@pytest.mark.parametrize("kind", ["parquet", "datasets"])
def test_columns_of_type_json_keep_their_nulls(kind: str, tokenizer: Any, tmp_path: Path) -> None:
    import datasets

    rows = [{"messages": [*ASK, called(city=None)]}, {"messages": [*ASK, called(zone="CET")]}]
    features = datasets.Features({"messages": datasets.Json()})
    made = datasets.Dataset.from_list(rows, features=features)
    source = tmp_path / ("rows.parquet" if kind == "parquet" else "rows")
    made.to_parquet(str(source)) if kind == "parquet" else made.save_to_disk(str(source))
    texts = [trained_text(source, tokenizer, row=i, chat_template=TOOLS_TEMPLATE) for i in range(2)]
    assert ['{"city": null}' in texts[0], '{"zone": "CET"}' in texts[1]] == [True, True]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "datasets"])
def test_rows_of_rewards_are_as_they_were_read(kind: str, tokenizer: Any, tmp_path: Path) -> None:
    rows = [{"prompt": "a", "more": {"x": 1, "y": None}}, {"prompt": "b", "more": {"x": 2, "y": 3}}]
    source = write_rows(tmp_path, rows, kind=kind)
    assert load_prompts(DataConfig(source=str(source)), tokenizer=tokenizer)[0].row["more"] == {
        "x": 1,
        "y": None,
    }


# The end-of-sequence token after a special token


@pytest.mark.parametrize(
    ("row", "settings", "trained"),
    [
        ({"text": "<answer>7</answer>"}, {}, "7</answer><|im_end|>"),
        ({"prompt": "a", "completion": "7</answer>"}, {"chat_template": "none"}, "7</answer><|im_end|>"),
        ({"prompt": "a", "completion": "7<|im_end|>"}, {"chat_template": "none"}, "7<|im_end|>"),
        ({"messages": [*ASK, {"role": "assistant", "content": "7</answer>"}]}, {}, "7</answer><|im_end|>"),
        (
            {"messages": [*ASK, {"role": "assistant", "content": "7</answer>"}]},
            {"chat_template": "{% for m in messages %}{{ m.role + ':' + m.content + '\n' }}{% endfor %}"
             "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"},
            "7</answer>\n<|im_end|>",
        ),
        (
            {"messages": [*ASK, {"role": "assistant", "content": "7</answer>"}]},
            {"train_on": "all", "chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"},
            "7</answer><|im_end|>",
        ),
        (
            {"messages": [*ASK, {"role": "assistant", "content": "7</answer>"}]},
            {"chat_template": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
             "{% endfor %}"},
            "7</answer><|im_end|>",
        ),
    ],
)  # fmt: skip
def test_only_an_end_token_ends_a_document(
    row: dict[str, Any], settings: dict[str, Any], trained: str, tagged: Any, tmp_path: Path
) -> None:
    assert tagged.eos_token == "<|im_end|>"
    got = trained_text(write_rows(tmp_path, [row], kind="jsonl"), tagged, **settings)
    assert got.endswith(trained) and got.count("<|im_end|>") == 1


# A token across the border of prompt and completion


@pytest.mark.parametrize(
    ("prompt", "completion", "merged"),
    [
        ("Answer: ", "Paris is big", 1),
        ("Answer: ", "Paris", 1),
        ("Answer:", " Paris", 0),
        ("12", "34", 0),  # SmolLM2's splits numbers into digits
    ],
)
def test_prompt_and_completion_are_encoded_apart(
    prompt: str, completion: str, merged: int, tokenizer: Any, tmp_path: Path
) -> None:
    path = write_rows(tmp_path, [{"prompt": prompt, "completion": completion}], kind="jsonl")
    config = DataConfig(source=str(path), chat_template="none")
    loaded = load_sft(config, tokenizer=tokenizer)
    first = tokenizer(prompt)["input_ids"]
    last = [*tokenizer(completion)["input_ids"], tokenizer.eos_token_id]
    assert loaded[0].token_ids.tolist() == [*first, *last]
    assert loaded[0].token_ids[1:][loaded[0].loss_mask[:-1]].tolist() == last
    assert (loaded.report["merged_borders"], len(loaded.notes)) == (merged, merged)
    sampled_from = load_prompts(config, tokenizer=tokenizer)[0].token_ids
    assert list(sampled_from) == first


def test_a_header_that_would_merge_with_the_answer(tokenizer: Any, tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}" + (
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    path = write_rows(tmp_path, [{"messages": [*ASK, *YES], "prompt": ASK}], kind="jsonl")
    assert trained_text(path, tokenizer, chat_template=template) == "Yes.\n<|im_end|>"


def test_sentencepiece_puts_no_space_into_the_middle(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = ["<s>", "</s>", "<unk>", "▁", "▁Answer", ":", "Paris", "▁Paris", "\n"]
    raw = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=2))
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    raw.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    path = write_rows(tmp_path, [{"prompt": "Answer:", "completion": "Paris"}], kind="jsonl")
    loaded = load_sft(DataConfig(source=str(path)), tokenizer=tokenizer)
    assert tokenizer.convert_ids_to_tokens(loaded[0].token_ids) == ["▁Answer", ":", "Paris", "</s>"]
    assert loaded.report["merged_borders"] == 0


# Templates

PHI = """{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"""
# As Qwen3's with tools: an empty block of thinking in the last turn only, none in earlier ones.
THINKS_LAST = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}\
{% if m.role == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{{ m.content }}\
{% for call in m.tool_calls %}{{ '<tool_call>' + call.function.arguments | tojson + '</tool_call>' }}\
{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
# As Idefics3's: contents are lists of parts, and a text is left out.
PARTS = """{% for m in messages %}{{ m.role + ':' }}{% for part in m.content %}{% if part.type == 'text' %}\
{{ part.text }}{% endif %}{% endfor %}{{ '<|end|>\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"""
# As DeepSeek-R1's: an answer beside the calls, unless the content is null.
NULL_BESIDE_CALLS = """{% for m in messages %}{% if m.role != 'assistant' %}{{ '<|user|>' + m.content }}\
{% endif %}{% if m.tool_calls %}{{ '<|assistant|>' }}{% for call in m.tool_calls %}\
{{ call.function.name }}{% endfor %}{{ '<|end|>' }}{% endif %}\
{% if m.role == 'assistant' and m['content'] is not none %}{{ '<|assistant|>' + m.content + '<|end|>' }}\
{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
TWO = [*ASK, {"role": "assistant", "content": "Yes."}, *ASK, {"role": "assistant", "content": "No."}]
CALLED = [
    *ASK,
    called(city="Paris"),
    {"role": "tool", "content": "wet"},
    {"role": "assistant", "content": "Yes."},
]


@pytest.mark.parametrize(
    ("template", "messages", "trained"),
    [
        (PHI, TWO[:2], "Yes.<|end|>\n<|im_end|>"),
        (PHI, TWO, "Yes.<|end|>No.<|end|>\n<|im_end|>"),
        (THINKS_LAST, TWO, "Yes.<|im_end|><think>\n\n</think>\n\nNo.<|im_end|>"),
        (
            THINKS_LAST,
            CALLED,
            '<tool_call>{"city": "Paris"}</tool_call><|im_end|><think>\n\n</think>\n\nYes.<|im_end|>',
        ),
        (PARTS, TWO, "Yes.<|end|>No.<|end|>"),
        (NULL_BESIDE_CALLS, CALLED, "weather<|end|>Yes.<|end|>"),
    ],
    ids=["phi, one turn", "phi, two turns", "thinks last", "calls without content", "parts", "null"],
)
def test_templates_that_were_refused(
    template: str, messages: list[dict[str, Any]], trained: str, tagged: Any, tmp_path: Path
) -> None:
    path = write_rows(tmp_path, [{"messages": messages}], kind="jsonl")
    assert trained_text(path, tagged, chat_template=template) == trained


def test_a_run_names_what_it_ignores_once(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": f"{n} + 1 =", "completion": f" {n + 1}", "images": []} for n in range(4)]
    path = write_rows(tmp_path, rows, kind="jsonl")
    command = ["train", "sft", "--model.name", str(tiny_folder), "--steps", "1", "--batch-size", "2"]
    data = ["--data.source", str(path), "--eval-data.source", str(path)]
    assert main([*command, *data, "--run-dir", str(tmp_path / "run"), "--log.display", "plain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "ignored" in line] == [
        f"{path}: column 'images' is ignored: only text is read"
    ]


def test_a_template_of_its_own_for_tools_is_taken(tokenizer: Any, tmp_path: Path) -> None:
    own = AutoTokenizer.from_pretrained(bundled_folder("smollm2-135m"))
    own.chat_template = {"default": PLAIN_TEMPLATE, "tool_use": TOOLS_TEMPLATE}
    path = write_rows(tmp_path, [{"prompt": ASK, "tools": TOOLS}, {"prompt": ASK}], kind="jsonl")
    assert document_texts(path, own, run="grpo") == [
        own.apply_chat_template(ASK, tools=tools, tokenize=False, add_generation_prompt=True)
        for tools in (TOOLS, None)
    ]
    chat = ChatFormat(DataConfig(), own)  # looked into once, not for each row
    first, second = (chat.for_row({"tools": TOOLS}, where="row 1")._template for _ in range(2))
    assert first is second and first is not chat._template


@pytest.mark.parametrize("row", [{"tools": TOOLS}, {"row": {"tools": TOOLS}}])
def test_a_reward_model_reads_the_tools_of_its_training(
    row: dict[str, Any], tokenizer: Any, tmp_path: Path
) -> None:
    folder = save_classifier(tmp_path / "model", tokenizer)
    config = RewardModelConfig(name=str(folder), chat_template=TOOLS_TEMPLATE)
    document = RewardModel(config, device=torch.device("cpu")).document(ASK, "Yes.", "a row", row=row)
    expected = tokenizer.apply_chat_template(
        [*ASK, *YES], tools=TOOLS, chat_template=TOOLS_TEMPLATE, tokenize=False
    )
    assert tokenizer.decode(document.ids) == expected
    source = write_rows(
        tmp_path, [{"prompt": ASK, "chosen": YES, "rejected": NO, "tools": TOOLS}], kind="jsonl"
    )
    assert document_texts(source, tokenizer, run="rm", chat_template=TOOLS_TEMPLATE)[0] == expected


@pytest.mark.parametrize("row", [{"tools": TOOLS}, {"row": {"tools": TOOLS}}])
def test_selected_samples_keep_the_tools_of_their_prompt(
    row: dict[str, Any], tokenizer: Any, tmp_path: Path
) -> None:
    samples = [
        {"index": 0, "sample": n, "prompt": ASK, "completion": text, "reward": float(n), **row}
        for n, text in enumerate(("No.", "Yes."))
    ]
    best = select(samples, Choice(top_k=1), source="rows").rows[0]
    pair = select_pairs(samples, PairChoice(), source="rows").rows[0]
    expected = tokenizer.apply_chat_template(
        [*ASK, *YES], tools=TOOLS, chat_template=TOOLS_TEMPLATE, tokenize=False
    )
    for run, chosen in (("sft", sft_row(best)), ("dpo", pair), ("sft", {**samples[1]})):
        source = write_rows(tmp_path, [chosen], kind="jsonl")
        assert document_texts(source, tokenizer, run=run, chat_template=TOOLS_TEMPLATE)[0] == expected


def test_nulls_of_a_foreign_file_are_not_scored(tmp_path: Path) -> None:
    rows = [{"prompt": [*ASK, called(city="Paris")]}, {"prompt": [*ASK, called(zone="CET")]}]
    assert [row["prompt"][1] for row in read_parquet(write_rows(tmp_path, rows, kind="parquet"))] == [
        called(city="Paris"),
        called(zone="CET"),
    ]
