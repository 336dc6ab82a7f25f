"""The server of `lockstep view`: loopback, GET, and whoever has the token of the printed URL."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from lockstep.errors import ConfigError, DataError, LockstepError
from lockstep.observe.files import read_plain
from lockstep.view.render import STATIC, Site

HOST = "127.0.0.1"
_NO_FORMS = "base-uri 'none'; frame-ancestors 'none'"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    f"form-action 'self'; {_NO_FORMS}"
)
REPORT_POLICY = f"sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:; {_NO_FORMS}"
"""Reports are whole pages with styles of their own: they get a null origin and no script."""
HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
_KINDS = {".css": "text/css", ".js": "text/javascript", ".txt": "text/plain", "": "text/plain"}
_PORTS_TRIED = 50
_MOST_POINTS = 20_000

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]


class Guard:
    """ASGI. Answers only GET and HEAD, for this server's own names, with the token; moves the token of a URL
    to a cookie; adds HEADERS to every answer.

    A page of another site can make a browser send requests here, and after DNS rebinding under its own name:
    so the Host header must be one of this server's names.
    """

    def __init__(self, app: Any, *, token: str, port: int) -> None:
        self._app, self._token = app, token.encode()
        self._hosts = {f"{name}:{port}" for name in (HOST, "localhost", "[::1]")}
        # Cookies do not keep the ports of a host apart, and there may be several servers.
        self._cookie = f"lockstep-view-{port}"

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_safely(message: Any) -> None:
            if message["type"] == "http.response.start":
                there = {name for name, _ in message["headers"]}
                message["headers"] = list(message["headers"]) + [
                    (name.encode(), value.encode())
                    for name, value in HEADERS.items()
                    if name.encode() not in there
                ]
            await send(message)

        answer = self._refusal(scope) or self._app
        await answer(scope, receive, send_safely)

    def _refusal(self, scope: Any) -> Response | None:
        """Return the answer to a request that the app must not see."""
        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        if len(hosts) != 1 or hosts[0].lower() not in self._hosts:
            return Response("This server has other names.", 421, media_type="text/plain")
        if scope["method"] not in ("GET", "HEAD"):
            return Response("GET only.", 405, {"allow": "GET, HEAD"}, "text/plain")
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        given = [value for name, value in query if name == "token"]
        if given:
            if not self._right(given[0]):
                return self._unauthorized(scope["path"])
            rest = urlencode([(name, value) for name, value in query if name != "token"])
            answer = RedirectResponse(_local(scope["path"]) + (f"?{rest}" if rest else ""), 303)
            answer.set_cookie(self._cookie, given[0], httponly=True, samesite="strict", path="/")
            return answer
        return None if self._right(self._sent(scope)) else self._unauthorized(scope["path"])

    def _sent(self, scope: Any) -> str:
        """Return the token of the request's cookie."""
        lines = [value.decode("latin-1") for name, value in scope["headers"] if name == b"cookie"]
        try:
            found = SimpleCookie("; ".join(lines)).get(self._cookie)
        except CookieError:
            return ""
        return found.value if found is not None else ""

    def _right(self, token: str) -> bool:
        return hmac.compare_digest(token.encode("utf-8", "surrogateescape"), self._token)

    def _unauthorized(self, path: str) -> Response:
        # Of a link on another site, the browser sends no SameSite cookie, not even after the redirect that
        # set it; a click on this page is same-site and sends it.
        return Response(Site.refusal(_local(path)), 401, media_type="text/html")


def _local(path: str) -> str:
    """Return a path that a browser cannot take for another host's URL."""
    return "/" + path.lstrip("/\\")


def app(site: Site) -> Starlette:
    """Return the pages of `site` as an ASGI application, without its guard."""

    def html(show: Callable[..., str]) -> Callable[[Request], Response]:
        def answer(request: Request) -> Response:
            query = request.query_params
            try:
                return _cached(request, show(query=query, **request.path_params).encode(), "text/html")
            except LockstepError as error:
                return Response(site.error(error), _status(error), media_type="text/html")

        return answer

    def curves(request: Request) -> Response:
        query = request.query_params
        try:
            data = site.curve_data(
                request.path_params["run"],
                query.get("names", "").split(","),
                x="time" if query.get("x") == "time" else "step",
                points=min(int(query.get("points", 2000)), _MOST_POINTS),
                smooth=int(query.get("smooth", 0)),
                within=(float(query["from"]), float(query["to"])) if "from" in query else None,
            )
        except (LockstepError, ValueError, KeyError) as error:
            return _json(request, {"error": str(error)}, 400)
        return _json(request, data)

    def values(request: Request) -> Response:
        try:
            return _json(request, site.values(**request.path_params))
        except LockstepError as error:
            return _json(request, {"error": str(error)}, _status(error))

    def report(request: Request) -> Response:
        run, name = request.path_params["run"], request.path_params["name"]
        try:
            path, whole = site.report(run, name)
            if whole:
                headers = {"content-security-policy": REPORT_POLICY}
                return Response(read_plain(path, DataError), headers=headers, media_type="text/html")
            return _cached(request, site.report_page(run, name, path).encode(), "text/html")
        except LockstepError as error:
            return Response(site.error(error), _status(error), media_type="text/html")

    def static(request: Request) -> Response:
        path = (STATIC / request.path_params["name"]).resolve()
        if not path.is_relative_to(STATIC) or not path.is_file() or path.suffix not in _KINDS:
            return Response("There is no such file.", 404, media_type="text/plain")
        return _cached(request, path.read_bytes(), _KINDS[path.suffix])

    routes: Mapping[str, Callable[[Request], Response]] = {
        "/": html(site.home),
        "/compare": html(lambda query: site.compare(query.getlist("run"))),
        "/run/{run}": html(site.curves),
        "/run/{run}/curves.json": curves,
        "/run/{run}/rollouts": html(site.rollouts),
        "/run/{run}/rollouts/{step:int}/{prompt:int}": html(site.group),
        "/run/{run}/step": html(site.step),
        "/run/{run}/step/{step:int}": html(site.step),
        "/run/{run}/step/{step:int}/values.json": values,
        "/run/{run}/about": html(site.about),
        "/run/{run}/report/{name:path}": report,
        "/static/{name:path}": static,
    }
    missing = ConfigError("unknown-name: there is no such page; the runs are at /")

    def not_found(request: Request, _: Exception) -> Response:
        return Response(site.error(missing), 404, media_type="text/html")

    return Starlette(
        routes=[Route(path, answer, methods=["GET"]) for path, answer in routes.items()],
        exception_handlers={404: not_found},
    )


def _status(error: LockstepError) -> int:
    return 404 if error.code in ("unknown-name", "no-such-file") else 400


def _json(request: Request, data: object, status: int = 200) -> Response:
    body = json.dumps(data, allow_nan=False, separators=(",", ":")).encode()
    return _cached(request, body, "application/json", status)


def _cached(request: Request, body: bytes, kind: str, status: int = 200) -> Response:
    """Return the body with an ETag, or 304 where the browser has it."""
    tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    if status == 200 and request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers={"etag": tag})
    return Response(body, status, {"etag": tag}, kind)


def listen(port: int) -> socket.socket:
    """Return a listening socket on the port, or on the next free one.

    Raises:
        ConfigError: none of the next ports is free.
    """
    for candidate in range(port, min(port + _PORTS_TRIED, 2**16)):
        taken = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taken.bind((HOST, candidate))
            taken.listen(128)
            return taken
        except OSError:
            taken.close()
    raise ConfigError(
        f"port-in-use: --port {port}: none of the ports {port} to {port + _PORTS_TRIED - 1} is free; give "
        "another --port"
    )


class Server:
    """A server that listens. `url` has its token; `run` answers until a signal or `stop`."""

    def __init__(self, paths: Sequence[Path], *, port: int) -> None:
        self.site = Site(paths)
        self._socket = listen(port)
        self.port = int(self._socket.getsockname()[1])
        self.token = secrets.token_urlsafe(24)
        self.url = f"http://{HOST}:{self.port}/?token={self.token}"
        guarded = Guard(app(self.site), token=self.token, port=self.port)
        config = uvicorn.Config(
            guarded,
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=2,
        )
        self._server = _Uvicorn(config)

    def run(self, ready: Callable[[], None] = lambda: None) -> None:
        """Answer requests; `ready` is called when the first can be answered."""
        self._server.ready = ready
        with contextlib.closing(self._socket), contextlib.closing(self.site):
            self._server.run(sockets=[self._socket])

    def stop(self) -> None:
        """End `run`, from another thread."""
        self._server.should_exit = True


class _Uvicorn(uvicorn.Server):
    ready: Callable[[], None]

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self.ready()
