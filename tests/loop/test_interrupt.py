"""Ctrl-C and SIGTERM at every stage: what was done is kept, the way on is told, and going on is exact."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from loop_runs import FILE, FORWARD, OPTIMIZER, Commands, Ended, everything, kill, on_pairs
from starting import until, wait_for

from lockstep.loop.interrupt import Interrupt

GENERATE = "lockstep.engine.hf.engine:Generation._step"

Straight = Callable[..., dict[str, Any]]


def send(target: str, **order: Any) -> dict[str, Any]:
    return kill(target, **{"send": "SIGINT"} | order)


def goes_on_exactly(
    lockstep: Commands, straight: Straight, ended: Ended, run: Path, *flags: str, toml: Path | None = None
) -> None:
    """The command that the interrupted run names brings it to the same end as an uninterrupted one."""
    command = ended.verdict.rpartition("resume with: lockstep ")[2].split()
    assert command == ["train", "--resume", str(run)], ended.out + ended.err
    assert (run / "lock").read_text() == ""
    lockstep(*command, cwd=run.parent)
    assert everything(run) == (straight(*flags) if toml is None else straight(*flags, toml=toml))


def test_a_ranks_own_signal_after_anothers_is_its_first():
    """A launcher signals its ranks one by one, so one may hear of the stop from another rank before."""
    asked: list[str] = []
    with Interrupt() as interrupt, interrupt.deferred(lambda: asked.append("stop")):
        interrupt.request(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert (interrupt.requested, interrupt.at_once, asked) == (True, False, ["stop"])
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert interrupt.at_once


@pytest.mark.parametrize(
    ("orders", "code", "done", "told"),
    [
        pytest.param([send(GENERATE, call=3)], 130, 0, "saved", id="evaluation before"),
        pytest.param([send(GENERATE, step=2, call=5)], 130, 2, "saved", id="generation"),
        pytest.param([send(FORWARD, step=2, when="backward")], 130, 3, "saved", id="backward"),
        pytest.param([send(GENERATE, step=1, call=20)], 130, 2, "saved", id="evaluation during"),
        pytest.param([send(GENERATE, step=3, call=20)], 130, 4, "saved", id="evaluation after"),
        pytest.param([send(OPTIMIZER, step=2, send="SIGTERM")], 143, 3, "saved", id="SIGTERM"),
        pytest.param(
            [send("lockstep.models.load:_eos_token_ids")],
            *(130, 0, "stopped at once, without a checkpoint"),
            id="start-up",
        ),
        pytest.param(
            [send("lockstep.models.load:_eos_token_ids", send="SIGTERM")],
            *(143, 0, "stopped at once, without a checkpoint"),
            id="SIGTERM at start-up",
        ),
        pytest.param(
            [send(FORWARD, step=2), send(OPTIMIZER, step=2)],
            *(130, 2, "stopped at once; the last checkpoint is of step 2"),
            id="twice, in training",
        ),
        pytest.param(
            [send(GENERATE, step=3), send(FILE, step=3, call=4)],
            *(130, 2, "stopped at once; the last checkpoint is of step 2"),
            id="twice, in the save",
        ),
    ],
)
def test_an_interrupted_run_says_how_to_go_on_and_does(
    orders, code, done, told, lockstep, straight, tiny_toml, tmp_path
):
    run, file = tmp_path / "run", tmp_path / "summary.json"
    ended = lockstep(
        "train", tiny_toml, "--run-dir", run, "--json", file, cwd=tmp_path, signals=orders, code=code
    )
    assert ended.err == ""
    assert told in ended.out and ended.verdict.startswith(f"train: interrupted, {done} steps")
    assert json.loads(file.read_text())["outcome"] == "interrupted"
    goes_on_exactly(lockstep, straight, ended, run)


def test_ctrl_c_in_the_last_save_lets_the_run_finish(lockstep, straight, tiny_toml, tmp_path):
    run = tmp_path / "run"
    orders = [send("lockstep.loop.run:Run.finish")]
    ended = lockstep("train", tiny_toml, "--run-dir", run, cwd=tmp_path, signals=orders)
    assert ended.verdict.startswith("train: finished, 4 steps")
    assert everything(run) == straight()


def test_a_child_process_of_a_reward_goes_with_the_run(lockstep, tiny_toml, tmp_path):
    """A reward that started a process of its own, as the verifiers do, on an interrupted run."""
    (tmp_path / "spawning.py").write_text(
        "import os\n"
        "from lockstep.rollout.verifiers import VerifierProcess\n"
        "process = VerifierProcess()\n"
        "def reward(prompt, completion, row):\n"
        "    score = process.math('4', '$4$', timeout=30)[0]\n"
        "    child = process._processes['math_verify'].pid\n"
        "    open('children', 'w').write(f'{os.getpid()} {child}')\n"
        "    return score + len(completion) % 2\n"
    )
    orders = [send(FORWARD, step=0)]
    argv = ("train", tiny_toml, "--run-dir", tmp_path / "run", "--rewards", "spawning:reward")
    lockstep(*argv, "--eval.no-before", cwd=tmp_path, signals=orders, code=130)
    for pid in (tmp_path / "children").read_text().split():
        assert wait_for(lambda pid=pid: not Path("/proc", pid).exists()), f"process {pid} was left behind"


def test_a_running_run_is_not_resumed_or_started_twice(lockstep, tiny_toml, tmp_path):
    """The first process stops itself (SIGSTOP) in a generation; the others are refused; then it goes on."""
    from lockstep.cli.main import main

    run = tmp_path / "run"
    refused: list[int] = []

    def meanwhile(pid: int) -> None:
        stat = Path(f"/proc/{pid}/stat")
        until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", seconds=60)
        refused.append(main(["train", "--resume", str(run)]))
        refused.append(main(["train", str(tiny_toml), "--run-dir", str(run)]))
        os.kill(pid, signal.SIGCONT)

    orders = [send(GENERATE, step=1, send="SIGSTOP")]
    argv = ("train", tiny_toml, "--run-dir", run, "--steps", "2", "--log.display", "off")
    ended = lockstep(*argv, cwd=tmp_path, signals=orders, meanwhile=meanwhile)
    assert refused == [2, 2]
    assert ended.out.count("\n") == 1 and ended.verdict.startswith("train: finished, 2 steps")


DRAWS = ("--model.lora.rank", "4", "--model.lora.dropout", "0.2")
SCORE = "lockstep.rollout.reward_process:RewardWorker.one"
PAIRS = [{"prompt": f"{i} + 1 =", "chosen": f" {i + 1}", "rejected": f" {i}"} for i in range(17)]


@pytest.mark.parametrize("kind", [pytest.param("sft", marks=pytest.mark.exhaustive), "dpo"])
def test_a_run_on_documents_with_dropout_goes_on_exactly(kind, lockstep, straight, sft_toml, tmp_path):
    toml = sft_toml if kind == "sft" else on_pairs(sft_toml, tmp_path, kind, PAIRS)
    orders = [
        send(FORWARD, step=1, call=2, when="backward"),
        kill(FORWARD, step=3, when="after"),
        send(OPTIMIZER, step=4),
    ]
    lockstep.broken_off(toml, tmp_path / "run", orders, *DRAWS)
    assert everything(tmp_path / "run") == straight(*DRAWS, toml=toml)


def test_a_reward_that_draws_in_its_own_process_goes_on_exactly(lockstep, tiny_toml, tmp_path):
    """16 rewards in a step, 4 in an evaluation: stopped and killed in both."""
    (tmp_path / "drawing.py").write_text(
        "import random\ndef reward(prompt, completion, row):\n    return random.random()\n"
    )
    flags = ("--rewards", "drawing:reward")
    lockstep("train", tiny_toml, "--run-dir", tmp_path / "straight", *flags, cwd=tmp_path)
    orders = [send(SCORE, step=2, call=7), kill(SCORE, step=3, call=5), send(SCORE, step=3, call=18)]
    lockstep.broken_off(tiny_toml, tmp_path / "run", orders, *flags)
    assert everything(tmp_path / "run") == everything(tmp_path / "straight")
