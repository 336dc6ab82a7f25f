"""An HTTP server on a socket that listens already: uvicorn without a log of its own."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from typing import Any

import uvicorn

LOOPBACK = "127.0.0.1"


class HttpServer:
    """Serves an ASGI application. `run` answers until a signal or `stop`, and closes the socket."""

    def __init__(self, app: Any, listening: socket.socket) -> None:
        self._socket = listening
        self.port = int(listening.getsockname()[1])
        config = uvicorn.Config(
            app,
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
        with contextlib.closing(self._socket):
            self._server.run(sockets=[self._socket])

    def stop(self) -> None:
        """End `run`, from another thread."""
        self._server.should_exit = True


class _Uvicorn(uvicorn.Server):
    ready: Callable[[], None]

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self.ready()
