"""train.token_budget = "auto": the largest micro-batch of a few whose planned memory fits the device.

A function of settings, sizes and the device's total memory, not of what is free: every start of a run on one
kind of device decides alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from lockstep.config.declarations import engines
from lockstep.config.engine import has_own_weights
from lockstep.config.run import GRPORun, RunConfig
from lockstep.config.train import DEFAULT_TOKEN_BUDGET
from lockstep.errors import ConfigError
from lockstep.loop.auto_execution import Choice
from lockstep.models.memory import gib

SIZES = (DEFAULT_TOKEN_BUDGET, 8192, 16384, 24576, 32768)
"""Token slots. Beyond the largest a step gains nothing that can be measured."""
MARGIN = 1.5
"""What a process needs at most, as a multiple of its memory plan (tests/loop/test_memory_plan.py)."""


def choose_token_budget(
    run: RunConfig, *, device: str, total_bytes: int, ranks: int, peak: Callable[[int], int]
) -> Choice[int]:
    """Return what train.token_budget = "auto" means for a run whose engine and execution mode are resolved.

    Args:
        device: "cpu", "cuda" or "cuda:N".
        total_bytes: of the device's memory, a rank's share where ranks share it.
        ranks: that share a step.
        peak: the planned bytes of one rank at a token budget; a ConfigError says that there is no plan.
    """
    longest = run.longest_unit
    usual = max(DEFAULT_TOKEN_BUDGET, longest)
    if not device.startswith("cuda"):
        return Choice(value=usual, reason="" if usual == DEFAULT_TOKEN_BUDGET else "the longest document")
    if isinstance(run, GRPORun) and (run.engine.name not in engines() or has_own_weights(run.engine)):
        return Choice(value=usual, reason=f"engine {run.engine.name} takes memory of its own")
    parts = max(1, ranks // (run.train.tp * run.train.ring))
    needed = math.ceil(run.documents_per_update / parts) * longest
    sizes = [size for size in SIZES if size >= longest] or [longest]
    sizes = sizes[: 1 + sum(size < needed for size in sizes)]
    try:
        planned = {size: peak(size) for size in sizes}
    except ConfigError as error:
        return Choice(value=usual, reason=f"there is no memory plan: {error}")
    fitting = [size for size in sizes if planned[size] * MARGIN <= total_bytes]
    chosen = max(fitting, default=sizes[0])
    of = f"{gib(planned[chosen])} planned at the peak, of {gib(total_bytes)}"
    return Choice(value=chosen, reason=of if fitting else f"{of}: the smallest, and it may not fit")
