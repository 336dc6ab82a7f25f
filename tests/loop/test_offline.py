"""SFT runs of a tiny model with a tokenizer: exact resume, Ctrl-C, held-out loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from loop_runs import Commands, everything, metrics_of

FORWARD = "lockstep.train.loss_module:LossModule.forward"
FILE = "lockstep.train.state.files:_HashingFile.write"


def moment(target: str, **order: Any) -> dict[str, Any]:
    return {"target": target, "send": "SIGKILL"} | order


@pytest.fixture(scope="module")
def straight_run(lockstep: Commands, sft_toml: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("straight") / "run"
    ended = lockstep("train", sft_toml, "--run-dir", run, cwd=run.parent)
    assert ended.code == 0, ended.out + ended.err
    assert ended.verdict.startswith("train: finished, 6 steps") and ", loss " in ended.verdict
    return run


def test_it_learns_and_is_evaluated_before_during_and_after(straight_run: Path) -> None:
    rows = metrics_of(straight_run)
    evaluations = [row for row in rows if "evaluation" in row]
    assert [(e["step"], e["evaluation"]) for e in evaluations] == [
        (0, "before"),
        (2, "during"),
        (4, "during"),
        (6, "after"),
    ]
    losses = [e["eval/loss"] for e in evaluations]
    assert losses[-1] < losses[0] - 0.5
    assert [row["step"] for row in rows if "evaluation" not in row] == list(range(6))


@pytest.mark.parametrize(
    "orders",
    [
        [moment(FORWARD, step=step, call=3, when="backward") for step in (2, 3, 5)],
        [moment(FILE, step=step, call=call) for step, call in ((3, 5), (3, 2), (5, 5))],
        [moment(FORWARD, step=step, call=2, when="backward", send="SIGINT") for step in (0, 1, 3)],
    ],
    ids=["killed in backward", "killed in a save", "Ctrl-C"],
)
def test_a_broken_off_run_goes_on_exactly(
    orders: list[dict[str, Any]], lockstep: Commands, sft_toml: Path, straight_run: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    argv: tuple[str | Path, ...] = ("train", sft_toml, "--run-dir", run)
    for order in orders:
        ended = lockstep(*argv, cwd=tmp_path, signals=[order])
        assert ended.code == {"SIGKILL": -9, "SIGINT": 130}[order["send"]], ended.out + ended.err
        argv = ("train", "--resume", run)
    ended = lockstep(*argv, cwd=tmp_path)
    assert ended.code == 0, ended.out + ended.err
    assert everything(run) == everything(straight_run)
