"""Rows by number: where lines begin, copies of Parquet files, and sources that change or are damaged."""

from __future__ import annotations

import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from raising import raises

from lockstep.config.data import DataConfig
from lockstep.data import cache as cache_files
from lockstep.data import tables
from lockstep.data.sources import Source
from lockstep.data.tables import JsonLinesTable, ParquetTable, open_table
from lockstep.errors import DataError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every file is large here."""
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tables, "SMALL_BYTES", 0)
    return tmp_path / "cache" / "data"


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def parquet(path: Path, rows: list[dict[str, Any]], **options: Any) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(rows), path, **options)
    return path


def config(path: Path, **settings: Any) -> DataConfig:
    return DataConfig(source=str(path), **settings)


@pytest.mark.parametrize("scan", [1, 2, 3, 5, 2**24])
@pytest.mark.parametrize("end", ["", "\n", "\n\n", "\r\n", "\n \t\n"])
def test_lines_are_found_whatever_is_between_them(tmp_path, monkeypatch, scan, end):
    monkeypatch.setattr(tables, "_SCAN_BYTES", scan)
    text = '{"a": 1}\n\n  {"a": "ü"}\r\n   \n{"a": 3}\n[4]' + end
    table = JsonLinesTable(write(tmp_path / "a.jsonl", text))
    assert len(table) == 4
    rows = table.read([2, 0, 1, 3])
    assert rows[:3] == [{"a": 3}, {"a": 1}, {"a": "ü"}]
    lines = [int(row.where.rpartition(" ")[2]) for row in rows[:3]]
    assert lines == [5, 1, 3]
    assert isinstance(rows[3], DataError) and "line 6" in str(rows[3])


@pytest.mark.parametrize("text", ["", "\n", " \n\n"])
def test_a_file_without_rows_has_none(tmp_path, text):
    assert len(JsonLinesTable(write(tmp_path / "a.jsonl", text))) == 0
    with raises(DataError, "nothing-left"):
        Source(config(tmp_path / "a.jsonl"))


def test_a_last_line_that_is_cut_off_is_a_row_at_fault(tmp_path):
    table = JsonLinesTable(write(tmp_path / "a.jsonl", '{"a": 1}\n{"a": '))
    first, last = table.read([0, 1])
    assert first == {"a": 1}
    assert isinstance(last, DataError) and last.code == "not-json" and "line 2" in str(last)


def test_the_index_is_made_once_and_belongs_to_one_content(tmp_path, cache, monkeypatch):
    path = write(tmp_path / "a.jsonl", '{"a": 1}\n{"a": 2}\n')
    assert len(JsonLinesTable(path)) == 2
    (kept,) = cache.iterdir()
    monkeypatch.setattr(tables, "_scanned", lambda file: pytest.fail("there is an index"))
    assert JsonLinesTable(path).read([1]) == [{"a": 2}]
    monkeypatch.undo()
    monkeypatch.setenv("LOCKSTEP_CACHE", str(cache.parent))
    monkeypatch.setattr(tables, "SMALL_BYTES", 0)
    write(path, '{"a": 1}\n{"a":22}\n{"a": 3}\n')
    assert JsonLinesTable(path).read([2]) == [{"a": 3}]
    assert len([*cache.iterdir()]) == 2 and kept.exists()
    same_size = path.stat()
    write(path, '{"b": 1}\n{"a":22}\n{"a": 3}\n')
    os.utime(path, ns=(same_size.st_atime_ns, same_size.st_mtime_ns))
    assert JsonLinesTable(path).read([0]) == [{"b": 1}], "the name has a hash of the content in it"


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        b"no array",
        np.zeros((2, 3), np.int64),
        np.array([[0, 9, 9]] * 2),
        np.array([[0, 9, 18]] * 2, np.int32),
        np.array([0, 9, 18]),
        np.array([[0, 9, 99]] * 2),
    ],
    ids=lambda value: str(value)[:12],
)
def test_an_index_that_cannot_be_right_is_made_again(tmp_path, cache, damaged):
    path = write(tmp_path / "a.jsonl", '{"a": 1}\n{"a": 2}\n')
    JsonLinesTable(path)
    (kept,) = cache.iterdir()
    if isinstance(damaged, bytes):
        kept.write_bytes(damaged)
    else:
        with kept.open("wb") as file:
            np.save(file, damaged)
    assert JsonLinesTable(path).read([0, 1]) == [{"a": 1}, {"a": 2}]
    assert np.load(kept).tolist() == [[0, 9, 18], [1, 2, 3]]


def test_without_room_for_the_index_the_run_goes_on_and_says_so(tmp_path, cache):
    write(tmp_path / "cache", "a file where the folder would be")
    table = JsonLinesTable(write(tmp_path / "a.jsonl", '{"a": 1}\n{"a": 2}\n'))
    assert table.read([1]) == [{"a": 2}]
    (note,) = table.notes
    assert "a.jsonl is not kept" in note


@pytest.mark.parametrize("change", ["grows", "shrinks", "same size"])
def test_a_file_that_is_written_meanwhile_is_named(tmp_path, change):
    path = write(tmp_path / "a.jsonl", '{"a": 1}\n{"a": 2}\n')
    table = JsonLinesTable(path)
    later = {
        "grows": '{"a": 1}\n{"a": 2}\n{"a": 3}\n',
        "shrinks": '{"a": 1}\n',
        "same size": '{"a": 1}\n{"a": 7}\n',
    }
    with path.open("r+b") as file:
        file.write(later[change].encode())
        file.truncate()
    os.utime(path, ns=(1, 1))
    with raises(DataError, "file-changed"):
        table.read([0])


def test_a_file_that_is_replaced_is_read_on(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"a": 1}\n{"a": 2}\n')
    table = JsonLinesTable(path)
    write(tmp_path / "b", '{"a": 8}\n').replace(path)
    assert table.read([1]) == [{"a": 2}]


def test_utf_16_is_refused_at_once(tmp_path):
    with raises(DataError, "not-text: iconv"):
        JsonLinesTable(write(tmp_path / "a.jsonl", '{"a": 1}\n'.encode("utf-16")))


def test_blocks_of_a_large_file_are_its_fingerprint(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "WHOLE_BYTES", 100)
    monkeypatch.setattr(tables, "BLOCKS", 3)
    monkeypatch.setattr(tables, "BLOCK_BYTES", 10)
    line = json.dumps({"a": "x" * 100}) + "\n"
    path = write(tmp_path / "a.jsonl", line * 5)
    before = JsonLinesTable(path).fingerprint
    assert JsonLinesTable(write(tmp_path / "b.jsonl", line * 5)).fingerprint == before, (
        "whatever its name and time"
    )
    for changed in (line * 6, "{" + line[1:].replace("a", "b", 1) + line * 4, line * 4 + line[:-2] + " \n"):
        assert JsonLinesTable(write(path, changed)).fingerprint != before


ROWS = [{"n": i, "messages": [{"role": "user", "content": f"text {i}"}]} for i in range(1000)]


@pytest.mark.parametrize("small", [0, 2**24])
@pytest.mark.parametrize("group", [7, 100, 5000])
def test_any_row_of_a_parquet_file(tmp_path, monkeypatch, cache, small, group):
    monkeypatch.setattr(tables, "SMALL_BYTES", small)
    path = parquet(tmp_path / "a.parquet", ROWS, row_group_size=group)
    for _ in range(2):
        table = open_table(config(path))
        assert len(table) == 1000
        assert table.read([999, 0, 500, 127, 128]) == [ROWS[i] for i in (999, 0, 500, 127, 128)]
    assert (not cache.exists()) if small else (len([*cache.iterdir()]) == 1)


def test_a_damaged_row_group_is_named_and_leaves_no_copy(tmp_path, cache):
    path = parquet(tmp_path / "a.parquet", ROWS, row_group_size=100, compression="none")
    data = bytearray(path.read_bytes())
    place = data.index(b"text 555")
    data[place - 4 : place] = b"\xff" * 4  # the length of the text
    path.write_bytes(data)
    with raises(DataError, "cannot-read: a.parquet"):
        ParquetTable(path, config(path))
    assert [*cache.iterdir()] == []


def test_a_copy_with_other_rows_is_not_used(tmp_path, cache):
    path = parquet(tmp_path / "a.parquet", ROWS)
    open_table(config(path))
    (copied,) = cache.iterdir()
    copied.write_bytes(copied.read_bytes()[:-100])
    with raises(DataError, "cannot-read: remove it"):
        open_table(config(path))


def test_a_full_disk_of_the_cache_is_named_with_what_to_do(tmp_path, cache):
    write(tmp_path / "cache", "a file where the folder would be")
    with raises(DataError, "cannot-write: LOCKSTEP_CACHE"):
        open_table(config(parquet(tmp_path / "a.parquet", ROWS)))


def test_what_was_not_used_for_long_goes_when_another_file_comes(tmp_path, cache):
    path = write(tmp_path / "a.jsonl", '{"a": 1}\n{"a": 2}\n')
    JsonLinesTable(path)
    (old,) = cache.iterdir()
    os.utime(old, (0, 0))
    JsonLinesTable(write(tmp_path / "b.jsonl", '{"b": 1}\n'))
    assert not old.exists() and len([*cache.iterdir()]) == 1


def test_a_saved_folder_has_the_fingerprint_of_its_content(tmp_path):
    datasets = pytest.importorskip("datasets")
    for name, rows in (("a", ROWS), ("b", ROWS), ("c", ROWS[:-1])):
        datasets.Dataset.from_list(rows).save_to_disk(tmp_path / name)
    a, b, c = (Source(config(tmp_path / name)) for name in "abc")
    assert a.table.read([3, 1]) == [ROWS[3], ROWS[1]]
    assert a.fingerprint == b.fingerprint != c.fingerprint


def test_skip_and_size_are_part_of_the_fingerprint(tmp_path):
    path = write(tmp_path / "a.jsonl", "".join(json.dumps(row) + "\n" for row in ROWS))
    sources = [
        Source(config(path, **settings))
        for settings in ({}, {"skip": 1}, {"size": 5}, {"skip": 1, "size": 5})
    ]
    assert len({source.fingerprint for source in sources}) == 4
    assert [len(source) for source in sources] == [1000, 999, 5, 5]
    assert sources[3].read([4])[0]["n"] == 5
    assert sources[3].read([4])[0].where.endswith("line 6")


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_the_cache_is_made_once_for_all_that_start_together(tmp_path, monkeypatch, cache, kind):
    """As ranks do: the others wait for the first, and use what it has made."""
    rows = [{"a": n} for n in range(5)]
    path = tmp_path / f"a.{kind}"
    if kind == "jsonl":
        write(path, "".join(json.dumps(row) + "\n" for row in rows))
    else:
        parquet(path, rows)
    name, made, waits, slept = (
        "_scanned" if kind == "jsonl" else "_batches",
        [],
        threading.Event(),
        time.sleep,
    )
    make = getattr(tables, name)

    def making(what: Any) -> Any:
        made.append(what)
        assert waits.wait(30)
        return make(what)

    def sleep(seconds: float) -> None:
        waits.set()
        slept(seconds)

    monkeypatch.setattr(tables, name, making)
    monkeypatch.setattr(cache_files.time, "sleep", sleep)
    with ThreadPoolExecutor(3) as pool:
        opened = list(pool.map(open_table, [config(path)] * 3))
    assert [table.read(range(5)) for table in opened] == [rows] * 3
    assert len(made) == 1 and [file.suffix for file in cache.iterdir()] in ([".npy"], [".arrow"])


def test_a_maker_that_never_ends_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(cache_files, "MAKER_SECONDS", 0.0)
    path = write(tmp_path / "a.jsonl", '{"a": 1}\n')
    with ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(tables, "_new_index", lambda *_: pool.submit(open_table, config(path)).result(30))
        with raises(DataError, "deadline: a.jsonl"):
            open_table(config(path))
