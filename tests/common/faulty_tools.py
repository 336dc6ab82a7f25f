"""An author's class whose tools fail in every way, for tests of the processes that they run in."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
import time
from typing import Any


class Faulty:
    """The sum of what was added, and tools that fail."""

    def __init__(self) -> None:
        self._total = 0

    def reset(self, start: int = 0, fails: str = "") -> str:
        """Fail as the row says."""
        if fails == "raise":
            raise ValueError("this row")
        if fails == "exit":
            os._exit(5)
        self._total = start
        return f"Start at {start}."

    def add(self, number: int) -> int:
        """Add.

        Args:
            number: To add.
        """
        self._total += number
        return self._total

    def fail(self) -> str:
        """Raise."""
        raise LookupError("by design")

    def leave(self) -> str:
        """Exit."""
        sys.exit(3)

    def crash(self) -> str:
        """Die."""
        os.kill(os.getpid(), 9)
        return ""

    def hang(self) -> str:
        """Hang, with children."""
        self._start_children()
        time.sleep(3600)
        return ""

    def flood(self) -> str:
        """Print 10 MB."""
        for _ in range(1000):
            print("x" * 10_000)
        time.sleep(3600)
        return ""

    def giant(self) -> str:
        """Return 10 MB."""
        return "x" * 10_000_000

    def slow(self) -> str:
        """Take a while."""
        time.sleep(0.05)
        return "done"

    def nan(self) -> float:
        """Return NaN."""
        return math.nan

    def nested(self, depth: int) -> list[Any]:
        """Return lists in lists.

        Args:
            depth: How many.
        """
        values: list[Any] = []
        for _ in range(depth):
            values = [values]
        return values

    def cyclic(self) -> list[Any]:
        """Return a list that holds itself."""
        values: list[Any] = []
        values.append(values)
        return values

    def draw(self) -> list[float]:
        """Draw numbers."""
        import numpy as np

        return [random.random(), float(np.random.rand())]

    def children(self) -> list[int]:
        """Start processes, one of which hides."""
        return self._start_children()

    def where(self) -> int:
        """Return the process."""
        return os.getpid()

    def copy(self) -> str:
        """Fork; both copies go on."""
        return "copy" if os.fork() == 0 else "original"

    def echo(self, value: dict) -> dict:
        """Return it.

        Args:
            value: Anything.
        """
        return value

    def get_reward(self) -> float:
        """The sum."""
        return float(self._total)

    def _start_children(self) -> list[int]:
        plain = subprocess.Popen(["sleep", "3600"], stdout=subprocess.DEVNULL)
        shell = "setsid sleep 3600 >/dev/null 2>&1 & echo $!"  # whose parent ends at once
        hidden = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=True)
        return [plain.pid, int(hidden.stdout)]
