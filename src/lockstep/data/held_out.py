"""Held-out prompts, and training prompts without them."""

from __future__ import annotations

from typing import Any

from lockstep.config.data import DataConfig
from lockstep.config.run import GRPORun
from lockstep.data.prompts import FixedPrompts, PromptMaker, PromptSet, load_prompts
from lockstep.errors import ConfigError, DataError

_SEED_STEP = 1_000_003


def held_out_config(run: GRPORun) -> DataConfig:
    """Return the config of a run's held-out prompts.

    `eval_data` when it is set. Else, generated data: the same task under another seed. Files with
    `data.size`: the rows after the training rows. Files without: the first `eval.num_prompts` rows, which
    training then leaves out.
    """
    if run.eval_data is not None:
        config = run.eval_data
        return config if config.size is not None else _with(config, size=run.eval.num_prompts, shuffle=False)
    data = run.data
    if data.generated:
        return _with(data, size=run.eval.num_prompts, skip=0, seed=data.seed + _SEED_STEP, shuffle=False)
    after = data.skip + (data.size or 0)
    return _with(data, size=run.eval.num_prompts, skip=after, shuffle=False)


def evaluates(run: GRPORun) -> bool:
    """Return whether the run has an evaluation, which needs held-out prompts."""
    return run.eval.before or run.eval.after or run.eval.every > 0


def load_train_and_held_out(
    run: GRPORun, *, tokenizer: Any, vocab_size: int | None = None, hold_out: bool = True
) -> tuple[PromptSet, FixedPrompts]:
    """Load (training prompts, held-out prompts); no held-out text, rendered or not, occurs in training.

    Args:
        hold_out: False: nothing is left out of training, and the second set is empty.

    Raises:
        DataError: as load_prompts; also when no rows are left to hold out, or training has too few prompts
            for a rollout batch.
    """
    held_out = _held_out(run, tokenizer=tokenizer, vocab_size=vocab_size) if hold_out else None
    exclude = frozenset() if held_out is None else held_out.texts
    train = load_prompts(run.data, tokenizer=tokenizer, exclude=exclude, vocab_size=vocab_size)
    if train.size is not None and train.size < run.rollout.prompts_per_step:
        raise DataError(
            f"rollout.prompts_per_step = {run.rollout.prompts_per_step}, but data.source = "
            f"{run.data.source!r} has only {train.size} prompts to train on ({train.report}); lower "
            "rollout.prompts_per_step, or give more data (prompts of evaluations are left out, see "
            "eval_data)",
            code="not-enough",
            setting="rollout.prompts_per_step",
        )
    if held_out is None:
        held_out = FixedPrompts((), shuffle=False, maker=PromptMaker(run.data, tokenizer, ()))
    return train, held_out


def _held_out(run: GRPORun, *, tokenizer: Any, vocab_size: int | None) -> FixedPrompts:
    config = held_out_config(run)
    try:
        held_out = load_prompts(config, tokenizer=tokenizer, vocab_size=vocab_size)
    except DataError as error:
        raise DataError(f"held-out prompts (eval_data): {error}", **error.data) from error
    if not isinstance(held_out, FixedPrompts):
        raise ConfigError(
            f"eval_data.source = {config.source!r} is endless; set eval_data.size",
            code="endless",
            setting="eval_data.size",
        )
    return held_out


def _with(config: DataConfig, **changes: Any) -> DataConfig:
    return config.model_copy(update=changes)
