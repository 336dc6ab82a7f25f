"""`lockstep train --cluster local|auto`: the ranks of a training run on a Ray cluster."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from lockstep.cluster.launch import check_nodes, launch_healing_on, launch_on
from lockstep.cluster.rank_host import check_submitter
from lockstep.cluster.ray import RayProvider, local_cluster
from lockstep.config.cluster import ClusterConfig
from lockstep.errors import ConfigError
from lockstep.protocols.cluster import Placement
from lockstep.ranks.heal import HealingRules


def placement_of(config: ClusterConfig) -> Placement:
    """The placement that [cluster] says."""
    return Placement(
        nodes=config.nodes,
        per_node=config.per_node,
        gpus=config.gpus > 0,
        per_rank=config.layout().per_rank,
    )


def launch_train(
    argv: Sequence[str],
    config: ClusterConfig,
    *,
    provider: str,
    log_dir: Path,
    watch: float,
    healing: HealingRules | None = None,
) -> int:
    """Run `python ARGV` as every rank that `config` says, and wait for all; their status.

    Args:
        watch: as of lockstep.ranks.launch.launch_ranks.
        healing: None: a rank that dies ends the run.
        provider: local: Ray is started on this machine for this run alone; auto: the one that runs.

    Raises:
        ConfigError: the cluster is not there, has no such place, or another Lockstep submitted the run.
        ClusterError: it failed.
    """
    check_submitter()
    if provider == "local" and config.nodes > 1:
        raise ConfigError(
            f"out-of-range: cluster.nodes = {config.nodes} with --cluster local, which is one node; set it "
            "to 1, or join a cluster by --cluster auto"
        )
    with contextlib.ExitStack() as stack:
        local = provider == "local"
        address = stack.enter_context(local_cluster(config, ranks=config.ranks)) if local else "auto"
        ray = stack.enter_context(contextlib.closing(RayProvider(address, config=config, log_dir=log_dir)))
        placement = placement_of(config)
        check_nodes(ray, placement)
        if healing is not None:
            return launch_healing_on(
                ray, argv, placement=placement, log_dir=log_dir, watch=watch, rules=healing
            )
        return launch_on(ray, argv, placement=placement, log_dir=log_dir, graceful=True, watch=watch)
