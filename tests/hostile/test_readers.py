"""Rows from a hostile file: every reader gives rows or one LockstepError, soon."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raises

from lockstep.config.data import DataConfig
from lockstep.data.preferences import load_preferences
from lockstep.data.prompts import load_prompts
from lockstep.data.sft import load_sft
from lockstep.data.sources import load_rows
from lockstep.errors import ConfigError, DataError, LockstepError
from lockstep.rollout.rows import RowFile, meta_path, read_rows, write_parquet
from lockstep.rollout.scoring import samples
from lockstep.rollout.select import Choice, select, sft_row

TEMPLATE = "{% for m in messages %}<s>{{ m['role'] }} {{ m['content'] }}</s>{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """A word is a token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2, "a": 3}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    result = PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>", eos_token="</s>")
    result.chat_template = TEMPLATE
    return result


def read_all(path: Path) -> None:
    """With every reader of files of samples and of data; LockstepErrors are what may come."""
    for read in (
        lambda: load_rows(DataConfig(source=str(path))),
        lambda: list(samples(read_rows(path), str(path))),
        lambda: select(read_rows(path), Choice(top_k=1), source=str(path)),
    ):
        try:
            read()
        except LockstepError as error:
            assert str(error).isprintable(), ascii(str(error))


def test_flipped_bits_in_a_parquet_file(tmp_path: Path) -> None:
    ours, foreign, path = (tmp_path / name for name in ("ours.parquet", "foreign.parquet", "x.parquet"))
    row = {"index": 0, "sample": 0, "prompt": "a b", "completion": "c", "reward": 1.0, "row": {"answer": "c"}}
    write_parquet(ours, [row | {"index": index} for index in range(20)])
    table = pyarrow.table(
        {"prompt": ["é" * 9, "b"] * 9, "answer": [1, None] * 9, "m": [[{"role": "x"}]] * 18}
    )
    pyarrow.parquet.write_table(table, foreign, compression="none")
    choose = random.Random(0)
    for source, flips in ((ours, 150), (foreign, 350)):
        whole = source.read_bytes()
        for _ in range(flips):
            data = bytearray(whole)
            data[choose.randrange(len(data))] ^= 1 << choose.randrange(8)
            path.write_bytes(data)
            read_all(path)
        for size in (0, 3, 8, len(whole) // 2, len(whole) - 1):
            path.write_bytes(whole[:size])
            with pytest.raises(DataError):
                load_rows(DataConfig(source=str(path)))


@pytest.mark.parametrize("names", [b"5", b'["prompt"]', b"[[1]]", b"{", b"\xff", b'["answer"]'])
def test_a_parquet_file_that_says_wrong_things_of_itself(names: bytes, tmp_path: Path) -> None:
    table = pyarrow.table({"prompt": ["a"], "completion": ["b"], "answer": [1]})
    schema = table.schema.with_metadata({b"lockstep.json_columns": names})
    pyarrow.parquet.write_table(table.cast(schema), tmp_path / "x.parquet")
    with pytest.raises(DataError) as caught:
        list(read_rows(tmp_path / "x.parquet"))
    assert caught.value.code == ("not-json" if names == b'["prompt"]' else "cannot-read")


DEEP = "[" * 300 + "]" * 300
LINES = {
    "no JSON": "{",
    "control characters": '\x1b]0;pwn\x07{"prompt": 1}',
    "no object": "[1]",
    "deep": '{"prompt": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "deep enough": f'{{"prompt": "a", "completion": "b", "row": {{"a": {DEEP}}}}}',
    "digits": '{"prompt": ' + "9" * 5000 + "}",
    "10^400": '{"index": ' + "9" * 400 + ', "sample": 0, "prompt": "a", "completion": "b"}',
    "half a pair": '{"prompt": "\\ud800", "completion": "\\udfff", "reward": 1}',
    "half a pair in a key": '{"\\ud800": 1}',
    "no columns": '{"\\u001b]0;pwn\\u0007": 1, "\\n": 2}',
    "many columns": json.dumps({f"c{n}" * 40: n for n in range(5000)}),
    "nothing": "",
    "ids of another kind": '{"prompt": "a", "completion": "b", "token_ids": 5}',
    "ids that are no ids": '{"prompt": "a", "completion": "b", "token_ids": [1e400, -1, true]}',
    "index": '{"prompt": "a", "completion": "b", "index": [1]}',
    "sample": '{"prompt": "a", "completion": "b", "index": 1, "sample": {}}',
    "reason": '{"prompt": "a", "completion": "b", "finish_reason": ["\\u001b"]}',
    "row": '{"prompt": "a", "completion": "b", "row": {"$items": [1]}}',
    "key of a row": '{"prompt": "a", "completion": "b", "row": {"$items": [[[1], 2]]}}',
    "tuple of a row": '{"prompt": "a", "completion": "b", "row": {"$tuple": 3}}',
}


@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_hostile_lines(line: str, tmp_path: Path) -> None:
    for name, text in (("x.jsonl", line), ("x.json", f"[{line}]"), ("y.json", line)):
        path = tmp_path / name
        path.write_text(text + "\n")
        read_all(path)
        with pytest.raises(LockstepError):
            list(samples(load_rows(DataConfig(source=str(path))), name))


KEYS = ("prompt", "completion", "messages", "chosen", "rejected", "text", "question", "answer")
TEXTS = st.sampled_from(("a", "", "a a a", "\x1b]0;x\x07", "{answer}", "<s>", "\u202e", "user", "assistant"))
PLAIN = st.none() | st.booleans() | st.integers(-1, 2**64) | st.floats() | TEXTS
MESSAGE = st.fixed_dictionaries({"role": TEXTS, "content": TEXTS | PLAIN | st.lists(PLAIN, max_size=2)})
VALUES = PLAIN | st.lists(MESSAGE | PLAIN, max_size=3) | st.dictionaries(TEXTS, PLAIN, max_size=2)
ROWS = st.lists(st.dictionaries(st.sampled_from(KEYS) | TEXTS, VALUES, max_size=5), min_size=1, max_size=3)
LOADERS: tuple[Callable[..., Any], ...] = (load_prompts, load_sft, load_preferences)


@settings(max_examples=150, derandomize=True, database=None)
@given(rows=ROWS, loader=st.sampled_from(LOADERS), template=st.sampled_from(("auto", "none")))
def test_rows_of_any_kind(
    rows: Any, loader: Callable[..., Any], template: str, tokenizer: Any, tmp_path_factory: Any
) -> None:
    path = tmp_path_factory.getbasetemp() / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(source=str(path), chat_template=template, prompt_template="{prompt} {answer}")
    try:
        loader(config, tokenizer=tokenizer)
    except LockstepError as error:
        assert str(error).isprintable(), ascii(str(error))
    read_all(path)


@settings(max_examples=80, derandomize=True, database=None)
@given(rows=st.lists(st.dictionaries(st.sampled_from((*KEYS, "index", "sample", "reward", "row")), VALUES)))
def test_what_was_read_can_be_written(rows: Any, tmp_path_factory: Any) -> None:
    folder = tmp_path_factory.getbasetemp()
    try:
        chosen = select(rows, Choice(top_k=1), source="rows").rows
        write_parquet(folder / "rows.parquet", [sft_row(row) for row in chosen])
    except LockstepError:
        return
    assert len(list(read_rows(folder / "rows.parquet"))) == len(chosen)


TEMPLATES = (
    "{{ 1 / 0 }}",
    "{{ 1 + 'a' }}",
    "{% include 'x' %}",
    "{% import 'x' as y %}",
    "{% extends 'x' %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ messages.nope.nope }}",
    "{{ messages[99].role }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ raise_exception('\x1b]0;pwn\x07') }}",
    "{{ [] | first + 1 }}",
    "{{ '%d' % 'a' }}",
    "{{ {} | dictsort(by='x') }}",
    "{% for x in 5 %}{% endfor %}",
    "{{ nope() }}",
    "{{ ",
    "{% for %}",
    "{{ messages | nofilter }}",
)


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_that_fails_is_one_error(template: str, tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"prompt": "a", "completion": "a"}\n')
    for text in (template, template + "{% generation %}{% endgeneration %}"):
        for loader in (load_prompts, load_sft):
            with raises(DataError, "refused: line 1"):
                loader(DataConfig(source=str(path), chat_template=text), tokenizer=tokenizer)


def test_a_template_that_is_no_text(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "x.jinja").write_bytes(b"\xff{{ 1 }}")
    (tmp_path / "x.jsonl").write_text('{"prompt": "a", "completion": "a"}\n')
    for name in (str(tmp_path / "x.jinja"), str(tmp_path), "x" * 5000, "x" * 300):
        with pytest.raises(ConfigError):
            load_sft(DataConfig(source=str(tmp_path / "x.jsonl"), chat_template=name), tokenizer=tokenizer)
    with raises(DataError, "not-text: line 1"):
        load_prompts(
            DataConfig(source=str(tmp_path / "x.jsonl"), chat_template="{{ '\\ud800' }}"), tokenizer=tokenizer
        )


@pytest.mark.parametrize(
    "text",
    (
        *("", "5", "{}", '{"format": "\\u001b"}', '{"format": [1]}', '{"format": 1}', "[" * 5000),
        '{"format": NaN}',
        '{"format": 1, "command": [], "identity": {}, "rows": 1, "complete": true}',
        '{"format": 1, "command": "score", "identity": 3, "rows": "x", "complete": true}',
    ),
)
def test_what_is_said_beside_a_file_of_samples(text: str, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"index": 0, "sample": 0}\n')
    meta_path(path).write_text(text)
    with pytest.raises(ConfigError):
        list(read_rows(path))
    with pytest.raises(ConfigError):
        RowFile(path, command="score", identity={}, expected=1)


def test_a_folder_of_datasets_that_is_damaged(tmp_path: Path) -> None:
    import datasets

    datasets.Dataset.from_dict({"prompt": ["a"] * 5}).save_to_disk(str(tmp_path))
    config = DataConfig(source=str(tmp_path))
    assert len(load_rows(config)) == 5
    for name in ("state.json", "dataset_info.json", "data-00000-of-00001.arrow"):
        path = tmp_path / name
        whole = path.read_bytes()
        for data in (b"", b"\xff", b"[]", b"{}", b'{"_data_files": 5}', b'{"features": [3]}', whole[:-9]):
            path.write_bytes(data)
            try:
                load_rows(config)
            except DataError as error:
                assert str(error).isprintable(), ascii(str(error))
        path.write_bytes(whole)


@pytest.mark.parametrize("half", [b"\\ud800", b"\xed\xa0\x80"], ids=["escaped", "raw"])
def test_half_a_surrogate_pair_in_a_row_is_one_error(half: bytes, tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"prompt": "' + half + b'", "completion": "a"}\n')
    with raises(DataError, "not-text: line 1"):
        load_sft(DataConfig(source=str(path)), tokenizer=tokenizer)
