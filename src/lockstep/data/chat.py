"""Turn messages into text and text into token ids: chat templates, prompt templates, and exactly one
beginning-of-sequence token."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from lockstep.config.data import DataConfig
from lockstep.data.columns import UNREAD, named_columns
from lockstep.data.readers import parse_value
from lockstep.errors import ConfigError, DataError, unknown_name
from lockstep.observe.files import file_errors, path_problem, read_plain
from lockstep.observe.templates import Rendered, render_chat
from lockstep.observe.text import printable

Message = dict[str, Any]
PROBE = "Zq7xKwQ"
"""A text that no template writes, to see what a template puts behind an answer."""
_CALL = {"type": "function", "id": "zq7xkwq00", "function": {"name": PROBE, "arguments": {}}}
_OF_ROWS = ("tools", "chat_template_kwargs", "enable_thinking")
_OF_MESSAGES = {"role", "content", "weight"}
"""Keys of a message that need not stand in a template: `weight` says what is trained on."""
_REASONING = ("reasoning_content", "thinking", "reasoning")
_ARGUMENTS = {"messages", "conversation", "add_generation_prompt", "chat_template", "tokenize"}
_AS_OBJECT = re.compile(r"\barguments['\"]?\]?\s*\|\s*(tojson|items)\b")
_AS_TEXT = re.compile(r"\barguments['\"]?\]?\s+is\s+(not\s+)?(string|mapping)\b")
"""Whether a template writes the arguments of a call as JSON, and whether it may get them as JSON."""
_FIELD = re.compile(r"\{\{|\}\}|\{(\w+)\}")


def fill_template(template: str, values: Mapping[str, Any]) -> str:
    r"""Replace `{name}` by values[name]; `{{` and `}}` are literal braces, and other braces (LaTeX) stay as
    they are.

    Raises:
        ConfigError: a name in braces is no column.

    Example:
        >>> fill_template("{prompt} Answer in \boxed{{}}.", {"prompt": "1 + 1?"})
        '1 + 1? Answer in \\boxed{}.'
    """

    def value(match: re.Match[str]) -> str:
        name = match.group(1)
        if name is None:
            return match.group()[0]
        if name not in values:
            columns = [printable(column) for column in values]
            raise ConfigError(
                unknown_name("column in data.prompt_template", name, columns), code="unknown-name", name=name
            )
        return str(values[name])

    return _FIELD.sub(value, template)


def check_text(text: str, where: str) -> None:
    """Raise DataError for half a surrogate pair, which JSON and command lines may hold, and no text may."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: holds half a surrogate pair, {text[error.start]!r}, after {error.start} characters, "
            "which is not text; correct it",
            code="not-text",
            where=where,
        ) from error


def clean_messages(value: Any, *, where: str) -> list[Message]:
    """Return messages as plain dicts, without keys whose value is None. The content of a message with tool
    calls may be missing or null, and is "" then.

    Raises:
        DataError: not a list of {role, content}, or a content that is neither text nor text parts.
    """
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise DataError(
            f"{where}: messages must be a non-empty list of {{role, content}}, got {str(value)[:80]!r}",
            code="wrong-row",
            where=where,
            name="messages",
        )
    messages = []
    for number, message in enumerate(value):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise DataError(
                f"{where}, message {number}: needs a role and a content, got {str(message)[:80]!r}",
                code="wrong-row",
                where=where,
                name="role",
            )
        kept = {key: item for key, item in message.items() if item is not None}
        kept["content"] = _text_of(kept.get("content", ""), f"{where}, message {number}")
        messages.append(kept)
    return messages


def _text_of(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, Sequence) else []
    texts = [p["text"] for p in parts if isinstance(p, Mapping) and isinstance(p.get("text"), str)]
    if not texts or len(texts) != len(parts):
        raise DataError(
            f"{where}: only text content is supported, got {str(content)[:80]!r}",
            code="wrong-row",
            where=where,
            name="content",
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
        self.kwargs = dict(config.chat_template_kwargs)
        self._auto = config.chat_template == "auto"
        self._system = config.system_prompt
        self._source = config.source
        self._named = named_columns(config)
        self._notes: dict[str, None] = {}
        self._whole = self
        if self.template is None and (self._system or self.kwargs):
            setting = "system_prompt" if self._system else "chat_template_kwargs"
            raise ConfigError(
                f"data.{setting} is set, but no chat template would carry it (data.chat_template = "
                f"{config.chat_template!r}); set data.chat_template to a jinja template",
                code="no-effect",
                setting=f"data.{setting}",
            )
        for name in self.kwargs:
            if self.template is not None and name not in self.template:
                raise ConfigError(
                    f"data.chat_template_kwargs.{name}: the chat template never reads {name!r}; correct the "
                    "name or remove it",
                    code="no-effect",
                    setting=f"data.chat_template_kwargs.{name}",
                )
        self.bos = [] if self.template is not None else _leading_ids(tokenizer)
        """Ids in front of every text: the tokenizer's for plain text, none where a template writes its
        own."""
        self.merged_borders: list[str] = []
        """The rows in which a token of the whole text would cross from a prompt to its answer."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What the rows hold and nothing reads, and how many borders would merge; one sentence each."""
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
        for name in sorted(row.keys() & (UNREAD.keys() - self._named)):
            self._note(f"column {name!r} is ignored: {UNREAD[name]}")
        given = {name: row[name] for name in _OF_ROWS if row.get(name) is not None and row[name] != ""}
        if not given:
            return self
        variables = self._variables(given, where)
        if not variables:
            return self
        other = copy.copy(self)
        other.kwargs = {**self.kwargs, **variables}
        if "tools" in variables and self._auto:  # some tokenizers have a template of their own for tools
            other.template = str(self.tokenizer.get_chat_template(tools=variables["tools"]))
        return other

    def _variables(self, given: Mapping[str, Any], where: str) -> dict[str, Any]:
        """The variables of a row that the template reads; the others are added to `notes`."""
        more = given.get("chat_template_kwargs", {})
        more = _parsed(more, Mapping, where, name="chat_template_kwargs", expected="an object")
        variables = {name: value for name, value in more.items() if value is not None}
        for name in ("enable_thinking", "tools"):
            if name in given:
                variables[name] = given[name]
        for name in list(variables):
            if self.template is None or not re.search(rf"\b{re.escape(name)}\b", self.template):
                column = name if name in given else f"chat_template_kwargs.{name}"
                why = (
                    "there is no chat template"
                    if self.template is None
                    else "the chat template never reads it"
                )
                self._note(f"column {column!r} is ignored: {why}")
                del variables[name]
            elif name in _ARGUMENTS:
                raise DataError(
                    f"{where}: chat_template_kwargs.{name} is no variable of a template but an argument of "
                    "apply_chat_template; leave it out",
                    code="wrong-row",
                    where=where,
                    name=name,
                )
        tools = _tools(variables.pop("tools", []), where)
        # Templates of Llama write their instructions for tools around an empty list, too.
        return {**variables, "tools": tools} if tools else variables

    def _note(self, text: str) -> None:
        self._notes[printable(f"{self._source}: {text}")] = None

    def with_system(self, messages: list[Message]) -> list[Message]:
        """Return the messages, with `system_prompt` in front when it is set and they have no system
        message."""
        if self._system is None or messages[0]["role"] == "system":
            return messages
        return [{"role": "system", "content": self._system}, *messages]

    def render(self, messages: list[Message], *, generate: bool, where: str) -> str:
        """Return the text of a conversation; `generate` adds the header of the assistant's turn.

        Raises:
            DataError: the template refuses the messages, or there is no template and they are not one user
                turn.
        """
        if self.template is None:
            if len(messages) != 1 or messages[0]["role"] != "user":
                raise DataError(
                    f"{where}: a conversation of {len(messages)} messages needs a chat template, and there "
                    "is none; set data.chat_template to a jinja template",
                    code="no-chat-template",
                    where=where,
                )
            return str(messages[0]["content"])
        return self.rendered(messages, generate=generate, where=where).text

    def rendered(self, messages: list[Message], *, generate: bool, where: str) -> Rendered:
        """Return the template's text, and the spans of its {% generation %} blocks.

        Raises:
            DataError: the template refuses the messages, or uses up its budget of time or memory.
        """
        assert self.template is not None
        for key in {key for message in messages for key in message} - _OF_MESSAGES:
            if not _reads(self.template, key):
                self._note(f"{key!r} of messages is ignored: the chat template never reads it")
        return render_chat(
            self.tokenizer,
            self.template,
            self._for_template(messages),
            generate=generate,
            options=self.kwargs,
            where=where,
        )

    def _for_template(self, messages: list[Message]) -> list[Message]:
        """The messages as the template expects them: arguments that are JSON text, as OpenAI's are, become
        objects where the template makes JSON of them; contents become lists of parts where it reads no
        other."""
        assert self.template is not None
        parse = bool(_AS_OBJECT.search(self.template)) and not _AS_TEXT.search(self.template)
        result = []
        for message in messages:
            calls = message.get("tool_calls")
            if parse and isinstance(calls, list):
                message = {**message, "tool_calls": [_with_object(call) for call in calls]}
            if self._whole._reads_parts:
                message = {**message, "content": [{"type": "text", "text": message["content"]}]}
            result.append(message)
        return result

    @cached_property
    def _reads_parts(self) -> bool:
        """Whether the template leaves out a content that is text, as Idefics' does, and writes parts."""
        assert self.template is not None
        user = {"role": "user", "content": "Hi"}
        if self._behind_probe(self.template, [{**user, "content": PROBE}]) is not None:
            return False
        parts = [{"type": "text", "text": PROBE}]
        return self._behind_probe(self.template, [{**user, "content": parts}]) is not None

    @cached_property
    def begins_with_space(self) -> bool:
        """Whether the tokenizer puts a space in front of every text, as SentencePiece's may."""
        return bool(self.tokenizer.tokenize("a")[0].startswith("\u2581"))

    @property
    def end_ids(self) -> frozenset[int]:
        """Ids that end a document: the tokenizer's eos, and the special tokens that the template in force,
        for plain text the tokenizer's own, writes behind an answer."""
        return self._whole._end_ids

    @cached_property
    def _end_ids(self) -> frozenset[int]:
        ends = {i for i in (self.tokenizer.eos_token_id,) if i is not None}
        template = self.template or _own_template(self.tokenizer)
        if template is None:
            return frozenset(ends)
        user, answer = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": PROBE}
        call: Message = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
        talks: list[list[Message]] = [[user, answer], [user, call], [user, answer, user]]
        special = special_ids(self.tokenizer)
        for messages in talks:
            given = messages if self.template is None else self._for_template(messages)
            ids = self.encode(self._behind_probe(template, given) or "")
            marks = [i for i in ids if i in special]
            if messages[-1] is user:  # up to the end of this turn, not into the next one
                ends.update(ids[:1] if ids and ids[0] in special else [])
            elif marks and not self.tokenizer.decode(ids[ids.index(marks[-1]) + 1 :]).strip():
                ends.add(marks[-1])
        return frozenset(ends)

    def _behind_probe(self, template: str, messages: list[Message]) -> str | None:
        """What a template writes behind PROBE; None if it refuses such messages, or leaves PROBE out."""
        try:
            text = render_chat(self.tokenizer, template, messages, where="a conversation of two turns").text
        except DataError:  # a template for other roles; what it refuses in the rows is an error there
            return None
        return text.rpartition(PROBE)[2] if PROBE in text else None

    def encode(self, text: str) -> list[int]:
        """Return token ids, with `bos` in front unless the text begins with it.

        Raises:
            DataError: the text holds half a surrogate pair, which has no bytes.
        """
        check_text(text, "a text to be tokenised")
        # A rendered template has its special tokens in the text; the tokenizer would put a second bos in
        # front.
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids if ids[: len(self.bos)] == self.bos else [*self.bos, *ids]


def _resolve_template(setting: str, tokenizer: Any) -> str | None:
    if setting == "none":
        return None
    if setting == "auto":
        template = tokenizer.chat_template
        try:
            return None if template is None else str(tokenizer.get_chat_template())
        except ValueError as error:  # several, and none of them is the default
            raise ConfigError(
                f"{error}; set data.chat_template", code="ambiguous", setting="data.chat_template"
            ) from error
    if "{%" in setting or "{{" in setting:
        return setting
    path = Path(setting).expanduser()
    if path_problem(str(path)) or not path.is_file():
        raise ConfigError(
            f"data.chat_template = {setting[:200]!r} is neither auto, none, a jinja template (no '{{{{' or "
            "'{{%' in it) nor a file",
            code="wrong-format",
            setting="data.chat_template",
        )
    data = read_plain(path, ConfigError)
    with file_errors(path, ConfigError):
        return data.decode("utf-8-sig")  # a byte order mark would stand in front of every prompt


def _leading_ids(tokenizer: Any) -> list[int]:
    """[bos] where the tokenizer puts one before plain text, else []. Ids that it appends (T5's eos) are left
    out."""
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and tokenizer("")["input_ids"][:1] == [bos] else []


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Return the ids of all special tokens."""
    added = tokenizer.added_tokens_decoder.items()
    return frozenset({number for number, token in added if token.special} | set(tokenizer.all_special_ids))


def _own_template(tokenizer: Any) -> str | None:
    return tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else None


def _reads(template: str, key: str) -> bool:
    """Whether the template could read this key of a message; transformers gives reasoning three names."""
    names: Iterable[str] = _REASONING if key in _REASONING else (key,)
    return any(re.search(rf"\.{re.escape(name)}\b|['\"]{re.escape(name)}['\"]", template) for name in names)


def _with_object(call: Any) -> Any:
    """A tool call with its arguments as an object; unchanged if they are none."""
    if not isinstance(call, Mapping):
        return call
    inner = call.get("function", call)
    if not isinstance(inner, Mapping) or not isinstance(arguments := inner.get("arguments"), str):
        return call
    try:
        value = parse_value(arguments.encode(), "arguments")
    except DataError:  # text that a model wrote wrongly stays what it wrote
        return call
    if not isinstance(value, dict):
        return call
    inner = {**inner, "arguments": value}
    return {**call, "function": inner} if "function" in call else inner


def _parsed(value: Any, kind: type, where: str, *, name: str, expected: str) -> Any:
    """A value of a row, which may be written as JSON text, as data sets with one type per column do."""
    parsed = value
    if isinstance(value, str):
        try:
            parsed = parse_value(value.encode(), where)
        except DataError:
            parsed = None
    if not isinstance(parsed, kind) or isinstance(parsed, str):
        raise DataError(
            f"{where}: {name} must be {expected}, got {str(value)[:80]!r}; correct it, or rename the column "
            f"(data.columns = {{other = {name!r}}})",
            code="wrong-row",
            where=where,
            name=name,
        )
    return parsed


def _tools(value: Any, where: str) -> list[Any]:
    parsed = partial(_parsed, where=where, name="tools", expected="a list of JSON schemas")
    return [dict(parsed(tool, Mapping)) for tool in parsed(value, Sequence)]
