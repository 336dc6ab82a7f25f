"""Peaks by phase, and whether an error is one of a GPU's memory. What torch.cuda says is a mock."""

from typing import Any

import pytest
import torch

from lockstep.errors import EngineError, RewardError, TrainError
from lockstep.observe.memory import GIB, MemoryMeter, is_out_of_memory, ran_out_on_gpu
from lockstep.observe.metrics import Spans


class Allocator:
    """torch's statistics of a device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.peak = 0
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda *_: self.peak * GIB)
        monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda *_: (self.peak + 1) * GIB)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self.reset)

    def reset(self, *_: object) -> None:
        self.peak = self.now

    def hold(self, gib: int) -> None:
        self.now, self.peak = gib, max(self.peak, gib)


def test_peaks_belong_to_the_phase_that_was_on(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, meter = Allocator(monkeypatch), MemoryMeter("cuda:0")
    spans = Spans(on_change=meter.enter)

    def step() -> dict[str, float]:
        with spans("generate"):
            gpu.hold(5)
            with spans("reward"):  # belongs to what it is in
                gpu.hold(6)
            gpu.hold(2)
        with spans("pack"):
            gpu.hold(7)
            gpu.hold(1)
        for size in (4, 3):  # two micro-batches
            with spans("forward_backward"):
                gpu.hold(size)
        with spans("optimizer"):
            gpu.hold(2)
        found = meter.metrics()
        return {name: size for name, size in found.items() if name != "memory/rss_peak_gib"}

    by_phase = {"generate": 6.0, "train": 4.0, "update": 3.0}
    wanted = {f"memory/{phase}_peak_gib": size for phase, size in by_phase.items()}
    wanted |= {"memory/cuda_peak_gib": 7.0, "memory/cuda_reserved_gib": 8.0}
    assert step() == step() == wanted


def test_on_a_cpu_there_is_one_peak() -> None:
    meter = MemoryMeter()
    meter.enter(("generate",))
    assert [*meter.metrics()] == ["memory/rss_peak_gib"]


def raised(error: Exception, cause: BaseException | None = None) -> Exception:
    error.__cause__ = cause
    return error


CUDA = "CUDA out of memory. Tried to allocate 2.00 GiB"
HOST = "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried to allocate"


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (torch.OutOfMemoryError(CUDA), True),
        (raised(TrainError("out-of-memory: micro-batch 3"), torch.OutOfMemoryError(CUDA)), True),
        (raised(EngineError("out-of-memory: explained"), torch.OutOfMemoryError(CUDA)), True),
        # of another process
        (TrainError("out-of-memory: micro-batch 3 of the value model"), True),
        (EngineError(f"bad-reply: generate answered 500: OutOfMemoryError: {CUDA}"), True),
        (EngineError("bad-reply: answered 409", remote_data={"code": "out-of-memory"}), True),
        (EngineError("bad-reply: engine native ran out of memory with a KV cache of 12 bytes"), True),
        # from elsewhere
        (RuntimeError("the sandbox ran out of memory"), False),
        (RuntimeError(CUDA), False),
        (RewardError(f"wrong-state: reward 'mine' raised ValueError: {CUDA}"), False),
        (EngineError("bad-reply: answered 400: the prompt 'out of memory' is too long"), False),
        (raised(EngineError("out-of-memory: explained"), EngineError("wrong-state: no")), False),
        (MemoryError(), False),
        (raised(TrainError("out-of-memory: micro-batch 3"), RuntimeError(HOST)), False),
    ],
    ids=str,
)
def test_only_a_gpu_that_ran_out_asks_for_a_smaller_plan(error: Any, wanted: bool) -> None:
    assert ran_out_on_gpu(error) == wanted


def test_an_error_that_only_quotes_an_allocator_is_not_its() -> None:
    assert is_out_of_memory(RuntimeError(HOST)) and is_out_of_memory(MemoryError())
    assert not is_out_of_memory(TrainError(f"wrong-state: the log says {HOST!r}"))
    assert not is_out_of_memory(RuntimeError("can't allocate memory for your order"))
