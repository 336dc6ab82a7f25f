"""examples/guessing_game.toml, with a short warm start: what the policy reads is what the game says."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from lockstep import load_run, train_online

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_the_policy_reads_what_the_game_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows have one text, so that only their games tell held-out ones apart."""
    monkeypatch.chdir(EXAMPLES)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from guessing_game import Narrowed
    from guessing_game_players import save
    from transformers import AutoTokenizer

    warm_start = tmp_path / "sft.toml"
    text = (EXAMPLES / "guessing_game_sft.toml").read_text()
    warm_start.write_text(text.replace("steps = 240", "steps = 15"))
    settings: dict[str, Any] = {
        "warm_start": str(warm_start),
        "model.name": str(save(tmp_path / "model")),
        "model.dtype": "float32",  # auto is bfloat16 on some CPUs
        "run_dir": str(tmp_path / "run"),
        "steps": 1,
        "rollout.group_size": 2,
        "eval.num_prompts": 8,
        "checkpoint.save_at_end": False,
        "checkpoint.export_at_end": False,
    }
    train_online(load_run("guessing_game.toml", overrides=settings))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    files = sorted((tmp_path / "run/rollouts").glob("*.jsonl"))
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    trained = [row["prompt_index"] for row in rows if row["prompt_index"] < 4096]
    assert sorted(index % 32 for index in trained) == sorted([*range(32)] * 2)
    assert len(rows) - len(trained) == 2 * 8
    replied = 0
    for row in rows:
        game, texts, at = Narrowed(), [], 0
        game.reset(row["prompt_index"])
        for author, length in row.get("spans", [("policy", len(row["token_ids"]))]):
            texts.append((author, tokenizer.decode(row["token_ids"][at : at + length])))
            at += length
        for (author, action), (other, reply) in zip(texts[::2], texts[1::2], strict=False):
            assert (author, other) == ("policy", "tool")
            said, _, over = asyncio.run(game.step(action))
            assert reply.replace(" ", "") == f"{said}<policy>".replace(" ", "") and not over
            replied += 1
        if row.get("end") == "done":
            assert asyncio.run(game.step(texts[-1][1]))[2]
            assert row["reward"] == pytest.approx(sum(game.get_reward().values()))
    assert replied > 200
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    (step,) = [line for line in lines if "evaluation" not in line]
    assert step["rollout/template_mismatches"] == 0 and step["logprob_gap_max"] < 1e-4
