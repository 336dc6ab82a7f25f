"""Ten tasks of a new user, each a script of examples/tasks with commands of the pages that it names."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from selected import exhaustive

ROOT = Path(__file__).resolve().parents[2]
TASKS = ROOT / "examples" / "tasks"
sys.path.insert(0, str(ROOT / "tests" / "docs"))  # for warm_lockstep

from warm_lockstep import warm_lockstep  # noqa: E402

COLD = ("kill_and_resume", "sft_and_chat")
"""Started anew: what is killed by its id has to be the run itself, and a chat's threads outlive no fork."""
EXPECTED = {
    "grpo_own_reward": [r"train: finished, 2 steps, .*runs/own-reward"],
    "sft_and_chat": [r"train: finished, 25 steps, .*runs/sft", r"yes"],
    "dpo": [r"evaluation before .*accuracy", r"train: finished, 4 steps, .*runs/dpo"],
    "reward_model_and_ppo": [r"train: finished, 3 steps, .*runs/rm", r"train: finished, 2 steps, .*runs/ppo"],
    "export": [r"sample: 2 completions, 12 tokens", r"[\d,]+ parameters, torch.float32"],
    "kill_and_resume": [r"resuming after 2 steps", r"train: finished, 4 steps", r"none lost"],
    "two_ranks": [r"2 ranks on", r"train: finished, 2 steps", r"train: finished, 3 steps"],
    "own_advantage": [r"train: finished, 2 steps, .*runs/halves"],
    "own_loop": [r"^0 0\.\d+ \d", r"^2 0\.\d+ \d"],
    "compare_two_runs": [r"< lr = 0.003", r"> lr = 0.001", r"parity: "],
}
"""Lines of each script's output, in their order."""


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with warm_lockstep(tmp_path_factory.mktemp("warm")) as folder:
        yield folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "task", exhaustive(EXPECTED, quick=("grpo_own_reward", "kill_and_resume", "own_loop"))
)
def test_a_task_does_what_it_says(task: str, tmp_path: Path, warm: Path) -> None:
    for path in ROOT.iterdir():  # as in a clone
        if path.name not in (".git", "runs"):
            (tmp_path / path.name).symlink_to(path)
    first = [] if task in COLD else [str(warm)]
    folders = [*first, str(Path(sys.executable).parent), os.environ["PATH"]]
    environment = os.environ | {"PATH": os.pathsep.join(folders), "OMP_NUM_THREADS": "1", "COLUMNS": "110"}
    done = subprocess.run(
        ["bash", f"examples/tasks/{task}.sh"],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    rest = iter(done.stdout.splitlines())
    for pattern in EXPECTED[task]:
        assert any(re.search(pattern, line) for line in rest), f"no {pattern!r} in:\n{done.stdout}"


@pytest.mark.parametrize("script", sorted(TASKS.iterdir()), ids=lambda script: script.stem)
def test_a_task_has_at_most_one_command_that_its_pages_do_not_show(script: Path) -> None:
    text = script.read_text(encoding="utf-8")
    assert script.stem in EXPECTED
    named = re.findall(r"(?:docs/[\w/-]+|README)\.md", text)
    pages = " ".join((ROOT / page).read_text(encoding="utf-8") for page in named)
    commands = re.findall(r"(?:^|\| )(lockstep \w+(?: compare)?|python \S+\.py)", text, re.MULTILINE)
    assert commands
    assert sum(command not in pages for command in set(commands)) <= 1
