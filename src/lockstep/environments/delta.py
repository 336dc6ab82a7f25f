"""The tokens of a conversation of many turns: a ledger to which turns and replies are only ever appended.

    conversation = ConversationTokens(template, tools=schemas)
    ledger = conversation.start(messages)                 # ledger.ids: the prompt
    turn = ledger.add_policy(ids)                         # as the policy sampled them
    reply = conversation.reply(ledger, [call.result("42") for call in turn.made])
    reply.ids                                             # to append, or a whole prefix if it is a Branch

What a policy wrote is never rendered again. For a reply, the template renders the prompt, a stub that holds a
word in the place of the last turn, and the new messages; what follows the end of the turn in that text is the
reply. If the template would now write the turn itself otherwise (it strips reasoning of earlier turns),
nothing can be appended: the trajectory goes on with a new prefix, a `Branch`.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lockstep.environments.turns import WRITTEN, PolicyTurn, Stub, Turns
from lockstep.errors import EngineError
from lockstep.observe.chat_template import ChatTemplate, Message
from lockstep.observe.special_text import Places, within
from lockstep.observe.template_program import common_length

BranchCause = Literal["header", "thinking", "end"]
"""Why a template cannot extend what is there. header: it now writes the header of the turn otherwise.
thinking: it leaves out reasoning of the turn. end: it leaves out the token that ended the turn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """What follows a turn: the end of the turn, the new messages, and the header of the next turn."""

    ids: tuple[int, ...]
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Branch:
    """A new prefix for the trajectory, in the place of all ids so far."""

    ids: tuple[int, ...]
    text: str
    cause: BranchCause


@dataclass(frozen=True, kw_only=True, slots=True)
class Appended:
    """A reply in its ledger, and how it was found."""

    messages: Sequence[Message]
    ids: tuple[int, ...]
    text: str
    plain: Places
    """Where the text is part of no special token."""
    before: str
    """What the template writes between the header and the first word of the stub."""
    gap: str
    """What it writes between the stub's last word and the reply: the end of the turn."""


@dataclass(kw_only=True, slots=True)
class Part:
    """A prefix and the turns and replies after it: what one sequence is trained on."""

    messages: list[Message]
    """Of the prefix."""
    ids: tuple[int, ...]
    text: str
    plain: Places
    turns: list[PolicyTurn] = field(default_factory=list)
    replies: list[Appended] = field(default_factory=list)
    keep_ids: list[bool] = field(default_factory=list)
    """Of the turns that `Ledger.encode_turns` has come to: whether their text has the ids of the policy."""

    @property
    def header(self) -> str:
        """The text before the turn that comes next, or came last."""
        return self.replies[-1].text if self.replies else self.text


class Ledger:
    """A trajectory of one conversation: its parts, the last of which grows."""

    def __init__(self, turns: Turns, part: Part, where: str) -> None:
        self._turns = turns
        self.parts = [part]
        self.causes: list[BranchCause] = []
        """Of the branches, in order."""
        self.odd_replies = 0
        """Replies that have other ids in one text with the end of the turn before them."""
        self.where = where
        self._encoding = threading.Lock()

    @property
    def part(self) -> Part:
        """The part that grows."""
        return self.parts[-1]

    @property
    def ids(self) -> tuple[int, ...]:
        """All ids of the last part."""
        part, ids = self.part, list(self.part.ids)
        for number, turn in enumerate(part.turns):
            ids += turn.ids
            ids += part.replies[number].ids if number < len(part.replies) else ()
        return tuple(ids)

    @property
    def number(self) -> int:
        """Turns so far."""
        return sum(len(part.turns) for part in self.parts)

    @property
    def waits_for_policy(self) -> bool:
        """Whether a turn comes next, not a reply."""
        return len(self.part.turns) == len(self.part.replies)

    def add_policy(self, ids: Sequence[int]) -> PolicyTurn:
        """Append a turn as it was sampled, and return what it says.

        Raises:
            EngineError: a reply comes next.
        """
        if not self.waits_for_policy:
            raise EngineError(f"wrong-state: {self.where}: two turns of the policy without a reply between")
        turn = self._turns.read(ids, header=self.part.header, number=self.number)
        self.part.turns.append(turn)
        return turn

    def encode_turns(self) -> None:
        """Encode the text of the turns that have come since the last call, see `Part.keep_ids`: two thirds of
        what checking a trajectory takes, which may be done in a thread while the policy writes the next
        turn."""
        with self._encoding:
            for part in self.parts:
                part.keep_ids += self._turns.keep_ids(part.turns[len(part.keep_ids) :])


class ConversationTokens:
    """The token ids of conversations under a chat template, see the module.

    Args:
        tools: JSON schemas, as transformers' get_json_schema makes them.
        options: more variables of the template (data.chat_template_kwargs).

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
        self.turns = Turns(template, tools=tools, options=options)

    def start(self, messages: Sequence[Message], *, where: str = "a conversation") -> Ledger:
        """Return the ledger of a conversation whose next turn is the policy's.

        Raises:
            DataError: the template refuses the messages.
        """
        return Ledger(self.turns, self._part(messages, where=where), where)

    def _part(self, messages: Sequence[Message], *, where: str) -> Part:
        (rendered,) = self.turns.render([(messages, True)], where=where)
        ids = self.turns.special.encode(rendered.text, rendered.plain)
        return Part(messages=list(messages), ids=tuple(ids), text=rendered.text, plain=rendered.plain)

    def reply(self, ledger: Ledger, messages: Sequence[Message]) -> Reply | Branch:
        """Append messages that answer the last turn, and return what the policy is given next.

        Raises:
            DataError: the template refuses the messages.
            EngineError: no turn precedes them.
        """
        part, turns = ledger.part, self.turns
        if ledger.waits_for_policy:
            raise EngineError(f"wrong-state: {ledger.where}: a reply without a turn of the policy before it")
        turn = part.turns[-1]
        stub = turns.stub(turn)
        # Of the turns between only the last: what a reply looks like depends on the others under the few
        # templates that count them, and the check of the whole conversation finds out if it still does.
        base = list(part.messages)
        jobs: list[tuple[Sequence[Message], bool]] = []
        first = 0 if turns.counts else max(0, len(part.replies) - 1)
        for number in range(first, len(part.replies)):
            base += [turns.stub(part.turns[number], number + 1).message, *part.replies[number].messages]
            jobs = [(base, True)]
        through = [*base, stub.message]
        jobs += [([*through, *messages], True), (through, False)]
        *before_it, with_reply, alone = turns.render(jobs, where=ledger.where)
        text = before_it[0].text if before_it else part.text
        found = _placed(text, turn, stub, text=with_reply.text, alone=alone.text, ends=turns.end_texts)
        if not isinstance(found, tuple):
            return self._branch(ledger, messages, found)
        before, gap, start = found
        text, plain = with_reply.text[start:], within(with_reply.plain, start, len(with_reply.text))
        ids = tuple(self._behind(turn.stop, text, plain))
        ledger.odd_replies += not self._joins(turn.stop, text, plain, ids)
        part.replies.append(
            Appended(messages=list(messages), ids=ids, text=text, plain=plain, before=before, gap=gap)
        )
        return Reply(ids=ids, text=text)

    def _behind(self, stop: str, text: str, plain: Places) -> list[int]:
        """The ids of a text that follows a special token: some of these take white space with them, and some
        tokenizers put a space in front of a text."""
        special = self.turns.special
        moved = tuple((start + len(stop), end + len(stop)) for start, end in plain)
        return special.encode(stop + text, moved)[1 if stop in special.by_text else 0 :]

    def _joins(self, stop: str, text: str, plain: Places, ids: tuple[int, ...]) -> bool:
        """Whether a reply has the same ids behind a turn that is a word and its end."""
        if stop not in self.turns.special.by_text:  # no border at which the ids are given
            return True
        before = WRITTEN + stop
        moved = tuple((start + len(before), end + len(before)) for start, end in plain)
        whole = self.turns.special.encode(before + text, moved)
        return whole[len(whole) - len(ids) :] == list(ids)

    def _branch(self, ledger: Ledger, messages: Sequence[Message], cause: BranchCause) -> Branch:
        whole = [*self.history(ledger.part), *messages]
        part = self._part(whole, where=ledger.where)
        ledger.parts.append(part)
        ledger.causes.append(cause)
        return Branch(ids=part.ids, text=part.text, cause=cause)

    def history(self, part: Part) -> list[Message]:
        """Return the messages of a part, with the turns of the policy as others would keep them."""
        messages = list(part.messages)
        for number, turn in enumerate(part.turns):
            messages.append(self.turns.message(turn))
            messages += part.replies[number].messages if number < len(part.replies) else ()
        return messages


def _placed(
    base: str, turn: PolicyTurn, stub: Stub, *, text: str, alone: str, ends: Sequence[str]
) -> tuple[str, str, int] | BranchCause:
    """Return what the template writes before the words of a stub and behind them up to the reply, and where
    the reply starts; or why the turn cannot stay as it is.

    Args:
        base: the text of the messages before the stub, with the header of a turn.
        text: of these messages, the stub and the reply.
        alone: without the reply.
        ends: tokens with which the template ends turns.
    """
    first = text.find(stub.words[0], len(base))
    before = text[len(base) : first]
    if not text.startswith(base) or first < 0 or not stub.fits(before, turn.body):
        return "header" if turn.reasoning is None else "thinking"
    # The last word as often as it stands in the stub: it may stand in the reply, too.
    word, last = stub.words[-1], first
    for _ in range(alone.count(word, common_length(base, alone))):
        last = text.index(word, last) + len(word)
    behind, closing = text[last:], alone[alone.rfind(word) + len(word) :]
    shared = common_length(behind, closing)
    start = _start(turn.stop, behind, shared)
    if start is None:
        if turn.stop and turn.stop in closing:
            return "end"
        start = 0
        if "tool_calls" in stub.message:  # behind the rest of the call
            start = min((at for end in ends if (at := behind.find(end, 0, shared)) >= 0), default=shared)
    return before, behind[:start], last + start


def _start(stop: str, behind: str, shared: int) -> int | None:
    """Where a reply starts in what follows a turn: behind the token that ended it. None if that is not what
    the template ends it with.

    Args:
        shared: length of what the template writes behind the turn, whatever follows.
    """
    if not stop:
        return None
    at = behind.rfind(stop, 0, shared)
    if at >= 0:
        return at + len(stop)
    return shared + len(stop) if behind.startswith(stop, shared) else None
