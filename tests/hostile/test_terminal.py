"""Text of files, models, servers and rewards: no command lets it reach the terminal as anything but text."""

import io
import json
import re
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.table import Table
from rich.text import Text

from lockstep.cli import main as module
from lockstep.cli.main import COMMANDS, main
from lockstep.cli.sample import Printer, show
from lockstep.errors import LockstepError
from lockstep.observe.console import PlainConsole
from lockstep.observe.display import Display
from lockstep.observe.text import echo, printable, printable_text
from lockstep.recording import corpus_path
from lockstep.schema.rollout import Prompt

EVIL = "\x1b]0;pwn\x07\x9b31m\r\x08[red]x[/red]\u202e\ud800"
JSON_EVIL = json.dumps(EVIL)[1:-1]
TOML_EVIL = "\\u001b]0;pwn\\u0007\\u009b31m\\r\\b[red]x[/red]\\u202e"
SGR = re.compile(r"\x1b\[[0-9;]*m")


def check(text: str) -> str:
    """Raise unless a terminal may have `text`: printable characters, line ends and tabs."""
    assert all(c in "\n\t" or c.isprintable() for c in text), ascii(text)
    return text


def test_escapes():
    assert printable("a\x1b]0;b\n\t") == r"a\x1b]0;b\n\t"
    assert printable_text("a\tb\r\nc\u202e\x9b") == "a\tb\\r\nc\\u202e\\x9b"
    assert check(printable(EVIL)).startswith(r"\x1b]0;pwn\x07\x9b31m\r\x08[red]x[/red]\u202e\ud800")
    out = io.StringIO()
    echo(EVIL, end="", file=out)
    assert out.getvalue() == printable(EVIL)


@pytest.mark.parametrize("terminal", (False, True))
def test_a_console_takes_text_for_text(terminal):
    out = io.StringIO()
    out.isatty = lambda: terminal  # type: ignore[method-assign]
    console = PlainConsole(file=out, width=200, highlight=True)
    console.width = 200
    table = Table(title=EVIL)
    table.add_column(EVIL)
    table.add_row(EVIL, Text(EVIL, style="red"))
    console.print(table)
    console.print(EVIL, ":smile:", [EVIL], 12)
    said = check(SGR.sub("", out.getvalue()))
    assert said.count("\\x1b]0;pwn") == said.count("[red]") == 6  # of title, header, two cells, and prints
    assert ":smile:" in said


@pytest.mark.parametrize("mode", ("plain", "live"))
def test_what_a_run_shows(mode):
    out = io.StringIO()
    with Display(f"run {EVIL}", total_steps=2, mode=mode, stream=out) as display:
        display.phase((EVIL,))
        display.note(f"a sample: {EVIL}\nand more")
        display.step(0, {"loss": 1.0}, seconds=1.0)
    ours = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\r")  # live: cursor, lines, colours
    said = check(ours.sub("", out.getvalue()))
    assert "a sample: \\x1b]0;pwn" in said
    assert "[red]x[/red]" in said


def test_prompts_and_completions(capsys):
    prompt = Prompt(index=0, token_ids=(1,), text=f"a\n\t{EVIL}")
    completion: Any = SimpleNamespace(token_ids=(2,), finish_reason="stop", text=f"b\n{EVIL}")
    show(prompt, [completion])
    printer = Printer(None)
    printer.finish("a")
    printer.finish(f"a{EVIL}\nb")
    assert printer.text == f"a{EVIL}\nb"
    said = check(capsys.readouterr().out)
    assert "a\n\t\\x1b]0;pwn" in said
    assert said.endswith("\\ud800\nb")


def fails(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def run(argv: Sequence[str]) -> int:
        raise error

    monkeypatch.setattr(module.importlib, "import_module", lambda name: SimpleNamespace(main=run))


def test_errors_are_one_escaped_message(monkeypatch, capsys):
    fails(monkeypatch, LockstepError(f"two problems\n  {EVIL}", code="wrong-state"))
    assert main(["train"]) == 1
    assert check(capsys.readouterr().err).splitlines() == [
        "lockstep train: error[wrong-state]: two problems",
        f"  {printable(EVIL)}",
    ]
    fails(monkeypatch, OSError(28, "No space left on device", f"runs/{EVIL}"))
    assert main(["train"]) == 1
    assert capsys.readouterr().err == f"lockstep train: No space left on device: runs/{printable(EVIL)}\n"


def test_a_traceback_is_escaped(monkeypatch, capsys):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)
    fails(monkeypatch, ZeroDivisionError(EVIL))
    with pytest.raises(ZeroDivisionError) as caught:
        main(["train"])
    sys.excepthook(caught.type, caught.value, caught.tb)
    threading.excepthook(threading.ExceptHookArgs((caught.type, caught.value, caught.tb, None)))
    said = check(capsys.readouterr().err)
    assert said.count("Traceback (most recent call last)") == 2
    assert said.count(f"ZeroDivisionError: {printable(EVIL)}") == 2


@pytest.mark.parametrize("command", COMMANDS)
def test_arguments_with_control_characters_are_refused(command, capsys):
    for argument in ("\x1b]0;pwn\x07", "--\x9b31m", "--prompt=\rx", "a\0b"):
        assert main([command, argument]) == 2
        assert "contains a control character" in check(capsys.readouterr().err)
    assert main([EVIL]) == 2
    check(capsys.readouterr().err)


@pytest.mark.parametrize(
    "variables",
    (
        {"RANK": EVIL.replace("\ud800", ""), "WORLD_SIZE": "2"},
        {"RANK": "0", "WORLD_SIZE": "9" * 5000},
        {"RANK": "\u00b2", "WORLD_SIZE": "2"},
        {"RANK": "2", "WORLD_SIZE": "2"},
        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "-1"},
    ),
)
def test_variables_of_launchers(variables, monkeypatch, capsys):
    # A rank that failed ends its process at once if it has process groups, as other tests may have left some.
    monkeypatch.setattr("lockstep.cli.main.leave", lambda status: None)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["train", "grpo", "--recipe", "tiny", "--print-config"]) == 2
    said = check(capsys.readouterr().err)
    assert said.startswith("lockstep train: error[wrong-environment]: ") and "the environment" in said
    assert said.count("\n") == 1


ROW = f'{{"prompt": "a", "completion": "{JSON_EVIL}", "index": 0, "sample": 0, "reward": "{JSON_EVIL}"}}\n'
CONFIGS = {
    "a key": f'kind = "grpo"\n"{TOML_EVIL}" = 1\n',
    "a nested key": f'kind = "grpo"\n[train]\n"{TOML_EVIL}" = 1\n',
    "a table": f'kind = "grpo"\n["{TOML_EVIL}"]\na = 1\n',
    "a value": f'kind = "grpo"\nsteps = "{TOML_EVIL}"\n',
    "a name": f'kind = "grpo"\nname = "{TOML_EVIL}"\n',
    "a kind": f'kind = "{TOML_EVIL}"\n',
    "a task": f'kind = "grpo"\n[data]\nsource = "ids"\n[data.task]\n"{TOML_EVIL}" = 1\n',
    "a template": f'kind = "grpo"\n[data]\nprompt_template = "{TOML_EVIL}"\n[checkpoint]\nkeep_best = 3\n',
    "no TOML": f"kind = {EVIL!r}\n\x1b]0;pwn\x07",
}


def run(argv: Sequence[object], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit status and all that was said."""
    try:
        status = main([str(word) for word in argv])
    except SystemExit as stop:
        status = int(stop.code or 0)
    said = capsys.readouterr()
    return status, check(said.out) + check(said.err)


@pytest.mark.parametrize("text", CONFIGS.values(), ids=CONFIGS)
def test_commands_that_read_settings(text, tmp_path, capsys):
    file = tmp_path / "config.toml"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    for argv in (
        ["train", file, "--print-config"],
        ["plan", file, "--model.name", "shape:nope"],
        ["train", "--resume", tmp_path],
        ["sample", tmp_path],
        ["chat", tmp_path],
        ["generate", file, "--print-config"],
        ["score", file, "--print-config"],
        ["matrix", tmp_path],
        ["replay", tmp_path],
    ):
        status, said = run(argv, capsys)
        assert "Traceback" not in said
        assert status in ((0, 1, 2) if "print-config" in str(argv) else (1, 2))


def samples_file(folder: Path) -> list[list[object]]:
    (folder / "x.jsonl").write_text(ROW)
    (folder / "y.jsonl").write_text(f'{{"{JSON_EVIL}": 1}}\n')
    (folder / "z.jsonl").write_text("\x1b]0;pwn\x07\n")
    (folder / "w.jsonl").write_text(ROW)
    (folder / "w.jsonl.meta.json").write_text(
        f'{{"format": 1, "command": "{JSON_EVIL}", "identity": {{}}, "rows": 1, "complete": false}}'
    )
    return [
        [*command, "--data", folder / f"{name}.jsonl", "--out", folder / f"out-{name}.jsonl"]
        for name in "xyzw"
        for command in (["select", "--top-k", "1"], ["score", "--reward", "length"])
    ]


def damaged_results(folder: Path) -> list[list[object]]:
    for name in ("matrix.json", "parity.json", "metrics.jsonl", "manifest.json", "bisect.json", "cell.json"):
        (folder / name).write_text(f'{{"{JSON_EVIL}": "{JSON_EVIL}", "cells": "{JSON_EVIL}"}}\n')
    (folder / "config.toml").write_text(CONFIGS["a value"])
    return [
        ["matrix", "diff", folder, folder],
        ["matrix", "diff", folder / "matrix.json", folder / "matrix.json"],
        ["parity", "compare", folder, folder],
        ["parity", "check", folder],
        ["bisect", folder],
    ]


def recordings(folder: Path) -> list[list[object]]:
    import shutil

    shutil.copytree(corpus_path(), folder / "rec")
    header = json.loads((folder / "rec" / "recording.json").read_text())
    header["model"]["name"] = EVIL
    header["created_by"] = EVIL
    (folder / "rec" / "recording.json").write_text(json.dumps(header))
    (folder / "bad").mkdir()
    (folder / "bad" / "recording.json").write_text(f'{{"{JSON_EVIL}": "{JSON_EVIL}"}}')
    commands: list[list[object]] = [
        ["recording", command, folder / name]
        for name in ("rec", "bad")
        for command in ("info", "validate", "list")
    ]
    commands += [["recording", "show", folder / "rec", "0"], ["replay", folder / "rec"]]
    commands += [["recording", "import", folder / "bad", "--out", folder / "imported"]]
    return commands


@pytest.mark.parametrize("prepare", (samples_file, damaged_results, recordings))
def test_commands_that_read_results(prepare, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for argv in prepare(tmp_path):
        _, said = run(argv, capsys)
        assert "Traceback" not in said, argv


FLAGS = ("", "-1", "10" * 30, "9" * 5000, "nan", "x" * 5000, "\u00b2")
TINY = ["train", "grpo", "--recipe", "tiny", "--print-config"]


@pytest.mark.parametrize(
    "argv",
    (
        [*TINY, "--rewards"],
        *(
            pytest.param([*TINY, flag], marks=pytest.mark.exhaustive)
            for flag in ("--seed", "--data.task", "--run-dir", "--rank-timeout")
        ),
        ["train", "--print-config", "--recipe"],
        ["plan"],
        ["plan", "grpo", "--recipe", "tiny", "--ranks"],
        ["score", "--print-config", "--reward"],
        ["score", "--reward", "math", "--out", "x.jsonl", "--data"],
        ["select", "--data", "x.jsonl", "--out", "y.jsonl", "--top-k"],
        ["select", "--data", "x.jsonl", "--out", "y.jsonl", "--min-reward"],
        ["select", "--top-k", "1", "--out", "y.jsonl", "--data"],
        ["support", "--attention"],
    ),
    ids=" ".join,
)
def test_arguments_of_any_kind(argv, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for value in FLAGS:
        status, said = run([*argv, value], capsys)
        assert status in (0, 1, 2)
        assert "Traceback" not in said


def test_every_console_is_a_plain_one():
    """rich's own would take text for markup; ruff's T20 sees the prints."""
    source = Path(module.__file__).parents[1]
    makes = re.compile(r"(?<![\w.])Console\(")
    places = [p for p in source.rglob("*.py") if makes.search(p.read_text(encoding="utf-8"))]
    assert places == []
