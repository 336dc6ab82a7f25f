"""What comes of a call to a live environment."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.environments.channel import Message
from lockstep.environments.instance import CUT, KINDS, STATE_CHARACTERS


class EnvironmentFailure(RuntimeError):
    """The author's code failed, and the sample has no outcome. Its note is the traceback.

    Args:
        kind: see ToolResult.error.
    """

    def __init__(self, text: str, *, kind: str, detail: str = "") -> None:
        super().__init__(text)
        self.kind = kind
        if detail:
            self.add_note("In the environment's process:\n" + detail)


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolResult:
    """What a call or a step of a game gave."""

    text: str
    """For the policy; of a failed call: what is wrong with it."""
    error: str | None
    """None; the policy's mistake: "unknown-tool", "wrong-arguments"; the tool's, whose instance lives on:
    "raised", "wrong-result"; or what ended the instance: "timeout", "flood", "died"; "ended": it had ended
    before; or "interrupted": it was running when the run was killed."""
    seconds: float
    """From the request to the reply."""
    reward: float | None = None
    """Of a step; None for a call."""
    done: bool = False
    """Whether the game is over."""
    truncated: bool = False
    """Whether the text was cut, which its end says."""
    detail: str = ""
    """Traceback of what the author's code raised."""


def is_reply(reply: Message, job: Message, limit: int) -> bool:
    """Whether it answers the job. Code of the policy may have sent it."""
    if reply.get("id") != job["id"]:
        return False
    state = reply.get("state")
    if state is not None and not (isinstance(state, str) and len(state) <= STATE_CHARACTERS):
        return False
    if "problem" in reply:
        return isinstance(reply["problem"], str) and reply.get("kind") in KINDS
    texts: list[object] = []
    match job["op"], reply.get("value", reply), reply:
        case ("call", text, {"truncated": bool()}):
            texts = [text]
        case ("step", text, {"truncated": bool(), "reward": float(), "done": bool()}):
            texts = [text]
        case ("reset", list(messages), _):
            texts = [m.get("content") if isinstance(m, dict) else None for m in messages]
        case ("reset", str(text), _):
            texts = [text]
        case ("reward", dict(parts), _):
            return all(isinstance(part, float) for part in parts.values())
        case ("reward", float(), _) | ("reset" | "reward" | "make" | "close", None, _):
            pass
        case _:
            return False
    return all(isinstance(text, str) and len(text) <= limit + len(CUT) + 20 for text in texts)
