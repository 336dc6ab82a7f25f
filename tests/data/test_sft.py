from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from raising import raises

from lockstep.config.data import DataConfig
from lockstep.data.sft import SFTSet, load_sft
from lockstep.errors import ConfigError, DataError
from lockstep.schema.batch import TrainSample

TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello there"},
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "It is 2.\n"},
]
# As Qwen3's: thinking is taken out of earlier turns, and the last one gets an empty block when it has none.
QWEN = """{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' %}
{%- if loop.last %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}{%- endif %}
{{- m.content + '<|im_end|>\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
MARKED = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}\
{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}\
{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"""


def load(tmp_path: Path, tokenizer: Any, rows: list[dict[str, Any]], **settings: Any) -> SFTSet:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return load_sft(DataConfig(source=str(path), **settings), tokenizer=tokenizer)


def trained_tokens(sample: TrainSample, tokenizer: Any) -> list[str]:
    """The tokens under the mask: entry t is about token t + 1."""
    return [tokenizer.decode([int(sample.token_ids[t + 1])]) for t in sample.loss_mask.nonzero().flatten()]


def test_smollm2_conversation_token_by_token(tokenizer: Any, tmp_path: Path) -> None:
    sample = load(tmp_path, tokenizer, [{"messages": TURNS}])[0]
    tokens = [tokenizer.decode([int(i)]) for i in sample.token_ids]
    expected = [
        *("<|im_start|>", "system", "\n", "Be", " brief", ".", "<|im_end|>", "\n"),
        *("<|im_start|>", "user", "\n", "Hi", "<|im_end|>", "\n"),
        *("<|im_start|>", "ass", "istant", "\n", "Hello", " there", "<|im_end|>", "\n"),
        *("<|im_start|>", "user", "\n", "1", " +", " ", "1", "?", "<|im_end|>", "\n"),
        *("<|im_start|>", "ass", "istant", "\n", "It", " is", " ", "2", ".", "\n", "<|im_end|>", "\n"),
    ]
    assert tokens == expected
    assert sample.loss_mask.nonzero().flatten().tolist() == [17, 18, 19, 35, 36, 37, 38, 39, 40, 41]
    assert trained_tokens(sample, tokenizer) == [
        *("Hello", " there", "<|im_end|>"),
        *("It", " is", " ", "2", ".", "\n", "<|im_end|>"),
    ]


def test_generation_marks_and_rendering_agree(tokenizer: Any, tmp_path: Path) -> None:
    marked = load(tmp_path, tokenizer, [{"messages": TURNS}], chat_template=MARKED)[0]
    plain = load(tmp_path, tokenizer, [{"messages": TURNS}])[0]
    assert marked.token_ids.tolist() == plain.token_ids.tolist()
    assert marked.loss_mask.tolist() == plain.loss_mask.tolist()


def test_a_template_that_renders_earlier_turns_otherwise(tokenizer: Any, tmp_path: Path) -> None:
    sample = load(tmp_path, tokenizer, [{"messages": TURNS}], chat_template=QWEN)[0]
    assert "".join(trained_tokens(sample, tokenizer)) == (
        "Hello there<|im_end|><think>\n\n</think>\n\nIt is 2.\n<|im_end|>"
    )


def test_a_template_that_hides_a_turn_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    only_last = "{{ messages[-1].content }}"
    with raises(DataError, "unsupported-chat-template: line 1", turn=3):
        load(tmp_path, tokenizer, [{"messages": TURNS}], chat_template=only_last)


def test_eos_where_the_template_has_none(tokenizer: Any, tmp_path: Path) -> None:
    bare = "{% for m in messages %}{{ m.role[0] + ':' + m.content }}{% endfor %}"
    bare += "{% if add_generation_prompt %}a:{% endif %}"
    sample = load(tmp_path, tokenizer, [{"messages": TURNS[1:3]}], chat_template=bare)[0]
    assert tokenizer.decode(sample.token_ids) == "u:Hia:Hello there<|im_end|>"
    assert trained_tokens(sample, tokenizer) == ["Hello", " there", "<|im_end|>"]


def test_plain_prompt_and_completion(tokenizer: Any, tmp_path: Path) -> None:
    row = {"prompt": "Q: 1 + 1?", "completion": " Two"}
    sample = load(tmp_path, tokenizer, [row], chat_template="none")[0]
    assert tokenizer.decode(sample.token_ids) == "Q: 1 + 1? Two<|im_end|>"
    assert trained_tokens(sample, tokenizer) == [" Two", "<|im_end|>"]
    chat = load(tmp_path, tokenizer, [row])[0]
    assert tokenizer.decode(chat.token_ids).endswith(
        "user\nQ: 1 + 1?<|im_end|>\n<|im_start|>assistant\n Two<|im_end|>\n"
    )
    assert trained_tokens(chat, tokenizer) == [" Two", "<|im_end|>"]


def test_plain_text_trains_on_everything(bos_tokenizer: Any, tmp_path: Path) -> None:
    sample = load(tmp_path, bos_tokenizer, [{"text": "a b c"}])[0]
    assert sample.token_ids.tolist() == [1, 3, 4, 5, 2]
    assert sample.loss_mask.tolist() == [True, True, True, True, False]


def test_train_on_all(tokenizer: Any, tmp_path: Path) -> None:
    sample = load(tmp_path, tokenizer, [{"messages": TURNS}], train_on="all")[0]
    assert sample.loss_mask.tolist() == [True] * (len(sample) - 1) + [False]
    assert tokenizer.decode(sample.token_ids).endswith("It is 2.\n<|im_end|>\n")


def test_overlong_documents(bos_tokenizer: Any, tmp_path: Path) -> None:
    rows = [{"text": "a b c a b c"}, {"text": "a b"}]  # 8 and 4 tokens
    with raises(DataError, "too-long: line 1", tokens=8):
        load(tmp_path, bos_tokenizer, rows, max_length=5, overlong_documents="error")
    cut = load(tmp_path, bos_tokenizer, rows, max_length=5)
    assert cut[0].token_ids.tolist() == [1, 3, 4, 5, 3] and not cut[0].loss_mask[-1]
    assert cut.report == {
        "dropped_overlong": 0,
        "dropped_untrained": 0,
        "truncated": 1,
        "documents": 2,
        "tokens": 9,
        "trained_tokens": 7,
        "merged_borders": 0,
    }
    dropped = load(tmp_path, bos_tokenizer, rows, max_length=5, overlong_documents="drop")
    assert len(dropped) == 1 and dropped.report["dropped_overlong"] == 1


def test_documents_without_a_trained_token(tokenizer: Any, tmp_path: Path) -> None:
    rows = [{"messages": TURNS[:2]}, {"messages": TURNS}]
    with raises(DataError, "nothing-left: line 1"):
        load(tmp_path, tokenizer, rows)
    left = load(tmp_path, tokenizer, rows, untrained_documents="drop")
    assert len(left) == 1 and left.report["dropped_untrained"] == 1
    with raises(DataError, "nothing-left"):
        load(tmp_path, tokenizer, rows[:1], untrained_documents="drop")


def test_batches_number_their_samples(bos_tokenizer: Any, tmp_path: Path) -> None:
    rows = [{"text": text} for text in ("a", "a b", "a b c", "a b c a")]
    samples = load(tmp_path, bos_tokenizer, rows)
    batch = samples.batch(3, 2, 0)
    assert [s.sample_id for s in batch] == [0, 1]
    epoch = [len(s) for step in (2, 3) for s in samples.batch(step, 2, 0)]
    assert sorted(epoch) == [3, 4, 5, 6]


def test_rows_of_no_known_form(tokenizer: Any, tmp_path: Path) -> None:
    with raises(DataError, "missing-column: messages"):
        load(tmp_path, tokenizer, [{"mesages": []}])
    with raises(ConfigError, "unsupported-combination: data.source"):
        load_sft(DataConfig(), tokenizer=tokenizer)


def test_the_first_bad_row_is_the_one_that_is_named(tokenizer: Any, tmp_path: Path) -> None:
    """Though rows are rendered and tokenised in batches, and what is wrong with them is found one by one."""
    good = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
    long = {"messages": [*good["messages"][:1], {"role": "assistant", "content": "Hello " * 99}]}
    refused = {"messages": [{"role": "assistant", "content": "Hello"}]}
    columnless = {"text_": "Hi"}
    bad = {"too-long": long, "wrong-row": refused, "missing-column": columnless}
    for first in bad:
        rows = [good, good, bad[first], *(row for name, row in bad.items() if name != first), good]
        with raises(DataError, f"{first}: line 3"):
            load(tmp_path, tokenizer, rows, max_length=50, overlong_documents="error")
