"""The exit status of each command for what does not exist: docs/reference/cli.md has the table."""

from __future__ import annotations

import pytest

from lockstep.cli.main import COMMANDS, main

GIVEN = {
    # command: arguments that name what does not exist
    "train": ["sft", "--model.name", "shape:tiny-llama", "--data.source", "nope.jsonl"],
    "init": ["grpo", "nope.jsonl"],
    "sample": ["runs/nope", "--prompt", "x"],
    "chat": ["runs/nope"],
    "recording": ["info", "nope"],
    "replay": ["nope"],
    "plan": ["grpo", "--model.name", "./nope"],
    "matrix": ["nope", "--quiet"],
    "bisect": ["nope", "--a=--packing", "--b=--no-packing"],
    "parity": ["compare", "nope", "nope2"],
    "doctor": ["--no-such-flag"],
    "prove": ["./nope"],
    "bench": ["step", "--model", "./nope"],
    "generate": ["--model", "shape:tiny-llama", "--data", "nope.jsonl", "--out", "out.jsonl"],
    "score": ["--data", "nope.jsonl", "--out", "out.jsonl", "--rewards", "math"],
    "select": ["--data", "nope.jsonl", "--best-of-n", "--out", "out.jsonl"],
    "submit": ["nope.toml", "--cluster", "http://127.0.0.1:1"],
    "data": ["check", "nope.toml"],
    "runs": ["nope"],
    "status": ["nope"],
    "stop": ["nope"],
    "logs": ["nope"],
    "hang": ["nope"],
    "view": ["nope"],
    "support": ["--backend", "nope"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_what_does_not_exist_exits_with_2_and_leaves_nothing(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        status = main([command, *GIVEN[command]])
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    assert list(tmp_path.iterdir()) == []
