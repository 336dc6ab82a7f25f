"""Engine `sglang`: SGLang's own server, started from its own environment (engine.python), or running already
(engine.url). Its scheduler kills its parent when it fails, so it never lives in the trainer's process.

    stream ────► waves of samples, one streamed POST each ──► chunks ──► finished samples
                 room for more ◄──────────────────────────────────────┘

A wave asks for up to 64 samples over one connection. The client reads their chunks while the GPU makes the
next ones: after the last token there is little left to do. One request for everything would cost the server
time that grows with the square of the number of samples; one for each sample would make it parse and answer
hundreds of requests at once.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.config.engine import EngineConfig
from lockstep.engine.remote.driver import EventStreams, Job, Sample, StallDetector
from lockstep.engine.remote.engine import RemoteEngine, as_begun
from lockstep.engine.remote.http import BadReply, HttpError, Reply
from lockstep.engine.remote.server import (
    ServerProcess,
    check_interpreter,
    free_port,
    new_token,
    own_gpus,
    own_server,
    own_variables,
    server_client,
    server_environment,
)
from lockstep.engine.sglang.driver import NAME, SGLangDriver
from lockstep.engine.sglang.translate import (
    Partial,
    find_package,
    read_event,
    request_body,
    rid,
    sglang_environment,
    sglang_server_command,
)
from lockstep.engine.spec import EngineSpec, StopStrings
from lockstep.errors import ConfigError, EngineError
from lockstep.schema.rollout import SamplingParams

WAVE = 64
"""Samples of one request: the server's cost of a chunk grows with their number."""
ORIGINAL_LOGPROBS = "SGLANG_RETURN_ORIGINAL_LOGPROB"
_POLL_SECONDS = 0.1
_ABORT_SECONDS = 1.0
_ABORT_LIMIT_SECONDS = 10.0


class SGLangServer(RemoteEngine):
    """Implements lockstep.protocols.ReceivesWeights. See RemoteEngine for what can be called when."""

    def __init__(self, config: EngineConfig, *, spec: EngineSpec) -> None:
        """Starts a server, or connects to the one at engine.url.

        Raises:
            ConfigError: a setting that SGLang cannot honour, or no SGLang of a known version.
            EngineError: it does not start in time, or is not the server that this run needs.
        """
        server = None if config.url else make_server(config, spec)
        client = server_client(config, server)
        self._sglang = SGLangDriver(config, spec, client=client, server=server)
        self.receivers = config.tp
        """Number of processes that join a collective."""
        super().__init__(config, spec=spec, client=client, driver=self._sglang, server=server)

    def sleep(self) -> None:
        """Free the KV cache, and the weights if they are the trainer's and will be sent again."""
        self._require_open()
        with self._turn:
            self._require_idle("sleep")
            self._require_no_session("sleep")
        super().sleep()

    def wake(self) -> None:
        """Wake up; the engine is dirty if the weights were freed, since their memory may hold anything."""
        super().wake()
        if self._sglang.dropped_weights:
            self.dirty = True

    def fail_update(self, reason: str) -> None:
        """End a server that waits for weights that will not come; the next call starts it."""
        super().fail_update(reason)
        if self._sglang.stuck and self._server is not None:
            self._server.stop()

    def _new_flow(self) -> _Flow:
        return _Flow(self, EventStreams(self._client))

    # what a flow needs of the engine

    def broken(self, sign: HttpError) -> None:
        """Raises ServerDied if the server is gone."""
        self._raise_if_dead(sign)

    @property
    def log_text(self) -> str:
        return self._log_text()

    @property
    def in_flight_limit(self) -> int:
        """Samples at the server at a time: a server of our own keeps a wave waiting behind those that run."""
        return self._config.max_batch + (WAVE if self._server is not None else 0)


class _Flow:
    """The samples that wait, those at the server, and their progress."""

    def __init__(self, engine: SGLangServer, streams: EventStreams) -> None:
        self.watch = StallDetector(engine)
        self._engine, self._streams = engine, streams
        self._open: dict[str, Job] = {}
        """Samples that have not ended."""
        self._bodies: dict[str, Mapping[str, Any]] = {}
        self._waiting: deque[Job] = deque()
        self._waves: dict[int, dict[str, Partial]] = {}
        """Samples at the server, by wave and by id there."""
        self._opened = 0
        self._tries = Counter[str]()
        self._abort_began: float | None = None
        self._abort_again = 0.0

    def add(self, job: Job, body: Mapping[str, Any]) -> None:
        self._open[job.id], self._bodies[job.id] = job, body
        self._waiting.append(job)

    def close(self) -> None:
        self._streams.close()

    def step(self) -> None:
        self._open_waves()
        for key, event in self._streams.poll(_POLL_SECONDS):
            assert isinstance(key, int)
            if isinstance(event, bytes):
                self._chunk(key, event)
            elif event is not None:
                self._ended_badly(key, event)
            elif left := self._waves.pop(key, None):
                raise BadReply(f"wrong-result: engine {NAME} ended its reply without {len(left)} samples")
        if self._open:
            self.watch.check(len(self._open))

    def abort(self) -> None:
        """Abort: samples that were not requested yet end at once, the others when the server says so, or
        soon."""
        for job in self._waiting:
            self._end(job, as_begun(job))
        self._waiting.clear()
        now = time.monotonic()
        self._abort_began = self._abort_began or now
        if now > self._abort_again and self._open:
            self._abort_again = now + _ABORT_SECONDS
            self._engine._driver.abort(list(self._open))
        if now - self._abort_began > _ABORT_LIMIT_SECONDS:
            for wave in self._waves.values():
                for partial in wave.values():
                    self._end(partial.job, partial.sample("abort", None))
            self._waves.clear()

    def _open_waves(self) -> None:
        if self._abort_began is not None:
            if self._open.keys() - {job.id for job in self._waiting}:
                return
            self._abort_began, self._abort_again = None, 0.0  # all that it was for have ended
        limit = self._engine.in_flight_limit
        free = limit - sum(len(wave) for wave in self._waves.values())
        # A request for each sample that leaves would be many small ones.
        while self._waiting and free >= min(len(self._waiting), max(1, limit // 8)):
            size = min(WAVE, free, len(self._waiting))
            free -= size
            self._open_wave([self._waiting.popleft() for _ in range(size)])

    def _open_wave(self, jobs: list[Job]) -> None:
        driver = self._engine._sglang
        body = request_body(jobs, [self._bodies[j.id] for j in jobs], incremental=driver.incremental)
        self._waves[self._opened] = {
            rid(job): Partial(
                job=job,
                incremental=driver.incremental,
                stops=self._stops(job.request.sampling),
            )
            for job in jobs
        }
        self._streams.open(self._opened, driver.generate_path, body)
        self._opened += 1

    def _stops(self, sampling: SamplingParams) -> StopStrings | None:
        if not sampling.stop:
            return None
        decoding = self._engine.decoding(sampling)
        assert decoding is not None, "stop strings without a tokenizer are refused"
        return StopStrings(decoding, sampling.stop)

    def _chunk(self, key: int, text: bytes) -> None:
        event = read_event(text, f"engine {NAME}")
        meta = event.get("meta_info")
        name = meta.get("id") if isinstance(meta, dict) else None
        wave = self._waves.get(key, {})
        partial = wave.get(str(name))
        if partial is None:
            return  # it ended here already, by a stop string
        driver = self._engine._sglang
        had = len(partial.token_ids)
        sample = partial.add(
            event, aborting=self._abort_began is not None, weight_version=driver.weight_version
        )
        if sample is None:
            if len(partial.token_ids) > had:  # an event without tokens is no progress
                self.watch.news()
            return
        self.watch.news()
        del wave[str(name)]
        if meta is not None and meta["finish_reason"] is None:
            with contextlib.suppress(HttpError):  # it would go on to its end, unread
                driver.abort_each([str(name)])
        self._end(partial.job, sample)

    def _ended_badly(self, key: int, event: Reply | HttpError) -> None:
        """Handle a wave that failed: raise if the server died or refused; after a broken connection request
        the wave's samples again."""
        wave = self._waves.pop(key, {})
        if isinstance(event, Reply):
            message = f"{event.what} answered {event.status}: {event.error_text()}"
            if event.status >= 500:
                self._engine.broken(BadReply(message, code="bad-reply"))
            raise EngineError(f"refused: engine {NAME} refused the request: {message}{self._engine.log_text}")
        if isinstance(event, BadReply):
            raise event
        if not wave:
            return
        self._engine.broken(event)
        for partial in wave.values():
            self._engine.request_again(partial.job, self._tries, event)
            self._waiting.append(partial.job)

    def _end(self, job: Job, sample: Sample) -> None:
        del self._open[job.id], self._bodies[job.id]
        self._engine.ended(job, sample)


def make_server(config: EngineConfig, spec: EngineSpec) -> ServerProcess:
    """A server that is not started yet.

    Raises:
        ConfigError: no SGLang there, one of an unknown version, or a setting that it cannot honour.
    """
    python = Path(config.python or sys.executable)
    check_interpreter(python)
    needed = sglang_environment(config, spec) | {
        "PYTHONSAFEPATH": "1",  # the folder we are in is not its business
        "CUDA_VISIBLE_DEVICES": own_gpus(config, spec),
    }
    environment = server_environment(needed=needed, extra=own_variables(config))
    if environment.get(ORIGINAL_LOGPROBS, "0").lower() in ("1", "true", "yes", "y", "on"):
        raise ConfigError(
            f"wrong-environment: {ORIGINAL_LOGPROBS} = {environment[ORIGINAL_LOGPROBS]} makes SGLang return "
            "logprobs before temperature is applied, which cannot be compared with the trainer's; remove it "
            "from engine.env"
        )
    package = find_package(python, environment)
    port, token = free_port(), new_token()
    command = sglang_server_command(config, spec, port=port, flags=package.flags)
    command += ["--config", str(_token_file(spec.work_dir, token))]
    return own_server(
        config, spec, command=[str(python), *command], environment=environment, port=port, token=token
    )


def _token_file(folder: Path, token: str) -> Path:
    """A config file for SGLang that only this user can read: arguments are public, and SGLang reads its key
    from no environment variable."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder.resolve() / "sglang-token.yaml"
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
        file.write(f'api-key: "{token}"\n')
    return path
