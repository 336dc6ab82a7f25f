"""One of three ranks of test_context.py: python context_worker.py OUT."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lockstep.errors import RewardError
from lockstep.processes.child import relax_gc
from lockstep.ranks.context import RankContext, init_ranks


def raised(call: Callable[[], Any]) -> list[str]:
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["nothing", ""]


def failing(ranks: RankContext, rank: int, error: Exception) -> Callable[[], int]:
    def make() -> int:
        if ranks.rank == rank:
            raise error
        return 0

    return make


def in_together(ranks: RankContext) -> None:
    with ranks.fail_together("opening"):
        failing(ranks, 0, RewardError("no folder", code="wrong-state"))()


def main(out: Path) -> None:
    with init_ranks(seconds=60) as ranks:
        rank = ranks.rank
        made: list[int] = []
        values: dict[str, Any] = {
            "gathered": ranks.gather({"rank": rank}, what="values"),
            "typed": repr(ranks.gather((rank, math.nan, Path("x")), tuple[int, float, Path], what="values")),
            "unsent": raised(lambda: ranks.gather_results(lambda: {1, 2} if rank == 1 else [], what="sets")),
            "broadcast": ranks.broadcast(f"from {rank}", what="a value"),
            "any": [ranks.any(rank == 1, what="one"), ranks.any(False, what="none")],
            "each": ranks.gather_results(lambda: 10 * rank, what="values"),
            "first": [ranks.on_rank_zero(lambda: made.append(1) or "made once", what="a value"), bool(made)],
            "reward": raised(
                lambda: ranks.gather_results(
                    failing(ranks, 1, RewardError("reward 'x' of row 3 failed", code="wrong-state")),
                    what="scoring",
                )
            ),
            "other": raised(
                lambda: ranks.gather_results(failing(ranks, 2, KeyError("mine")), what="scoring")
            ),
            "together": raised(lambda: in_together(ranks)),
            "after": ranks.gather(rank, what="values"),
        }
        settings: dict[str, Any] = {"train.lr": 0.2 if rank == 1 else 0.1, "steps": 4}
        if rank == 2:
            settings["only"] = True
        values["same"] = raised(lambda: ranks.require_same(settings, what="their settings"))

        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=2))
        impatient = dataclasses.replace(ranks, control=group, seconds=2.0)
        started = time.monotonic()
        if rank == 2:
            time.sleep(5)
        else:
            values["late"] = raised(lambda: impatient.gather(None, None, what="waiting for rank 2"))
            values["seconds"] = time.monotonic() - started
        (out / f"rank-{rank}.json").write_text(json.dumps(values))


if __name__ == "__main__":
    relax_gc()
    main(Path(sys.argv[1]))
