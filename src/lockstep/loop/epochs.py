"""`epochs`, resolved once: the steps of as many passes over the rows of a run's data."""

from __future__ import annotations

import math
from typing import TypeVar, cast

from lockstep.config.load import override
from lockstep.config.run import GRPORun, OfflineRun, RunConfig
from lockstep.data.held_out import evaluates, held_out_size, holds_out_rows
from lockstep.data.sources import Source
from lockstep.errors import ConfigError, DataError
from lockstep.observe.text import echo
from lockstep.ranks.environment import in_launcher

AnyRun = TypeVar("AnyRun", bound=RunConfig)


def with_steps(run: AnyRun) -> AnyRun:
    """Return the run with `steps` in place of `epochs`, and say how many; a run without epochs as it is. Rows
    that turn out to be too long or at fault are counted, too: they are found later.

    Raises:
        ConfigError: the data has no end, or nobody knows it beforehand.
        DataError: the data cannot be read.

    Example:
        >>> with_steps(load_run(kind="sft", overrides={"epochs": 3, "data.source": "1000_rows.jsonl"})).steps
        94
    """
    if run.epochs is None:
        return run
    items, per_step, setting = _items(run)
    steps = max(1, math.ceil(round(run.epochs * items / per_step, 6)))  # 1.1 * 100 / 10 is 11.000000000000002
    if not in_launcher():
        echo(f"epochs {run.epochs:g} -> steps {steps}: {items} {setting[0]}, {setting[1]} = {per_step}")
    same_kind = override(run, {"steps": steps, "epochs": None}, origin=f"epochs = {run.epochs:g}")
    return cast(AnyRun, same_kind)


def _items(run: RunConfig) -> tuple[int, int, tuple[str, str]]:
    """The items of one pass, those of a step, and how both are called."""
    rows, first = _rows(run)
    if run.online:
        online = cast(GRPORun, run)
        held_out = held_out_size(online, rows) if evaluates(online) and holds_out_rows(online) else 0
        return rows - held_out, online.rollout.prompts_per_step, ("prompts", "rollout.prompts_per_step")
    offline = cast(OfflineRun, run)
    items = rows * offline.documents_of(first)
    return items, offline.batch_size, (offline.documents_name, "batch_size")


def _rows(run: RunConfig) -> tuple[int, dict[str, object] | None]:
    """The number of rows, and the first one."""
    data = run.data
    if data.generated:
        if data.size is not None:
            return data.size, None
        why = "generates rows without end; set data.size"
    elif data.streaming:
        why = "is streamed, so its number of rows is not known"
    else:
        source = Source(data)
        head = source.head(1)
        return len(source), None if not head or isinstance(head[0], DataError) else head[0]
    raise ConfigError(
        f"missing-setting: epochs = {run.epochs:g}, but data.source = {data.source!r} {why}, or set steps "
        "instead of epochs",
        setting="steps",
    )
