"""The files of rollouts/: which there are, and the rows in them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import DataError
from lockstep.observe.files import JSON_BYTES, open_plain
from lockstep.observe.run_history import STEP_FILE
from lockstep.view.rollouts import Pieces, Rollout, no_pieces, rollout

_EVALUATION = re.compile(r"evaluation-([\w-]{1,80})\.jsonl")
_PROMPT = re.compile(rb'"prompt_index": ?(\d{1,18})\b')


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutFile:
    """A file of rollouts/. Equal files have not changed."""

    path: Path
    evaluation: str | None
    """None for a training step."""
    step: int | None
    """Of a training step; the rows of an evaluation have it."""
    size: int
    mtime_ns: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A row and its place in its file."""

    number: int
    """Line, from 0."""
    offset: int
    size: int
    rollout: Rollout


def list_files(run: Path) -> list[RolloutFile]:
    """Return the files of rollouts/, training steps first, in order; none if there is no such folder."""
    found = []
    try:
        with os.scandir(run / "rollouts") as entries:
            for entry in entries:
                if (file := _file(entry)) is not None:
                    found.append(file)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(found, key=_place)


def _file(entry: os.DirEntry[str]) -> RolloutFile | None:
    match = STEP_FILE.fullmatch(entry.name)
    step = int(match[2]) if match and not match[1] else None
    named = _EVALUATION.fullmatch(entry.name)
    if step is None and named is None:
        return None
    try:
        status = entry.stat()
    except OSError:  # removed by a run that goes back, or a link that leads nowhere
        return None
    return RolloutFile(
        path=Path(entry.path),
        evaluation=None if named is None else named[1],
        step=step,
        size=status.st_size,
        mtime_ns=status.st_mtime_ns,
    )


def _place(file: RolloutFile) -> tuple[bool, int, bool, bool, str]:
    name = file.evaluation or ""
    return file.evaluation is not None, file.step or 0, name == "after", name != "before", name


def read_rows(
    file: RolloutFile, *, prompt_index: int | None = None, problems: list[str], pieces: Pieces | None = None
) -> Iterator[Row]:
    """Yield the rows of a file, and add what is wrong with the others to `problems`. A last line that is
    still being written is left out.

    Args:
        prompt_index: only the rows of this prompt; other rows are not parsed.
        pieces: None: leave out most numbers per token, which take half of the time.
    """
    try:
        with open_plain(file.path, DataError, root=file.path.parents[1]) as lines:
            offset = number = 0
            while raw := lines.readline(JSON_BYTES + 1):
                if not raw.endswith(b"\n") and len(raw) <= JSON_BYTES:
                    return
                if not _is_of_other(raw, prompt_index) and raw.strip():
                    try:
                        one = _parsed(raw if pieces else _brief(raw), file, pieces or no_pieces)
                    except _WRONG as error:
                        problems.append(f"{file.path.name}, line {number + 1}: {error}"[:200])
                    else:
                        yield Row(number=number, offset=offset, size=len(raw), rollout=one)
                offset, number = offset + len(raw), number + 1
    except DataError as error:  # removed, or no file of ours
        problems.append(str(error))


_WRONG = (ValueError, TypeError, AttributeError, RecursionError)
"""What a row that no run writes raises."""


def _parsed(raw: bytes, file: RolloutFile, pieces: Pieces) -> Rollout:
    return rollout(json.loads(raw), pieces=pieces, evaluation=file.evaluation)


def _is_of_other(raw: bytes, prompt_index: int | None) -> bool:
    if prompt_index is None:
        return False
    found = _PROMPT.search(raw)
    return found is not None and int(found[1]) != prompt_index


def _brief(raw: bytes) -> bytes:
    """The row without lists of numbers that only a page shows. A text cannot be mistaken for one: its quotes
    are escaped."""
    names = (b"entropies", b"advantages") if b'"policy_logprobs": [' in raw else (b"rollout_logprobs",)
    for name in names:
        begin = raw.find(b'"%s": [' % name)
        end = raw.find(b"]", begin)
        if 0 <= begin < end:
            raw = b'%s"%s": [%s' % (raw[:begin], name, raw[end:])
    return raw


def read_at(file: RolloutFile, places: list[tuple[int, int]], *, pieces: Pieces) -> list[Rollout] | None:
    """Return the rollouts at (offset, size) in a file; None if the rows are no longer there."""
    try:
        with open_plain(file.path, DataError, root=file.path.parents[1]) as lines:
            rows = [os.pread(lines.fileno(), size, offset) for offset, size in places]
        return [_parsed(raw, file, pieces) for raw in rows]
    except (DataError, *_WRONG):
        return None
