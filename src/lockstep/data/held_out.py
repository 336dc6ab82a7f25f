"""Held-out prompts, and training prompts without them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

from lockstep.config.data import DataConfig
from lockstep.config.run import GRPORun
from lockstep.data.lazy import LazyItems
from lockstep.data.prompts import FixedPrompts, PromptMaker, PromptSet, load_prompts
from lockstep.data.row_tools import RowTools
from lockstep.data.rows import FIRST_ROWS
from lockstep.data.sources import Source
from lockstep.errors import ConfigError, DataError
from lockstep.observe.text import counted

_SEED_STEP = 1_000_003
WINDOW = 20
"""Rows for each one that is held out: it is chosen among the first ones, so that no more are read at a start,
and rows that are appended to a file later change nothing."""

HoldOut = Literal["hash", "first"]
"""The rows held out of a file without `data.size`: those with the smallest hashes, or, as in runs of
earlier versions, the first ones."""


def held_out_config(run: GRPORun) -> DataConfig:
    """Return the config of a run's held-out prompts.

    `eval_data` when it is set. Else, generated data: the same task under another seed. Files with
    `data.size`: the rows after the training rows. Files without: `eval.num_prompts` of the first rows, which
    training then leaves out, see `HoldOut`; fewer of a small file, see `held_out_size`.
    """
    if run.eval_data is not None:
        config = run.eval_data
        return config if config.size is not None else _with(config, size=run.eval.num_prompts, shuffle=False)
    data = run.data
    if data.generated:
        return _with(data, size=run.eval.num_prompts, skip=0, seed=data.seed + _SEED_STEP, shuffle=False)
    after = data.skip + (data.size or 0)
    return _with(data, size=run.eval.num_prompts, skip=after, shuffle=False)


def held_out_size(run: GRPORun, rows: int) -> int:
    """Return how many of the `rows` rows of a file or set without `data.size` are held out:
    `eval.num_prompts`; where that is more than half of them a fifth, so that most are trained on.

    Args:
        rows: that there are; more than `needed_rows` need not be counted.

    Raises:
        ConfigError: the rows are too few for a rollout batch and an evaluation.
    """
    wanted, batch, what = run.eval.num_prompts, run.rollout.prompts_per_step, counted(rows, "row")
    held_out = wanted if wanted <= rows // 2 else min(max(rows // 5, 1), max(rows - batch, 1))
    if rows - held_out >= batch:
        return held_out
    fixes = []
    if rows > held_out:
        fixes.append(f"lower rollout.prompts_per_step to {rows - held_out}")
        verb = "is" if held_out == 1 else "are"
        what += f", {held_out} of which {verb} held out for evaluations (eval.num_prompts = {wanted})"
    if rows > batch:
        fixes.append(f"lower eval.num_prompts to {rows - batch}")
    if rows >= batch:
        fixes.append("set eval_data.source")
        fixes.append("turn evaluations off (eval.before = false, eval.after = false, eval.every = 0)")
    raise ConfigError(
        f"not-enough: rollout.prompts_per_step = {batch} is more than data.source = {run.data.source!r} has "
        f"to train on: {what}; {', '.join([*fixes, 'or give more data']) if fixes else 'give more data'}"
    )


def needed_rows(run: GRPORun) -> int:
    """Return up to how many rows `held_out_size` wants counted."""
    return max(2 * run.eval.num_prompts, run.eval.num_prompts + run.rollout.prompts_per_step)


def holds_out_rows(run: GRPORun) -> bool:
    """Return whether the held-out prompts are rows of the training set's own source, without a `data.size`
    that tells them apart."""
    return run.eval_data is None and not run.data.generated and run.data.size is None


def evaluates(run: GRPORun) -> bool:
    """Return whether the run has an evaluation, which needs held-out prompts."""
    return run.eval.before or run.eval.after or run.eval.every > 0


def holds_out(run: GRPORun, manifest: Mapping[str, Any]) -> HoldOut | None:
    """Return how prompts are held out of training; None: not at all. This is decided when the run is started:
    evaluations may be turned on and off on resume, and the training data must stay the same."""
    # Runs of earlier versions held the first rows out, at first always; one that failed early has not
    # decided.
    new: HoldOut | None = "hash" if evaluates(run) else None
    found = manifest.get("held_out", "first" if "axes" in manifest else new)
    return "first" if found is True else found or None


def load_train_and_held_out(
    run: GRPORun,
    *,
    tokenizer: Any,
    vocab_size: int | None = None,
    hold_out: HoldOut | None = "hash",
    tools: RowTools | None = None,
) -> tuple[PromptSet, FixedPrompts]:
    """Load (training prompts, held-out prompts); no held-out text, rendered or not, occurs in training.

    Args:
        hold_out: None: nothing is left out of training, and the second set is empty.
        tools: see PromptMaker.

    Raises:
        DataError: as load_prompts; also when no rows are left to hold out, or training has too few prompts
            for a rollout batch.
    """
    load = partial(load_prompts, tokenizer=tokenizer, vocab_size=vocab_size, tools=tools)
    held_out = _held_out(run, hold_out, load=load) if hold_out else None
    exclude = frozenset() if held_out is None else held_out.texts
    train = load(run.data, exclude=exclude)
    if train.size is not None and train.size < run.rollout.prompts_per_step:
        raise DataError(
            f"not-enough: rollout.prompts_per_step = {run.rollout.prompts_per_step}, but data.source = "
            f"{run.data.source!r} has only {train.size} prompts to train on ({train.report}); lower "
            "rollout.prompts_per_step, or give more data (prompts of evaluations are left out, see eval_data)"
        )
    if held_out is None:
        held_out = FixedPrompts(LazyItems.of((), shuffle=False), maker=PromptMaker(run.data, tokenizer, ()))
    return train, held_out


def _held_out(run: GRPORun, hold_out: HoldOut, *, load: Callable[..., PromptSet]) -> FixedPrompts:
    config, rows = held_out_config(run), None
    if holds_out_rows(run):
        source = Source(run.data)
        size = held_out_size(run, len(source.head(needed_rows(run))))
        if hold_out == "hash":
            config, rows = _with(config, size=None), _of_smallest_hash(source, size)
        else:
            config = _with(config, size=size)
    try:
        held_out = load(config, rows=rows)
        held_out.make_all()  # each evaluation is on all of them
    except DataError as error:
        raise error.with_message(f"held-out prompts (eval_data): {error}") from error
    if not isinstance(held_out, FixedPrompts):
        raise ConfigError(f"endless: eval_data.source = {config.source!r} is endless; set eval_data.size")
    return held_out


def _of_smallest_hash(source: Source, count: int) -> list[int]:
    """The numbers of the held-out rows, in the order of the source. A row at fault is none of them."""
    rows = source.head(max(WINDOW * count, FIRST_ROWS))
    hashes = [
        (_content_hash(row), number) for number, row in enumerate(rows) if not isinstance(row, DataError)
    ]
    return sorted(number for _, number in sorted(hashes)[:count])


def _content_hash(row: Mapping[str, Any]) -> bytes:
    text = json.dumps(row, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _with(config: DataConfig, **changes: Any) -> DataConfig:
    return config.model_copy(update=changes)
