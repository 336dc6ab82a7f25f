"""Python's search for garbage, held back while nearly everything that is made stays."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def no_search_for_garbage() -> Iterator[None]:
    """Leave garbage that is in cycles alone in the body: imports and exported graphs make a million objects
    that stay, and going through them again and again took a fifth of a start and a twelfth of an export."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
