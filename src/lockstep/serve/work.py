"""One thread that executes requests, and the futures that clients poll for their results."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from lockstep.errors import DataError, LockstepError, TrainError
from lockstep.observe.memory import is_out_of_memory
from lockstep.ranks.context import RankError

log = logging.getLogger(__name__)
MOST_WAITING, MOST_WAITING_BYTES = 10_000, 2**30
"""Requests that may wait for the worker, and the size of their bodies; more are refused for now."""
MOST_KEPT, MOST_KEPT_BYTES = 50_000, 2**30
"""Results that are kept for clients that ask again."""
_WAIT_SECONDS = 5.0
"""Between two signs of life for other ranks."""


class Busy(DataError):
    """Too many requests wait; the client tries again."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request came to: protobuf, or JSON."""

    body: bytes
    protobuf: bool = False


@dataclass(slots=True, eq=False)
class Job:
    """A request that waits, runs or has run."""

    id: str
    lane: str
    """Requests of a lane run in order; lanes take turns."""
    run: Callable[[], Answer] | None = None
    batch: str | None = None
    """Jobs with the same batch may run together, by `Worker.run_batch`."""
    payload: Any = None
    size: int = 0
    """Bytes of the request."""
    future: Future[Answer] = field(default_factory=Future)


class Ranks(Protocol):
    """See serve.ranks.RankModels."""

    def idle(self) -> None: ...

    def end(self) -> None: ...


class Worker:
    """Executes jobs one after the other, in a thread of its own.

    Args:
        run_batch: executes jobs of one batch together and returns what each comes to.
        most_together: jobs of one batch.
        ranks: the other ranks, which hear from this one also while there is nothing to do.
    """

    def __init__(
        self,
        run_batch: Callable[[Sequence[Job]], Sequence[Answer | LockstepError]],
        *,
        most_together: int,
        ranks: Ranks | None = None,
    ) -> None:
        self._run_batch, self._most, self._ranks = run_batch, most_together, ranks
        self.failure: RankError | None = None
        """Of the ranks, which ends the worker."""
        self.on_failure: Callable[[], None] = lambda: None
        self._lanes: OrderedDict[str, deque[Job]] = OrderedDict()
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._waiting = self._waiting_bytes = self._kept_bytes = 0
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="serve-worker", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def find(self, request_id: str) -> Job | None:
        """Return the job of a request id, if it is known and its result is still kept."""
        with self._changed:
            return self._jobs.get(request_id)

    def require_room(self, size: int) -> None:
        """Raises Busy: a job of `size` bytes cannot be queued now."""
        if self._closed:
            raise Busy("wrong-state: the server ends")
        if self._waiting >= MOST_WAITING or self._waiting_bytes + size > MOST_WAITING_BYTES:
            raise Busy(f"too-large: {self._waiting} requests are waiting; try again later")

    def submit(self, job: Job) -> None:
        """Queue a job. Raises Busy."""
        with self._changed:
            self.require_room(job.size)
            self._jobs[job.id] = job
            self._lanes.setdefault(job.lane, deque()).append(job)
            self._waiting += 1
            self._waiting_bytes += job.size
            self._changed.notify_all()

    def close(self, *, seconds: float = 60.0) -> None:
        """End after the job that runs now."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(seconds)

    def _next(self) -> list[Job] | None:
        """Return the jobs that run next; none yet; None at the end."""
        with self._changed:
            if not self._lanes and not self._closed:
                self._changed.wait(_WAIT_SECONDS)
            if self._closed:
                return None
            if not self._lanes:
                return []
            first = self._pop(next(iter(self._lanes)))
            jobs = [first]
            if first.batch is not None:
                for name in [first.lane, *self._lanes]:
                    while len(jobs) < self._most and (lane := self._lanes.get(name)):
                        if lane[0].batch != first.batch:
                            break
                        jobs.append(self._pop(name))
            return jobs

    def _pop(self, name: str) -> Job:
        lane = self._lanes.pop(name)
        job = lane.popleft()
        if lane:  # to the end: the other lanes come first
            self._lanes[name] = lane
        self._waiting -= 1
        self._waiting_bytes -= job.size
        return job

    def _work(self) -> None:
        try:
            while self.failure is None and (jobs := self._next()) is not None:
                if jobs:
                    self._execute(jobs)
                elif self._ranks is not None:
                    self._ranks.idle()
            if self._ranks is not None and self.failure is None:
                self._ranks.end()
        except RankError as error:
            self.failure = error
        if self.failure is not None:
            with self._changed:
                self._closed = True
            self.on_failure()

    def _execute(self, jobs: Sequence[Job]) -> None:
        started = time.monotonic()
        results = self._results(jobs)
        for job, result in zip(jobs, results, strict=True):
            if isinstance(result, Answer):
                job.future.set_result(result)
            else:
                job.future.set_exception(result)
            job.run = job.payload = None  # the job is kept for its result, not for what was sent
            self._keep(job, result)
        log.info("%s x %d: %.3f s", jobs[0].id, len(jobs), time.monotonic() - started)

    def _results(self, jobs: Sequence[Job]) -> Sequence[Answer | Exception]:
        try:
            if jobs[0].run is not None:
                return [jobs[0].run()]
            return self._run_batch(jobs)
        except RankError as error:
            self.failure = error
            return [error] * len(jobs)
        except LockstepError as error:
            if len(jobs) == 1:
                return [error]
            return [self._results([job])[0] for job in jobs]  # the others may be right
        except Exception as error:
            if is_out_of_memory(error):
                return [no_memory(f"request {jobs[0].id}", error)] * len(jobs)
            # A bug: its requests fail, and the other users' go on.
            log.exception("request %s", jobs[0].id)
            return [error] * len(jobs)

    def _keep(self, job: Job, result: Answer | Exception) -> None:
        with self._changed:
            self._kept_bytes += len(result.body) if isinstance(result, Answer) else 0
            done = [j for j in self._jobs.values() if j.future.done()] if self._full() else []
            for old in done:
                if not self._full():
                    break
                del self._jobs[old.id]
                error = old.future.exception()
                self._kept_bytes -= 0 if error is not None else len(old.future.result().body)

    def _full(self) -> bool:
        return len(self._jobs) > MOST_KEPT or self._kept_bytes > MOST_KEPT_BYTES


def no_memory(what: str, error: Exception) -> TrainError:
    """Free what an error without memory holds, and return the one that a client is told."""
    log.warning("%s: %s", what, error)
    error.__traceback__ = None  # its frames hold the tensors
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return TrainError(
        f"out-of-memory: there is no memory for {what}; close clients that are done, take "
        "a lower rank, or send shorter documents"
    )
