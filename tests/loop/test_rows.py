"""Runs on more rows than are looked at before the model is loaded: read as they come near."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from loop_runs import FORWARD, Commands, kill, metrics_of, on_pairs
from raising import raises

from lockstep import loops
from lockstep.config.load import load_run
from lockstep.data import verdicts
from lockstep.data.lazy import LeftOut
from lockstep.errors import CheckpointError, DataError
from lockstep.loop.row_log import RowLog
from lockstep.observe.run_history import read_lines

ROWS = 1500
LONG, WRONG = range(0, ROWS, 11), (1101, 1234, 1490)


def sums(path: Path, *, wrong: bool = True) -> Path:
    """Rows of which every eleventh is too long, and three of the later ones are at fault."""
    with path.open("w", encoding="utf-8") as file:
        for n in range(ROWS):
            a, b = n % 10, n // 10 % 9
            row: dict[str, Any] = {"prompt": f"{a} + {b} =", "completion": f" {a + b}"}
            if n in LONG:
                row["prompt"] = "1 + " * 40 + row["prompt"]
            if wrong and n in WRONG:
                del row["completion"]
            file.write(json.dumps(row) + "\n")
    return path


def toml_of(sft: Path, path: Path, source: Path, *, steps: int = 40, **data: Any) -> Path:
    """The config of the SFT run on another source."""
    settings = {"source": str(source), "overlong_documents": "drop", "on_bad_row": "skip"} | data
    lines = []
    for line in sft.read_text().splitlines():
        if line.startswith("source") and "train.jsonl" in line:
            lines += [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
        else:
            changed = {
                "steps": f"steps = {steps}",
                "batch_size": "batch_size = 32",
                "eval_every": "eval_every = 0",
            }
            lines.append(changed.get(line.partition(" ")[0], line))
    path.write_text(
        "\n".join(lines).replace("every = 2", "every = 5").replace("eval_every = 2", "eval_every = 20")
    )
    return path


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sums(tmp_path_factory.mktemp("rows") / "sums.jsonl")


def left_out(run: Path) -> list[dict[str, Any]]:
    return read_lines(run / "left_out.jsonl")


@pytest.mark.parametrize(
    "streaming", [{}, {"streaming": True, "shuffle_buffer": 300}], ids=["index", "stream"]
)
def test_a_killed_run_with_workers_is_the_run_without(
    lockstep: Commands, sft_toml, source, tmp_path, streaming
):
    """Three kills, rows that are dropped, skipped, and known only when their turn comes; a second epoch."""
    straight = toml_of(sft_toml, tmp_path / "straight.toml", source, steps=50, workers=0, **streaming)
    lockstep("train", straight, "--run-dir", tmp_path / "straight", cwd=tmp_path)
    workers = toml_of(
        sft_toml, tmp_path / "workers.toml", source, steps=50, workers=2, prefetch=3, **streaming
    )
    orders = [kill(FORWARD, step=step, call=2, when="backward") for step in (7, 26, 46)]
    lockstep.broken_off(workers, tmp_path / "run", orders)
    assert metrics_of(tmp_path / "run") == metrics_of(tmp_path / "straight")
    found = {row["item"]: row["state"] for row in left_out(tmp_path / "run")}
    assert found == dict.fromkeys(LONG, "dropped_overlong") | dict.fromkeys(WRONG, "bad")
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["rows"]["bad"] == 3 and manifest["rows"]["dropped_overlong"] == len(LONG)
    assert all(any(f"line {n + 1}" in line for line in manifest["rows"]["bad_rows"]) for n in WRONG)


def test_a_row_at_fault_ends_the_run_in_its_step(sft_toml, source, tmp_path):
    """Saved before it, and named; under skip the run goes on from there."""
    toml = toml_of(sft_toml, tmp_path / "a.toml", source, steps=45, on_bad_row="fail")
    run = load_run(toml, overrides={"run_dir": str(tmp_path / "run")})
    with raises(DataError, "missing-column"):
        loops.train(run)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["outcome"] == "failed" and "sums.jsonl, line" in summary["error"]
    steps = [row["step"] for row in metrics_of(tmp_path / "run") if "loss" in row]
    assert steps == [*range(len(steps))] and len(steps) > 5
    saved = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert saved[-1] == f"step-{len(steps):06d}"


def test_ranks_share_the_rows(sft_toml, source, tmp_path, lockstep):
    """Rank 0 makes the documents and the others get them: the losses are those of one process."""
    toml = toml_of(sft_toml, tmp_path / "a.toml", source, steps=4)
    lockstep("train", toml, "--run-dir", tmp_path / "one", cwd=tmp_path)
    flags = ("--train.backend", "fsdp2", "--train.device", "cpu", "--ranks", "2")
    lockstep("train", toml, "--run-dir", tmp_path / "two", *flags, cwd=tmp_path)
    one, two = (
        [row["loss"] for row in metrics_of(tmp_path / name) if "loss" in row] for name in ("one", "two")
    )
    assert two == pytest.approx(one, rel=1e-4) and len(one) == 4


def test_pairs_of_a_large_set(sft_toml, tmp_path):
    rows = [
        {"prompt": f"{n % 10} + {n // 10 % 9} =", "chosen": f" {n % 10 + n // 10 % 9}", "rejected": " 18"}
        for n in range(1200)
    ]
    toml = on_pairs(sft_toml, tmp_path, "dpo", rows)
    values = {"run_dir": str(tmp_path / "run"), "steps": 3, "batch_size": 8, "eval_data.size": 4}
    loops.train(load_run(toml, overrides=values))
    report = json.loads((tmp_path / "run" / "manifest.json").read_text())["data"]
    assert report["rows"] == 1200 and report["examined"] >= 1000


def test_a_verdict_is_found_and_belongs_to_content_and_settings(
    sft_toml, source, tmp_path, monkeypatch, capsys
):
    from lockstep.cli.data import main

    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    toml = toml_of(sft_toml, tmp_path / "a.toml", source, steps=2)
    report = tmp_path / "report.json"
    assert main(["check", str(toml), "--workers", "2", "--json", str(report)]) == 0
    of_data = next(each for each in json.loads(report.read_text()) if each["section"] == "data")
    kept = ROWS - len(LONG) - len(WRONG)
    assert (of_data["rows"], of_data["kept"]) == (ROWS, kept)
    assert of_data["left_out"] == {"dropped_overlong": len(LONG), "bad": len(WRONG)}
    assert [f"line {n + 1}" in message for n, message in zip(WRONG, of_data["bad"], strict=True)] == [
        True
    ] * 3
    assert f"kept: {kept:,}" in capsys.readouterr().out

    def examined(toml: Path, name: str) -> int:
        loops.train(load_run(toml, overrides={"run_dir": str(tmp_path / name)}))
        return int(json.loads((tmp_path / name / "manifest.json").read_text())["data"].get("examined", 0))

    assert examined(toml, "known") == 1000 + len([n for n in (*LONG, *WRONG) if n >= 1000])
    assert {row["item"] for row in left_out(tmp_path / "known")} == {*LONG, *WRONG}, "for a resume without it"
    rows = json.loads((tmp_path / "known" / "manifest.json").read_text())["rows"]
    assert rows["bad"] == 3 and len(rows["bad_rows"]) == 3
    # With "fail" the run does not begin.
    strict = toml_of(sft_toml, tmp_path / "c.toml", source, steps=2, on_bad_row="fail")
    with raises(DataError, "wrong-row: data check"):
        loops.train(load_run(strict, overrides={"run_dir": str(tmp_path / "strict")}))
    # One that is damaged counts for nothing, and so does one of other content.
    (file,) = [path for path in (tmp_path / "cache" / "data").iterdir() if path.suffix == ".json"]
    file.write_text(file.read_text()[:-20])
    assert verdicts.read(file.stem.partition("-")[2]) is None
    assert examined(toml, "damaged") == 1000


class Found:
    """Of a run's folder, what RowLog needs; and items that were left out."""

    whole, selective = False, True

    def __init__(self, folder: Path, *news: int) -> None:
        self.left_out = folder / "left_out.jsonl"
        self.counts = Counter[str]()
        self._news = [LeftOut(number=n, state="dropped_overlong", why="") for n in news]
        self.trusted: tuple[dict[int, str], int] | None = None

    def pop_news(self) -> list[LeftOut]:
        news, self._news = self._news, []
        return news

    def trust(self, known: dict[int, str], *, steps: int) -> None:
        self.trusted = (known, steps)

    writing = staticmethod(lambda path: contextlib.nullcontext())

    def update_manifest(self, values: object) -> None:
        pass


def resumed(folder: Path, steps: int, *news: int) -> tuple[RowLog, Found]:
    found = Found(folder, *news)
    log = RowLog(found, found, writes=True, say=print)  # type: ignore[arg-type]
    log.resume(steps)
    return log, found


def test_what_is_left_out_is_known_from_the_first_step_on(tmp_path):
    """Also where nothing is left out: the file is empty, and says so."""
    resumed(tmp_path, 0)
    assert (tmp_path / "left_out.jsonl").read_text() == ""
    assert resumed(tmp_path, 20)[1].trusted == ({}, 20)


def test_without_the_file_nothing_is_trusted_until_all_is_known(tmp_path):
    """A kill before the first batch must not leave a file that says less."""
    log, found = resumed(tmp_path, 20, 3, 7)
    assert found.trusted is None and not found.left_out.exists()
    found._news = [LeftOut(number=9, state="bad", why="row 9")]
    log.write()
    assert {row["item"] for row in read_lines(found.left_out)} == {3, 7, 9}
    assert resumed(tmp_path, 21)[1].trusted == ({3: "dropped_overlong", 7: "dropped_overlong", 9: "bad"}, 21)


def test_a_torn_line_goes_before_the_next_one_comes(tmp_path):
    resumed(tmp_path, 0, 3)
    file = tmp_path / "left_out.jsonl"
    file.write_text(file.read_text() + '{"item": 5, "sta')
    _, found = resumed(tmp_path, 4, 8)
    assert found.trusted == ({3: "dropped_overlong"}, 4)
    assert [row["item"] for row in read_lines(file)] == [3, 8]
    assert resumed(tmp_path, 5)[1].trusted == ({3: "dropped_overlong", 8: "dropped_overlong"}, 5)


def test_a_damaged_list_of_what_is_left_out_is_named(tmp_path):
    (tmp_path / "left_out.jsonl").write_text('{"item": "7", "state": "bad"}\n{"item": 8, "state": "bad"}\n')
    with raises(CheckpointError, "wrong-field: left_out.jsonl"):
        resumed(tmp_path, 3)
