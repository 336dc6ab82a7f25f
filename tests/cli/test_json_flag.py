"""--json of every command that has one: a place that cannot be is refused before anything is read or run."""

import os

import pytest

from lockstep.cli.main import main

COMMANDS = {
    "train": ["train", "grpo", "--recipe", "tiny"],
    "sample": ["sample", "run"],
    "recording": ["recording", "info", "run"],
    "replay": ["replay", "run"],
    "bisect": ["bisect", "run", "--a", "", "--b", "--packing"],
    "matrix": ["matrix", "run"],
    "matrix diff": ["matrix", "diff", "a", "b"],
    "parity train": ["parity", "train"],
    "parity engines": ["parity", "engines"],
    "parity compare": ["parity", "compare", "a", "b"],
    "parity check": ["parity", "check"],
    "bench step": ["bench", "step", "--device", "cpu"],
    "score": ["score", "--data", "s.jsonl", "--out", "o.jsonl", "--rewards", "ids"],
    "select": ["select", "--data", "s.jsonl", "--out", "o.jsonl", "--top-k", "1"],
    "hang": ["hang", "run"],
    "plan": ["plan", "grpo", "--recipe", "tiny"],
    "doctor": ["doctor"],
    "status": ["status", "run"],
    "support": ["support"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_place_that_cannot_be_is_refused_at_once(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for path, said in (
        ("no/x.json", "no such folder"),
        ("folder", "is a folder; give the name of a file"),
        ("pipe", "is a device or a pipe, not a regular file"),
    ):
        assert main([*COMMANDS[name], "--json", path]) == 2
        seen = capsys.readouterr()
        assert said in seen.err and path in seen.err, (seen.out, seen.err)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "pipe"]
    assert (tmp_path / "pipe").is_fifo()


def test_dev_stdout_is_not_replaced_where_it_leads_to_a_file(tmp_path, capsys):
    with (tmp_path / "redirected").open("w") as file:
        path = f"/proc/self/fd/{file.fileno()}"
        assert main(["support", "--json", path]) == 2
        assert os.path.islink(path)
    assert path in capsys.readouterr().err
    assert (tmp_path / "redirected").read_text() == ""
