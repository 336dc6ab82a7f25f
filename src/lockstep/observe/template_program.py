"""Compiled chat templates: render a conversation and locate its turns in the text.

A turn is located by comparing the text of the conversation with the texts of its first messages. Most
templates write the messages one after the other, so that the text of the first messages is a prefix of the
whole text. A `Watch` tells whether a template did so for a conversation, in two renderings for any number of
turns. Otherwise each turn takes three more renderings.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils

CPU_SECONDS = 2.0
"""CPU time of one rendering, after which the kernel ends the process. Most templates take a millisecond."""
MEMORY_BYTES = 2**30
"""Address space of the process that renders."""
TEXT_CHARACTERS = 2**24
"""Length of one rendered text."""


def answer(
    template: str,
    variables: Mapping[str, Any],
    item: Mapping[str, Any],
    tails: dict[str, tuple[str, str]] | None = None,
) -> dict[str, Any]:
    """Return {text, spans, turns}, or {error} if the template raised one.

    Args:
        tails: empty at first, and the same for all items with these variables: what the template writes
            behind
            the last message, without and with a header, where that depends on nothing else.
    """
    try:
        with limited():  # which evaluates constants such as 'x' * 10**10
            program = compiled(template)
        if item.get("now") is not None:
            variables = {**variables, "strftime_now": datetime.datetime.fromtimestamp(item["now"]).strftime}
        messages = json.loads(item["messages"])
        for message in messages:
            message.setdefault("content", None)
        conversation = Conversation(program, variables, messages, tails=tails)
        turns: list[int] = item["turns"]
        watched = conversation.watched() if turns else None
        if watched is not None:
            text, places = watched
            return {"text": text, "spans": [], "turns": [places(number) for number in turns]}
        text, spans = conversation.rendered(len(messages), generate=item["generate"])
        return {"text": text, "spans": spans, "turns": [conversation.place(text, n) for n in turns]}
    except MemoryError:
        return {"error": f"it needs more than {MEMORY_BYTES // 2**20} MiB of memory"}
    except TooLong:
        return {"error": f"the rendered text has more than {TEXT_CHARACTERS:,} characters"}
    except jinja2.TemplateError as error:
        return {"error": str(error)[:1000]}
    except Exception as error:  # any code can stand in a template
        return {"error": f"{type(error).__name__}: {str(error)[:1000]}"}


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """End the process by SIGPROF if the body takes more than CPU_SECONDS; no code of ours has to run for
    that."""
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


class TooLong(Exception):
    """A text has more than TEXT_CHARACTERS."""


class Conversation:
    """Messages under a template."""

    def __init__(
        self,
        program: Program,
        variables: Mapping[str, Any],
        messages: list[Any],
        *,
        tails: dict[str, tuple[str, str]] | None = None,
    ) -> None:
        self._program, self._tails = program, {} if tails is None else tails
        self._variables = variables
        self._messages = messages

    def rendered(self, count: int, *, generate: bool) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of the first `count` messages and the spans of its {% generation %} blocks."""
        text = self._program.text(self._with(self._messages[:count], generate=generate), Watch())
        return text, self._program.generation.spans

    def place(self, text: str, number: int) -> dict[str, Any]:
        """Return the fields of a message's RenderedTurn, from three renderings."""
        before, _ = self.rendered(number, generate=False)
        header, _ = self.rendered(number, generate=True)
        opened, start = common_length(before, header), common_length(header, text)
        end = None
        if start >= opened:
            through = (
                text if number + 1 == len(self._messages) else self.rendered(number + 1, generate=False)[0]
            )
            if text.startswith(through) and len(through) >= start:
                end = len(through)
        return {"opened": opened, "start": start, "header": header[opened:], "end": end}

    def watched(self) -> tuple[str, Callable[[int], dict[str, Any]]] | None:
        """Return the text of all messages and a function from a message's index to the fields of its
        RenderedTurn, from two renderings in all, one where the tail is known. None if what the template
        writes for the first messages could depend on later ones."""
        if not self._program.watchable:
            return None
        try:
            text, watch = self._watched(generate=False)
            if watch.looks_ahead or not watch.ended:
                return None
            body = watch.places[-1]
            known = self._tails.get(self._program.source)
            if known is not None and text[body:] == known[0]:
                closing, opening = known
            else:
                other, again = self._watched(generate=True)
                if again.looks_ahead or watch.places != again.places or text[:body] != other[:body]:
                    return None
                # What follows the last message, without and with a header.
                closing, opening = text[body:], other[body:]
                if self._program.has_constant_tail:
                    self._tails[self._program.source] = closing, opening
        except (TooLong, MemoryError):
            raise
        except Exception:  # `place` renders without Messages, which lacks some operations of a list
            return None
        opened = common_length(closing, opening)

        def place(number: int) -> dict[str, Any]:
            begin, end = watch.places[number], watch.places[number + 1]
            start = begin + common_length(opening, text[begin : begin + len(opening)])
            through: int | None = end + len(closing)
            if start < begin + opened or not text.startswith(closing, end) or end + len(closing) < start:
                through = None
            return {"opened": begin + opened, "start": start, "header": opening[opened:], "end": through}

        return text, place

    def _watched(self, *, generate: bool) -> tuple[str, Watch]:
        watch = Watch(places=[-1] * (len(self._messages) + 1))
        messages = Messages(self._messages, watch)
        return self._program.text(self._with(messages, generate=generate), watch), watch

    def _with(self, messages: Any, *, generate: bool) -> dict[str, Any]:
        return {**self._variables, "messages": messages, "add_generation_prompt": generate}


def common_length(left: str, right: str) -> int:
    """Return the number of characters that two texts share at their beginning."""
    low, high = 0, min(len(left), len(right))
    if left[:high] == right[:high]:
        return high
    while high - low > 1:  # the first `low` are equal, the first `high` are not
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low


class Program:
    """A compiled template in the environment that transformers documents for chat templates."""

    def __init__(self, text: str) -> None:
        environment = WatchingEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = tojson
        environment.globals["raise_exception"] = raise_exception
        environment.globals["strftime_now"] = strftime_now
        self._environment = environment
        self.generation = next(e for e in environment.extensions.values() if isinstance(e, Generation))
        self.source = text
        self._template = environment.from_string(text)
        # One dict: jinja's own is a chain of two, which is copied for each rendering.
        self._template.globals = dict(self._template.globals)
        tree = environment.parse(text)
        self.watchable = _is_watchable(tree)
        """Whether a Watch can tell how much text precedes each message, and whether the template looked
        ahead."""
        self.has_constant_tail = _has_constant_tail(tree)
        """Whether what it writes behind the last message is the same for all conversations."""

    def text(self, variables: Mapping[str, Any], watch: Watch) -> str:
        """Return the rendered text, and leave its spans in `generation.spans`. Raises TooLong."""
        self._environment.watch = watch
        self.generation.blocks, self.generation.spans = [], []
        with limited():
            for block in self._template.generate(**variables):
                self.generation.blocks.append(block)
                watch.size += len(block)
                if watch.size > TEXT_CHARACTERS:
                    raise TooLong
        return "".join(self.generation.blocks)


compiled = functools.lru_cache(maxsize=16)(Program)


def _is_watchable(tree: jinja2.nodes.Template) -> bool:
    """Return False if the template buffers the text of a loop, counts with jinja's joiner or cycler, or reads
    attributes through a filter."""
    nodes = jinja2.nodes
    held_back = (nodes.AssignBlock, nodes.FilterBlock)
    if any(next(block.find_all(nodes.For), None) for block in tree.find_all(held_back)):
        return False
    if any(name.name in ("joiner", "cycler") for name in tree.find_all(nodes.Name)):
        return False
    return not any(each.name == "attr" for each in tree.find_all(nodes.Filter))


def _has_constant_tail(tree: jinja2.nodes.Template) -> bool:
    """Return True if the template is text, a loop over the messages, and behind it what depends on variables
    that are given to it alone; and if only that asks for the header of an answer.

    The order of evaluation is that of the nodes: there is no other loop, macro, block or import.
    """
    nodes = jinja2.nodes
    loops = [(n, node) for n, node in enumerate(tree.body) if isinstance(node, nodes.For)]
    others = (nodes.Macro, nodes.CallBlock, nodes.Block, nodes.Include, nodes.Import, nodes.FromImport)
    if len(loops) != 1 or next(tree.find_all(others), None) is not None:
        return False
    place, loop = loops[0]
    behind = tree.body[place + 1 :]
    if not (isinstance(loop.iter, nodes.Name) and loop.iter.name == "messages"):
        return False
    assigned = {name.name for name in tree.find_all(nodes.Name) if name.ctx != "load"}
    before = {name.name for node in tree.body[: place + 1] for name in _names(node)}
    after = {name.name for node in behind for name in _names(node)}
    calls = any(next(node.find_all(nodes.Call), None) is not None for node in behind)
    return not calls and "add_generation_prompt" not in before and not after & {*assigned, "messages", "loop"}


def _names(node: jinja2.nodes.Node) -> list[jinja2.nodes.Name]:
    names = list(node.find_all(jinja2.nodes.Name))
    return [*names, node] if isinstance(node, jinja2.nodes.Name) else names


@dataclass(slots=True)
class Watch:
    """A record of one rendering."""

    places: list[int] = field(default_factory=list)
    """Length of the text when the loop over the messages reached each of them, and when it ended."""
    size: int = 0
    """Length of the text so far."""
    current: int = 0
    """Index of the message that the loop reached last; 0 before the loop."""
    began: bool = False
    ended: bool = False
    looks_ahead: bool = False
    """Whether the template read something that would differ if the conversation ended earlier."""


class Messages(Sequence[Any]):
    """The messages of a conversation, which record in a Watch how a template uses them.

    Message 0, and messages that the loop has reached, do not depend on how the conversation continues; a
    single loop over the messages, from any index on, does not either. Every other use looks ahead.
    """

    __slots__ = ("_items", "_offset", "_watch")

    def __init__(self, items: list[Any], watch: Watch, offset: int = 0) -> None:
        self._items = items
        self._watch = watch
        self._offset = offset

    def __getitem__(self, index: Any) -> Any:
        watch = self._watch
        if isinstance(index, slice):
            first = index.start or 0
            if first < 0 or index.stop is not None or index.step not in (None, 1):
                watch.looks_ahead = True
                return self._items[index]
            return Messages(self._items[first:], watch, self._offset + first)
        reached = 0 if watch.ended else watch.current
        if not (index >= 0 and index + self._offset <= reached):
            watch.looks_ahead = True
        return self._items[index]

    def __len__(self) -> int:
        self._watch.looks_ahead = True
        return len(self._items)

    def __repr__(self) -> str:
        self._watch.looks_ahead = True
        return repr(self._items)

    def __bool__(self) -> bool:
        if self._offset:  # the first message is always there
            self._watch.looks_ahead = True
        return bool(self._items)

    def __iter__(self) -> Iterator[Any]:
        watch = self._watch
        # Text of a macro is written later, and a filter reads all messages before the first is written.
        if watch.began or not _called_by_root():
            watch.looks_ahead = True
        watch.began = True
        watch.places[: self._offset] = [watch.size] * self._offset
        for number, item in enumerate(self._items, self._offset):
            if not _called_by_root():
                watch.looks_ahead = True
            watch.places[number] = watch.size
            watch.current = number
            yield item
        watch.places[-1] = watch.size
        watch.ended = True


def _called_by_root() -> bool:
    """Return whether the generator that calls this was advanced by the body of a template, not by a macro or
    a filter."""
    frame = sys._getframe(2)
    if frame.f_code is jinja2.runtime.LoopContext.__next__.__code__:
        frame = sys._getframe(3)
    return frame.f_code.co_name == "root"


class WatchingEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox, which also records in `watch` whether a template asks a loop about later messages or
    reads a namespace after the loop."""

    watch = Watch()

    def getattr(self, obj: Any, attribute: str) -> Any:
        self._note(obj, attribute)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self._note(obj, argument)
        return super().getitem(obj, argument)

    def _note(self, obj: Any, name: Any) -> None:
        if isinstance(obj, jinja2.runtime.LoopContext):
            if isinstance(obj._iterable, Messages) and name in _OF_LATER:
                self.watch.looks_ahead = True
        elif self.watch.ended and isinstance(obj, jinja2.utils.Namespace):
            self.watch.looks_ahead = True


_OF_LATER = ("last", "length", "revindex", "revindex0", "nextitem")
"""Attributes of a loop that depend on the messages after the current one."""


class Generation(jinja2.ext.Extension):
    """`{% generation %}`: records the spans of its blocks, as transformers' extension does."""

    tags = {"generation"}  # noqa: RUF012 (as jinja declares it)
    blocks: list[str]
    spans: list[tuple[int, int]]

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("note"), [], [], body).set_lineno(line)

    def note(self, caller: Callable[[], str]) -> str:
        text = caller()
        start = sum(map(len, self.blocks))
        self.spans.append((start, start + len(text)))
        return text


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Without the escapes of HTML that jinja's own filter makes."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
