"""SFT runs of a tiny model with a tokenizer: exact resume, Ctrl-C, held-out loss."""

from __future__ import annotations

from pathlib import Path

import pytest
from loop_runs import FILE, FORWARD, Commands, everything, kill, metrics_of


@pytest.fixture(scope="module")
def straight_run(lockstep: Commands, sft_toml: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("straight") / "run"
    ended = lockstep("train", sft_toml, "--run-dir", run, cwd=run.parent)
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
        [kill(FORWARD, step=step, call=3, when="backward") for step in (2, 3, 5)],
        [kill(FILE, step=step, call=call) for step, call in ((3, 5), (3, 2), (5, 5))],
        [kill(FORWARD, step=step, call=2, when="backward", send="SIGINT") for step in (0, 1, 3)],
    ],
    ids=["killed in backward", "killed in a save", "Ctrl-C"],
)
def test_a_broken_off_run_goes_on_exactly(orders, lockstep, sft_toml, straight_run, tmp_path):
    lockstep.broken_off(sft_toml, tmp_path / "run", orders)
    assert everything(tmp_path / "run") == everything(straight_run)
