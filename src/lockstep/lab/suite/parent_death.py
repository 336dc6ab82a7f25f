"""A worker dies with the suite that started it, even if the suite was killed and could not stop it.

    python -I -S parent_death.py PARENT COMMAND...

asks the kernel to kill this process as soon as PARENT is gone, and becomes COMMAND under the same process id.
A thread in the worker that watches its parent would not do: it cannot run while another thread holds the GIL
in a long C call, and every kind of worker would have to start one. Standard library only.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PYTHON = sys.executable
_PR_SET_PDEATHSIG = 1


def die_with_parent(command: Sequence[str]) -> list[str]:
    """Wrap `command` so that it is killed (SIGKILL) when the *thread* that starts it ends, as it does with
    its process: that thread has to wait for it. Processes that the command starts have to notice by
    themselves, as ranks and servers of engines do.

    Only Linux has this; elsewhere the command is returned as it is.
    """
    if sys.platform != "linux":
        return list(command)
    return [_PYTHON, "-I", "-S", __file__, str(os.getpid()), *command]


def main(argv: Sequence[str]) -> None:
    """Become the command; does not return."""
    parent, command = int(argv[0]), list(argv[1:])
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the line above
        sys.exit(1)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"cannot start {command[0]}: {error.strerror}")


if __name__ == "__main__":
    main(sys.argv[1:])
