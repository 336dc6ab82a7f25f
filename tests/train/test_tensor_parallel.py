"""Tensor parallel on real ranks: loss, logprobs, weights and gradients of the split module are those of the
whole one, for every architecture."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep.models.shape_table import SHAPES
from lockstep.ranks.launch import launch_command

WORKER = Path(__file__).with_name("tensor_parallel_worker.py")
# Three query groups, parts of MLP and vocabulary that are not equal, and a pad id that is not on rank 0.
THREE = {
    "hidden_size": 60,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "intermediate_size": 161,
    "vocab_size": 257,
    "pad_token_id": 200,
}
QWEN2 = {**SHAPES["tiny-llama"], "model_type": "qwen2"}
QWEN2.pop("attention_bias")
QWEN2.pop("head_dim")


@pytest.fixture
def run_cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("OUT", str(tmp_path))

    def run(cases: list[dict[str, Any]], *, ranks: int) -> list[list[dict[str, Any]]]:
        command = [sys.executable, str(WORKER), json.dumps(cases)]
        assert launch_command(command, ranks=ranks, timeout=200, log_dir=tmp_path / "logs") == 0
        return [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(ranks)]

    return run


def check(results: list[list[dict[str, Any]]], cases: list[dict[str, Any]]) -> None:
    for of_rank in results:
        for case, result in zip(cases, of_rank, strict=True):
            assert result["other_weights"] == 0, (case, result)
            # Gemma's norms make the gradients of their weights in float32.
            tolerance = 1e-6 if case["config"]["model_type"] == "gemma3_text" else 1e-12
            assert max(result["loss"], result["logprobs"]) < 1e-12, (case, result)
            assert result["gradient"] < tolerance, (case, result)


@pytest.mark.slow
def test_two_ranks_compute_what_one_computes(run_cases: Any) -> None:
    cases = [
        {"config": SHAPES["tiny-llama"]},
        {"config": SHAPES["tiny-llama"] | {"mlp_bias": True}, "separable": False},
        {"config": QWEN2},
        {"config": SHAPES["tiny-qwen3"], "separable": False},
        {"config": SHAPES["tiny-gemma3"]},
        {"config": SHAPES["tiny-mistral"]},
    ]
    results = run_cases(cases, ranks=2)
    check(results, cases)
    assert all(result["share"] < 0.52 for result in results[0])
    assert [of_rank[0]["vocab"] for of_rank in results] == [[0, 128], [128, 256]]


@pytest.mark.slow
def test_three_ranks_with_unequal_parts_compute_what_one_computes(run_cases: Any) -> None:
    cases = [{"config": SHAPES[name] | THREE} for name in ("tiny-llama", "tiny-qwen3", "tiny-gemma3")]
    results = run_cases(cases, ranks=3)
    check(results, cases)
    assert [of_rank[0]["vocab"] for of_rank in results] == [[0, 85], [85, 171], [171, 257]]
