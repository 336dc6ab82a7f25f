"""The ledger of a run: samples that were lost or trained twice are named."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from raising import raises

from lockstep.cli.main import main
from lockstep.errors import DataError
from lockstep.loop.rollout_rows import ledger_rows
from lockstep.observe.metrics import MetricsLog, check_ledger
from lockstep.observe.run_dir import RunDir
from lockstep.observe.run_history import read_lines
from lockstep.schema.rollout import SampleRecord

Rows = list[dict[str, Any]]


def row(name: str, **changed: Any) -> dict[str, Any]:
    step = int(name.partition("/")[0])
    fields = {"policy_versions": [step], "attempt": 1, "trained_step": step, "dropped": None}
    return {"id": name, "step": step, "seed": 7} | fields | changed


def good() -> Rows:
    """Two steps of two prompts with two samples, and a second round in step 1, for prompt 4."""
    rows = [row(f"0/{prompt}/{sample}") for prompt in (5, 2) for sample in (0, 1)]
    rows += [row("1/3/0", attempt=2), row("1/3/1")]
    rows += [row(f"1/4/{sample}", trained_step=None, dropped="no-signal") for sample in (0, 1)]
    return [*rows, row("1/4/2"), row("1/4/3")]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "config.toml").write_text("steps = 2\n[rollout]\nprompts_per_step = 2\ngroup_size = 2\n")
    lines = [{"step": step, "rollout/samples": 4.0} for step in (0, 1)]
    lines.insert(1, {"step": 1, "evaluation": "during"})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def problems(run: Path, rows: Rows) -> list[str]:
    (run / "ledger.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    return list(check_ledger(run).problems)


def test_a_whole_ledger_has_no_problems(run: Path) -> None:
    assert problems(run, good()) == []
    found = check_ledger(run)
    assert (found.steps, found.samples, found.trained, found.asked_again) == (2, 10, 8, 1)
    assert found.dropped == {"no-signal": 2}
    # Of the step that was going on when the run was killed.
    assert problems(run, [*good(), row("2/9/0")]) == []


def test_steps_of_a_version_without_a_ledger_are_not_missed(run: Path) -> None:
    rows = [each for each in good() if each["step"] == 1]
    assert problems(run, rows) == ["step 0 has no lines"]
    assert problems(run, [{"step": 1, "since": 1}, *rows]) == []
    assert check_ledger(run).since == 1 and " in 1 step since step 1: " in check_ledger(run).text()


def test_a_resumed_run_without_a_ledger_says_since_when_it_has_one(tmp_path: Path) -> None:
    with RunDir.create(tmp_path / "run", config_toml="", manifest={}) as folder:
        for first in (3, 4):
            with contextlib.closing(MetricsLog.of_run(folder, tensorboard=False, first_step=first)) as log:
                log.write_ledger([row(f"{first}/0/0")])
        names = [each.get("id", each.get("since")) for each in read_lines(folder.ledger)]
        assert names == [3, "3/0/0", "4/0/0"]
        folder.ledger.open("a").write("\n")  # nobody writes such a line
        for step, left in ((5, 3), (4, 2), (0, 0)):
            folder.rewind(step)
            assert len(read_lines(folder.ledger)) == left


def without(name: str) -> Callable[[Rows], Rows]:
    return lambda rows: [each for each in rows if not each["id"].startswith(name)]


def changed(name: str, **fields: Any) -> Callable[[Rows], Rows]:
    return lambda rows: [each | fields if each["id"] == name else each for each in rows]


@pytest.mark.parametrize(
    ("doctor", "said"),
    [
        (without("0/2/1"), ["sample 0/2/1 was lost: it has no line"]),
        (without("1/4/2"), ["sample 1/4/2 was lost: it has no line"]),
        (lambda rows: [*rows, row("0/5/1")], ["sample 0/5/1 was trained 2 times"]),
        (
            lambda rows: [*rows, row("1/4/0", trained_step=None, dropped="no-signal")],
            ["sample 1/4/0 has 2 lines"],
        ),
        (without("0/5"), ["step 0 has samples of 1 prompts, but began with 2"]),
        (without("0/"), ["step 0 has no lines"]),
        (
            lambda rows: [each for each in rows if each["id"] not in ("1/4/2", "1/4/3")],
            ["step 1 trained on 4.0 samples, but the ledger has 2"],
        ),
        (
            lambda rows: [*rows, row("7/1/0"), row("7/1/1")],
            ["step 7 is in the ledger but not in metrics.jsonl"],
        ),
        (changed("1/3/1", trained_step=None), ["line 6: sample 1/3/1 was neither trained nor dropped"]),
        (changed("1/3/1", trained_step=0), ["line 6: sample 1/3/1 was trained in step 0"]),
        (changed("1/3/1", policy_versions=[2]), ["line 6: sample 1/3/1 has policy_versions [2]"]),
        (changed("1/3/1", attempt=0), ["line 6: sample 1/3/1 has attempt 0"]),
        (changed("1/3/1", id="1/3"), ["line 6: id '1/3' is not STEP/PROMPT/SAMPLE"]),
    ],
)
def test_what_is_wrong_is_named(run: Path, doctor: Callable[[Rows], Rows], said: list[str]) -> None:
    assert problems(run, doctor(good()))[: len(said)] == said


def test_the_command_fails_and_says_the_sample(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with raises(DataError, "no-such-file"):
        check_ledger(run)
    assert problems(run, good()) == [] and main(["status", str(run), "--ledger"]) == 0
    assert "8 trained, 2 dropped (no-signal)" in capsys.readouterr().out
    problems(run, without("0/2/1")(good()))
    file = run / "status.json"
    assert main(["status", str(run), "--ledger", "--json", str(file)]) == 1
    assert "sample 0/2/1 was lost" in capsys.readouterr().out
    assert json.loads(file.read_text())[0]["ledger"]["problems"] == ["sample 0/2/1 was lost: it has no line"]
    assert main(["status", str(run)]) == 0


def test_rows_say_what_became_of_samples_and_a_resumed_run_writes_them_again(tmp_path: Path) -> None:
    def asked(sample: int, **more: Any) -> SampleRecord:
        return SampleRecord(
            prompt_index=5, sample=sample, seed=70 + sample, policy_versions=(0,), attempt=1, **more
        )

    rows = ledger_rows(0, [asked(0), asked(1, dropped="reward"), asked(2), asked(3)], {70: 1, 72: 2})
    assert [(each["id"], each["trained_step"], each["dropped"]) for each in rows] == [
        ("0/5/0", 0, None),
        ("0/5/1", None, "reward"),
        ("0/5/2", 0, None),
        ("0/5/2", 0, None),
        ("0/5/3", None, None),
    ]
    with RunDir.create(tmp_path / "run", config_toml="", manifest={}) as folder:
        metrics = MetricsLog.of_run(folder, tensorboard=False)
        for step in (0, 1, 2):
            metrics.write_ledger([row(f"{step}/1/{sample}") for sample in (0, 1)])
        metrics.sync()
        metrics.close()
        folder.rewind(2)
        kept = [json.loads(line)["id"] for line in folder.ledger.read_text().splitlines()]
    assert kept == ["0/1/0", "0/1/1", "1/1/0", "1/1/1"]
