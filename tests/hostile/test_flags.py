"""Hostile values for every flag of the commands that read flags themselves: each is refused in one line, exit
status 2, before a model is loaded or a process is started; nothing hangs, and nothing has a traceback.

The flags are found by walking the parsers. Nothing is faked but the doors to the work, which end the command.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from lockstep.cli import arguments, sample
from lockstep.cli.main import main
from lockstep_lab.cli import (
    bench,
    bisect,
    matrix,
    parity,
    parity_check,
    parity_compare,
    parity_engines,
    recording,
    replay,
)

SECONDS = 20
"""Of one value; only what waits for ever takes so long."""
BAD_NUMBERS = ("nan", "inf", "-1", "1e308", "1e-320", str(10**20), "9" * 5000, "", "0x10")
BAD_TEXTS = ("a\0b", "\udcff", "\x1b]0;pwn\x07")
LONG = "x" * 5000
BAD_FILES = ("fifo", "folder", "file/x", LONG, "")
_WHOLE = (arguments.positive, arguments.count, arguments.seed, arguments.ranks)
KINDS: dict[Any, str] = {
    **dict.fromkeys((*_WHOLE, arguments.seconds), "number"),
    arguments.above_zero: "measure",
    arguments.path: "file",
}
"""What argparse calls with the text of a flag -> the kind of flag."""
OF_LAUNCHERS = ("--local-rank",)
"""torch's launchers give -1."""
NAMES_AN_INPUT = {
    "recording",
    "--recording",
    "path",
    "paths",
    "source",
    "model",
    "--model",
    "--data",
    "a",
    "b",
}
"""What is not there, or is no such thing, is found by who reads it: status 1."""


class Begun(BaseException):
    """The command has accepted its flags, and begins."""


@dataclasses.dataclass(frozen=True)
class Flag:
    name: str
    """Or that of a positional argument."""
    kind: str
    """number, measure (any number above 0 that is not absurd), file or text."""

    def words(self, value: str) -> list[str]:
        return [f"{self.name}={value}"] if self.name.startswith("--") else [value]


def of_parser(parser: argparse.ArgumentParser) -> Iterator[Flag]:
    for action in parser._actions:
        name = action.option_strings[0] if action.option_strings else action.dest
        if action.nargs == 0 or name in ("-h", "--help", *OF_LAUNCHERS):
            continue
        assert action.choices or action.type not in (int, float, Path), f"{name} has no bounds"
        yield Flag(name, KINDS.get(action.type, "text"))


def of_fields(kind: type) -> Iterator[Flag]:
    """The flags that tyro makes of a dataclass."""
    for field in dataclasses.fields(kind):
        annotation = str(field.type)
        if annotation == "bool":
            continue
        positional = "Positional" in annotation or "RecordingPath" in annotation
        number = annotation.removesuffix(" | None") in ("int", "float")
        yield Flag(
            field.name if positional else "--" + field.name.replace("_", "-"),
            "number" if number else "file" if "Path" in annotation and not positional else "text",
        )


@dataclasses.dataclass(frozen=True)
class Command:
    words: str
    flags: Callable[[], Iterator[Flag]]
    others: str = ""
    """What the command needs besides."""


SHOWN = "--device cpu"
COMMANDS = [
    Command("sample", lambda: of_fields(sample.SampleArguments), "nowhere --prompt x"),
    Command("chat", lambda: of_fields(sample.ChatArguments), "nowhere"),
    Command("replay", lambda: of_parser(replay.parser()), SHOWN),
    Command("matrix", lambda: of_parser(matrix.parser()), f"{SHOWN} --axes packing --out new"),
    Command("matrix diff", lambda: of_parser(matrix.diff_parser()), "nowhere nowhere"),
    Command("bisect", lambda: of_parser(bisect._parser()), f"--a=--packing --b=--no-packing {SHOWN}"),
    Command("bisect", lambda: of_parser(bisect._parser()), f"--crash {SHOWN}"),
    Command("parity train", lambda: of_parser(parity.parser()), f"{SHOWN} --stacks local --gpus 1"),
    Command("parity compare", lambda: of_parser(parity_compare.parser()), "file file"),
    Command("parity check", lambda: of_parser(parity_check.parser()), "--stacks local"),
    Command(
        "parity engines",
        lambda: of_parser(parity_engines.parser()),
        f"{SHOWN} --engines hf --model shape:tiny-llama",
    ),
    Command("bench step", lambda: of_parser(bench.parser()), SHOWN),
    Command("recording info", lambda: of_fields(recording.Info)),
    Command("recording list", lambda: of_fields(recording.List)),
    Command("recording show", lambda: of_fields(recording.Show), "0"),
    Command("recording slice", lambda: of_fields(recording.Slice), "--out new --inputs 0 --no-weights"),
    Command("recording merge", lambda: of_fields(recording.Merge), "nowhere --out new"),
    Command("recording import", lambda: of_fields(recording.Import), "nowhere --out new"),
]


@pytest.fixture(autouse=True)
def doors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Where each command begins its work ends it; a folder with a fifo and such; a deadline."""
    from lockstep.models import load
    from lockstep.ranks import launch
    from lockstep_lab.bisect.shrink_worker import TrialRunner
    from lockstep_lab.replay import policy
    from lockstep_lab.step_bench import run as step_bench
    from lockstep_lab.suite.process import ProcessRunner
    from lockstep_lab.train_parity import check

    def begin(*_: Any, **__: Any) -> None:
        raise Begun

    def late(*_: object) -> None:
        raise AssertionError(f"still waiting after {SECONDS} s")

    for place, name in (
        *((load, "load_model"), (policy, "load_model"), (launch, "launch_command")),
        *((ProcessRunner, "run"), (TrialRunner, "_start"), (step_bench._Suite, "run_all")),
        (check, "check_all"),
    ):
        monkeypatch.setattr(place, name, begin)
    monkeypatch.chdir(tmp_path)
    os.mkfifo("fifo")
    Path("folder").mkdir()
    Path("folder/something").touch()
    Path("file").write_text("x")
    previous = signal.signal(signal.SIGALRM, late)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, previous)


def outcome(argv: Sequence[str]) -> int | None:
    """The exit status; None: it has begun."""
    signal.alarm(SECONDS)
    try:
        return main(argv)
    except SystemExit as error:  # of argparse and tyro
        assert isinstance(error.code, int)
        return error.code
    except Begun:
        return None
    finally:
        signal.alarm(0)


def bad_values(command: str, flag: Flag) -> Iterator[str]:
    yield from BAD_TEXTS
    if flag.kind in ("number", "measure"):
        yield from (each for each in BAD_NUMBERS if flag.kind == "number" or each != str(10**20))
    elif flag.name == "--log-dir" or (command == "replay" and flag.name == "--out"):  # may be there
        yield from (each for each in BAD_FILES if each != "folder")
    elif flag.kind == "file":
        yield from BAD_FILES
        if flag.name == "--json":
            yield "nowhere/x"
    elif flag.name != "--prompt":
        yield LONG


@pytest.mark.parametrize(
    "command", COMMANDS, ids=lambda command: f"{command.words} {command.others[:7]}".strip()
)
def test_a_hostile_value_is_refused_in_one_line(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    flags = list(command.flags())
    assert flags and len({flag.name for flag in flags}) == len(flags)
    wrong = []
    for flag in flags:
        for value in bad_values(command.words, flag):
            words = command.others.split()
            if not flag.name.startswith("--"):
                words = [word for word in words if word not in ("nowhere", "file", "0")]
                words += ["0"] if command.words == "recording show" and flag.name == "path" else []
            status = outcome([*command.words.split(), *words, *flag.words(value)])
            last = (capsys.readouterr().err.strip().splitlines() or [""])[-1]
            allowed = (1, 2) if flag.name in NAMES_AN_INPUT else (2,)
            if status not in allowed or not last or not last.isprintable():
                wrong.append((flag.name, value[:20], status, last[:100]))
    assert not wrong, "\n".join(map(ascii, wrong))


@pytest.mark.parametrize("command", [each for each in COMMANDS if each.others.startswith(SHOWN)])
def test_the_same_words_without_a_hostile_one_begin(command: Command) -> None:
    """Or nothing would be shown above."""
    assert outcome([*command.words.split(), *command.others.split()]) is None
