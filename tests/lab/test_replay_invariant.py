"""Recordings of a batch-invariant policy: the same bits in every layout and execution mode."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lockstep.schema.contract import KernelContract
from lockstep_lab.replay.cell import Cell, ReplayOptions
from lockstep_lab.replay.replayer import Replayer
from lockstep_lab.replay.run import ReplayResult, opening, replay


def options(recording: Any, **cell: Any) -> ReplayOptions:
    own = Cell.of_recording(recording.header, device="cpu")
    return ReplayOptions(cell=dataclasses.replace(own, **cell))


def run(recording: Any, cell: dict[str, Any]) -> ReplayResult:
    return replay(recording, options(recording, **cell))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "cell",
    [
        {"layout": "padded"},
        {"layout": "padded", "padding_side": "left", "activation_checkpointing": True},
        pytest.param({"execution": "compile"}, marks=pytest.mark.slow),
        pytest.param({"execution": "joint"}, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_a_batch_invariant_recording_has_the_same_bits_in_every_layout_and_mode(
    record: Callable[..., Any], cell: dict[str, Any], dtype: str
) -> None:
    recording = record(attention="varlen", batch_invariant=True, dtype=dtype)
    result = run(recording, cell)
    assert result.ok and [row.logprob_max_difference for row in result.rows] == [0.0] * 6
    ordinary = run(recording, {"layout": "padded", "attention": "sdpa", "batch_invariant": False})
    assert max(row.logprob_max_difference or 0.0 for row in ordinary.rows) > 0.0


def test_a_replay_says_whether_it_computes_by_the_recorded_kernels(record: Callable[..., Any]) -> None:
    recording = record(attention="varlen", batch_invariant=True, num_updates=1)
    here = Replayer(recording, options(recording))
    assert opening(here)[-1].endswith("the recorded one: logprobs must be bitwise equal")
    contract = KernelContract.from_json(recording.header.contract)
    other = dataclasses.replace(contract, torch="1.0").as_json()
    header = dataclasses.replace(recording.header, contract=other)
    elsewhere = Replayer(dataclasses.replace(recording, header=header), options(recording))
    difference = f"torch: '{torch.__version__}' here, '1.0' there"
    assert opening(elsewhere)[-1].endswith(f"not the recorded one: {difference}")
