"""Sampling that goes on while the trainer works, by an engine in a process of its own.

    trainer's thread        begin ─► waits until there is enough ─► trains ──────────► end ─► new weights
    a thread of its own              run_episodes ─────────────────────────────────►│ cut off

The thread only talks to the engine's process; it has no collectives.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from lockstep.errors import EngineError
from lockstep.protocols.engine import InferenceEngine, receives_weights

_WAIT_SECONDS = 0.5
"""Longest single wait of the trainer's thread, so that Ctrl-C is noticed, and between two aborts."""
_END_SECONDS = 120.0
"""That an engine may take to return what it samples after it was aborted."""


class Background:
    """A call that samples, in a thread.

    Args:
        sample: sets `enough` once the trainer can go on, and returns when it was aborted or nothing is left.
        fixed: it ends by itself, at a border of logical time.
    """

    def __init__(self, engine: InferenceEngine, sample: Callable[[], None], *, fixed: bool = False) -> None:
        self._engine, self._sample, self._fixed = engine, sample, fixed
        self.enough = threading.Event()
        self._ending = threading.Event()
        self._failure: BaseException | None = None
        self._weights = threading.Lock()
        """Held while the engine is sent weights again, which the trainer must not change meanwhile."""
        self._trains = False
        # A daemon: an engine that never answers must not keep a process alive that wants to end.
        self._thread = threading.Thread(target=self._run, name="rollouts", daemon=True)

    def begin(self, *, wait: bool) -> None:
        """Start; return once there is enough, or nothing more comes.

        Args:
            wait: False: there is enough already.

        Raises:
            EngineError, RewardError: from `sample`, which has ended.
        """
        engine = self._engine
        if receives_weights(engine) and (recover := engine.recover) is not None:
            engine.recover = lambda *target: self._recover(recover, *target)
        if not wait:
            self.enough.set()
        self._thread.start()
        while not self.enough.wait(_WAIT_SECONDS):
            pass
        with self._weights:
            self._trains = True
        if wait and self._failure is not None:
            raise self._failure

    def is_ending(self) -> bool:
        """Whether no further turn is to begin."""
        return self._ending.is_set()

    def end(self, *, at_once: bool = False) -> None:
        """Cut off what is sampled, and wait for it. With a fixed schedule, wait for its border.

        An engine that died while the trainer worked is no failure: the next weights start it again, and what
        it had sampled since the last ones is sampled again. With a fixed schedule it is one: what was lost
        belongs to weights that are gone.

        Args:
            at_once: cut off before the border: nobody trains on it.

        Raises:
            EngineError: it does not stop; and what `sample` raised.
        """
        while self._fixed and not at_once and self._thread.is_alive():
            self._thread.join(_WAIT_SECONDS)  # an engine without progress ends by engine.request_seconds
        self._ending.set()
        deadline = time.monotonic() + _END_SECONDS
        while self._thread.is_alive() and time.monotonic() < deadline:
            self._engine.abort()  # again: an engine forgets one that comes before its first request
            self._thread.join(_WAIT_SECONDS)
        if self._thread.is_alive():
            raise EngineError(
                f"deadline: the engine did not return its samples within {_END_SECONDS:g} s after it was "
                "aborted; resume the run"
            )
        died = isinstance(self._failure, EngineError) and self._failure.code == "process-died"
        if self._failure is not None and (self._fixed or not died):
            raise self._failure

    def _recover(self, recover: Callable[..., None], *target: object) -> None:
        """Send a restarted engine the weights that it had; they are there until the trainer goes on."""
        with self._weights:
            if self._trains:
                raise EngineError(
                    "process-died: the engine died while the trainer worked, and the weights that it had are "
                    "gone; "
                    + (
                        "resume the run from its last checkpoint"
                        if self._fixed
                        else "the next ones start it again"
                    )
                )
            recover(*target)

    def _run(self) -> None:
        try:
            self._sample()
        except BaseException as error:  # raised in the trainer's thread
            self._failure = error
        finally:
            self.enough.set()
