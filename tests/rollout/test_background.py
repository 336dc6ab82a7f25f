"""The thread that samples while the trainer works."""

from __future__ import annotations

import threading
import time
from typing import Any, cast

import pytest
from raising import raises

from lockstep.errors import EngineError
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


def test_a_fixed_schedule_is_waited_for_and_not_aborted() -> None:
    engine, ended = Slow(), threading.Event()

    def sample() -> None:
        time.sleep(0.3)
        ended.set()

    background = Background(cast(Any, engine), sample, fixed=True)
    background.begin(wait=False)
    # The trainer works from here on, and an abort must spare what goes on.
    assert background.enough.is_set() and not ended.is_set()
    background.end()
    assert ended.is_set() and not engine._abort.is_set()


def test_a_fixed_schedule_is_cut_off_where_nobody_trains_on_it() -> None:
    engine = Slow()
    background = Background(cast(Any, engine), engine.sample, fixed=True)
    background.begin(wait=False)
    background.end(at_once=True)
    assert engine.begun.is_set()


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("when", ["before", "while the trainer works"])
def test_a_producer_that_died_is_told_to_the_trainer(fixed: bool, when: str) -> None:
    """Only with a free schedule, and beside the trainer, the next weights are enough."""
    dies = threading.Event()

    def sample() -> None:
        if when != "before":
            background.enough.set()
            assert dies.wait(20.0)
        raise EngineError("process-died: the server is gone")

    background = Background(cast(Any, Slow()), sample, fixed=fixed)
    if when == "before":
        with raises(EngineError, "process-died"):
            background.begin(wait=True)
        return
    background.begin(wait=True)
    dies.set()
    if fixed:
        with raises(EngineError, "process-died"):
            background.end()
    else:
        background.end()
