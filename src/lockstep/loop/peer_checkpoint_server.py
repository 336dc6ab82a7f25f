"""Serves a node's peer checkpoints (cluster.peer_copy on several nodes) to other nodes.

    with PeerCheckpointServer(Path("/dev/shm"), "10.0.0.7") as server:  # in the host of the node's ranks
        environment = server.environment()                              # before every start of the ranks

    GET  /room                     {"free": bytes}
    PUT  /step-000003/NAME         stores a file; replies with the {"sha256"} of what arrived
    GET  /step-000003/NAME         the file

`python -m lockstep.loop.peer_checkpoint_server PLACE ADDRESS` makes the folder
(lockstep.ranks.in_memory_checkpoint) and removes it when stdin closes, which also happens if the host is
killed. Each line of stdin begins a restart of the ranks and prints a new token. Requests with the tokens of
earlier restarts are rejected, so that an old rank on a node that was thought dead can change nothing. It
loads no torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Protocol

from lockstep.errors import CheckpointError, ConfigError
from lockstep.processes.programs import PEER_CHECKPOINT_SERVER, marked, python
from lockstep.processes.supervisor import name_process
from lockstep.ranks.environment import COPIES, PEER_SERVER
from lockstep.ranks.in_memory_checkpoint import copy_folder, is_copied_file
from lockstep.wire.server_token import TokenHandler, bearer

CHUNK = 1 << 20
"""Bytes that are read, hashed and written at once."""
_START_SECONDS, _ANSWER_SECONDS = 60.0, 15.0
"""For the process to answer the first line, and a later one: together well below the time that a node of a
cluster has for the start of its ranks."""
_END_SECONDS = 30.0
"""For the folder to be removed, in which ranks that are being ended may still write."""


class PeerCheckpointServer:
    """Handle of the server process, for its host. A context manager that removes the folder on exit.

    Args:
        place: where the folder is made.
        address: where the server listens; the address at which other nodes reach this one.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(self, place: Path, address: str) -> None:
        command = [*python(PEER_CHECKPOINT_SERVER), str(place), address]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=marked(os.environ),
            start_new_session=True,
        )
        self._seconds = _START_SECONDS

    def environment(self) -> dict[str, str]:
        """Return the environment for the next start of this node's ranks. Earlier tokens are rejected.

        Raises:
            ConfigError: `place` is not a folder, cannot be written, or is full.
            CheckpointError: the process did not answer and was killed.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(b"\n")
            self._process.stdin.flush()
            about = json.loads(self._line(self._seconds))
        except (OSError, ValueError) as error:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            raise CheckpointError(
                f"process-died: the peer checkpoint server of this node does not respond ({error}); is the "
                "node out of memory? Set cluster.peer_copy = false",
                setting="cluster.peer_copy",
            ) from error
        if "error" in about:
            raise ConfigError(about["error"], **about["data"])
        self._seconds = _ANSWER_SECONDS
        return {COPIES: about.pop("folder"), PEER_SERVER: json.dumps(about)}

    def _line(self, seconds: float) -> bytes:
        """Return its next line of output. Raises OSError after `seconds` without one."""
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(seconds):
                raise OSError(f"no output within {seconds:g} s")
        return self._process.stdout.readline()

    def close(self) -> None:
        """Remove the folder. Idempotent."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
            self._line(2 * _END_SECONDS)  # its end: the process that removes is no child of this one
        self._process.stdout.close()
        self._process.wait()

    def __enter__(self) -> PeerCheckpointServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def main(argv: list[str]) -> None:
    """Serve until stdin closes."""
    place, address = Path(argv[0]), argv[1]
    if os.fork():  # Ray kills the children of a worker that ends, and the folder would be left
        os._exit(0)
    name_process("copies")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    if not sys.stdin.buffer.readline():
        return
    try:
        with copy_folder(place) as folder:
            try:
                _serve(folder, address)
            finally:
                _empty(folder)
    except ConfigError as error:
        _print({"error": str(error), "data": error.data})


def _serve(folder: Path, address: str) -> None:
    own: dict[str, Any] = {"folder": folder, "authorization": b""}
    handler: type[BaseHTTPRequestHandler] = type("Handler", (_Handler,), own)
    with _server(address, handler) as server:
        threading.Thread(target=server.serve_forever, name="http", daemon=True).start()
        about = {"folder": str(folder), "address": address, "port": server.server_address[1]}
        while True:
            token = secrets.token_hex(32)
            handler.authorization = bearer(token)  # type: ignore[attr-defined]
            _print({**about, "token": token})
            if not sys.stdin.buffer.readline():
                break
        server.shutdown()


def _print(about: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(about) + "\n")
    sys.stdout.flush()


def _server(address: str, handler: type[BaseHTTPRequestHandler]) -> ThreadingHTTPServer:
    """Make the HTTP server. Raises ConfigError if the address is not local."""

    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        daemon_threads, block_on_close = True, False

    try:
        return Server((address, 0), handler)
    except OSError as error:
        raise ConfigError(
            f"unreachable: cluster.peer_copy = true: this node cannot listen on {address}, its address in "
            f"the cluster ({error.strerror}); give the node its own address when you start its part of the "
            "cluster, or set cluster.peer_copy = false"
        ) from error


def _empty(folder: Path) -> None:
    """Remove the folder, also while ranks write to it."""
    until = time.monotonic() + _END_SECONDS
    while folder.exists() and time.monotonic() < until:
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.05)


class _Handler(TokenHandler):
    """Serves one folder; subclasses set the fields."""

    folder: Path

    def do_GET(self) -> None:
        if self.body() is None:
            return
        if self.path == "/room":
            self.reply(200, json.dumps({"free": shutil.disk_usage(self.folder).free}).encode())
        elif (path := self._file()) is None:
            self.reply(404, b"{}")
        else:
            self._send(path)

    def do_PUT(self) -> None:
        length = self.admitted()
        if length is None:
            return
        if (path := self._file()) is None:
            self.reply(404, b"{}")
        else:
            try:
                for parent in reversed(path.relative_to(self.folder).parents[:-1]):
                    (self.folder / parent).mkdir(mode=0o700, exist_ok=True)
                self._store(path, length)
            except (ConnectionError, TimeoutError):
                self.close_connection = True
            except OSError as error:
                with contextlib.suppress(OSError):
                    self.reply(507, json.dumps({"error": str(error)}).encode())
                    while length > 0 and self.rfile.read(CHUNK):  # who still sends would not see the answer
                        length -= CHUNK

    def _file(self) -> Path | None:
        """Return the file of the request's path; None if no peer checkpoint has such a file."""
        name = self.path.removeprefix("/")
        return self.folder / name if is_copied_file(name) else None

    def _send(self, path: Path) -> None:
        try:
            file = path.open("rb")
        except OSError:
            self.reply(404, b"{}")
            return
        with file:
            self.close_connection = True
            self.send_response(200)
            self.send_header("Content-Length", str(os.fstat(file.fileno()).st_size))
            self.end_headers()
            shutil.copyfileobj(file, self.wfile, CHUNK)

    def _store(self, path: Path, length: int) -> None:
        """Store a file. It gets its name once it has arrived completely and its token is still valid."""
        partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            with partial.open("xb") as file:
                sha256 = copied(self.rfile, file, length)
            if sha256 is None or not self.allowed():
                self.close_connection = True
                return
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
        self.reply(200, json.dumps({"sha256": sha256}).encode())


class _Source(Protocol):
    def readinto(self, buffer: Any, /) -> int | None: ...


class _Target(Protocol):
    def write(self, data: memoryview, /) -> Any: ...


def copied(source: _Source, target: _Target, length: int) -> str | None:
    """Copy `length` bytes. Return their sha256, or None if the source ends early."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(CHUNK))
    while length:
        count = source.readinto(buffer[: min(CHUNK, length)])
        if not count:
            return None
        digest.update(buffer[:count])
        target.write(buffer[:count])
        length -= count
    return digest.hexdigest()


if __name__ == "__main__":
    main(sys.argv[1:])
