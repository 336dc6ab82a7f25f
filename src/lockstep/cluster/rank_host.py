"""The ranks on a node: processes of their own, whose output is handed to whoever asks.

Runs inside the process that the cluster provider has there (a Ray actor), which does nothing but this: each
rank is a Child of it (lockstep.processes), so it ends with everything it started when this process ends.
Where copies of the ranks' state are kept in each node's memory, that is done beside it
(lockstep.loop.peer_checkpoint_server).
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import platform
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lockstep
from lockstep.errors import CheckpointError, ConfigError
from lockstep.loop.peer_checkpoint_server import PeerCheckpointServer
from lockstep.processes.child import Child, end
from lockstep.ranks.environment import COPIES, COPY_PLACE, WARM_SPARES
from lockstep.ranks.warm_spares import WarmSpares
from lockstep.version import __version__

CHUNK = 40_000
"""Bytes of output per answer: two of them stay below what Ray keeps out of its object store (100 KiB)."""
_GATHER_SECONDS = 0.1
"""How long an answer waits for more text: what carries it costs more than the text."""
_GRACE_SECONDS = 8.0
"""Between SIGTERM and SIGKILL."""
_BUFFER = 1 << 20
"""Bytes of output that wait to be asked for; then the rank waits where it writes."""
_SUBMITTER = "LOCKSTEP_SUBMITTER"
COMPARED = ("lockstep", "package", "python", "torch", "transformers")
"""Facts that must be the same on all nodes."""


def facts() -> dict[str, Any]:
    """Return what a node has installed, and who it is; loads no torch."""
    return {
        "lockstep": __version__,
        "package": package_hash(),
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "transformers": importlib.metadata.version("transformers"),
        "host": platform.node(),
        "auth": os.environ.get("RAY_AUTH_MODE", ""),
    }


def package_hash() -> str:
    """Return a digest of Lockstep's own source files."""
    root, digest = Path(lockstep.__file__).parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def submitter() -> dict[str, str]:
    """Variables of a job that tell its driver what the machine has that submitted it."""
    here = facts()
    return {_SUBMITTER: " ".join(str(here[name]) for name in ("lockstep", "package"))}


def check_submitter() -> None:
    """Raise ConfigError if this is the driver of a job that another Lockstep submitted: what settings mean
    may differ."""
    there, here = os.environ.get(_SUBMITTER), submitter()[_SUBMITTER]
    if there not in (None, here):
        raise ConfigError(
            f"version-differs: the job was submitted by lockstep {there} (version, digest of its files), but "
            f"{platform.node()} has {here}; install the same version on both"
        )


class NodeHost:
    """The hosts of a node's ranks, in one generation after the other.

    Args:
        address: of this node, as others reach it.
    """

    def __init__(self, ranks: int, *, address: str) -> None:
        self._address = address
        self._hosts = [RankHost() for _ in range(ranks)]
        self._checkpoints: PeerCheckpointServer | None = None
        self._spares: WarmSpares | None = None
        self._next: dict[int, RankHost] = {}
        """Hosts of the warm spares, by local rank."""
        self._starting = threading.Lock()

    def host(self, local_rank: int, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the host of one rank."""
        return getattr(self._hosts[local_rank], method)(*args, **kwargs)

    def start(self, argv: Sequence[str], env: Sequence[Mapping[str, str]], **how: Any) -> None:
        """Start all ranks of the node. Those of the generation before have ended, or are ended here: the
        driver may not have reached the node.

        Args:
            env: of each rank.
            how: as of RankHost.start.

        Raises:
            ConfigError: as RankHost.start, and there is no room for copies.
        """
        with self._starting:  # a driver that has given up waiting for it calls again
            end(host.child for host in self._hosts if host.child is not None)
            more: dict[str, str] = {}
            if place := env[0].get(COPY_PLACE):
                more = self._environment_of_copies(Path(place))
            refills = WARM_SPARES in env[0]
            ours = (COPY_PLACE, WARM_SPARES)
            environments = [{n: v for n, v in own.items() if n not in ours} | more for own in env]
            if self._spares is not None and str(self._spares.folder) != environments[0].get(COPIES):
                self._spares.close()  # the checkpoint server was another one, and the pipes went with it
                self._spares = None
            promoted = {} if self._spares is None else self._spares.promote(environments)
            self._hosts = [self._next[rank] if rank in promoted else RankHost() for rank in range(len(env))]
            self._next = {}
            for rank, (host, environment) in enumerate(zip(self._hosts, environments, strict=True)):
                if rank not in promoted:
                    host.start(argv, environment, **how)

            def spawn(local_rank: int, environment: Mapping[str, str]) -> Child:
                host = self._next[local_rank] = RankHost()
                host.start(argv, environment, **how)
                assert host.child is not None
                return host.child

            if refills:
                self._spares = self._spares or WarmSpares(Path(environments[0][COPIES]))
                self._spares.refill(spawn, environments)

    def _environment_of_copies(self, place: Path) -> dict[str, str]:
        if self._checkpoints is not None:
            with contextlib.suppress(CheckpointError):
                return self._checkpoints.environment()
            self._checkpoints.close()  # it is dead, as when memory was full; the next node has the copies
        self._checkpoints = PeerCheckpointServer(place, self._address)
        return self._checkpoints.environment()

    def close(self) -> None:
        """End what waits here, and remove the node's copies."""
        if self._spares is not None:
            self._spares.close()
        if self._checkpoints is not None:
            self._checkpoints.close()


class RankHost:
    """Starts one rank; every method may run in a thread of its own."""

    def __init__(self) -> None:
        self.child: Child | None = None
        """None: it was not started."""
        self._changed = threading.Condition()
        self._waiting = {"out": bytearray(), "err": bytearray()}
        self._open = 2
        """Streams that have not ended."""

    def facts(self) -> dict[str, Any]:
        """See `facts`."""
        return facts()

    def start(
        self, argv: Sequence[str], env: Mapping[str, str], *, cwd: str | None, secrets: Sequence[str] = ()
    ) -> int:
        """Start the rank; returns the pid of its supervisor.

        Args:
            argv: without the interpreter, which is this node's own.
            env: beside what programs need of this node's environment.
            cwd: None: where this process is.

        Raises:
            ConfigError: this node lacks the folder, or the value of a secret.
        """
        cwd = os.getcwd() if cwd is None else cwd
        if not Path(cwd).is_dir():
            raise ConfigError(
                f"no-such-file: {platform.node()} has no folder {cwd}, where the run was started; create it "
                "there, or start the run in a folder that exists on every node"
            )
        environment = staying(os.environ, secrets=secrets) | dict(env)
        # Ray starts its processes with Ctrl-C blocked, and what this thread starts would inherit that.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
        readers, writers = zip(os.pipe(), os.pipe(), strict=True)
        try:
            self.child = Child(
                [sys.executable, "-u", *argv],
                output=(writers[0], writers[1]),
                env=environment,
                cwd=Path(cwd),
                grace=_GRACE_SECONDS,
            )
        finally:
            for writer in writers:
                os.close(writer)
        for name, reader in zip(self._waiting, readers, strict=True):
            threading.Thread(
                target=self._read, args=(name, reader), name=f"reads {name}", daemon=True
            ).start()
        return self.child.pid

    def follow(self, seconds: float) -> tuple[bytes, bytes, int | None]:
        """Return what it has written to stdout and stderr since the last call, and its status once it has
        ended and everything was returned; waits up to `seconds` for any of these."""
        assert self.child is not None
        until = time.monotonic() + seconds
        with self._changed:
            if self._changed.wait_for(lambda: any(self._waiting.values()) or not self._open, timeout=seconds):
                self._changed.wait_for(self._is_full, timeout=_GATHER_SECONDS)
            out, err = (bytes(waiting[:CHUNK]) for waiting in self._waiting.values())
            for waiting, taken in zip(self._waiting.values(), (out, err), strict=True):
                del waiting[: len(taken)]
            finished = not self._open and not any(self._waiting.values())
            self._changed.notify_all()
        status = self.child.wait(max(0.0, until - time.monotonic())) if finished else None
        return out, err, status

    def _is_full(self) -> bool:
        """Whether an answer that is given now holds as much as one can."""
        return not self._open or any(len(waiting) >= CHUNK for waiting in self._waiting.values())

    def ask(self, question: Callable[[int], Any], rank: int) -> Any:
        """What the function says of the rank, here."""
        return question(rank)

    def send_signal(self, number: int) -> None:
        """Send a signal to the rank."""
        if self.child is not None and self.child.poll() is None:
            self.child.send_signal(signal.Signals(number))

    def end(self) -> None:
        """End the rank and what it started."""
        if self.child is not None:
            self.child.end()

    def _read(self, name: str, reader: int) -> None:
        with os.fdopen(reader, "rb", buffering=0) as pipe:
            while chunk := pipe.read(1 << 16):
                with self._changed:
                    self._waiting[name] += chunk
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: len(self._waiting[name]) < _BUFFER)
        with self._changed:
            self._open -= 1
            self._changed.notify_all()


# Which environment variables a rank on another node gets, and from where.
#
#    travels   what decides how ranks compute, find each other and log, by name: from the driver to every rank
#     stays     what programs need of their own machine (PATH, HOME, libraries, cache folders, proxies,
#               certificates): from the node
#     secrets   cluster.secrets: names travel, values are the node's own
#
# Everything else stays where it is. So no token, no password in a URL, and nothing of this shell reaches a
# job record, a log or another machine.


_SECRET = re.compile(r"TOKEN(?!IZERS_)|KEY|SECRET|PASSW|CREDENTIAL|AUTH", re.I)
_SWITCHES = {"HF_HUB_DISABLE_IMPLICIT_TOKEN"}
"""Names that look like those of secrets, and say on or off."""
_USERINFO = re.compile(r"://[^/?#]*@")
"""A name, and perhaps a password, in a URL."""
_FOLDERS = r"(?:TORCH|TORCHINDUCTOR|TRITON|WANDB|HF)_\w*(?:HOME|DIR)|HF_\w*CACHE"
"""Each node has them where it likes."""
_TRAVELS = re.compile(
    rf"(?!(?:{_FOLDERS})$)"
    r"(?:LOCKSTEP_(?!RANKS_SECRET|LAUNCHER_PID|CACHE)\w+"
    r"|TRANSFORMERS_OFFLINE|TOKENIZERS_PARALLELISM"
    r"|ATEN_CPU_CAPABILITY|(?:ONEDNN|DNNL)_MAX_CPU_ISA|MKL_(?:ENABLE_INSTRUCTIONS|CBWR)"
    r"|(?:OMP|MKL)_NUM_THREADS|CUBLAS_WORKSPACE_CONFIG|PYTHONHASHSEED|PYTORCH_\w*ALLOC_CONF"
    r"|(?:NCCL|GLOO|TORCH|TORCHINDUCTOR|TRITON|WANDB|HF)_\w+)"
)
_STAYS = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|LANG|LC_\w+|TZ|TERM|TMPDIR|PYTHONPATH|VIRTUAL_ENV|CONDA_PREFIX"
    r"|LD_LIBRARY_PATH|LIBRARY_PATH|CPATH|CUDA_HOME|CUDA_PATH|CUDA_VISIBLE_DEVICES|NVIDIA_\w+"
    r"|XDG_(?:CACHE|CONFIG|DATA)_HOME|LOCKSTEP_CACHE|(?:HUGGINGFACE_HUB|TRANSFORMERS)_CACHE"
    rf"|{_FOLDERS}"
    r"|SSL_CERT_(?:FILE|DIR)|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE"
    r"|(?:HTTPS?|ALL|NO)_PROXY|(?:https?|all|no)_proxy"
)


def travelling(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what of the driver's environment every rank gets."""
    return {
        name: value
        for name, value in environ.items()
        if _TRAVELS.fullmatch(name) and not _is_secret(name) and not _USERINFO.search(value)
    }


def staying(environ: Mapping[str, str], *, secrets: Sequence[str] = ()) -> dict[str, str]:
    """Return what of a node's own environment its ranks get.

    Raises:
        ConfigError: it has no value for a name of `secrets`.
    """
    if missing := [name for name in secrets if not environ.get(name)]:
        raise ConfigError(
            f"wrong-environment: cluster.secrets names {', '.join(missing)}, missing from the environment "
            "of this node; set what is missing where Ray is started on this node, or leave it out"
        )
    kept = {n: v for n, v in environ.items() if _STAYS.fullmatch(n) and not _is_secret(n)}
    return kept | {name: environ[name] for name in secrets}


def _is_secret(name: str) -> bool:
    return name not in _SWITCHES and _SECRET.search(name) is not None
