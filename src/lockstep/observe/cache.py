"""Where Lockstep keeps what it can make again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_root() -> Path:
    """Return $LOCKSTEP_CACHE, else $XDG_CACHE_HOME/lockstep, else ~/.cache/lockstep."""
    if own := os.environ.get("LOCKSTEP_CACHE"):
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared).expanduser() if shared else Path.home() / ".cache") / "lockstep"
