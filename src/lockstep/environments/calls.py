"""Read tool calls out of what a policy wrote.

The form of a call is learned from the chat template: it writes a known call, and what stands around its name
and its arguments is the form. No model is recognised by name. A tokenizer with a `response_template` of its
own, as transformers documents it, is asked instead.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from lockstep.errors import DataError
from lockstep.observe.chat_template import ChatTemplate, Message
from lockstep.observe.template_program import common_length
from lockstep.observe.template_renderer import render_chat

_NAME = "zqname"
_OTHER = "zqother"
_ARGUMENTS = {"zqone": "zqfirst", "zqtwo": "zqsecond"}
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "x",
            "parameters": {
                "type": "object",
                "properties": {key: {"type": "string", "description": "x"} for key in _ARGUMENTS},
                "required": list(_ARGUMENTS),
            },
        },
    }
    for name in (_NAME, _OTHER)
]
_WORD = r"[^\s<>\"'(){}\[\],|]+"
_SHOWN = 200
"""Characters of what a policy wrote that an error message repeats."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A call of a tool."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""
    """For templates that write it, and for the results' `tool_call_id`."""

    def message(self) -> Message:
        """Return the call as an item of `tool_calls`."""
        return {
            "type": "function",
            "id": self.id,
            "function": {"name": self.name, "arguments": dict(self.arguments)},
        }

    def result(self, text: str) -> Message:
        """Return the message of the tool with the call's result."""
        return {"role": "tool", "name": self.name, "tool_call_id": self.id, "content": text}


_CALLS = (Call(name=_NAME, arguments=_ARGUMENTS, id="000000000"),)


@dataclass(frozen=True, kw_only=True, slots=True)
class CallError:
    """A call that does not parse."""

    message: str
    """For the policy: what is wrong, and where."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parsed:
    """A turn of the policy."""

    content: str
    """The text before the first call."""
    calls: tuple[Call, ...] | CallError = ()


class CallForm(Protocol):
    """Reads the calls of a turn."""

    def read(self, text: str) -> tuple[str, list[tuple[str, Any]]]:
        """Return the text before the first call, and the name and arguments of each.

        Raises:
            ValueError: there is a call that does not parse; the message is for the policy.
        """


class CallParser:
    """Reads the calls of turns under one chat template.

    Args:
        form: None: the template writes no calls, so that no turn has any.
        tools: JSON schemas, as transformers' get_json_schema makes them.
    """

    def __init__(self, form: CallForm | None, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self.form = form
        self._types = {name: _types(schema) for name, schema in map(_function, tools)}

    def parse(self, text: str, *, turn: int = 0) -> Parsed:
        """Return the calls of a turn, whose text is without its end token.

        Args:
            turn: number in the trajectory, for the ids of calls.
        """
        if self.form is None:
            return Parsed(content=text)
        try:
            content, found = self.form.read(text)
            calls = tuple(self._call(turn, n, *each) for n, each in enumerate(found))
        except (ValueError, RecursionError) as error:
            return Parsed(content=text, calls=CallError(message=f"The tool call cannot be read: {error}."))
        return Parsed(content=content, calls=calls)

    def _call(self, turn: int, number: int, name: str, arguments: Any) -> Call:
        if isinstance(arguments, str):
            arguments = _json(arguments, 0)[0]
        if arguments is None:
            arguments = {}
        if not isinstance(arguments, Mapping):
            raise ValueError(f"the arguments of {name!r} must be an object, got {_cut(repr(arguments))}")
        types = self._types.get(name, {})
        made = {
            key: value.typed(types.get(key)) if isinstance(value, _Raw) else value
            for key, value in arguments.items()
        }
        # Nine letters and digits, as Mistral's templates demand.
        return Call(name=name, arguments=made, id=f"{turn % 10_000:04d}{number % 100_000:05d}")


def call_parser(template: ChatTemplate, tools: Sequence[Mapping[str, Any]] = ()) -> CallParser:
    """Return the parser for a chat template, see the module."""
    if getattr(template.tokenizer, "response_template", None) is not None:
        return CallParser(_OfTransformers(template.tokenizer, list(tools)), tools)
    return CallParser(learned_form(template), tools)


def learned_form(template: ChatTemplate) -> CallForm | None:
    """Return the form in which a template writes calls; None if it writes none, or in a form that is not
    known here."""
    one = _written(template, [_NAME])
    if one is None:
        return None
    two = _written(template, [_NAME, _OTHER])
    for learn in (_Objects.learned, _Arguments.learned, _Pairs.learned, _Python.learned, _Braces.learned):
        form = learn(one, two or "")
        # Some templates lose commas or quotes: nothing can read the calls that they write.
        if form is not None and CallParser(form).parse(one).calls == _CALLS:
            return form
    return None


def _written(template: ChatTemplate, names: Sequence[str]) -> str | None:
    """What the template writes for calls, without the end of the turn; None if it leaves them out."""
    user: Message = {"role": "user", "content": "Hi"}
    calls = [
        Call(name=name, arguments=_ARGUMENTS, id=f"00000000{n}").message() for n, name in enumerate(names)
    ]
    turn: Message = {"role": "assistant", "content": "", "tool_calls": calls}
    options = {"tools": _TOOLS} if template.reads("tools") else {}

    def text(messages: Sequence[Message], *, generate: bool = False) -> str:
        job = template.job(messages, generate=generate, options=options, where="a call of a tool")
        return render_chat(template.tokenizer, job).text

    try:
        header, whole = text([user], generate=True), text([user, turn])
    except DataError:
        return None
    written = whole[common_length(header, whole) :]
    if not all(each in written for each in (*names, *_ARGUMENTS, *_ARGUMENTS.values())):
        return None
    last = max(written.rfind(value) + len(value) for value in _ARGUMENTS.values())
    added = template.tokenizer.added_tokens_decoder
    ends = [added[i].content for i in template.end_ids if i in added]
    # GLM's closing tag is the last token that its template writes, and belongs to the call.
    ends = [end for end in ends if not (end.startswith("</") and f"<{end[2:]}" in written)]
    stops = [at for end in ends if (at := written.find(end, last)) >= 0]
    return written[: min(stops)] if stops else written


# The forms.


class _OfTransformers:
    """By the tokenizer's own `response_template`."""

    def __init__(self, tokenizer: Any, tools: list[Any]) -> None:
        self._tokenizer, self._tools = tokenizer, tools

    def read(self, text: str) -> tuple[str, list[tuple[str, Any]]]:
        message = self._tokenizer.parse_response(text, prefix="", tools=self._tools)
        found = []
        for call in message.get("tool_calls") or ():
            inner = call.get("function", call) if isinstance(call, Mapping) else None
            if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
                raise ValueError(f"a call needs a name and arguments, got {_cut(repr(call))}")
            found.append((inner["name"], inner.get("arguments")))
        return str(message.get("content") or ""), found


@dataclass(frozen=True, slots=True)
class _Objects:
    """JSON objects that hold name and arguments, or lists of them: Hermes, Qwen, Llama 3, Mistral, Cohere."""

    opening: str
    """May be empty: then the whole turn is the call."""
    closing: str
    name: str
    arguments: str

    @classmethod
    def learned(cls, one: str, two: str) -> _Objects | None:
        for match in re.finditer(r"[\[{]", one[: one.index(_NAME)]):
            try:
                value, end = _json(one, match.start())
            except ValueError:
                continue
            found = next((each for each in _mappings(value) if _NAME in each.values()), None)
            if found is None:
                continue
            keys = [key for key, item in found.items() if item in (_ARGUMENTS, json.dumps(_ARGUMENTS))]
            name = next(key for key, item in found.items() if item == _NAME)
            if keys:
                return cls(_last_line(one[: match.start()]), _first_line(one[end:]), name, keys[0])
        return None

    def read(self, text: str) -> tuple[str, list[tuple[str, Any]]]:
        if not self.opening:
            begin = len(text) - len(text.lstrip())
            is_call = re.match(rf"[\[{{][\s\[{{]*\"{re.escape(self.name)}\"", text[begin:])
            if not is_call:
                return text, []
            return text[:begin], [*self._from(*_json(text, begin), text)]
        first, *blocks = text.split(self.opening)
        found: list[tuple[str, Any]] = []
        for block in blocks:
            value, end = _json(block, len(block) - len(block.lstrip()))
            rest = block[end:].lstrip()
            if self.closing and rest and not rest.startswith(self.closing):
                raise ValueError(f"expected {self.closing!r} after the call, got {_cut(rest)!r}")
            found += self._from(value, end, block)
        return first, found

    def _from(self, value: Any, end: int, text: str) -> Iterator[tuple[str, Any]]:
        for each in value if isinstance(value, list) else [value]:
            if not isinstance(each, Mapping) or not isinstance(each.get(self.name), str):
                raise ValueError(
                    f'a call must be {{"{self.name}": ..., "{self.arguments}": {{...}}}}, got '
                    f"{_cut(json.dumps(each))}"
                )
            yield each[self.name], each.get(self.arguments)


@dataclass(frozen=True, slots=True)
class _Arguments:
    """A name, and its arguments as JSON behind it: DeepSeek, Kimi, gpt-oss."""

    opening: str
    """Before the name."""
    between: str
    """The last word before the arguments; may be empty."""

    @classmethod
    def learned(cls, one: str, two: str) -> _Arguments | None:
        begin = _name(one)
        end = begin + len(_NAME)
        for match in re.finditer(r"\{", one[end:]):
            start = end + match.start()
            try:
                value, stop = _json(one, start)
            except ValueError:
                continue
            if value == _ARGUMENTS:
                before = _repeated(one[:begin], one[start:stop], two)
                if not before:
                    return None
                words = one[end:start].split()
                return cls(before, re.split(r"(?=<)", words[-1])[-1] if words else "")
        return None

    def read(self, text: str) -> tuple[str, list[tuple[str, Any]]]:
        first, *blocks = text.split(self.opening)
        found = []
        for block in blocks:
            name = re.match(_WORD, block)
            brace = block.find("{")
            gap = block[name.end() : brace] if name and brace >= 0 else ""
            if name is None or brace < 0 or self.between not in gap or len(gap) > len(self.between) + 80:
                raise ValueError(
                    f"a name and a JSON object must follow {self.opening!r}, got {_cut(block)!r}"
                )
            # Kimi's names have a number behind them.
            found.append((re.sub(r":\d+$", "", name.group()), _json(block, brace)[0]))
        return first, found


@dataclass(frozen=True, slots=True)
class _Raw:
    """An argument whose type its text does not tell."""

    text: str
    quoted: bool = False
    """It was written as a string, which is how some templates write numbers, too."""

    def typed(self, kind: Any) -> Any:
        as_it_is = self.quoted and kind not in ("integer", "number", "boolean")
        return self.text if as_it_is else _typed(self.text, kind)


@dataclass(frozen=True, slots=True)
class _Pairs:
    """A name, and each argument between tags of its own: GLM, Qwen3-Coder and later, Nemotron, MiniMax."""

    opening: str
    key: str
    """Before each key."""
    value: tuple[str, ...]
    """The words between a key and its value."""
    end: str
    """After each value."""
    closing: str
    line: bool
    """The value stands on a line of its own."""

    @classmethod
    def learned(cls, one: str, two: str) -> _Pairs | None:
        begin = _name(one)
        end = begin + len(_NAME)
        marks = [text for pair in _ARGUMENTS.items() for text in pair]
        places = [(at := one.find(mark, end), at + len(mark)) for mark in marks]
        if [start for start, _ in places] != sorted(start for start, _ in places):
            return None
        (k1, k1e), (v1, v1e), (k2, _), (_, v2e) = places
        first, middle, next_, last = one[end:k1], one[k1e:v1], one[v1e:k2], one[v2e:]
        shared = next_[len(next_) - common_length(first[::-1], next_[::-1]) :]
        key = shared[max(0, shared.rfind("<")) :].strip()
        stop = next_[: next_.rfind(key)].strip()
        before = _last_line(one[:begin])
        if not (key and stop and middle.strip() and before) or "<" not in middle + key:
            return None
        closing = last.strip().removeprefix(stop).strip()
        words = tuple(re.sub(r"(?<=>)(?=<)", " ", middle).split())
        return cls(before, key, words, stop, closing, middle.endswith("\n"))

    def read(self, text: str) -> tuple[str, list[tuple[str, Any]]]:
        first, *blocks = text.split(self.opening)
        gap = r"\s*".join(map(re.escape, self.value))
        line = r"\n?" if self.line else ""
        pair = re.compile(
            rf"\s*{re.escape(self.key)}\s*(?P<key>{_WORD})\s*{gap}{line}(?P<value>.*?){line}"
            rf"{re.escape(self.end)}",
            re.DOTALL,
        )
        found = []
        for block in blocks:
            name = re.match(rf"\s*({_WORD})[^\w\s<]*", block)
            if name is None:
                raise ValueError(f"a name must follow {self.opening!r}, got {_cut(block)!r}")
            at, arguments = name.end(), dict[str, Any]()
            while match := pair.match(block, at):
                arguments[match["key"]] = _Raw(match["value"])
                at = match.end()
            rest = block[at:].strip()
            if not self._closes(rest):
                raise ValueError(f"expected {self.key!r} or {self.closing!r}, got {_cut(rest)!r}")
            found.append((name.group(1), arguments))
        return self._before(first), found

    def _closes(self, rest: str) -> bool:
        """Whether the arguments end here. A stop token may have taken the last tags."""
        compact, closing = "".join(rest.split()), "".join(self.closing.split())
        return not compact or compact.startswith(closing[: max(1, len(compact))]) if closing else not compact

    def _before(self, text: str) -> str:
        """The text without a tag around all calls that stands on a line of its own."""
        return re.sub(r"\s*<[^<>\n]*>\s*$", "", text) if text.rstrip().endswith(">") else text


@dataclass(frozen=True, slots=True)
class _Python:
    """A list of calls as Python writes them: LFM2, Llama 4."""

    opening: str
    """May be empty: then the whole turn is the list."""
    closing: str

    @classmethod
    def learned(cls, one: str, two: str) -> _Python | None:
        begin = one.find(f"[{_NAME}({next(iter(_ARGUMENTS))}=")
        end = one.rfind(")]")
        if begin < 0 or end < 0:
            return None
        return cls(_last_line(one[:begin]), _first_line(one[end + 2 :]))

    def read(self, text: str) -> tuple[str, list[tuple[str, Any]]]:
        if self.opening:
            first, *blocks = text.split(self.opening)
        elif re.match(rf"\s*\[{_WORD}\(", text):
            first, blocks = "", [text]
        else:
            return text, []
        found: list[tuple[str, Any]] = []
        for block in blocks:
            inner = block.split(self.closing)[0] if self.closing else block
            try:
                tree = ast.parse(inner.strip(), mode="eval").body
                calls = tree.elts if isinstance(tree, ast.List) else [tree]
                found += [self._call(call) for call in calls]
            except (SyntaxError, TypeError, ValueError, MemoryError) as error:  # {[]: 1}
                raise ValueError(f"expected a list of Python calls, got {_cut(inner)!r}") from error
        return first, found

    def _call(self, call: ast.expr) -> tuple[str, dict[str, Any]]:
        if not isinstance(call, ast.Call) or call.args or not all(each.arg for each in call.keywords):
            raise ValueError("no call by keywords")
        return ast.unparse(call.func), _quoted({str(k.arg): _literal(k.value) for k in call.keywords})


@dataclass(frozen=True, slots=True)
class _Braces:
    """A name and braces with bare keys, strings between marks of their own: Gemma 4."""

    opening: str
    quote: str
    closing: str

    @classmethod
    def learned(cls, one: str, two: str) -> _Braces | None:
        key, value = next(iter(_ARGUMENTS.items()))
        begin = _name(one)
        match = re.match(rf"{_NAME}\{{{key}:(.*?){value}", one[begin:])
        before, end = _last_line(one[:begin]), one.rfind("}")
        if match is None or not match[1] or not before:
            return None
        return cls(before, match[1], _first_line(one[end + 1 :]))

    def read(self, text: str) -> tuple[str, list[tuple[str, Any]]]:
        first, *blocks = text.split(self.opening)
        found = []
        for block in blocks:
            name = re.match(_WORD, block)
            if name is None or block[name.end() : name.end() + 1] != "{":
                raise ValueError(f"a name and arguments in braces must follow {self.opening!r}")
            inner = block[name.end() :]
            inner = inner.split(self.closing)[0] if self.closing else inner
            found.append((name.group(), _quoted(_json(self._as_json(inner), 0)[0])))
        return first, found

    def _as_json(self, text: str) -> str:
        pieces = text.split(self.quote)
        for n in range(0, len(pieces), 2):  # outside the strings
            pieces[n] = re.sub(r"([{,]\s*)([^\s{}\[\],:\"]+)\s*:", r'\1"\2":', pieces[n])
        return "".join(json.dumps(piece) if n % 2 else piece for n, piece in enumerate(pieces))


# Parts of texts.


def _quoted(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _Raw(value, quoted=True) if isinstance(value, str) else value for key, value in arguments.items()
    }


def _json(text: str, start: int) -> tuple[Any, int]:
    """The JSON value at a place, and where it ends. Raises ValueError: for the policy."""
    try:
        return json.JSONDecoder(strict=False, parse_constant=_no_constant).raw_decode(text, start)
    except json.JSONDecodeError as error:
        near = _cut(text[max(0, error.pos - 30) :])
        raise ValueError(
            f"{error.msg} at character {error.pos - start} of the JSON, near {near!r}"
        ) from error


def _no_constant(name: str) -> Literal[0]:
    raise ValueError(f"{name} is not JSON")


def _literal(node: ast.expr) -> Any:
    """A literal of Python, or of JSON: true, false, null."""
    names = {"true": True, "false": False, "null": None}
    for each in ast.walk(node):
        for field, value in ast.iter_fields(each):
            if isinstance(value, list):
                value[:] = [_constant(item, names) for item in value]
            else:
                setattr(each, field, _constant(value, names))
    return ast.literal_eval(_constant(node, names))


def _constant(node: Any, names: Mapping[str, Any]) -> Any:
    return ast.Constant(names[node.id]) if isinstance(node, ast.Name) and node.id in names else node


def _mappings(value: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(value, Mapping):
        yield value
    for item in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
        yield from _mappings(item)


def _name(text: str) -> int:
    """Where the name stands that the arguments follow."""
    return max(0, text.rfind(_NAME, 0, text.index(next(iter(_ARGUMENTS)))))


def _last_line(text: str) -> str:
    """The last line that is not blank; of that only the last tags where others close before them."""
    lines = text.split("\n")
    line = next((each for each in reversed(lines) if each.strip()), "").lstrip()
    return line.rpartition("</think>")[2] or line


def _first_line(text: str) -> str:
    return next((each for each in text.split("\n") if each.strip()), "").strip()


def _repeated(before: str, arguments: str, two: str) -> str:
    """What stands before the name of each call: of one call all of `before` that also stands between two."""
    first, second = two.find(arguments), two.find(_OTHER)
    if first < 0 or second < first:
        return _last_line(before)
    between = two[first + len(arguments) : second]
    shared = before[len(before) - common_length(before[::-1], between[::-1]) :]
    tag = max(0, shared.find("<"))
    return _last_line(shared[tag if ">" in shared[:tag] else 0 :])  # not the end of two different tags


def _function(tool: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    inner = tool.get("function", tool)
    return str(inner.get("name", "")), inner.get("parameters") or {}


def _types(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {key: each.get("type") for key, each in (schema.get("properties") or {}).items() if "type" in each}


def _typed(text: str, kind: Any) -> Any:
    """An argument without quotes: text where the schema says text, else JSON if it is some."""
    if kind == "string":
        return text
    try:
        return _json_whole(text.strip())
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(text.strip(), text)


def _json_whole(text: str) -> Any:
    value, end = _json(text, 0)
    if text[end:].strip():
        raise ValueError("more than one value")
    return value


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
