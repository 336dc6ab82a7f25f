"""Launch the ranks of one command through a cluster provider: as `lockstep.ranks.launch`, elsewhere."""

from __future__ import annotations

import functools
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import psutil

from lockstep.cluster.rank_host import travelling
from lockstep.errors import ConfigError, DataError
from lockstep.observe.text import echo
from lockstep.processes.child import Child, end
from lockstep.protocols.cluster import Answers, Node, Placement, Provider, RankEnded, World
from lockstep.ranks.environment import RESERVE
from lockstep.ranks.hang import HangReport, diagnose, rank_states
from lockstep.ranks.launch import Launch, signals_raised
from lockstep.ranks.restart import RestartRules, launch_with_restarts
from lockstep.ranks.watchdog import Counts, Signs, signs

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
            environment[RESERVE] = "1"
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
                f" and cluster.dedicated_gpus or cluster.engine_gpus, {placement.devices} {kind} of each node"
            )
            lower += ", share the GPUs of ranks (cluster.dedicated_gpus = false, cluster.engine_gpus = 0)"
        raise ConfigError(
            f"not-enough: cluster.nodes = {placement.nodes} with cluster.{kind} = "
            f"{placement.per_node}{needs}: the cluster has {len(fitting)} such "
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
                f"out-of-range: cluster.nodes = {placement.nodes}, but this is one machine; set it to 1"
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
