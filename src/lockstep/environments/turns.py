"""How a chat template treats the turns of a policy: found out once, by rendering conversations with words in
the place of what a policy wrote."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

from lockstep.environments.calls import Call, CallError, CallParser, call_parser
from lockstep.errors import ConfigError, DataError
from lockstep.observe.chat_template import ChatTemplate, Message
from lockstep.observe.special_text import special_text, whole_ids
from lockstep.observe.template_program import common_length
from lockstep.observe.template_renderer import Rendered, checked, render_chats, rendering_time

THOUGHT, WRITTEN, ARGUED = "Zq7xThq", "Zq7xWrq", "Zq7xArq"
"""Words in the place of the reasoning, the text and the arguments of a call."""
_RESULT = "Zq7xRsq"
_Id = TypeVar("_Id", int, int | None)
_USER: Message = {"role": "user", "content": "Hi"}
_REASONING = ("reasoning_content", "thinking", "reasoning")
_SPLITS = re.compile(r"""split\(\s*['"]([^'"\s]{3,40})['"]\s*\)|['"]([^'"\s]{3,40})['"]\s+in\s""")


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyTurn:
    """What a policy wrote in one turn."""

    ids: tuple[int, ...]
    body: str
    """Its text, without the token that ended it."""
    stop: str
    """The token that ended it; empty if something else did."""
    thought: str
    """The reasoning and the marks around it, of which the header may hold the first; empty if there is none.
    """
    reasoning: str | None
    """The reasoning alone."""
    content: str
    """The text behind the reasoning and before the first call."""
    calls: tuple[Call, ...] | CallError = ()

    @property
    def made(self) -> tuple[Call, ...]:
        """Its calls; none if they do not parse."""
        return () if isinstance(self.calls, CallError) else self.calls


@dataclass(frozen=True, kw_only=True, slots=True)
class Stub:
    """A turn with words in the place of what the policy wrote."""

    message: Message
    words: tuple[str, ...]
    """In the order in which they are written."""
    mark: str = ""
    """The end of an empty reasoning, which is written before the first word; empty if there is none."""
    opening: str = ""
    """Of a call whose arguments are the first word."""

    def fits(self, before: str, body: str) -> bool:
        """Whether a turn begins as the template would begin it.

        Args:
            before: what the template writes between the header and the first word.
            body: what the policy wrote.
        """
        if self.opening:
            before = before.partition(self.opening)[0]
        return self.mark in before and "".join(body.split()).startswith("".join(before.split()))


class Turns:
    """Reads a policy's turns, and writes them as messages.

    Args:
        tools: JSON schemas.
        options: more variables of the template.

    Raises:
        ConfigError: there are tools, and the template has no place for them, for calls or for results.
    """

    def __init__(
        self,
        template: ChatTemplate,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.template, self.tokenizer = template, template.tokenizer
        self.now = rendering_time()
        """The time that the template writes: what it wrote for earlier turns must not change."""
        self.special = special_text(template.tokenizer)
        self.options = {**(options or {}), **({"tools": list(tools)} if tools else {})}
        self.parser = call_parser(template, tools) if tools else CallParser(None)
        if tools:
            self._check_tools()

    def render(self, jobs: Sequence[tuple[Sequence[Message], bool]], *, where: str) -> list[Rendered]:
        """Render conversations, each with or without the header of the next turn. Raises DataError: the
        template refuses one."""
        return [checked(result) for result in self.rendered(jobs, where=where)]

    def rendered(
        self, jobs: Sequence[tuple[Sequence[Message], bool]], *, where: str
    ) -> list[Rendered | DataError]:
        """Render conversations as `render` does, and return the error of each that the template refuses."""
        made = [
            replace(
                self.template.job(messages, generate=generate, options=self.options, where=where),
                now=self.now,
            )
            for messages, generate in jobs
        ]
        return list(render_chats(self.tokenizer, made))

    def text(self, ids: Sequence[int]) -> str:
        """Decode ids; special tokens as they are written."""
        return self.texts([ids])[0]

    def texts(self, many: Sequence[Sequence[int]]) -> list[str]:
        """Decode lists of ids, each as `text` does."""
        written, plain = self._written, list[list[int]]()
        rows: list[list[str | None]] = []  # None: the next of `plain`
        for ids in many:
            row, begin = list[str | None](), 0
            for at in [at for at, i in enumerate(ids) if i in written]:
                if begin < at:
                    plain.append(list(ids[begin:at]))
                    row.append(None)
                row.append(written[ids[at]])
                begin = at + 1
            if begin < len(ids):
                plain.append(list(ids[begin:]))
                row.append(None)
            rows.append(row)
        decoded = iter(self._decoded(plain))
        return ["".join(next(decoded) if each is None else each for each in row) for row in rows]

    @cached_property
    def _written(self) -> dict[int, str]:
        added = self.tokenizer.added_tokens_decoder
        return {i: added[i].content for i in self.special.ids if i in added}

    @cached_property
    def keeps_text(self) -> bool:
        """Whether decoding gives a text back as it was, spaces and all."""
        text = "\n a  b\n\n\t\u00e9 . \U0001f600"
        return self.text(self.special.encode(text, ())) == text

    def _decoded(self, many: list[list[int]]) -> list[str]:
        if self.tokenizer.is_fast:  # one call, where the tokenizer's own batch_decode makes one for each
            found: list[str] = self.tokenizer.backend_tokenizer.decode_batch(many, skip_special_tokens=False)
            return found
        return [str(self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)) for ids in many]

    def read(self, ids: Sequence[int], *, header: str, number: int) -> PolicyTurn:
        """Return a turn of the policy.

        Args:
            header: the text before it, up to its first character.
            number: of the turn in its trajectory.
        """
        last = ids[-1] if ids else None
        ends = last in self.special.ids or last in self.template.end_ids
        body = self.text(ids[:-1] if ends else ids)
        stop = self.text(ids[-1:]) if ends else ""
        reasoning, rest = self._without_reasoning(body, header)
        thought = "" if reasoning is None else body[: len(body) - len(rest)]
        if self._closers and thought and (opener := _opener(self._closers[0])) not in thought:
            thought = header[max(0, header.rfind(opener)) if opener in header else len(header) :] + thought
        parsed = self.parser.parse(rest, turn=number)
        if stop and not parsed.calls:  # a stop token may be the last of a call
            again = self.parser.parse(rest + stop, turn=number)
            parsed = again if again.calls and not isinstance(again.calls, CallError) else parsed
        content = parsed.content
        if not parsed.calls:
            content = content.removeprefix(self._wrap).removeprefix(self._wrap.lstrip())
            while end := next((each for each in self.end_texts if content.endswith(each)), None):
                content = content.removesuffix(end)
        return PolicyTurn(
            ids=tuple(ids),
            body=body,
            stop=stop,
            thought=thought,
            reasoning=reasoning,
            content=content,
            calls=parsed.calls,
        )

    def _without_reasoning(self, body: str, header: str) -> tuple[str | None, str]:
        for mark in self._closers:
            if mark in body:
                before, _, after = body.rpartition(mark)
                return before.strip().removeprefix(_opener(mark)), after
        if self._keyed is not None:
            opening, closing = self._keyed
            if opening in body or header.rstrip().endswith(opening):
                _, _, behind = body.rpartition(opening) if opening in body else ("", "", body)
                end = re.split(r"(?<=>)", closing)[0]
                thought, _, rest = behind.partition(end)
                return thought, rest.strip().removeprefix(closing[len(end) :].strip())
        return None, body

    def keep_ids(self, turns: Sequence[PolicyTurn]) -> list[bool]:
        """Return whether the tokenizer gives the text of each turn the ids that the policy sampled."""
        encoded = whole_ids(self.tokenizer, [turn.body + turn.stop for turn in turns])
        return [ids == list(turn.ids) for ids, turn in zip(encoded, turns, strict=True)]

    def stub(self, turn: PolicyTurn, number: int = 0) -> Stub:
        """Return the turn as a message of words in the place of what the policy wrote.

        Args:
            number: of the words, which differ between the turns of a conversation.
        """
        thought, written, argued = (f"{word}{number}k" for word in (THOUGHT, WRITTEN, ARGUED))
        content, words, mark = written, [written], ""
        message: Message = {"role": "assistant"}
        calls = turn.made if self.needs_calls else ()
        if calls:
            content, words = "", [argued]
            message["tool_calls"] = [
                Call(name=call.name, arguments={argued: argued}, id=call.id).message() for call in calls
            ]
        if turn.reasoning is not None and self._closers:
            close = self._closers[0]
            inner = thought if turn.reasoning.strip() else ""
            content = f"{_opener(close)}\n{inner}\n{close}\n\n{content}"
            words, mark = [thought, *words] if inner else words, "" if inner else close
        elif turn.reasoning is not None and turn.reasoning.strip():
            words = [thought, *words]
            message |= dict.fromkeys(_REASONING, thought)
        opening = str(getattr(self.parser.form, "opening", "")) if words[0] == argued else ""
        message["content"] = content
        return Stub(message=message, words=tuple(words), mark=mark, opening=opening)

    def message(self, turn: PolicyTurn) -> Message:
        """Return the turn as messages are kept elsewhere: text, reasoning and calls apart, as far as the
        template takes them apart."""
        content = turn.content
        message: Message = {"role": "assistant"}
        if turn.made:
            content = "" if self.special.pattern.search(content) else content.strip()
            message["tool_calls"] = [call.message() for call in turn.made]
        if self._closers:
            content = turn.thought + content
        elif turn.reasoning is not None:
            message |= dict.fromkeys(_REASONING, turn.reasoning.strip())
        return {**message, "content": content}

    def error(self, error: CallError) -> Message:
        """Return the reply to calls that do not parse."""
        # Where a tool's message must follow a call, there is no call that it could follow.
        return {"role": "user" if self.needs_calls else "tool", "content": error.message}

    # What the template does.

    @cached_property
    def end_texts(self) -> tuple[str, ...]:
        """The special tokens that it writes behind turns."""
        added = self.tokenizer.added_tokens_decoder
        return tuple(added[i].content for i in sorted(self.template.end_ids) if i in added)

    def _tried(self, messages: Sequence[Message], *, generate: bool = True) -> str:
        """A rendering; empty if the template refuses the messages."""
        try:
            return self.render([(messages, generate)], where="a conversation of three turns")[0].text
        except DataError:
            return ""

    @cached_property
    def _answered(self) -> tuple[str, str]:
        """Two turns with results: both raw text, and both calls."""
        call = Call(name=self._tool, arguments={ARGUED: ARGUED}, id="000000000")
        after = [call.result(_RESULT)]
        raw: Message = {"role": "assistant", "content": WRITTEN}
        called: Message = {"role": "assistant", "content": "", "tool_calls": [call.message()]}
        # Twice: some templates refuse the second turn of text alone.
        texts = [self._tried([_USER, turn, *after, turn, *after]) for turn in (raw, called)]
        return texts[0], texts[1]

    @cached_property
    def _results(self) -> tuple[str, str]:
        """What follows a turn, up to the end of a tool's result: behind raw text, and behind a call."""
        behind = []
        for text, word in zip(self._answered, (WRITTEN, ARGUED), strict=True):
            found = text.rpartition(word)[2] if word in text else ""
            found = found if _RESULT in found else ""
            places = [at + len(end) for end in self.end_texts if (at := found.find(end)) >= 0]
            behind.append(found[min(places, default=0) :])
        return behind[0], behind[1]

    @property
    def _tool(self) -> str:
        tools = self.options.get("tools") or [{}]
        inner = tools[0].get("function", tools[0])
        return str(inner.get("name") or "zqname")

    @cached_property
    def needs_calls(self) -> bool:
        """Whether a result is written otherwise, or not at all, if no call of the same name precedes it."""
        raw, called = self._results
        if not called or raw != called:
            return bool(called)
        header = self._tried([_USER])
        if [text.startswith(header) for text in self._answered] == [False, True]:
            return True
        call = Call(name=self._tool, arguments={ARGUED: ARGUED}, id="000000000")
        turn: Message = {"role": "assistant", "content": "", "tool_calls": [call.message()]}
        return self._wrap.strip() not in self._tried([_USER, turn], generate=False).removeprefix(header)

    @cached_property
    def counts(self) -> bool:
        """Whether the template numbers the turns, as ChatGLM's does, so that what it writes depends on how
        many there are."""
        rounds: list[Message] = [_USER, {"role": "assistant", "content": WRITTEN}]
        behind = [self._tried([*rounds * n, _USER]).rpartition(WRITTEN)[2] for n in (2, 3)]
        return behind[0] != behind[1] and _without_numbers(behind[0]) == _without_numbers(behind[1])

    def _check_tools(self) -> None:
        fix = "set data.chat_template to a template with tools"
        if not self.template.reads("tools"):
            raise ConfigError(
                "unsupported-chat-template: there are tools, but the chat template never reads 'tools'; "
                f"{fix}"
            )
        if self.parser.form is None:
            raise ConfigError(
                "unsupported-chat-template: there are tools, but the chat template writes no calls, or in a "
                f"form that cannot be read; {fix} that writes tool_calls, for example as JSON between "
                "<tool_call> and </tool_call>"
            )
        if not any(self._results):
            raise ConfigError(
                "unsupported-chat-template: there are tools, but the chat template refuses or leaves out "
                f"their results (messages of the role 'tool'); {fix}"
            )

    @cached_property
    def _wrap(self) -> str:
        """What stands between the header and a text, as gpt-oss writes its channel."""
        header = self._tried([_USER])
        whole = self._tried([_USER, {"role": "assistant", "content": WRITTEN}], generate=False)
        if WRITTEN not in whole or not whole.startswith(header):
            return ""
        return whole[len(header) : whole.index(WRITTEN)]

    @cached_property
    def _closers(self) -> tuple[str, ...]:
        """Marks at which the template divides a text into reasoning, which it may leave out now or in longer
        conversations, and the rest."""
        marks = dict.fromkeys(match[1] or match[2] for match in _SPLITS.finditer(self.template.text))
        return tuple(mark for mark in marks if self._divides(mark))

    def _divides(self, mark: str) -> bool:
        text = f"{_opener(mark)}\n{THOUGHT}\n{mark}\n\n{WRITTEN}"
        turn: Message = {"role": "assistant", "content": text}
        return _opener(mark) != mark and WRITTEN in self._tried([_USER, turn, _USER])

    @cached_property
    def _keyed(self) -> tuple[str, str] | None:
        """What stands around reasoning that is given apart from the text."""
        if self._closers or not any(map(self.template.reads_key, _REASONING)):
            return None
        call = Call(name=self._tool, arguments={ARGUED: ARGUED}, id="000000000")
        turn: Message = {"role": "assistant", "content": WRITTEN, **dict.fromkeys(_REASONING, THOUGHT)}
        header = self._tried([_USER])
        # Some templates write reasoning before calls alone.
        for each in (turn, {**turn, "content": "", "tool_calls": [call.message()]}):
            text = self._tried([_USER, each], generate=False)
            before, _, behind = text.partition(THOUGHT)
            closing = behind.partition(WRITTEN)[0].strip() if WRITTEN in behind else ""
            if not closing and (mark := self.special.pattern.match(behind.lstrip())):
                closing = mark.group()
            # The header may hold the opening.
            opening = before[common_length(header, text) :].strip() or _last_tag(before)
            if opening and closing and THOUGHT in text:
                return opening, closing
        return None


def runs(ids: Iterable[_Id], special: Container[_Id]) -> Iterator[list[_Id]]:
    """Yield runs of ordinary tokens, and each special token alone."""
    run: list[_Id] = []
    for i in ids:
        if i not in special:
            run.append(i)
            continue
        if run:
            yield run
        yield [i]
        run = []
    if run:
        yield run


def _without_numbers(text: str) -> str:
    return re.sub(r"\d+", "", text)


def _last_tag(text: str) -> str:
    found = re.search(r"<[^<>\s]*>[^<>]*$", text.rstrip())
    return found.group() if found else ""


def _opener(mark: str) -> str:
    """The mark that a closing mark closes: <think> for </think>."""
    return mark.replace("/", "", 1)
