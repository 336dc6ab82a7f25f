"""Runs that are handed to a Ray cluster by its Jobs API, and asked about from anywhere.

    jobs = Jobs("http://head:8265")
    with packed(run, extra=[Path("rewards.py")]) as folder:
        job = jobs.submit(folder, TRAIN, run_dir=run.run_dir)
    print(jobs.find(job).text())

The driver of a job is `lockstep train --cluster auto` on the head. What travels is a folder, under the hash
of its content, and the environment variables that `travelling` lets through; Ray unpacks the folder where
each rank runs. Beside lockstep.cluster.ray the only file that imports Ray.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import shlex
import shutil
import socket
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.cluster.launch import (
    ClusterError,
    check_nodes,
    import_ray,
    launch_on_with_restarts,
    local_cluster,
)
from lockstep.cluster.rank_host import check_submitter, submitter, travelling
from lockstep.cluster.ray import RayProvider, check_token
from lockstep.config.cluster import ClusterConfig
from lockstep.config.load import dump_toml, to_values
from lockstep.config.run import RunConfig
from lockstep.data.sources import FILE_SUFFIXES
from lockstep.errors import ConfigError, DataError, TrainError
from lockstep.observe.files import cache_root, check_inside, file_errors, open_plain
from lockstep.observe.text import printable
from lockstep.protocols.cluster import Node, Placement
from lockstep.ranks.restart import RestartRules

RUN_FILE = "run.toml"
"""In the folder that travels."""
STOP_SECONDS = 600
"""That a stopped run has to save and end, before Ray kills it."""
_HEAD_SECONDS = 10.0
_REQUEST_SECONDS = 60.0
"""For an answer, an upload of a job's folder included, to begin."""
_POLL_SECONDS = 1.0
_MOST_NODES = 10_000
_MOST_BYTES = 400 * 2**20
"""That travel with a job, below Ray's 500 MiB."""
_STATES = {
    "PENDING": "pending",
    "RUNNING": "running",
    "SUCCEEDED": "finished",
    "FAILED": "failed",
    "STOPPED": "stopped",
}
_LIVES = ("pending", "running")
_PATHS = ("temp_dir", "copy_dir")
"""Settings that name folders of the nodes."""
_OWN = re.compile(r"([A-Za-z_]\w*)(?:\.\w+)*:[A-Za-z_]\w*")
"""module:Class"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A run that was submitted, at one moment."""

    id: str
    run_dir: str
    """On the cluster."""
    state: str
    """pending, running, finished, failed, stopped."""
    message: str

    @property
    def lives(self) -> bool:
        """Whether it has not ended."""
        return self.state in _LIVES

    def text(self) -> str:
        """For a terminal."""
        said = f": {self.message}" if self.message and not self.lives else ""
        return printable(f"{self.id}: {self.state}, {self.run_dir}{said}")


class Jobs:
    """The jobs of one cluster.

    Args:
        address: of its dashboard, http://HEAD:8265.

    Raises:
        ConfigError: nothing answers there, it asks for no token, or it refuses ours.
    """

    def __init__(self, address: str) -> None:
        _check_address(address)
        check_token(address)
        ray = import_ray()
        from ray.job_submission import JobSubmissionClient

        class Client(JobSubmissionClient):
            """Ray's, whose requests would wait for ever for a head that stalls."""

            def _do_request(self, *arguments: Any, **more: Any) -> Any:
                return super()._do_request(*arguments, timeout=_REQUEST_SECONDS, **more)

        for name in ("ray", "ray.dashboard.modules.dashboard_sdk", "ray.dashboard.modules.job.sdk"):
            logging.getLogger(name).setLevel(logging.WARNING)
        self.address = address
        self._errors = (RuntimeError, ValueError, OSError, ray.exceptions.RayError)
        try:
            self._client = Client(address)
        except self._errors as error:
            raise ConfigError(
                f"not-authenticated: --cluster {address}: {str(error).splitlines()[0][:300]}. Is the token "
                "(RAY_AUTH_TOKEN_PATH) the same as the head's?"
            ) from error

    def submit(self, folder: Path, command: Sequence[str], *, run_dir: Path) -> str:
        """Hand a folder and a command to the cluster; returns the job's id.

        Args:
            command: runs in the folder, on the head.
            run_dir: of the run, on the cluster.

        Raises:
            ConfigError: a job that lives has this run directory.
            ClusterError: the cluster refused it.
        """
        for job in self.all():
            if job.lives and job.run_dir == str(run_dir):
                raise ConfigError(
                    f"locked: run_dir = {str(run_dir)!r}: job {job.id} is {job.state} there; wait for it, "
                    f"stop it (lockstep stop {job.id} --cluster {self.address}), or choose another folder"
                )
        environment = travelling(os.environ) | submitter()
        environment["RAY_JOB_STOP_WAIT_TIME_S"] = str(STOP_SECONDS)  # Ray's own are 3, too few for a save
        job = self._ask(
            "submit_job",
            entrypoint=shlex.join(command),
            submission_id=f"lockstep-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}",
            runtime_env={"working_dir": str(folder), "env_vars": environment},
            metadata={"lockstep_run_dir": str(run_dir)},
        )
        return str(job)

    def all(self) -> list[Job]:
        """Every job that is a run of Lockstep, the newest last."""
        found = self._ask("list_jobs")
        found.sort(key=lambda each: each.start_time or 0)
        return [
            Job(
                id=str(each.submission_id),
                run_dir=str(each.metadata["lockstep_run_dir"]),
                state=_STATES[each.status.value],
                message=str(each.message or ""),
            )
            for each in found
            if each.metadata and "lockstep_run_dir" in each.metadata
        ]

    def nodes(self) -> list[Node]:
        """The nodes of the cluster that are alive."""
        reply = self._ask("_do_request", "GET", f"/api/v0/nodes?detail=1&limit={_MOST_NODES}")
        try:
            found = reply.json()["data"]["result"]["result"]
            return [
                Node(
                    name=str(node["node_name"]),
                    address=str(node["node_ip"]),
                    cpus=int(node["resources_total"].get("CPU", 0)),
                    gpus=int(node["resources_total"].get("GPU", 0)),
                )
                for node in found
                if node["state"] == "ALIVE"
            ]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ClusterError(
                f"bad-reply: {self.address}: the reply about its nodes is not in Ray's format: "
                f"{reply.text[:200]!r}"
            ) from error

    def find(self, name: str) -> Job:
        """A job by its id, or the newest by its run directory.

        Raises:
            DataError: there is none.
        """
        jobs = self.all()
        found = [job for job in jobs if name in (job.id, job.run_dir)]
        if not found:
            there = ", ".join(f"{job.id} ({job.run_dir})" for job in jobs[-5:]) or "none"
            raise DataError(
                f"unknown-name: {name[:200]}: there is no such job at {self.address}; the newest: {there}"
            )
        return found[-1]

    def stop(self, name: str, *, seconds: float, say: Callable[[str], None]) -> Job:
        """Ask a run to save and end, and wait until it has; returns what became of it.

        Raises:
            DataError: there is no such job, or it has ended.
            TrainError: it has not ended in time, and goes on ending.
        """
        job = self.find(name)
        if not job.lives:
            raise DataError(f"wrong-state: {job.id}: the job is {job.state}; there is nothing to stop")
        self._ask("stop_job", job.id)
        say(f"asked {job.id} to save and end after its step")
        return self.wait(job.id, seconds=seconds)

    def wait(self, name: str, *, seconds: float) -> Job:
        """Wait until a job has ended.

        Raises:
            TrainError: it has not in time.
        """
        until = time.monotonic() + seconds
        while (job := self.find(name)).lives:
            if time.monotonic() > until:
                raise TrainError(
                    f"deadline: {job.id} did not end within {seconds:g} s. To see what it is doing: lockstep "
                    f"logs {job.id} --cluster {self.address}"
                )
            time.sleep(_POLL_SECONDS)
        return job

    def log(self, name: str) -> str:
        """Everything that a job's driver has said so far."""
        return str(self._ask("get_job_logs", self.find(name).id))

    def follow(self, name: str, *, said: int = 0) -> Iterator[str]:
        """What a job's driver says behind the first `said` characters, until the job has ended."""
        while True:
            lives = self.find(name).lives  # asked first: what it says before it ends is shown
            text = self.log(name)
            if text[said:]:
                yield text[said:]
            said = len(text)
            if not lives:
                return
            time.sleep(_POLL_SECONDS)

    def _ask(self, call: str, *arguments: str, **more: Any) -> Any:
        """Call a method of Ray's client.

        Raises:
            ClusterError: the cluster refused it, or does not answer any more.
        """
        try:
            return getattr(self._client, call)(*arguments, **more)
        except self._errors as error:
            raise ClusterError(f"refused: {self.address}: {call}: {str(error)[:500]}") from error


@contextlib.contextmanager
def packed(run: RunConfig, *, extra: Sequence[Path]) -> Iterator[Path]:
    """A folder with the run's config, the modules of the working directory that it names, and `extra`.

    Raises:
        ConfigError: the run names a file of this machine that would not be there.
    """
    _check_files(run, extra)
    parent = cache_root() / "submit"
    with file_errors(
        parent, ConfigError, "make", advice="set LOCKSTEP_CACHE to a folder that can be written"
    ):
        parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent) as name:
        folder = Path(name)
        (folder / RUN_FILE).write_text(dump_toml(run), encoding="utf-8")
        files = {os.path.relpath(file): file for path in [*_modules(run), *extra] for file in _files_of(path)}
        _check_total(files.values())
        for relative, file in files.items():
            target = folder / relative
            target.parent.mkdir(parents=True, exist_ok=True)
            with open_plain(file, ConfigError, root=Path.cwd()) as source, target.open("wb") as copy:
                shutil.copyfileobj(source, copy)
                # Ray keeps modes: a program that travels is still one.
                os.fchmod(copy.fileno(), os.fstat(source.fileno()).st_mode & 0o777 | 0o600)
        yield folder


def _files_of(path: Path) -> list[Path]:
    """A file, or the files of a folder that travel.

    Raises:
        ConfigError: it does not lie below the working directory, or a link leads out of that.
    """
    relative = Path(os.path.relpath(path))
    if relative.is_absolute() or ".." in relative.parts or str(relative) in (".", RUN_FILE):
        raise ConfigError(
            f"leads-out-of-folder: --include {path}: only files below the working directory can be sent, and "
            f"none named {RUN_FILE}; copy it there, or put it on every node"
        )
    if not path.exists():
        raise ConfigError(f"no-such-file: --include {path}: there is no such file or folder")
    check_inside(path, ConfigError, root=Path.cwd())
    files = [path]
    if path.is_dir():
        files = []
        for name, folders, there in os.walk(path):
            folders[:] = sorted(each for each in folders if each != "__pycache__")
            for each in folders:
                if (link := Path(name, each)).is_symlink():
                    raise ConfigError(
                        f"leads-out-of-folder: {link} is a link to a folder, and such links are not sent; "
                        "put the folder itself there, or include it by its real path",
                        setting="--include",
                    )
            # Ray would leave out what these files name, without a word.
            files += [Path(name, each) for each in sorted(there) if each not in (".gitignore", ".rayignore")]
    return files


def _check_total(files: Iterable[Path]) -> None:
    """Raise ConfigError for files that together are too large for Ray."""
    sizes = {file: file.stat().st_size for file in files if file.exists()}
    if (total := sum(sizes.values())) > _MOST_BYTES:
        largest = max(sizes, key=sizes.__getitem__)
        raise ConfigError(
            f"too-large: --include: {total >> 20} MiB in total, but Ray accepts at most {_MOST_BYTES >> 20} "
            f"with a job; put large files, such as {largest}, on every node, and give their absolute paths"
        )


def _modules(run: RunConfig) -> list[Path]:
    """Files and packages of the working directory that settings name as module:Class."""
    names = {match[1] for _, text in _texts(to_values(run)) if (match := _OWN.fullmatch(text))}
    places = [path for name in sorted(names) for path in (Path(f"{name}.py"), Path(name))]
    return [path for path in places if path.is_file() or (path.is_dir() and any(path.glob("*.py")))]


def _check_files(run: RunConfig, extra: Sequence[Path]) -> None:
    """Raise ConfigError for a relative path that would not be there."""
    taken = [Path(os.path.relpath(path)) for path in extra]
    for setting, text in _texts(to_values(run)):
        path = Path(text)
        if path.is_absolute() or text.startswith("~") or setting == "run_dir":  # of the nodes
            continue
        here = _is_path(text) and os.path.exists(path)  # unlike Path.exists also of text too long for a name
        if not here and not _names_file(setting, text):
            continue
        if any(path == each or each in path.parents for each in taken):
            continue
        where = "a file in this working directory" if here else "a relative path that does not exist"
        along = (
            f"send it along with --include {shlex.quote(text)}"
            if here
            else "create it and send it along with --include"
        )
        raise ConfigError(
            f"no-such-file: {setting} = {text[:200]!r} is {where}; a job runs in a separate folder on the "
            f"cluster, where it is missing: {along}, or give the absolute path that it has on every node"
        )


def _is_path(text: str) -> bool:
    return "/" in text or bool(Path(text).suffix)


def _names_file(setting: str, text: str) -> bool:
    """Whether a relative path can only be that of a file or a folder, wherever it is."""
    last = setting.rpartition(".")[2]
    if last in _PATHS or (last == "python" and "/" in text):
        return True
    return "://" not in text and (text.startswith(("./", "../")) or Path(text).suffix in FILE_SUFFIXES)


def _texts(value: Any, setting: str = "") -> Iterator[tuple[str, str]]:
    """Every text in it, with the setting that it is the value of."""
    if isinstance(value, str):
        yield setting, value
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield from _texts(each, f"{setting}.{name}".lstrip("."))
    elif isinstance(value, Sequence):
        for number, each in enumerate(value):
            yield from _texts(each, f"{setting}[{number}]")


def _check_address(address: str) -> None:
    """Raise ConfigError unless a head that asks for a token answers."""
    parts = urllib.parse.urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.password:
        raise ConfigError(
            f"wrong-format: --cluster {address[:200]!r}: give the address of the head's dashboard, "
            "http://HEAD:8265 (ray://... is for Ray Client, which Lockstep does not use)"
        )
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection((parts.hostname, port), timeout=_HEAD_SECONDS).close()
        with urllib.request.urlopen(f"{address.rstrip('/')}/api/jobs/", timeout=_HEAD_SECONDS):
            pass
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            return
        raise ConfigError(
            f"bad-reply: --cluster {address}: its Jobs API answered with status {error.code}"
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"unreachable: --cluster {address}: no Ray head answers there ({error}). Start one with `ray "
            "start --head`, or give the address of its dashboard"
        ) from error
    raise ConfigError(
        f"not-authenticated: --cluster {address}: it shows its jobs to anyone, and would run anyone's "
        "programs. Start the cluster with RAY_AUTH_MODE=token"
    )


# `lockstep train --cluster local|auto`: the ranks of a training run on a Ray cluster.


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
    restarts: RestartRules,
) -> int:
    """Run `python ARGV` as every rank that `config` says, and wait for all; their status.

    Args:
        watch: as of lockstep.ranks.launch.launch_ranks.
        restarts: what to do about a rank that dies or runs out of memory.
        provider: local: Ray is started on this machine for this run alone; auto: the one that runs.

    Raises:
        ConfigError: the cluster is not there, has no such place, or another Lockstep submitted the run.
        ClusterError: it failed.
    """
    check_submitter()
    if provider == "local" and config.nodes > 1:
        raise ConfigError(
            f"out-of-range: cluster.nodes = {config.nodes} with --cluster local, which is a single node; set "
            "it to 1, or join a cluster with --cluster auto"
        )
    with contextlib.ExitStack() as stack:
        local = provider == "local"
        address = stack.enter_context(local_cluster(config, ranks=config.ranks)) if local else "auto"
        ray = stack.enter_context(contextlib.closing(RayProvider(address, config=config, log_dir=log_dir)))
        placement = placement_of(config)
        check_nodes(ray, placement)
        return launch_on_with_restarts(
            ray, argv, placement=placement, log_dir=log_dir, watch=watch, rules=restarts
        )
