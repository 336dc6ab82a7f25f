from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from raising import raises

from lockstep.config.data import DataConfig
from lockstep.data.sources import Source, load_rows
from lockstep.errors import ConfigError, DataError

ROWS = [{"question": f"q{i}", "answer": str(i)} for i in range(5)]


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)) + "\n\n")
    return path


def test_every_kind_of_file_gives_the_same_rows(jsonl: Path, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(ROWS))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(str(tmp_path / "splits"))
    for name in ("train.jsonl", "a.json", "a.parquet", "saved", "splits"):
        assert load_rows(DataConfig(source=str(tmp_path / name))) == ROWS, name


def test_columns_that_our_parquet_files_say_are_json_are_read_so(tmp_path: Path) -> None:
    """Also where pyarrow has selected columns, and kept the metadata that names all."""
    metadata = {b"lockstep.json_columns": b'["row", "rewards"]'}
    table = pyarrow.table({"prompt": ["a", "b"], "rewards": ['{"math": 1}', None]})
    pyarrow.parquet.write_table(table.replace_schema_metadata(metadata), tmp_path / "a.parquet")
    assert load_rows(DataConfig(source=str(tmp_path / "a.parquet"))) == [
        {"prompt": "a", "rewards": {"math": 1}},
        {"prompt": "b", "rewards": None},
    ]


def test_skip_and_size_choose_rows(jsonl: Path) -> None:
    assert load_rows(DataConfig(source=str(jsonl), skip=1, size=2)) == ROWS[1:3]
    with raises(DataError, "nothing-left: data.skip"):
        load_rows(DataConfig(source=str(jsonl), skip=5))


def test_columns_are_renamed_and_the_answer_is_found(jsonl: Path) -> None:
    row = load_rows(DataConfig(source=str(jsonl), columns={"prompt": "question"}, size=1))[0]
    assert row == {"prompt": "q0", "answer": "0"}
    row = load_rows(DataConfig(source=str(jsonl), answer_column="question", size=1))[0]
    assert row == {"question": "q0", "answer": "q0"}


@pytest.mark.parametrize(
    ("settings", "error", "what"),
    [
        ({"columns": {"prompt": "qestion"}}, DataError, "missing-column: data.columns.prompt, qestion"),
        ({"source": "trian.jsonl"}, DataError, "no-such-file: data.source"),
        ({"source": "splits", "split": "test"}, DataError, "unknown-name: data.split"),
        ({"source": "."}, DataError, "wrong-kind-of-file: data.source"),
        ({"source": "x.parquet"}, DataError, "cannot-read"),
        ({"source": "gym-x:sums"}, ConfigError, "unknown-name: data.source"),
        ({"source": "no_gym:sums"}, ConfigError, "missing-package: no_gym"),
    ],
)
def test_what_is_no_source_is_refused(jsonl, tmp_path, monkeypatch, settings, error, what):
    monkeypatch.chdir(tmp_path)
    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk("splits")
    Path("x.parquet").write_bytes(b"PAR1 nonsense")
    with raises(error, what):
        load_rows(DataConfig(**{"source": "./train.jsonl"} | settings))


@pytest.fixture
def function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The source "rows_of_ours:rows", whose rows are an expression."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "rows_of_ours", raising=False)
    (tmp_path / "rows_of_ours.py").write_text(
        "def rows(): return ({'question': f'q{i}', 'answer': str(i)} for i in range(5))\n"
        "def other(): return [{'question': 'q0'}]\n"
        "def broken(): return [{'question': 'q0'}, 'q1']\n"
        "def unwritable(): return [{'question': {1, 2}}]\n"
        "def needs(path): return []\n"
        "NUMBER = 5\n"
    )
    return "rows_of_ours:rows"


def test_a_function_returns_rows(function: str) -> None:
    assert load_rows(DataConfig(source=function)) == ROWS
    assert load_rows(DataConfig(source=function, skip=1, size=2)) == ROWS[1:3]
    same, other = (
        Source(DataConfig(source=f"rows_of_ours:{name}")).fingerprint for name in ("rows", "other")
    )
    assert same == Source(DataConfig(source=function)).fingerprint != other


@pytest.mark.parametrize(
    ("name", "error", "what"),
    [
        ("broken", DataError, "wrong-row: row 1"),
        ("unwritable", DataError, "wrong-part: TypeError"),
        ("needs", ConfigError, "wrong-part: path"),
        ("NUMBER", ConfigError, "wrong-part: int"),
    ],
)
def test_a_function_without_rows_is_refused(function, name, error, what):
    with raises(error, what):
        load_rows(DataConfig(source=f"rows_of_ours:{name}"))


def test_a_function_is_not_streamed(function: str) -> None:
    with raises(ConfigError, "no-effect: data.streaming"):
        load_rows(DataConfig(source=function, streaming=True))


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": \n')
    with raises(DataError, "not-json: line 2"):
        load_rows(DataConfig(source=str(path)))
    path.write_text('{"prompt": "a"}\n\n[1]\n')
    with raises(DataError, "wrong-row: line 3"):
        load_rows(DataConfig(source=str(path)))
    for bad in (b'{"prompt": "\xff"}\n', b"[" * 100_000 + b"\n"):
        path.write_bytes(b'{"prompt": "a"}\n' + bad)
        with raises(DataError, "not-json: line 2"):
            load_rows(DataConfig(source=str(path)))


def test_the_hub_offline_says_why_and_what_to_do(tmp_path: Path) -> None:
    code = (
        "from lockstep.config.data import DataConfig\n"
        "from lockstep.data.sources import Source, load_rows\n"
        "load_rows(DataConfig(source='openai/gsm8k', subset='main'))\n"
    )
    import os

    env = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(
        "lockstep.errors.DataError: cannot load data.source = 'openai/gsm8k' (subset 'main'"
    )
    assert "HF_HUB_OFFLINE" in last and "save_to_disk" in last
