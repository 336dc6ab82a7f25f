"""The README's demo block holds the numbers of the runs that it was made from."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load_script(name: str) -> ModuleType:
    import sys

    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses looks its module up there
    spec.loader.exec_module(module)
    return module


demo_report = load_script("demo_report")


def evaluation(step: int, accuracy: float) -> dict[str, Any]:
    return {
        "step": step,
        "strict_accuracy": accuracy - 0.1,
        "lenient_accuracy": accuracy,
        "mean_reward": accuracy - 0.05,
        "num_prompts": 2,
        "lenient_accuracy/sums": None,
        "lenient_accuracy/differences": accuracy / 2,
    }


def write_run(folder: Path, *, seed: int, after: float, outcome: str = "finished") -> Path:
    (folder / "rollouts").mkdir(parents=True)
    (folder / "config.toml").write_text(f"seed = {seed}\n[eval]\nbefore_max_tokens_factor = 2\n")
    manifest = {
        "lockstep": "0.1.0",
        "torch": "2.13.0",
        "transformers": "5.23",
        "python": "3.11.9",
        "cpu_threads": 2,
        "axes": {"dtype": "bfloat16"},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    summary = {
        "outcome": outcome,
        "steps": 2,
        "wall_seconds": 630.0,
        "eval_before": evaluation(0, 0.25),
        "eval_after": evaluation(2, after),
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    lines = [
        {"step": 0, "evaluation": "before", "eval/lenient_accuracy": 0.25},
        {"step": 0, "reward/mean": 0.2},
        {"step": 1, "reward/mean": 0.6},
        {"step": 2, "evaluation": "after", "eval/lenient_accuracy": after},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, texts in (("before", ["4", "12, or so"]), ("after", ["4", "13"])):
        rows = [
            {
                "prompt_index": i,
                "prompt": f"sum {i}",
                "completion": text,
                "token_ids": [1],
                "reward": float(text in ("4", "13")),
            }
            for i, text in enumerate(texts)
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "rollouts" / f"evaluation-{name}.jsonl").write_text(text)
    return folder


def test_table_machine_completions_and_curve(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"run-{seed}", seed=seed, after=0.5 + seed / 8) for seed in (0, 1)]
    readme, page = tmp_path / "README.md", tmp_path / "demo.md"
    for file in (readme, page):
        file.write_text("# Title\n\n<!-- demo:begin -->\nold\n<!-- demo:end -->\n\nrest\n")
    image = tmp_path / "docs" / "demo.png"
    arguments = [*map(str, runs), "--readme", str(readme), "--page", str(page), "--image", str(image)]
    arguments += ["--cpu", "A CPU"]
    assert demo_report.main(arguments) == 0
    text, shown = page.read_text(), readme.read_text()
    assert (
        "| 1 | 0.150 -> 0.525 (+0.375) | 0.250 -> 0.625 (+0.375) | — | 0.125 -> 0.312 (+0.188) "
        "| 0.200 -> 0.575 (+0.375) | 10.5 min |" in text
    )
    assert "| seed | strict | lenient | lenient, sums | lenient, differences | mean reward | wall" in text
    assert "A CPU, 2 threads, bfloat16; lockstep 0.1.0, torch 2.13.0" in text
    assert "![mean reward per step, and held-out accuracy](docs/demo.png)" in shown
    improved, same = text.index("before  [0.00] '12, or so'"), text.index("before  [1.00] '4'")
    assert improved < same, "what changed comes first"
    for each in (text, shown):
        assert "old" not in each and each.startswith("# Title\n") and each.endswith("\n\nrest\n")
    assert image.read_bytes().startswith(b"\x89PNG") and image.stat().st_size > 5000
    demo_report.main(arguments)
    assert (page.read_text(), readme.read_text()) == (text, shown)


def test_the_log_is_cut_to_its_main_lines() -> None:
    printed = ["installing", "run directory: x", "evaluation before", "  [0] 'a'", "step 1/3  r", "  [0] 'b'"]
    printed += ["step 2/3  r", "  [1] 'c'", "step 3/3  r", "evaluation after", "train: finished"]
    busy = [*printed[:2], "step 1/3  evaluate 30 s ...", *printed[2:]]
    assert demo_report.console(busy, command="make demo") == demo_report.console(printed, command="make demo")
    assert demo_report.console(printed, command="make demo").splitlines() == [
        "<!-- test: listed: six minutes -->",
        "```console",
        "$ make demo",
        *printed[1:5],
        "...",
        *printed[7:],
        "```",
    ]
    with pytest.raises(SystemExit, match="no line of a step"):
        demo_report.console(["nothing"], command="make demo")


def test_a_run_that_did_not_finish_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", seed=0, after=0.5, outcome="interrupted")
    with pytest.raises(SystemExit, match="did not finish"):
        demo_report.main([str(run), "--readme", str(tmp_path / "README.md")])
    with pytest.raises(SystemExit, match="once each"):
        demo_report.filled("no marks", "block")
