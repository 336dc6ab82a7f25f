"""Where the inputs of a step that hangs are recorded, and the command that feeds them to the policy again.

    report = name_recording(examine(folder))      # a line more, if the run records (record.enabled)

A recording has a step's inputs before its forward (lockstep.recording.writer): they are `pending` until it is
done. Loads no torch, as `lockstep hang` does not.
"""

from __future__ import annotations

import re
import shlex
import struct
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.errors import DataError
from lockstep.observe.files import JSON_BYTES, open_plain, parse_json
from lockstep.ranks.hang import HangReport, RankState

_FOLDER = "recordings"
_OPEN = re.compile(r"open-\d{6,12}\.safetensors")
_LENGTH = struct.Struct("<Q")
"""Before the JSON with which a file of safetensors begins."""
_LOOKED_AT = 8
"""Of the newest files of a rank: those behind the step of the hang are of a rank that went on."""


def name_recording(report: HangReport) -> HangReport:
    """Return the report with a line about what to replay, if the inputs of ranks that are in a step are
    recorded; of the ranks to blame, where they are."""
    waiting = {each.rank: found for each in report.ranks if (found := _pending(each)) is not None}
    blamed = [rank for rank in report.culprits if rank in waiting] or list(waiting)
    if not blamed:
        return report
    run, step, micro_batch = waiting[blamed[0]]
    which = f"micro-batch {micro_batch} of " if micro_batch is not None else ""
    where = run / _FOLDER
    line = (
        f"the inputs of rank {blamed[0]}, {which}step {step}, are in {where}; to run them again: lockstep "
        f"replay {shlex.quote(str(run))} --steps {step}:{step + 1}"
    )
    return replace(report, lines=(*report.lines, line))


def _pending(each: RankState) -> tuple[Path, int, int | None] | None:
    """The run, the step and the micro-batch in which a rank is, if its inputs are recorded and not done."""
    step = each.flight.heartbeat.get("step")
    run = next((above for above in each.flight.path.parents[:4] if (above / _FOLDER).is_dir()), None)
    if run is None or step is None:
        return None
    of_step = [meta for meta in _newest(run / _FOLDER / f"rank-{each.rank:04d}") if meta.get("step") == step]
    pending = [meta.get("micro_batch") for meta in of_step if meta.get("outcome") == "pending"]
    if not pending:
        return None
    now = each.flight.heartbeat.get("micro_batch")
    return run, step, now if now in pending else None


def _newest(folder: Path) -> Iterator[Mapping[str, Any]]:
    """What the newest files say of their inputs."""
    files = sorted((path for path in folder.glob("open-*") if _OPEN.fullmatch(path.name)), reverse=True)
    for path in files[:_LOOKED_AT]:
        try:
            yield from _metas(path)
        except DataError:  # it went into a shard meanwhile, or is damaged: `lockstep recording` says how
            continue


def _metas(path: Path) -> list[Mapping[str, Any]]:
    with open_plain(path, DataError, root=path.parent) as file:
        head = file.read(_LENGTH.size)
        length = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else 0
        data = file.read(min(length, JSON_BYTES))
    header = parse_json(data, str(path), DataError)
    about = header.get("__metadata__") if isinstance(header, dict) else None
    text = about.get("inputs", "[]") if isinstance(about, dict) else "[]"
    inputs = parse_json(str(text).encode(), str(path), DataError)
    metas = (
        [entry.get("meta") for entry in inputs if isinstance(entry, dict)] if isinstance(inputs, list) else []
    )
    return [meta for meta in metas if isinstance(meta, dict)]
