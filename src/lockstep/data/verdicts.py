"""Results of `lockstep data check` for a data set, kept in the cache for the runs on it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.config.data import DataConfig
from lockstep.data.cache import CACHE_VERSION, cached, clean_cache, touch
from lockstep.data.lazy import LAST_KEPT, STATES, LazyItems
from lockstep.data.sources import Source
from lockstep.errors import DataError
from lockstep.observe.files import read_json, write_json
from lockstep.version import __version__

_NOT_OF_ROWS = {"workers", "prefetch", "shuffle", "on_bad_row"}
"""Settings that change nothing of what a row becomes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """Every row of a set has been looked at."""

    rows: int
    """Items, see LazyItems."""
    left_out: Mapping[int, str]
    """Number of an item that is not in the set to its state."""
    bad: Mapping[int, str]
    """The messages of the first items at fault, by number."""
    statistics: Mapping[str, Any]


def key(kind: str, config: DataConfig, tokenizer: Any, source: Source, **more: Any) -> str | None:
    """Return what names a verdict: the source's content, the tokenizer and its template, the settings, and
    the version of this package. None for a tokenizer whose content cannot be hashed.

    Args:
        kind: of the run.
        more: what else decides what a row becomes.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    parts = {
        "kind": kind,
        "version": f"{CACHE_VERSION} {__version__}",
        "source": source.fingerprint,
        "settings": config.model_dump(mode="json", exclude=_NOT_OF_ROWS),
        "tokenizer": hashlib.blake2b(backend.to_str().encode(), digest_size=16).hexdigest(),
        "templates": tokenizer.chat_template,
        "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        **more,
    }
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _path(name: str, suffix: str) -> Path:
    return cached(name + suffix)


def read(name: str) -> Verdict | None:
    """Return the verdict with this key; None: there is none, or what is there is none."""
    path, of_states = _path(name, ".json"), _path(name, ".states.npy")
    if not path.is_file() or not of_states.is_file():
        return None
    try:
        value = read_json(path, DataError)
        states = np.load(of_states, allow_pickle=False)
        if states.dtype != np.uint8 or states.shape != (value["rows"],) or states.max() >= len(STATES):
            return None
        left_out = {int(number): STATES[states[number]] for number in np.flatnonzero(states > LAST_KEPT)}
        bad = {int(number): str(message) for number, message in value["bad"]}
        verdict = Verdict(rows=len(states), left_out=left_out, bad=bad, statistics=dict(value["statistics"]))
    except (DataError, OSError, EOFError, KeyError, TypeError, ValueError):
        return None  # damaged: the rows are looked at as without it
    touch(path)
    touch(of_states)
    return verdict


def write(name: str, verdict: Verdict) -> Path:
    """Write a verdict; returns its file. Raises OSError."""
    clean_cache()
    states = np.ones(verdict.rows, np.uint8)
    for number, state in verdict.left_out.items():
        states[number] = STATES.index(state)
    with _path(name, ".states.npy").open("wb") as file:
        np.save(file, states, allow_pickle=False)
    bad, path = [[number, text] for number, text in verdict.bad.items()], _path(name, ".json")
    write_json(path, {"rows": verdict.rows, "bad": bad, "statistics": dict(verdict.statistics)})
    return path


def apply(name: str | None, items: LazyItems[Any], source: str) -> tuple[str, ...]:
    """Take over the verdict on a set, if there is one, and return what to say of it.

    Raises:
        DataError: rows are at fault, and `data.on_bad_row` is "fail".
    """
    if name is None or items.whole or not _path(name, ".json").is_file():
        return ()
    verdict = read(name)
    if verdict is None or verdict.rows != items.rows:
        return (f"{source}: the result of `lockstep data check` is damaged and not used; run it again",)
    count = sum(state == "bad" for state in verdict.left_out.values())
    if count and items.config.on_bad_row == "fail":
        raise DataError(
            f"wrong-row: {count} rows of data.source = {source!r} are at fault, as `lockstep data check` has "
            f"found; the first: {next(iter(verdict.bad.values()), '')}; correct them, or set "
            "data.on_bad_row = 'skip'"
        )
    items.trust(verdict.left_out, steps=None, why=verdict.bad)
    left = f", {len(verdict.left_out):,} of which are left out" if verdict.left_out else ""
    return (f"{source}: all {verdict.rows:,} rows have been checked{left}",)
