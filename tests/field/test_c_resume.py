"""Attacks and faults on runs that end early: what they leave, and how they go on.

Each case is a row: input, expected value, and the source of the expected value.
"""

from __future__ import annotations

import errno
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from raising import raises
from safetensors.torch import load_file

from lockstep import loops
from lockstep.cli.main import main
from lockstep.cli.train import parse
from lockstep.config.load import build, load_resumed, override, parse_toml
from lockstep.config.run import GRPORun
from lockstep.errors import CheckpointError, ConfigError, LockstepError, TrainError
from lockstep.observe.lock import OwnedFolder, remove_left
from lockstep.observe.metrics import JsonlWriter, check_ledger
from lockstep.observe.run_history import read_lines

TINY = """
kind = "grpo"
steps = 3
[model]
name = "shape:tiny-llama"
[data]
source = "ids"
max_prompt_tokens = 16
[rollout]
prompts_per_step = 2
group_size = 2
[rollout.sampling]
max_tokens = 4
[[rewards]]
name = "ids"
[train]
lr = 1e-3
[eval]
num_prompts = 2
every = 1
[checkpoint]
every = 1
background = false
export_at_end = false
[log]
tensorboard = false
display = "off"
"""


def tiny(folder: Path, text: str = TINY) -> GRPORun:
    run = build(parse_toml(text.encode(), origin="test") | {"run_dir": str(folder)}, origin="test")
    assert isinstance(run, GRPORun)
    return run


# 27. The state of a step's boundary


def drawing(at: int | None = None, end: Callable[[], None] = lambda: None) -> Callable[..., float]:
    """A reward that draws from every generator of its process; its call number `at`, counted from 1, first
    calls `end`."""
    calls = 0

    def reward(prompt: str, completion: str, row: dict[str, Any]) -> float:
        nonlocal calls
        calls += 1
        if calls == at:
            end()
        return (random.random() + random.gauss() + float(np.random.rand()) + torch.rand(()).item()) / 4

    return reward


def fail() -> None:
    raise ValueError("no reward")


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


PPO = TINY.replace('kind = "grpo"', 'kind = "ppo"')


@pytest.mark.parametrize(
    ("text", "at", "end"),
    [
        # 2 evaluations of 2 prompts; a step of 4 samples: calls 1-2, 3-6, 7-8, 9-12, 13-14, 15-18, 19-20
        pytest.param(TINY, 11, interrupt, id="GRPO, Ctrl-C in a step"),
        pytest.param(TINY, 17, fail, id="GRPO, a failing reward"),
        pytest.param(TINY, 8, interrupt, id="GRPO, Ctrl-C in an evaluation"),
        pytest.param(TINY, 14, fail, id="GRPO, a reward that fails in an evaluation"),
        pytest.param(TINY, 5, interrupt, id="GRPO, Ctrl-C in the first step"),
        pytest.param(PPO, 11, interrupt, id="PPO, Ctrl-C in a step"),
        pytest.param(PPO, 17, fail, id="PPO, a failing reward"),
    ],
)
def test_a_step_that_was_cut_short_leaves_nothing_in_its_checkpoint(
    text: str, at: int, end: Callable[[], None], tmp_path: Path
) -> None:
    """Expected: what the run has that nobody disturbed, to the bit."""
    loops.train(tiny(tmp_path / "straight", text), rewards=[drawing()])
    try:
        summary = loops.train(tiny(tmp_path / "cut", text), rewards=[drawing(at, end)])
        assert summary["outcome"] == "interrupted"
    except LockstepError as error:
        assert error.code == "reward-failed"
    run = load_resumed(tmp_path / "cut")
    assert isinstance(run, GRPORun)
    loops.train(run, resume=tmp_path / "cut", rewards=[drawing()])
    straight, cut = (outcome(tmp_path / name) for name in ("straight", "cut"))
    assert len(straight["metrics"]) == 7 and cut == straight


def outcome(run: Path) -> dict[str, Any]:
    """Metrics but for those of the machine, ledger, rollouts, and all tensors of the last checkpoint."""
    machine = ("timestamp", "time/", "throughput/", "memory/", "engine/")
    last = max((run / "checkpoints").glob("step-*"))
    return {
        "metrics": [
            {name: value for name, value in row.items() if not name.startswith(machine)}
            for row in read_lines(run / "metrics.jsonl")
        ],
        "ledger": read_lines(run / "ledger.jsonl"),
        "rollouts": {file.name: file.read_text() for file in (run / "rollouts").iterdir()},
        "state": {
            f"{file.relative_to(last)} {name}": tensor.tolist()
            for file in last.rglob("*.safetensors")
            for name, tensor in load_file(file).items()
        },
    }


# end of 27


# 28. Restarting a run that cannot be resumed


@pytest.fixture(scope="module")
def dead_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Make a run in `folder` whose disk is full at the metrics of step 2; `every`: its checkpoints."""
    made: dict[int, Path] = {}

    def make(folder: Path, every: int) -> Path:
        if every not in made:
            made[every] = tmp_path_factory.mktemp("dead")
            write = JsonlWriter.write

            def full(self: JsonlWriter, step: int, *args: Any, evaluation: str | None) -> None:
                if step == 2 and evaluation is None:
                    raise OSError(errno.ENOSPC, "No space left on device")
                write(self, step, *args, evaluation=evaluation)

            text = TINY.replace("every = 1\nbackground", f"every = {every}\nbackground")
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(JsonlWriter, "write", full)
                with raises(TrainError, "cannot-write") as caught:
                    loops.train(tiny(made[every] / "run", text))
            (made[every] / "run" / "said.txt").write_text(str(caught.value))
        shutil.copytree(made[every] / "run", folder / "run")
        for name in ("config.toml", "summary.json", "said.txt"):
            text = (folder / "run" / name).read_text().replace(str(made[every]), str(folder))
            (folder / "run" / name).write_text(text)
        (folder / "run/said.txt").rename(folder / "said.txt")
        return folder / "run"

    return make


ADVISORS: dict[str, list[str]] = {
    "the error": [],
    "status": ["status", "RUN"],
    "a start in its folder": ["train", "RUN/config.toml", "--run-dir", "RUN"],
    "--resume": ["train", "--resume", "RUN"],
}


@pytest.mark.parametrize(
    ("every", "who", "flag"),
    [
        # 2 steps are done. Checkpoints after every step, or none: 50 is above the 3 steps of the run.
        *((50, who, "--restart") for who in ADVISORS),
        *((1, who, "--resume") for who in ("the error", "status", "a start in its folder")),
    ],
)
def test_the_command_that_a_message_advises_brings_a_dead_run_to_its_end(
    every: int,
    who: str,
    flag: str,
    dead_run: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = dead_run(tmp_path, every)
    said = (tmp_path / "said.txt").read_text()
    if words := [word.replace("RUN", str(run)) for word in ADVISORS[who]]:
        main(words)
        captured = capsys.readouterr()
        said = captured.out + captured.err
    (command,) = set(re.findall(r"lockstep (train --re(?:start|sume) [^`\n]+)", said))
    assert shlex.split(command) == ["train", flag, str(run)]
    assert main(shlex.split(command)) == 0
    steps = [row["step"] for row in read_lines(run / "metrics.jsonl") if "evaluation" not in row]
    assert steps == [0, 1, 2] and (run / "before-restart-1").exists() == (flag == "--restart")
    if flag == "--restart":
        kept = read_lines(run / "before-restart-1/metrics.jsonl")
        assert [row["step"] for row in kept if "evaluation" not in row] == [0, 1]
        assert (run / "before-restart-1/rollouts/step-000001.jsonl").is_file()


def test_a_restart_takes_other_settings_and_keeps_every_history(
    dead_run: Callable[..., Path], tmp_path: Path
) -> None:
    run = dead_run(tmp_path, 1)
    for number in (1, 2):
        assert main(["train", "--restart", str(run), "--train.lr", "1e-4", "--steps", str(number)]) == 0
        assert len(read_lines(run / f"before-restart-{number}/ledger.jsonl")) in (12, 4)
    assert len(read_lines(run / "ledger.jsonl")) == 8 and "lr = 0.0001" in (run / "config.toml").read_text()
    assert (run / "before-restart-1/checkpoints/step-000002/complete.json").is_file()
    assert not (run / "before-restart-1/before-restart-1").exists()


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--restart", "nowhere"], "no-such-file"),
        (["--restart", "run", "--resume", "run"], "contradiction"),
        (["grpo", "--restart", "run"], "contradiction"),
        (["--restart", "run", "--checkpoint", "1"], "missing-setting"),
    ],
)
def test_a_restart_of_nothing_is_refused(
    words: list[str], code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.toml").write_text(TINY)
    with raises(ConfigError, code):
        parse(words)


# end of 28


# 31. Ledger, metrics and rollouts


def cut(file: str, keep: Callable[[list[str]], list[str]]) -> Callable[[Path], None]:
    """Keep only some of the lines of a file."""

    def change(run: Path) -> None:
        path = run / file
        path.write_text("".join(keep(path.read_text().splitlines(keepends=True))))

    return change


def remove(file: str) -> Callable[[Path], None]:
    return lambda run: (run / file).unlink()


@pytest.mark.parametrize(
    ("damage", "resumes", "lost", "warns"),
    [
        # The run has 3 steps of 4 samples, and was stopped after 2: 8 lines in the ledger.
        (lambda run: None, None, [], False),
        (remove("ledger.jsonl"), "step 0", ["step 0 has no lines", "step 1 has no lines"], True),
        (cut("ledger.jsonl", lambda _: []), "step 0", ["step 0 has no lines", "step 1 has no lines"], True),
        (cut("ledger.jsonl", lambda lines: lines[:4]), "step 1", ["step 1 has no lines"], True),
        (cut("ledger.jsonl", lambda lines: lines[4:]), "step 0", ["step 0 has no lines"], False),
        (
            cut("ledger.jsonl", lambda lines: lines[:-2]),
            "step 1",
            ["step 1 has samples of 1 prompts, but began with 2"],
            False,
        ),
        (
            # What the message of a refused resume advises: the run goes on, and the loss stays known.
            cut("ledger.jsonl", lambda _: ['{"step": 2, "since": 2}\n']),
            None,
            ["lines were lost: the ledger begins with step 2, but the run with step 0"],
            False,
        ),
        (
            remove("rollouts/step-000000.jsonl"),
            None,
            ["rollouts/ lacks the files of 1 step, beginning with step 0"],
            True,
        ),
        (
            cut("rollouts/step-000001.jsonl", lambda lines: lines[:3]),
            None,
            ["rollouts/step-000001.jsonl has 3 lines, but its step trained on 4 samples"],
            False,
        ),
    ],
)
def test_files_that_do_not_tell_of_the_same_steps_are_told(
    damage: Callable[[Path], None],
    resumes: str | None,
    lost: list[str],
    warns: bool,
    stopped_run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """resumes: the first step of which lines are missing, by counting them; None: the run goes on."""
    run = tmp_path / "run"
    shutil.copytree(stopped_run, run)
    damage(run)
    assert list(check_ledger(run).problems) == lost
    assert main(["status", str(run)]) == 0 and ("warning: " in capsys.readouterr().out) == warns
    assert main(["status", str(run), "--ledger"]) == bool(lost)
    config = override(load_resumed(run), {"steps": 3})
    assert isinstance(config, GRPORun)
    if resumes is None:
        assert loops.train(config, resume=run)["outcome"] == "finished"
        assert not lost or check_ledger(run).problems
    else:
        with raises(CheckpointError, f"incomplete: {resumes}"):
            loops.train(config, resume=run)


@pytest.fixture(scope="module")
def stopped_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stopped") / "run"
    loops.train(override(tiny(folder), {"steps": 2}))  # type: ignore[arg-type]
    return folder


def test_a_run_whose_metrics_were_emptied_is_not_begun_again(tmp_path: Path) -> None:
    """No checkpoint, no rollouts: only the ledger shows that a step is done."""
    text = TINY.replace("every = 1\nbackground", "every = 0\nsave_at_end = false\nbackground")
    run = override(tiny(tmp_path / "run", text), {"rollout.save": False, "steps": 2, "eval.every": 0})
    assert isinstance(run, GRPORun)
    loops.train(run)
    for name in ("metrics.jsonl", "summary.json"):
        (tmp_path / "run" / name).unlink()
    for file in (tmp_path / "run/rollouts").iterdir():
        file.unlink()
    ledger = (tmp_path / "run/ledger.jsonl").read_bytes()
    with raises(CheckpointError, "incomplete: checkpoints"):
        loops.train(run, resume=tmp_path / "run")
    assert (tmp_path / "run/ledger.jsonl").read_bytes() == ledger


# end of 31


# 32. Shared memory


def test_folders_in_memory_of_a_killed_process_go_with_the_next_start(tmp_path: Path) -> None:
    """Expected: by the pids: of these processes only this one and the sleeping one live."""
    mine, theirs = OwnedFolder("weights", tmp_path), tmp_path / "theirs"
    code = "import sys, time; from pathlib import Path\n"
    code += "from lockstep.observe.lock import OwnedFolder\n"
    code += "print(OwnedFolder('weights', Path(sys.argv[1])).path, flush=True); time.sleep(600)"
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        theirs = Path(process.stdout.readline().strip())
        (theirs / "bucket-0.safetensors").write_bytes(b"weights")
        assert remove_left(tmp_path) == []
        process.kill()
    name = theirs.name.split("-")
    elsewhere = tmp_path / "-".join([*name[:2], "0" * 8, *name[3:]])  # of another machine or container
    reused = tmp_path / "-".join(
        [*name[:3], str(os.getpid()), *name[4:]]
    )  # a pid that lives, of another start
    link = tmp_path / f"{theirs.name[:-8]}12345678"
    for folder in (elsewhere, reused, tmp_path / "lockstep-weights-x1y2z3ab", tmp_path / "lockstep-other"):
        folder.mkdir()
    link.symlink_to(elsewhere)
    left = {elsewhere.name, "lockstep-weights-x1y2z3ab", "lockstep-other", link.name, mine.path.name}
    if fork := os.fork():
        assert os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]) == 0
    else:
        mine.close()  # not the fork's
        os._exit(0)
    assert sorted(remove_left(tmp_path)) == sorted([theirs, reused])
    assert {path.name for path in tmp_path.iterdir()} == left
    mine.close()
    assert {path.name for path in tmp_path.iterdir()} == left - {mine.path.name}


# end of 32
