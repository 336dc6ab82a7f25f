"""Middleware for vLLM's own server: no request without the token of the server that Lockstep started.

`--middleware lockstep.wire.server_token.RequireToken`. Older versions of vLLM check VLLM_API_KEY on the paths
below /v1 only; the worker's calls, pauses and sleeps are elsewhere. Only the standard library is imported.
"""

from __future__ import annotations

import hmac
import json
import os
import time
from collections.abc import Awaitable, Callable
from http.server import BaseHTTPRequestHandler
from typing import Any

TOKEN = "LOCKSTEP_SERVER_TOKEN"
"""Environment variable of the server that holds its token."""

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
App = Callable[[Any, Receive, Send], Awaitable[None]]


class RequireToken:
    """ASGI. Answers 401 to a request without `Authorization: Bearer TOKEN`, whatever its path."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._expected = f"Bearer {os.environ[TOKEN]}".encode("ascii")

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._is_ours(scope["headers"]):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            body = b'{"error": "this server belongs to a run of Lockstep, and needs its token"}'
            head = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            # A client that keeps the connection would otherwise wait for more of the answer.
            head.append((b"content-length", str(len(body)).encode()))
            await send({"type": "http.response.start", "status": 401, "headers": head})
            await send({"type": "http.response.body", "body": body})
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _is_ours(self, headers: Any) -> bool:
        sent = [value for name, value in headers if name.lower() == b"authorization"]
        # One header and no more: of two, a proxy and we might each take another. compare_digest takes as long
        # for a wrong first letter as for a wrong last one.
        return len(sent) == 1 and hmac.compare_digest(sent[0], self._expected)


# What every HTTP server of ours answers by: one token, one reply to a connection.


class TokenHandler(BaseHTTPRequestHandler):
    """A handler that knows who may ask; `authorization` is a field of the class that is made of it."""

    protocol_version = "HTTP/1.1"
    timeout = 60.0  # for what a client sends
    authorization: bytes
    most_bytes = 2**30
    """Longest body that is taken from who has the token."""

    def allowed(self) -> bool:
        """Return whether the request carries the server's token."""
        sent = self.headers.get_all("Authorization") or []
        return len(sent) == 1 and hmac.compare_digest(sent[0].encode("latin-1"), self.authorization)

    def content_length(self) -> int | None:
        """Return the length that the request gives of its body, 0 if it has none; None: it gives no length
        that can be read."""
        sent = self.headers.get_all("Content-Length") or []
        if not sent and "Transfer-Encoding" not in self.headers:
            return 0
        plain = len(sent) == 1 and sent[0].isascii() and sent[0].isdigit() and len(sent[0]) <= _MOST_DIGITS
        return int(sent[0]) if plain and "Transfer-Encoding" not in self.headers else None

    def admitted(self) -> int | None:
        """Return the length of the body of a request that may be answered. Otherwise answer it: nothing of
        what the request says of itself is believed before its token was seen."""
        length = self.content_length()
        if not self.allowed():
            self._skim(length)
            self.refuse(401, UNAUTHORIZED)
        elif length is None:
            self.refuse(400, "the request has no Content-Length of up to 15 digits")
        else:
            return length
        return None

    def body(self) -> bytes | None:
        """Return the body of a request that may be answered; None: it was answered here."""
        length = self.admitted()
        if length is None:
            return None
        if length > self.most_bytes:
            self.refuse(413, f"a body of {length} bytes; at most {self.most_bytes}")
            return None
        body = self.rfile.read(length)
        if len(body) == length:
            return body
        self.close_connection = True  # the client has gone in the middle of it
        return None

    def refuse(self, status: int, reason: str) -> None:
        """Send a reason as JSON, and end the connection."""
        self.reply(status, json.dumps({"error": reason}).encode())

    def _skim(self, length: int | None) -> None:
        """Read of a stranger's body what lets the answer reach a client that still sends: little, and not
        for long."""
        until = time.monotonic() + _STRANGER_SECONDS
        left = min(length or 0, _STRANGER_BYTES)
        try:
            while left > 0 and (seconds := until - time.monotonic()) > 0:
                self.connection.settimeout(seconds)
                left -= len(piece := self.rfile.read1(left))
                if not piece:
                    break
        except OSError:
            pass
        self.connection.settimeout(self.timeout)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: errors are answers."""

    def reply(self, status: int, body: bytes, *, kind: str = "application/json") -> None:
        """Send the whole answer, and end the connection."""
        self.close_connection = True
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)


_MOST_DIGITS = 15
_STRANGER_BYTES = 2**16
_STRANGER_SECONDS = 1.0
UNAUTHORIZED = "this server belongs to a run of Lockstep, and needs its token"


def bearer(token: str) -> bytes:
    """Return what a request with this token has as Authorization."""
    return f"Bearer {token}".encode("ascii")
