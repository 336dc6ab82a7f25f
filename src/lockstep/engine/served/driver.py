"""The interface of lockstep.engine.served.server, from the trainer's side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from lockstep.config.engine import EngineConfig
from lockstep.engine.remote.driver import (
    SHORT_SECONDS,
    Job,
    Load,
    Sample,
    ServerDriver,
    read_load,
    seconds_left,
    tensor_from_hex,
)
from lockstep.engine.remote.http import HttpClient, reply_errors
from lockstep.engine.remote.reply_fields import logprobs, token_ids, whole
from lockstep.engine.remote.server import ServerProcess
from lockstep.engine.spec import EngineSpec
from lockstep.errors import EngineError
from lockstep.schema.contract import KernelContract
from lockstep.schema.weights import Transport, UpdateSession, WeightBucket
from lockstep.version import __version__


class ServedDriver(ServerDriver):
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
                f"and this process {__version__}; let both have one installation"
            )
        with reply_errors(f"the server of engine {self.name} describes its kernels"):
            found = info["contract"]
            self.contract = None if found is None else KernelContract.from_json(found)
        self._policy_version = None

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"where": "in its own process"}

    # samples

    def body(self, job: Job) -> dict[str, Any]:
        """Nothing: samples of one prompt are requested together, see lockstep.engine.served.engine."""
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
