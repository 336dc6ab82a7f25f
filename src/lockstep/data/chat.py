"""Turn messages into text and text into token ids: chat templates, prompt templates, and exactly one
beginning-of-sequence token."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from lockstep.config.data import DataConfig
from lockstep.data.sources import UNREAD, configured_columns, named_columns
from lockstep.data.tables import column_names
from lockstep.errors import ConfigError, DataError, nearest
from lockstep.observe.chat_template import ChatTemplate, row_columns, row_variables
from lockstep.observe.files import file_errors, path_problem, read_plain
from lockstep.observe.special_text import Places, special_text, whole_ids
from lockstep.observe.template_renderer import Rendered, RenderJob, render_chat
from lockstep.observe.text import printable

Message = dict[str, Any]
_OF_MESSAGES = {"role", "content", "weight"}
"""Keys of a message that need not stand in a template: `weight` says what is trained on."""
_SPEAKERS = {"system", "developer", "user", "assistant"}
_INSTEAD = {"tool_calls", "function_call", "reasoning_content", "reasoning", "thinking"}
"""Keys beside which a content may be missing."""
_FIELD = re.compile(r"\{\{|\}\}|\{(\w+)\}")


def fill_template(template: str, values: Mapping[str, Any], *, where: str) -> str:
    r"""Replace `{name}` by values[name]; `{{` and `}}` are literal braces, and other braces (LaTeX) stay as
    they are.

    Raises:
        ConfigError: a name in braces is no column of the row, which is at `where`.

    Example:
        >>> fill_template("{prompt} Answer in \boxed{{}}.", {"prompt": "1 + 1?"}, where="row 1")
        '1 + 1? Answer in \\boxed{}.'
    """

    def value(match: re.Match[str]) -> str:
        name = match.group(1)
        if name is None:
            return match.group()[0]
        if name not in values:
            near = nearest(name, values)
            hint = f"; did you mean {' or '.join(repr(printable(each)) for each in near)}?" if near else "."
            raise ConfigError(
                f"unknown-name: {where}: data.prompt_template reads {{{name}}}, and the row has no column "
                f"{name!r}{hint} Columns: {column_names(values)}. Correct the name, or write "
                f"{{{{{name}}}}} for the text"
            )
        return str(values[name])

    return _FIELD.sub(value, template)


def check_text(text: str, where: str) -> None:
    """Raise DataError for half a surrogate pair, which JSON and command lines may hold, and no text may."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"not-text: {where}: holds half a surrogate pair, {text[error.start]!r}, after {error.start} "
            "characters, which is not text; correct it"
        ) from error


def clean_messages(value: Any, *, where: str) -> list[Message]:
    """Return messages as plain dicts, without keys whose value is None. The content of a tool's message, and
    of an assistant's with tool calls or reasoning, may be missing or null, and is "" then.

    Raises:
        DataError: not a list of {role, content}, or a content that is neither text nor text parts.
    """
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise DataError(
            f"wrong-row: {where}: messages must be a non-empty list of {{role, content}}, got "
            f"{str(value)[:80]!r}"
        )
    messages = []
    for number, message in enumerate(value, start=1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            keys = isinstance(message, Mapping) and {"from", "value"} <= message.keys()
            hint = "; write ShareGPT's from and value as role (human: user, gpt: assistant) and content"
            raise DataError(
                f"wrong-row: {where}, message {number}: needs a role and a content, got "
                f"{str(message)[:80]!r}{hint if keys else ''}"
            )
        kept = {key: item for key, item in message.items() if item is not None}
        if "content" not in kept and kept["role"] in _SPEAKERS and not kept.keys() & _INSTEAD:
            raise DataError(
                f"wrong-row: {where}, message {number}: has no content, got {str(message)[:80]!r}; write "
                "it, '' for an empty one, or leave the message out"
            )
        kept["content"] = _text_of(kept.get("content", ""), where, number)
        messages.append(kept)
    return messages


def _text_of(content: Any, where: str, number: int) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, Sequence) else []
    texts = [p["text"] for p in parts if isinstance(p, Mapping) and isinstance(p.get("text"), str)]
    if not texts or len(texts) != len(parts):
        raise DataError(
            f"wrong-row: {where}, message {number}: only text content is supported, got {str(content)[:80]!r}"
        )
    return "".join(texts)


class ChatFormat:
    """How one DataConfig turns messages into text and text into ids.

    `template` is the jinja text in force, or None for plain text. `for_row` returns the format of one row.

    Raises:
        ConfigError: a template file is missing, a template keyword is not used by the template, or
            system_prompt is set where no template could carry it.
    """

    def __init__(self, config: DataConfig, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.template = _resolve_template(config.chat_template, tokenizer)
        self._template = None if self.template is None else ChatTemplate(tokenizer, self.template)
        self.kwargs = dict(config.chat_template_kwargs)
        self._auto = config.chat_template == "auto"
        self._system = config.system_prompt
        self._source = config.source
        self.named_columns = named_columns(config)
        """The `*_column` settings with a value of their own."""
        self._unread = UNREAD.keys() - configured_columns(config)
        self._notes: dict[str, None] = {}
        self._for_tools: dict[str, ChatTemplate] = {}
        self._blank: dict[int, bool] = {}
        self._whole = self
        if self.template is None and (self._system or self.kwargs):
            setting = "system_prompt" if self._system else "chat_template_kwargs"
            raise ConfigError(
                f"no-effect: data.{setting} is set, but there is no chat template to use it "
                f"(data.chat_template = {config.chat_template!r}); set data.chat_template to a jinja "
                "template"
            )
        for name in self.kwargs:
            if self.template is not None and name not in self.template:
                raise ConfigError(
                    f"no-effect: data.chat_template_kwargs.{name}: the chat template never reads {name!r}; "
                    "correct the name or remove it"
                )
        self.bos = [] if self.template is not None else _leading_ids(tokenizer)
        """Ids in front of every text: the tokenizer's for plain text, none where a template writes its
        own."""
        self.counts_borders = True
        """Whether `merged_borders` is kept: it takes a second encoding of every text."""
        self.merged_borders: list[str] = []
        """The rows in which a token of the whole text would cross from a prompt to its answer."""

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The template in force; None: plain text."""
        return self._template

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes about ignored columns and the number of borders that would merge; one sentence each."""
        notes = list(self._notes)
        if self.merged_borders:
            notes.append(
                f"{self._source}: {len(self.merged_borders)} borders of a prompt and its answer would merge "
                f"into one token ({self.merged_borders[0]} is the first); both are encoded apart, as the "
                "policy will sample"
            )
        return tuple(notes)

    def for_row(self, row: Mapping[str, Any], *, where: str) -> ChatFormat:
        """Return this format with the row's `tools`, `chat_template_kwargs` and `enable_thinking`, which
        come before the setting's. Columns with a meaning that nothing reads are added to `notes`.

        Raises:
            DataError: `tools` is no list of schemas, or `chat_template_kwargs` no object.
        """
        for name in sorted(row.keys() & self._unread):
            self._note(f"column {name!r} is ignored: {UNREAD[name]}")
        given = row_columns(row)
        if not given:
            return self
        template = None if self.template is None else self._template_for(given)
        variables, unread = row_variables(row, template, where)
        for column in unread:
            why = "there is no chat template" if template is None else "the chat template never reads it"
            self._note(f"column {column!r} is ignored: {why}")
        if template is None or not variables:
            return self
        other = copy.copy(self)
        other._template, other.template = template, template.text
        other.kwargs = {**self.kwargs, **variables}
        return other

    def _template_for(self, given: Mapping[str, Any]) -> ChatTemplate:
        """The template in force; some tokenizers have one of its own for tools."""
        assert self._template is not None
        if given.get("tools") and self._auto:
            text = str(self.tokenizer.get_chat_template(tools=given["tools"]))
            if text != self._template.text:  # kept: what it takes and how it ends is found out by rendering
                return self._for_tools.setdefault(text, ChatTemplate(self.tokenizer, text))
        return self._template

    def _note(self, text: str) -> None:
        self._notes[printable(f"{self._source}: {text}")] = None

    def with_system(self, messages: list[Message]) -> list[Message]:
        """Return the messages, with `system_prompt` in front when it is set and they have no system
        message."""
        if self._system is None or messages[0]["role"] == "system":
            return messages
        return [{"role": "system", "content": self._system}, *messages]

    def render(self, messages: list[Message], *, generate: bool, where: str) -> Rendered:
        """Return a conversation as text; `generate` adds the header of the assistant's turn.

        Raises:
            DataError: the template refuses the messages, or there is no template and they are not one user
                turn.
        """
        if self.template is None:
            if len(messages) != 1 or messages[0]["role"] != "user":
                raise DataError(
                    f"no-chat-template: {where}: a conversation of {len(messages)} messages needs a chat "
                    "template, and there is none; set data.chat_template to a jinja template"
                )
            return Rendered(text=str(messages[0]["content"]))
        job = self.job(messages, generate=generate, where=where)
        return render_chat(self.tokenizer, job)

    def job(
        self, messages: list[Message], *, generate: bool = False, turns: Sequence[int] = (), where: str
    ) -> RenderJob:
        """Return the job of rendering messages, see RenderJob. There must be a template."""
        assert self._template is not None
        for key in {key for message in messages for key in message} - _OF_MESSAGES:
            if not self._template.reads_key(key):
                self._note(f"{key!r} of messages is ignored: the chat template never reads it")
        return self._template.job(messages, generate=generate, options=self.kwargs, turns=turns, where=where)

    def is_blank(self, ids: Sequence[int]) -> bool:
        """Return whether the text of the ids is empty or white space."""
        if len(ids) != 1:
            return not ids or not self.tokenizer.decode(ids).strip()
        if ids[0] not in self._blank:  # usually one line feed, in every row
            self._blank[ids[0]] = not self.tokenizer.decode(ids).strip()
        return self._blank[ids[0]]

    @property
    def begins_with_space(self) -> bool:
        """Whether the tokenizer puts a space in front of every text, as SentencePiece's may."""
        return self._whole._begins_with_space

    @cached_property
    def _begins_with_space(self) -> bool:
        if not any(piece.startswith("\u2581") for piece in self.tokenizer.get_vocab()):
            return False  # nor need it know an "a"
        return bool(self.tokenizer.tokenize("a")[0].startswith("\u2581"))

    @property
    def end_ids(self) -> frozenset[int]:
        """Ids that end a document: the tokenizer's eos, and the special tokens that the template in force,
        for plain text the tokenizer's own, writes behind an answer."""
        return self._whole._end_ids

    @cached_property
    def _end_ids(self) -> frozenset[int]:
        ends = frozenset(i for i in (self.tokenizer.eos_token_id,) if i is not None)
        own = self.tokenizer.chat_template
        template = self._template
        if template is None and isinstance(own, str):
            template = ChatTemplate(self.tokenizer, own)
        return ends if template is None else ends | template.end_ids

    def encode(self, text: str, plain: Places = ()) -> list[int]:
        """Return token ids, with `bos` in front unless the text begins with it.

        Args:
            plain: where the text is part of no special token, see Rendered.

        Raises:
            DataError: the text holds half a surrogate pair, which has no bytes; or the tokenizer makes a
                special token of a plain text.
        """
        check_text(text, "a text to be tokenised")
        (ids,) = self.encode_all([text], [plain])
        return ids

    def encode_all(self, texts: list[str], plain: Sequence[Places]) -> list[list[int]]:
        """Return the token ids of texts, see `encode`, of which `check_text` has let all through."""
        # A rendered template has its special tokens in the text; the tokenizer would put a second bos in
        # front.
        of_all = token_ids(self.tokenizer, texts, plain)
        return [ids if ids[: len(self.bos)] == self.bos else [*self.bos, *ids] for ids in of_all]


def token_ids(tokenizer: Any, texts: list[str], plain: Sequence[Places] = ()) -> list[list[int]]:
    """Return the ids of each text alone, without special tokens around it.

    Args:
        plain: where each text is part of no special token; (): nowhere.

    Raises:
        DataError: see SpecialText.encode.
    """
    of_all = whole_ids(tokenizer, texts)
    for number, places in enumerate(plain):
        if places:
            of_all[number] = special_text(tokenizer).encode(texts[number], places)
    return of_all


def _resolve_template(setting: str, tokenizer: Any) -> str | None:
    if setting == "none":
        return None
    if setting == "auto":
        template = tokenizer.chat_template
        try:
            return None if template is None else str(tokenizer.get_chat_template())
        except ValueError as error:  # several, and none of them is the default
            raise ConfigError(f"ambiguous: {error}; set data.chat_template") from error
    if "{%" in setting or "{{" in setting:
        return setting
    path = Path(setting).expanduser()
    if path_problem(str(path)) or not path.is_file():
        raise ConfigError(
            f"wrong-format: data.chat_template = {setting[:200]!r} is neither auto, none, a jinja template "
            "(no '{{' or '{{%' in it) nor a file"
        )
    data = read_plain(path, ConfigError)
    with file_errors(path, ConfigError):
        return data.decode("utf-8-sig")  # a byte order mark would stand in front of every prompt


def _leading_ids(tokenizer: Any) -> list[int]:
    """[bos] where the tokenizer puts one before plain text, else []. Ids that it appends (T5's eos) are left
    out."""
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and tokenizer("")["input_ids"][:1] == [bos] else []
