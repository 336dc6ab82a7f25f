"""`lockstep ARGV` as a rank that kills itself where the environment says.

    KILLS=[{"rank": 1, "restart": 0, "target": "module:Class.method", "call": 1, "step": 2}, ...]

restart: in which generation of the ranks, 0: in the first; the rest: see fork_server.arm.
"""

from __future__ import annotations

import json
import os
import sys

from fork_server import arm, follow_steps

from lockstep.cli import train
from lockstep.cli.main import main
from lockstep.ranks.environment import TURN, recovery

wait = train.await_promotion


def arm_here() -> None:
    """Once it is known which rank of which generation this is."""
    wait()
    restart = recovery()
    here = {"rank": int(os.environ["RANK"]), "restart": 0 if restart is None else restart.number}
    for order in json.loads(os.environ["KILLS"]):
        if here == {name: order.pop(name) for name in here}:
            follow_steps()
            arm(**order, send="SIGKILL")


if __name__ == "__main__":
    if TURN in os.environ:
        train.await_promotion = arm_here
    else:
        arm_here()
    sys.exit(main(sys.argv[1:]))
