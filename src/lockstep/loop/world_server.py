"""The process of a world of roles: `python -m lockstep.loop.world_server FILE`.

    GET  /health
    POST /call    {"call", "key", "seconds", "arguments"} ──► {"value"} or {"kind", "text", "data", "lost"}

Bodies are those of lockstep.loop.world_messages. It listens on loopback, and answers only who sends its token
(LOCKSTEP_SERVER_TOKEN). Roles work in the main thread alone, call after call. What was answered under a key
is kept until calls with other keys have come: who asks again, after an answer was lost, gets the same one,
and nothing is trained twice.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from lockstep.engine.remote.server import LOOPBACK
from lockstep.engine.served.handler import TokenHandler, bearer
from lockstep.errors import LockstepError, TrainError
from lockstep.loop.world_host import RoleHost
from lockstep.loop.world_messages import MOST_BYTES, packed, unpacked
from lockstep.processes.supervisor import name_process
from lockstep.ranks.context import lost_peer
from lockstep.wire.server_token import TOKEN

_KEPT = 4
"""Calls whose answers are kept after they are done: one client asks from a few threads at most."""
_BESIDE = {"finish"}
"""Calls that do not wait for others: they only write files."""


def main(argv: list[str]) -> None:
    """Serve until killed."""
    faulthandler.enable()
    name_process("roles")
    about = json.loads(Path(argv[0]).read_text(encoding="utf-8"))
    calls = Calls(RoleHost())
    with serving(calls, token=os.environ.pop(TOKEN), port=about["port"]):
        calls.work()


@contextlib.contextmanager
def serving(calls: Calls, *, token: str, port: int = 0) -> Iterator[ThreadingHTTPServer]:
    """Answer HTTP in threads; port 0: any."""
    own = {"calls": calls, "authorization": bearer(token)}
    handler: type[BaseHTTPRequestHandler] = type("Handler", (_Handler,), own)
    with ThreadingHTTPServer((LOOPBACK, port), handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, name="http", daemon=True).start()
        yield server
        server.shutdown()


@dataclass(eq=False)
class _Call:
    make: Callable[[], Any] | None
    done: threading.Event = field(default_factory=threading.Event)
    answer: bytes | None = b""
    """None: it is kept no more."""

    def run(self) -> None:
        make, self.make = self.make, None  # with the tensors that it was given
        assert make is not None, "a call is run once"
        self.answer = _answered(make)
        self.done.set()


class Calls:
    """The calls of one client, each done once."""

    def __init__(self, host: RoleHost) -> None:
        self._host = host
        self._todo: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        self._known: dict[str, _Call] = {}
        self._lock = threading.Lock()

    def work(self) -> None:
        """Do what comes, in this thread, for ever."""
        while True:
            self._todo.get().run()

    def answer(self, body: bytes) -> bytes:
        """Return the answer to a message, doing what it asks for unless its key is known."""
        try:
            asked = unpacked(body)
            key, seconds, name = str(asked["key"]), float(asked["seconds"]), str(asked["call"])
            method = self._host.call(name)
            arguments = dict(asked["arguments"])
        except (LockstepError, KeyError, TypeError, ValueError) as error:
            return packed(_failure(error))
        with self._lock:
            call = self._known.get(key)
            if call is None:
                call = self._known[key] = _Call(lambda: method(**arguments))
                done = [old for old in self._known.values() if old.done.is_set() and old.answer is not None]
                for old in done[:-_KEPT]:
                    old.answer = None
                if name in _BESIDE:
                    threading.Thread(target=call.run, name=name, daemon=True).start()
                else:
                    self._todo.put(call)
        if not call.done.wait(seconds):
            late = TrainError(f"deadline: the process was busy for {seconds:g} s")
            return packed(_failure(late))
        if (answer := call.answer) is None:
            gone = TrainError("wrong-state: this call was done, and its answer is kept no more")
            return packed(_failure(gone))
        return answer


def _answered(make: Callable[[], Any]) -> bytes:
    try:
        return packed({"value": make()})
    except Exception as error:  # the client shall read it, whatever it is
        if not isinstance(error, LockstepError):
            traceback.print_exc()  # to the log, which the client's error quotes
        return packed(_failure(error))


def _failure(error: Exception) -> dict[str, Any]:
    known = isinstance(error, LockstepError)
    return {
        "kind": type(error).__name__,
        "text": str(error).encode("utf-8", errors="backslashreplace").decode("utf-8"),
        "data": error.data if isinstance(error, LockstepError) else {},
        "lost": not known and lost_peer(error),
    }


class _Handler(TokenHandler):
    calls: Calls
    most_bytes = MOST_BYTES

    def do_GET(self) -> None:
        if self.body() is not None:
            self.reply(200 if self.path == "/health" else 404, b"{}")

    def do_POST(self) -> None:
        body = self.body()
        if body is None:
            return
        if self.path != "/call":
            self.refuse(404, f"no such path: {self.path}")
        else:
            self.reply(200, self.calls.answer(body), kind="application/octet-stream")


if __name__ == "__main__":
    main(sys.argv[1:])
