"""What commands print, where, and their exit status."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from loop_runs import Commands, Ended


@pytest.fixture(scope="module")
def plain(
    lockstep: Commands, tiny_toml: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Ended, Path]:
    folder = tmp_path_factory.mktemp("plain")
    argv = ("train", tiny_toml, "--run-dir", folder / "run", "--json", folder / "summary.json")
    return lockstep(*argv, cwd=folder), folder


def test_the_plain_log_has_a_line_per_step_and_ends_with_the_verdict(plain: tuple[Ended, Path]) -> None:
    ended, folder = plain
    assert ended.code == 0 and ended.err == ""
    steps = [line for line in ended.out.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in steps] == ["1/4", "2/4", "3/4", "4/4"]
    assert all("reward 0." in line and " tok/s" in line for line in steps)
    assert ended.verdict.startswith("train: finished, 4 steps, ")
    assert ended.verdict.endswith(str(folder / "run"))


def test_json_is_the_summary(plain: tuple[Ended, Path]) -> None:
    _, folder = plain
    written = json.loads((folder / "summary.json").read_text())
    assert written == json.loads((folder / "run" / "summary.json").read_text())
    assert written["outcome"] == "finished" and written["steps"] == 4


def test_display_off_prints_the_verdict_only(lockstep: Commands, tiny_toml: Path, tmp_path: Path) -> None:
    argv = ("train", tiny_toml, "--run-dir", tmp_path / "run", "--steps", "1", "--log.display", "off")
    ended = lockstep(*argv, cwd=tmp_path)
    assert ended.err == ""
    assert ended.out == ended.verdict + "\n" and ended.verdict.startswith("train: finished, 1 step")


def test_a_failed_run_says_why_last(lockstep: Commands, tiny_toml: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import no_such_module as reward\n")
    argv = ("train", tiny_toml, "--run-dir", tmp_path / "run", "--rewards", "broken:reward")
    ended = lockstep(*argv, cwd=tmp_path, code=2)
    assert ended.err.startswith("lockstep train: error[missing-package]: ") and "no_such_module" in ended.err
    assert "Traceback" not in ended.err


def test_sample_ends_with_what_it_did_and_chat_is_refused_without_a_tokenizer(
    plain: tuple[Ended, Path], lockstep: Commands
) -> None:
    _, folder = plain
    ended = lockstep("sample", folder / "run", "--num-prompts", "2", "--n", "2", cwd=folder)
    assert ended.verdict.startswith("sample: 4 completions, ")
    ended = lockstep("chat", folder / "run", cwd=folder, code=2)
    assert "tokenizer" in ended.err


@pytest.mark.slow
def test_a_terminal_is_live_and_is_given_back(tiny_toml: Path, tmp_path: Path) -> None:
    """The console script in a pseudo-terminal, Ctrl-C in the middle: the cursor comes back."""
    command = [str(Path(sys.executable).with_name("lockstep")), "train", str(tiny_toml)]
    command += ["--run-dir", str(tmp_path / "run"), "--steps", "10000", "--eval.no-before"]
    primary, secondary = pty.openpty()
    process = subprocess.Popen(command, stdin=secondary, stdout=secondary, stderr=secondary, cwd=tmp_path)
    os.close(secondary)
    shown, asked = b"", False
    while chunk := read(primary):
        shown += chunk
        if b"reward" in shown and not asked:  # once: another one may come when the run has just ended
            process.send_signal(2)
            asked = True
    assert process.wait(timeout=60) == 130
    os.close(primary)
    assert shown.rfind(b"\x1b[?25h") > shown.rfind(b"\x1b[?25l") >= 0, "the cursor stays hidden"
    assert b"train: interrupted, " in shown and b"resume with: lockstep train --resume" in shown


def read(handle: int) -> bytes:
    try:
        return os.read(handle, 4096)
    except OSError:  # the other side of a pseudo-terminal has gone
        return b""
