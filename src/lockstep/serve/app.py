"""The HTTP side of `lockstep serve`: loopback, a token per user, and limits before anything is decoded."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route
from tinker import types

from lockstep.cluster.ray import is_loopback
from lockstep.errors import ConfigError, DataError, LockstepError
from lockstep.processes.http_server import LOOPBACK, HttpServer
from lockstep.serve import wire
from lockstep.serve.listing import Listing, time_of
from lockstep.serve.service import NotKept, Service
from lockstep.serve.sessions import Gone
from lockstep.serve.store import same
from lockstep.serve.work import Busy

log = logging.getLogger(__name__)
_POLL_SECONDS, _BODY_SECONDS, _URL_SECONDS = 20.0, 60.0, 3600
Handler = Callable[[Request, str, bytes], Awaitable[Response]]

CONFIG = {
    # One chunk after the other: each is one request of a client's sequence.
    "parallel_fwdbwd_chunks": False,
    "proto_compress_fwdbwd": False,
    "sample_use_retrieve_futures": False,
    "sample_join_sampling_session": False,
    "custom_loss_server_side": False,
    "use_pyqwest_transport": False,
}
"""What the client is told to do; see tinker.types.ClientConfigResponse."""
REFUSED = (
    "copy_weights",
    "create_custom_loss",
    "join_sampling_session",
    "retrieve_futures",
    "auth/token",
)
"""Requests of the client that are not served."""


class Api:
    """The routes below /api/v1, over a Service.

    Args:
        tokens: user -> token.
        hosts: names of this server; empty: any.
    """

    def __init__(self, service: Service, tokens: Mapping[str, str], *, hosts: Collection[str]) -> None:
        self._service, self._tokens, self._hosts = service, dict(tokens), frozenset(hosts)
        self._key = secrets.token_bytes(32)
        posts: dict[str, Callable[[bytes, str], Any]] = {
            "client/config": lambda body, user: CONFIG,
            "client/dynamic_config": lambda body, user: {"refresh_interval_sec": 300},
            "telemetry": lambda body, user: {"status": "accepted"},
            "session_heartbeat": self._heartbeat,
            "create_model": self._queued(types.CreateModelRequest, service.create_model),
            "get_info": self._info,
            "optim_step": self._queued(types.OptimStepRequest, service.optim_step),
            "save_weights": self._queued(types.SaveWeightsRequest, service.save),
            "save_weights_for_sampler": self._queued(
                types.SaveWeightsForSamplerRequest, service.save_for_sampler
            ),
            "save_weights_external": self._queued(types.SaveWeightsExternalRequest, service.save_external),
            "load_weights": self._queued(types.LoadWeightsRequest, service.load),
            "forward_backward": self._train,
            "create_sampling_session": self._create_sampling,
            "asample": self._sample,
            "weights_info": self._weights_info,
            **{name: self._refused(name) for name in REFUSED},
        }
        listing = Listing(service.sessions, service.store)
        gets: dict[str, Callable[[Request, str], Any]] = {
            "healthz": lambda request, user: {"status": "ok"},
            "get_server_capabilities": lambda request, user: service.capabilities(),
            "samplers/{sampler:path}": self._get_sampler,
            "training_runs": lambda request, user: listing.runs(request.query_params, user),
            "training_runs/{model}": lambda request, user: listing.run(request.path_params["model"], user),
            "training_runs/{model}/checkpoints": lambda request, user: listing.checkpoints(
                request.path_params["model"], user
            ),
            "checkpoints": lambda request, user: listing.users_checkpoints(request.query_params, user),
        }
        checkpoint = "training_runs/{model}/checkpoints/{kind}/{name}"
        self.routes = [
            *(self._route(path, self._post(answer)) for path, answer in posts.items()),
            *(self._route(path, self._get(answer), "GET") for path, answer in gets.items()),
            self._route(checkpoint, self._delete_checkpoint, "DELETE"),
            self._route("training_runs/{model}/checkpoints/{name}", self._delete_untyped, "DELETE"),
            self._route(f"{checkpoint}/ttl", self._set_ttl, "PUT"),
            self._route(f"{checkpoint}/external_weights_urls", self._urls, "GET"),
            Route("/api/v1/external/{until}/{key}/{model}/{name}/{file}", self._download),
            self._route("create_session", self._create_session),
            self._route("sessions/{session}/finish", self._finish),
            self._route("retrieve_future", self._retrieve),
        ]

    def _route(self, path: str, handler: Handler, method: str = "POST") -> Route:
        async def endpoint(request: Request) -> Response:
            try:
                user = self._user(request)
                return await handler(request, user, await _body(request))
            except LockstepError as error:
                return _failed(error)

        return Route(f"/api/v1/{path}", endpoint, methods=[method])

    def _user(self, request: Request) -> str:
        """Return whose token the request has. Raises DataError: nobody's, or for a server of another name."""
        # A page of another site can make a browser send requests here under its own name.
        if self._hosts and request.headers.get("host", "").lower() not in self._hosts:
            raise _NotAllowed("not-authenticated: this server has other names")
        given = request.headers.getlist("x-api-key")
        found = [user for user, token in self._tokens.items() if len(given) == 1 and same(given[0], token)]
        if not found:
            raise _NotAllowed("not-authenticated: X-API-Key is not the token of a user of this server")
        return found[0]

    @staticmethod
    def _post(answer: Callable[[bytes, str], Any]) -> Handler:
        async def handler(request: Request, user: str, body: bytes) -> Response:
            return _json(answer(body, user))

        return handler

    @staticmethod
    def _get(answer: Callable[[Request, str], Any]) -> Handler:
        async def handler(request: Request, user: str, body: bytes) -> Response:
            return _json(answer(request, user))

        return handler

    @staticmethod
    def _queued(kind: Any, queue: Callable[[Any, str], str]) -> Callable[[bytes, str], Any]:
        """A request whose result is polled for."""
        return lambda body, user: {"request_id": queue(wire.parse(kind, body), user)}

    @staticmethod
    def _refused(name: str) -> Callable[[bytes, str], Any]:
        def answer(body: bytes, user: str) -> Any:
            raise DataError(f"refused: {name} is not served by Lockstep", request=name)

        return answer

    def _heartbeat(self, body: bytes, user: str) -> Any:
        self._service.sessions.get(wire.parse(types.SessionHeartbeatRequest, body).session_id, user)
        return {"type": "session_heartbeat"}

    def _info(self, body: bytes, user: str) -> Any:
        return self._service.info(wire.parse(types.GetInfoRequest, body).model_id, user)

    def _train(self, body: bytes, user: str) -> Any:
        return {"request_id": self._service.train(wire.train_request(body), user)}

    def _create_sampling(self, body: bytes, user: str) -> Any:
        request = wire.parse(types.CreateSamplingSessionRequest, body)
        return {
            "type": "create_sampling_session",
            "sampling_session_id": self._service.create_sampling(request, user).id,
        }

    def _sample(self, body: bytes, user: str) -> Any:
        request_id, sequence_ids = self._service.sample(wire.sample_request(body), user)
        return {"request_id": request_id, "sample_sequence_ids": sequence_ids}

    def _get_sampler(self, request: Request, user: str) -> Any:
        sampling = self._service.sessions.sampling(request.path_params["sampler"], user)
        path = None if sampling.checkpoint is None else sampling.checkpoint.path
        return {"sampler_id": sampling.id, "base_model": sampling.base.name, "model_path": path}

    def _weights_info(self, body: bytes, user: str) -> Any:
        about = self._service.store.find(wire.tinker_path(body), owner=user).about
        adapters = about.adapters or {}
        return {
            "base_model": about.base_model,
            "is_lora": about.adapters is not None,
            "lora_rank": adapters.get("rank"),
            "train_unembed": adapters.get("unembed"),
            "train_mlp": adapters.get("mlp"),
            "train_attn": adapters.get("attention"),
        }

    async def _create_session(self, request: Request, user: str, body: bytes) -> Response:
        wire.parse(types.CreateSessionRequest, body)
        session = self._service.sessions.create(user, request.headers.get("x-idempotency-key"))
        return _json({"type": "create_session", "session_id": session.id})

    async def _finish(self, request: Request, user: str, body: bytes) -> Response:
        self._service.sessions.finish(request.path_params["session"], user)
        return Response(status_code=204)

    async def _urls(self, request: Request, user: str, body: bytes) -> Response:
        """Addresses from which a program without the token can read a folder's files, for a while."""
        saved = self._service.store.find(_path_of(request), owner=user)
        if saved.kind != "external_weights":
            raise DataError(f"refused: {saved.path} has no files for others; use save_weights_external")
        until = int(time.time()) + _URL_SECONDS
        place = f"{until}/{self._signed(user, until, saved.model_id, saved.name)}"
        base = f"{request.url.scheme}://{request.url.netloc}/api/v1/external"
        urls = {name: quote(f"{place}/{saved.model_id}/{saved.name}/{name}") for name in saved.files()}
        expires = time_of(until)
        return _json({"urls": {name: f"{base}/{rest}" for name, rest in urls.items()}, "expires": expires})

    def _signed(self, *parts: str | int) -> str:
        return hmac.digest(self._key, json.dumps(parts).encode(), "sha256").hex()

    async def _download(self, request: Request) -> Response:
        parts = request.path_params
        until, model, name = (parts[key] for key in ("until", "model", "name"))
        try:
            given = until.isascii() and until.isdecimal() and len(until) <= 20
            # The user is not in the address: its name may have a "/".
            users = [
                user
                for user in (self._tokens if given else ())
                if same(parts["key"], self._signed(user, int(until), model, name))
            ]
            if not users or int(until) < time.time():
                raise _NotAllowed("not-authenticated: this address is not valid, or no longer")
            path = f"tinker://{model}/external_weights/{name}"
            saved = self._service.store.find(path, owner=users[0])
            if parts["file"] not in saved.files():
                raise Gone(f"unknown-name: {path} has no such file")
            return FileResponse(saved.folder / parts["file"])
        except LockstepError as error:
            return _failed(error)

    async def _delete_checkpoint(self, request: Request, user: str, body: bytes) -> Response:
        self._service.store.delete(_path_of(request), owner=user)
        return Response(status_code=204)

    async def _set_ttl(self, request: Request, user: str, body: bytes) -> Response:
        ttl = wire.parse(wire.TTLRequest, body).ttl_seconds
        self._service.store.set_ttl(_path_of(request), ttl, owner=user)
        return Response(status_code=204)

    @staticmethod
    async def _delete_untyped(request: Request, user: str, body: bytes) -> Response:
        name = request.path_params["name"][:80]
        raise DataError(f"wrong-format: checkpoint id {name!r} must be KIND/NAME, such as weights/{name}")

    async def _retrieve(self, request: Request, user: str, body: bytes) -> Response:
        """Wait for a result, for a while: the client asks again."""
        wanted = wire.parse(types.FutureRetrieveRequest, body)
        job = self._service.job(wanted.request_id, user)
        future = asyncio.wrap_future(job.future)
        await asyncio.wait([future], timeout=_POLL_SECONDS)
        if not future.done():
            waits = {"type": "try_again", "request_id": job.id, "queue_state": "active"}
            return _json(waits, status=408)
        error = future.exception()
        if error is None:
            answer = future.result()
            return Response(answer.body, media_type=wire.PROTOBUF if answer.protobuf else "application/json")
        if isinstance(error, LockstepError):
            category = "user" if isinstance(error, DataError) else "server"
            return _json({"error": f"{error.code}: {error}", "category": category})
        return _json({"error": "a bug in the server; its log has the traceback", "category": "server"})


class _NotAllowed(DataError):
    """No token."""


async def _body(request: Request) -> bytes:
    """Return the body of a request, of which no more is read than is allowed."""
    if request.headers.get("content-encoding", "identity") != "identity":
        raise DataError("refused: compressed bodies are not served", header="content-encoding")
    parts, size = [], 0
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size > wire.MOST_BODY:
                    raise DataError(f"too-large: the body has more than {wire.MOST_BODY:,} bytes")
                parts.append(part)
    except TimeoutError as error:
        raise DataError(f"deadline: the body did not come within {_BODY_SECONDS:g} s") from error
    except ClientDisconnect as error:
        raise DataError("wrong-format: the body is not whole") from error
    return b"".join(parts)


def _failed(error: LockstepError) -> Response:
    status = 400
    if isinstance(error, _NotAllowed):
        status = 401
    elif isinstance(error, Busy):
        status = 429
    elif isinstance(error, NotKept):
        status = 410
    elif isinstance(error, Gone) or error.code == "no-such-file":
        status = 404
    elif error.code == "too-large":
        status = 413
    return _json({"detail": f"{error.code}: {error}", **error.data}, status=status)


def _not_served(request: Request, error: Exception) -> Response:
    """Answer a request that no route takes."""
    what = f"{request.method} {request.url.path[:200]}"
    return _json({"code": "refused", "detail": f"refused: {what} is not served by Lockstep"}, status=404)


def _json(value: Any, status: int = 200) -> Response:
    return Response(json.dumps(value), status, media_type="application/json")


def _path_of(request: Request) -> str:
    """The checkpoint in the path of a request."""
    return "tinker://{model}/{kind}/{name}".format(**request.path_params)


class Server:
    """A server that listens. `run` answers until a signal or `stop`.

    Raises:
        ConfigError: the port is taken, or the host is not one of this machine.
    """

    def __init__(
        self, service: Service, tokens: Mapping[str, str], *, port: int, host: str = LOOPBACK
    ) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listening = socket.create_server((host, port), family=family)
        except OSError as error:
            raise ConfigError(
                f"port-in-use: --host {host} --port {port} ({error.strerror}); give another"
            ) from error
        self.port = int(listening.getsockname()[1])
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}"
        self._service = service
        # Others know this machine by names that it does not.
        names = (host, LOOPBACK, "localhost", "[::1]") if is_loopback(host) else ()
        api = Api(service, tokens, hosts={f"{name}:{self.port}" for name in names})
        app = Starlette(routes=api.routes, exception_handlers={404: _not_served, 405: _not_served})
        self._server = HttpServer(app, listening)

    def run(self, ready: Callable[[], None] = lambda: None) -> None:
        """Answer requests; `ready` is called when the first can be answered.

        Raises:
            RankError: another rank is gone, or did not arrive in time.
        """
        worker = self._service.worker
        worker.on_failure = self.stop
        worker.start()
        try:
            self._server.run(ready)
        finally:
            worker.close()
            if worker.failure is not None:
                raise worker.failure

    def stop(self) -> None:
        """End `run`, from another thread."""
        self._server.stop()
