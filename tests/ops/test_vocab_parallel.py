"""Logprob, entropy and gradients over a vocabulary that is split over real ranks, against the same functions
with the whole vocabulary."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.ops.logprobs import VocabShard, partial_stats
from lockstep.ranks.launch import launch_command

WORKER = Path(__file__).with_name("vocab_worker.py")
EVERYTHING = {
    "temperature": 0.7,
    "softcap": 2.0,
    "logit_scale": 0.5,
    "bias": True,
    "entropy_grad": True,
    "chunk_rows": 3,
}
CASES: list[dict[str, Any]] = [
    EVERYTHING,
    EVERYTHING | {"separable": False},
    {"chunk_rows": 2},
    {"separable": False},
    {"temperature": 0.0, "bias": True, "entropy_grad": True},
]
COMPILED: list[dict[str, Any]] = [EVERYTHING | {"compiled": True, "chunk_rows": None}]


def check(cases: list[dict[str, Any]], cuts: list[int], out: Path) -> None:
    """Runs the ranks; their figures are those of the whole vocabulary, and the same bits on all of them."""
    command = [sys.executable, str(WORKER), json.dumps(cuts), json.dumps(cases)]
    ranks = len(cuts) - 1
    assert launch_command(command, ranks=ranks, timeout=200, log_dir=out / "logs") == 0
    results = [torch.load(out / f"rank-{rank}.pt", weights_only=True) for rank in range(ranks)]
    for of_rank in results:
        assert of_rank[-1]["unknown"][0] == -math.inf and of_rank[-1]["unknown"][1].isfinite()
    whole = torch.load(out / "whole.pt", weights_only=True)
    for index, (case, expected) in enumerate(zip(cases, whole, strict=True)):
        found = [of_rank[index] for of_rank in results]
        for name in ("loss", "logprobs", "entropy", "dhidden"):
            assert all(torch.equal(other[name], found[0][name]) for other in found), (case, name)
        for name, value in joined(found).items():
            torch.testing.assert_close(value, expected[name], rtol=1e-11, atol=1e-12, msg=str((case, name)))


def joined(found: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The parts of the ranks put together."""
    return {
        name: torch.cat([other[name] for other in found]) if name in ("dweight", "dbias") else value
        for name, value in found[0].items()
    }


def test_two_ranks_equal_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    check(CASES, [0, 4, 11], tmp_path)


def test_three_ranks_equal_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them has a single id, and a label of its own."""
    monkeypatch.setenv("OUT", str(tmp_path))
    check(CASES, [0, 7, 10, 11], tmp_path)


@pytest.mark.slow
def test_compiled_equals_eager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    check(COMPILED, [0, 4, 11], tmp_path)


def test_figures_of_a_part_by_hand() -> None:
    # ids 2 and 3 with logits 0 and log 3: m = log 3, s = 1/3 + 1, w = 1/3 (0 - log 3).
    x = torch.tensor([[0.0, math.log(3.0)]] * 2, dtype=torch.float64)
    found = partial_stats(x, torch.tensor([3, 1]), start=2)
    column = [math.log(3.0), 4 / 3, -math.log(3.0) / 3]
    expected = torch.tensor([[*column, math.log(3.0)], [*column, -math.inf]], dtype=torch.float64).T
    torch.testing.assert_close(found, expected)


def test_labels_of_other_ranks_have_no_column_here() -> None:
    x = torch.tensor([[0.5, 1.5, 2.5]] * 5)
    at_labels = partial_stats(x, torch.tensor([-100, 3, 4, 6, 7]), start=4)[3]
    assert at_labels.tolist() == [-math.inf, -math.inf, 0.5, 2.5, -math.inf]


@pytest.mark.parametrize(("start", "stop"), [(3, 3), (-1, 2), (2, 12)])
def test_a_part_that_is_none_is_refused(start: int, stop: int) -> None:
    group: Any = None
    with pytest.raises(ValueError, match="vocabulary of 11"):
        VocabShard(group=group, start=start, stop=stop, whole=11)
