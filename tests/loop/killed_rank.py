"""`lockstep ARGV` as a rank that kills itself where the environment says.

    KILLS=[{"rank": 1, "restart": 0, "target": "module:Class.method", "call": 1, "step": 2}, ...]

restart: in which generation of the ranks, 0: in the first; the rest: see fork_server.arm.
"""

from __future__ import annotations

import json
import os
import sys

from fork_server import arm, follow_steps

from lockstep.cli.main import main
from lockstep.ranks.recovery import recovery

if __name__ == "__main__":
    restart = recovery()
    here = {"rank": int(os.environ["RANK"]), "restart": 0 if restart is None else restart.number}
    for order in json.loads(os.environ["KILLS"]):
        if here == {name: order.pop(name) for name in here}:
            follow_steps()
            arm(**order, send="SIGKILL")
    sys.exit(main(sys.argv[1:]))
