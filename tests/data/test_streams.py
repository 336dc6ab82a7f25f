"""Sources that are read from their beginning on: windows, ends, and the same batches whoever asks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from raising import raises

from lockstep.config.data import DataConfig
from lockstep.config.load import load_run
from lockstep.data.lazy import EndOfStream, Outcome
from lockstep.data.sft import load_sft
from lockstep.data.sources import Source
from lockstep.data.streams import StreamItems, StreamTable, open_stream
from lockstep.errors import ConfigError, DataError

LENGTH = 2350
DROPPED = {n for n in range(LENGTH) if n % 7 == 3 or 200 <= n < 310}


def make(numbers: Sequence[int]) -> list[Outcome[int]]:
    if max(numbers) >= LENGTH:
        raise EndOfStream(LENGTH)
    return [Outcome(state="dropped_overlong") if n in DROPPED else Outcome(item=n, tokens=1) for n in numbers]


def items(*, window: int = 100, **settings: Any) -> StreamItems[int]:
    config = DataConfig(source="a.jsonl", streaming=True, shuffle_buffer=window, **settings)
    return StreamItems(make, lambda number: make([number]), config=config, selective=True)


def expected(n: int, seed: int, steps: int, *, window: int = 100) -> list[list[int]]:
    """Windows in order, each in numpy's order, without what is left out; an epoch ends with its last whole
    batch."""
    batches: list[list[int]] = []
    epoch = 0
    while len(batches) < steps:
        order: list[int] = []
        for which in range(-(-LENGTH // window)):
            numbers = np.arange(which * window, min((which + 1) * window, LENGTH))
            order += map(int, np.random.default_rng([seed, epoch, which]).permutation(numbers))
        order = [number for number in order if number not in DROPPED]
        batches += [order[k : k + n] for k in range(0, len(order) // n * n, n)]
        epoch += 1
    return batches[:steps]


@pytest.mark.parametrize("window", [1, 10, 100, 1000, 5000])
@pytest.mark.parametrize(("workers", "prefetch"), [(0, 1), (1, 8), (3, 2)])
def test_batches_are_windows_without_what_is_left_out(window, workers, prefetch):
    found = items(window=window, workers=workers, prefetch=prefetch)
    steps = expected(16, 3, 300, window=window)
    assert [found.batch(step, 16, 3) for step in range(300)] == steps
    assert found.examined >= LENGTH - 16 and found.rows == LENGTH
    found.close()


def test_a_batch_does_not_depend_on_who_asked_for_what_before():
    steps = expected(16, 3, 300)
    for order in ([299], [5, 290, 6], [130, 0]):
        found = items()
        for step in order:
            assert found.batch(step, 16, 3) == steps[step]
        found.close()


def test_a_resume_reads_on_where_it_was():
    first = items(workers=1)
    left: dict[int, str] = {}
    for step in range(60):
        first.batch(step, 16, 3)
        left |= {each.number: each.state for each in first.pop_news()}
    first.close()
    second = items(workers=0)
    second.trust(left, steps=60)
    assert [second.batch(s, 16, 3) for s in range(60, 90)] == expected(16, 3, 90)[60:]


def test_in_order():
    kept = [n for n in range(LENGTH) if n not in DROPPED]
    found = items(shuffle=False)
    assert [found.batch(s, 10, 0) for s in range(50)] == [kept[10 * s : 10 * s + 10] for s in range(50)]
    found.close()


def test_all_of_it_and_its_length():
    found = items()
    assert len(found) > 10**9 and len(found.sampled) == 1000 - len([n for n in DROPPED if n < 1000])
    found.make_all()
    assert list(found) == [n for n in range(LENGTH) if n not in DROPPED] and len(found) == LENGTH - len(
        DROPPED
    )
    with raises(DataError, "not-enough"):
        found.batch(0, LENGTH, 0)


def test_a_batch_larger_than_the_source_is_refused_at_its_end():
    found = items()
    with raises(DataError, "not-enough"):
        found.batch(0, 2 * LENGTH, 0)


class Counted:
    def __init__(self, rows: int) -> None:
        self.read: list[int] = []
        self._rows = rows

    def __call__(self, first: int) -> Iterator[dict[str, Any]]:
        for number in range(first, self._rows):
            self.read.append(number)
            yield {"n": number}


@pytest.mark.parametrize(("window", "n"), [(500, 1), (2000, 2), (3000, 16)])
@pytest.mark.parametrize("prefetch", [1, 64])
def test_the_last_window_has_one_order_whoever_finds_the_end(window, n, prefetch):
    steps = (LENGTH - len(DROPPED)) // n
    found = items(window=window, prefetch=prefetch)
    epoch = [found.batch(step, n, 0) for step in range(steps)]
    assert epoch == expected(n, 0, steps, window=window)
    assert items(window=window).batch(steps - 3, n, 0) == epoch[-3]
    found.close()


def test_a_row_may_have_several_items():
    def two(numbers: Sequence[int]) -> list[Outcome[int]]:
        make([number // 2 for number in numbers])
        return [Outcome(item=number) for number in numbers]

    config = DataConfig(source="a.jsonl", streaming=True, shuffle_buffer=100)
    found = StreamItems(two, lambda number: make([number]), config=config, selective=True, of_row=2)
    found.make_all()
    assert list(found) == [*range(2 * LENGTH)]
    found.close()


def test_a_table_reads_each_row_once_while_it_goes_on():
    source = Counted(95)
    table = StreamTable(source, window=10, name="x")
    for first in range(0, 90, 5):
        assert [row["n"] for row in table.read(range(first, first + 5))] == [*range(first, first + 5)]
    assert source.read == [*range(90)]
    assert table.read([3, 94]) == [{"n": 3}, {"n": 94}]
    for beyond in (95, 99, 100, 1000):
        with pytest.raises(EndOfStream) as caught:
            table.read([beyond])
        assert caught.value.rows == 95


def rows_file(path: Path, count: int, *, bad: Sequence[int] = ()) -> Path:
    lines = [json.dumps({"prompt": f"{n}?", "completion": f"{n}!"}) for n in range(count)]
    for number in bad:
        lines[number] = '{"prompt": '
    path.write_text("\n\n".join(lines), encoding="utf-8")
    return path


def config(path: Path, **settings: Any) -> DataConfig:
    return DataConfig(source=str(path), streaming=True, shuffle_buffer=50, **settings)


def test_a_file_gives_the_documents_of_its_index(tokenizer, tmp_path):
    path = rows_file(tmp_path / "a.jsonl", 1300, bad=[1210])
    streamed = load_sft(config(path, on_bad_row="skip"), tokenizer=tokenizer)
    indexed = load_sft(DataConfig(source=str(path), on_bad_row="skip"), tokenizer=tokenizer)
    batches = [streamed.batch(step, 50, 0) for step in range(25)]
    ids = {tuple(sample.token_ids.tolist()) for batch in batches for sample in batch}
    assert len(ids) == 1250
    assert ids <= {tuple(sample.token_ids.tolist()) for sample in indexed.items}
    (left,) = streamed.items.pop_news()
    assert left.number == 1210 and "line 2421" in left.why
    streamed.close()


def test_parquet_is_streamed_from_any_row(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"n": n, "text": f"text {n}"} for n in range(500)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=64)
    table = open_stream(config(tmp_path / "a.parquet"))
    assert table.read([499, 0, 64]) == [rows[499], rows[0], rows[64]]


def test_skip_and_size_of_a_stream(tmp_path):
    path = rows_file(tmp_path / "a.jsonl", 40)
    source = Source(config(path, skip=5, size=10))
    assert [row["prompt"] for row in source.read([0, 9])] == ["5?", "14?"]
    with pytest.raises(EndOfStream) as caught:
        source.read([10])
    assert caught.value.rows == 10
    shorter = Source(config(path, skip=35, size=10))
    assert len(shorter.head(100)) == 5 and len(shorter) == 5


def test_a_stream_of_fewer_rows_than_a_batch(tokenizer, tmp_path):
    streamed = load_sft(config(rows_file(tmp_path / "a.jsonl", 3)), tokenizer=tokenizer)
    assert len(streamed) == 3
    with raises(DataError, "not-enough", needs=4):
        streamed.batch(0, 4, 0)


@pytest.mark.parametrize("settings", [{}, {"skip": 7}])
def test_an_empty_stream_is_refused(tmp_path, settings):
    path = rows_file(tmp_path / "a.jsonl", 5 if settings else 0)
    with raises(DataError, "nothing-left"):
        Source(config(path, **settings))


def test_a_streamed_file_that_changes_is_named(tmp_path):
    path = rows_file(tmp_path / "a.jsonl", 120)
    table = open_stream(config(path))
    assert table.read([0])[0]["prompt"] == "0?"
    path.write_text(path.read_text() + "\n")
    with raises(DataError, "file-changed"):
        table.read([60])


def test_a_cell_at_fault_of_a_streamed_parquet_file_is_one_row(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    from lockstep.data.readers import JSON_COLUMNS

    cells = ["1", "{", "3"]
    schema = pa.schema([pa.field("n", pa.string())], metadata={JSON_COLUMNS: b'["n"]'})
    pq.write_table(pa.table({"n": cells}, schema=schema), tmp_path / "a.parquet")
    first, wrong, last = open_stream(config(tmp_path / "a.parquet")).read([0, 1, 2])
    assert (first, last) == ({"n": 1}, {"n": 3}) and isinstance(wrong, DataError)


@pytest.mark.parametrize("name", ["a.json", "folder"])
def test_what_has_an_index_already_is_not_streamed(tmp_path, name):
    if name == "folder":
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).write_text("[]")
    with raises(ConfigError, "no-effect: data.streaming"):
        Source(config(tmp_path / name))


def test_settings_that_exclude_each_other():
    for values in ({"source": "a.jsonl", "shuffle_buffer": 5}, {"streaming": True}):
        with raises(ConfigError, f"no-effect: data.{[*values][-1]}"):
            load_run(kind="grpo", overrides={f"data.{name}": value for name, value in values.items()})
