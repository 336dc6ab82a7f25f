"""An inference engine's own server as a process of ours: started, waited for, watched, ended.

    server = ServerProcess(spec)
    server.start(ready)      # until it answers; EngineError with the reason from its log
    server.ended()           # None while it runs, else how it ended
    server.stop()            # it and everything that it started

It is a Child (lockstep.processes), so it never outlives this process. Its output goes to one file of the run
directory.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from lockstep.config.base import read_secrets
from lockstep.config.engine import EngineConfig
from lockstep.engine.remote.http import HttpClient
from lockstep.engine.spec import EngineSpec
from lockstep.errors import ConfigError, EngineError, hide, redacted
from lockstep.observe.text import printable
from lockstep.processes.child import LINGER_SECONDS, Child, describe_status
from lockstep.wire.server_token import TOKEN

LOOPBACK = "127.0.0.1"
_PACKAGES = Path(__file__).resolve().parents[3]
_SAME_BITS = (
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_CBWR",
)
"""Variables that limit the units of a CPU, and with them decide the bits of its products."""
_POLL_SECONDS = 0.1
_TAIL_LINES = 25
_TAIL_BYTES = 256 * 1024
_INHERITED = re.compile(
    "PATH|HOME|USER|LOGNAME|LANG|LANGUAGE|LC_.*|TMPDIR|TZ|LD_LIBRARY_PATH|LD_PRELOAD|LIBRARY_PATH|CPATH|CC|CXX"
    "|OMP_NUM_THREADS|MKL_NUM_THREADS|(HTTPS?|ALL|NO)_PROXY|(https?|all|no)_proxy"
    "|SSL_CERT_(FILE|DIR)|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE|XDG_.*|(CUDA|NVIDIA|NCCL|GLOO|UCX|FI|HF|HUGGINGFACE)_.*"
    "|(TRANSFORMERS|TORCH|TORCHINDUCTOR|TRITON|FLASHINFER|VLLM|SGLANG|SGL)_.*"
)
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|CREDENTIAL|API_?KEY|ACCESS_KEY|PROXY", re.IGNORECASE)
# What vLLM puts before a line: "(EngineCore pid=123) ERROR 01-31 12:00:00 [core.py:7] ".
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
    start_setting: str = "engine.start_seconds"
    """The setting that has start_seconds, for messages."""
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


def own_variables(config: EngineConfig) -> dict[str, str]:
    """Return the variables that the user gives a server: engine.env, and engine.secrets as they are read.

    Raises:
        ConfigError: a secret cannot be read, or takes the place of the token of the server.
    """
    for name in (TOKEN, "VLLM_API_KEY"):
        for setting, given in (("env", config.env), ("secrets", config.secrets)):
            if name in given:
                raise ConfigError(
                    f"contradiction: engine.{setting}.{name}: Lockstep generates a token for each server "
                    "that it starts; leave it out"
                )
    return {**config.env, **read_secrets(config.secrets, setting="engine.secrets")}


def own_program() -> dict[str, str]:
    """Return the variables that a server of Lockstep's own needs, to be the same program with the same
    bits."""
    return {name: os.environ[name] for name in _SAME_BITS if name in os.environ} | {
        "PYTHONPATH": os.pathsep.join([str(_PACKAGES), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PYTHONSAFEPATH": "1",  # the folder we are in is not its business
    }


def new_token() -> str:
    """A new access token for a server that we start: other users of the machine reach loopback too."""
    token = secrets.token_hex(32)
    hide(token)
    return token


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
            f"wrong-environment: engine.token_env = {config.token_env!r}: that environment variable "
            f"{'contains no token' if token else 'is not set'}; export the token of the server at engine.url"
        )
    hide(token)
    return token


def masked(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without the values of secrets, for logs and manifests."""
    return {
        n: "(set)" if v and (_SECRET.search(n) or redacted(v) != v) else v for n, v in environment.items()
    }


_PORTS_LOCK = threading.Lock()
_PORTS: set[int] = set()
_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST_PORT, _CANDIDATES = 10_000, 100


def free_port() -> int:
    """A loopback port that is free, and that this function has not returned before: a server listens only
    some time after its start. It lies below the range from which the kernel gives ports to connections and
    to servers that ask for any port, so that none of them takes it meanwhile."""
    with _PORTS_LOCK:
        for port in map(_candidate, range(_CANDIDATES + 1)):
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
                try:
                    probe.bind((LOOPBACK, port))
                except OSError:
                    continue
                port = int(probe.getsockname()[1])
            if port not in _PORTS:
                _PORTS.add(port)
                return port
    raise EngineError(
        f"port-in-use: {_CANDIDATES} ports of {LOOPBACK} were tried, and all are in use; end servers"
    )


def _candidate(tried: int) -> int:
    """A random port below the kernel's range; 0, which is any, once so many were in use."""
    first = int(_PORT_RANGE.read_text().split()[0]) if _PORT_RANGE.is_file() else _FIRST_PORT
    if tried == _CANDIDATES or first <= _FIRST_PORT:
        return 0
    return secrets.choice(range(_FIRST_PORT, first))


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
                f"port-in-use: engine {name}: port {port} of {LOOPBACK} is in use ({error.strerror}); end "
                "the process that listens there, or leave the port out to use a free one"
            ) from error


def check_interpreter(python: Path) -> None:
    """Raises ConfigError for an engine.python that cannot be run."""
    if not (python.is_file() and os.access(python, os.X_OK)):
        raise ConfigError(
            f"not-a-file: engine.python = {python} is not an executable file; give the interpreter of an "
            "environment that has the engine installed, such as /path/to/env/bin/python"
        )


class ServerProcess:
    """One server of ours, running or not. Not thread-safe, except `stop`."""

    def __init__(self, spec: ServerSpec) -> None:
        self.spec = spec
        self.starts = 0
        self._child: Child | None = None
        self._log_start = 0

    @property
    def pid(self) -> int | None:
        """Process id of the supervisor, whose child is the server. None when nothing runs."""
        child = self._child
        return child.pid if child is not None and child.poll() is None else None

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
        return self.wait_ended(0.0)

    def wait_ended(self, seconds: float) -> str | None:
        """Like `ended`, after waiting for it."""
        child = self._child
        if child is None:
            return "was not started"
        status = child.wait(seconds)
        return None if status is None else describe_status(status)

    def stop(self) -> None:
        """End the server and everything that it started. Idempotent."""
        child, self._child = self._child, None
        if child is not None:
            child.end()

    def ask_for_traceback(self) -> None:
        """Let a server that does not answer write to its log where its threads are; it ends."""
        if self._child is not None:
            self._child.ask_for_traceback()

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
            self._child = Child(
                spec.command,
                output=log,
                env=spec.environment,
                grace=spec.grace_seconds,
                linger=min(spec.grace_seconds, LINGER_SECONDS),
            )
        self.starts += 1

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
                    f"process-died: the {spec.name} server {ended} after {seconds:.1f} s, before it "
                    f"answered. {self.log_text()}"
                )
            if seconds > spec.start_seconds:
                raise EngineError(
                    f"deadline: the {spec.name} server did not answer within {spec.start_setting} = "
                    f"{spec.start_seconds:g}; it is still running, but {waiting}. Raise {spec.start_setting} "
                    f"if it is only slow. {self.log_text()}"
                )
            time.sleep(_POLL_SECONDS)

    def _refuse_port_taken(self) -> None:
        if any("address already in use" in line.lower() for line in self._read_log()):
            raise EngineError(
                f"port-in-use: the {self.spec.name} server could not start because another process took port "
                f"{self.spec.port} of {LOOPBACK}; start again, and another free port is used. Log: "
                f"{self.spec.log}"
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
        text = redacted(text)  # before a secret with a line end is cut, or a control character escaped
        return [printable(line) for line in text.splitlines() if not _LOG_NOISE.search(line)]


def own_server(
    config: EngineConfig,
    spec: EngineSpec,
    *,
    command: Sequence[str],
    environment: Mapping[str, str],
    port: int,
    token: str,
) -> ServerProcess:
    """The server of a run's engine, not started yet; its log is in the engine's work folder."""
    return ServerProcess(
        ServerSpec(
            name=config.name,
            command=tuple(command),
            environment=environment,
            port=port,
            log=spec.work_dir / f"{config.name}.log",
            start_seconds=config.start_seconds,
            token=token,
        )
    )


def own_gpus(config: EngineConfig, spec: EngineSpec) -> str:
    """CUDA_VISIBLE_DEVICES of a server of ours, see `server_gpus`."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return server_gpus(config.cuda_devices, device=spec.device, visible=visible)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, mode=0o600)


def _without_prefix(line: str) -> str:
    """Strip the prefix of a line of an engine's log; "" for a line that is only information."""
    match = _LOG_PREFIX.match(line)
    assert match is not None
    return "" if match[1] in ("INFO", "WARNING", "DEBUG") else line[match.end() :]


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
            f"wrong-environment: engine.cuda_devices = {list(devices)} counts the GPUs that this process "
            f"sees, but CUDA_VISIBLE_DEVICES = {visible!r} shows it only {len(names)}; lower {hidden[0]}, or "
            "make more GPUs visible"
        )
    return ",".join(names[d] for d in devices)
