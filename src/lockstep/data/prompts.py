"""Prompt sets: rows rendered and tokenised, and batches of them as a pure function of (step, n, seed).

`FixedPrompts` holds a known number of prompts (files, hub sets, generated sets with a `size`); its batches
are epoch shuffles. `PromptStream` generates prompts without end (sources without a `size`): slot `step * n +
j` of the stream of `seed` is prompt j of batch `step`. Neither has a state to save.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from lockstep.config.data import DataConfig
from lockstep.data import verdicts
from lockstep.data.chat import ChatFormat, Message, check_text, clean_messages, fill_template
from lockstep.data.lazy import LazyItems, Outcome, State, attempted
from lockstep.data.row_tools import RowTools
from lockstep.data.rows import IdRows, ReasoningGymRows, RowGenerator, place
from lockstep.data.sources import Source, missing_column
from lockstep.errors import ConfigError, DataError, LockstepError
from lockstep.observe.chat_template import check_known, kept_at_end
from lockstep.observe.special_text import Places
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
        """Notes about the rows for the start of a run, one sentence each."""
        return ()

    def make_all(self) -> None:  # noqa: B027 - where there is an end
        """Make all prompts of a known number of rows now, so that it is known which are left out."""

    def close(self) -> None:  # noqa: B027 - most sets have nothing to free
        """Free what the set holds."""

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
    plain: Places = ()
    """Where the text is part of no special token."""
    ids: list[int] = field(default_factory=list)


class PromptMaker:
    """Turns rows into Prompts according to one DataConfig.

    Args:
        exclude: `texts` of prompts that are left out.
        vocab_size: entries of the model's embedding; None: not compared with the token ids.
        tools: that a row gives its chat template, in place of its own; None: its own.
    """

    def __init__(
        self,
        config: DataConfig,
        tokenizer: Any,
        exclude: Collection[bytes],
        *,
        vocab_size: int | None = None,
        tools: RowTools | None = None,
    ) -> None:
        self.config = config
        self.vocab_size = vocab_size
        self.tools = tools
        self.exclude = frozenset(exclude)
        self.ids_only = config.source == "ids"
        if tokenizer is None and not self.ids_only:
            raise ConfigError(
                f"no-tokenizer: data.source = {config.source!r} is text, but the model has no tokenizer "
                "(shape: models have none); set data.source = 'ids' with rewards = [{name = 'ids'}], or "
                "choose a model with a tokenizer"
            )
        self.chat = None if self.ids_only else ChatFormat(config, tokenizer)
        # Of generated rows, keyed by row, so that looking at a row twice does not count it twice.
        self._left_out: dict[object, str] = {}

    @property
    def selective(self) -> bool:
        """Whether prompts are left out."""
        return bool(self.exclude) or self.config.overlong_prompts == "drop"

    @property
    def notes(self) -> tuple[str, ...]:
        """See PromptSet.notes."""
        return () if self.chat is None else self.chat.notes

    @property
    def report(self) -> dict[str, int]:
        """See PromptSet.report. Of generated rows."""
        return reported(Counter(self._left_out.values()))

    def make(self, row: Mapping[str, Any], *, index: int, key: object) -> Prompt | None:
        """Return the prompt of a generated row; None when it is excluded, or overlong and to be dropped.

        Args:
            key: of the row, for the counts of `report`.

        Raises:
            DataError: a column is missing, the messages are malformed, or the prompt is too long under
                `error`.
        """
        (outcome,) = self.outcomes([row], [index])
        if outcome.error is not None:
            raise outcome.error
        if outcome.state != "kept":
            self._left_out[key] = outcome.state
        return outcome.item

    def outcomes(
        self, rows: Sequence[Mapping[str, Any] | LockstepError], indices: Sequence[int]
    ) -> list[Outcome[Prompt]]:
        """Return what each row becomes. The rows share one exchange with the process that renders templates
        and one call of the tokenizer. Several threads may call this at once.

        Args:
            indices: of the prompts, one per row.
        """
        drafts = [attempted(self._draft, row, index) for row, index in zip(rows, indices, strict=True)]
        if self.chat is not None:
            drafts = self._rendered(drafts, self.chat)
            good = [draft for draft in drafts if isinstance(draft, _Draft)]
            texts, plain = [draft.text for draft in good], [draft.plain for draft in good]
            for draft, ids in zip(good, self.chat.encode_all(texts, plain), strict=True):
                draft.ids = ids
        made = [attempted(self._prompt, draft) for draft in drafts]
        return [Outcome(error=each) if isinstance(each, LockstepError) else each for each in made]

    def _draft(self, row: Mapping[str, Any], index: int) -> _Draft:
        where = place(row, self.config.source, index)
        if self.chat is None:
            ids = [int(i) for i in row["token_ids"]]
            text = " ".join(map(str, ids))
            return _Draft(row=row, index=index, where=where, problem=text, text=text, ids=ids)
        problem, talk = self.conversation(row, where)
        draft = _Draft(row=row, index=index, where=where, problem=problem, talk=talk)
        tools = None if self.tools is None else self.tools.of(row, where)
        chat = self.chat.for_row({**row, "tools": tools} if tools else row, where=where)
        if isinstance(talk, str):
            draft.text = talk
        else:
            draft.job = chat.job(talk, generate=True, where=where)
        return draft

    def _rendered(
        self, drafts: Sequence[_Draft | LockstepError], chat: ChatFormat
    ) -> list[_Draft | LockstepError]:
        """The drafts with their text set, and errors for those that cannot be rendered or encoded."""
        jobs = [draft.job for draft in drafts if isinstance(draft, _Draft) and draft.job is not None]
        results = render_chats(chat.tokenizer, jobs)

        def text_set(draft: _Draft) -> _Draft:
            if draft.job is not None:
                rendered = checked(next(results))
                draft.text, draft.plain = rendered.text, rendered.plain
            check_text(draft.text, draft.where)
            return draft

        return [attempted(text_set, draft) for draft in drafts]

    def _prompt(self, draft: _Draft) -> Outcome[Prompt]:
        ids, text, where = draft.ids, draft.text, draft.where
        state: State = "kept"
        row = {**draft.row, "problem": draft.problem}
        if self.exclude and not self.exclude.isdisjoint(self.hashes(text, row, where)):
            return Outcome(state="excluded")
        if len(ids) > self.config.max_prompt_tokens:
            if self.config.overlong_prompts == "drop":
                return Outcome(state="dropped_overlong")
            state, ids = "truncated", self._shorten(ids, where=where)
            text = self.chat.tokenizer.decode(ids) if self.chat else " ".join(map(str, ids))
        if not ids:
            raise DataError(
                f"empty: {where}: the prompt is empty (no tokens); fill column {self.config.prompt_column!r}"
            )
        if self.vocab_size is not None and self.chat is not None:
            tokenizer = self.chat.tokenizer
            check_known(ids, self.vocab_size, tokenizer=tokenizer, model="the model", where=where)
        prompt = Prompt(
            index=draft.index,
            token_ids=tuple(ids),
            text=text,
            row=row,
            conversation=draft.talk,
            where=where,
        )
        return Outcome(item=prompt, state=state, tokens=len(ids))

    def hashes(self, text: str, row: Mapping[str, Any], where: str) -> tuple[bytes, bytes]:
        """Return what tells a rendered prompt and its question apart from others: their texts, and what an
        environment gets of the row, because in a game all rows may have the same text."""
        # Generated rows differ in their texts. Other columns, such as their number, would hide equal ones.
        task = "" if self.tools is None or self.config.generated else self.tools.task_of(row, where)
        return text_hash(f"{text}\n{task}"), text_hash(f"{row['problem']}\n{task}")

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
            return problem, chat.render(messages, generate=True, where=where).text
        return problem, messages

    def _prompt_value(self, row: Mapping[str, Any], where: str) -> Any:
        config, forms = self.config, ("prompt_column", "messages_column")
        assert self.chat is not None, "an id-level source has no texts"
        named = [form for form in forms if form in self.chat.named_columns]
        found = [row[column] for form in named or forms if (column := getattr(config, form)) in row]
        if found:  # in Parquet a row has each column, and null in those that it did not have
            return next((value for value in found if value is not None), found[0])
        if config.source.startswith("reasoning_gym:") and named != ["prompt_column"]:
            return row["question"]
        form = (named or forms)[0]
        raise missing_column(getattr(config, form), row, setting=f"data.{form}", source=where)

    def _shorten(self, ids: list[int], *, where: str) -> list[int]:
        limit = self.config.max_prompt_tokens
        if self.config.overlong_prompts == "error":
            raise DataError(
                f"too-long: {where}: the prompt has {len(ids)} tokens, data.max_prompt_tokens = {limit}; "
                "raise it, or set data.overlong_prompts = 'drop' or 'truncate_left'"
            )
        if self.chat is None:
            return ids[-limit:]
        first, rest = kept_at_end(ids, limit, tokenizer=self.chat.tokenizer, template=self.chat.template)
        return ids[:first] + ids[rest:]


def reported(counts: Counter[str]) -> dict[str, int]:
    """Return the counts of a report, see PromptSet.report."""
    return {name: counts[name] for name in ("excluded", "dropped_overlong", "truncated")}


class FixedPrompts(PromptSet):
    """A known number of rows, and the prompts that are made of them when they come near.

    Args:
        source: of the rows; None: they were generated.
    """

    def __init__(self, items: LazyItems[Prompt], *, maker: PromptMaker, source: Source | None = None) -> None:
        self.items, self._maker, self._source = items, maker, source
        self._fingerprint = self._hash()
        self.verdict_key: str | None = None
        """The key of `lockstep data check`'s verdict; None: the set was made as a whole."""
        self._verdict: tuple[str, ...] = ()
        if source is not None and maker.chat is not None and not (items.whole or maker.config.streaming):
            excluded = hashlib.blake2b(b"".join(sorted(maker.exclude)), digest_size=16).hexdigest()
            more: dict[str, Any] = {"vocab_size": maker.vocab_size, "excluded": excluded}
            more |= {"template": maker.chat.template}
            more |= {} if maker.tools is None else {"tools": asdict(maker.tools)}
            self.verdict_key = verdicts.key("RL", maker.config, maker.chat.tokenizer, source, **more)
            self._verdict = verdicts.apply(self.verdict_key, items, maker.config.source)

    def __getitem__(self, index: int) -> Prompt:
        return self.items[index]

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)

    @property
    def first(self) -> Sequence[Prompt]:
        """Those of the first rows, which are made at once: all of a small set."""
        return self.items.sampled

    @property
    def size(self) -> int | None:
        """Number of prompts, as far as is known which are left out."""
        return len(self.items)

    @property
    def report(self) -> dict[str, int]:
        """See PromptSet.report. Of a large set of the rows that were `examined` so far."""
        if self._source is None:
            return {"prompts": len(self.items), **self._maker.report}
        counts = self.items.counts
        report = {"prompts": counts["kept"] + counts["truncated"], **reported(counts)}
        if not self.items.whole:
            report |= {"rows": self.items.rows // self.items.of_row} if self.items.has_end else {}
            report |= {"examined": self.items.examined}
        return report | ({"bad": counts["bad"]} if counts["bad"] else {})

    @property
    def notes(self) -> tuple[str, ...]:
        """See PromptSet.notes."""
        return (
            *(() if self._source is None else self._source.table.notes),
            *self._verdict,
            *self._maker.notes,
        )

    @property
    def texts(self) -> frozenset[bytes]:
        """`PromptMaker.hashes` of all prompts, for another set's `exclude`."""
        hashes = self._maker.hashes
        return frozenset(each for p in self for each in hashes(p.text, p.row, p.where))

    @property
    def fingerprint(self) -> str:
        """See PromptSet: of all prompts, or of the first ones and the content of the source."""
        return self._fingerprint

    def _hash(self) -> str:
        lines = "\n".join(json.dumps([p.index, p.text]) for p in self.items.sampled)
        if not self.items.whole and self._source is not None:
            lines += f"\n{self._source.fingerprint}"
        return hashlib.blake2b(lines.encode(), digest_size=16).hexdigest()

    def batch(self, step: int, n: int, seed: int) -> list[Prompt]:
        """See PromptSet.batch; shuffled by (seed, epoch) unless `data.shuffle` is off."""
        return self.items.batch(step, n, seed)

    def make_all(self) -> None:
        """See PromptSet."""
        self.items.make_all()

    def close(self) -> None:
        """End the threads that make prompts."""
        self.items.close()


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
        """None, because the set is endless."""
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


def text_hash(text: str) -> bytes:
    """Return what tells texts apart, white space aside: those of a large set would take more memory than
    it."""
    return hashlib.blake2b(" ".join(text.split()).encode(), digest_size=12).digest()


def load_prompts(
    config: DataConfig,
    *,
    tokenizer: Any,
    exclude: Collection[bytes] = (),
    vocab_size: int | None = None,
    rows: Sequence[int] | None = None,
    tools: RowTools | None = None,
) -> PromptSet:
    """Open the prompt set of a DataConfig. Of a file the first 1,000 rows are rendered and tokenised here,
    the others when they come near; streams on demand.

    Args:
        exclude: `texts` of prompts that must not occur.
        vocab_size: entries of the model's embedding, which source `ids` needs; None: not compared with the
            token ids of texts.
        rows: numbers of the rows of the source that are made, all at once; None: all rows.
        tools: see PromptMaker.

    Raises:
        DataError: missing or malformed data, nothing left after exclusion, or a task with fewer distinct
            questions than `size`.
        ConfigError: an impossible setting, or a package that is not installed.
    """
    if config.exclude is not None:
        exclude = frozenset(exclude) | _texts_of_source(config, config.exclude, tokenizer, tools)
    maker = PromptMaker(config, tokenizer, exclude, vocab_size=vocab_size, tools=tools)
    if config.generated:
        ids = config.source == "ids"
        generator = IdRows(config, vocab_size=vocab_size) if ids else ReasoningGymRows(config)
        if config.size is None:
            return PromptStream(generator, maker)
        generated = _distinct(generator, maker, config)
        return FixedPrompts(LazyItems.of(generated, shuffle=config.shuffle), maker=maker)
    source = Source(config)
    source.check_columns()

    def make(numbers: Sequence[int]) -> list[Outcome[Prompt]]:
        numbers = numbers if rows is None else [rows[number] for number in numbers]
        return maker.outcomes(source.read(numbers), [config.skip + number for number in numbers])

    if rows is None:
        items = source.items(make, selective=maker.selective)
    else:
        count = len(rows)
        items = LazyItems(count, make, config=config, selective=maker.selective, first=count)
    loaded = FixedPrompts(items, maker=maker, source=source)
    if not items.sampled:
        raise DataError(
            f"nothing-left: no prompts left of data.source = {config.source!r}: {loaded.report}. The "
            "held-out prompts may be all there are (set eval_data, or lower eval.num_prompts), or all are "
            "longer than data.max_prompt_tokens"
            + (f"; the first: {items.first_bad}" if items.first_bad else "")
        )
    return loaded


def _texts_of_source(
    config: DataConfig, source: str, tokenizer: Any, tools: RowTools | None
) -> frozenset[bytes]:
    other = config.model_copy(update={"source": source, "exclude": None, "size": None, "skip": 0})
    texts = load_prompts(other, tokenizer=tokenizer, tools=tools)
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
