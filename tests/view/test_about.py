"""What a run is: settings beside their defaults, evaluated prompts, log and reports."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any

from lockstep.view.about import evaluated_prompts, find_reports, read_log, settings
from lockstep.view.rollout_reader import RolloutReader

LOG = """\
2026-01-01 00:00:01 === started: rank 0 of 1
2026-01-01 00:00:02 warning: rollouts/ lacks the files of 2 steps
2026-01-01 00:00:03 WARNING torch.x: slow path
2026-01-01 00:00:04 /lib/a.py:12: UserWarning: old name
2026-01-01 00:00:05 step 1/10  reward 0.5  warning: no
2026-01-01 00:00:06 Traceback (most recent call last):
2026-01-01 00:00:06   File "a.py", line 1, in f
2026-01-01 00:00:06     g()
2026-01-01 00:00:06 lockstep.errors.DataError: row 3
2026-01-01 00:00:06 error code: wrong-row
2026-01-01 00:00:07 ERROR lockstep.x: bad
"""


def test_settings_that_differ_from_the_defaults() -> None:
    problems = list[str]()
    config = {
        "kind": "grpo",
        "seed": 0,
        "train": {"lr": 0.5, "betas": [0.9, 0.999]},
        "data": {"task": {"a": 1}},
    }
    rows = settings(config, problems)
    assert [(row.key, row.value, row.default, row.differs) for row in rows] == [
        ("kind", '"grpo"', '"grpo"', False),
        ("seed", "0", "0", False),
        ("train.lr", "0.5", "1e-06", True),
        ("train.betas", "[0.9, 0.999]", "[0.9, 0.999]", False),
        ("data.task.a", "1", None, True),
    ]
    assert problems == []
    (_, day) = settings({"kind": "grpo", "day": date(2026, 1, 2)}, [])
    assert (day.key, day.value) == ("day", "2026-01-02")  # TOML that Lockstep does not write
    (row,) = settings({"kind": "later"}, problems)
    assert not row.differs and "'later' are not known" in problems[0]


def test_errors_and_warnings_of_all_ranks_in_order(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-0.log").write_text(LOG)
    (tmp_path / "logs" / "rank-1.log").write_text("2026-01-01 00:00:03 CRITICAL x: y\n\xff")
    lines = [(line.rank, line.time[-2:], line.level, line.text) for line in read_log(tmp_path)]
    assert lines == [
        (0, "02", "warning", "warning: rollouts/ lacks the files of 2 steps"),
        (0, "03", "warning", "WARNING torch.x: slow path"),
        (1, "03", "error", "CRITICAL x: y"),
        (0, "04", "warning", "/lib/a.py:12: UserWarning: old name"),
        (0, "06", "error", "lockstep.errors.DataError: row 3"),
        (0, "07", "error", "ERROR lockstep.x: bad"),
    ]


def evaluation(run: Path, name: str, answers: dict[int, str]) -> None:
    def row(index: int, answer: str) -> dict[str, Any]:
        ids: dict[str, Any] = {"prompt_token_ids": [1], "token_ids": [2]}
        texts = {"prompt": f"question {index}", "completion": answer}
        return {"step": 0, "prompt_index": index, "sample": 0, **texts, **ids}

    (run / "rollouts").mkdir(exist_ok=True)
    lines = "".join(json.dumps(row(*each)) + "\n" for each in answers.items())
    (run / "rollouts" / f"evaluation-{name}.jsonl").write_text(lines)


def test_completions_before_and_after_stand_beside_each_other(tmp_path: Path) -> None:
    evaluation(tmp_path, "before", {4: "no", 5: "maybe"})
    evaluation(tmp_path, "step-000010", {4: "later"})
    reader = RolloutReader(tmp_path, cache=tmp_path / "cache")
    assert reader.evaluations() == ["before", "step-000010"]
    evaluation(tmp_path, "after", {5: "yes", 6: "new"})
    assert reader.evaluations() == ["before", "step-000010", "after"]

    def said(one: Any) -> str | None:
        return None if one is None else one.spans[1].text

    pairs = [(each.prompt, said(each.before), said(each.after)) for each in evaluated_prompts(reader)]
    assert pairs == [
        ("question 4", "no", None),
        ("question 5", "maybe", "yes"),
        ("question 6", None, "new"),
    ]


def test_reports_in_the_folder_of_a_run(tmp_path: Path) -> None:
    files = (
        *("matrix-out/matrix.html", "matrix-out/matrix.json", "parity/deep/engines.json", "bench.json"),
        *("logs/ranks/20260101-000000/hang.json", "export/matrix.html", "a/b/c/parity.html"),
    )
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    assert sorted((one.kind, one.name, one.html) for one in find_reports(tmp_path)) == [
        ("bench", "bench.json", False),
        ("hang", "logs/ranks/20260101-000000/hang.json", False),
        ("matrix", "matrix-out/matrix.html", True),
        ("parity", "parity/deep/engines.json", False),
    ]
