"""Where roles and ranks run. Without --cluster only the roles' worlds are read of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Literal

from pydantic import Field, PositiveFloat, field_validator

from lockstep.config.base import Config, FilePath, NonNegativeInt, PositiveInt, check
from lockstep.config.engine import EngineConfig, kind
from lockstep.errors import ConfigError

POLICY = "policy"
ROLES = (POLICY, "ref", "value", "reward_model")
WORLD_NUMBERS = ("second", "third", "fourth")
"""What worlds beside the policy's are called, in the order of cluster.colocate."""
LONGEST_TEMP = 44
"""Characters of the folder that Ray's sockets lie in, so that their paths stay below the 107 of AF_UNIX."""
MOST_SLOTS = 2**16


class ClusterConfig(Config):
    """Nodes and ranks of `lockstep train --cluster`, which a run without it ignores, and the worlds of roles,
    which every run has."""

    nodes: PositiveInt = 1
    """Nodes that ranks are spread over, equally."""
    gpus: NonNegativeInt = 0
    """GPUs of each node that ranks are on, one per rank; 0: the ranks run on CPUs, as many on each node as
    `slots`. Those of world_gpus and engine_gpus come on top."""
    slots: PositiveInt = 1
    """Ranks on each node where there are no GPUs (gpus = 0)."""
    colocate: tuple[tuple[str, ...], ...] = ()
    """Roles that share processes: policy, ref, value, reward_model. Empty: all of them. The groups name every
    role of the run: each without the policy is a world of its own, with a process beside each rank.
    As a flag it is one value: --cluster.colocate '[["policy"], ["ref", "value"]]'."""
    world_gpus: Literal["shared", "own"] = "shared"
    """GPU of the process of such a world. shared: its rank's. own: one of its own, on the rank's node. On
    CPUs: slots, of which only Ray knows."""
    engine_gpus: int = Field(0, ge=0, le=1024)
    """GPUs of each node, for each rank there, that its engine's server has for itself: engine.replicas *
    engine.tp of them. 0: the server is on its rank's GPU, or where engine.cuda_devices says."""
    world_seconds: PositiveFloat = 1200.0
    """Deadline of a call to a world of its own: to score or train a rollout batch, to save or load. Below
    --rank-timeout, so that the run ends with the error that names the roles."""
    world_start_seconds: PositiveFloat = 600.0
    """How long such a world may take to start and to load its models."""
    world_restarts: NonNegativeInt = 3
    """How often in a run each such world is started again when it dies. A value model's state dies with it:
    then the run ends, and is resumed from its last checkpoint."""
    secrets: tuple[str, ...] = ()
    """Names of environment variables that ranks need and nobody else may see, such as HF_TOKEN. Only names
    travel: each node has the values in its own environment."""
    temp_dir: FilePath | None = None
    """Folder for Ray's files under --cluster local; None: ray/ in the cache folder (LOCKSTEP_CACHE)."""
    object_store_mb: int = Field(80, ge=75, le=2**20)
    """MB of Ray's object store under --cluster local. No tensor goes through it."""
    peer_copy: bool = False
    """Keep each rank's state also in host memory that outlives it, copied while the next step goes on; when a
    rank dies, all are started again and go on from there. Also with --ranks. On several nodes also in the
    memory of the next node, so that the run outlives the death of a node."""
    max_restarts: NonNegativeInt = 3
    """With peer_copy: how often in a run. Then a death ends it."""
    standby: bool = True
    """With peer_copy: a process per rank that has imported everything waits, from the first copy on, to take
    the place of one that dies. It needs no GPU, and some 0.4 GB of host memory."""
    copy_dir: FilePath | None = None
    """With peer_copy: a folder in memory (tmpfs), on each node, with room for two copies of the state of all
    ranks; None: /dev/shm."""
    node_seconds: PositiveFloat = 600.0
    """With peer_copy on several nodes: how long to wait for a node in the place of one that has died."""

    @property
    def per_node(self) -> int:
        """Ranks on each node."""
        return self.gpus or self.slots

    @property
    def ranks(self) -> int:
        """Ranks on all nodes."""
        return self.nodes * self.per_node

    @property
    def worlds(self) -> tuple[tuple[str, ...], ...]:
        """The roles of each world that the policy is not in; empty: all are with the policy."""
        return tuple(group for group in self.colocate if POLICY not in group)

    def layout(self, ranks: int | None = None) -> NodeLayout:
        """Which device of a node is whose.

        Args:
            ranks: on the node; None: as many as these settings say.
        """
        return NodeLayout(
            ranks=self.per_node if ranks is None else ranks,
            worlds=len(self.worlds) if self.world_gpus == "own" else 0,
            engine=self.engine_gpus,
        )

    def check_devices(self, layout: NodeLayout, *, there: int, otherwise: str = "") -> None:
        """Raise ConfigError if worlds or engines are to have GPUs of their own on a node with too few;
        otherwise: what else to do about it."""
        if layout.per_rank > 1 and layout.total > there:
            settings = ["fewer ranks", *(["cluster.world_gpus = 'shared'"] if layout.worlds else [])]
            if layout.engine:
                settings.append("a smaller cluster.engine_gpus (0: on the GPU of its rank)")
            raise ConfigError(
                f"not-enough: a node needs {layout.sums('GPUs')}, and this one shows {there}; set "
                f"{', or '.join(settings)}, or show it more (CUDA_VISIBLE_DEVICES){otherwise}",
                setting="cluster.world_gpus" if layout.worlds else "cluster.engine_gpus",
                needed=layout.total,
                there=there,
            )

    def check_roles(self, roles: Sequence[str]) -> None:
        """Raise ConfigError unless the groups, if there are any, name the roles of a run, all of them and no
        others."""
        if not self.colocate:
            return
        named = [role for group in self.colocate for role in group]
        for role in named:
            if role not in roles:
                raise ConfigError(
                    f"unknown-name: cluster.colocate names {role!r}, which this run does not have as a "
                    f"model of its own (it has {', '.join(roles)}); leave it out",
                    setting="cluster.colocate",
                    name=role,
                )
        for role in roles:
            if role not in named:
                raise ConfigError(
                    f"missing-setting: cluster.colocate gives {role!r} no place: every role of the run is "
                    f"in one of its groups (it has {', '.join(roles)}); add it to one of them",
                    setting="cluster.colocate",
                    name=role,
                )

    @field_validator("secrets")
    @classmethod
    def _check_secrets(cls, secrets: tuple[str, ...]) -> tuple[str, ...]:
        for number, name in enumerate(secrets):
            if not name.isidentifier() or not name.isascii():
                raise ConfigError(  # without the text, which may be a secret
                    f"secrets[{number}], of {len(name)} characters, is no name of an environment variable; "
                    "write names such as HF_TOKEN, never values",
                    code="wrong-format",
                    setting=f"secrets[{number}]",
                )
        return secrets

    @field_validator("colocate")
    @classmethod
    def _check_colocate(cls, groups: tuple[tuple[str, ...], ...]) -> tuple[tuple[str, ...], ...]:
        named = [role for group in groups for role in group]
        for role in named:
            if role not in ROLES:
                raise ConfigError(
                    f"unknown-name: colocate names {role[:80]!r}; the roles are {', '.join(ROLES)}",
                    setting="colocate",
                    name=role,
                )
            if named.count(role) > 1:
                raise ConfigError(
                    f"duplicate: colocate names {role!r} {named.count(role)} times: its GPUs would be asked "
                    "for twice; leave it in one group",
                    setting="colocate",
                    name=role,
                )
        if len(groups) > 1 and POLICY not in named:
            raise ConfigError(
                f"missing-setting: colocate has {len(groups)} groups and none with 'policy', which the "
                "trainer's ranks hold; add it to one of them",
                setting="colocate",
            )
        if not all(groups):
            raise ConfigError(
                "empty: colocate has an empty group, a world of nothing; leave it out", setting="colocate"
            )
        return groups

    @check
    def _check_ranks(self) -> ClusterConfig:
        if self.gpus and self.slots != 1:
            raise ConfigError(
                f"no-effect: slots = {self.slots} with gpus = {self.gpus}: there is one rank per GPU; leave "
                "slots out, or set gpus = 0",
                setting="slots",
            )
        if self.ranks > MOST_SLOTS:
            raise ConfigError(
                f"out-of-range: nodes * ranks per node = {self.nodes} * {self.per_node} = {self.ranks} is "
                f"above {MOST_SLOTS}; lower nodes, gpus or slots",
                setting="nodes",
                ranks=self.ranks,
            )
        if self.world_gpus == "own" and not self.worlds:
            raise ConfigError(
                "no-effect: world_gpus = 'own' without a world beside the policy's: all roles share the "
                "processes of the ranks; leave it out, or write several groups in colocate",
                setting="world_gpus",
            )
        return self

    def draw(self, roles: Sequence[str]) -> list[str]:
        """Return a line per node: which ranks it runs, on what, and which roles each of them holds; one for
        the processes of each further world, one for engines with devices of their own, and one for copies
        that go from node to node.

        Example:
            >>> ClusterConfig(nodes=2, gpus=2).draw(["policy", "ref"])[0]
            'node 0: [gpu 0: rank 0] [gpu 1: rank 1]  each: policy + ref'
        """
        kind, layout = "gpu" if self.gpus else "cpu", self.layout()
        apart = [role for world in self.worlds for role in world]
        here = [role for role in roles if role not in apart]
        lines = []
        for node in range(self.nodes):
            ranks = [(slot, node * self.per_node + slot) for slot in range(self.per_node)]
            boxes = " ".join(f"[{kind} {slot}: rank {rank}]" for slot, rank in ranks)
            lines.append(f"node {node}: {boxes}  each: {' + '.join(here)}")
            for index, (number, world) in enumerate(zip(WORLD_NUMBERS, self.worlds, strict=False)):
                of_world = layout.of_world(index)
                boxes = " ".join(f"[{kind} {of_world[slot]}: beside rank {rank}]" for slot, rank in ranks)
                lines.append(f"  {number} world: {boxes}  each: {' + '.join(world)}")
            if layout.engine:
                shares = [(" + ".join(map(str, layout.of_engine(slot))), rank) for slot, rank in ranks]
                boxes = " ".join(f"[{kind} {devices}: beside rank {rank}]" for devices, rank in shares)
                lines.append(f"  engines: {boxes}")
        if self.peer_copy and self.nodes > 1:
            ring = " -> ".join(f"node {node}" for node in [*range(self.nodes), 0])
            lines.append(f"copies in memory after each step: {ring}")
        return lines


def check_temp_dir(path: PurePath) -> None:
    """Raise ConfigError if Ray's sockets below it would have paths that the system refuses."""
    if len(str(path)) > LONGEST_TEMP:
        raise ConfigError(
            f"too-long: {path}: Ray's sockets lie below this folder, and with more than {LONGEST_TEMP} "
            f"characters (it has {len(str(path))}) their paths are longer than the system takes; set "
            "cluster.temp_dir, or LOCKSTEP_CACHE, to a shorter one",
            setting="cluster.temp_dir",
        )


# Which device of a node each process of a run computes on.
#
#     2 ranks, 2 worlds with GPUs of their own, 2 GPUs for the engine of each rank:
#
#     gpu 0, 1   ranks 0 and 1
#     gpu 2, 3   the second world, beside rank 0 and beside rank 1
#     gpu 4, 5   the third world
#     gpu 6, 7   the engine of rank 0
#     gpu 8, 9   the engine of rank 1
#
# Numbers count what the node's ranks see: entries of CUDA_VISIBLE_DEVICES where that is set, GPUs where it
# is not. Ranks come first, so that local rank r has GPU r, and so a process of a world, among those of its
# world.


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeLayout:
    """Devices of one node; without GPUs its places on CPUs.

    Example:
        >>> layout = NodeLayout(ranks=2, worlds=2, engine=2)
        >>> layout.total, layout.of_world(1), layout.of_engine(1)
        (10, (4, 5), (8, 9))
    """

    ranks: int
    """On this node."""
    worlds: int = 0
    """Worlds beside the policy's whose processes have devices of their own."""
    engine: int = 0
    """Devices of each rank's engine that nothing else is on."""

    @property
    def per_rank(self) -> int:
        """Devices that there must be for each rank."""
        return 1 + self.worlds + self.engine

    @property
    def total(self) -> int:
        """Devices that there must be on the node."""
        return self.ranks * self.per_rank

    def of_world(self, number: int) -> tuple[int, ...]:
        """The devices of a world, from 0, by local rank; the ranks' where it has none of its own."""
        first = (number + 1) * self.ranks if self.worlds else 0
        return tuple(range(first, first + self.ranks))

    def of_engine(self, local_rank: int) -> tuple[int, ...]:
        """The devices of the engine of one rank; none: it is on the rank's."""
        first = (1 + self.worlds) * self.ranks + local_rank * self.engine
        return tuple(range(first, first + self.engine))

    def sums(self, kind: str) -> str:
        """Say how the total comes about, for messages."""
        others = ((self.worlds, "of each world beside it"), (self.engine, "of its engine"))
        parts = ["1 of its own", *(f"{count} {what}" for count, what in others if count)]
        return f"{self.total} {kind}, {self.per_rank} for each of {self.ranks} ranks ({', '.join(parts)})"


def _check_engine_gpus(engine: EngineConfig, cluster: ClusterConfig) -> None:
    """Refuse GPUs of its own for an engine that has none to choose, and GPUs that are asked for twice."""
    gpus, needed = cluster.engine_gpus, engine.replicas * engine.tp
    taken = sorted(set(engine.cuda_devices) & set(range(1, cluster.layout(ranks=1).total)))
    if taken and not gpus:  # engine.cuda_devices is refused with several ranks
        raise ConfigError(
            f"duplicate: engine.cuda_devices = {list(engine.cuda_devices)} and cluster.world_gpus = 'own' "
            f"both ask for GPU {taken[0]}; leave engine.cuda_devices out and set cluster.engine_gpus = "
            f"{needed}"
        )
    if not gpus:
        return
    what = f"cluster.engine_gpus = {gpus}"
    if not kind(engine).endswith(", started"):
        raise ConfigError(
            f"unsupported-combination: {what} with engine.name = {engine.name!r}, which is no server that "
            "Lockstep starts: set engine.process = 'own' (native and hf) or engine.python (vllm and "
            "sglang), or leave it out",
            setting="cluster.engine_gpus",
        )
    if engine.cuda_devices:
        raise ConfigError(
            f"contradiction: {what} and engine.cuda_devices = {list(engine.cuda_devices)} both place the "
            "engine; leave engine.cuda_devices out",
            setting="engine.cuda_devices",
        )
    if gpus != needed:
        raise ConfigError(
            f"contradiction: {what}, and the engine of each rank is engine.replicas * engine.tp = "
            f"{engine.replicas} * {engine.tp} = {needed} wide; set cluster.engine_gpus = {needed}",
            setting="cluster.engine_gpus",
        )
    if engine.transfer == "ipc":
        raise ConfigError(
            f"contradiction: engine.transfer = 'ipc' with {what}: CUDA IPC needs a server on the GPU of its "
            "rank; set 'auto' (NCCL) or 'disk'"
        )
