from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from lockstep.config.base import Config


class DataConfig(Config):
    """One prompt set or SFT set."""

    source: str = "reasoning_gym:chain_sum"
    """A .jsonl/.json/.parquet file, a folder saved by `datasets`, a hub name, `reasoning_gym:TASK`, or
    `ids` (the
    id-level source for models without a tokenizer)."""
    subset: str | None = None
    split: str = "train"
    task: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the reasoning_gym task."""
    size: PositiveInt | None = None
    """Rows to generate (reasoning_gym, ids) or at most to use (files)."""
    skip: NonNegativeInt = 0
    """Rows to leave out at the beginning."""
    seed: int = 1
    prompt_column: str = "prompt"
    """Text, or a list of {role, content} messages."""
    messages_column: str = "messages"
    """SFT: a whole conversation; used when the rows have it."""
    completion_column: str = "completion"
    """SFT: the answer to train on, when there are no messages."""
    answer_column: str = "answer"
    columns: dict[str, str] = Field(default_factory=dict)
    """Renames: {new name = name in the data}."""
    system_prompt: str | None = None
    prompt_template: str = "{prompt}"
    """Wraps the user's text; `{prompt}` and any column name may stand in it."""
    chat_template: Literal["auto", "none"] | str = "auto"
    """auto: the tokenizer's template when it has one; none: plain text; or a jinja template (or a .jinja
    file)."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Passed to the template, such as {enable_thinking = false}."""
    max_prompt_tokens: PositiveInt = 1024
    overlong_prompts: Literal["error", "drop", "truncate_left"] = "error"
    """What happens to a longer prompt; drops and truncations are counted and reported."""
    max_length: PositiveInt = 2048
    """SFT: tokens of one document; longer ones follow `overlong_documents`."""
    overlong_documents: Literal["error", "drop", "truncate"] = "truncate"
    train_on: Literal["assistant", "all"] = "assistant"
    """SFT: which tokens carry loss."""
    shuffle: bool = True
    exclude: str | None = None
    """Another source of the same kind whose prompts (by text) are left out; the loop sets it for held-out
    data."""
