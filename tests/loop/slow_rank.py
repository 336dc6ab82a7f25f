"""`lockstep ARGV` as a rank, which writes to sampled-RANK how many samples its engine was asked for. The rank
that SLOW names sleeps for a second whenever a sample ends."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from lockstep.cli.main import main
from lockstep.engine.native.engine import NativeEngine

rank, sampled = os.environ["RANK"], 0
run, check = NativeEngine._run, NativeEngine._check


def slow_run(self: NativeEngine) -> Any:
    if rank == os.environ["SLOW"]:
        time.sleep(1)
    return run(self)


def counting_check(self: NativeEngine, turn: Any) -> None:
    global sampled
    sampled += len(turn.samples)
    check(self, turn)


NativeEngine._run, NativeEngine._check = slow_run, counting_check  # type: ignore[method-assign]
code = main(sys.argv[1:])
Path(f"sampled-{rank}").write_text(str(sampled))
sys.exit(code)
