"""Peer checkpoints: the run's state in host memory after each step, which outlives its ranks.

A peer checkpoint holds what a checkpoint of that step holds. The same code writes it to a folder in memory
(lockstep.ranks.in_memory_checkpoint), in a thread, while the next step runs. Finishing one needs no
collective: each rank marks its part as complete with a file, and the step is complete when all ranks have. At
most two exist: the last complete one, and the one being written.

On several nodes each node has its own folder. A part is complete when it is on its own node and on the next
one, so a complete step survives the death of any one node.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.common_errors import damaged, hash_differs
from lockstep.errors import CheckpointError, ConfigError
from lockstep.loop.checkpoint_files import RUN_STATE, read_run_state, without_nan
from lockstep.loop.peer_checkpoint_server import copied
from lockstep.observe.files import file_errors, write_atomic
from lockstep.observe.text import printable
from lockstep.protocols import Saved
from lockstep.protocols.train import FinishSave
from lockstep.ranks.context import RankContext
from lockstep.ranks.environment import COPIES, PEER_SERVER, Recovery, recovery
from lockstep.ranks.in_memory_checkpoint import (
    CopiedFile,
    complete,
    part_files,
    part_name,
    part_text,
    read_part,
    step_folder,
    whole_parts,
)
from lockstep.train.state.index import read_index

_WRITE_SECONDS = 600.0
"""Deadline for writing a copy, where the loop waits for it."""
_BUSY = "busy"


class PeerCheckpoints:
    """The peer checkpoints of one run. Every rank makes the same calls.

    Args:
        folder: shared by all ranks of a node.
        say: shows a line to the user.
        client: of the servers of all nodes; None on one node.
    """

    def __init__(
        self,
        folder: Path,
        *,
        ranks: RankContext,
        say: Callable[[str], None],
        client: PeerCheckpointClient | None = None,
    ) -> None:
        self.folder, self._ranks, self._say, self._client = folder, ranks, say, client
        self.on_nodes = client is not None
        """Whether they survive the death of rank 0's node and of files it has not yet flushed to disk."""
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._begun: int | None = None
        """Step of the last copy that was started."""
        self._kept: int | None = None
        """Step of the last complete copy."""
        self.left_out = 0
        """Steps without a copy, because the one before or a checkpoint was still being written, memory is
        full, or a node could not be reached."""

    @classmethod
    def of_launcher(cls, ranks: RankContext, *, say: Callable[[str], None]) -> PeerCheckpoints | None:
        """Return the peer checkpoints in the folder made by the launcher or the node's host; None without
        such a folder. Collective."""
        folder, server = os.environ.get(COPIES), os.environ.pop(PEER_SERVER, None)
        if folder is None:
            return None
        client = None
        if server is not None:
            own = ServerAddress(**json.loads(server))
            client = PeerCheckpointClient.join(own, ranks, seconds=_WRITE_SECONDS / 2)
        return cls(Path(folder), ranks=ranks, say=say, client=client)

    def summary(
        self, restart: Recovery | None, *, source: str | None, checkpoints_read: int
    ) -> dict[str, Any]:
        """Return the fields of the run's summary. source: what the run went on from."""
        fields: dict[str, Any] = {
            "restarts": 0 if restart is None else restart.number,
            "checkpoints_read": checkpoints_read,
            "copies_left_out": self.left_out,
        }
        if restart is not None:
            fields |= {"restored_from": source, "recovery_seconds": restart.phases}
        return fields

    def newest(self) -> tuple[Path, dict[str, Any]] | None:
        """Return the folder and run_state of the last complete step, after fetching its parts to this node;
        None if there is none, or if it is damaged, which is logged."""
        size = self._ranks.world_size
        whole = {str(step): parts for step, parts in whole_parts(self.folder, size).items()}
        parts_by_rank = self._ranks.gather(whole, dict[str, list[int]], what="looking for copies")
        steps = {step for each in parts_by_rank for step in each}
        common = [
            int(step)
            for step in steps
            if len({part for each in parts_by_rank for part in each.get(step, [])}) == size
        ]
        if not common:
            return None
        path = step_folder(self.folder, max(common))
        try:
            if self._client is not None:
                with self._ranks.fail_together("fetching a copy from other nodes"):
                    if self._client.is_first_of_node:
                        self._remove_all_but(path)  # there may be no room beside the whole state
                        self._client.fetch(path, [each.get(str(max(common)), []) for each in parts_by_rank])
            with self._ranks.fail_together("reading a copy"):
                state = read_run_state(path)
                read_index(path)
        except CheckpointError as error:
            self._say(f"the copy in memory cannot be used: {error}")
            return None
        self._kept = max(common)
        return path, state

    def begin(self, step: int, backend: Saved, run_state: Mapping[str, Any]) -> None:
        """Make the first copy, before the first step, and check that there is room for a second one.

        Raises:
            ConfigError: on every rank, if there is no room, the launcher's folder is on another machine, or
                a node cannot be reached.
        """
        there = self.folder.is_dir() or recovery() is not None
        if not all(self._ranks.gather(there, bool, what="looking for the folder of copies")):
            raise ConfigError(
                f"no-such-file: cluster.peer_copy = true: the command created {self.folder} for the copies, "
                "but it is not on the ranks' machine; start the run on the node that it trains on, or set "
                "cluster.peer_copy = false"
            )
        try:
            self._start(step, backend, run_state)
            with self._ranks.fail_together("the first copy in memory"):
                self.wait()
                if self._error is not None:
                    raise self._error
            parts = part_files(step_folder(self.folder, step), self._ranks.rank) or {}
            own = sum(file.bytes for file in parts.values())
            whole = sum(self._ranks.gather(own, int, what="measuring the first copy in memory"))
            with self._ranks.fail_together("looking for room for copies"):
                self._check_room(step, whole)
        except CheckpointError as error:
            if error.code in ("unreachable", "not-authenticated", "bad-reply", "hash-differs"):
                raise error.with_message(
                    f"cluster.peer_copy = true needs connections between the nodes' processes: {error}. Let "
                    "the nodes reach each other, or set cluster.peer_copy = false",
                    kind=ConfigError,
                    setting="cluster.peer_copy",
                ) from error
            raise ConfigError(
                "no-space: cluster.peer_copy = true needs room for two copies of the train state in "
                f"{self.folder.parent}: {error}. Enlarge it (mount -o remount,size=..., a container's "
                "--shm-size), set cluster.copy_dir to a larger tmpfs, or set cluster.peer_copy = false"
            ) from error

    def save(self, step: int, backend: Saved, run_state: Mapping[str, Any], *, busy: bool) -> None:
        """Start copying the state after `step` steps. Skipped if a rank is still writing the previous copy
        or the loop is `busy` with a checkpoint, which uses the same buffers."""
        mine = _BUSY if busy or self._writing else None if self._error is None else _error_text(self._error)
        errors = self._ranks.gather(mine, str | None, what="beginning a copy in memory")
        if _BUSY in errors:
            self.left_out += 1
            return
        for rank, error in enumerate(errors):
            if error is not None:
                self._say(f"no copy of step {self._begun} in memory: rank {rank}: {error}")
        if not any(errors):
            self._kept = self._begun if self._begun is not None else self._kept
        else:
            self.left_out += 1
        try:
            self._start(step, backend, run_state)
        except CheckpointError as error:  # of all ranks; the run needs no copy to go on
            self.left_out += 1
            self._say(f"no copy of step {step} in memory: {error}")

    def wait(self) -> None:
        """Wait until this rank's part of the copy is written. Raises CheckpointError if that takes too
        long."""
        if self._thread is None:
            return
        self._thread.join(_WRITE_SECONDS)
        if self._writing:
            raise CheckpointError(
                f"deadline: a copy of the state was not written to {self.folder} within "
                f"{_WRITE_SECONDS:.0f} s; is the machine out of memory and swapping? Set "
                "cluster.peer_copy = false",
                setting="cluster.peer_copy",
            )

    def _check_room(self, step: int, whole: int) -> None:
        """Check that a second copy fits. whole: bytes of all ranks' parts, which a restart may fetch."""
        files = [file for file in step_folder(self.folder, step).rglob("*") if file.is_file()]
        size = sum(file.stat().st_size for file in files)
        needed = max(size, whole - size)
        if (free := shutil.disk_usage(self.folder).free) < needed:
            raise CheckpointError(
                f"no-space: the first copy has {size} bytes, and {needed} bytes are needed for the next "
                f"copy or, after a crash, for the parts of all ranks, but only {free} are free"
            )

    @property
    def _writing(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _start(self, step: int, backend: Saved, run_state: Mapping[str, Any]) -> None:
        self._error, self._begun = None, None
        text = json.dumps(without_nan({**run_state, "step": step}))
        with self._ranks.fail_together("beginning a copy in memory"):
            if self._ranks.is_first if self._client is None else self._client.is_first_of_node:
                self._make(step, text)
        path = step_folder(self.folder, step)
        finish = backend.save(path, background=True)
        self._begun = step
        self._thread = threading.Thread(
            target=self._write, args=(path, finish), name=f"copy-{path.name}", daemon=True
        )
        self._thread.start()

    def _make(self, step: int, run_state: str) -> None:
        """Make the folder of a step, and remove what no restart can need."""
        path = step_folder(self.folder, step)
        kept = None if self._kept is None else step_folder(self.folder, self._kept)
        with file_errors(path, CheckpointError, "write"):
            self._remove_all_but(kept if kept != path else None)
            if self._client is None:
                self.folder.mkdir(mode=0o700, exist_ok=True)
            elif kept is not None:
                self._remove_parts(kept, set(range(self._ranks.world_size)) - self._client.kept)
            path.mkdir()
            if self._ranks.is_first:
                (path / RUN_STATE).write_text(run_state)

    def _remove_all_but(self, kept: Path | None) -> None:
        with file_errors(self.folder, CheckpointError, "remove"):
            for path in self.folder.glob("step-*"):
                if path != kept:
                    shutil.rmtree(path)

    def _remove_parts(self, path: Path, ranks: Iterable[int]) -> None:
        """Remove the parts of `ranks`, which a restart fetched from other nodes."""
        for rank in ranks:
            for name in part_files(path, rank) or ():
                (path / name).unlink()
            (path / part_name(rank)).unlink(missing_ok=True)

    def _write(self, path: Path, finish: FinishSave) -> None:
        """Write this rank's part, in the thread. The next `save` reports errors."""
        try:
            names = [*finish(), *([RUN_STATE] if self._ranks.is_first else [])]
            if self._client is None:
                files = {name: CopiedFile((path / name).stat().st_size) for name in names}
            else:
                files = self._client.send(path, names)
            complete(path, self._ranks.rank, files)
        except OSError as error:
            self._error = CheckpointError(f"cannot-write: {path} cannot be written: {error}")
        except BaseException as error:  # whatever it is: this rank's part is not whole
            self._error = error


def _error_text(error: BaseException) -> str:
    """Return the message of an error, with its type unless it is a CheckpointError."""
    return str(error) if isinstance(error, CheckpointError) else repr(error)


# Peer checkpoints in the memory of other nodes (cluster.peer_copy on several nodes): the client.
#
#     node 0 ──its ranks' parts──► node 1 ──► ... ──► the last node ──► node 0
#
# Each rank sends its part of a step to the server of the next node (lockstep.loop.peer_checkpoint_server), in
# the thread that writes the copy, with one TCP connection per file and no collective. After a death each node
# fetches its missing parts from whichever node has them.


_SILENT_SECONDS = 30.0
"""Timeout of a connection on which no byte is read or written."""
_MOST_REPLY = 16 * 2**20
"""Limit of a list of files, in bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerAddress:
    """Address and token of a node's server."""

    address: str
    port: int
    token: str

    def __str__(self) -> str:
        return f"{self.address}:{self.port}"


class PeerCheckpointClient:
    """Sends parts to the servers of other nodes, and fetches them.

    Args:
        servers: the server of each rank's node, by rank. Ranks of one node are adjacent.
        seconds: deadline of `send`.
        fetch_seconds: deadline of `fetch`, for which other ranks wait.
    """

    def __init__(
        self, servers: Sequence[ServerAddress], rank: int, *, seconds: float, fetch_seconds: float
    ) -> None:
        self._of_rank, self._rank = servers, rank
        self._seconds, self._fetch_seconds = seconds, fetch_seconds
        nodes = list(dict.fromkeys(servers))
        own = nodes.index(servers[rank])
        self._next, before = nodes[(own + 1) % len(nodes)], nodes[own - 1]
        self.is_first_of_node = servers.index(servers[rank]) == rank
        self.kept = {other for other, of in enumerate(servers) if of in (servers[rank], before)}
        """Ranks whose parts this node keeps: its own, and those of the node before it."""

    @classmethod
    def join(cls, own: ServerAddress, ranks: RankContext, *, seconds: float) -> PeerCheckpointClient:
        """Exchange the servers of all nodes and return the client. Collective."""
        servers = ranks.gather(own, ServerAddress, what="meeting the nodes")
        return cls(servers, ranks.rank, seconds=seconds, fetch_seconds=0.75 * ranks.seconds)

    def send(self, path: Path, names: Iterable[str]) -> dict[str, CopiedFile]:
        """Send this rank's part of a step to the next node.

        Returns:
            Sizes and hashes of its files.

        Raises:
            CheckpointError: the node cannot be reached, refuses, has no room, or received other bytes.
        """
        until = time.monotonic() + self._seconds
        sizes = {name: (path / name).stat().st_size for name in names}
        free = self._room(until)
        if free < (needed := sum(sizes.values())):
            raise CheckpointError(
                f"no-space: the copy of rank {self._rank} has {needed} bytes, but only {free} are free in "
                f"the memory of the next node ({self._next}); set cluster.copy_dir to a larger tmpfs",
                free=free,
            )
        files = {}
        for name, size in sizes.items():
            with (path / name).open("rb") as file:
                files[name] = CopiedFile(size, self._put(f"{path.name}/{name}", file, size, until=until))
        text = part_text(files).encode()
        self._put(f"{path.name}/{part_name(self._rank)}", io.BytesIO(text), len(text), until=until)
        return files

    def _room(self, until: float) -> int:
        with _Request(self._next, "GET", "room", until=until) as request:
            return int(request.json().get("free", 0))

    def _put(self, name: str, file: io.BufferedIOBase, size: int, *, until: float) -> str:
        """Send a file. Return its sha256, which both sides computed."""
        with _Request(self._next, "PUT", name, until=until, length=size) as request:
            sha256 = copied(file, request, size)
            if sha256 is None:
                raise CheckpointError(f"damaged-file: {name} became shorter while it was being sent")
            there = request.json().get("sha256")
        if there != sha256:
            what = f"{name}, as received by the next node ({self._next}),"
            raise hash_differs(CheckpointError, what, str(there)[:64], sha256, name=name)
        return sha256

    def fetch(self, path: Path, have: Sequence[Sequence[int]]) -> None:
        """Fetch the parts of a step that this node lacks. Not collective.

        Args:
            path: the local folder of the step.
            have: for each rank, the ranks whose parts are complete on its node.

        Raises:
            CheckpointError: no node has an intact copy of a part; lists the error of each node that had one.
        """
        until = time.monotonic() + self._fetch_seconds
        for part in range(len(have)):
            if part in have[self._rank]:
                continue
            # The node that wrote it comes first.
            holders = sorted(range(len(have)), key=lambda rank: self._of_rank[rank] != self._of_rank[part])
            nodes = dict.fromkeys(self._of_rank[rank] for rank in holders if part in have[rank])
            failures = []
            for node in nodes:
                try:
                    self._fetch_part(node, path, part, until=until)
                    break
                except CheckpointError as error:
                    failures.append(error)
            else:
                why = "; ".join(map(str, failures)) or "no node has a copy"
                raise CheckpointError(
                    f"the part of rank {part} of {path.name} is lost: {why}",
                    code=failures[-1].code if failures else "incomplete",
                    rank=part,
                )

    def _fetch_part(self, node: ServerAddress, path: Path, part: int, *, until: float) -> None:
        with _Request(node, "GET", f"{path.name}/{part_name(part)}", until=until) as request:
            text = request.body()
        try:
            files = read_part(text)
        except ValueError as error:
            raise damaged(CheckpointError, f"{node}: {path.name}/{part_name(part)}", error) from error
        try:
            path.mkdir(mode=0o700, exist_ok=True)
            for name, file in files.items():
                self._fetch_file(node, path / name, f"{path.name}/{name}", file, until=until)
            write_atomic(path / part_name(part), part_text(files))
        except OSError as error:
            raise CheckpointError(f"cannot-write: {path} cannot be written: {error}") from error

    def _fetch_file(
        self, node: ServerAddress, path: Path, name: str, file: CopiedFile, *, until: float
    ) -> None:
        partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        path.parent.mkdir(mode=0o700, exist_ok=True)
        try:
            with _Request(node, "GET", name, until=until) as request, partial.open("xb") as target:
                request.answer()
                sha256 = copied(request, target, file.bytes)
            if sha256 is None:
                raise CheckpointError(f"damaged-file: {node}: {name} is damaged: it is too short", name=name)
            if sha256 != file.sha256:
                raise hash_differs(CheckpointError, f"{node}: {name}", sha256, file.sha256, name=name)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


class _Request:
    """A request to a node's server, on its own connection. All errors are CheckpointErrors."""

    def __init__(self, node: ServerAddress, method: str, path: str, *, until: float, length: int = 0) -> None:
        self._node, self._until = node, until
        self._connection = http.client.HTTPConnection(node.address, node.port, timeout=_SILENT_SECONDS)
        self._answer: http.client.HTTPResponse | None = None
        with self._explained():
            self._connection.putrequest(method, f"/{path}")
            self._connection.putheader("Authorization", f"Bearer {node.token}")
            self._connection.putheader("Content-Length", str(length))
            self._connection.endheaders()

    def __enter__(self) -> _Request:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def write(self, data: bytes | memoryview) -> None:
        """Send a piece of the body."""
        with self._explained():
            self._connection.send(data)

    def answer(self) -> http.client.HTTPResponse:
        """Return the response, before its body is read."""
        if self._answer is None:
            with self._explained():
                self._answer = self._connection.getresponse()
            if (status := self._answer.status) != 200:
                reasons = {401: "not-authenticated", 404: "incomplete", 507: "no-space"}
                detail = printable(self.body().decode(errors="replace")[:300])
                raise CheckpointError(
                    f"node {self._node} refused the request: {status} {detail}",
                    code=reasons.get(status, "bad-reply"),
                )
        return self._answer

    def readinto(self, buffer: memoryview) -> int:
        """Read a piece of the response; 0 at its end."""
        with self._explained():
            return self.answer().readinto(buffer)

    def body(self) -> bytes:
        """Read the whole body."""
        with self._explained():
            return self.answer().read(_MOST_REPLY)

    def json(self) -> dict[str, Any]:
        """Read the body as a JSON object; {} if it is another value."""
        text = self.body()
        try:
            value = json.loads(text)
        except ValueError as error:
            raise CheckpointError(f"bad-reply: node {self._node} sent a response that is not JSON") from error
        return value if isinstance(value, dict) else {}

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            if time.monotonic() > self._until:
                raise TimeoutError("the deadline has passed")
            yield
        except (OSError, http.client.HTTPException) as error:
            raise CheckpointError(
                f"unreachable: node {self._node} cannot be reached: {str(error) or type(error).__name__}"
            ) from error
