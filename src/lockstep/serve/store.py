"""The run directory of a server: tokens, and checkpoints that outlive it.

tokens.json                             user -> token, readable by its owner alone
sessions/                               see serve/sessions
models/MODEL/                           its log (serve/run_files)
models/MODEL/weights/NAME/              a training state (train/state), and about.json
models/MODEL/external_weights/NAME/     a folder of peft or transformers, and about.json
models/MODEL/sampler_weights/NAME/      weights.safetensors, and about.json
"""

from __future__ import annotations

import hmac
import json
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from lockstep.common_errors import cannot_write
from lockstep.errors import CheckpointError, ConfigError, DataError
from lockstep.observe.files import parse_json, read_json, sync_folder, write_json
from lockstep.observe.trust import read_own

Kind = Literal["weights", "sampler_weights", "external_weights"]
KINDS: tuple[Kind, ...] = ("weights", "sampler_weights", "external_weights")
WEIGHTS = "weights.safetensors"
_ABOUT, _TOKENS = "about.json", "tokens.json"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", re.ASCII)
_PATH = re.compile(r"tinker://([^/]+)/(weights|sampler_weights|external_weights)/([^/]+)", re.ASCII)
_MODEL = re.compile(r"s-[0-9a-f]{32}:train:\d{1,9}", re.ASCII)
_TOKEN = re.compile(r"tml-[A-Za-z0-9_-]{32,512}", re.ASCII)
_EPHEMERAL = "ephemeral-"
_KEPT_EPHEMERAL = 8
"""Unnamed sampler weights that are kept for each model."""
_TTL = (3600, 10 * 366 * 86400)
"""Seconds that a checkpoint may be given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class About:
    """What a checkpoint is."""

    owner: str
    base_model: str
    adapters: Mapping[str, Any] | None
    """Fields of AdapterSpec; None: all weights are trained."""
    time: float
    seq: int = 0
    """The request of its client that wrote it."""
    expires_at: float | None = None
    user_metadata: Mapping[str, str] = field(default_factory=dict)
    client_metadata: Mapping[str, Any] = field(default_factory=dict)
    """The one of its training client."""

    @property
    def expired(self) -> bool:
        """Whether its time is over: it is then as if it did not exist."""
        return self.expires_at is not None and self.expires_at < time.time()


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint in the run directory."""

    model_id: str
    kind: Kind
    name: str
    folder: Path
    about: About

    @property
    def path(self) -> str:
        return f"tinker://{self.model_id}/{self.kind}/{self.name}"

    def files(self) -> list[str]:
        """The names of its files, except about.json."""
        return sorted(f.name for f in self.folder.iterdir() if f.is_file() and f.name != _ABOUT)

    def size(self) -> int:
        """Bytes of its files."""
        return sum((self.folder / name).stat().st_size for name in self.files())


class Store:
    """See the module.

    Raises:
        OSError: the directory cannot be made or read.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._changing = threading.Lock()
        """Held while a checkpoint is replaced or its about.json rewritten."""
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)

    def folder(self, model_id: str) -> Path:
        """The folder of a training client, which is also a run directory."""
        return self.directory / "models" / model_id

    def tokens(self, users: Sequence[str]) -> dict[str, str]:
        """Return a token for each user: those of earlier starts, and new ones."""
        path = self.directory / _TOKENS
        known: dict[str, str] = dict(read_json(path, CheckpointError)) if path.exists() else {}
        missing = [user for user in users if user not in known]
        known |= {user: f"tml-{secrets.token_urlsafe(32)}" for user in missing}
        if missing:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(handle, "w") as file:
                os.fchmod(file.fileno(), 0o600)
                json.dump(known, file, indent=1)
        return {user: known[user] for user in users}

    def write(
        self,
        model_id: str,
        kind: Kind,
        name: str | None,
        about: About,
        *,
        fill: Callable[[Path], None],
        overwrite: bool = False,
    ) -> Checkpoint:
        """Write a checkpoint: it is there as a whole, or not at all.

        Args:
            name: None: unnamed, and removed when the model has newer ones.
            fill: writes the files into an empty folder.

        Raises:
            DataError: there is one of that name.
            CheckpointError: the disk is full, or the like.
        """
        parent = self.folder(model_id) / kind
        parent.mkdir(parents=True, exist_ok=True)
        unnamed = name is None
        name = f"{_EPHEMERAL}{time.time_ns():020d}" if name is None else checked_name(name)
        folder = parent / name
        there = _about(folder)
        if there is not None and not there.expired and not overwrite:
            raise DataError(f"already-exists: {model_id} has {kind}/{name}; take another name", name=name)
        building = parent / f".{secrets.token_hex(8)}"
        building.mkdir()
        try:
            fill(building)
            write_json(building / _ABOUT, asdict(about))
            sync_folder(building)
            replaced = None
            with self._changing:
                if folder.exists():  # set aside, not removed: a crash here must not lose both
                    replaced = folder.rename(parent / f".{secrets.token_hex(8)}")
                building.rename(folder)
            if replaced is not None:
                shutil.rmtree(replaced)
        except BaseException as error:
            shutil.rmtree(building, ignore_errors=True)
            if isinstance(error, OSError):
                raise cannot_write(CheckpointError, folder, error, "make room in --dir") from error
            raise
        sync_folder(parent)
        if unnamed:
            for old in sorted(parent.glob(f"{_EPHEMERAL}*"))[:-_KEPT_EPHEMERAL]:
                shutil.rmtree(old)
        return Checkpoint(model_id, kind, name, folder, about)

    def find(self, path: str, *, owner: str, written: float | None = None) -> Checkpoint:
        """Return the checkpoint of a tinker:// path.

        Args:
            written: when it was written, if it must be that one and not another of its name.

        Raises:
            DataError: it does not exist, has expired, or belongs to somebody else: one error for all three;
                or it was overwritten.
        """
        missing = DataError(f"no-such-file: there is no checkpoint {path[:200]!r}", path=path[:200])
        match = _PATH.fullmatch(path)
        if match is None or not _MODEL.fullmatch(match[1]) or not _NAME.fullmatch(match[3]):
            raise missing
        kind = next(kind for kind in KINDS if kind == match[2])
        folder = self.folder(match[1]) / kind / match[3]
        about = _about(folder)
        if about is None or about.owner != owner or about.expired:
            raise missing
        if written not in (None, about.time):
            raise DataError(
                f"wrong-state: {path} was overwritten since this client was made from it; load it again, and "
                "save under a name of its own what others start from",
                path=path,
            )
        return Checkpoint(match[1], kind, match[3], folder, about)

    def has(self, saved: Checkpoint) -> bool:
        """Whether a checkpoint is still there, and not another one of its name."""
        there = _about(saved.folder)
        return there is not None and replace(there, expires_at=saved.about.expires_at) == saved.about

    def models(self) -> list[str]:
        """Return the training clients that have a folder, those of ended sessions too."""
        folder = self.directory / "models"
        return [one.name for one in folder.iterdir() if _MODEL.fullmatch(one.name)] if folder.is_dir() else []

    def of_model(self, model_id: str, *, owner: str) -> list[Checkpoint]:
        """Return a model's named checkpoints that `owner` may see, oldest first."""
        found = [one for one in self.written(model_id) if one.about.owner == owner]
        named = [one for one in found if not one.name.startswith(_EPHEMERAL)]
        return sorted(named, key=lambda one: one.about.time)

    def written(self, model_id: str) -> list[Checkpoint]:
        """Return all checkpoints of a model that have not expired, unnamed ones too."""
        if not _MODEL.fullmatch(model_id):
            return []
        found = []
        for kind in KINDS:
            folder = self.folder(model_id) / kind
            for entry in folder.iterdir() if folder.is_dir() else ():
                about = _about(entry) if _NAME.fullmatch(entry.name) else None
                if about is not None and not about.expired:
                    found.append(Checkpoint(model_id, kind, entry.name, entry, about))
        return found

    def set_ttl(self, path: str, ttl_seconds: int | None, *, owner: str) -> None:
        """Let a checkpoint expire that many seconds from now; None: never.

        Raises:
            DataError: see `find` and `expiry`.
            CheckpointError: the disk is full, or the like.
        """
        expires_at = expiry(ttl_seconds, now=time.time())
        with self._changing:
            saved = self.find(path, owner=owner)
            try:
                write_json(saved.folder / _ABOUT, asdict(replace(saved.about, expires_at=expires_at)))
            except OSError as error:
                raise cannot_write(CheckpointError, saved.folder, error, "make room in --dir") from error

    def delete(self, path: str, *, owner: str) -> None:
        """Remove a checkpoint. Raises DataError: see `find`."""
        shutil.rmtree(self.find(path, owner=owner).folder)


def expiry(ttl_seconds: int | None, *, now: float) -> float | None:
    """Return when a checkpoint expires, in seconds since the epoch; None: never.

    Args:
        ttl_seconds: from `now` on.

    Raises:
        DataError: the API allows 1 hour to 10 years.
    """
    if ttl_seconds is None:
        return None
    if not _TTL[0] <= ttl_seconds <= _TTL[1]:
        raise DataError(
            f"out-of-range: ttl_seconds = {ttl_seconds}; use {_TTL[0]} to {_TTL[1]}", field="ttl_seconds"
        )
    return now + ttl_seconds


def read_tokens(path: Path) -> dict[str, str]:
    """Read the tokens of users from a JSON file that nobody else may read.

    Raises:
        ConfigError: others may read or write it; it is no such file; a token is short or of two users.
    """
    found = parse_json(read_own(path, ConfigError, limit=2**20, secret=True), str(path), ConfigError)
    if not isinstance(found, dict) or not found or not all(isinstance(t, str) for t in found.values()):
        raise ConfigError(f"wrong-format: {path} must be a JSON object: user -> token")
    for user, token in found.items():
        if not _TOKEN.fullmatch(token):
            raise ConfigError(
                f"wrong-format: {path}: the token of {user[:80]!r} must be tml- and 32 or more of letters, "
                "digits, - and _"
            )
    if len(set(found.values())) < len(found):
        raise ConfigError(f"duplicate: {path} gives two users one token")
    return found


def checked_name(name: str) -> str:
    """Return a checkpoint's name. Raises DataError: it is not one."""
    if not _NAME.fullmatch(name) or name.startswith(_EPHEMERAL):
        raise DataError(
            f"bad-file-name: {name[:80]!r} cannot name a checkpoint; use letters, digits, '.', '_' and '-', "
            "at most 128",
            name=name[:80],
        )
    return name


def same(given: str, token: str) -> bool:
    """Compare tokens in constant time."""
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), token.encode())


def _about(folder: Path) -> About | None:
    path = folder / _ABOUT
    if not path.is_file():
        return None
    return About(**parse_json(path.read_bytes(), str(path), CheckpointError))
