"""Four real ranks save and load together; what each case is, is in checkpoint_worker.py."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from lockstep.config.train import CheckpointConfig
from lockstep.loop.checkpoint import CheckpointManager, verify
from lockstep.ranks.launch import launch_command

WORKER = Path(__file__).with_name("checkpoint_worker.py")
CASES = [
    element.id
    for node in ast.parse(WORKER.read_text()).body
    if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CASES"
    for element in ast.walk(node.value)
    if isinstance(element, ast.Name)
]


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Case to the ranks on which it held; all cases in one launch, for each costs a start of torch."""
    out = tmp_path_factory.mktemp("ranks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUT", str(out))
        launch_command([sys.executable, str(WORKER)], ranks=4, timeout=200, log_dir=out / "logs")
    found: dict[str, list[str]] = {}
    for file in sorted(out.glob("rank-*.txt")):
        for line in file.read_text().splitlines():
            found.setdefault(line.split()[0], []).append(file.stem)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_four_ranks(case: str, held: dict[str, list[str]]) -> None:
    assert held.get(case) == [f"rank-{rank}" for rank in range(4)], "the rank's error is shown above"


@pytest.mark.slow
def test_a_rank_that_is_killed_leaves_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    command = [sys.executable, str(WORKER), "killed"]
    assert launch_command(command, ranks=2, timeout=120, log_dir=tmp_path / "logs") != 0
    assert "rank 1" in capfd.readouterr().err and not list(tmp_path.glob("rank-*.txt"))
    folder = tmp_path / "killed"
    assert len(list(folder.glob(".saving-step-000002-*/*"))) > 0
    checkpoints = CheckpointManager(folder, CheckpointConfig())
    assert [p.name for p in folder.iterdir()] == ["step-000001"] and checkpoints.steps() == [1]
    verify(folder / "step-000001")
