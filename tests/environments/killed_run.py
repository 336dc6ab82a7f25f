"""A program for test_journal.py: trains, and kills itself between two calls.

killed_run.py CONFIG RUN_DIR new|resume CALLS [STEP]

It kills itself in step STEP when CALLS calls have ended, and none is running: no other one begins then.
"""

import asyncio
import os
import signal
import sys
from pathlib import Path

from lockstep import load_run, train_online
from lockstep.environments.journal import Journal

if __name__ == "__main__":
    config, run_dir, how, *kill = sys.argv[1:]
    if kill:
        begun, ended = set(), set()
        write, begin, begin_call = Journal.write, Journal.begin, Journal.begun
        calls, step = map(int, kill)

        def started(journal, what):
            begun.clear()
            ended.clear()
            journal.kills = what == f"step-{step:06d}"
            begin(journal, what)

        async def held_back(journal, key):
            if journal.kills and len(begun & ended) >= calls:
                await asyncio.Event().wait()
            await begin_call(journal, key)

        def counted(journal, entry):
            write(journal, entry)
            (ended if "value" in entry else begun).add(entry["key"])
            if journal.kills and len(begun & ended) >= calls and begun <= ended:
                os.kill(os.getpid(), signal.SIGKILL)

        Journal.begin, Journal.begun, Journal.write = started, held_back, counted
    run = load_run(Path(config))
    if how == "new":
        train_online(run.model_copy(update={"run_dir": Path(run_dir)}))
    else:
        train_online(run, resume=Path(run_dir))
