"""The placement of ranks and roles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import ClassVar

from pydantic import Field, PositiveFloat, field_validator

from lockstep.config.base import Config, FilePath, NonNegativeInt, PositiveInt, check
from lockstep.config.engine import EngineConfig, kind
from lockstep.config.rules import refuse
from lockstep.errors import ConfigError

POLICY = "policy"
ROLES = (POLICY, "ref", "value", "reward_model")
LONGEST_TEMP = 44
"""Characters of the folder that Ray's sockets lie in, so that their paths stay below the 107 of AF_UNIX."""
MOST_SLOTS = 2**16


class ClusterConfig(Config):
    """Nodes and ranks of `lockstep train --cluster`, and where roles run. Without --cluster, only the
    placement of roles and the peer copies have an effect."""

    section: ClassVar[str | None] = "cluster"

    nodes: PositiveInt = 1
    """Number of nodes. Each node has the same number of ranks."""
    gpus: NonNegativeInt = 0
    """GPUs for ranks on each node, one per rank. With 0, ranks run on CPUs, `slots` on each node.
    dedicated_gpus and engine_gpus need additional GPUs."""
    slots: PositiveInt = 1
    """Ranks on each node if they run on CPUs (gpus = 0)."""
    colocate: tuple[tuple[str, ...], ...] = ()
    """Groups of roles that share processes. The roles are policy, ref, value and reward_model. If the list is
    empty, all roles of a rank share one process. Otherwise the groups must name every role of the run. A
    group without the policy is remote: its roles run in a separate process beside each rank. On the command
    line, the flag takes one value: --cluster.colocate '[["policy"], ["ref", "value"]]'."""
    dedicated_gpus: bool = False
    """Give each process that runs remote roles a GPU of its own, on the same node as its rank. If false, the
    process shares the GPU of its rank. On CPUs, the process takes a slot, but only Ray counts slots."""
    engine_gpus: int = Field(0, ge=0, le=1024)
    """GPUs that are reserved for each rank's engine server, on the same node: engine.replicas * engine.tp, or
    0. With 0 the server shares the GPU of its rank, or uses engine.cuda_devices."""
    remote_seconds: PositiveFloat = 1200.0
    """Deadline in seconds of one call to remote roles, such as scoring or training on a rollout batch, saving
    or loading. Keep it below --rank-timeout, so that the run ends with an error that names the roles."""
    remote_start_seconds: PositiveFloat = 600.0
    """How many seconds a process of remote roles may take to start and load its models."""
    remote_restarts: NonNegativeInt = 3
    """How often each process of remote roles may be restarted in a run after it dies. If the process held the
    value model, that model's state is lost; the run then ends and can be resumed from its last checkpoint."""
    secrets: tuple[str, ...] = ()
    """Names of secret environment variables that the ranks need, such as HF_TOKEN. Only the names are sent:
    each node must have the values in its own environment."""
    temp_dir: FilePath | None = None
    """Folder for Ray's files under --cluster local. If unset, ray/ in the cache folder (LOCKSTEP_CACHE) is
    used."""
    object_store_mb: int = Field(80, ge=75, le=2**20)
    """Size of Ray's object store under --cluster local, in MB. No tensors go through it."""
    peer_copy: bool = False
    """Also keep a copy of each rank's state in host memory that outlives the rank. The copy is made while the
    next step runs. When a rank dies, all ranks are restarted from these copies. This also works with --ranks.
    With several nodes, each node also holds the copy of another node, so that the run survives the loss of a
    node."""
    max_restarts: NonNegativeInt = 3
    """With peer_copy: how often the ranks may be restarted in a run before the death of a rank ends it."""
    warm_spares: bool = True
    """With peer_copy: once the first copy exists, keep one spare process per rank, which has already imported
    everything and replaces a rank that dies. A spare uses no GPU and about 0.4 GB of host memory."""
    copy_dir: FilePath | None = None
    """With peer_copy: a folder in memory (tmpfs) on each node, with room for two copies of the state of all
    ranks. If unset, /dev/shm is used."""
    node_seconds: PositiveFloat = 600.0
    """With peer_copy on several nodes: how many seconds to wait for a node that replaces a dead one."""

    @property
    def per_node(self) -> int:
        """Ranks on each node."""
        return self.gpus or self.slots

    @property
    def ranks(self) -> int:
        """Ranks on all nodes."""
        return self.nodes * self.per_node

    @property
    def remote_groups(self) -> tuple[tuple[str, ...], ...]:
        """The groups of cluster.colocate without the policy; empty: every role runs with the policy."""
        return tuple(group for group in self.colocate if POLICY not in group)

    def layout(self, ranks: int | None = None) -> NodeLayout:
        """Return which devices of a node belong to which process.

        Args:
            ranks: on the node; None: as the settings say.
        """
        return NodeLayout(
            ranks=self.per_node if ranks is None else ranks,
            remote_groups=len(self.remote_groups) if self.dedicated_gpus else 0,
            engine=self.engine_gpus,
        )

    def check_devices(self, layout: NodeLayout, *, there: int, otherwise: str = "") -> None:
        """Raise ConfigError if a node has too few GPUs for ranks, remote roles and engines.

        Args:
            there: GPUs of the node.
            otherwise: another way out, for the end of the message.
        """
        if layout.per_rank > 1 and layout.total > there:
            settings = ["fewer ranks", *(["cluster.dedicated_gpus = false"] if layout.remote_groups else [])]
            if layout.engine:
                settings.append(
                    "a smaller cluster.engine_gpus (with 0 the engine shares the GPU of its rank)"
                )
            raise ConfigError(
                f"not-enough: a node needs {layout.sums('GPUs')}, but only {there} are visible on this one; "
                f"use {', or '.join(settings)}, or make more visible (CUDA_VISIBLE_DEVICES){otherwise}",
                setting="cluster.dedicated_gpus" if layout.remote_groups else "cluster.engine_gpus",
            )

    def check_roles(self, roles: Sequence[str]) -> None:
        """Raise ConfigError unless cluster.colocate is empty or names exactly the roles of a run."""
        if not self.colocate:
            return
        named = [role for group in self.colocate for role in group]
        for role in named:
            if role not in roles:
                raise ConfigError(
                    f"unknown-name: cluster.colocate names {role!r}, but this run has no separate model for "
                    f"it (its roles are {', '.join(roles)}); leave it out"
                )
        for role in roles:
            if role not in named:
                raise ConfigError(
                    f"missing-setting: cluster.colocate lacks {role!r}, but every role of the run "
                    f"({', '.join(roles)}) must be in one of its groups; add it to one of them",
                    setting="cluster.colocate",
                )

    @field_validator("secrets")
    @classmethod
    def _check_secrets(cls, secrets: tuple[str, ...]) -> tuple[str, ...]:
        for number, name in enumerate(secrets):
            if not name.isidentifier() or not name.isascii():
                raise ConfigError(  # without the text, which may be a secret
                    f"secrets[{number}], of {len(name)} characters, is not a valid name of an environment "
                    "variable; write names such as HF_TOKEN, never values",
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
                    f"unknown-name: colocate names {role[:80]!r}; the roles are {', '.join(ROLES)}"
                )
            if named.count(role) > 1:
                raise ConfigError(
                    f"duplicate: colocate names {role!r} {named.count(role)} times, so its GPUs would be "
                    "requested twice; keep it in one group only"
                )
        if len(groups) > 1 and POLICY not in named:
            raise ConfigError(
                f"missing-setting: colocate has {len(groups)} groups, but 'policy', which runs in the "
                "trainer's ranks, is in none of them; add it to one of them"
            )
        if not all(groups):
            raise ConfigError("empty: colocate contains an empty group; remove it")
        return groups

    @check
    def _check_ranks(self) -> ClusterConfig:
        refuse(self, "cluster")
        if self.ranks > MOST_SLOTS:
            raise ConfigError(
                f"out-of-range: nodes * ranks per node = {self.nodes} * {self.per_node} = {self.ranks} "
                f"exceeds {MOST_SLOTS}; lower nodes, gpus or slots",
                setting="nodes",
            )
        return self

    def draw(self, roles: Sequence[str]) -> list[str]:
        """Return the lines that draw the run: one per node with its ranks, their devices and roles; one per
        group of remote roles; one for engines with devices of their own; one for copies between nodes.

        Example:
            >>> ClusterConfig(nodes=2, gpus=2).draw(["policy", "ref"])[0]
            'node 0: [gpu 0: rank 0] [gpu 1: rank 1]  each: policy + ref'
        """
        kind, layout = "gpu" if self.gpus else "cpu", self.layout()
        remote = [role for group in self.remote_groups for role in group]
        here = [role for role in roles if role not in remote]
        lines = []
        for node in range(self.nodes):
            ranks = [(slot, node * self.per_node + slot) for slot in range(self.per_node)]
            boxes = " ".join(f"[{kind} {slot}: rank {rank}]" for slot, rank in ranks)
            lines.append(f"node {node}: {boxes}  each: {' + '.join(here)}")
            for index, group in enumerate(self.remote_groups):
                devices = layout.of_group(index)
                boxes = " ".join(f"[{kind} {devices[slot]}: beside rank {rank}]" for slot, rank in ranks)
                lines.append(f"  {remote_name(index)}: {boxes}  each: {' + '.join(group)}")
            if layout.engine:
                shares = [(" + ".join(map(str, layout.of_engine(slot))), rank) for slot, rank in ranks]
                boxes = " ".join(f"[{kind} {share}: beside rank {rank}]" for share, rank in shares)
                lines.append(f"  engines: {boxes}")
        if self.peer_copy and self.nodes > 1:
            ring = " -> ".join(f"node {node}" for node in [*range(self.nodes), 0])
            lines.append(f"copies in memory after each step: {ring}")
        return lines


def remote_name(index: int) -> str:
    """Return the name of a group of remote roles, which are numbered from 1 for users."""
    return f"remote group {index + 1}"


def check_temp_dir(path: PurePath) -> None:
    """Raise ConfigError if Ray's sockets below it would have paths that the system refuses."""
    if len(str(path)) > LONGEST_TEMP:
        raise ConfigError(
            f"too-long: {path}: Ray creates its sockets below this folder, whose path has {len(str(path))} "
            f"characters; with more than {LONGEST_TEMP} characters the socket paths exceed the system's "
            "limit; set cluster.temp_dir, or LOCKSTEP_CACHE, to a shorter path",
            setting="cluster.temp_dir",
        )


# Which device of a node each process of a run computes on.
#
#     2 ranks, 2 groups of remote roles with dedicated GPUs, 2 GPUs for the engine of each rank:
#
#     gpu 0, 1   ranks 0 and 1
#     gpu 2, 3   remote group 1, beside rank 0 and beside rank 1
#     gpu 4, 5   remote group 2
#     gpu 6, 7   the engine of rank 0
#     gpu 8, 9   the engine of rank 1
#
# Numbers count what the node's ranks see: entries of CUDA_VISIBLE_DEVICES where that is set, GPUs where it
# is not. Ranks come first, so that local rank r has GPU r; the process of a remote group beside it has the
# group's r-th GPU.


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeLayout:
    """Devices of one node: GPUs, or slots on CPUs.

    Example:
        >>> layout = NodeLayout(ranks=2, remote_groups=2, engine=2)
        >>> layout.total, layout.of_group(1), layout.of_engine(1)
        (10, (4, 5), (8, 9))
    """

    ranks: int
    """On this node."""
    remote_groups: int = 0
    """Groups of remote roles with dedicated devices."""
    engine: int = 0
    """Devices per rank that are reserved for its engine."""

    @property
    def per_rank(self) -> int:
        """Devices that each rank needs."""
        return 1 + self.remote_groups + self.engine

    @property
    def total(self) -> int:
        """Devices that the node needs."""
        return self.ranks * self.per_rank

    def of_group(self, index: int) -> tuple[int, ...]:
        """Return the devices of a group of remote roles by local rank; without dedicated ones, the ranks'."""
        first = (index + 1) * self.ranks if self.remote_groups else 0
        return tuple(range(first, first + self.ranks))

    def of_engine(self, local_rank: int) -> tuple[int, ...]:
        """Return the devices reserved for the engine of one rank; empty: it shares the rank's device."""
        first = (1 + self.remote_groups) * self.ranks + local_rank * self.engine
        return tuple(range(first, first + self.engine))

    def sums(self, kind: str) -> str:
        """Return the sum that gives the total, for messages."""
        others = ((self.remote_groups, "for remote roles"), (self.engine, "for its engine"))
        parts = ["1 for itself", *(f"{count} {what}" for count, what in others if count)]
        return f"{self.total} {kind}, {self.per_rank} for each of {self.ranks} ranks ({', '.join(parts)})"


def _check_engine_gpus(engine: EngineConfig, cluster: ClusterConfig) -> None:
    """Refuse GPUs of its own for an engine that has none to choose, and GPUs that are asked for twice."""
    gpus, needed = cluster.engine_gpus, engine.replicas * engine.tp
    taken = sorted(set(engine.cuda_devices) & set(range(1, cluster.layout(ranks=1).total)))
    if taken and not gpus:  # engine.cuda_devices is refused with several ranks
        raise ConfigError(
            f"duplicate: engine.cuda_devices = {list(engine.cuda_devices)} and cluster.dedicated_gpus = "
            f"true both request GPU {taken[0]}; leave engine.cuda_devices out and set "
            f"cluster.engine_gpus = {needed}"
        )
    if not gpus:
        return
    what = f"cluster.engine_gpus = {gpus}"
    if not kind(engine).endswith(", started"):
        raise ConfigError(
            f"unsupported-combination: {what} with engine.name = {engine.name!r}, which is not a server "
            "that Lockstep starts; set engine.process = 'separate' (native and hf) or engine.python (vllm "
            "and sglang), or leave it out",
            setting="cluster.engine_gpus",
        )
    if engine.cuda_devices:
        raise ConfigError(
            f"contradiction: {what} and engine.cuda_devices = {list(engine.cuda_devices)} both assign GPUs "
            "to the engine; leave engine.cuda_devices out",
            setting="engine.cuda_devices",
        )
    if gpus != needed:
        raise ConfigError(
            f"contradiction: {what}, but the engine of each rank needs engine.replicas * engine.tp = "
            f"{engine.replicas} * {engine.tp} = {needed} GPUs; set cluster.engine_gpus = {needed}",
            setting="cluster.engine_gpus",
        )
    if engine.transfer == "ipc":
        raise ConfigError(
            f"contradiction: engine.transfer = 'ipc' with {what}: CUDA IPC needs a server on the GPU of its "
            "rank; set 'auto' (NCCL) or 'disk'"
        )
