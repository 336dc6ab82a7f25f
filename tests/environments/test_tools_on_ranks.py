"""Tools on several ranks: each rank that samples has processes of its own for them, the others have none."""

import sys
from pathlib import Path

import pytest
from scripted import save_scripted
from starting import succeeds

sys.path.insert(0, str(Path(__file__).parent))

from test_journal import CALL, CONFIG, calls_of, metrics_of, write_run

RANKS = {"alone": (1, ""), "apart": (2, ""), "together": (2, "tp = 2\n")}
"""Ranks, and what is set in [train]. together: two ranks run one engine, and the first has the tools."""


@pytest.mark.exhaustive
def test_the_calls_of_two_ranks_are_those_of_one(tiny_folder: Path, tmp_path: Path) -> None:
    model = save_scripted(tiny_folder, tmp_path / "model", (CALL, "<|end|>"), special=False)
    kept = ("reward/mean", "rollout/tool_calls", "rollout/tokens", "rollout/template_mismatches")
    seen = {}
    for name, (ranks, train) in RANKS.items():
        folder = tmp_path / name
        more = f'\n[engine]\nname = "native"\n\n[train]\nbackend = "fsdp2"\nbatch_invariant = true\n{train}'
        write_run(folder, CONFIG.format(steps=2, model=model) + more)
        succeeds("train", "run.toml", "--run-dir", "run", "--ranks", str(ranks), cwd=folder, seconds=250)
        lines = metrics_of(folder)
        assert all(line["logprob_gap_max"] == 0.0 for line in lines)
        seen[name] = [{key: line[key] for key in kept} for line in lines], calls_of(folder)
    assert seen["alone"] == seen["apart"] == seen["together"]
    lines, calls = seen["alone"]
    assert [line["rollout/tool_calls"] for line in lines] == [12.0, 12.0]
    assert set(calls.values()) == {1} and len(calls) == 24
