"""Python's search for garbage, held back while nearly everything that is made stays."""

from __future__ import annotations

import atexit
import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Leave garbage that is in cycles alone in the body: imports and exported graphs make a million objects
    that stay, and going through them again and again took a fifth of a start and a twelfth of an export."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def relax_gc() -> None:
    """Look for garbage in cycles seven times less often, and not when the process ends, which the system then
    cleans up. For a process that is all ours: of the 4.9 s that torch, transformers and the loop take to be
    imported and left again, 1.2 s were the last search and 0.4 s the others. A second call does nothing.
    """
    # Python's own threshold is 700.
    gc.set_threshold(5_000, 10, 10)
    atexit.unregister(gc.freeze)
    # freeze() takes all objects out of the search that Python makes when it ends.
    atexit.register(gc.freeze)
