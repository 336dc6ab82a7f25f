"""Who holds how much memory, before and after the last weight update: trainer and engine may share a GPU, and
an allocator's own message knows one of them only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.errors import EngineError
from lockstep.observe.memory import GIB, is_out_of_memory, peak_rss_bytes

Bytes = Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ledger:
    """Bytes by name, of each side."""

    trainer: Bytes
    engine: Bytes | None
    """None: the engine does not say."""

    def __str__(self) -> str:
        return f"trainer {_shown(self.trainer)}; engine {_shown(self.engine)}"


def take(engine: Any, *, device: torch.device) -> Ledger:
    """What both sides hold now.

    Args:
        engine: asked where it has a method `memory`.
        device: of the trainer.
    """
    memory = getattr(engine, "memory", None)
    try:
        theirs = None if memory is None else memory()
    except EngineError:  # it has died, perhaps of what this ledger is to explain
        theirs = None
    return Ledger(trainer=trainer_memory(device), engine=theirs)


def trainer_memory(device: torch.device) -> dict[str, float]:
    """This process's, in bytes; on CUDA also what is left of the whole device."""
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
    """Whether the error, or what it came from, is of memory; an error of another process is known by its
    text."""
    seen: BaseException | None = error
    while seen is not None:
        if is_out_of_memory(seen) or "out of memory" in str(seen).lower():
            return True
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return False


def explain(side: str, *, before: Ledger | None, after: Ledger | None, now: Ledger) -> str:
    """What an out-of-memory error should say besides."""
    lines = [f"It was the {side} that ran out of memory. What each side held:"]
    if before is not None:
        lines.append(f"  before the last weight update: {before}")
    if after is not None:
        lines.append(f"  after it: {after}")
    lines.append(f"  now: {now}")
    return "\n".join(lines)


def _shown(values: Bytes | None) -> str:
    if values is None:
        return "does not say"
    return ", ".join(f"{name} {value / GIB:.2f} GiB" for name, value in values.items()) or "nothing"
