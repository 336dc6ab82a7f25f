"""Memory of trainer and engine before and after the last weight update: they may share a GPU, and an
allocator's own message knows only one of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from lockstep.errors import EngineError
from lockstep.observe.metrics import GIB, is_out_of_memory, peak_rss_bytes
from lockstep.protocols.engine import InferenceEngine, receives_weights
from lockstep.schema.weights import MemoryReport


def take_memory_report(engine: InferenceEngine, *, device: torch.device) -> MemoryReport:
    """Report what trainer and engine hold now.

    Args:
        engine: one with weights of its own reports its memory; another one's is the trainer's.
        device: of the trainer.
    """
    try:
        theirs = engine.memory() if receives_weights(engine) else None
    except EngineError:  # it has died, perhaps of the error that this report explains
        theirs = None
    return MemoryReport(trainer=trainer_memory(device), engine=theirs)


def trainer_memory(device: torch.device) -> dict[str, float]:
    """Memory of this process in bytes; on CUDA also the free memory of the whole device."""
    if device.type != "cuda":
        return {"rss_peak": float(peak_rss_bytes())}
    free, total = torch.cuda.mem_get_info(device)
    return {
        "allocated": float(torch.cuda.memory_allocated(device)),
        "reserved": float(torch.cuda.memory_reserved(device)),
        "peak": float(torch.cuda.max_memory_allocated(device)),
        "device_free": float(free),
        "device_total": float(total),
    }


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether the error or one of its causes is an out-of-memory error; an error of another process is
    recognised by its text."""
    cause: BaseException | None = error
    while cause is not None:
        if is_out_of_memory(cause) or "out of memory" in str(cause).lower():
            return True
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return False


def explain(
    process: str, *, before: MemoryReport | None, after: MemoryReport | None, now: MemoryReport
) -> str:
    """Text that an out-of-memory error gets in addition."""
    lines = [f"The {process} ran out of memory. Memory of trainer and engine:"]
    if before is not None:
        lines.append(f"  before the last weight update: {_shown(before)}")
    if after is not None:
        lines.append(f"  after it: {_shown(after)}")
    lines.append(f"  now: {_shown(now)}")
    return "\n".join(lines)


def _shown(report: MemoryReport) -> str:
    return f"trainer {_in_gib(report.trainer)}; engine {_in_gib(report.engine)}"


def _in_gib(values: Mapping[str, float] | None) -> str:
    if values is None:
        return "not reported"
    return ", ".join(f"{name} {value / GIB:.2f} GiB" for name, value in values.items()) or "nothing"
