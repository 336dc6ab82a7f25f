"""Runs a program, and ends it with everything that it started when the program ends or its owner is gone.

    python -I -S supervisor.py OWNER LIFELINE GRACE LINGER COMMAND...   # over any program
    supervise(lifeline)   # over the rest of this program, in a fork

LIFELINE is a pipe of which the owner, the process that started this one, holds the other end: the pipe hangs
up when the owner closes it or dies, by SIGKILL too. This process is a subreaper, so whatever the program
started is below it in the process tree, in whichever session or group. Should it be killed itself, the kernel
kills the program (PR_SET_PDEATHSIG; this process has one thread, so the signal cannot come from a thread that
merely ended). It ends as the program did: with its exit status, or by the signal that ended it.

Other systems than Linux have neither subreapers nor /proc: there only the program is ended, and its owner
ends what is left in its session. Standard library only; loaded in sandboxes too.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Collection, Iterable
from typing import NoReturn

PASSED_ON = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGABRT),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT),
)
"""Signals to the supervisor of a COMMAND that are passed on to it. SIGHUP ends it."""
AT_ONCE = signal.SIGALRM
"""Signal to a supervisor: SIGKILL for the program, whatever its grace."""
_ENDING = {signal.SIGHUP, signal.SIGTERM}
"""What the owner says when a fork of it may hold the lifeline open."""
_PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
_OWNER_SECONDS = 0.1
"""How often the owner is looked for, should a fork of it hold the lifeline open."""
_POLL_SECONDS = 0.01
_UNKILLABLE_SECONDS = 30.0
"""Wait for killed processes, such as those that wait for a device."""

_libc = ctypes.CDLL(None, use_errno=True)

TITLE = "lockstep:"
"""Begins the names of our processes in ps, top and `lockstep hang`; six more characters fit."""


def name_process(role: str) -> None:
    """Name this process `TITLE` + `role`, such as "reward"; its command line stays. Only on Linux."""
    with contextlib.suppress(OSError), open("/proc/self/comm", "w", encoding="ascii") as file:
        file.write(TITLE + role)


def main(argv: list[str]) -> int:
    """Supervise a program; returns only if the owner has gone before it began."""
    owner, lifeline, grace, linger = int(argv[1]), int(argv[2]), float(argv[3]), float(argv[4])
    # The owner may have died while this Python started.
    if os.getppid() != owner or hung_up(lifeline):
        return 1
    # As they were before this Python ignored or handled them: an exec keeps what is ignored.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    supervise(lifeline, grace=grace, linger=linger, passed_on=PASSED_ON)
    os.close(lifeline)
    try:
        os.execvp(argv[5], argv[5:])
    except OSError as error:
        os.write(2, f"cannot start {argv[5]}: {error.strerror}\n".encode())
    os._exit(127)


def supervise(
    lifeline: int, *, grace: float = 0.0, linger: float = 0.0, passed_on: Collection[signal.Signals] = ()
) -> None:
    """Fork; return in the fork, the supervised program. The caller must have one thread.

    The parent stays, and ends all descendants when the fork ends, when the owner says so (SIGTERM, SIGHUP),
    when it has gone, or when nobody holds the other end of `lifeline` any more; it ends as the fork did.

    Args:
        lifeline: a pipe's end for reading, which only the fork reads.
        grace: seconds between SIGTERM and SIGKILL for the fork; 0: SIGKILL at once.
        linger: the same for what it leaves behind.
        passed_on: signals to the parent that the fork gets.
    """
    owner, me = os.getppid(), os.getpid()
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    wakeup, waker = os.pipe()
    for pipe in (wakeup, waker):
        os.set_blocking(pipe, False)
    # Signals wake the poll through a pipe: one that came between a look and the poll would be slept over.
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    watched = {signal.SIGCHLD, signal.SIGINT, AT_ONCE, *_ENDING, *passed_on}
    before = {number: signal.signal(number, lambda *_: None) for number in watched}
    # A signal to the fork before it has its own handlers must reach it, not the pipe that it shares with us.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    program = os.fork()
    if program == 0:
        signal.set_wakeup_fd(-1)
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        os.close(wakeup)
        os.close(waker)
        die_with(me)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return
    signal.pthread_sigmask(signal.SIG_UNBLOCK, watched)
    name_process("guard")
    _close_all_but(2, lifeline, wakeup, waker)
    status = _wait(program, lifeline, wakeup, owner=owner, passed_on=passed_on)
    if status is None:
        status = _stop(program, grace)
    _end_descendants(linger)
    _end_like(status)


def die_with(parent: int) -> None:
    """Have this process killed when its parent, which has this pid, ends; ends it at once if it has
    already."""
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() not in (parent, 0):  # 0: this is another pid namespace
        os._exit(1)


def hung_up(lifeline: int) -> bool:
    """Whether nobody holds the other end any more."""
    poll = select.poll()
    poll.register(lifeline, 0)  # only POLLHUP and POLLERR
    return bool(poll.poll(0))


def _wait(
    program: int, lifeline: int, wakeup: int, *, owner: int, passed_on: Collection[signal.Signals]
) -> int | None:
    """The program's status, negative for a signal; None: it has to be ended."""
    poll = select.poll()
    poll.register(lifeline, 0)
    poll.register(wakeup, select.POLLIN)
    while True:
        ready = dict(poll.poll(_OWNER_SECONDS * 1000))
        signals = set[signal.Signals]()
        with contextlib.suppress(BlockingIOError):  # also one that came while the lifeline woke us
            signals = {signal.Signals(n) for n in os.read(wakeup, 4096)}
        status = _reap(program)
        if status is not None:
            return status
        for number in signals & set(passed_on):
            _pass_on(program, number)
        if AT_ONCE in signals:
            _kill([program], signal.SIGKILL)
        if lifeline in ready or os.getppid() != owner or signals & _ENDING - set(passed_on):
            return None


def _pass_on(program: int, number: signal.Signals) -> None:
    if number == signal.SIGABRT and sys.platform == "linux":
        # Asked for a traceback, it must not leave a core dump of a whole model behind.
        with contextlib.suppress(ProcessLookupError, PermissionError, ValueError):
            resource.prlimit(program, resource.RLIMIT_CORE, (0, 0))
    _kill([program], number)


def _stop(program: int, grace: float) -> int:
    """End the program; returns its status."""
    deadline, status = time.monotonic() + grace, None
    if grace > 0:
        _kill([program], signal.SIGTERM)
    while status is None and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        status = _reap(program)
    if status is None:
        _kill([program], signal.SIGKILL)
        status = -signal.SIGKILL
    return status


def _end_descendants(linger: float) -> None:
    """Send SIGTERM to all descendants, which may be supervisors; what is left after `linger` is killed."""
    deadline, signalled = time.monotonic() + linger, set[int]()
    while not _childless():
        living = descendants()
        if time.monotonic() >= deadline:
            _kill(living, signal.SIGKILL)
        else:
            _kill(set(living) - signalled, signal.SIGTERM)
            signalled.update(living)
        if time.monotonic() > deadline + _UNKILLABLE_SECONDS:
            os.write(2, f"cannot end processes {living}\n".encode())
            return
        time.sleep(_POLL_SECONDS)


def _childless() -> bool:
    """Reap; whether this process has no children, so no descendants either."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return True
    return sys.platform != "linux"


def _reap(program: int) -> int | None:
    """Reap all children that have ended; returns the program's status if it has."""
    ended = None
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            if found[0] == program:
                ended = os.waitstatus_to_exitcode(found[1])
    return ended


def _end_like(status: int) -> NoReturn:
    if status >= 0:
        os._exit(status)
    # The program has left its core dump; dying by its signal must not make a second one.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if -status != signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
    os._exit(128 - status)


def descendants() -> list[int]:
    """Descendants of this process, without zombies."""
    parents: dict[int, int] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            state, parent = file.read().rpartition(b")")[2].split()[:2]
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


def children() -> set[int]:
    """Children of this process, zombies included."""
    me = os.getpid()
    with contextlib.suppress(FileNotFoundError), open(f"/proc/{me}/task/{me}/children", "rb") as file:
        return set(map(int, file.read().split()))
    found = set[int]()  # a kernel without CONFIG_PROC_CHILDREN
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            if int(file.read().rpartition(b")")[2].split()[1]) == me:
                found.add(int(name))
    return found


def _close_all_but(*kept: int) -> None:
    """Such as a reply pipe, whose reader must see when the program is gone."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1):
        os.dup2(nothing, standard)
    close_all_but(0, 1, *kept)


def close_all_but(*kept: int) -> None:
    """Close every other descriptor of this process."""
    low = -1
    for fd in (*sorted(kept), min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 1 << 16)):
        if fd > low + 1:  # closerange of nothing from 0 on would close everything
            os.closerange(low + 1, fd)
        low = fd


def prctl(option: int, value: int) -> bool:
    """Linux's prctl; False where there is none."""
    call = getattr(_libc, "prctl", None)
    return call is not None and call(option, value, 0, 0, 0) == 0


def _kill(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        # One that has changed its user cannot be signalled; the others still must be.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
