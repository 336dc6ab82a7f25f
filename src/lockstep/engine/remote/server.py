"""An inference engine's own server as a process of ours: started, waited for, watched, ended.

    server = ServerProcess(spec)
    server.start(ready)      # until it answers; EngineError with the reason from its log
    server.ended()           # None while it runs, else how it ended
    server.stop()            # it and everything that it started

It never outlives this process: `supervisor.py` holds a pipe to us and ends the server, with the processes
that it started, when the pipe closes, whatever ended us. Its output goes to one file of the run directory.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from lockstep.config.engine import EngineConfig
from lockstep.engine.remote.http import HttpClient
from lockstep.errors import ConfigError, EngineError
from lockstep.observe.text import printable

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
_SUPERVISOR = Path(__file__).with_name("supervisor.py")
_POLL_SECONDS = 0.1
_END_SECONDS = 20.0
"""Time that a supervisor has to end after its pipe was closed, beyond the server's grace."""
_SESSION_SECONDS = 10.0
_TAIL_LINES = 25
_TAIL_BYTES = 256 * 1024
_INHERITED = re.compile(
    "PATH|HOME|USER|LOGNAME|LANG|LANGUAGE|LC_.*|TMPDIR|TZ|LD_LIBRARY_PATH|LD_PRELOAD|LIBRARY_PATH|CPATH|CC|CXX"
    "|OMP_NUM_THREADS|MKL_NUM_THREADS|(HTTPS?|NO)_PROXY|https?_proxy|no_proxy|SSL_CERT_(FILE|DIR)"
    "|REQUESTS_CA_BUNDLE|XDG_.*|(CUDA|NVIDIA|NCCL|GLOO|UCX|FI|HF|HUGGINGFACE)_.*"
    "|(TRANSFORMERS|TORCH|TORCHINDUCTOR|TRITON|FLASHINFER|VLLM|SGLANG|SGL)_.*"
)
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|CREDENTIAL|API_?KEY|ACCESS_KEY|PROXY", re.IGNORECASE)
_LOG_PREFIX = re.compile(r"^(?:\([^)]*pid=\d+\)\s*)?(?:([A-Z]+) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\]\s*)?")
_LOG_NOISE = re.compile(
    r"^nanobind: leaked|^ - leaked|^ - \.\.\. skipped|^nanobind: this is likely|nanobind\.readthedocs"
)
"""Lines that extension modules log at every exit."""
_ERROR_LINE = re.compile(
    r"^(?:[\w.]+\.)?\w*(?:Error|Exception|Interrupt|Exit)\b(?::|$)|^\S*:? ?error: |^cannot start "
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSpec:
    """How to run one server: command, environment, port and log."""

    name: str
    """Name of the engine, for messages."""
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)
    """The whole environment: nothing else is inherited. It contains secrets."""
    port: int
    log: Path
    """Log file; every start appends to it."""
    start_seconds: float
    grace_seconds: float = 8.0
    """Seconds between SIGTERM and SIGKILL."""
    token: str = field(default="", repr=False)
    """Token that each request must carry; "": none."""

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}"


def server_environment(
    *, needed: Mapping[str, str], extra: Mapping[str, str], base: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Build the environment of a server: what programs, libraries and caches need from ours, then what the
    engine needs, then what the user set.

    Left out are variables of this process alone, such as RANK and MASTER_PORT, which a server would take for
    its own, PYTHONPATH, which may point into another environment's packages, and how torch allocates here
    (PYTORCH_ALLOC_CONF), which may forbid the engine its sleep.
    """
    base = os.environ if base is None else base
    kept = {name: value for name, value in base.items() if _INHERITED.fullmatch(name)}
    return dict(sorted({**kept, "PYTHONUNBUFFERED": "1", **needed, **extra}.items()))


def new_token() -> str:
    """A new access token for a server that we start: other users of the machine reach loopback too."""
    return secrets.token_hex(32)


def server_client(config: EngineConfig, server: ServerProcess | None) -> HttpClient:
    """A client of a started server, or of the one at engine.url, that sends its token.

    Raises:
        ConfigError: engine.url is no url, or the variable that engine.token_env names is not set.
    """
    if server is not None:
        url, token = server.spec.url, server.spec.token
    else:
        url, token = config.url or "", _url_token(config)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return HttpClient(url, name=config.name, headers=headers)


def _url_token(config: EngineConfig) -> str:
    """The token of the server at engine.url; "": it needs none."""
    if config.token_env is None:
        return ""
    token = os.environ.get(config.token_env, "")
    if not (token and token.isascii() and token.isprintable()):
        raise ConfigError(
            f"engine.token_env = {config.token_env!r}: that environment variable "
            f"{'holds no token' if token else 'is not set'}; export the token of the server at engine.url"
        )
    return token


def masked(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without the values of secrets, for logs and manifests."""
    return {n: "(set)" if _SECRET.search(n) and v else v for n, v in environment.items()}


_PORTS_LOCK = threading.Lock()
_PORTS: set[int] = set()


def free_port() -> int:
    """A loopback port that is free, and that this function has not returned before: a server listens only
    some time after its start."""
    with _PORTS_LOCK:
        while True:
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
                probe.bind((LOOPBACK, 0))
                port = int(probe.getsockname()[1])
            if port not in _PORTS:
                _PORTS.add(port)
                return port


def check_port_free(port: int, *, name: str) -> None:
    """Raises EngineError when something listens at the port.

    Servers may bind with SO_REUSEPORT; then two of them share a port in silence, and each gets some of the
    requests.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError as error:
            raise EngineError(
                f"engine {name}: port {port} of {LOOPBACK} is in use ({error.strerror}); end what listens "
                "there, or leave the port out and a free one is taken"
            ) from error


def check_interpreter(python: Path) -> None:
    """Raises ConfigError for an engine.python that cannot be run."""
    if not (python.is_file() and os.access(python, os.X_OK)):
        raise ConfigError(
            f"engine.python = {python} is not an executable file; give the interpreter of the environment "
            "that has the engine, such as /path/to/env/bin/python"
        )


class ServerProcess:
    """One server of ours, running or not. Not thread-safe, except `stop`."""

    def __init__(self, spec: ServerSpec) -> None:
        self.spec = spec
        self.starts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    @property
    def pid(self) -> int | None:
        """Process id of the supervisor, whose child is the server. None when nothing runs."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def start(self, ready: Callable[[], str | None]) -> None:
        """Start the server and wait until it answers.

        Args:
            ready: polled; returns None when the server is ready, else what it is waiting for. Each call must
                return within seconds.

        Raises:
            EngineError: the port is in use, the server died, or it did not answer within start_seconds. It
                is not running then.
        """
        self.stop()
        check_port_free(self.spec.port, name=self.spec.name)
        self._spawn()
        try:
            self._wait(ready)
        except BaseException:
            self.stop()
            raise

    def ended(self) -> str | None:
        """How the server ended, in words; None while it runs."""
        if self._process is None:
            return "was not started"
        status = self._process.poll()
        if status is None:
            return None
        if status < 0:
            _end_session(self._process.pid)
        return _status_text(status)

    def wait_ended(self, seconds: float) -> str | None:
        """Like `ended`, after waiting for it."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)
        return self.ended()

    def stop(self) -> None:
        """End the server and everything that it started. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            _end(process)

    def log_lines(self, count: int = _TAIL_LINES) -> list[str]:
        """The last lines since the last start."""
        return self._read_log()[-count:]

    def log_text(self) -> str:
        """Text for an error message: the first error in the log, and its last lines."""
        lines = self._read_log()
        if not lines:
            return f"It wrote nothing to its log, {self.spec.log}"
        errors = [text for line in lines if _ERROR_LINE.match(text := _without_prefix(line))]
        first = f"The first error in its log: {errors[0].strip()}\n" if errors else ""
        return f"{first}The end of its log, {self.spec.log}:\n" + "\n".join(
            f"  {line}" for line in lines[-_TAIL_LINES:]
        )

    def _spawn(self) -> None:
        spec = self.spec
        spec.log.parent.mkdir(parents=True, exist_ok=True)
        # Only for us: SGLang 0.5.16 writes its arguments there, its token among them.
        with open(spec.log, "ab", opener=_private) as log:
            self._log_start = log.tell()
            self._print_head(log)
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_SUPERVISOR), str(spec.grace_seconds), *spec.command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(spec.environment),
                start_new_session=True,  # Ctrl-C is for us; we end the server
            )
        self.starts += 1
        _keep(self._process)

    def _print_head(self, log: IO[bytes]) -> None:
        """Log the command and the environment, so that a log explains itself."""
        head = [f"=== lockstep: start {self.starts + 1} of the {self.spec.name} server"]
        head += [f"=== command: {' '.join(self.spec.command)}"]
        head += [f"=== environment: {n}={v}" for n, v in masked(self.spec.environment).items()]
        log.write("".join(f"{line}\n" for line in head).encode())
        log.flush()
        self._log_start = log.tell()

    def _wait(self, ready: Callable[[], str | None]) -> None:
        spec, began = self.spec, time.monotonic()
        while True:
            ended = self.ended()
            if ended is None and (waiting := ready()) is None:
                return
            seconds = time.monotonic() - began
            if ended is not None:
                self._refuse_port_taken()
                raise EngineError(
                    f"the {spec.name} server {ended} after {seconds:.1f} s, before it answered. "
                    f"{self.log_text()}"
                )
            if seconds > spec.start_seconds:
                raise EngineError(
                    f"the {spec.name} server did not answer within engine.start_seconds = "
                    f"{spec.start_seconds:g}; it still runs, and was waited for because {waiting}. Raise "
                    f"engine.start_seconds if it is only slow. {self.log_text()}"
                )
            time.sleep(_POLL_SECONDS)

    def _refuse_port_taken(self) -> None:
        if any("address already in use" in line.lower() for line in self._read_log()):
            raise EngineError(
                f"the {self.spec.name} server found port {self.spec.port} of {LOOPBACK} taken by another "
                f"process while it started; start again, another free port is taken. Log: {self.spec.log}"
            )

    def _read_log(self) -> list[str]:
        try:
            with open(self.spec.log, "rb") as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(self._log_start, end - _TAIL_BYTES))
                text = file.read().decode("utf-8", errors="replace")
        except FileNotFoundError:
            return []
        if self.spec.token:
            text = text.replace(self.spec.token, "(token)")
        return [printable(line) for line in text.splitlines() if not _LOG_NOISE.search(line)]


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, mode=0o600)


def _without_prefix(line: str) -> str:
    """Strip the prefix of a line of an engine's log; "" for a line that is only information."""
    match = _LOG_PREFIX.match(line)
    assert match is not None
    return "" if match[1] in ("INFO", "WARNING", "DEBUG") else line[match.end() :]


def _status_text(status: int) -> str:
    number = -status if status < 0 else status - 128
    with contextlib.suppress(ValueError):
        if status < 0 or status > 128:
            return f"was ended by {signal.Signals(number).name}"
    return f"ended with status {status}"


_RUNNING: weakref.WeakSet[subprocess.Popen[bytes]] = weakref.WeakSet()


def _keep(process: subprocess.Popen[bytes]) -> None:
    if not _RUNNING:
        atexit.register(_end_running)
    _RUNNING.add(process)


def _end_running() -> None:
    for process in list(_RUNNING):
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()  # all at once, then wait for each
    for process in list(_RUNNING):
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Close the pipe: the supervisor ends the server and then itself."""
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        # The supervisor is stuck; the kernel ends the server with it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(5.0)
    if process.returncode < 0:
        _end_session(process.pid)
    _RUNNING.discard(process)


def _end_session(session: int) -> None:
    """Kill what a killed supervisor left: the server died with it, but not the processes that the server
    started."""
    deadline = time.monotonic() + _SESSION_SECONDS
    while members := _session_members(session):
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            log.error("processes %s of an engine's server cannot be ended", members)
            return
        time.sleep(0.02)


def _session_members(session: int) -> list[int]:
    """Processes of a session, without zombies."""
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                state, _, _, of = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                if int(of) == session and state != "Z":
                    members.append(int(entry.name))
    return members


def server_gpus(devices: Sequence[int], *, device: str, visible: str | None) -> str:
    """Resolve CUDA_VISIBLE_DEVICES of a server.

    Args:
        devices: engine.cuda_devices of this server, counting what we see; empty: the trainer's GPU.
        device: the trainer's, such as "cuda:1"; "cpu" gives "".
        visible: CUDA_VISIBLE_DEVICES of this process.

    Raises:
        ConfigError: a device that this process does not see.

    Example:
        >>> server_gpus((), device="cuda:1", visible="4,6")
        '6'
    """
    if not devices:
        if not device.startswith("cuda"):
            return ""
        devices = (int(device.partition(":")[2] or 0),)
    if not visible:
        return ",".join(map(str, devices))
    names = [n.strip() for n in visible.split(",")]
    hidden = [d for d in devices if d >= len(names)]
    if hidden:
        raise ConfigError(
            f"engine.cuda_devices = {list(devices)} counts the GPUs that this process sees, and "
            f"CUDA_VISIBLE_DEVICES = {visible!r} shows it {len(names)}; lower {hidden[0]}, or show it more"
        )
    return ",".join(names[d] for d in devices)
