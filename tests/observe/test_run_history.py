"""What the files of a run say about going on with it."""

import json
from pathlib import Path

import pytest

from lockstep.observe.run_history import gaps, way_on


@pytest.mark.parametrize(
    ("manifest", "flags"),
    [
        # by hand: what a run writes is believed, and nothing else becomes part of a command
        ('{"resume_flags": "--ranks 2"}', " --ranks 2"),
        (
            '{"resume_flags": "(on 16 ranks, under the launcher that started them)"}',
            " (on 16 ranks, under the launcher that started them)",
        ),
        ('{"resume_flags": ""}', ""),
        ('{"resume_flags": "--ranks 2; rm -rf ~"}', ""),
        ('{"resume_flags": ["--ranks"]}', ""),
        ("[" * 100_000, ""),
        ("{", ""),
    ],
)
def test_a_command_has_flags_of_the_manifest_only_as_a_run_writes_them(
    manifest: str, flags: str, tmp_path: Path
) -> None:
    (tmp_path / "manifest.json").write_text(manifest)
    assert way_on(tmp_path) == f"lockstep train --resume {tmp_path}{flags}"


def test_steps_that_a_running_run_does_while_it_is_looked_at_are_no_gaps(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('kind = "grpo"\n[rollout]\nsave = true\n')
    (tmp_path / "manifest.json").write_text('{"ledger_since": 0}')
    (tmp_path / "rollouts").mkdir()
    for step in range(6):
        (tmp_path / "rollouts" / f"step-{step:06d}.jsonl").write_text("")
    lines = [json.dumps({"step": step}) for step in range(6)]
    (tmp_path / "ledger.jsonl").write_text("\n".join(lines) + "\n")
    read = range(3)  # of metrics.jsonl, before it did three steps more
    assert gaps(tmp_path, read, running=True) == []
    assert len(gaps(tmp_path, read)) == 3  # the ledger's step 5, the rollouts of steps 4 and 5
    (tmp_path / "rollouts" / "step-000001.jsonl").unlink()
    assert gaps(tmp_path, read, running=True) == [
        "rollouts/ lacks the files of 1 step, beginning with step 1"
    ]
