"""The server of `lockstep view`: loopback, GET, and whoever has the token of the printed URL."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lockstep.errors import ConfigError, DataError, LockstepError
from lockstep.processes.http_server import LOOPBACK as HOST
from lockstep.processes.http_server import HttpServer
from lockstep.view.render import STATIC, Site

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
_PORTS_TRIED = 50
_MOST_POINTS = 20_000
_LONGEST_PATH = 2000
"""In characters. Python refuses to read numbers of more than 4,300 digits."""


class Guard:
    """ASGI. Answers only GET and HEAD, for this server's own names, with the token; moves the token of a URL
    to a cookie; adds HEADERS to every answer.

    A page of another site can make a browser send requests here, and after DNS rebinding under its own name:
    so the Host header must be one of this server's names.
    """

    def __init__(self, app: ASGIApp, *, token: str, port: int) -> None:
        self._app, self._token = app, token.encode()
        self._hosts = {f"{name}:{port}" for name in (HOST, "localhost", "[::1]")}
        # Cookies do not keep the ports of a host apart, and there may be several servers.
        self._cookie = f"lockstep-view-{port}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        answer = self._refusal(Request(scope)) or self._app
        await answer(scope, receive, send_safely)

    def _refusal(self, request: Request) -> Response | None:
        """Return the answer to a request that the app must not see."""
        hosts = request.headers.getlist("host")
        if len(hosts) != 1 or hosts[0].lower() not in self._hosts:
            return Response("This server has other names.", 421, media_type="text/plain")
        if request.method not in ("GET", "HEAD"):
            return Response("GET only.", 405, {"allow": "GET, HEAD"}, "text/plain")
        if len(request.scope["path"]) > _LONGEST_PATH:
            return Response("No page has a path this long.", 414, media_type="text/plain")
        # A path that a browser cannot take for another host's URL.
        path, query = quote("/" + request.scope["path"].lstrip("/\\")), request.query_params
        if "token" not in query:
            if self._right(request.cookies.get(self._cookie, "")):
                return None
        elif self._right(query["token"]):
            rest = urlencode([(name, value) for name, value in query.multi_items() if name != "token"])
            answer = RedirectResponse(path + (f"?{rest}" if rest else ""), 303)
            answer.set_cookie(self._cookie, query["token"], httponly=True, samesite="strict", path="/")
            return answer
        # Of a link on another site, the browser sends no SameSite cookie, not even after the redirect that
        # set it; a click on this page is same-site and sends it.
        return Response(Site.refusal(path), 401, media_type="text/html")

    def _right(self, token: str) -> bool:
        return hmac.compare_digest(token.encode("utf-8", "surrogateescape"), self._token)


def app(site: Site) -> Starlette:
    """Return the pages of `site` as an ASGI application, without its guard."""

    def html(show: Callable[..., str]) -> Callable[[Request], Response]:
        return lambda request: _answer(request, show(query=request.query_params, **request.path_params))

    def curves(request: Request) -> Response:
        query, names = request.query_params, request.query_params.get("names", "").split(",")
        try:
            options: dict[str, Any] = {
                "x": "time" if query.get("x") == "time" else "step",
                "points": min(int(query.get("points", 2000)), _MOST_POINTS),
                "smooth": int(query.get("smooth", 0)),
                "within": (float(query["from"]), float(query["to"])) if "from" in query else None,
            }
        except (ValueError, KeyError) as error:
            raise ConfigError(f"wrong-type: the query does not describe curves: {error}") from error
        data = site.curve_data(request.path_params["run"], names, **options)
        # JSON has no NaN and no infinities.
        return _answer(request, json.dumps(data, allow_nan=False, separators=(",", ":")), "application/json")

    def report(request: Request) -> Response:
        text, whole = site.report(**request.path_params)
        answer = _answer(request, text)
        if whole:
            answer.headers["content-security-policy"] = REPORT_POLICY
        return answer

    def failed(request: Request, error: Any) -> Response:
        html = site.error(error, request.path_params.get("run"))
        return _answer(request, html, status=404 if error.code in ("unknown-name", "no-such-file") else 400)

    def unreadable(request: Request, error: Exception) -> Response:
        return failed(request, DataError(f"cannot-read: {error}"))

    def missing(request: Request, _: Exception) -> Response:
        return failed(request, ConfigError("unknown-name: there is no such page; the runs are at /"))

    routes: Mapping[str, Callable[[Request], Response]] = {
        "/": html(site.home),
        "/compare": html(lambda query: site.compare(query.getlist("run"))),
        "/run/{run}": html(site.curves),
        "/run/{run}/curves.json": curves,
        "/run/{run}/rollouts": html(site.rollouts),
        "/run/{run}/rollouts/{step:int}/{prompt:int}": html(site.group),
        "/run/{run}/step": html(site.step),
        "/run/{run}/step/{step:int}": html(site.step),
        "/run/{run}/about": html(site.about),
        "/run/{run}/report/{name:path}": report,
    }
    return Starlette(
        routes=[
            *(Route(path, answer, methods=["GET"]) for path, answer in routes.items()),
            Mount("/static", StaticFiles(directory=STATIC)),
        ],
        exception_handlers={LockstepError: failed, OSError: unreadable, 404: missing},
    )


def _answer(request: Request, text: str, kind: str = "text/html", status: int = 200) -> Response:
    """Return the text with an ETag, or 304 where the browser has it."""
    body = text.encode()
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
        with contextlib.suppress(OSError):
            return socket.create_server((HOST, candidate))
    raise ConfigError(
        f"port-in-use: --port {port}: none of the ports {port} to {port + _PORTS_TRIED - 1} is free; give "
        "another --port"
    )


class Server:
    """A server that listens. `url` has its token; `run` answers until a signal or `stop`."""

    def __init__(self, paths: Sequence[Path], *, port: int) -> None:
        self.site = Site(paths)
        listening = listen(port)
        self.port = int(listening.getsockname()[1])
        self.token = secrets.token_urlsafe(24)
        self.url = f"http://{HOST}:{self.port}/?token={self.token}"
        guarded = Guard(app(self.site), token=self.token, port=self.port)
        self._server = HttpServer(guarded, listening)

    def run(self, ready: Callable[[], None] = lambda: None) -> None:
        """Answer requests; `ready` is called when the first can be answered, and a signal ends it quietly."""
        with contextlib.closing(self.site):
            self._server.run(ready)

    def stop(self) -> None:
        """End `run`, from another thread."""
        self._server.stop()
