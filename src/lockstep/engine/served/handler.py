"""What every HTTP server of ours answers by: one token, one reply to a connection."""

from __future__ import annotations

import hmac
from http.server import BaseHTTPRequestHandler
from typing import Any


class TokenHandler(BaseHTTPRequestHandler):
    """A handler that knows who may ask; `authorization` is a field of the class that is made of it."""

    protocol_version = "HTTP/1.1"
    timeout = 60.0  # for what a client sends
    authorization: bytes

    def allowed(self) -> bool:
        """Return whether the request carries the server's token."""
        sent = self.headers.get_all("Authorization") or []
        return len(sent) == 1 and hmac.compare_digest(sent[0].encode("latin-1"), self.authorization)

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


STRANGER = "this server belongs to a run of Lockstep, and needs its token"


def bearer(token: str) -> bytes:
    """Return what a request with this token has as Authorization."""
    return f"Bearer {token}".encode("ascii")
