"""What a user has on a server: training runs and checkpoints, as the API describes them.

A training run is a training client: one of a session, or one of an ended session with checkpoints left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from lockstep.errors import DataError
from lockstep.serve.sessions import Gone, Sessions
from lockstep.serve.store import Checkpoint, Store

MOST_PAGE = 1000
"""Entries of a page."""
_TYPES = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}


class Listing:
    """See the module."""

    def __init__(self, sessions: Sessions, store: Store) -> None:
        self._sessions, self._store = sessions, store

    def checkpoints(self, model_id: str, user: str) -> dict[str, Any]:
        """Return the named checkpoints of a training run, oldest first."""
        return {"checkpoints": [_described(one) for one in self._store.of_model(model_id, owner=user)]}

    def users_checkpoints(self, query: Mapping[str, str], user: str) -> dict[str, Any]:
        """Return a page of the named checkpoints of all training runs, newest first. Raises DataError."""
        models = self._store.models()
        found = [one for model in models for one in self._store.of_model(model, owner=user)]
        found.sort(key=lambda one: one.about.time, reverse=True)
        return _page("checkpoints", found, query, limit=100, describe=_described)

    def runs(self, query: Mapping[str, str], user: str) -> dict[str, Any]:
        """Return a page of training runs, the last used first. Raises DataError."""
        if "project_id" in query:
            raise DataError("refused: projects are not served; leave project_id out", field="project_id")
        here = {client.id: client.asked for client in self._sessions.clients(user)}
        for model in self._store.models():
            if model not in here and (saved := self._store.of_model(model, owner=user)):
                here[model] = saved[-1].about.time
        ids = sorted(here, key=lambda model: here[model], reverse=True)
        return _page("training_runs", ids, query, limit=20, describe=lambda model: self.run(model, user))

    def run(self, model_id: str, user: str) -> dict[str, Any]:
        """Return a training run. Raises Gone: unknown, or somebody else's."""
        client = next((one for one in self._sessions.clients(user) if one.id == model_id), None)
        saved = self._store.of_model(model_id, owner=user)
        if client is not None:
            name, rank = client.base.name, None if client.spec is None else client.spec.rank
            metadata, asked = client.metadata, client.asked
        elif saved:
            about = saved[-1].about
            name, rank = about.base_model, None if about.adapters is None else about.adapters["rank"]
            metadata, asked = about.client_metadata, about.time
        else:
            raise Gone(f"unknown-name: there is no training run {model_id[:120]!r}, or no longer")
        last = {one.kind: _described(one) for one in saved}
        return {
            "training_run_id": model_id,
            "base_model": name,
            "model_owner": user,
            "is_lora": rank is not None,
            "lora_rank": rank,
            "corrupted": client is not None and client.lost,
            "last_request_time": time_of(asked),
            "last_checkpoint": last.get("weights"),
            "last_sampler_checkpoint": last.get("sampler_weights"),
            "user_metadata": dict(metadata),
        }


def _page(
    name: str,
    entries: Sequence[Any],
    query: Mapping[str, str],
    *,
    limit: int,
    describe: Callable[[Any], dict[str, Any]],
) -> dict[str, Any]:
    """Describe the entries from `offset` on, at most `limit`, which the query may change."""
    numbers = {"limit": limit, "offset": 0}
    for key, least, most in (("limit", 1, MOST_PAGE), ("offset", 0, 10**9)):
        text = query.get(key, str(numbers[key]))
        if not (text.isascii() and text.isdecimal() and len(text) < 11 and least <= int(text) <= most):
            raise DataError(f"out-of-range: {key} = {text[:80]}; use {least} to {most}", field=key)
        numbers[key] = int(text)
    shown = entries[numbers["offset"] : numbers["offset"] + numbers["limit"]]
    cursor = {**numbers, "total_count": len(entries)}
    return {name: [describe(entry) for entry in shown], "cursor": cursor}


def _described(one: Checkpoint) -> dict[str, Any]:
    return {
        "checkpoint_id": f"{one.kind}/{one.name}",
        "checkpoint_type": _TYPES[one.kind],
        "time": time_of(one.about.time),
        "tinker_path": one.path,
        "size_bytes": one.size(),
        "user_metadata": dict(one.about.user_metadata),
        "expires_at": None if one.about.expires_at is None else time_of(one.about.expires_at),
    }


def time_of(seconds: float) -> str:
    """Return a time as the API writes it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()
