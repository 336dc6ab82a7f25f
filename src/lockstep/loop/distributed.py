"""Distributed setup of a run: ranks connect, compare their settings before anything starts, and rank 0 opens
the folder that all of them use.

Every rank runs the same loop on the same data. Only rank 0 writes the run directory and the terminal.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lockstep.config.load import check_resumable, dump_toml, override, to_values
from lockstep.config.run import RunConfig
from lockstep.errors import ConfigError, ModelError, TrainError
from lockstep.loop.hub import PUSH
from lockstep.observe.files import file_errors, write_atomic
from lockstep.observe.run_dir import FollowedRunDir, RunDir
from lockstep.observe.run_history import FLAGS, LEDGER_SINCE, way_on
from lockstep.ranks.context import RankContext, init_ranks
from lockstep.ranks.environment import BACKSTOP_SECONDS, FLIGHT_DIR, WAIT_SECONDS, in_launcher, recovery
from lockstep.ranks.node_folders import NodeFolders
from lockstep.version import library_versions


@contextlib.contextmanager
def connect_ranks(
    device: str,
    ranks: RankContext | None = None,
    *,
    check: Callable[[int], object],
    seconds: float | None = None,
) -> Iterator[RankContext]:
    """Yield the ranks of this run: `ranks` where they are connected already, those of the launcher that
    started this process, or this process alone.

    Args:
        device: train.device of the run.
        check: called with their number before they connect; raises ConfigError.
        seconds: deadline of every wait for another rank; None: WAIT_SECONDS.

    Raises:
        RankError: the others did not connect.
    """
    if ranks is not None:
        check(ranks.world_size)
        yield ranks
    elif in_launcher() and os.environ["WORLD_SIZE"] != "1":
        check(int(os.environ["WORLD_SIZE"]))
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        deadline = (seconds or WAIT_SECONDS) + (BACKSTOP_SECONDS if FLIGHT_DIR in os.environ else 0.0)
        with init_ranks(device=device, seconds=deadline) as context:
            yield context
    else:
        check(1)
        had_group = dist.is_initialized()
        yield RankContext.alone()
        if dist.is_initialized() and not had_group:  # a backend has made one, of this process
            dist.destroy_process_group()


def compare_settings(run: RunConfig, ranks: RankContext, *, resume: Path | None) -> None:
    """Raise ConfigError on every rank, with the differences, unless all have the same config and versions."""
    now = manifest()
    versions = {f"version of {name}": now[name] for name in ("lockstep", "torch", "transformers", "python")}
    values = flat(to_values(run)) | {"resume": None if resume is None else str(resume)}
    ranks.require_same(values | versions, what="their settings")


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshCoordinates:
    """A rank's coordinates among the ranks that share data (dp), tokens (ring) and matrices (tp)."""

    sizes: dict[str, int]
    at: dict[str, int]

    @property
    def stream(self) -> int:
        """The dropout stream: ranks with different tokens draw different dropout, ranks that share matrices
        the same."""
        return self.at["dp"] * self.sizes["ring"] + self.at["ring"]


def mesh_coordinates(ranks: RankContext, *, tp: int, ring: int) -> MeshCoordinates:
    """Return this rank's coordinates; tp is innermost, so its ranks are neighbours."""
    return MeshCoordinates(
        sizes={"dp": ranks.world_size // (tp * ring), "ring": ring, "tp": tp},
        at={"dp": ranks.rank // (tp * ring), "ring": ranks.rank // tp % ring, "tp": ranks.rank % tp},
    )


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested settings to dotted paths.

    Example:
        >>> flat({"train": {"lr": 0.1}, "steps": 2})
        {'train.lr': 0.1, 'steps': 2}
    """
    flattened: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flattened |= flat(value, f"{prefix}{name}.")
        else:
            flattened[prefix + name] = value
    return flattened


def open_run_dir(
    run: RunConfig,
    ranks: RankContext,
    *,
    folder: Path,
    resume: bool = False,
    restart: bool = False,
) -> tuple[RunDir, NodeFolders]:
    """Open the run's folder: locked and written by rank 0, read by the others. A node that does not see it
    has a folder of its own under the same path.

    Args:
        folder: of rank 0 is used.
        resume: whether the run is there already.

    Raises:
        ConfigError: it holds another run, or another process writes it; on every rank.
    """
    opened: RunDir | None = None
    with ranks.fail_together("opening the run directory"):
        if ranks.is_first:
            opened = _reopen(folder, run) if resume else _create(folder, run, ranks, restart=restart)
    path = ranks.broadcast(
        None if opened is None else opened.path, Path | None, what="opening the run directory"
    )
    assert path is not None, "rank 0 has opened it"
    own = opened or FollowedRunDir(path)
    try:
        folders = NodeFolders(path, ranks=ranks)
        files = ranks.on_rank_zero(
            lambda: _read_by_all(own), dict[str, str], what="reading the run directory"
        )
        with ranks.fail_together("making a node's run directory"):
            if folders.leads:
                own = FollowedRunDir.of_node(path, files)
    except BaseException:
        own.close()
        raise
    return own, folders


def _read_by_all(folder: RunDir) -> dict[str, str]:
    """Files of rank 0's folder that every rank reads."""
    with file_errors(folder.path, ConfigError):
        return {file.name: file.read_text(encoding="utf-8") for file in (folder.config, folder.manifest)}


def _create(folder: Path, run: RunConfig, ranks: RankContext, *, restart: bool) -> RunDir:
    kept = {FLAGS: resume_flags(ranks)} | ({LEDGER_SINCE: 0} if run.online else {})
    return RunDir.create(folder, config_toml=dump_toml(run), manifest=manifest() | kept, restart=restart)


def _reopen(folder: Path, run: RunConfig) -> RunDir:
    check_resumable(folder, run)
    restart = recovery()
    # The node of the rank 0 that wrote it may be gone, with its name still in the lock.
    opened = RunDir.open(folder, restarted=restart is not None and restart.resume == folder.absolute())
    # Another number of steps, say, must still hold when this process is killed and resumed again.
    try:
        with opened.writing(opened.config):
            write_atomic(opened.config, dump_toml(override(run, {"run_dir": None})))
    except BaseException:
        opened.close()
        raise
    return opened


def manifest() -> dict[str, Any]:
    """Return the versions and the machine of this process."""
    return library_versions() | {
        "platform": platform.platform(),
        "cpu_threads": torch.get_num_threads(),
        "cuda_device": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def started_at(folder: RunDir) -> float | None:
    """Return when a run was first started, in seconds since the epoch; None: its manifest does not say."""
    started = folder.read_manifest().get("started")
    return datetime.datetime.fromisoformat(started).timestamp() if isinstance(started, str) else None


def resume_flags(ranks: RankContext) -> str:
    """Return what the command that goes on with a run needs, to have as many ranks again."""
    if ranks.world_size == 1:
        return ""
    if ranks.on_one_machine:
        return f"--ranks {ranks.world_size}"
    return f"(on {ranks.world_size} ranks, under the launcher that started them)"


def resume_command(folder: Path, ranks: RankContext) -> str:
    """Return the command that goes on with the run in `folder`; see `way_on`."""
    return way_on(folder, resume_flags(ranks))


def log_header(ranks: RankContext, *, resumed: bool) -> str:
    """The first line that a start writes to a rank's log."""
    now = manifest()
    versions = ", ".join(f"{name} {now[name]}" for name in ("lockstep", "torch", "transformers", "python"))
    how = "resumed" if resumed else "started"
    return f"=== {how}: rank {ranks.rank} of {ranks.world_size}, {versions}, {now['platform']}"


@contextlib.contextmanager
def saying_how_to_go_on(run_dir: Path, *, saved: bool) -> Iterator[None]:
    """After a failed export: only that is left to do, if the last step has a checkpoint."""
    try:
        yield
    except ModelError as error:
        then = f". Every step is saved; then export with `lockstep train --resume {run_dir}`"
        if error.fields.get("setting") == PUSH:
            then = f", or `lockstep train --resume {run_dir}`"
        text = f"{error}{then if saved else ''}"
        raise error.with_message(text, kind=TrainError) from error
