"""Runs that no training writes: hostile text, damage, other versions, many steps."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

HOSTILE = (
    "<script>window.hurt = true</script><img src=x onerror='window.hurt = true'>",
    "</div></main></textarea>\"'&amp;{{ 7 * 7 }}",
    "\x1b[31mred\x1b[0m\x07\x00",
    "\u05e9\u05dc\u05d5\u05dd \u202eevil\u2066",
)
LONG_TOKENS = 20_000
LONG_STEPS = 5_000
SPIKE = 3_217
"""Step of the run of LONG_STEPS with the largest loss."""
CONFIG = 'kind = "grpo"\nsteps = {}\n[model]\nname = "shape:tiny-llama"\n[algorithm]\nname = "grpo"\n'
NEWER = "99.0.0"


def write(folder: Path) -> None:
    """Write all of them into a folder."""
    for number, text in enumerate(HOSTILE):
        rows = [rollout(0, number, sample, text) for sample in (0, 1)]
        _add(folder / "hostile" / "rollouts" / "step-000000.jsonl", rows)
    _add(folder / "hostile" / "rollouts" / "step-000000.jsonl", [long_rollout(len(HOSTILE))])
    metrics = [metric(step, loss=-0.5 * step) for step in range(3)]
    metrics[1] = {"step": 1, "timestamp": 101.0, "loss": "NaN", HOSTILE[0]: 1.0}
    run(folder / "hostile", metrics, model=HOSTILE[0])
    run(folder / "other", [metric(step, other=float(step), loss=2.0 - step) for step in range(4)])
    report = "<!doctype html><style>p { color: red }</style><p>42 cells<script>parent.hurt = true</script>"
    (folder / "other" / "matrix.html").write_text(report)
    (folder / "other" / "hang.json").write_text(json.dumps({"verdict": "rank 1 never came", "ranks": [0]}))
    run(folder / "deleted", [metric(step, loss=0.1 * step) for step in range(4)])
    _add(folder / "deleted" / "rollouts" / "step-000000.jsonl", [rollout(0, 0, 0, "soon gone")])
    run(folder / "changed", [metric(0, loss=1.0)])
    _add(folder / "changed" / "rollouts" / "step-000000.jsonl", [rollout(0, 0, 0, "the old words")])
    # Two metrics of which other points are kept when they are thinned.
    values = [{"loss": _loss(step), "reward/mean": step * 7919 % 1009 / 1009} for step in range(LONG_STEPS)]
    run(folder / "long", [metric(step, **each) for step, each in enumerate(values)])
    run(folder / "newer", [metric(0, loss=1.0)], version=NEWER)
    _damaged(folder / "damaged")
    _earlier(folder / "earlier")
    _empty(folder / "empty")


def run(
    folder: Path, metrics: list[dict[str, Any]], *, model: str = "shape:tiny-llama", **about: str
) -> None:
    """Write a finished run of these metrics."""
    folder.mkdir(parents=True, exist_ok=True)
    config = CONFIG.format(len(metrics)).replace('"shape:tiny-llama"', json.dumps(model))
    (folder / "config.toml").write_text(config)
    manifest = {"lockstep": about.get("version", "0.1.0"), "started": "2026-01-02T03:04:05+00:00"}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / "summary.json").write_text(json.dumps({"outcome": "finished", "wall_seconds": 4.0}))
    _add(folder / "metrics.jsonl", metrics)


def metric(step: int, **values: float) -> dict[str, Any]:
    """A line of metrics.jsonl."""
    return {"step": step, "timestamp": 1767323045.0 + step, **values}


def rollout(step: int, prompt: int, sample: int, text: str) -> dict[str, Any]:
    """A row of rollouts/."""
    return {
        "step": step,
        "prompt_index": prompt,
        "sample": sample,
        "prompt": f"question {text}",
        "completion": f"answer {text}",
        "prompt_token_ids": [1, 2],
        "token_ids": [7, 8, 9],
        "rollout_logprobs": [-0.5, -1.25, -2.0],
        "finish_reason": "stop",
        "reward": 0.5 + sample,
        "rewards": {"ids": 0.5 + sample, text: 1.0},
        "seed": 11,
        "policy_version": step,
    }


def long_rollout(prompt: int) -> dict[str, Any]:
    """A rollout of LONG_TOKENS tokens, cut off at the limit."""
    ids = [token % 256 for token in range(LONG_TOKENS)]
    logprobs = [-0.001 * (token % 500) for token in range(LONG_TOKENS)]
    row = rollout(0, prompt, 0, "long " * LONG_TOKENS)
    return row | {"token_ids": ids, "rollout_logprobs": logprobs, "finish_reason": "length", "rewards": {}}


def change(folder: Path) -> None:
    """Write the rollouts of `changed` again, with other words."""
    file = folder / "changed" / "rollouts" / "step-000000.jsonl"
    file.unlink()
    _add(file, [rollout(0, 0, 0, "quite different words")])


def _loss(step: int) -> float:
    return 1e3 if step == SPIKE else math.sin(step / 50) + 2 * math.exp(-step / 1000)


def _damaged(folder: Path) -> None:
    """A metrics line, a row of rollouts and the manifest cannot be read; the last line was cut by a crash."""
    run(folder, [metric(0, loss=1.5)])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("\x00\x00{not json\n" + json.dumps(metric(2, loss=0.25)) + '\n{"step": 3, "lo')
    (folder / "manifest.json").write_text('{"lockstep": ')
    rows = [rollout(0, 0, 0, "kept words"), {"step": "zero"}]
    _add(folder / "rollouts" / "step-000000.jsonl", rows)


def _earlier(folder: Path) -> None:
    """Fields that runs did not have at first are missing."""
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text('kind = "grpo"\n[model]\nname = "shape:tiny-llama"\n')
    _add(folder / "metrics.jsonl", [{"step": step, "reward/mean": 0.5 * step} for step in range(3)])
    row = {"step": 0, "prompt_index": 0, "sample": 0, "prompt": "early", "completion": "words"}
    _add(folder / "rollouts" / "step-000000.jsonl", [row | {"token_ids": [3, 4], "reward": 1.0}])


def _empty(folder: Path) -> None:
    """A run that has begun, and has written only its config."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(CONFIG.format(5))


def _add(file: Path, rows: list[dict[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as out:
        out.writelines(json.dumps(row) + "\n" for row in rows)
