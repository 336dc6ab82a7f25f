"""Searches for regular expressions in a process of its own (lockstep.processes.child). Standard library
only."""

from __future__ import annotations

import re
import resource
import signal

from lockstep.processes.child import receive, send
from lockstep.processes.supervisor import supervise


def main(*, jobs: int, replies: int) -> None:
    """Answer jobs {expression, text, seconds} until their pipe closes; SIGPROF ends the process after so much
    processor time."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    supervise(jobs)
    while True:
        job = receive(jobs)
        signal.setitimer(signal.ITIMER_PROF, job["seconds"])
        found = re.search(job["expression"], job["text"]) is not None
        signal.setitimer(signal.ITIMER_PROF, 0)
        send(replies, {"id": job["id"], "found": found})
