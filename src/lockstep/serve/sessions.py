"""Sessions, their training clients and samplers, and the journals that bring them back after a restart.

sessions/SESSION.jsonl      its user, then its clients, their requests and its samplers, in order

A request is in the journal before it is queued, and a load again when its turn comes, with the time of what
it found. After a restart a client has the weights of its last save or load; whether later requests changed
them is in the journal too, and no such request is ever executed again.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

from lockstep.common_errors import cannot_write
from lockstep.errors import CheckpointError, DataError
from lockstep.observe.files import json_lines, parse_json
from lockstep.serve.models import AdapterSpec, BaseModel, TrainingModel
from lockstep.serve.ranks import RankedModel
from lockstep.serve.run_files import ServedRun
from lockstep.serve.store import Checkpoint, Store
from lockstep.serve.work import Busy

MOST_SESSIONS = 10_000
IDLE_SECONDS = 900.0
"""Sessions that nobody has used for so long make room for others; clients ask every 10 s."""


class Gone(DataError):
    """Something that was there and is no more, or that belongs to somebody else."""


def spec_of(saved: Checkpoint) -> AdapterSpec | None:
    """Return the adapters of a checkpoint; None: whole weights."""
    return None if saved.about.adapters is None else AdapterSpec(**saved.about.adapters)


@dataclass(slots=True)
class Client:
    """A training client."""

    id: str
    user: str
    base: BaseModel
    spec: AdapterSpec | None
    origin: str | None = None
    """The checkpoint that its weights come from where they are not in memory; None: as they were made."""
    written: float | None = None
    """When `origin` was written: its owner may have overwritten it since."""
    optimizer: bool = True
    """Whether the states of the optimizer come from there too."""
    model: TrainingModel | RankedModel | None = None
    """None until the worker has made it."""
    last_seq: int = 0
    lost: bool = False
    """Whether a restart lost steps since `origin`: nothing but a load is executed then."""
    run: ServedRun | None = None
    """Its log; None before its first forward_backward."""
    ended: bool = False
    """Whether its session has ended: requests that were queued before still run, and are not logged."""
    asked: float = field(default_factory=time.time)
    """When its last request came, or its session's before a restart."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """What the user said of it when it was made."""
    answers: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    """Of saves and loads before a restart, by request."""

    @property
    def row(self) -> dict[str, Any]:
        """The client in the journal."""
        return {
            "client": self.number,
            "base": self.base.name,
            "adapters": None if self.spec is None else asdict(self.spec),
            "origin": self.origin,
            "written": self.written,
            "optimizer": self.optimizer,
            "metadata": self.metadata,
        }

    @property
    def number(self) -> int:
        return int(self.id.rpartition(":")[2])

    def lost_steps(self) -> DataError:
        """Return the error for what needs the steps that a restart lost."""
        way = "a new client: nothing was saved"
        if self.origin is not None:
            way = f"load_state_with_optimizer({self.origin!r})"
        return DataError(
            f"wrong-state: the server was started again, and the steps of {self.id} since its last saved "
            f"state are lost; go on with {way}",
            saved=self.origin,
        )


@dataclass(frozen=True, slots=True)
class Sampling:
    """A sampling session: fixed weights."""

    id: str
    user: str
    base: BaseModel
    checkpoint: Checkpoint | None
    """None: the base model."""

    @property
    def spec(self) -> AdapterSpec | None:
        """Adapters of the checkpoint."""
        return None if self.checkpoint is None else spec_of(self.checkpoint)


@dataclass(slots=True)
class Session:
    """What one ServiceClient does."""

    id: str
    user: str
    journal: Path
    clients: dict[str, Client] = field(default_factory=dict)
    samplings: dict[str, Sampling] = field(default_factory=dict)
    used: float = field(default_factory=time.monotonic)
    writing: threading.Lock = field(default_factory=threading.Lock)

    def write(self, row: Mapping[str, Any], *, new: bool = False) -> None:
        """Add a row to the journal; it outlives the process. No row is added when the session has ended.

        Raises:
            CheckpointError: the disk is full, or the like.
        """
        flags = os.O_WRONLY | os.O_APPEND | (os.O_CREAT if new else 0)
        try:
            with self.writing, os.fdopen(os.open(self.journal, flags, 0o600), "wb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                try:
                    _write_whole(file, json_lines([row]).encode())
                except OSError:
                    # Otherwise the next row would be appended to half a row.
                    file.truncate(size)
                    raise
        except FileNotFoundError:
            return
        except OSError as error:
            raise cannot_write(CheckpointError, self.journal, error, "make room in --dir") from error


def _write_whole(file: FileIO, data: bytes) -> None:
    while data:
        data = data[file.write(data) :]


class Sessions:
    """All sessions of a server, those of earlier starts included.

    Raises:
        CheckpointError: a journal is damaged.
    """

    def __init__(self, bases: Mapping[str, BaseModel], store: Store, *, most_clients: int) -> None:
        self._bases, self._store, self._most_clients = bases, store, most_clients
        self._folder = store.directory / "sessions"
        self._folder.mkdir(exist_ok=True, mode=0o700)
        self._sessions: dict[str, Session] = {}
        journals = sorted(self._folder.glob("s-*.jsonl"), key=lambda path: path.stat().st_mtime)
        for old in journals[:-MOST_SESSIONS]:
            old.unlink()
        for journal in journals[-MOST_SESSIONS:]:
            if (session := self._restored(journal)) is not None:
                self._sessions[session.id] = session

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

    def clients(self, user: str) -> list[Client]:
        """Return the training clients of a user's sessions, which does not count as use of them."""
        return [one for session in self if session.user == user for one in session.clients.values()]

    def create(self, user: str, key: str | None) -> Session:
        """Return a new session, or the one that a request with the same idempotency key made. Raises Busy."""
        digest = hashlib.blake2b(json.dumps([user, key]).encode(), digest_size=16).hexdigest()
        session_id = f"s-{digest if key else secrets.token_hex(16)}"
        if session_id in self._sessions:
            return self._sessions[session_id]
        if len(self._sessions) >= MOST_SESSIONS:
            self._drop_idle()
        if len(self._sessions) >= MOST_SESSIONS:
            raise Busy(f"too-large: the server has {MOST_SESSIONS} sessions, as many as it keeps")
        session = Session(session_id, user, self._folder / f"{session_id}.jsonl")
        session.write({"user": user}, new=True)
        self._sessions[session.id] = session
        return session

    def find(self, item_id: str, user: str) -> Session | None:
        """Return the session of an id, or of the id of something in it, if it is this user's."""
        session = self._sessions.get(item_id.partition(":")[0])
        if session is None or session.user != user:
            return None
        session.used = time.monotonic()
        return session

    def get(self, session_id: str, user: str) -> Session:
        """Raises Gone: unknown, or somebody else's."""
        session = self.find(session_id, user)
        if session is None or session.id != session_id:
            raise Gone(f"unknown-name: there is no session {session_id[:80]!r}; make a new ServiceClient")
        return session

    def client(self, model_id: str, user: str) -> Client:
        """Raises Gone: unknown, or somebody else's."""
        session = self.find(model_id, user)
        if session is None or model_id not in session.clients:
            raise Gone(f"unknown-name: there is no client {model_id[:80]!r}; start from the last saved state")
        return session.clients[model_id]

    def sampling(self, sampling_id: str, user: str) -> Sampling:
        """Raises Gone: unknown, or somebody else's."""
        session = self.find(sampling_id, user)
        if session is None or sampling_id not in session.samplings:
            raise Gone(f"unknown-name: there is no sampler {sampling_id[:80]!r}; make one of saved weights")
        return session.samplings[sampling_id]

    def finish(self, session_id: str, user: str) -> None:
        """Forget a session and its clients, which go when their last request has run. Raises Gone."""
        self._drop(self.get(session_id, user))

    def _drop(self, session: Session) -> None:
        del self._sessions[session.id]
        session.journal.unlink(missing_ok=True)
        for client in session.clients.values():
            client.ended = True
            if client.run is not None:
                client.run.close()

    def _drop_idle(self) -> None:
        since = time.monotonic() - IDLE_SECONDS
        for session in [one for one in self._sessions.values() if one.used < since]:
            self._drop(session)

    def require_room(self) -> None:
        """Raises DataError: there are as many training clients as the server keeps."""
        for attempt in range(2):
            count = sum(len(session.clients) for session in self._sessions.values())
            if count < self._most_clients:
                return
            if attempt == 0:
                self._drop_idle()
        raise DataError(
            f"too-large: the server has {count} training clients, as many as it keeps; close the "
            "ServiceClients that are done, or start it with a larger --max-clients"
        )

    # after a restart

    def _restored(self, journal: Path) -> Session | None:
        raw = journal.read_bytes()
        end = raw.rfind(b"\n") + 1
        if end < len(raw):  # a row that was being written: the next one must not be appended to it
            os.truncate(journal, end)
        lines = raw[:end].split(b"\n")[:-1]
        rows = [parse_json(line, str(journal), CheckpointError) for line in lines]
        if not rows:
            return None
        session = Session(journal.stem, rows[0]["user"], journal)
        for row in rows[1:]:
            if "base" in row and row["base"] not in self._bases:
                continue  # a model that this start does not serve
            if "sampling" in row and "request" not in row:
                self._restore_sampling(session, row)
            elif "base" in row:
                client_id = f"{session.id}:train:{row['client']}"
                spec = None if row["adapters"] is None else AdapterSpec(**row["adapters"])
                base = self._bases[row["base"]]
                client = Client(client_id, session.user, base, spec)
                client.origin, client.written = row["origin"], row.get("written")
                client.optimizer, client.metadata = row["optimizer"], row.get("metadata", {})
                client.asked = journal.stat().st_mtime
                session.clients[client_id] = client
        for client in session.clients.values():
            self._restore_requests(
                session, client, [row for row in rows if row.get("client") == client.number]
            )
        return session

    def _restore_sampling(self, session: Session, row: Mapping[str, Any]) -> None:
        try:
            saved = None if row["path"] is None else self._store.find(row["path"], owner=session.user)
        except DataError:
            return  # its weights are no longer kept
        if saved is None or saved.about.time == row["time"]:
            sampling_id = f"{session.id}:sample:{row['sampling']}"
            sampling = Sampling(sampling_id, session.user, self._bases[row["base"]], saved)
            session.samplings[sampling_id] = sampling

    def _restore_requests(self, session: Session, client: Client, rows: list[Mapping[str, Any]]) -> None:
        written = {(saved.kind, saved.about.seq): saved for saved in self._store.written(client.id)}
        refused = {row["refused"] for row in rows if "refused" in row}
        loaded = {row["loaded"]: row["written"] for row in rows if "loaded" in row}
        for row in [row for row in rows if "request" in row]:
            seq, does = row["request"], row["does"]
            client.last_seq = seq
            if seq in refused:
                continue
            if does == "train":
                client.lost = True
            elif does == "load":
                client.origin, client.written = row["path"], loaded.get(seq, row.get("written"))
                client.optimizer, client.lost = row["optimizer"], False
                client.answers[seq] = {"path": row["path"], "model_id": client.id, "type": "load_weights"}
            elif does == "save" and (saved := written.get(("weights", seq))) is not None:
                client.origin, client.written = saved.path, saved.about.time
                client.optimizer, client.lost = True, False
                client.answers[seq] = {"path": saved.path, "type": "save_weights"}
            elif does == "external" and (saved := written.get(("external_weights", seq))) is not None:
                client.answers[seq] = {"path": saved.path, "type": "save_weights_external"}
            elif does == "sampler" and (saved := written.get(("sampler_weights", seq))) is not None:
                answer: dict[str, Any] = {"type": "save_weights_for_sampler"}
                if row["sampling"] is None:
                    answer["path"] = saved.path
                else:
                    sampling = Sampling(
                        f"{session.id}:sample:{row['sampling']}", session.user, client.base, saved
                    )
                    session.samplings[sampling.id] = sampling
                    answer["sampling_session_id"] = sampling.id
                client.answers[seq] = answer
