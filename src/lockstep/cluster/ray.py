"""The provider over Ray.

    with local_cluster(config, ranks=2) as address:      # or the address of a cluster that runs
        provider = RayProvider(address, config=config, log_dir=Path("out"))
        launch_on(provider, ["-m", COMMAND, "train", ...], placement=Placement(nodes=1, per_node=2), ...)

A placement group has one bundle per node, and a bundle one actor, which starts one process per rank
(lockstep.cluster.rank_host). Ray places, starts and watches; what travels through it is argv, environment and
the text that ranks write, in pieces that Ray keeps out of its object store. When the driver or a node dies,
Ray ends the actors, and with each of them its ranks. Actors that keep copies of their ranks' state stay
until the provider is closed, and Ray moves the bundle of a node that has died to another one. An actor takes
half a percent of a core for itself, as Ray wakes it 100 times a second, so there is one per node; the driver
waits for calls that stay open.

Token authentication is always on. Ray loads when a function here is called, after the environment is set.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ipaddress
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import psutil

from lockstep.cluster.launch import _END_SECONDS, START_SECONDS, ClusterError, import_ray
from lockstep.cluster.rank_host import COMPARED, NodeHost, facts
from lockstep.config.cluster import ClusterConfig
from lockstep.errors import ConfigError, LockstepError
from lockstep.observe.text import echo
from lockstep.observe.trust import distrust, is_own
from lockstep.protocols.cluster import Answers, Node, Placement, RankEnded, World

log = logging.getLogger(__name__)
T = TypeVar("T")

_FOLLOW_SECONDS = 300.0
"""How long an answer about a rank waits for news."""
_ANSWER_SECONDS = 10.0
"""For the answer of a node to a question about its rank."""
_RETRY_SECONDS = 1.0
_POLL_SECONDS = 0.1
"""Between two looks for answers of nodes."""


# --- the provider -------------------------------------------------------------------------------------------


class RayProvider:
    """Starts worlds on a Ray cluster; connects at once.

    Args:
        address: host:port of its head, or "auto": what RAY_ADDRESS names, else ours on this machine.
        log_dir: on this machine; what ranks write comes here.

    Raises:
        ConfigError: there is no such cluster, or none that asks for a token.
    """

    def __init__(self, address: str, *, config: ClusterConfig, log_dir: Path) -> None:
        check_token(address)
        ray = import_ray()
        if address == "auto":
            address = _auto_address()
        self._ray, self._config, self.log_dir = ray, config, log_dir
        self._restarts = config.peer_copy and config.nodes > 1
        """Whether places, and the copies in their memory, are kept from one world to the next."""
        self._group: Any = None
        self._actors: list[Any] = []
        """By node."""
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, namespace="lockstep")
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"unreachable: --cluster: no Ray cluster answers at {address!r}: "
                f"{str(error).splitlines()[0]} Start one (ray start --head), set RAY_ADDRESS to the address "
                "of its head, or use --cluster local"
            ) from error
        self.address: str = ray.util.get_node_ip_address()

    def close(self) -> None:
        """Leave the cluster."""
        if self._actors:
            calls = [actor.close.remote() for actor in self._actors]
            self._ray.wait(calls, num_returns=len(calls), timeout=2 * _END_SECONDS)
            self._give_back()
        self._ray.shutdown()

    def nodes(self) -> list[Node]:
        """The nodes that are alive."""
        return [
            Node(
                name=str(node["NodeName"]),
                address=str(node["NodeManagerAddress"]),
                cpus=int(node["Resources"].get("CPU", 0)),
                gpus=int(node["Resources"].get("GPU", 0)),
            )
            for node in self._ray.nodes()
            if node["Alive"]
        ]

    def start(self, placement: Placement, env: Sequence[Mapping[str, str]], argv: Sequence[str]) -> World:
        """Start `python ARGV` once per slot.

        Raises:
            ConfigError: there is no such place, or what is installed there differs.
            ClusterError: a rank's actor died, or no node is free in the place of one that has died.
        """
        restarted = bool(self._actors)
        until: float | None = None
        while True:
            if self._group is None:
                self._group = self._reserve(placement)
            living = self._living()
            until = until or time.monotonic() + self._config.node_seconds
            self._fill_places(placement, living, until=until)
            try:
                return self._start(placement, env, argv)
            except ClusterError as lost:
                if not restarted or time.monotonic() > until:
                    raise
                echo(f"lockstep: {lost}; trying again", file=sys.stderr)
                time.sleep(_RETRY_SECONDS)

    def _start(self, placement: Placement, env: Sequence[Mapping[str, str]], argv: Sequence[str]) -> World:
        members = [_Member(self._actors[slot.node], slot.local_rank) for slot in placement.slots]
        world = World(placement=placement, log_dir=self.log_dir, members=members)
        try:
            there = self._get([actor.facts.remote() for actor in self._actors])
            _compare(there)
            kwargs = {"cwd": None if _is_job() else os.getcwd(), "secrets": tuple(self._config.secrets)}
            started = []
            for node, (actor, facts_there) in enumerate(zip(self._actors, there, strict=True)):
                more = _devices(facts_there, placement)
                threads = {"OMP_NUM_THREADS": str(_threads(facts_there, placement))}
                own = env[node * placement.per_node : (node + 1) * placement.per_node]
                here = [threads | dict(of_rank) | more for of_rank in own]
                started.append(actor.start.remote(list(argv), here, **kwargs))
            self._get(started)
        except BaseException:
            self.stop(world)
            raise
        for path in self.logs(world):
            path.write_bytes(b"")
        for member in members:
            member.follow()
        return world

    def _fill_places(self, placement: Placement, kept: list[Any], *, until: float) -> None:
        """An actor on each node: those that live stay, with their copies; Ray moves the places of a node that
        has died to another one.

        Args:
            kept: as of `_living`.

        Raises:
            ClusterError: no other node is free in time.
        """
        lost = [node for node, actor in enumerate(kept) if actor is None]
        if lost:
            named = ", ".join(map(str, lost))
            seconds = max(0.0, until - time.monotonic())
            echo(
                f"lockstep: node {named} of {placement.nodes} is lost; waiting at most {seconds:.0f} s for "
                "another in its place",
                file=sys.stderr,
            )
        kept = kept or [None] * placement.nodes
        self._actors = [
            self._actor(self._group, placement, node) if actor is None else actor
            for node, actor in enumerate(kept)
        ]
        try:
            self._await([self._actors[node] for node in lost], placement, until=until)
        except BaseException:  # also Ctrl-C
            for node in lost:
                self._kill(self._actors[node])
            raise

    def _await(self, actors: Sequence[Any], placement: Placement, *, until: float) -> None:
        calls = [actor.facts.remote() for actor in actors]
        if not calls:
            return
        seconds = max(0.0, until - time.monotonic())
        there, _ = self._ray.wait(calls, num_returns=len(calls), timeout=seconds)
        if len(there) < len(calls):
            has = "; ".join(f"{n.name}: {n.cpus} CPUs, {n.gpus} GPUs" for n in self.nodes())
            raise ClusterError(
                f"not-enough: a node died, and no other node with {_bundle(placement)} became free within "
                f"cluster.node_seconds = {self._config.node_seconds:g}; the cluster has {has}, some of it in "
                "use. Add a node, then continue"
            )

    def _living(self) -> list[Any]:
        """The actors by node; None: it is gone, or does not answer in time, and is killed.
        One that is away for a moment is asked again, since the copies on its node would go with it."""
        errors, until = self._ray.exceptions, time.monotonic() + START_SECONDS
        living = list(self._actors)
        calls = {node: actor.facts.remote() for node, actor in enumerate(self._actors)}
        while calls:
            late = time.monotonic() >= until
            for node, call in list(calls.items()):
                try:
                    self._ray.get(call, timeout=0)
                except (errors.RayActorError, errors.GetTimeoutError) as error:
                    if not late and isinstance(error, errors.GetTimeoutError):
                        continue
                    if not late and isinstance(error, errors.ActorUnavailableError):
                        calls[node] = living[node].facts.remote()
                        continue
                    self._kill(living[node])
                    living[node] = None
                del calls[node]
            if calls:
                time.sleep(_POLL_SECONDS)
        return living

    def watch(self, world: World) -> Iterator[RankEnded]:
        """Yield every rank that has ended, and append what the ranks wrote to their logs."""
        for rank, member in enumerate(world.members):
            while member.ended is None and member.answer is not None and member.answer.done():
                self._take(world, rank, member)
            if member.ended is not None:
                yield member.ended

    def wait(self, world: World, seconds: float) -> None:
        """Wait for an answer about a rank."""
        concurrent.futures.wait(_awaited(world), seconds, return_when=concurrent.futures.FIRST_COMPLETED)

    def ask(self, world: World, question: Callable[[int], T]) -> Answers[T]:
        """Call a function with the number of each rank on that rank's node."""
        calls = [member.call("ask", question, rank) for rank, member in enumerate(world.members)]
        there, _ = self._ray.wait(calls, num_returns=len(calls), timeout=_ANSWER_SECONDS)
        given: list[T] = []
        missing = {}
        for rank, call in enumerate(calls):
            if call not in there:
                missing[rank] = f"no answer within {_ANSWER_SECONDS:g} s"
                continue
            try:
                given.append(self._ray.get(call))
            except self._ray.exceptions.RayError as error:
                missing[rank] = _short(error)
        return Answers(given=given, missing=missing)

    def stop(self, world: World, number: signal.Signals | None = None) -> None:
        """Pass a signal on, or end all and give their places back."""
        call = "end" if number is None else "send_signal"
        arguments = () if number is None else (int(number),)
        calls = [member.call(call, *arguments) for member in world.members]
        self._ray.wait(calls, num_returns=len(calls), timeout=_END_SECONDS)
        if number is not None:
            return
        deadline = time.monotonic() + _END_SECONDS
        while _awaited(world) and time.monotonic() < deadline:
            self.wait(world, deadline - time.monotonic())
            for _ in self.watch(world):
                pass
        if self._restarts:
            for member in world.members:
                if member.answer is not None and member.ended is None:
                    self._kill(member.actor)  # a rank that cannot be ended: its place is not used again
        else:
            self._give_back()

    def _give_back(self) -> None:
        for actor in self._actors:
            self._kill(actor)
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.util.remove_placement_group(self._group)
        self._group, self._actors = None, []

    def _kill(self, actor: Any) -> None:
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.kill(actor)

    def logs(self, world: World) -> list[Path]:
        """rank-N.log and rank-N.err.log of every rank."""
        names = [f"rank-{rank}{end}" for rank in range(world.placement.ranks) for end in (".log", ".err.log")]
        return [world.log_dir / name for name in names]

    def _reserve(self, placement: Placement) -> Any:
        """A placement group: a bundle per node."""
        bundle = _bundle(placement)
        strategy = "STRICT_PACK" if placement.nodes == 1 else "STRICT_SPREAD"
        group = self._ray.util.placement_group([bundle] * placement.nodes, strategy=strategy)
        if not group.wait(timeout_seconds=START_SECONDS):
            free = self._ray.available_resources()
            self._ray.util.remove_placement_group(group)
            raise ConfigError(
                f"deadline: {placement.nodes} nodes with {bundle} each did not become free within "
                f"{START_SECONDS:g} s; free in the whole cluster: CPU {free.get('CPU', 0):g}, GPU "
                f"{free.get('GPU', 0):g}. Wait for other runs, or lower cluster.nodes, cluster.gpus or "
                "cluster.slots"
            )
        return group

    def _actor(self, group: Any, placement: Placement, node: int) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=node)
        ranks = placement.per_node
        bundle = _bundle(placement)
        options = {"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0), "max_restarts": 0}
        options["max_concurrency"] = 2 * ranks + 2  # a call about each rank stays open
        actor = self._ray.remote(_NodeActor).options(scheduling_strategy=where, **options)
        return actor.remote(ranks)

    def _get(self, calls: list[Any]) -> list[Any]:
        """Their results. Raises what they raise, and ClusterError where an actor is gone."""
        errors = self._ray.exceptions
        try:
            return list(self._ray.get(calls, timeout=START_SECONDS))
        except errors.RayTaskError as error:
            if isinstance(error.cause, LockstepError):
                raise error.cause from error
            raise
        except (errors.RayActorError, errors.GetTimeoutError) as error:
            raise ClusterError(
                f"refused: Ray did not start a process for a rank: {str(error).splitlines()[0]}"
            ) from error

    def _take(self, world: World, rank: int, member: _Member) -> None:
        """Take an answer, and ask again unless the rank has ended."""
        assert member.answer is not None
        try:
            out, err, status = member.answer.result()
        except self._ray.exceptions.RayError as error:
            why = f"Ray lost the process that runs it: {_short(error)}"
            member.ended = RankEnded(rank=rank, status=-signal.SIGKILL, why=why)
            return
        for text, path in zip((out, err), self.logs(world)[2 * rank :], strict=False):
            if text:
                with path.open("ab") as file:
                    file.write(text)
        if status is None:
            member.follow()
        else:
            member.ended = RankEnded(rank=rank, status=status)


def _auto_address() -> str:
    """The address of `--cluster auto`. RAY_ADDRESS = auto names none: Ray would look for one itself."""
    named = os.environ.get("RAY_ADDRESS", "")
    return _running_here() if named in ("", "auto") else named


def _running_here() -> str:
    """The address of the Ray cluster that runs on this machine, by its own processes. Ray would take the
    address in a file that everybody may write (/tmp/ray/ray_current_cluster), or of anybody's process, and
    send our token there.

    Raises:
        ConfigError: none of ours runs here, or several.
    """
    found: set[str] = set()
    foreign: set[str] = set()
    for process in psutil.process_iter(["cmdline", "uids"]):
        words, uids = process.info["cmdline"] or [], process.info["uids"]
        if words and uids is not None and Path(words[0]).name == "raylet":
            by = found if is_own(uids.real) else foreign
            by |= {word.partition("=")[2] for word in words if word.startswith("--gcs-address=")}
    if len(found) == 1:
        return found.pop()
    if found:
        what = f"several Ray clusters run on this machine: {', '.join(sorted(found))}"
    elif foreign:
        what = f"the Ray cluster on this machine ({', '.join(sorted(foreign))}) belongs to another user"
    else:
        what = "no Ray cluster runs on this machine"
    raise ConfigError(
        f"unreachable: --cluster auto: {what}. Set RAY_ADDRESS to the address of a cluster that you trust "
        "with your token, start one (ray start --head), or use --cluster local"
    )


def _awaited(world: World) -> list[concurrent.futures.Future[Any]]:
    """The answers about ranks that have not ended."""
    return [each.answer for each in world.members if each.answer is not None and each.ended is None]


def _is_job() -> bool:
    """Whether this driver was submitted: Ray then unpacks the job's folder on each node, where it likes."""
    return bool(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR"))


class _NodeActor(NodeHost):
    """The actor of one node."""

    def __init__(self, ranks: int) -> None:
        super().__init__(ranks, address=import_ray().util.get_node_ip_address())

    def facts(self) -> dict[str, Any]:
        ray = import_ray()
        node = next(n for n in ray.nodes() if n["NodeID"] == ray.get_runtime_context().get_node_id())
        cpus = int(node["Resources"].get("CPU", 0))
        return facts() | {"gpus": [str(gpu) for gpu in ray.get_gpu_ids()], "cpus": cpus}


class _Member:
    """A rank: the actor of its node, the answer that is awaited, and the rank's end once it has come."""

    def __init__(self, actor: Any, local_rank: int) -> None:
        self.actor, self._local_rank = actor, local_rank
        self.answer: concurrent.futures.Future[tuple[bytes, bytes, int | None]] | None = None
        """None: it was not started."""
        self.ended: RankEnded | None = None

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Start a call of its host."""
        return self.actor.host.remote(self._local_rank, method, *args, **kwargs)

    def follow(self) -> None:
        """Ask for what it does next."""
        self.answer = self.call("follow", _FOLLOW_SECONDS).future()


def _short(error: Exception) -> str:
    """What Ray says, on one line."""
    return " ".join(str(error).split())[:300]


def _bundle(placement: Placement) -> dict[str, int]:
    """What the ranks of a node need, with what is beside them."""
    return {"CPU": placement.devices} | ({"GPU": placement.devices} if placement.gpus else {})


def _devices(there: Mapping[str, Any], placement: Placement) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES of a node's ranks: all GPUs of the world there, which LOCAL_RANK counts, and then
    those of what is beside the ranks."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(there["gpus"])} if placement.gpus else {}


def _threads(there: Mapping[str, Any], placement: Placement) -> int:
    """Of each rank; they decide bits, so they do not depend on what else has GPUs of its own."""
    return max(1, int(there["cpus"]) // placement.per_node)


def _compare(there: Sequence[Mapping[str, Any]]) -> None:
    """Raise ConfigError unless all nodes have what the driver has, and ask for a token."""
    here = facts()
    for node, facts_there in enumerate(there):
        different = [
            f"{n} {facts_there[n]} instead of {here[n]}" for n in COMPARED if facts_there[n] != here[n]
        ]
        if different:
            raise ConfigError(
                f"version-differs: the ranks of node {node}, {facts_there['host']}, would run with "
                f"{', '.join(different)}; install the same versions on every node (package: Lockstep's own "
                "files)"
            )
        if facts_there["auth"] != "token":
            raise ConfigError(
                "not-authenticated: the Ray cluster does not require a token (RAY_AUTH_MODE is "
                f"{facts_there['auth'] or 'not set'} on {facts_there['host']}): anyone who can reach it can "
                "run programs there. Start it with RAY_AUTH_MODE=token"
            )


def check_token(address: str) -> None:
    """Raise ConfigError unless this process has a token to show."""
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if os.environ.get("RAY_AUTH_TOKEN"):
        return
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    try:
        found = path.stat()  # links are followed: Kubernetes hands secrets out behind them
    except OSError as error:
        raise ConfigError(
            f"not-authenticated: --cluster: no token for the Ray cluster at {address!r}: {path} cannot be "
            f"read ({error.strerror}); copy the token there from the head (mode 0600), or set "
            "RAY_AUTH_TOKEN_PATH to its path"
        ) from error
    if reason := distrust(found, secret=found.st_uid == os.geteuid()):
        raise ConfigError(
            f"not-ours: --cluster: the token of the Ray cluster, {path}, {reason} (in Kubernetes, set "
            "defaultMode: 0400 on the secret's volume)"
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches it.

    Example:
        >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("10.0.0.7")
        (True, True, False)
    """
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
