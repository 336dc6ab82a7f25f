"""A `lockstep` for the shell blocks of docs that does not import torch anew for every command.

    python warm_lockstep.py serve SOCKET     imports torch and Lockstep once, and forks a process per command
    python warm_lockstep.py SOCKET ARGS...   stands in for the console script, with its streams, folder,
                                             environment and exit status

Importing costs about seven CPU seconds, more than most of the commands. The server never runs a backward pass
itself: autograd does not survive a fork after one. What a command starts is an ordinary new Python.
"""

import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

PRELOADED = (
    "lockstep.loops",
    "lockstep.train.local",
    "lockstep.engine.hf.engine",
)


@contextlib.contextmanager
def warm_lockstep(folder: Path) -> Iterator[Path]:
    """A folder for the head of PATH, in which `lockstep` is the stand-in."""
    address, script = folder / "socket", folder / "bin" / "lockstep"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "{__file__}" "{address}" "$@"\n')
    script.chmod(0o755)
    server = subprocess.Popen(
        [sys.executable, __file__, "serve", str(address)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert server.stdin is not None and server.stdout is not None
    try:
        assert server.stdout.readline() == b"ready\n"
        yield script.parent
    finally:
        server.stdin.close()  # at which it ends
        server.wait(timeout=60)


def serve(address: str) -> None:
    for name in PRELOADED:
        importlib.import_module(name)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the commands here
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    print("ready", flush=True)
    while True:
        client, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            run(client)
        client.close()


def run(client: socket.socket) -> None:
    """In the forked process: what the console script does."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    data, streams, _, _ = socket.recv_fds(client, 1 << 20, 3)
    job = json.loads(data)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["environment"])
    sys.path[1:1] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.argv = ["lockstep", *job["argv"]]
    threading.Thread(target=lambda: (client.recv(1), os._exit(1)), daemon=True).start()  # the client has gone
    from lockstep.cli.main import main

    code = 1
    try:
        code = main(job["argv"])
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        client.sendall(bytes([code]))
        os._exit(code)


def ask(address: str, argv: list[str]) -> int:
    """In the stand-in; 1 for a command that was killed."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        job = {"argv": argv, "cwd": os.getcwd(), "environment": dict(os.environ)}
        socket.send_fds(server, [json.dumps(job).encode()], [0, 1, 2])
        return next(iter(server.recv(1)), 1)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    sys.exit(ask(sys.argv[1], sys.argv[2:]))
