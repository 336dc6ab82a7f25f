from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from lockstep.config.base import Config, Name, NonNegativeInt, PositiveInt, Seed, check
from lockstep.errors import ConfigError


class DataConfig(Config):
    """The prompts of an RL run, or the documents of an SFT, DPO or reward model run."""

    source: Name = "reasoning_gym:chain_sum"
    """A .jsonl, .json or .parquet file, a folder saved by `datasets`, a hub name, `module:function` (a Python
    function that returns a list of rows), `reasoning_gym:TASK`, or `ids` (generated token ids, for models
    without a tokenizer)."""
    subset: Name | None = None
    """Subset of a hub data set."""
    split: Name = "train"
    """Split of a hub data set or a saved folder."""
    task: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the reasoning_gym task. For ids: vocab_size (default: the model's), min_tokens
    (4), max_tokens (16)."""
    size: PositiveInt | None = None
    """Number of rows to generate (reasoning_gym, ids), or maximum number of rows to use (files). By default,
    generated sources are endless and files are used whole. If size is set, no two generated rows have the
    same question."""
    skip: NonNegativeInt = 0
    """Number of rows to skip at the beginning."""
    seed: Seed = 1
    """Seed for generated rows."""
    prompt_column: str = "prompt"
    """Column with the prompt, as text or as a list of {role, content} messages. For reasoning_gym rows,
    `question` is used automatically."""
    messages_column: str = "messages"
    """SFT: column with a whole conversation, used if it exists. RL: column with the conversation that the
    policy continues, used if there is no prompt_column."""
    completion_column: str = "completion"
    """SFT: column with the answer to train on, for rows without messages."""
    chosen_column: str = "chosen"
    """Pairs: column with the better answer, as text or as a list of messages. If the rows have no
    prompt_column, the answer includes the prompt."""
    rejected_column: str = "rejected"
    """Pairs: column with the worse answer, in the same form."""
    margin_column: str = "margin"
    """Reward models: column with the margin, a number >= 0 by which the chosen answer's score should exceed
    the other score. The margin is 0 if the rows have no such column."""
    label_column: str = "label"
    """KTO: column that says whether the completion is desirable: true or false, 1 or 0."""
    equal_answers: Literal["error", "drop"] = "error"
    """DPO: what to do with a pair whose two answers have the same token ids, so that neither can be
    preferred."""
    text_column: str = "text"
    """SFT: column with plain text, for rows without messages and completion; every token is trained on."""
    answer_column: str = "answer"
    """Column that is passed to rewards as `answer`. In GSM8K's format, "... #### 42", the part after #### is
    the answer."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Columns to rename: {new name = name in the data}."""
    system_prompt: str | None = None
    """System message for conversations without one."""
    prompt_template: str = "{prompt}"
    """Template for the user's (last) message. The template may contain `{prompt}` and any column name; write
    `{{` and `}}` for literal braces."""
    chat_template: Literal["auto", "none"] | str = "auto"
    """A jinja template, the path of a .jinja file, or one of these words: auto (the tokenizer's template if
    it has one) or none (plain text)."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments that are passed to the template, such as {enable_thinking = false}."""
    max_prompt_tokens: PositiveInt = 1024
    """Maximum length of a prompt in tokens, including the chat template; `overlong_prompts` says what to do
    with longer prompts."""
    overlong_prompts: Literal["error", "drop", "truncate_left"] = "error"
    """What to do with a prompt longer than max_prompt_tokens. Dropped and truncated prompts are counted and
    reported."""
    max_length: PositiveInt = 2048
    """Maximum length of a document (SFT) or of prompt and answer (pairs), in tokens; `overlong_documents`
    says what to do with longer ones."""
    overlong_documents: Literal["error", "drop", "truncate"] = "truncate"
    """What to do with a document longer than max_length. Dropped and truncated documents are counted.
    truncate keeps the beginning; for a reward model it keeps the end, where the document is scored."""
    untrained_documents: Literal["error", "drop"] = "error"
    """SFT: what to do with a document that has no tokens to train on, for example after truncation."""
    train_on: Literal["assistant", "last", "all"] = "assistant"
    """Tokens that the loss covers. assistant: every assistant turn (after the prompt, if the row has a
    separate one); last: only the last assistant turn; all: every token (SFT)."""
    shuffle: bool = True
    """Shuffle the rows in every epoch, using the run's seed."""
    exclude: Name | None = None
    """Leave out prompts whose text occurs in this other file, folder or hub data set, which must have the
    same columns. Held-out prompts are always left out of training."""

    on_bad_row: Literal["fail", "skip"] = "fail"
    """What to do with a row at fault: malformed, without a column, too long under `error`, without an answer.
    Skipped rows are counted and named in the run's manifest. The first 1,000 rows are looked at before a
    model is loaded, the others when they come near, or all by `lockstep data check`."""
    workers: NonNegativeInt = 1
    """Threads that read, render and tokenise the rows of the next steps; 0: the loop does it, step by step.
    The order of the rows does not depend on it."""
    prefetch: PositiveInt = 8
    """Steps whose rows the workers make ahead."""

    streaming: bool = False
    """Read the source from its beginning on (.jsonl, .parquet, hub data sets), without an index and without
    downloading all of it. Rows are shuffled within windows of shuffle_buffer."""
    shuffle_buffer: PositiveInt = 10_000
    """With streaming: number of rows that are kept in memory and shuffled together."""

    @property
    def generated(self) -> bool:
        """Whether the source generates its rows."""
        return self.source == "ids" or self.source.startswith("reasoning_gym:")

    @check
    def _check(self) -> DataConfig:
        """Refuse a setting that this kind of source does not read. (subset and split of a file are let
        through: a recipe for a hub set then runs on a local copy by changing its source alone.)"""
        unread = {"task": bool(self.task)}
        if not self.streaming:
            unread["shuffle_buffer"] = (
                self.shuffle_buffer != type(self).model_fields["shuffle_buffer"].default
            )
        if self.generated:
            unread = {
                "subset": self.subset is not None,
                "split": self.split != "train",
                "columns": bool(self.columns),
                "answer_column": self.answer_column != "answer",
                "streaming": self.streaming,
            }
        for name, is_set in unread.items():
            if is_set:
                raise ConfigError(
                    f"no-effect: data.{name} = {getattr(self, name)!r} has no effect with source = "
                    f"{self.source!r}; leave it out",
                    setting=name,
                )
        return self
