"""A worker ends with the suite that started it, also when that was killed and could not end anybody."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

_LOOK_SECONDS = 1.0
_CLOSE_SECONDS = 30.0
"""After SIGTERM, before SIGKILL: longer than a launcher needs to end its ranks."""


@contextlib.contextmanager
def ended_with(parent: int) -> Iterator[None]:
    """The body runs only as long as `parent`, os.getppid() at the start of the program, is the parent.

    Then this process gets a SIGTERM, once: a launcher of ranks passes it on, and would lose patience with
    them at a second one. What is still there after 30 seconds is killed.
    """
    over = threading.Event()
    threading.Thread(target=_watch, args=(parent, over), name="end with parent", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _watch(parent: int, over: threading.Event) -> None:
    while os.getppid() == parent:
        if over.wait(_LOOK_SECONDS):
            return
    for number in (signal.SIGTERM, signal.SIGKILL):
        os.kill(os.getpid(), number)
        if over.wait(_CLOSE_SECONDS):
            return
