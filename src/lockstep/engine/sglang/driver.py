"""SGLang's HTTP interface, as of 0.5.16 to 0.5.23.

Behaviour of these versions that their answers do not show:

    a failed update                    answers success = false, with status 400 or 200; nothing raises
    an unknown weight                  answers success, and is left out: names are checked before
    a wrong shape                      stops the scheduler at an assertion, and the server with it: checked
    flush_cache of an update request   stops the scheduler when a sample runs: false, and flushed apart
    /flush_cache                       may say no: checked; with `timeout` it waits for an idle engine
    /update_weights_from_tensor        answers before the GPU has copied: a weight is read, which waits for it
    released weights                   come back as anything: the engine is dirty then
    /release_memory_occupation         stops the scheduler unless it is idle: a flush waits for that first
    /health                            generates a token, on released memory too: /model_info is asked instead
    context_length                     is reached by no sample: 8 more positions than samples need
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from torch import Tensor

from lockstep.config.engine import EngineConfig
from lockstep.engine.remote.driver import (
    SHORT_SECONDS,
    Job,
    Load,
    Sample,
    ServerDriver,
    number,
    read_load,
    whole,
)
from lockstep.engine.remote.http import BadReply, HttpClient, HttpError, Reply, Timeout, reply_errors
from lockstep.engine.remote.server import ServerProcess
from lockstep.engine.sglang.translate import SPARE_CONTEXT, Partial, check_version, sglang_sampling
from lockstep.engine.sglang.weights import (
    LOAD_FORMAT,
    READ_VALUES,
    Expected,
    check_no_padding,
    tensor_payload,
)
from lockstep.engine.spec import EngineSpec
from lockstep.errors import ConfigError, EngineError
from lockstep.observe.files import read_json
from lockstep.observe.text import printable
from lockstep.schema.weights import Transport, UpdateSession, WeightBucket
from lockstep.wire.receive import GroupError, announce

NAME = "sglang"
_GB = 1 << 30
_MEMORY_SECONDS = 60.0
_DRAIN_SECONDS = 30.0


class SGLangDriver(ServerDriver):
    """Implements lockstep.engine.remote.driver.Driver. One thread at a time, but `abort` and `load`."""

    name = NAME
    generate_path = "/generate"
    ready_path = "/model_info"  # /health generates a token, on released memory too

    def __init__(
        self, config: EngineConfig, spec: EngineSpec, *, client: HttpClient, server: ServerProcess | None
    ) -> None:
        super().__init__(config, spec, client=client, server=server)
        self.transports = _transports(config, spec, started=server is not None)
        self.incremental = False
        self.weight_version: str | None = None
        """The weight version that the server reports for its samples."""
        self.stuck = False
        """Whether the server did not answer an update in time: it may wait for us for ever."""
        self.dropped_weights = False
        self._expected: Expected | None = None
        self._sessions: bool | None = None
        self._in_session = False
        self._group: str | None = None
        self._reads = True

    # start

    def check(self) -> None:
        info = self._client.get("/server_info", seconds=_MEMORY_SECONDS).object()
        model = self._client.get("/model_info", seconds=SHORT_SECONDS).object()
        where = f"the server at {self._client.url}"
        self._version = version = str(info.get("version"))
        try:
            check_version(version)
        except ConfigError as error:
            raise error.with_message(f"{where}: {error}", kind=EngineError) from error
        check_server(info, model, config=self._config, spec=self._spec, where=where)
        self.incremental = info.get("incremental_streaming_output") is True
        self.weight_version = model.get("weight_version")
        self._sessions, self._in_session, self._group, self.stuck = None, False, None, False
        self.dropped_weights = False

    # samples

    def body(self, job: Job) -> dict[str, Any]:
        """The sampling parameters; `sglang_samples.request_body` puts many samples into one request."""
        request, spec = job.request, self._spec
        sampling = sglang_sampling(
            request.sampling,
            seed=job.drawn_seed,
            eos_token_ids=spec.eos_token_ids,
            seeded=self._config.batch_invariant,
        )
        # More than fits is an error to SGLang; to us the context is one of a sample's two ends.
        room = spec.max_model_len - len(request.prompt_token_ids)
        return sampling | {"max_new_tokens": min(request.sampling.max_tokens, room)}

    def read(self, job: Job, reply: Mapping[str, Any]) -> Sample:
        """Parse a sample that was answered as a whole."""
        sample = Partial(job=job, incremental=False).add(
            reply, aborting=True, weight_version=self.weight_version
        )
        if sample is None:
            raise BadReply(f"wrong-result: engine {NAME} returned an unfinished sample")
        return sample

    def load(self, seconds: float) -> Load:
        """Read the load from memory that the scheduler writes, at no cost to it."""
        loads = self._client.get("/v1/loads?include=core", seconds=seconds).object().get("loads")
        first = loads[0] if isinstance(loads, list) and loads and isinstance(loads[0], dict) else {}
        return read_load(first.get("num_used_tokens"), first.get("token_usage"))

    def abort(self, ids: Sequence[str]) -> None:
        """Abort samples by our ids; on our own server, all of them."""
        if self._server is not None:
            self._ok("/abort_request", {"rid": "", "abort_all": True}, seconds=SHORT_SECONDS)
            return
        self.abort_each([f"{id}." for id in ids])

    def abort_each(self, rids: Sequence[str]) -> None:
        """Abort samples by the server's ids. Raises EngineError."""
        deadline = time.monotonic() + SHORT_SECONDS
        with self._client.batch(limit=32) as batch:
            for one in rids:
                batch.submit(one, "/abort_request", {"rid": one, "abort_all": False})
            while batch.waiting and time.monotonic() < deadline:
                for _, reply in batch.poll(0.1):
                    if isinstance(reply, HttpError):
                        raise reply
                    _check_status(reply)

    # sleep

    def sleep(self) -> None:
        if not self._config.offloads:
            return
        self.flush(_DRAIN_SECONDS)
        tags = self._sleeping_tags()
        self._ok("/release_memory_occupation", {"tags": tags}, seconds=_MEMORY_SECONDS)
        self.dropped_weights = "weights" in tags

    def wake(self) -> None:
        if self._config.offloads:
            self._ok("/resume_memory_occupation", {"tags": self._sleeping_tags()}, seconds=_MEMORY_SECONDS)
        self.flush(_DRAIN_SECONDS)

    def _sleeping_tags(self) -> list[str]:
        """Tags of the memory to release: weights only when they will be sent again anyway."""
        return ["kv_cache", "weights"] if self._spec.weights == "pushed" else ["kv_cache"]

    def flush(self, seconds: float) -> None:
        """Flush the prefix cache as soon as nothing runs. Raises EngineError when it is not flushed."""
        seconds = max(seconds, 0.1)
        path = f"/flush_cache?timeout={quote(f'{seconds:.1f}')}"
        reply = self._client.post(path, seconds=seconds + SHORT_SECONDS)
        if reply.status != 200:
            raise EngineError(
                f"refused: engine {NAME} did not flush its prefix cache ({reply.error_text().strip()}): "
                "samples are still running, perhaps from another client, so keys and values of the old "
                "weights would be reused"
            )

    # weights

    def begin(self, session: UpdateSession) -> None:
        if self._expected is None:
            self._expected = Expected(self._spec.folder)
        self._expected.begin()
        seconds = session.deadline - time.monotonic()
        if self._sessions is not False:
            reply = self._client.post("/begin_weight_update", {}, seconds=seconds)
            self._sessions = reply.status != 404
            if self._sessions:
                if reply.status == 400 and "already open" in reply.error_text():
                    self._done("/end_weight_update", {}, seconds=seconds)  # of a run that died in the middle
                    reply = self._client.post("/begin_weight_update", {}, seconds=seconds)
                _check_done(reply)
                self._in_session = True

    def receive(self, bucket: WeightBucket, seconds: float) -> None:
        expected = self._require_expected()
        expected.check(bucket.specs)  # before anything is sent
        deadline = time.monotonic() + seconds
        try:
            if bucket.transport == "ipc":
                self._receive_ipc(bucket, deadline)
            elif bucket.transport == "collective":
                self._receive_collective(bucket, deadline)
            else:
                self._receive_file(bucket, deadline)
        except Timeout:
            self.stuck = True
            raise
        except GroupError as error:
            raise EngineError(f"transfer-failed: engine {NAME}: {error}") from error

    def finish(self, session: UpdateSession) -> None:
        self._require_expected().check_complete()
        if self._in_session:
            self._done("/end_weight_update", {}, seconds=session.deadline - time.monotonic())
            self._in_session = False
        self.flush(session.deadline - time.monotonic())
        version = f"{session.run_id}/{session.policy_version}"
        self._done(
            "/update_weight_version",
            {"new_version": version, "abort_all_requests": False},
            seconds=SHORT_SECONDS,
        )
        self.weight_version, self.dropped_weights = version, False

    def fail(self, reason: str) -> None:
        if self._in_session and not self.stuck:
            self._in_session = False
            self._done("/end_weight_update", {}, seconds=SHORT_SECONDS)

    def _receive_ipc(self, bucket: WeightBucket, deadline: float) -> None:
        payload = tensor_payload(bucket)
        body = {
            "serialized_named_tensors": [payload] * self._config.tp,
            "load_format": LOAD_FORMAT,
            "flush_cache": False,
        }
        self._done("/update_weights_from_tensor", body, seconds=deadline - time.monotonic())
        self._wait_for_copies(deadline)

    def _wait_for_copies(self, deadline: float) -> None:
        """Wait until the GPU has copied what the last request sent: reading a weight to the host waits for
        the stream of that copy. A model that cannot read weights samples one token instead."""
        if self._reads:
            reply = self._read(
                self._require_expected().smallest(), rows=1, seconds=deadline - time.monotonic()
            )
            self._reads = reply.status == 200
        if not self._reads:
            body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1}, "stream": False}
            self._client.post("/generate", body, seconds=deadline - time.monotonic()).object()

    def _receive_collective(self, bucket: WeightBucket, deadline: float) -> None:
        check_no_padding(bucket)
        handle = bucket.handle or {}
        if handle["group"] != self._group:
            self._connect_group(handle, deadline)
        # SGLang's own code receives, and knows nothing of the marks that our trainer waits for.
        announce(handle, receivers=self._config.tp)
        body = {
            "names": [spec.name for spec in bucket.specs],
            "dtypes": [spec.dtype for spec in bucket.specs],
            "shapes": [list(spec.shape) for spec in bucket.specs],
            "group_name": handle["group"],
            "load_format": LOAD_FORMAT,
            "flush_cache": False,
        }
        self._done("/update_weights_from_distributed", body, seconds=deadline - time.monotonic())

    def _connect_group(self, handle: Mapping[str, Any], deadline: float) -> None:
        """Create the process group; nccl returns at once, and ranks connect in the first broadcast."""
        if self._group is not None:  # of an earlier trainer; SGLang keeps what it is not told to leave
            self._client.post(
                "/destroy_weights_update_group", {"group_name": self._group}, seconds=SHORT_SECONDS
            )
        body = {
            "master_address": handle["address"],
            "master_port": handle["port"],
            "rank_offset": handle["first_rank"],
            "world_size": handle["world_size"],
            "group_name": handle["group"],
            "backend": handle["backend"],
        }
        self._done("/init_weights_update_group", body, seconds=deadline - time.monotonic())
        self._group = handle["group"]

    def _receive_file(self, bucket: WeightBucket, deadline: float) -> None:
        """Receive a file by its folder: SGLang loads all *.safetensors of a folder."""
        path = Path((bucket.handle or {})["path"]).resolve()
        with tempfile.TemporaryDirectory(prefix="sglang-", dir=path.parent) as folder:
            (Path(folder) / "model.safetensors").symlink_to(path)
            body = {"model_path": folder, "load_format": "safetensors", "flush_cache": False}
            self._done("/update_weights_from_disk", body, seconds=deadline - time.monotonic())

    def read_back(self, names: Sequence[str]) -> dict[str, Tensor] | None:
        """The first values by name, in float32, of the weights that can be read within seconds; None for a
        model whose weights SGLang cannot read."""
        if self._expected is None:
            self._expected = Expected(self._spec.folder)
        values: dict[str, Tensor] = {}
        for name in self._expected.readable(names) if self._reads else ():
            reply = self._read(name, rows=self._expected.rows_to_read(name), seconds=_MEMORY_SECONDS)
            if reply.status != 200:
                self._reads = False
                break
            values[name] = _values(reply)
        return values if self._reads else None

    def _read(self, name: str, *, rows: int, seconds: float) -> Reply:
        return self._client.post(
            "/get_weights_by_name", {"name": name, "truncate_size": rows}, seconds=seconds
        )

    def memory(self) -> dict[str, int]:
        reply = self._client.get("/server_info", seconds=SHORT_SECONDS)
        states = reply.object().get("internal_states")
        usage = states[0].get("memory_usage") if isinstance(states, list) and _object(states[:1]) else None
        known = {"weight": "weights", "kvcache": "kv_cache"}
        with reply_errors(f"{reply.what} did not return the server's memory use"):
            return {
                ours: int(number(usage[theirs], theirs) * _GB)
                for theirs, ours in known.items()
                if isinstance(usage, dict) and usage.get(theirs) is not None
            }

    # requests

    def _require_expected(self) -> Expected:
        assert self._expected is not None, "begin comes first"
        return self._expected

    def _ok(self, path: str, body: Any, *, seconds: float) -> None:
        _check_status(self._client.post(path, body, seconds=seconds))

    def _done(self, path: str, body: Any, *, seconds: float) -> None:
        """Raises EngineError unless the server says that it did it."""
        _check_done(self._client.post(path, body, seconds=max(seconds, 0.1)))


def _short(value: Any) -> str:
    return printable(str(value)[:200])


def _object(values: Sequence[Any]) -> bool:
    return len(values) == 1 and isinstance(values[0], dict)


def _values(reply: Reply) -> Tensor:
    """Return the first values of a weight that was read back, in float32."""
    try:
        return torch.tensor(reply.json(), dtype=torch.float32).flatten()[:READ_VALUES]
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise BadReply(f"bad-reply: {reply.what} did not return the values of a weight: {error}") from error


def _check_status(reply: Reply) -> None:
    """Raises EngineError unless the status is 200."""
    if reply.status != 200:
        raise EngineError(f"refused: {reply.what} answered {reply.status}: {reply.error_text()}")


def _check_done(reply: Reply) -> None:
    """Raises EngineError for a failure, which SGLang reports in the body and not always in the status."""
    try:
        body = json.loads(reply.body)
    except (ValueError, RecursionError):
        body = None
    if reply.status == 200 and isinstance(body, dict) and body.get("success") is True:
        return
    named = isinstance(body, dict) and "message" in body
    text = printable(str(body["message"])[:400]) if named else reply.error_text()
    raise EngineError(f"refused: {reply.what} failed (status {reply.status}): {text}")


def _transports(config: EngineConfig, spec: EngineSpec, *, started: bool) -> tuple[Transport, ...]:
    """Transports, best first. The GPUs of a server at a url are unknown: files always work."""
    if not started:
        return ("disk", "collective", "ipc")
    if not spec.device.startswith("cuda"):
        return ("disk",)
    return ("ipc", "disk") if spec.shares_device else ("collective", "disk")


def check_server(
    info: Mapping[str, Any],
    model: Mapping[str, Any],
    *,
    config: EngineConfig,
    spec: EngineSpec,
    where: str,
) -> None:
    """Raises EngineError for a server that does not serve this model in the way that this run needs."""
    ours = read_json(spec.folder / "config.json", EngineError)
    with reply_errors(f"engine {NAME}: {where} reported invalid server info"):
        room = info.get("max_req_input_len")
        tokens = None if room is None else whole(room, "max_req_input_len") + 6
        parts = info.get("dp_size")
        parts = 1 if parts is None else whole(parts, "dp_size")
    wrong = [
        (
            model.get("architectures") != ours.get("architectures"),
            f"serves {_short(model.get('model_path'))} ({_short(model.get('architectures'))}), but this run "
            f"needs {spec.model_name} ({ours.get('architectures')})",
        ),
        (
            info.get("dtype") != spec.dtype,
            f"has dtype {_short(info.get('dtype'))}; start it with {spec.dtype}",
        ),
        (
            tokens is None or tokens < spec.max_model_len + SPARE_CONTEXT,
            f"accepts {tokens} tokens of prompt plus completion, but needs "
            f"{spec.max_model_len + SPARE_CONTEXT} for samples of {spec.max_model_len}; raise its "
            "context_length and its KV cache (engine.memory_fraction), or lower engine.max_model_len",
        ),
        (
            bool(info.get("enable_deterministic_inference")) != config.batch_invariant,
            f"has enable_deterministic_inference = {_short(info.get('enable_deterministic_inference'))}, but "
            f"engine.batch_invariant = {config.batch_invariant}; make them equal",
        ),
        (
            bool(info.get("allow_auto_truncate")),
            "has allow_auto_truncate, which silently truncates prompts; start it without",
        ),
        (
            bool(info.get("speculative_algorithm")),
            "uses speculative decoding, which changes what its logprobs mean; start it without",
        ),
        (parts not in (0, 1), "has dp_size > 1; set engine.replicas instead"),
        (
            bool(info.get("preferred_sampling_params")),
            "has preferred_sampling_params, which change requests; start it without",
        ),
    ]
    for failed, text in wrong:
        if failed:
            raise EngineError(f"server-settings: engine {NAME}: {where} {text}")
