"""`engine.process = "separate"`: native or hf in a server process.

    trainer's process                                            server's process (local_server/server.py)
    LocalServerEngine ── one POST for what is submitted ───────► engine, as it is embedded elsewhere
                      ◄── an event for each sample as it ends ──
                 ── weights in buckets ───────────────────► its Parameters

A request's samples are asked for together, so that their prompt is computed once, and all that is submitted
before the first step runs together: the engine decodes the same batches as in the trainer's process. A
connection that breaks ends the whole flow; what is missing is asked for again, and its seeds make the same
samples.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from lockstep.config.engine import EngineConfig
from lockstep.engine.local_server.clock import Entry, LogicalClock, border_json
from lockstep.engine.local_server.requests import request_json
from lockstep.engine.remote.driver import (
    SHORT_SECONDS,
    EventStreams,
    Job,
    Load,
    Sample,
    ServerDriver,
    StallDetector,
    logprobs,
    read_load,
    seconds_left,
    tensor_from_hex,
    token_ids,
    whole,
)
from lockstep.engine.remote.engine import RemoteEngine, as_begun
from lockstep.engine.remote.http import BadReply, HttpClient, HttpError, Reply, reply_errors
from lockstep.engine.remote.server import (
    ServerProcess,
    free_port,
    new_token,
    own_gpus,
    own_program,
    own_server,
    own_variables,
    server_client,
    server_environment,
)
from lockstep.engine.spec import EngineSpec
from lockstep.errors import EngineError
from lockstep.observe.files import write_atomic
from lockstep.observe.text import printable
from lockstep.processes.programs import LOCAL_SERVER, python
from lockstep.schema.contract import KernelContract
from lockstep.schema.rollout import Border
from lockstep.schema.weights import Transport, UpdateSession, WeightBucket
from lockstep.version import __version__
from lockstep.wire.server_token import TOKEN

_POLL_SECONDS = 0.1
_ABORT_SECONDS = 1.0
_TRIES = 3


class LocalServerEngine(RemoteEngine):
    """Implements lockstep.protocols.ReceivesWeights. See RemoteEngine for what can be called when."""

    def __init__(self, config: EngineConfig, *, spec: EngineSpec) -> None:
        """Starts the server.

        Raises:
            ConfigError: a GPU that this process does not see.
            EngineError: it does not start in time.
        """
        server = make_server(config, spec)
        self.partial_rollouts = self.cuts_at_borders = config.name == "native"
        self.border: Border | None = None
        self._queue_of_slots: dict[str, Entry] = {}
        """Under a border, by id: all samples of the stream, in their order."""
        client = server_client(config, server)
        self._local_server = LocalServerDriver(config, spec, client=client, server=server)
        self._breaks = 0
        super().__init__(config, spec=spec, client=client, driver=self._local_server, server=server)

    @property
    def contract(self) -> KernelContract | None:
        """The kernels that the engine computes with; None: it promises no bits."""
        return self._local_server.contract

    def broken(self, sign: HttpError) -> None:
        """Give up a flow whose connection broke. Raises ServerDied; EngineError, the third time in a row."""
        self._raise_if_dead(sign)
        self._breaks += 1
        if self._breaks == _TRIES:
            raise EngineError(
                f"unreachable: engine {self.name} is running but dropped the connection for its samples "
                f"{_TRIES} times: {sign}{self._log_text()}"
            )
        self._close_flow()

    def ended(self, job: Job, sample: Any) -> None:
        """See RemoteEngine."""
        super().ended(job, sample)
        self._breaks = 0
        if self.border is None:
            return
        entry = self._queue_of_slots[job.id]
        entry.tokens, entry.over = len(sample.token_ids) - entry.begun, sample.finish_reason != "abort"
        if not (self._jobs or self._new or self._abort.is_set()):
            self._check_border(self.border)

    def _end(self) -> None:
        super()._end()
        self.border = None
        self._queue_of_slots.clear()

    def border_of(self, jobs: Iterable[Job]) -> dict[str, Any] | None:
        """Return the border of the samples that are asked for; after a break those that came before count as
        they are, also those that were cut off."""
        border, queue = self.border, self._queue_of_slots
        if border is None:
            return None
        asked = {job.id: job for job in jobs}
        for job in asked.values():
            begun = sum(len(span.token_ids) for span in job.begun)
            queue.setdefault(job.id, Entry(job.id, job.seed in border.seeds, begun))
        known = [each if each.id in asked else replace(each, over=True) for each in queue.values()]
        return border_json(slots=border.slots, tokens=border.tokens, queue=known)

    def _check_border(self, border: Border) -> None:
        """Check that every sample has the tokens that lengths and slots say. Raises EngineError."""
        clock = LogicalClock(
            slots=border.slots, tokens=border.tokens, queue=list(self._queue_of_slots.values())
        )
        for number, (id, entry) in enumerate(self._queue_of_slots.items()):
            if id == clock.late or (clock.reached and clock.limit(id) != entry.tokens):
                wrong = "more" if clock.reached else "fewer"
                raise EngineError(
                    f"wrong-result: engine {self.name} returned {entry.tokens} new tokens of sample "
                    f"{number}: {wrong} than it has up to the border of rollout.schedule = 'fixed', at step "
                    f"{clock.border}"
                )

    def _new_flow(self) -> _Flow:
        return _Flow(self, EventStreams(self._client))


class _Flow:
    """The samples at the server."""

    def __init__(self, engine: LocalServerEngine, streams: EventStreams) -> None:
        self.watch = StallDetector(engine)
        self._engine, self._streams = engine, streams
        self._id = uuid.uuid4().hex
        self._waiting: list[Job] = []
        self._open: dict[str, Job] = {}
        """Samples at the server."""
        self._opened = 0
        self._abort_again = 0.0

    def add(self, job: Job, body: Mapping[str, Any]) -> None:
        self._waiting.append(job)

    def step(self) -> None:
        if self._waiting:
            self._request()
        for _, event in self._streams.poll(_POLL_SECONDS):
            if isinstance(event, HttpError):
                return self._engine.broken(event)
            if isinstance(event, Reply):
                raise EngineError(
                    f"refused: engine {self._engine.name} refused the request: {event.error_text()} "
                    f"({event.status})"
                )
            if event is not None:
                self._take(event)
        if self._open:
            self.watch.check(len(self._open))

    def abort(self) -> None:
        """Abort: what was not requested yet ends at once, the rest when the server says so."""
        for job in self._waiting:
            self._engine.ended(job, as_begun(job))
        self._waiting.clear()
        if self._open and time.monotonic() > self._abort_again:
            self._engine._local_server.abort([self._id])
            self._abort_again = time.monotonic() + _ABORT_SECONDS

    def close(self) -> None:
        """The server drops what it was asked for here when its connections are closed."""
        self._streams.close()

    def _request(self) -> None:
        """One POST for all that waits, the samples of a turn together."""
        turns: dict[int, list[Job]] = {}
        for job in self._waiting:
            turns.setdefault(id(job.turn), []).append(job)
            self._open[job.id] = job
        groups = [
            request_json(jobs[0].request, ids=[j.id for j in jobs], samples=[j.sample for j in jobs])
            for jobs in turns.values()
        ]
        asked = {"flow": self._id, "groups": groups, "border": self._engine.border_of(self._open.values())}
        body = json.dumps(asked, separators=(",", ":")).encode()
        self._streams.open(self._opened, self._engine._local_server.generate_path, body)
        self._opened += 1
        self._waiting.clear()

    def _take(self, event: bytes) -> None:
        what = f"engine {self._engine.name}"
        value = Reply(status=200, body=event, what=what).object()
        if "error" in value:
            raise EngineError(printable(str(value["error"])), code="refused")
        job = self._open.pop(str(value.get("id")), None)
        if job is None:
            raise BadReply(f"wrong-result: {what} sent an unrequested sample: {ascii(value.get('id'))[:80]}")
        self.watch.news()
        self._engine.ended(job, self._engine._local_server.read(job, value))


def make_server(config: EngineConfig, spec: EngineSpec) -> ServerProcess:
    """A server that is not started yet, and the file that describes it."""
    port, token, own = free_port(), new_token(), own_variables(config)
    spec.work_dir.mkdir(parents=True, exist_ok=True)
    path = spec.work_dir.resolve() / f"{config.name}-server.json"
    write_atomic(path, json.dumps(describe_server(config, spec, port=port), indent=1))
    needed = own_program() | {
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": own_gpus(config, spec),
    }
    return own_server(
        config,
        spec,
        command=[*python(LOCAL_SERVER), str(path)],
        environment=server_environment(needed=needed, extra={**own, TOKEN: token}),
        port=port,
        token=token,
    )


def describe_server(config: EngineConfig, spec: EngineSpec, *, port: int) -> dict[str, Any]:
    """Return what a server must know, as plain JSON: nothing of it is secret."""
    copied = (
        "weights",
        "model_name",
        "dtype",
        "eos_token_ids",
        "max_model_len",
        "batch_invariant",
        "execution",
    )
    return {
        "port": port,
        "config": {name: getattr(config, name) for name in _EMBEDDED},
        "folder": str(spec.folder),
        "device": "cpu" if spec.device == "cpu" else "cuda:0",
        "threads": spec.threads,
        **{name: getattr(spec, name) for name in copied},
    }


_EMBEDDED = ("name", "max_batch", "kv_cache_tokens", "prefill_chunk", "memory_fraction", "eager", "offload")
"""Settings that the engine itself reads."""


# The interface of lockstep.engine.local_server.server, from the trainer's side.


class LocalServerDriver(ServerDriver):
    """Implements lockstep.engine.remote.driver.Driver."""

    generate_path = "/generate"
    _version = __version__

    def __init__(
        self, config: EngineConfig, spec: EngineSpec, *, client: HttpClient, server: ServerProcess
    ) -> None:
        super().__init__(config, spec, client=client, server=server)
        self.name = config.name
        self.contract: KernelContract | None = None
        """Of the engine in the server, once it runs."""
        on_gpu = spec.device != "cpu"
        self.transports: tuple[Transport, ...] = ("disk", "collective")
        if on_gpu:
            self.transports = ("ipc", "disk") if spec.shares_device else ("collective", "disk")
        self._session: dict[str, Any] = {}
        self._policy_version: int | None = None

    # start

    def check(self) -> None:
        info = self._client.get("/info", seconds=SHORT_SECONDS).object()
        if info.get("version") != __version__:
            raise EngineError(
                f"version-differs: the server of engine {self.name} runs lockstep {info.get('version')!a} "
                f"but this process runs {__version__}; use one installation for both"
            )
        with reply_errors(f"the server of engine {self.name} describes its kernels"):
            found = info["contract"]
            self.contract = None if found is None else KernelContract.from_json(found)
        self._policy_version = None

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"where": "in its own process"}

    # samples

    def body(self, job: Job) -> dict[str, Any]:
        """Nothing: samples of one prompt are requested together, see lockstep.engine.local_server.engine."""
        return {}

    def read(self, job: Job, reply: Mapping[str, Any]) -> Sample:
        """Parse an event."""
        with reply_errors(f"the server of engine {self.name} sent no valid sample"):
            expected = self._policy_version
            if expected is not None and reply["policy_version"] != expected:
                raise ValueError(f"policy_version {reply['policy_version']!a} is not {expected}")
            reason = reply["finish_reason"]
            if reason not in ("stop", "length", "abort"):
                raise ValueError(f"finish_reason {ascii(reason)[:80]} is unknown")
            return Sample(
                token_ids=token_ids(reply["token_ids"], "token_ids"),
                logprobs=logprobs(reply["logprobs"], "logprobs"),
                finish_reason=reason,
                stop_reason=reply["stop_reason"],
                cached_tokens=whole(reply["cached_tokens"], "cached_tokens"),
            )

    def load(self, seconds: float) -> Load:
        reply = self._client.get("/load", seconds=seconds).object()
        return read_load(reply.get("tokens"), reply.get("kv_cache_use"))

    def abort(self, ids: Sequence[str]) -> None:
        """Abort the flows of these ids."""
        for flow in ids:
            self._post("/abort", {"flow": flow}, seconds=SHORT_SECONDS)

    # memory

    def sleep(self) -> None:
        self._timed("/sleep", {}, seconds=self._config.update_seconds)

    def wake(self) -> None:
        self._timed("/wake", {}, seconds=self._config.update_seconds)

    def memory(self) -> dict[str, int]:
        reply = self._client.get("/load", seconds=SHORT_SECONDS).object()
        with reply_errors(f"the server of engine {self.name} tells its memory"):
            return {name: whole(reply.get(name), name) for name in ("weights_bytes", "kv_cache_bytes")}

    # weights

    def begin(self, session: UpdateSession) -> None:
        self._session = {"policy_version": session.policy_version, "run_id": session.run_id}
        self._timed("/weights/begin", {"session": self._session}, seconds=seconds_left(session, self._config))

    def receive(self, bucket: WeightBucket, seconds: float) -> None:
        body = {"session": self._session, "bucket": bucket.as_json()}
        self._timed("/weights/receive", body, seconds=seconds)

    def finish(self, session: UpdateSession) -> None:
        """The server takes a bucket for one session only, and drops its caches with the old version."""
        seconds = seconds_left(session, self._config)
        self._timed("/weights/finish", {"session": self._session}, seconds=seconds)
        self._policy_version = session.policy_version

    def fail(self, reason: str) -> None:
        self._timed("/weights/fail", {}, seconds=SHORT_SECONDS)

    def read_back(self, names: Sequence[str]) -> dict[str, Tensor]:
        held = self._timed("/weights/read", {"names": list(names)}, seconds=self._config.update_seconds)
        with reply_errors(f"the server of engine {self.name} reads its weights"):
            return {name: tensor_from_hex(one["dtype"], one["hex"]) for name, one in held.items()}

    # HTTP

    def _timed(self, path: str, body: Mapping[str, Any], *, seconds: float) -> dict[str, Any]:
        """POST with a deadline that the server keeps, too: its own error is the better one."""
        return self._post(path, {**body, "seconds": seconds}, seconds=seconds + 1.0).object()
