"""Whose memory ran out."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from lockstep.errors import EngineError, RewardError, TrainError
from lockstep.loop.rollouts import RolloutEngine
from lockstep.observe.metrics import Spans
from lockstep.ranks.context import RankContext
from lockstep.schema.weights import MemoryReport
from lockstep.transfer.buckets import explain, ran_out_of_memory, take_memory_report

GIB = 1024.0**3
CPU = torch.device("cpu")


def test_a_memory_report_has_both_processes() -> None:
    engine = SimpleNamespace(external=True, memory=lambda: {"kv_cache": 2.5 * GIB})
    found = take_memory_report(engine, device=CPU)
    assert found.engine == {"kv_cache": 2.5 * GIB} and found.trainer["rss_peak"] > 1e6
    assert "engine kv_cache 2.50 GiB" in explain("engine", before=None, after=None, now=found)
    assert take_memory_report(SimpleNamespace(external=False), device=CPU).engine is None

    def dead():
        raise EngineError("gone", code="wrong-state")

    report = take_memory_report(SimpleNamespace(external=True, memory=dead), device=CPU)
    assert "engine not reported" in explain("engine", before=None, after=None, now=report)


def test_an_error_of_memory_is_known_by_what_it_came_from() -> None:
    wrapped = TrainError("micro-batch 3 is too large", code="wrong-state")
    wrapped.__cause__ = torch.OutOfMemoryError("x")
    assert ran_out_of_memory(wrapped)
    assert ran_out_of_memory(
        EngineError("the server said: CUDA out of memory. Tried to allocate", code="wrong-state")
    )
    assert not ran_out_of_memory(EngineError("the server said no", code="wrong-state"))


def connected(engine, transfer) -> RolloutEngine:
    config = SimpleNamespace(name="hf", offload=False)
    return RolloutEngine(
        engine, transfer, config=config, device="cpu", ranks=RankContext.alone(), spans=Spans()
    )


@pytest.mark.parametrize(
    ("side", "error", "kind"),
    [
        ("engine", EngineError("out of memory", code="wrong-state"), EngineError),
        ("trainer", TrainError("out of memory", code="wrong-state"), TrainError),
        ("trainer", torch.OutOfMemoryError("16 GiB"), TrainError),
        ("engine", torch.OutOfMemoryError("16 GiB"), EngineError),
    ],
)
def test_the_side_and_the_memory_reports_around_the_last_update_are_named(side, error, kind) -> None:
    transfer = SimpleNamespace(
        transport="disk",
        before=MemoryReport(trainer={"allocated": GIB}, engine={"weights": GIB}),
        after=MemoryReport(trainer={"allocated": 2 * GIB}, engine=None),
    )
    engine = SimpleNamespace(external=True, memory=lambda: {"weights": 3 * GIB})
    with (
        pytest.raises(kind) as caught,
        connected(engine, transfer).explaining_memory(side),
    ):
        raise error
    text = str(caught.value)
    assert f"The {side} ran out of memory" in text
    assert "before the last weight update: trainer allocated 1.00 GiB; engine weights 1.00 GiB" in text
    assert "after it: trainer allocated 2.00 GiB; engine not reported" in text
    assert "engine weights 3.00 GiB" in text
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    "error",
    [
        RewardError("out of memory", code="wrong-state"),
        EngineError("dirty", code="wrong-state"),
        RuntimeError("x"),
    ],
)
def test_other_errors_are_left_as_they_are(error) -> None:
    transfer = SimpleNamespace(transport="disk", before=None, after=None)
    with (
        pytest.raises(type(error)) as caught,
        connected(SimpleNamespace(external=False), transfer).explaining_memory("engine"),
    ):
        raise error
    assert caught.value is error
