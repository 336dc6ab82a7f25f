"""Launch the ranks of one command through a cluster provider: as `lockstep.ranks.launch`, elsewhere."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import importlib.metadata
import itertools
import os
import re
import secrets
import selectors
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import psutil

from lockstep.cluster.rank_host import staying, travelling
from lockstep.common_errors import cannot_write, missing_package
from lockstep.config.cluster import ClusterConfig, check_temp_dir
from lockstep.errors import ConfigError, DataError, LockstepError
from lockstep.observe.files import cache_root
from lockstep.observe.text import echo
from lockstep.observe.trust import check_own_folder, open_own
from lockstep.processes.child import Child, end
from lockstep.processes.programs import RAY_HEAD, python
from lockstep.protocols.cluster import Answers, Node, Placement, Provider, RankEnded, World
from lockstep.ranks.environment import WARM_SPARES
from lockstep.ranks.hang import HangReport, diagnose, rank_states
from lockstep.ranks.launch import Launch, signals_raised
from lockstep.ranks.restart import RestartRules, launch_with_restarts
from lockstep.ranks.watchdog import Counts, Signs, signs

# Ray's head on this machine, for as long as a run takes. Ray loads when a function here is called.


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
        other = "start the ranks on this machine with --ranks N"
        raise missing_package("--cluster", "'lockstep-rl[cluster]'", or_else=other) from error
    if tuple(int(part) for part in installed.split(".")[:2]) < OLDEST:
        raise ConfigError(
            f"unsupported-version: Ray {installed} is older than {OLDEST[0]}.{OLDEST[1]}, and Lockstep needs "
            "the token authentication of that version: pip install --upgrade 'lockstep-rl[cluster]'"
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
    command = [*python(RAY_HEAD), *arguments]
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
        raise cannot_write(ConfigError, folder, error, "set cluster.temp_dir", done="created") from error
    try:
        check_own_folder(
            folder,
            advice="the cluster's token is stored there; set cluster.temp_dir to a folder that only you "
            "can write to, such as one in your home folder",
        )
        if free < _FREE_BYTES:
            raise ConfigError(
                f"no-space: {parent}: {free >> 20} MiB are free, but Ray's files need {_FREE_BYTES >> 20}; "
                "free some space, or set cluster.temp_dir to a folder on another disk"
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
                why = "ended" if head.poll() is not None else f"printed no address within {START_SECONDS:g} s"
                raise ClusterError(f"process-died: Ray did not start here: it {why}: " + "\n".join(lines))
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


T = TypeVar("T")

LOOPBACK = "127.0.0.1"


def launch_on(
    provider: Provider,
    argv: Sequence[str],
    *,
    placement: Placement,
    log_dir: Path,
    graceful: bool = False,
    watch: float | None = None,
) -> int:
    """Run `python ARGV` in every slot and wait for all.

    Args and the status that is returned: as of lockstep.ranks.launch.launch_ranks.

    Raises:
        ConfigError: the provider has no such place.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    with signals_raised():
        launch = _ProviderLaunch(
            argv, provider=provider, placement=placement, log_dir=log_dir, graceful=graceful, watch=watch
        )
        return launch.run(None)


def launch_on_with_restarts(
    provider: Provider,
    argv: Sequence[str],
    *,
    placement: Placement,
    log_dir: Path,
    watch: float,
    rules: RestartRules,
) -> int:
    """As `launch_on`, gracefully, and restart the ranks after a death."""

    def make(logs: Path) -> Launch:
        return _ProviderLaunch(
            argv, provider=provider, placement=placement, log_dir=logs, graceful=True, watch=watch
        )

    return launch_with_restarts(make, rules, log_dir=log_dir)


class _ProviderLaunch(Launch):
    """A launch whose ranks a provider starts."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        provider: Provider,
        placement: Placement,
        log_dir: Path,
        graceful: bool,
        watch: float | None,
    ) -> None:
        self.address = provider.address
        super().__init__(argv, ranks=placement.ranks, log_dir=log_dir, graceful=graceful, watch=watch)
        self.provider, self.placement = provider, placement
        self.world: World | None = None
        self._silent: set[int] = set()
        """Ranks whose nodes did not answer the last question."""

    def start(self) -> None:
        """Start every rank."""
        environments = [self.environment(rank) for rank in range(self.ranks)]
        self.provider.log_dir = self.log_dir
        self.world = self.provider.start(self.placement, environments, self.command)
        self.show(*self.provider.logs(self.world)[:2], every=None)

    @property
    def started(self) -> int:
        """How many ranks were started: all or none."""
        return 0 if self.world is None else self.ranks

    def ended_now(self) -> dict[int, int]:
        """The status of each rank that has ended."""
        if self.world is None:
            return {}
        ended = {}
        for event in self.provider.watch(self.world):
            ended[event.rank] = event.status
            if event.why and event.rank not in self.ended:
                echo(f"lockstep: rank {event.rank}: {event.why}", file=sys.stderr)
        for shown in self.shown:
            shown.wake()
        return ended

    def wait(self, seconds: float) -> None:
        """Wait until a rank has written something or ended, at most so long."""
        if self.world is not None:
            self.provider.wait(self.world, seconds)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to every rank."""
        if self.world is not None:
            self.provider.stop(self.world, number)

    def end(self) -> None:
        """End every rank with what it started."""
        if self.world is not None:
            self.provider.stop(self.world)

    def look(self, known: Mapping[int, Counts]) -> list[Signs]:
        """Signs of progress of the ranks whose nodes answer."""
        return self._ask(functools.partial(signs, self.flights, known=known))[0]

    def report(self) -> HangReport:
        """Say what the ranks wait for. Raises DataError if the nodes answer, and no rank keeps a record."""
        states, missing = self._ask(functools.partial(rank_states, self.flights))
        if not states and not missing:
            raise DataError(f"no-such-file: {self.flights}: no node has a flight record there")
        return diagnose(states, missing)

    def _ask(self, question: Callable[[int], list[T]]) -> tuple[list[T], Mapping[int, str]]:
        """The answers, and why there is none of a rank's node, which is also said once."""
        if self.world is None:
            return [], {}
        answers = self.provider.ask(self.world, question)
        for rank, why in answers.missing.items():
            if rank not in self._silent and rank not in self.ended:
                echo(f"lockstep: the node of rank {rank} does not answer: {why}", file=sys.stderr)
        self._silent = set(answers.missing)
        return list(itertools.chain.from_iterable(answers.given)), answers.missing

    def environment(self, rank: int) -> dict[str, str]:
        """What a rank needs to find the others, and what of our environment travels."""
        slot = self.placement.slots[rank]
        environment = super().environment(rank) | {
            "LOCAL_RANK": str(slot.local_rank),
            "LOCAL_WORLD_SIZE": str(self.placement.per_node),
            "GROUP_RANK": str(slot.node),
        }
        environment.pop("OMP_NUM_THREADS", None)  # follows from the CPUs of the node, unless it is set here
        if self.address != LOOPBACK and "GLOO_SOCKET_IFNAME" not in os.environ:
            environment.pop("GLOO_SOCKET_IFNAME", None)
        if self.refills:
            environment[WARM_SPARES] = "1"
        return travelling(os.environ) | environment


class HasNodes(Protocol):
    """A cluster that says which nodes it has."""

    def nodes(self) -> list[Node]:
        """Those that are alive."""
        ...


def check_nodes(provider: HasNodes, placement: Placement) -> None:
    """Raise unless the cluster has nodes enough that are large enough.

    Raises:
        ConfigError: says what there is and what to set.
    """
    kind = "gpus" if placement.gpus else "slots"
    nodes = provider.nodes()
    fitting = [
        n
        for n in nodes
        if n.cpus >= placement.devices and (n.gpus >= placement.devices or not placement.gpus)
    ]
    if len(fitting) < placement.nodes:
        has = "; ".join(f"{n.name}: {n.cpus} CPUs, {n.gpus} GPUs" for n in nodes) or "none"
        needs, lower = "", f"cluster.nodes or cluster.{kind}"
        if placement.per_rank > 1:
            needs = (
                f" and cluster.dedicated_gpus or cluster.engine_gpus needs {placement.devices} {kind} on "
                "each node"
            )
            lower += ", share the GPUs of ranks (cluster.dedicated_gpus = false, cluster.engine_gpus = 0)"
        raise ConfigError(
            f"not-enough: cluster.nodes = {placement.nodes} with cluster.{kind} = "
            f"{placement.per_node}{needs}: the cluster has only {len(fitting)} such "
            f"node{'s' * (len(fitting) != 1)} ({has}); lower {lower}, or add nodes"
        )


# The provider of one machine: ranks are children of the driver, as under --ranks N.


_GRACE_SECONDS = 8.0
_POLL_SECONDS = 0.05


class LocalProvider:
    """Starts worlds on this machine, with the driver's own environment.

    Args:
        log_dir: the ranks write there.
    """

    address = "127.0.0.1"

    def __init__(self, *, log_dir: Path) -> None:
        self.log_dir = log_dir

    def nodes(self) -> list[Node]:
        """This machine; its GPUs are not counted, as no torch is loaded here."""
        return [Node(name="this machine", address=self.address, cpus=psutil.cpu_count() or 1, gpus=0)]

    def start(self, placement: Placement, env: Sequence[Mapping[str, str]], argv: Sequence[str]) -> World:
        """Start `python ARGV` once per slot."""
        if placement.nodes > 1:
            raise ConfigError(
                f"out-of-range: cluster.nodes = {placement.nodes}, but this is a single machine; set it to 1"
            )
        world = World(placement=placement, log_dir=self.log_dir, members=(children := []))
        for own, (out, err) in zip(env, _pairs(self.logs(world)), strict=True):
            with out.open("wb") as stdout, err.open("wb") as stderr:
                command, environment = [sys.executable, "-u", *argv], {**os.environ, **own}
                output = (stdout, stderr)
                children.append(Child(command, output=output, env=environment, grace=_GRACE_SECONDS))
        return world

    def watch(self, world: World) -> Iterator[RankEnded]:
        """Yield every rank that has ended; does not wait."""
        for rank, child in enumerate(world.members):
            if (status := child.poll()) is not None:
                yield RankEnded(rank=rank, status=status)

    def wait(self, world: World, seconds: float) -> None:
        """Wait a moment."""
        time.sleep(min(seconds, _POLL_SECONDS))

    def ask(self, world: World, question: Callable[[int], T]) -> Answers[T]:
        """Ask here."""
        return Answers(given=[question(rank) for rank in range(world.placement.ranks)])

    def stop(self, world: World, number: signal.Signals | None = None) -> None:
        """Pass a signal on, or end all."""
        if number is None:
            end(world.members)
        else:
            for child in world.members:
                child.send_signal(number)

    def logs(self, world: World) -> list[Path]:
        """rank-N.log and rank-N.err.log of every rank."""
        names = [f"rank-{rank}{end}" for rank in range(world.placement.ranks) for end in (".log", ".err.log")]
        return [world.log_dir / name for name in names]


def _pairs(paths: Sequence[Path]) -> Iterator[tuple[Path, Path]]:
    return zip(paths[::2], paths[1::2], strict=True)


if __name__ == "__main__":  # Ray's head, in a process of its own
    sys.exit(head_main(sys.argv[1:]))
