"""Compare a ledger with renderings of the whole conversation: what was appended turn by turn must be what the
template and the tokenizer make of all turns together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from lockstep.environments.delta import Ledger, Part
from lockstep.environments.turns import Stub, Turns, runs
from lockstep.errors import DataError
from lockstep.observe.chat_template import Message
from lockstep.observe.template_renderer import Rendered

Mismatch = Literal["refused", "header", "turn", "text", "decoded", "tokens", "reply"]
"""What differs. refused: the template refuses the whole conversation. header: what stands before a turn.
turn: a turn is left out. text: what stands behind a turn. decoded: the ids of a reply are not its text.
tokens: the ids of a prompt or a reply, in the whole conversation. reply: the ids of one, behind its turn."""
_WORD = "Zq7xChq"


@dataclass(kw_only=True, slots=True)
class Checks:
    """What was found in the conversations of a step."""

    mismatches: Counter[Mismatch] = field(default_factory=Counter)
    """Parts of trajectories that differ, by what differs first; and replies that do."""
    branches: Counter[str] = field(default_factory=Counter)
    """By cause."""
    turns: int = 0
    noncanonical_turns: int = 0
    """Turns that a template or a tokenizer would have written otherwise. They are not wrong: they are what
    the policy sampled."""
    open_borders: int = 0
    """Borders of a turn at which no special token stands, where the whole text could have other tokens."""

    def update(self, other: Checks) -> None:
        """Add what was found in other conversations."""
        self.mismatches.update(other.mismatches)
        self.branches.update(other.branches)
        self.turns += other.turns
        self.noncanonical_turns += other.noncanonical_turns
        self.open_borders += other.open_borders

    def add(self, turns: Turns, ledger: Ledger) -> None:
        """Check a trajectory that has ended."""
        self.branches.update(ledger.causes)
        self.turns += ledger.number
        if ledger.odd_replies:
            self.mismatches["reply"] += ledger.odd_replies
        ledger.encode_turns()
        for part in ledger.parts:
            if not part.turns:
                continue
            # A turn without a reply is the last of the part: nothing was appended to it.
            stubs = [turns.stub(turn, n) for n, turn in enumerate(part.turns[: len(part.replies)])]
            jobs = [
                (_messages(part, [stub.message for stub in stubs]), True),
                (_messages(part, list(map(turns.message, part.turns))), len(part.replies) == len(part.turns)),
            ]
            with_stubs, canonical = turns.rendered(jobs, where=ledger.where)
            if (mismatch := _mismatch(turns, part, stubs, with_stubs)) is not None:
                self.mismatches[mismatch] += 1
            self.open_borders += _open_borders(turns, part)
            self.noncanonical_turns += _noncanonical(part, canonical)


def _messages(part: Part, written: Sequence[Message]) -> list[Message]:
    """The messages of a part, with these for its turns."""
    messages = list(part.messages)
    for number, message in enumerate(written):
        messages.append(message)
        messages += part.replies[number].messages if number < len(part.replies) else ()
    return messages


def _mismatch(
    turns: Turns, part: Part, stubs: Sequence[Stub], whole: Rendered | DataError
) -> Mismatch | None:
    if isinstance(whole, DataError):
        return "refused"
    if (mismatch := _text_mismatch(part, stubs, whole.text)) is not None:
        return mismatch
    texts = [reply.text for reply in part.replies]
    if turns.keeps_text and turns.texts([reply.ids for reply in part.replies]) != texts:
        return "decoded"
    return None if _same_tokens(turns, part) else "tokens"


def _text_mismatch(part: Part, stubs: Sequence[Stub], text: str) -> Mismatch | None:
    """Compare the text of the whole conversation, with words in the place of what the policy wrote, with the
    ledger's."""
    if not text.startswith(part.text):
        return "header"
    at = len(part.text)
    for stub, reply in zip(stubs, part.replies, strict=True):
        first = text.find(stub.words[0], at)
        last = text.rfind(stub.words[-1]) + len(stub.words[-1])
        if first < 0 or any(word not in text for word in stub.words):
            return "turn"
        if text[at:first] != reply.before:
            return "header"
        if not text.startswith(reply.gap + reply.text, last):
            return "text"
        at = last + len(reply.gap) + len(reply.text)
    return None if at == len(text) else "text"


def _same_tokens(turns: Turns, part: Part) -> bool:
    """Whether prompt and replies have the ids that the tokenizer gives them in one text with the turns, which
    are words here. Each run from one special token to the next is compared that has no turn in it: at a
    border without a special token, the whole text may have other tokens."""
    special = turns.special
    text, plain, mine = part.text, list(part.plain), list[int | None](part.ids)
    for turn, reply in zip(part.turns, part.replies, strict=False):
        text += _WORD + turn.stop
        mine += [None, *turn.ids[-1:]] if turn.stop in special.by_text else [None]
        plain += [(begin + len(text), end + len(text)) for begin, end in reply.plain]
        text += reply.text
        mine += reply.ids
    whole = special.encode(text, tuple(plain))
    theirs, ours = list(runs(whole, special.ids)), list(runs(mine, special.ids))
    if part.turns and len(part.turns) > len(part.replies):  # the header of the last turn, too
        theirs, ours = theirs[:-1], ours[:-1]
    pairs = zip(theirs, ours, strict=False)
    return len(theirs) == len(ours) and all(None in mine or mine == their for their, mine in pairs)


def _open_borders(turns: Turns, part: Part) -> int:
    special = turns.special.ids
    before = [part.ids, *(reply.ids for reply in part.replies)]
    opened = sum(ids[-1] not in special for ids in before[: len(part.turns)] if ids)
    closed = sum(turn.ids[-1] not in special for turn in part.turns[: len(part.replies)] if turn.ids)
    return opened + closed


def _noncanonical(part: Part, whole: Rendered | DataError) -> int:
    """The number of turns that are not what the template writes for them, in text or in tokens."""
    if isinstance(whole, DataError):
        return len(part.turns)
    written = [turn.body + turn.stop for turn in part.turns]
    count, at = 0, len(part.text) if whole.text.startswith(part.text) else 0
    for number in range(len(part.turns)):
        behind = part.replies[number].text if number < len(part.replies) else ""
        same = whole.text.startswith(written[number] + behind, at) and part.keep_ids[number]
        count += not same
        found = whole.text.find(behind, at + len(written[number]) if same else at)
        at = found + len(behind) if found >= 0 else at
    return count
