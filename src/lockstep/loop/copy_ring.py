"""Copies in the memory of other nodes (cluster.peer_copy on several nodes), as a rank sees them.

    node 0 ──its ranks' parts──► node 1 ──► ... ──► the last node ──► node 0

Each rank sends what it has written of a step to the next node's keeper (lockstep.loop.copy_keeper), in the
thread that writes the copy, over a TCP connection per file; no collective takes part. After a death each node
fetches the parts that it lacks from whichever node has them.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.errors import CheckpointError
from lockstep.loop.copy_keeper import copied
from lockstep.observe.files import write_atomic
from lockstep.observe.text import printable
from lockstep.ranks.context import RankContext
from lockstep.ranks.copy_folder import CopiedFile, part_name, part_text, read_part

_SILENT_SECONDS = 30.0
"""Without a byte from another node, or taken by it."""
_MOST_REPLY = 16 * 2**20
"""Bytes of a list of files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Keeper:
    """Where a node's keeper listens, and what it asks for."""

    address: str
    port: int
    token: str

    def __str__(self) -> str:
        return f"{self.address}:{self.port}"


class CopyRing:
    """The nodes' keepers.

    Args:
        keepers: of each rank's node, by rank. Ranks of one node stand together.
        seconds: deadline of `send`.
        fetch_seconds: deadline of `fetch`, for which other ranks wait.
    """

    def __init__(self, keepers: Sequence[Keeper], rank: int, *, seconds: float, fetch_seconds: float) -> None:
        self._of_rank, self._rank = keepers, rank
        self._seconds, self._fetch_seconds = seconds, fetch_seconds
        nodes = list(dict.fromkeys(keepers))
        own = nodes.index(keepers[rank])
        self._next, before = nodes[(own + 1) % len(nodes)], nodes[own - 1]
        self.is_first_of_node = keepers.index(keepers[rank]) == rank
        self.kept = {other for other, of in enumerate(keepers) if of in (keepers[rank], before)}
        """Ranks whose parts this node keeps: its own, and those of the node before it."""

    @classmethod
    def join(cls, own: Keeper, ranks: RankContext, *, seconds: float) -> CopyRing:
        """The ring of all ranks' nodes. Collective."""
        keepers = ranks.gather(own, Keeper, what="meeting the nodes")
        return cls(keepers, ranks.rank, seconds=seconds, fetch_seconds=0.75 * ranks.seconds)

    def send(self, path: Path, names: Iterable[str]) -> dict[str, CopiedFile]:
        """Send this rank's files of a step to the next node, where its part is whole afterwards.

        Returns:
            Their sizes and hashes.

        Raises:
            CheckpointError: the node cannot be reached, refuses, has no room, or got something else.
        """
        until = time.monotonic() + self._seconds
        sizes = {name: (path / name).stat().st_size for name in names}
        free = self._room(until)
        if free < (needed := sum(sizes.values())):
            raise CheckpointError(
                f"no-space: the copy of rank {self._rank} has {needed} bytes, and {free} are free in the "
                f"memory of the next node ({self._next}); set cluster.copy_dir to a larger tmpfs",
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
        """Send a file; its sha256, which both sides have seen."""
        with _Request(self._next, "PUT", name, until=until, length=size) as request:
            sha256 = copied(file, request, size)
            if sha256 is None:
                raise CheckpointError(f"damaged-file: {name} became shorter while it was sent")
            there = request.json().get("sha256")
        if there != sha256:
            raise CheckpointError(
                f"hash-differs: {name} came to the next node ({self._next}) as another file than was sent: "
                f"its sha256 is {str(there)[:64]} instead of {sha256}",
                name=name,
            )
        return sha256

    def fetch(self, path: Path, have: Sequence[Sequence[int]]) -> None:
        """Fetch the parts of a step that this node lacks; collective with nobody.

        Args:
            path: the folder of the step, here.
            have: by rank, the ranks whose parts are whole on its node.

        Raises:
            CheckpointError: nobody has a part whole and undamaged; names why for each node that had it.
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
                why = "; ".join(map(str, failures)) or "no node has it"
                raise CheckpointError(
                    f"the part of rank {part} of {path.name} is lost: {why}",
                    code=failures[-1].code if failures else "incomplete",
                    rank=part,
                )

    def _fetch_part(self, node: Keeper, path: Path, part: int, *, until: float) -> None:
        with _Request(node, "GET", f"{path.name}/{part_name(part)}", until=until) as request:
            text = request.body()
        try:
            files = read_part(text)
        except ValueError as error:
            raise CheckpointError(
                f"damaged-file: {node}: {path.name}/{part_name(part)} is damaged: {error}"
            ) from error
        try:
            path.mkdir(mode=0o700, exist_ok=True)
            for name, file in files.items():
                self._fetch_file(node, path / name, f"{path.name}/{name}", file, until=until)
            write_atomic(path / part_name(part), part_text(files))
        except OSError as error:
            raise CheckpointError(f"cannot-write: {path} cannot be written: {error}") from error

    def _fetch_file(self, node: Keeper, path: Path, name: str, file: CopiedFile, *, until: float) -> None:
        partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        path.parent.mkdir(mode=0o700, exist_ok=True)
        try:
            with _Request(node, "GET", name, until=until) as request, partial.open("xb") as target:
                request.answer()
                sha256 = copied(request, target, file.bytes)
            if sha256 is None:
                raise CheckpointError(f"damaged-file: {node}: {name} is too short, damaged", name=name)
            if sha256 != file.sha256:
                raise CheckpointError(
                    f"hash-differs: {node}: {name} is damaged: its sha256 is {sha256} instead of "
                    f"{file.sha256[:64]}",
                    name=name,
                )
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


class _Request:
    """A request to a node's keeper, over a connection of its own. Everything raises CheckpointError."""

    def __init__(self, node: Keeper, method: str, path: str, *, until: float, length: int = 0) -> None:
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
        """The answer, whose body is to be read."""
        if self._answer is None:
            with self._explained():
                self._answer = self._connection.getresponse()
            if (status := self._answer.status) != 200:
                reasons = {401: "not-authenticated", 404: "incomplete", 507: "no-space"}
                said = printable(self.body().decode(errors="replace")[:300])
                raise CheckpointError(
                    f"node {self._node} refuses: {status} {said}", code=reasons.get(status, "bad-reply")
                )
        return self._answer

    def readinto(self, buffer: memoryview) -> int:
        """Read a piece of the answer's body; 0: it has ended."""
        with self._explained():
            return self.answer().readinto(buffer)

    def body(self) -> bytes:
        """All of it."""
        with self._explained():
            return self.answer().read(_MOST_REPLY)

    def json(self) -> dict[str, Any]:
        """What it says."""
        text = self.body()
        try:
            value = json.loads(text)
        except ValueError as error:
            raise CheckpointError(f"bad-reply: node {self._node} answers no JSON") from error
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
