"""Kills the process of remote roles in the middle of a call."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import psutil
import pytest

from lockstep.loop.role_worker import RoleWorker


def kill_at(monkeypatch: pytest.MonkeyPatch, name: str, number: int) -> list[int]:
    """Kill the process in call `number` of this name, which it has got and will not answer."""
    ask, seen, killed = RoleWorker._ask, [], []

    def killing(self: RoleWorker, called: str, *args: Any, **more: Any) -> Any:
        seen.append(called)
        if called != name or seen.count(name) != number:
            return ask(self, called, *args, **more)
        (child,) = psutil.Process(self.describe()["pid"]).children()
        os.kill(child.pid, signal.SIGSTOP)
        killer = threading.Timer(0.3, os.kill, (child.pid, signal.SIGKILL))
        killer.start()
        killed.append(child.pid)
        return ask(self, called, *args, **more)

    monkeypatch.setattr(RoleWorker, "_ask", killing)
    return killed
