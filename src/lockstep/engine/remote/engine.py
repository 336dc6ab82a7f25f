"""An engine in another process: everything that does not depend on which engine it is.

    stream:    check ──► one POST per sample, many at once ──► completions as they come
                    connection lost, process gone ──► start again ──► recover (weights) ──► ask for the rest
    update:    begin ──► receive, n times ──► finish;  else: fail, and dirty until a whole session

`RemoteEngine` implements lockstep.protocols.ReceivesWeights with the help of a `Driver`, which knows one
engine's HTTP interface. A server is started from a `ServerProcess`, or used at a url and then never stopped.
"""

from __future__ import annotations

import contextlib
import resource
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from torch import Tensor

from lockstep.config.engine import EngineConfig
from lockstep.engine.receiving import ReceivingEngine
from lockstep.engine.remote.driver import (
    Driver,
    Job,
    Sample,
    StallDetector,
    bad_status,
    check_begun,
    check_sample,
    seconds_left,
)
from lockstep.engine.remote.http import HttpClient, HttpError, Reply, Unreachable
from lockstep.engine.remote.server import ServerProcess
from lockstep.engine.spec import EngineSpec
from lockstep.engine.streaming import Ended, Turn, version_counts
from lockstep.errors import EngineError
from lockstep.protocols.engine import EngineStats
from lockstep.schema.rollout import Completion
from lockstep.schema.weights import UpdateSession, WeightBucket

_POLL_SECONDS = 0.1
_DEATH_SECONDS = 10.0
"""A broken connection is the first sign of a crash; the process may take this long to be gone."""
# Between two aborts: the server may not have known a sample yet when the first one came.
_ABORT_SECONDS = 1.0
_TRIES = 3


class ServerDied(EngineError):
    """The server's process is gone."""


class Flow(Protocol):
    """The samples at the server, which works on them whether or not somebody calls `step`."""

    watch: StallDetector

    def add(self, job: Job, body: Mapping[str, Any]) -> None:
        """Let a sample be requested."""
        ...

    def step(self) -> None:
        """Send what can be sent, and wait a little for news; samples that ended go to `RemoteEngine.ended`.
        Raises ServerDied, and EngineError for an answer that is none."""
        ...

    def abort(self) -> None:
        """End what waits, and tell the server to end the rest; called again and again until nothing is
        left."""
        ...

    def close(self) -> None: ...


class RemoteEngine(ReceivingEngine):
    """Implements lockstep.protocols.ReceivesWeights over a server.

    One thread runs a stream or updates; a second stream is refused, and `begin_update` waits for the end of
    another thread's.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        spec: EngineSpec,
        client: HttpClient,
        driver: Driver,
        server: ServerProcess | None,
    ) -> None:
        """Starts the server, or connects to it.

        Args:
            server: not started yet; None: the one at engine.url.

        Raises:
            EngineError: it does not start, or is not the server that this run needs.
        """
        super().__init__(driver.name, spec=spec)
        self.transports = driver.transports
        self._config = config
        self._client, self._driver, self._server = client, driver, server
        self._new: deque[tuple[Job, dict[str, Any]]] = deque()
        """Samples that the flow does not know yet."""
        self._jobs: dict[str, tuple[Job, dict[str, Any]]] = {}
        """Samples of the flow that have not ended, with the bodies of their requests."""
        self._attempts: dict[str, int] = {}
        """How often each of them was requested."""
        self._flow: Flow | None = None
        self._finished_jobs: list[Ended] = []
        self._recovering: int | None = None
        """The thread that sends weights to a restarted server in the middle of a stream."""
        self._pushed = False
        self._kv_capacity, self._kv_peak = 0, 0.0
        self.request_seconds = config.request_seconds
        self.max_model_len = spec.max_model_len
        self.receivers = config.tp
        """Number of workers that each receive every bucket."""
        self._start()

    # a stream

    def _accept(self, turn: Turn) -> None:
        """Check a turn, and write the bodies of its requests."""
        self._check_request(turn.request, index=turn.index)
        prefix = f"{uuid.uuid4().hex}-{turn.index}"
        jobs = [
            Job(id=f"{prefix}-{k}", request=turn.request, index=turn.index, sample=k, turn=turn)
            for k in range(len(turn.samples))
        ]
        self._new.extend([(job, self._driver.body(job)) for job in jobs])

    def _advance(self) -> list[Ended]:
        """Until samples have ended; a server that dies is started again and asked for the rest."""
        if self._flow is None:
            self._revive()
            self._require_clean()
        else:
            self._flow.watch.news()  # the time that the consumer took is no silence of the server
        while not self._finished_jobs:
            try:
                flow = self._flow = self._flow or self._whole_flow()
                while self._new:
                    job, body = self._new.popleft()
                    self._jobs[job.id] = (job, body)
                    self.requested(job)
                    flow.add(job, body)
                flow.step()
                if self._abort.is_set():
                    flow.abort()
            except ServerDied as death:
                self._require_open()  # close() ends a server, too
                self._close_flow()
                self._restart(death)
        ended, self._finished_jobs = self._finished_jobs, []
        return ended

    def requested(self, job: Job) -> None:
        """Count a request of a sample."""
        self._attempts[job.id] = self._attempts.get(job.id, 0) + 1

    def request_again(self, job: Job, tries: Counter[str], sign: HttpError) -> None:
        """Count in a flow's `tries` that the connection of a sample broke, by this sign. Raises EngineError
        the third time."""
        tries[job.id] += 1
        if tries[job.id] == _TRIES:
            raise EngineError(
                f"unreachable: engine {self.name} is running but dropped the connection for one sample "
                f"{_TRIES} times: {sign}{self._log_text()}"
            )
        self.requested(job)

    def ended(self, job: Job, sample: Sample) -> None:
        """Take a sample that has ended from the flow."""
        completion = replace(self._checked(job, sample), attempt=self._attempts.pop(job.id))
        del self._jobs[job.id]
        assert job.turn is not None
        self._finished_jobs.append((job.turn, job.sample, completion))

    def _end(self) -> None:
        self._close_flow()
        self._new.clear()
        self._jobs.clear()
        self._attempts.clear()
        self._finished_jobs.clear()

    def _whole_flow(self) -> Flow:
        """A new flow with all samples that have not ended."""
        flow = self._new_flow()
        for job, body in self._jobs.values():
            self.requested(job)
            flow.add(job, body)
        return flow

    def _new_flow(self) -> Flow:
        return _PostFlow(self)

    def _close_flow(self) -> None:
        flow, self._flow = self._flow, None
        if flow is not None:
            flow.close()

    def _require_ready(self) -> None:
        if self._running:  # a restart during a call sends the weights itself
            self._require_awake("generate")
        else:
            super()._require_ready()

    def _sample(self, job: Job, reply: Reply | HttpError) -> Sample | None:
        """The sample of a reply; None: request it again, the connection broke though the server runs."""
        if isinstance(reply, HttpError):
            if not isinstance(reply, Unreachable):
                raise reply
            self._raise_if_dead(reply)
            return None
        if reply.status >= 500:
            self._raise_if_dead(bad_status(reply))
            raise EngineError(
                f"refused: engine {self.name} failed on a sample: {reply.error_text()}{self._log_text()}"
            )
        return self._driver.read(job, reply.object())

    def _checked(self, job: Job, sample: Sample) -> Completion:
        request = job.request
        stop = check_sample(sample, request, self._spec, engine=self.name)
        completion = self._completion(
            request,
            job.seed,
            token_ids=sample.token_ids,
            logprobs=sample.logprobs,
            ending=(sample.finish_reason if stop is None else "stop", stop),
            cached_tokens=sample.cached_tokens,
        )
        if not (begun := job.begun):
            return completion
        check_begun(sample, begun, engine=self.name)
        marks, written = list[tuple[int, int]](), 0
        for span in begun:
            assert span.policy_version is not None, "written by the policy"
            written += len(span.token_ids)
            marks.append((span.policy_version, written))
        marks.append((completion.policy_version, len(sample.token_ids)))
        versions = version_counts(marks)
        if not versions:
            return completion
        return replace(completion, versions=versions, policy_version=versions[-1][0])

    # life and death

    def _start(self) -> None:
        """Start the server, wait until it answers, and check it."""
        if self._server is not None:
            self._server.start(self._driver.ready)
            try:
                self._driver.check()
                self._kv_capacity = self._driver.memory().get("kv_cache_bytes", 0)
            except BaseException:
                self._server.stop()
                raise
            return
        waiting = self._driver.ready()
        if waiting is not None:
            instead = "start the server first, or set engine.python so that Lockstep starts it"
            if waiting.endswith(" answered 401"):
                instead = "export the server's token and set engine.token_env to the variable's name"
            raise EngineError(
                f"unreachable: engine {self.name}: engine.url = {self._client.url} cannot be used: "
                f"{waiting}; {instead}"
            )
        self._driver.check()

    def _raise_if_dead(self, sign: HttpError, *, when: str = "while it generated") -> None:
        """Raises ServerDied when the server's process is gone or about to be."""
        if self._server is None:
            if isinstance(sign, Unreachable) and self._driver.ready() is not None:
                raise EngineError(
                    f"unreachable: the {self.name} server at engine.url went away: {sign}"
                ) from sign
            return
        deadline = time.monotonic() + _DEATH_SECONDS
        while time.monotonic() < deadline:
            ended = self._server.wait_ended(0.2)
            if ended is not None:
                raise ServerDied(f"process-died: the {self.name} server {ended} {when}") from sign
            if self._driver.ready() is None:
                return
        # Its HTTP side lives on without the engine behind it: as good as dead.
        self._server.stop()
        raise ServerDied(f"process-died: the {self.name} server stopped answering ({sign})") from sign

    def _revive(self) -> None:
        """Restart a server that died while it was idle."""
        if self._server is not None and (ended := self._server.ended()) is not None:
            self._restart(ServerDied(f"process-died: the {self.name} server {ended}"))

    def _restart(self, death: ServerDied) -> None:
        """Restart until a server runs with the right weights, at most max_restarts times in one run."""
        while True:
            try:
                return self._restart_once(death)
            except ServerDied as again:
                death = again

    def _restart_once(self, death: ServerDied) -> None:
        assert self._server is not None
        if self._restarts >= self._config.max_restarts:
            raise EngineError(
                f"process-died: {death}; it was already restarted {self._restarts} times "
                f"(engine.max_restarts = {self._config.max_restarts}). {self._server.log_text()}"
            ) from death
        self._restarts += 1
        self.dirty = self._pushed or self._spec.weights == "pushed"
        self._start()
        if not self.dirty:
            return
        if self.recover is None:
            raise EngineError(
                f"process-died: {death}; it was restarted without the trained weights, and no rank can send "
                "them now (sharded weights are gathered only in a regular update). Resume the run from its "
                f"last checkpoint. {self._server.log_text()}"
            ) from death
        self._recovering = threading.get_ident()
        try:
            self.recover()
        finally:
            self._recovering = None
        self._require_clean()

    def _log_text(self) -> str:
        return f". {self._server.log_text()}" if self._server is not None else ""

    def stalled(self, text: str) -> EngineError:
        """Stop our own server, which does not answer: the next call starts another. Returns the error to
        raise."""
        log = self._log_text()
        if self._server is not None:
            self._server.stop()
        return EngineError(text + log, code="deadline", setting="engine.request_seconds")

    # weights

    def begin_update(self, session: UpdateSession) -> None:
        with self._turn:
            self._require_awake("update")
            self._require_no_session("begin another update")
            recovering = self._recovering == threading.get_ident()
            if not recovering:
                self._wait_until_idle("update", deadline=session.deadline)
            self._session = session
        try:
            if not recovering:
                self._revive_for_update()
            self.dirty = True
            self._begin(session, recovering=recovering)
        except BaseException as error:
            self.fail_update(str(error))
            raise

    def _begin(self, session: UpdateSession, *, recovering: bool) -> None:
        """Begin an update; a crash that an earlier request caused may show only now."""
        while True:
            try:
                return self._driver.begin(session)
            except HttpError as sign:
                try:
                    self._raise_if_dead(sign, when="before the update")
                except ServerDied:
                    if recovering:  # `_restart` goes on
                        raise
                else:
                    raise
                self._revive_for_update()

    def _revive_for_update(self) -> None:
        """Restart a dead server without recovery: all weights are about to be sent."""
        recover, self.recover = self.recover, lambda: setattr(self, "dirty", False)
        try:
            self._revive()
        finally:
            self.recover = recover

    def receive(self, bucket: WeightBucket) -> None:
        session = self._open_session()
        if bucket.transport not in self.transports:
            raise EngineError(
                f"unsupported-combination: engine {self.name} receives weights by "
                f"{', '.join(self.transports)}, not by {bucket.transport}",
                setting="engine.transfer",
            )
        self._driver.receive(bucket, seconds_left(session, self._config))

    def finish_update(self, session: UpdateSession) -> None:
        if self._open_session() != session:
            raise EngineError(
                f"wrong-state: engine {self.name}: finish_update was called for a session that is not open"
            )
        seconds_left(session, self._config)
        self._driver.finish(session)
        self._policy_version, self._pushed = session.policy_version, True
        self.dirty = False
        self._session = None

    def fail_update(self, reason: str) -> None:
        """Leave the engine dirty, and close an open session on the server if it still listens."""
        self.dirty = True
        if self._session is not None:
            with contextlib.suppress(EngineError):  # the failure may be that it does not answer
                self._driver.fail(reason)
            self._session = None

    def read_back(self, names: Sequence[str]) -> dict[str, Tensor] | None:
        self._require_open()
        return self._driver.read_back(names)

    def memory(self) -> dict[str, int]:
        """Bytes by what they are for, as the engine's workers count them."""
        self._require_open()
        return self._driver.memory()

    # the rest

    def sleep(self) -> None:
        self._require_open()
        self._require_idle("sleep")
        if self._state == "awake":
            self._driver.sleep()
        self._state = "asleep"

    def wake(self) -> None:
        self._require_open()
        if self._state == "asleep":
            self._driver.wake()
        self._state = "awake"

    def stats(self) -> EngineStats:
        """Totals; without the KV cache's use if the server does not answer."""
        self._kv_bytes = int(self._kv_capacity * self._kv_peak)
        return super().stats()

    def describe(self) -> dict[str, Any]:
        """Describe the server for the manifest: version, url, and the command and environment that started
        it."""
        return self._driver.describe()

    def close(self) -> None:
        """Idempotent; stops a server of ours, and leaves one at a url as it is."""
        self._close_stream()
        if self._server is not None:
            self._server.stop()
        self._state = "closed"

    def note_load(self, *, seconds: float) -> float | None:
        """Read the server's load; returns its count of tokens, see `Load`."""
        load = self._driver.load(seconds)
        self._kv_use = load.kv_cache_use
        self._kv_peak = max(self._kv_peak, load.kv_cache_use or 0.0)
        return load.progress


class _PostFlow:
    """One POST per sample."""

    def __init__(self, engine: RemoteEngine) -> None:
        self.watch = StallDetector(engine)
        self._engine = engine
        self._batch = engine._client.batch(limit=_open_limit(engine._config.max_batch))
        self._jobs: dict[str, tuple[Job, Mapping[str, Any]]] = {}
        self._tries = Counter[str]()
        self._abort_again = 0.0

    def add(self, job: Job, body: Mapping[str, Any]) -> None:
        self._jobs[job.id] = (job, body)
        self._batch.submit(job.id, self._engine._driver.generate_path, body)

    def step(self) -> None:
        engine = self._engine
        # Failures last: the first one that is a death ends the flow, and with it what is not taken yet.
        for key, reply in sorted(self._batch.poll(_POLL_SECONDS), key=lambda answer: _failed(answer[1])):
            job, body = self._jobs[str(key)]
            sample = engine._sample(job, reply)
            if sample is not None:
                self.watch.news()
                self._end(job, sample)
                continue
            assert isinstance(reply, HttpError)
            engine.request_again(job, self._tries, reply)
            self._batch.submit(job.id, engine._driver.generate_path, body)
        if self._jobs:
            self.watch.check(len(self._jobs))

    def abort(self) -> None:
        if time.monotonic() <= self._abort_again:
            return
        for key in self._batch.drop_unsent():
            job = self._jobs[str(key)][0]
            self._end(job, as_begun(job))
        if self._jobs:
            self._engine._driver.abort(list(self._jobs))
        self._abort_again = time.monotonic() + _ABORT_SECONDS

    def close(self) -> None:
        self._batch.close()

    def _end(self, job: Job, sample: Sample) -> None:
        del self._jobs[job.id]
        self._engine.ended(job, sample)


def _failed(reply: Reply | HttpError) -> bool:
    return isinstance(reply, HttpError) or reply.status >= 500


def as_begun(job: Job) -> Sample:
    """A sample that was aborted before the server knew of it: what an earlier request wrote of it, if any."""
    return Sample(
        token_ids=[token for span in job.begun for token in span.token_ids],
        logprobs=[logprob for span in job.begun for logprob in span.logprobs],
        finish_reason="abort",
        stop_reason=None,
        cached_tokens=0,
    )


def _open_limit(max_batch: int) -> int:
    """Connections at a time: as many as the engine decodes together and the file descriptors allow."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Half of them: the process opens other files, too.
    return max_batch if soft == resource.RLIM_INFINITY else max(1, min(max_batch, soft // 2))
