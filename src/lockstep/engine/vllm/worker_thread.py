"""One thread for all work of an in-process engine, so that every wait for it has a deadline."""

from __future__ import annotations

import contextlib
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotDone
from typing import Any, TypeVar

import numpy as np
import torch

from lockstep.errors import EngineError

_Result = TypeVar("_Result")
_LOOK_SECONDS = 0.5
"""How long one wait lasts before the deadline is read again; signals are handled in between."""


class OwnThread:
    """A daemon thread that runs the functions passed to `call`, one at a time.

    An engine that hangs inside a kernel cannot be stopped, but the trainer need not wait for it: once a
    deadline has passed, every later call raises at once.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._stuck: str | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def stuck(self) -> bool:
        """Whether a deadline has passed: the running work is no longer waited for."""
        return self._stuck is not None

    def call(
        self, work: Callable[[], _Result], *, what: str, deadline: float | Callable[[], float]
    ) -> _Result:
        """Run `work`; returns its result or raises its exception.

        Args:
            deadline: time.monotonic(); a function is called repeatedly, so that progress can move it.

        Raises:
            EngineError: the deadline passed, now or in an earlier call.
        """
        if self._stuck is not None:
            raise EngineError(
                f"deadline: {self._name} is still in {self._stuck}, whose deadline passed; start again",
                name=self._stuck,
            )
        future: Future[_Result] = Future()
        started = time.monotonic()
        self._work.put((work, future))
        while True:
            until = deadline() if callable(deadline) else deadline
            left = until - time.monotonic()
            try:
                return future.result(timeout=max(0.0, min(left, _LOOK_SECONDS)))
            except NotDone:
                if future.done():  # `work` itself ended in a TimeoutError
                    return future.result()
                if left <= 0:
                    self._stuck = what
                    raise EngineError(
                        f"deadline: {self._name}: {what} gave no sign of life before its deadline, "
                        f"{time.monotonic() - started:.1f} s after it began",
                        name=what,
                    ) from None

    def end(self, *, seconds: float) -> bool:
        """Let the thread end after its current work; True if it ended in time."""
        self._work.put(None)
        self._thread.join(timeout=seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            work, future = item
            try:
                result = work()
            except BaseException as error:  # handed to the caller, which raises it
                future.set_exception(error)
            else:
                future.set_result(result)
            del item, work, future


@contextlib.contextmanager
def same_noise(device: torch.device) -> Iterator[None]:
    """Restore the global generators of torch, numpy and random on exit: an engine seeds and draws from them,
    and the trainer's dropout and shuffling must not depend on the choice of an engine."""
    cuda = device.type == "cuda" and torch.cuda.is_initialized()
    host, python, numpy = torch.get_rng_state(), random.getstate(), np.random.get_state()
    gpu = torch.cuda.get_rng_state(device) if cuda else None
    try:
        yield
    finally:
        torch.set_rng_state(host)
        random.setstate(python)
        np.random.set_state(numpy)
        if gpu is not None:
            torch.cuda.set_rng_state(gpu, device)
