"""What a chat template reads, how it ends an answer, and what a row of data gives it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any

from lockstep.errors import DataError
from lockstep.observe.special_text import special_ids
from lockstep.observe.template_renderer import RenderJob, render_chat

Message = dict[str, Any]
ROW_VARIABLES = ("tools", "chat_template_kwargs", "enable_thinking")
"""Columns of a row that are for its chat template."""
PROBE = "Zq7xKwQ"
"""A text that no template writes, to see what a template puts behind an answer."""
_USER: Message = {"role": "user", "content": "Hi"}
_ANSWER: Message = {"role": "assistant", "content": PROBE}
_CALL: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"type": "function", "id": "zq7xkwq00", "function": {"name": PROBE, "arguments": {}}},
    ],
}
_REASONING = ("reasoning_content", "thinking", "reasoning")
_ARGUMENTS = {"messages", "conversation", "add_generation_prompt", "chat_template", "tokenize"}
_NULL = re.compile(r"\bcontent['\"]?\]?\s+(is|==|!=)\s+(not\s+)?none\b", re.IGNORECASE)
"""Whether a template asks for a content that is null, as DeepSeek's do of a message with tool calls."""


class ChatTemplate:
    """A jinja chat template and the tokenizer whose special tokens it writes."""

    def __init__(self, tokenizer: Any, text: str) -> None:
        self.tokenizer = tokenizer
        self.text = text

    def reads(self, name: str) -> bool:
        """Whether the template could read this variable."""
        return re.search(rf"\b{re.escape(name)}\b", self.text) is not None

    def reads_key(self, key: str) -> bool:
        """Whether the template could read this key of a message; transformers gives reasoning three names."""
        names = "|".join(map(re.escape, _REASONING if key in _REASONING else (key,)))
        return re.search(rf"\.({names})\b|['\"]({names})['\"]", self.text) is not None

    def job(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        generate: bool = False,
        options: Mapping[str, Any] | None = None,
        turns: Sequence[int] = (),
        where: str,
    ) -> RenderJob:
        """Return the job of rendering messages, whose contents are texts.

        Arguments of tool calls that are JSON text, as OpenAI's are, become objects where the template takes
        objects, and objects JSON text where it takes that alone; contents become lists of parts where it
        reads no text; an empty content beside tool calls is null where the template asks for that.
        """
        return RenderJob(
            template=self.text,
            messages=[self._prepared(message) for message in messages],
            generate=generate,
            options={} if options is None else options,
            turns=turns,
            where=where,
        )

    def _raw(self, messages: Sequence[Mapping[str, Any]], *, where: str) -> str:
        """The text of messages as they are, see `render_chat`."""
        return render_chat(self.tokenizer, RenderJob(template=self.text, messages=messages, where=where)).text

    def _prepared(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        calls, content = message.get("tool_calls"), message.get("content")
        if isinstance(calls, list) and (form := self._form_of_arguments) is not None:
            message = {**message, "tool_calls": [_with_arguments(call, form) for call in calls]}
        if calls and not content and _NULL.search(self.text):
            return {key: value for key, value in message.items() if key != "content"}
        if self._reads_parts and isinstance(content, str):
            message = {**message, "content": [{"type": "text", "text": content}]}
        return message

    @cached_property
    def _form_of_arguments(self) -> type | None:
        """What the template takes for the arguments of a call: dict, else str; None: it writes neither.

        An object, as transformers documents it, comes first: templates that take both may write text into
        braces of their own, as Gemma's do.
        """
        return next((form for form in (dict, str) if self._writes_arguments(form)), None)

    def _writes_arguments(self, form: type) -> bool:
        arguments = {PROBE: PROBE}
        call = {**_CALL["tool_calls"][0], "function": {"name": "f", "arguments": arguments}}
        turn = {**_CALL, "tool_calls": [_with_arguments(call, form)]}
        try:
            text = self._raw([_USER, turn], where="a call of a tool")
        except DataError:
            return False
        as_python = str(arguments)[1:-1]  # an object that is written without `tojson`
        return PROBE in text and as_python not in text

    @cached_property
    def _reads_parts(self) -> bool:
        """Whether the template leaves out a content that is text, as Idefics' does, and writes parts."""
        parts = [{"type": "text", "text": PROBE}]
        texts = (self._behind_probe([{**_USER, "content": content}]) for content in (PROBE, parts))
        return next(texts) is None and next(texts) is not None

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """Ids of the special tokens that the template writes behind an answer or a call of a tool, at the end
        of the conversation or before the next turn."""
        special, ends = special_ids(self.tokenizer), set()
        for messages in ([_USER, _ANSWER], [_USER, _CALL], [_USER, _ANSWER, _USER]):
            behind = self._behind_probe([self._prepared(message) for message in messages]) or ""
            ids = self.tokenizer(behind, add_special_tokens=False)["input_ids"]
            marks = [i for i in ids if i in special]
            if messages[-1] is _USER:  # up to the end of the answer, not into the next turn
                ends.update(marks[:1] if marks[:1] == ids[:1] else [])
            elif marks and not self.tokenizer.decode(ids[ids.index(marks[-1]) + 1 :]).strip():
                ends.add(marks[-1])
        return frozenset(ends)

    def _behind_probe(self, messages: Sequence[Mapping[str, Any]]) -> str | None:
        """What the template writes behind PROBE; None if it refuses such messages, or leaves PROBE out."""
        try:
            text = self._raw(messages, where="a conversation of two turns")
        except DataError:  # a template for other roles; what it refuses in the rows is an error there
            return None
        return text.rpartition(PROBE)[2] if PROBE in text else None


def row_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a row, also of the data's row in a row of `lockstep generate`, that are for its
    chat template."""
    inner = row.get("row")
    both = {**(inner if isinstance(inner, Mapping) else {}), **row}
    return {name: both[name] for name in ROW_VARIABLES if both.get(name) not in (None, "")}


def row_variables(
    row: Mapping[str, Any], template: ChatTemplate | None, where: str
) -> tuple[dict[str, Any], list[str]]:
    """Return the variables that a row gives to its chat template (`tools`, `enable_thinking` and the items of
    `chat_template_kwargs`), and the names of those that the template never reads.

    Each column may be written as JSON text, as data sets with one type per column do.

    Raises:
        DataError: one that the template reads is of the wrong kind.
    """
    given = row_columns(row)
    more = given.pop("chat_template_kwargs", {})
    more = _parsed(more, Mapping, where, name="chat_template_kwargs", expected="an object")
    unread = [f"chat_template_kwargs.{name}" for name in more if template is None or not template.reads(name)]
    unread += [name for name in given if template is None or not template.reads(name)]
    variables = {name: value for name, value in {**more, **given}.items() if value is not None}
    variables = {n: v for n, v in variables.items() if template is not None and template.reads(n)}
    for name in variables.keys() & _ARGUMENTS:
        raise DataError(
            f"wrong-row: {where}: chat_template_kwargs.{name} is not a template variable but an argument of "
            "apply_chat_template; leave it out"
        )
    thinking = "enable_thinking"
    if thinking in variables:
        value = variables[thinking]
        variables[thinking] = _parsed(value, bool, where, name=thinking, expected="true or false")
    if "tools" in variables:
        schemas = partial(_parsed, where=where, name="tools", expected="a list of JSON schemas")
        tools = [dict(schemas(tool, Mapping)) for tool in schemas(variables.pop("tools"), Sequence)]
        # Templates of Llama write their instructions for tools around an empty list, too.
        variables |= {"tools": tools} if tools else {}
    return variables, unread


def _parsed(value: Any, kind: type, where: str, *, name: str, expected: str) -> Any:
    parsed = value
    if isinstance(value, str):
        try:
            parsed = json.loads(value)
        except (ValueError, RecursionError):
            parsed = None
    if not isinstance(parsed, kind) or isinstance(parsed, str):
        raise DataError(
            f"wrong-row: {where}: {name} must be {expected}, got {str(value)[:80]!r}; correct it, or rename "
            f"the column (data.columns = {{other = {name!r}}})"
        )
    return parsed


def _with_arguments(call: Any, form: type) -> Any:
    """A tool call with its arguments as an object (dict) or as JSON text (str); unchanged if it has none."""
    inner = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(inner, Mapping):
        return call
    value = inner.get("arguments")
    if form is str and isinstance(value, Mapping):
        value = json.dumps(value, ensure_ascii=False)
    elif form is dict and isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):  # text that a model wrote wrongly stays what it wrote
            return call
    if not isinstance(value, form):
        return call
    inner = {**inner, "arguments": value}
    return {**call, "function": inner} if "function" in call else inner


# Token ids of a text: which of them are kept when it is truncated, and whether a model knows them.


def kept_at_end(ids: Sequence[int], limit: int, *, tokenizer: Any, template: str | None) -> tuple[int, int]:
    """Return (n, m): of a longer text, ids[:n], its beginning-of-sequence tokens, and ids[m:] are kept:
    `limit` tokens in all. Models are not trained on texts that do not begin so.

    Args:
        template: the chat template that wrote the text; None: plain text.

    Example: a text that begins with bos, id 1, cut to 3 of its 5 tokens: [1, 5, 6, 7, 8] -> [1, 7, 8].
    """
    first = min(_beginning(ids, tokenizer, template), limit)
    return first, len(ids) - (limit - first)


def _beginning(ids: Sequence[int], tokenizer: Any, template: str | None) -> int:
    """The number of tokens that the tokenizer puts before plain text, where the text begins with them; else
    whether it begins with the bos token."""
    around: list[int] = tokenizer("")["input_ids"]
    number = 0
    while number < min(len(around), len(ids)) and around[number] == ids[number]:
        number += 1
    if number or tokenizer.bos_token_id is None or ids[0] != tokenizer.bos_token_id:
        return number
    # Some tokenizers name a token as bos that opens every turn (<|im_start|>): it begins no sequence.
    written = template is not None and "bos_token" in template
    return int(written or tokenizer.bos_token_id not in ids[1:])


def check_known(ids: Sequence[int], vocab_size: int, *, tokenizer: Any, model: str, where: str) -> None:
    """Refuse ids beyond the embedding of a model: its layers would fail without a word about the row.

    Args:
        model: "the model", or its name.

    Raises:
        DataError: token, row, and what to do.
    """
    if not ids or max(ids) < vocab_size:
        return
    token = next(i for i in ids if i >= vocab_size)
    raise DataError(
        f"outside-vocabulary: {where}: token id {token} ({tokenizer.convert_ids_to_tokens(token)!r}) is "
        f"outside the vocabulary of {vocab_size} entries: the embedding of {model} has no row for this "
        "token of the tokenizer; add rows (transformers' resize_token_embeddings), or leave the token out"
    )
