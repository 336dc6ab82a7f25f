"""Runs a server, and ends it with everything that it started when its owner is gone.

    python -I -S supervisor.py GRACE_SECONDS COMMAND...

Standard input is a pipe of which the owner holds the other end: it is at its end when the owner closed it or
died, by SIGKILL too. This process is a subreaper, so whatever the server started is below it in the process
tree, in whichever session or group. Should it be killed itself, the kernel kills the server
(PR_SET_PDEATHSIG; this process has one thread, so the signal cannot come from a thread that merely ended).
Exits as the server did: its status, or 128 + the number of the signal that ended it. Linux; stdlib only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_POLL_SECONDS = 0.1
_AFTER_DEATH_SECONDS = 3.0
"""Seconds that the server's own children have to end after it, never more than the server's grace."""


def main(argv: list[str]) -> int:
    grace, command = float(argv[1]), argv[2:]
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    owner = os.getppid()
    signals: list[int] = []
    for number in SIGNALS:
        signal.signal(number, lambda n, _: signals.append(n))
    server = start(command, libc)
    status: int | None = None
    while status is None:
        status = reap(server)
        if status is None and (signals or os.getppid() != owner or closed(sys.stdin.fileno())):
            return stop(server, grace)
    end_all(time.monotonic() + min(grace, _AFTER_DEATH_SECONDS))
    return status


def start(command: list[str], libc: ctypes.CDLL) -> int:
    """Start the server; returns its process id."""
    supervisor = os.getpid()
    # A signal to the server before it has its own handlers must end it, not reach ours.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        return pid
    try:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() == supervisor:  # else it died before the line above
            nothing = os.open(os.devnull, os.O_RDONLY)
            os.dup2(nothing, 0)
            os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"cannot start {command[0]}: {error}\n".encode())
    os._exit(127)


def closed(descriptor: int) -> bool:
    """Whether the pipe is at its end; waits a little for it."""
    try:
        ready, _, _ = select.select([descriptor], [], [], _POLL_SECONDS)
        return bool(ready) and os.read(descriptor, 4096) == b""
    except InterruptedError:
        return False


def reap(server: int) -> int | None:
    """Reap ended children; returns the server's exit status, None while it runs."""
    ended = None
    while True:
        try:
            pid, code = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        if pid == server:
            status = os.waitstatus_to_exitcode(code)
            ended = status if status >= 0 else 128 - status


def stop(server: int, grace: float) -> int:
    """Send SIGTERM, then SIGKILL; returns the server's exit status."""
    kill(server, signal.SIGTERM)
    deadline, status = time.monotonic() + grace, None
    while status is None and time.monotonic() < deadline:
        status = reap(server)
        time.sleep(0.02)
    end_all(time.monotonic() + (min(grace, _AFTER_DEATH_SECONDS) if status is not None else 0.0))
    return 128 + signal.SIGKILL if status is None else status


def end_all(deadline: float) -> None:
    """Wait for all descendants until `deadline` (time.monotonic()), then kill what is left."""
    while living := descendants():
        if time.monotonic() >= deadline:
            for pid in living:
                kill(pid, signal.SIGKILL)
        time.sleep(0.02)
        reap(-1)
        if time.monotonic() > deadline + 30.0:  # unkillable, such as waiting for a device
            os.write(2, f"cannot end processes {living}\n".encode())
            return


def descendants() -> list[int]:
    """Descendants of this process, without zombies."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                state, parent = file.read().rpartition(b")")[2].split()[:2]
        except OSError:
            continue
        if state != b"Z":
            parents[int(name)] = int(parent)
    below, me = [], os.getpid()
    for pid in parents:
        above, visited = pid, set()
        while above in parents and above not in visited and above != me:
            visited.add(above)
            above = parents[above]
        if above == me and pid != me:
            below.append(pid)
    return below


def kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
