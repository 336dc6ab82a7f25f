"""Four real ranks save and load together; what each case is, is in checkpoint_worker.py."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

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
