"""Ray's head on this machine, for as long as a run takes. Ray loads when a function here is called."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import os
import re
import secrets
import selectors
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lockstep.cluster.launch import LOOPBACK
from lockstep.cluster.rank_host import staying, travelling
from lockstep.config.cluster import ClusterConfig, check_temp_dir
from lockstep.errors import ConfigError, LockstepError
from lockstep.observe.files import cache_root
from lockstep.observe.trust import check_own_folder, open_own
from lockstep.processes.child import Child

OLDEST = (2, 60)
"""Ray with token authentication for every part."""


START_SECONDS = 120.0
"""For Ray to start on this machine, and for the actors of a world to run."""


_END_SECONDS = 30.0


_FREE_BYTES = 2**30


_STALE_SECONDS = 60.0


_LOG, _LOCK, _OF_RAY = "head.log", "lockstep.lock", "r"
"""In the folder of a local cluster. The last is Ray's own, whose name counts in the paths of its sockets."""


_ADDRESS = re.compile(rb"^address (127\.0\.0\.1:\d{1,5})\n", re.M)


_LIMITS = {"RAY_ROTATION_MAX_BYTES": str(8 * 2**20), "RAY_ROTATION_BACKUP_COUNT": "1"}
"""Of each of Ray's own logs."""


_PATIENCE = {"RAY_raylet_start_wait_time_s": "120"}
"""Ray gives up after 30 s, which a busy machine needs."""


_CLUSTER = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""0: Ray keeps to loopback, on every system."""


class ClusterError(LockstepError, RuntimeError):
    """The cluster did not do what it was asked to."""


def import_ray() -> Any:
    """Return the module, which reads the token's place when it is loaded.

    Raises:
        ConfigError: it is not installed, or too old.
    """
    _check_installed()
    import ray

    return ray


def _check_installed() -> None:
    try:
        installed = importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigError(
            "missing-package: --cluster needs Ray, which is not installed here: pip install "
            "'lockstep-rl[cluster]'; or start the ranks on this machine by --ranks N"
        ) from error
    if tuple(int(part) for part in installed.split(".")[:2]) < OLDEST:
        raise ConfigError(
            f"unsupported-version: Ray {installed} is older than {OLDEST[0]}.{OLDEST[1]}, whose token "
            "authentication is needed: pip install --upgrade 'lockstep-rl[cluster]'"
        )


@contextlib.contextmanager
def local_cluster(config: ClusterConfig, *, ranks: int) -> Iterator[str]:
    """Run Ray on this machine, on loopback, in a folder of its own, and yield its address. Afterwards no
    process and no file of it is left, whatever ended the driver.

    Ray lets everybody write in its folder (mode 0777). So that folder lies in one of mode 0700, which Ray
    does not touch, beside the token; and the address comes through a pipe.

    Raises:
        ConfigError: the folder cannot be used, or others may change it; Ray is not there.
        ClusterError: Ray did not start.
    """
    _check_installed()
    folder = _new_folder(config.temp_dir or cache_root() / "ray")
    token = folder / "token"
    with os.fdopen(os.open(token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    ours = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), _CLUSTER: "0"}
    os.environ |= ours
    os.environ.pop("RAY_AUTH_TOKEN", None)  # it would come first
    environment = staying(os.environ, secrets=config.secrets) | travelling(os.environ)
    environment |= ours | _LIMITS | _PATIENCE
    cpus, gpus = (count * config.layout().per_rank for count in (ranks, config.gpus))
    arguments = [str(folder), str(cpus), str(gpus), str(config.object_store_mb)]
    command = [sys.executable, "-m", "lockstep.cluster.ray_head", *arguments]
    reader, writer = os.pipe()
    try:
        try:
            with (folder / _LOG).open("wb") as output:
                head = Child(command, output=(writer, output), env=environment, grace=_END_SECONDS)
        finally:
            os.close(writer)
        try:
            yield _address_of(head, reader, folder=folder)
        finally:
            head.end()
    finally:
        os.close(reader)
        shutil.rmtree(folder, ignore_errors=True)
        for name in ours:
            os.environ.pop(name, None)


def _new_folder(parent: Path) -> Path:
    parent = parent.expanduser().absolute()
    folder = parent / secrets.token_hex(3)
    check_temp_dir(folder / _OF_RAY)
    try:
        _make_folders(parent)
        folder.mkdir(mode=0o700)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise ConfigError(
            f"cannot-write: {folder}: cannot be made ({error.strerror}), and Ray's files lie there; set "
            "cluster.temp_dir"
        ) from error
    try:
        check_own_folder(
            folder,
            advice="the token of the cluster lies there; set cluster.temp_dir to a folder that only you may "
            "write, such as one in your home folder",
        )
        if free < _FREE_BYTES:
            raise ConfigError(
                f"no-space: {parent}: {free >> 20} MiB are free, and {_FREE_BYTES >> 20} are needed for "
                "Ray's files; make room, or set cluster.temp_dir to a folder on another disk"
            )
    except ConfigError:
        folder.rmdir()
        raise
    _remove_stale(parent)
    return folder


def _make_folders(folder: Path) -> None:
    """As Path.mkdir does with parents, but none of them for a group to write in, whatever the umask is."""
    if not folder.is_dir():
        _make_folders(folder.parent)
        folder.mkdir(mode=0o755, exist_ok=True)


def _remove_stale(parent: Path) -> None:
    """Remove folders whose head was killed together with its supervisor: nobody holds their lock."""
    for lock in parent.glob(f"{'[0-9a-f]' * 6}/{_LOCK}"):
        with contextlib.suppress(OSError, ConfigError), open_own(lock, ConfigError) as file:
            stale = time.time() - os.fstat(file.fileno()).st_mtime > _STALE_SECONDS
            if stale and lock.parent.lstat().st_uid == os.geteuid():
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent)


def _address_of(head: Child, reader: int, *, folder: Path) -> str:
    """What the head says on its pipe."""
    deadline, said = time.monotonic() + START_SECONDS, b""
    with selectors.DefaultSelector() as selector:
        selector.register(reader, selectors.EVENT_READ)
        while (match := _ADDRESS.search(said)) is None:
            if selector.select(0.1) and (text := os.read(reader, 4096)):
                said = said[-4096:] + text
            elif head.wait(0.1) is not None or time.monotonic() > deadline:
                lines = (folder / _LOG).read_text(errors="replace").splitlines()[-8:]
                why = "ended" if head.poll() is not None else f"said nothing within {START_SECONDS:g} s"
                raise ClusterError(
                    f"process-died: Ray did not start on this machine: it {why}: " + "\n".join(lines)
                )
    return match[1].decode()


def head_main(argv: Sequence[str]) -> int:
    """The process that `local_cluster` starts: Ray's head, until SIGTERM comes."""
    folder, cpus, gpus, megabytes = Path(argv[0]), int(argv[1]), int(argv[2]), int(argv[3])
    driver = os.dup(sys.stdout.fileno())  # which nothing that is started here inherits
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    ended = threading.Event()
    with os.fdopen(os.open(folder / _LOCK, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ray = import_ray()
        ray.init(
            address="local",
            num_cpus=cpus,
            num_gpus=gpus,
            object_store_memory=megabytes * 10**6,
            include_dashboard=False,
            log_to_driver=False,
            _temp_dir=str(folder / _OF_RAY),
            _node_ip_address=LOOPBACK,
        )
        signal.signal(signal.SIGTERM, lambda *_: ended.set())
        with contextlib.suppress(BrokenPipeError):  # the driver is gone, and SIGTERM comes
            os.write(driver, f"\naddress {ray.get_runtime_context().gcs_address}\n".encode())
        os.close(driver)
        ended.wait()
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)  # the driver may be gone
    return 0


if __name__ == "__main__":
    sys.exit(head_main(sys.argv[1:]))
