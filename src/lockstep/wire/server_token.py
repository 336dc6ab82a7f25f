"""Middleware for vLLM's own server: no request without the token of the server that Lockstep started.

`--middleware lockstep.wire.server_token.RequireToken`. Older versions of vLLM check VLLM_API_KEY on the paths
below /v1 only; the worker's calls, pauses and sleeps are elsewhere. Only the standard library is imported.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable
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
