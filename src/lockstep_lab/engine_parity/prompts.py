"""The prompts that engines are compared on: from data, and long ones made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lockstep.config.data import DataConfig
from lockstep.config.load import check, find, load_run, recipes
from lockstep.config.model import ModelConfig
from lockstep.errors import ConfigError
from lockstep_lab.engine_parity.stats import CACHE_BLOCK

if TYPE_CHECKING:
    from lockstep.data.prompts import PromptSet

LONG_TOKENS = 2 * CACHE_BLOCK + 44
"""Tokens of a long prompt: two whole cache blocks and a part of a third."""
_SHARED = CACHE_BLOCK + 32
"""Tokens that all long prompts begin with, as a system prompt does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompts:
    """The prompts that every engine gets."""

    ids: tuple[tuple[int, ...], ...]
    """Short ones first."""
    source: str
    """A description of where the prompts come from."""
    notes: tuple[str, ...] = ()


def read_data(name: str | None, *, model: str) -> DataConfig:
    """Resolve `--data`: a recipe or TOML file whose [data] is taken, or a data.source.

    Raises:
        ConfigError: the file is no run.
    """
    if name is None:
        return DataConfig(source="ids") if model.startswith("shape:") else DataConfig()
    if name in recipes() or name.endswith(".toml"):
        run = load_run(find(name))
        data = getattr(run, "data", None)
        if not isinstance(data, DataConfig):
            raise ConfigError(
                f"missing-setting: --data {name}: the recipe has no [data]; give one that has it, or a file"
            )
        return data
    return check({"source": name}, DataConfig, origin="--data")


def make_prompts(
    model: ModelConfig, data: DataConfig, *, max_prompts: int, max_tokens: int, seed: int
) -> Prompts:
    """Make `max_prompts` prompts, the second half of them longer than a cache block.

    Raises:
        ConfigError: the model has no room for a long prompt and max_tokens.
        DataError, ModelError: the data or the tokenizer cannot be read.
    """
    import torch

    from lockstep.data.prompts import load_prompts
    from lockstep.models.architectures import max_positions, text_config
    from lockstep.models.load import load_tokenizer, meta_module

    tokenizer = load_tokenizer(model)
    text = text_config(meta_module(model, dtype=torch.bfloat16))
    positions = max_positions(text)
    room = positions - max_tokens
    if room <= CACHE_BLOCK:
        raise ConfigError(
            f"too-long: {model.name} has {positions} positions: with --max-tokens {max_tokens} a prompt "
            f"longer than a cache block ({CACHE_BLOCK} tokens) does not fit; lower --max-tokens"
        )
    prompts = load_prompts(data, tokenizer=tokenizer, vocab_size=int(text.vocab_size))
    drawn = _take(prompts, max_prompts, seed=seed)
    short = [ids for ids in drawn if len(ids) <= room]
    if not short:
        raise ConfigError(
            f"nothing-left: every prompt of {data.source} is longer than the {room} tokens that "
            f"{model.name} has room for",
            setting="--data",
        )
    notes = [] if len(short) == len(drawn) else [f"{len(drawn) - len(short)} prompts were too long"]
    count = max_prompts // 2
    originals = short[: max_prompts - count]
    if len(originals) < max_prompts - count:
        notes.append(f"{data.source} has {len(originals)} different prompts only")
    length = min(LONG_TOKENS, room)
    long = long_prompts(short, count, length=length)
    return Prompts(
        ids=tuple(originals) + tuple(long),
        source=f"{data.source}, {len(originals)} prompts as they are and {count} of {length} tokens",
        notes=tuple(notes),
    )


def long_prompts(prompts: Sequence[tuple[int, ...]], count: int, *, length: int) -> list[tuple[int, ...]]:
    """Make prompts of `length` tokens that all begin with the same tokens and then differ.

    Each is made of whole prompts in a row, so that its text is one that the model may have seen.
    """
    shared = _repeat(prompts, min(_SHARED, length // 2))
    longer = []
    for index in range(count):
        turned = [*prompts[index % len(prompts) :], *prompts[: index % len(prompts)]]
        # where there are few prompts, a later round of them is moved on by one token
        own = _repeat(turned, length + index)[index // len(prompts) :]
        longer.append((*shared, *own)[:length])
    return longer


def _repeat(prompts: Sequence[tuple[int, ...]], length: int) -> tuple[int, ...]:
    repeated: list[int] = []
    while len(repeated) < length:
        for ids in prompts:
            repeated += ids
    return tuple(repeated[:length])


def _take(prompts: PromptSet, count: int, *, seed: int) -> list[tuple[int, ...]]:
    """Take at most `count` different prompts."""
    size = prompts.size
    number = count if size is None else min(count, size)
    rows = [prompt.token_ids for prompt in prompts.batch(0, number, seed)]
    return list(dict.fromkeys(rows))
