import json
import subprocess
import sys

import pyarrow.parquet
import pytest
from raising import raises

from lockstep.errors import ConfigError, DataError
from lockstep.rollout import rows as rows_module
from lockstep.rollout.rows import RowFile, meta_path, read_meta, read_rows

ROWS = [
    {
        "index": i,
        "sample": j,
        "prompt": f"p{i}",
        "completion": f"ünï {j}\n\u2028",
        "row": {"answer": [i, None]},
    }
    for i in range(3)
    for j in range(2)
]


def opened(path, *, expected=6, identity=None, **more):
    return RowFile(path, command="generate", identity=identity or {"seed": 0}, expected=expected, **more)


def written(path, rows=ROWS):
    with opened(path) as file:
        for row in rows:
            file.append([row])
        if len(rows) == len(ROWS):
            file.finish()
    return path


def test_every_cut_is_taken_over_and_completed_to_the_same_lines(tmp_path):
    whole = written(tmp_path / "whole.jsonl").read_bytes()
    for cut in range(0, len(whole) + 1, 7):
        path = tmp_path / "cut.jsonl"
        path.write_bytes(whole[:cut])
        (tmp_path / "cut.jsonl.meta.json").write_text(
            json.dumps(read_meta(tmp_path / "whole.jsonl") | {"complete": False})
        )
        with opened(path) as file:
            assert len(file.done) == whole[:cut].count(b"\n")
            file.append([row for row in ROWS if (row["index"], row["sample"]) not in file.done])
            file.finish()
        assert path.read_bytes() == whole


def test_parquet_has_the_same_rows_sorted_and_appears_at_once(tmp_path):
    path = tmp_path / "rows.parquet"
    with opened(path) as file:
        file.append(ROWS[4:])
        assert not path.exists()
    with opened(path) as file:
        assert file.done == {(2, 0), (2, 1)} and file.resumed and not file.complete
        file.append(ROWS[:4])
        file.finish({"tokens": 7})
    assert list(read_rows(path)) == ROWS
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rows.parquet", "rows.parquet.meta.json"]
    assert read_meta(path)["summary"] == {"tokens": 7}
    table = pyarrow.parquet.read_table(path)
    assert table.schema.field("index").type == "int64" and table.column("prompt")[0].as_py() == "p0"
    with opened(path) as file:
        assert file.complete and len(file.done) == 6
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rows.parquet", "rows.parquet.meta.json"]


def test_a_crash_between_the_parquet_file_and_its_meta_file_is_repaired(tmp_path, monkeypatch):
    path = tmp_path / "rows.parquet"
    with opened(path) as file, monkeypatch.context() as patch:
        file.append(ROWS)
        patch.setattr(file, "_write_meta", lambda **_: (_ for _ in ()).throw(RuntimeError("killed")))
        with pytest.raises(RuntimeError):
            file.finish()
    with opened(path) as file:
        assert not file.complete and len(file.done) == 6
        file.finish()
    assert list(read_rows(path)) == ROWS


def test_messages_are_a_parquet_column_of_their_own(tmp_path):
    path = tmp_path / "rows.parquet"
    row = ROWS[0] | {"prompt": [{"role": "user", "content": "p"}]}
    with opened(path, expected=1) as file:
        file.append([row])
        file.finish()
    assert pyarrow.parquet.read_table(path).to_pylist()[0]["prompt"] == row["prompt"]
    named = ROWS[0] | {"prompt": [{"role": "user", "content": "p", "name": "x"}]}
    with opened(tmp_path / "named.parquet", expected=1) as file:
        file.append([named])
        with raises(DataError, "wrong-row", names=["name"]):
            file.finish()


def test_other_settings_are_refused_by_name(tmp_path):
    path = written(tmp_path / "rows.jsonl", ROWS[:2])
    before = path.read_bytes()
    with raises(ConfigError, "contradiction: --out", names=["seed", "a.b"]) as caught:
        opened(path, identity={"seed": 1, "a": {"b": 1}})
    assert "seed: 0 in the file, now 1" in str(caught.value)
    with raises(ConfigError, "contradiction: --out", names=["rows"]):
        opened(path, expected=7)
    assert path.read_bytes() == before
    with opened(path, identity={"seed": 1}, may_differ=["seed"]) as file:
        assert len(file.done) == 2
    with opened(path, identity={"seed": 2}, overwrite=True) as file:
        assert not file.done


def test_settings_of_which_nothing_was_made_do_not_bind(tmp_path):
    for name in ("rows.jsonl", "rows.parquet"):
        opened(tmp_path / name).close()
        with opened(tmp_path / name, identity={"seed": 5}, expected=9) as file:
            assert not file.done
        assert read_meta(tmp_path / name)["rows"] == 9


def test_a_file_of_somebody_else_is_left_alone(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text("precious\n")
    with raises(ConfigError, "already-exists: --out"):
        opened(path)
    assert path.read_text() == "precious\n"
    parquet = tmp_path / "mine.parquet"
    parquet.write_bytes(b"precious")
    with raises(ConfigError, "already-exists: --out"):
        opened(parquet)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine.jsonl", "mine.parquet"]


def test_damage_that_is_no_cut_is_told_by_line(tmp_path):
    path = written(tmp_path / "rows.jsonl", ROWS[:3])
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"\0\0\0\n" + lines[2])
    with raises(DataError, "not-json: line 2"):
        opened(path)
    path.write_bytes(lines[0] + lines[1] + lines[0])
    with raises(DataError, "duplicate: line 3"):
        opened(path)
    path.write_bytes(b'{"index": 0.5, "sample": 0}\n')
    with raises(DataError, "wrong-row: line 1"):
        opened(path)
    meta_path(path).write_text("{")
    with raises(ConfigError, "not-json: rows.jsonl.meta.json"):
        opened(path)


def test_one_process_at_a_time(tmp_path):
    with opened(tmp_path / "rows.jsonl"), raises(ConfigError, "locked: --out"):
        opened(tmp_path / "rows.jsonl")
    opened(tmp_path / "rows.jsonl").close()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("rows.csv", "wrong-format: --out"),
        ("no/rows.jsonl", "no-such-file: --out, rows.jsonl"),
        ("", "wrong-format: --out"),
    ],
)
def test_a_place_that_cannot_be_is_refused(tmp_path, name, message):
    with raises(ConfigError, message):
        opened(tmp_path / name)


def test_a_folder_without_permission_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(rows_module.os, "access", lambda path, mode: False)  # root may write everywhere
    with raises(ConfigError, "cannot-write: --out, rows.jsonl"):
        opened(tmp_path / "rows.jsonl")


FULL = """
import sys, resource, signal
from pathlib import Path
from lockstep.errors import DataError
from lockstep.rollout.rows import RowFile
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
with RowFile(Path(sys.argv[1]), command="generate", identity={"seed": 0}, expected=100) as file:
    try:
        for i in range(100):
            file.append([{"index": i, "sample": 0, "completion": "x" * 300}])
    except DataError as error:
        print(len(file.done), error)
"""


def test_a_full_disk_keeps_whole_rows(tmp_path):
    """RLIMIT_FSIZE stands in for it: a write stops in the middle of a row."""
    path = tmp_path / "rows.jsonl"
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(path)], capture_output=True, text=True, check=True, timeout=120
    )
    kept, message = done.stdout.split(" ", 1)
    assert "rows are saved" in message and f"{kept} of 100" in message and "run the command again" in message
    lines = path.read_bytes().splitlines(keepends=True)
    assert len(lines) == int(kept) == 5 and all(line.endswith(b"\n") for line in lines)
    with opened(path, expected=100) as file:
        assert len(file.done) == 5


def test_an_unfinished_file_is_not_read(tmp_path):
    path = written(tmp_path / "rows.jsonl", ROWS[:2])
    with raises(DataError, "incomplete: rows.jsonl"):
        read_rows(path)
    foreign = tmp_path / "foreign.jsonl"
    foreign.write_text('{"a": 1}\n\n{"a": 2}\n')
    assert list(read_rows(foreign)) == [{"a": 1}, {"a": 2}]
    foreign.write_text('{"a": 1}\n[1]\n')
    with raises(DataError, "wrong-row: line 2"):
        list(read_rows(foreign))
    with raises(DataError, "no-such-file: --data"):
        read_rows(tmp_path / "none.jsonl")


def test_half_a_surrogate_pair_is_written_and_read(tmp_path):
    row = {"index": 0, "sample": 0, "completion": "\ud83d"}
    with opened(tmp_path / "rows.jsonl", expected=1) as file:
        file.append([row])
        file.finish()
    assert list(read_rows(tmp_path / "rows.jsonl")) == [row]
