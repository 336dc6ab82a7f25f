"""Prompt sets: rows rendered and tokenised, and batches of them as a pure function of (step, n, seed).

`FixedPrompts` holds a known number of prompts (files, hub sets, generated sets with a `size`); its batches
are epoch shuffles. `PromptStream` generates prompts without end (sources without a `size`): slot `step * n +
j` of the stream of `seed` is prompt j of batch `step`. Neither has a state to save.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.config.data import DataConfig
from lockstep.config.run import GRPORun
from lockstep.data.chat import ChatFormat, Message, check_text, clean_messages, fill_template
from lockstep.data.rows import BATCH_ROWS, IdRows, ReasoningGymRows, RowGenerator, place
from lockstep.data.sources import batch_rows, load_rows, missing_column, named_columns, rows_of
from lockstep.errors import ConfigError, DataError, LockstepError
from lockstep.observe.chat_template import check_known, kept_at_end
from lockstep.observe.template_renderer import RenderJob, checked, render_chats
from lockstep.schema.rollout import Prompt

MAX_ATTEMPTS = 1000
"""Rows tried for one slot of a generated source before it counts as exhausted."""
DISTINCT_ATTEMPTS = 64
"""Rows tried for one slot of a stream before a batch may hold a question twice (tasks with few questions)."""


class PromptSet(ABC):
    """A set of prompts, indexed by number and by batch."""

    @abstractmethod
    def __getitem__(self, index: int) -> Prompt:
        """Prompt number `index`."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of prompts; TypeError for an endless stream (`size` is None there)."""

    @property
    @abstractmethod
    def size(self) -> int | None:
        """Number of prompts; None: endless."""

    @abstractmethod
    def batch(self, step: int, n: int, seed: int) -> list[Prompt]:
        """The n prompts of batch `step` (from 0): a pure function of its arguments; no index occurs twice in
        a batch."""

    @property
    @abstractmethod
    def fingerprint(self) -> str | None:
        """Hash of all prompts, by which a resumed run recognises its data; None: endless."""

    @property
    @abstractmethod
    def report(self) -> dict[str, int]:
        """Counts: excluded, dropped_overlong, truncated; for a stream, of the rows generated so far."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What to say of the rows at the start, one sentence each."""
        return ()

    def __bool__(self) -> bool:
        return True


@dataclass(kw_only=True, slots=True)
class _Draft:
    """A row whose prompt is not finished."""

    row: Mapping[str, Any]
    index: int
    where: str
    problem: str
    talk: str | list[Message] | None = None
    job: RenderJob | None = None
    """The rendering of `talk`. None if `talk` is the text itself."""
    text: str = ""
    ids: list[int] = field(default_factory=list)


class PromptMaker:
    """Turns rows into Prompts according to one DataConfig, and counts those that it left out."""

    def __init__(
        self,
        config: DataConfig,
        tokenizer: Any,
        exclude: Collection[str],
        *,
        vocab_size: int | None = None,
    ) -> None:
        self.config = config
        self.vocab_size = vocab_size
        self.exclude = frozenset(_normal(text) for text in exclude)
        self.ids_only = config.source == "ids"
        if tokenizer is None and not self.ids_only:
            raise ConfigError(
                f"no-tokenizer: data.source = {config.source!r} is text, but the model has no tokenizer "
                "(shape: models have none); set data.source = 'ids' with rewards = [{name = 'ids'}], or "
                "choose a model with a tokenizer"
            )
        self.chat = None if self.ids_only else ChatFormat(config, tokenizer)
        # Keyed by row, so that looking at a row twice does not count it twice.
        self._left_out: dict[object, str] = {}

    @property
    def notes(self) -> tuple[str, ...]:
        """See PromptSet.notes."""
        return () if self.chat is None else self.chat.notes

    @property
    def report(self) -> dict[str, int]:
        """See PromptSet.report."""
        counts = Counter(self._left_out.values())
        return {name: counts[name] for name in ("excluded", "dropped_overlong", "truncated")}

    def make(self, row: Mapping[str, Any], *, index: int, key: object) -> Prompt | None:
        """Return the prompt of a row; None when it is excluded, or overlong and to be dropped.

        Raises:
            DataError: a column is missing, the messages are malformed, or the prompt is too long under
                `error`.
        """
        (prompt,) = self.make_all([row], first=index, keys=[key])
        return prompt

    def make_all(
        self, rows: Sequence[Mapping[str, Any]], *, first: int, keys: Iterable[object] | None = None
    ) -> Iterator[Prompt | None]:
        """Yield the prompt of each row, see `make`. The rows share one exchange with the process that renders
        templates and one call of the tokenizer.

        Args:
            first: index of the first row.
            keys: one per row, for the counts of `report`. If None, the indices.

        Raises:
            DataError: as `make`, after the prompts of the rows before.
        """
        failure: LockstepError | None = None
        drafts: list[_Draft] = []
        for index, row in enumerate(rows, first):
            try:
                drafts.append(self._draft(row, index))
            except (ConfigError, DataError) as error:
                failure = error
                break
        if self.chat is not None:
            failure = self._render(drafts, self.chat) or failure
            ids = self.chat.encode_all([draft.text for draft in drafts])
            for draft, of_text in zip(drafts, ids, strict=True):
                draft.ids = of_text
        for draft, key in zip(drafts, keys or itertools.count(first), strict=False):
            yield self._prompt(draft, key)
        if failure is not None:
            raise failure

    def _draft(self, row: Mapping[str, Any], index: int) -> _Draft:
        where = place(row, self.config.source, index)
        if self.chat is None:
            ids = [int(i) for i in row["token_ids"]]
            text = " ".join(map(str, ids))
            return _Draft(row=row, index=index, where=where, problem=text, text=text, ids=ids)
        problem, talk = self.conversation(row, where)
        draft = _Draft(row=row, index=index, where=where, problem=problem, talk=talk)
        chat = self.chat.for_row(row, where=where)
        if isinstance(talk, str):
            draft.text = talk
        else:
            draft.job = chat.job(talk, generate=True, where=where)
        return draft

    def _render(self, drafts: list[_Draft], chat: ChatFormat) -> DataError | None:
        """Set the text of each draft. If one cannot be rendered or encoded, remove it and the drafts after it
        from the list and return its error."""
        jobs = [draft.job for draft in drafts if draft.job is not None]
        results = render_chats(chat.tokenizer, jobs)
        for number, draft in enumerate(drafts):
            try:
                if draft.job is not None:
                    draft.text = checked(next(results)).text
                check_text(draft.text, draft.where)
            except DataError as error:
                del drafts[number:]
                return error
        return None

    def _prompt(self, draft: _Draft, key: object) -> Prompt | None:
        ids, text, where = draft.ids, draft.text, draft.where
        if self.exclude and (_normal(draft.problem) in self.exclude or _normal(text) in self.exclude):
            self._left_out[key] = "excluded"
            return None
        if len(ids) > self.config.max_prompt_tokens:
            kept = self._shorten(ids, where=where, key=key)
            if kept is None:
                return None
            ids = kept
            text = self.chat.tokenizer.decode(ids) if self.chat else " ".join(map(str, ids))
        if not ids:
            raise DataError(
                f"empty: {where}: the prompt is empty (no tokens); fill column {self.config.prompt_column!r}"
            )
        if self.vocab_size is not None and self.chat is not None:
            tokenizer = self.chat.tokenizer
            check_known(ids, self.vocab_size, tokenizer=tokenizer, model="the model", where=where)
        return Prompt(
            index=draft.index,
            token_ids=tuple(ids),
            text=text,
            row={**draft.row, "problem": draft.problem},
            conversation=draft.talk,
            where=where,
        )

    def conversation(self, row: Mapping[str, Any], where: str) -> tuple[str, str | list[Message]]:
        """Return (problem text, input of the chat template): messages with the system prompt, or plain text
        where no chat template applies. The problem text identifies a question regardless of the template.

        Raises:
            DataError: a column is missing, or the messages are malformed.
        """
        chat = self.chat
        assert chat is not None, "an id-level source has no texts"
        value = self._prompt_value(row, where)
        if isinstance(value, str):
            content = fill_template(self.config.prompt_template, {**row, "prompt": value}, where=where)
            if chat.template is None:
                return value, content
            return value, chat.with_system([{"role": "user", "content": content}])
        if not isinstance(value, Sequence):
            raise DataError(
                f"wrong-row: {where}: the prompt is {str(value)[:80]!r} ({type(value).__name__}), neither "
                "text nor a list of messages; correct or remove the row"
            )
        messages = clean_messages(value, where=where)
        if messages[-1]["role"] == "assistant":
            raise DataError(
                f"wrong-row: {where}: the prompt's last message is the assistant's; end it with a user turn "
                "(the policy answers)"
            )
        problem = "\n".join(m["content"] for m in messages if m["role"] != "system")
        last = messages[-1]
        filled = fill_template(self.config.prompt_template, {**row, "prompt": last["content"]}, where=where)
        messages = chat.with_system([*messages[:-1], {**last, "content": filled}])
        if chat.template is None:
            return problem, chat.render(messages, generate=True, where=where)
        return problem, messages

    def _prompt_value(self, row: Mapping[str, Any], where: str) -> Any:
        config, forms = self.config, ("prompt_column", "messages_column")
        named = [form for form in forms if form in named_columns(config)]
        found = [row[column] for form in named or forms if (column := getattr(config, form)) in row]
        if found:  # in Parquet a row has each column, and null in those that it did not have
            return next((value for value in found if value is not None), found[0])
        if config.source.startswith("reasoning_gym:") and named != ["prompt_column"]:
            return row["question"]
        form = (named or forms)[0]
        raise missing_column(getattr(config, form), row, setting=f"data.{form}", source=where)

    def _shorten(self, ids: list[int], *, where: str, key: object) -> list[int] | None:
        limit = self.config.max_prompt_tokens
        if self.config.overlong_prompts == "error":
            raise DataError(
                f"too-long: {where}: the prompt has {len(ids)} tokens, data.max_prompt_tokens = {limit}; "
                "raise it, or set data.overlong_prompts = 'drop' or 'truncate_left'"
            )
        if self.config.overlong_prompts == "drop":
            self._left_out[key] = "dropped_overlong"
            return None
        self._left_out[key] = "truncated"
        if self.chat is None:
            return ids[-limit:]
        first, rest = kept_at_end(ids, limit, tokenizer=self.chat.tokenizer, template=self.chat.template)
        return ids[:first] + ids[rest:]


class FixedPrompts(PromptSet):
    """A known number of prompts."""

    def __init__(self, prompts: Iterable[Prompt], *, shuffle: bool, maker: PromptMaker) -> None:
        self._prompts = tuple(prompts)
        self._shuffle = shuffle
        self._maker = maker

    def __getitem__(self, index: int) -> Prompt:
        return self._prompts[index]

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self._prompts)

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def size(self) -> int | None:
        """Number of prompts."""
        return len(self._prompts)

    @property
    def report(self) -> dict[str, int]:
        """See PromptSet.report."""
        return {"prompts": len(self._prompts), **self._maker.report}

    @property
    def notes(self) -> tuple[str, ...]:
        """See PromptSet.notes."""
        return self._maker.notes

    @property
    def texts(self) -> frozenset[str]:
        """Question texts and rendered texts, for another set's `exclude`."""
        return frozenset(text for p in self._prompts for text in (p.text, str(p.row["problem"])))

    @property
    def fingerprint(self) -> str:
        """See PromptSet.fingerprint."""
        lines = "\n".join(json.dumps([p.index, p.text]) for p in self._prompts)
        return hashlib.blake2b(lines.encode(), digest_size=16).hexdigest()

    def batch(self, step: int, n: int, seed: int) -> list[Prompt]:
        """See PromptSet.batch; shuffled by (seed, epoch) unless `data.shuffle` is off."""
        rows = batch_rows(len(self), step=step, n=n, seed=seed, shuffle=self._shuffle)
        return [self._prompts[row] for row in rows]


class PromptStream(PromptSet):
    """Endless prompts. Slot p of the stream of `seed` is generated on demand.

    Within a batch the questions differ by text, unless 64 rows in a row repeat (the task has few questions);
    across batches they repeat only as often as the task's own generator does.
    """

    def __init__(self, rows: RowGenerator, maker: PromptMaker) -> None:
        self._rows = rows
        self._maker = maker

    def __getitem__(self, index: int) -> Prompt:
        return self._prompt("0", index, taken=set())

    def __len__(self) -> int:
        raise TypeError(
            f"{self._maker.config.source} without data.size is endless; set data.size for a fixed set"
        )

    @property
    def size(self) -> int | None:
        """None: endless."""
        return None

    @property
    def fingerprint(self) -> None:
        """None: slots are made from the config alone."""
        return None

    @property
    def report(self) -> dict[str, int]:
        """See PromptSet.report."""
        return self._maker.report

    def batch(self, step: int, n: int, seed: int) -> list[Prompt]:
        """See PromptSet.batch."""
        taken: set[str] = set()
        return [self._prompt(str(seed), step * n + j, taken=taken) for j in range(n)]

    def _prompt(self, stream: str, slot: int, *, taken: set[str]) -> Prompt:
        """The first acceptable row of the slot; its text joins `taken`."""
        for attempt in range(MAX_ATTEMPTS):
            row = self._rows.row(f"stream {stream}", slot, attempt)
            prompt = self._maker.make(row, index=slot, key=(stream, slot, attempt))
            if prompt is None or (prompt.text in taken and attempt < DISTINCT_ATTEMPTS):
                continue
            taken.add(prompt.text)
            return prompt
        raise DataError(
            f"not-enough: {self._maker.config.source}: {MAX_ATTEMPTS} rows in a row are excluded (held out) "
            f"or too long ({self._maker.report}); make the task larger with data.task, or hold out fewer "
            "prompts"
        )


def _normal(text: str) -> str:
    return " ".join(text.split())


def load_prompts(
    config: DataConfig, *, tokenizer: Any, exclude: Collection[str] = (), vocab_size: int | None = None
) -> PromptSet:
    """Load the prompt set of a DataConfig. Files are rendered and tokenised here, streams on demand.

    Args:
        exclude: texts (of questions or of rendered prompts, white space aside) that must not occur.
        vocab_size: entries of the model's embedding, which source `ids` needs; None: not compared with the
            token ids of texts.

    Raises:
        DataError: missing or malformed data, nothing left after exclusion, or a task with fewer distinct
            questions than `size`.
        ConfigError: an impossible setting, or a package that is not installed.
    """
    if config.exclude is not None:
        exclude = frozenset(exclude) | _texts_of_source(config, config.exclude, tokenizer)
    maker = PromptMaker(config, tokenizer, exclude, vocab_size=vocab_size)
    if config.generated:
        rows = IdRows(config, vocab_size=vocab_size) if config.source == "ids" else ReasoningGymRows(config)
        if config.size is None:
            return PromptStream(rows, maker)
        generated = _distinct(rows, maker, config)
        return FixedPrompts(generated, shuffle=config.shuffle, maker=maker)
    found = rows_of(config)
    prompts = (
        prompt
        for first in range(0, len(found), BATCH_ROWS)
        for prompt in maker.make_all(found[first : first + BATCH_ROWS], first=config.skip + first)
    )
    loaded = FixedPrompts((p for p in prompts if p is not None), shuffle=config.shuffle, maker=maker)
    if not len(loaded):
        raise DataError(
            f"nothing-left: no prompts left of data.source = {config.source!r}: {loaded.report}. The "
            "held-out prompts may be all there are (set eval_data, or lower eval.num_prompts), or all are "
            "longer than data.max_prompt_tokens"
        )
    return loaded


def _texts_of_source(config: DataConfig, source: str, tokenizer: Any) -> frozenset[str]:
    other = config.model_copy(update={"source": source, "exclude": None, "size": None, "skip": 0})
    texts = load_prompts(other, tokenizer=tokenizer)
    if not isinstance(texts, FixedPrompts):
        raise ConfigError(
            f"endless: data.exclude = {source!r} is endless; name a file, a folder or a hub set"
        )
    return texts.texts


def _distinct(rows: RowGenerator, maker: PromptMaker, config: DataConfig) -> list[Prompt]:
    """`size` prompts of distinct text."""
    taken: set[str] = set()
    prompts: list[Prompt] = []
    for slot in range(config.skip, config.skip + (config.size or 0)):
        for attempt in range(MAX_ATTEMPTS):
            row = rows.row("fixed", slot, attempt)
            prompt = maker.make(row, index=slot, key=(slot, attempt))
            if prompt is not None and prompt.text not in taken:
                break
        else:
            raise DataError(
                f"not-enough: {config.source} gave only {len(prompts)} distinct questions that are allowed, "
                f"data.size = {config.size} were asked for ({maker.report}); lower data.size, or widen the "
                "task with data.task"
            )
        taken.add(prompt.text)
        prompts.append(prompt)
    return prompts


# Held-out prompts, and training prompts without them.


_SEED_STEP = 1_000_003


def held_out_config(run: GRPORun) -> DataConfig:
    """Return the config of a run's held-out prompts.

    `eval_data` when it is set. Else, generated data: the same task under another seed. Files with
    `data.size`: the rows after the training rows. Files without: the first `eval.num_prompts` rows, which
    training then leaves out; fewer of a small file, see `held_out_size`.
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
    """Return how many of the first `rows` rows of a file or set without `data.size` are held out:
    `eval.num_prompts`; where that is more than half of them a fifth, so that most are trained on.

    Args:
        rows: that there are; more than `needed_rows` need not be counted.

    Raises:
        ConfigError: the rows are too few for a rollout batch and an evaluation.
    """
    wanted, batch, what = run.eval.num_prompts, run.rollout.prompts_per_step, f"{rows} rows"
    held_out = wanted if wanted <= rows // 2 else min(max(rows // 5, 1), max(rows - batch, 1))
    if rows - held_out >= batch:
        return held_out
    fixes = []
    if rows > held_out:
        fixes.append(f"lower rollout.prompts_per_step to {rows - held_out}")
        what += f", {held_out} of which are held out for evaluations (eval.num_prompts = {wanted})"
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
    """Return whether the held-out prompts are the first rows of the training set's own source."""
    return run.eval_data is None and not run.data.generated and run.data.size is None


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
            f"not-enough: rollout.prompts_per_step = {run.rollout.prompts_per_step}, but data.source = "
            f"{run.data.source!r} has only {train.size} prompts to train on ({train.report}); lower "
            "rollout.prompts_per_step, or give more data (prompts of evaluations are left out, see eval_data)"
        )
    if held_out is None:
        held_out = FixedPrompts((), shuffle=False, maker=PromptMaker(run.data, tokenizer, ()))
    return train, held_out


def _held_out(run: GRPORun, *, tokenizer: Any, vocab_size: int | None) -> FixedPrompts:
    config = held_out_config(run)
    if holds_out_rows(run):
        rows = len(load_rows(_with(run.data, size=needed_rows(run))))
        config = _with(config, size=held_out_size(run, rows))
    try:
        held_out = load_prompts(config, tokenizer=tokenizer, vocab_size=vocab_size)
    except DataError as error:
        raise error.with_message(f"held-out prompts (eval_data): {error}") from error
    if not isinstance(held_out, FixedPrompts):
        raise ConfigError(f"endless: eval_data.source = {config.source!r} is endless; set eval_data.size")
    return held_out


def _with(config: DataConfig, **changes: Any) -> DataConfig:
    return config.model_copy(update=changes)
