"""The thread that samples while the trainer works."""

from __future__ import annotations

import threading
import time
from typing import Any, cast

from lockstep.rollout.background import Background


class Slow:
    """An engine that is idle at first: its first request forgets every earlier abort, as `Streaming` does."""

    external = False

    def __init__(self) -> None:
        self.begun, self._abort = threading.Event(), threading.Event()

    def abort(self) -> None:
        self._abort.set()

    def sample(self) -> None:
        time.sleep(0.2)
        self._abort.clear()
        self.begun.set()
        assert self._abort.wait(20.0), "it was not aborted"


def test_an_abort_before_the_first_request_is_not_lost() -> None:
    engine = Slow()
    background = Background(cast(Any, engine), engine.sample)
    background.begin(wait=False)
    assert not engine.begun.is_set()
    background.end()
    assert engine.begun.is_set()
