"""One live environment in its process: jobs in, one reply each out. Loads no torch.

    {"op": "make", "row": ..., "seed": 7}                    -> {"value": None}
    {"op": "reset"}                                          -> {"value": "Solve ...", "truncated": False}
    {"op": "call", "name": "multiply", "arguments": {...}}   -> {"value": "6", "truncated": False}
    {"op": "step", "action": "7"}                            -> the same, "reward": 0.0, "done": False
    {"op": "reward", "trajectory": {...}}                    -> {"value": 1.0}
    {"op": "close"}                                          -> {"value": None}

A reply is {"problem": text, "kind": one of KINDS, "traceback": text} if the author's code failed. Replies
to jobs with `"keep": True` have the "state" too, see `state_of`, if it has changed. A job "make" with a state
makes an object of it, without the author's constructor.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import time
from collections.abc import Mapping
from typing import Any

from lockstep.environments.author import EnvironmentClass, settled
from lockstep.environments.channel import Message
from lockstep.errors import DataError
from lockstep.rollout.reward_functions import decoded, encoded, score_of, short_repr
from lockstep.rollout.reward_process import failure_of, seed_generators

KINDS = (
    *("unknown-tool", "wrong-arguments"),  # the policy's mistakes
    *("raised", "wrong-result"),  # the tool's; its instance lives on
    *("timeout", "flood", "died", "ended"),  # the instance is gone
)
_HEAP_TYPE = 1 << 9
"""Py_TPFLAGS_HEAPTYPE: of classes that are written in Python."""
STATE_CHARACTERS = 16_384
"""Most that is kept of an object's attributes."""
CUT = "\n[cut: {total} characters in all, the first {limit} are shown]"


class Instance:
    """An object of the author's class, and what may be asked of it.

    Args:
        limit: characters of a result; a longer one is cut and marked with CUT.
    """

    def __init__(self, environment: EnvironmentClass, *, limit: int) -> None:
        self._environment, self._limit = environment, limit
        self._object: Any = None
        self._row: Mapping[str, Any] = {}
        self._seed = 0
        self._told: str | None = ""

    async def reply(self, job: Message) -> Message:
        """Do a job. SystemExit and KeyboardInterrupt of the author's code pass."""
        began = time.perf_counter()
        try:
            seed_generators(call_seed(job.get("seed", self._seed), job.get("turn", -1), job.get("call", 0)))
            reply = await getattr(self, f"_{job['op']}")(job)
        except Exception as error:  # whatever the author's code raises: told to the trainer
            reply = {**failure_of(error, None), "kind": "raised"}
        if job.get("keep"):
            known = type(self._object) is self._environment.made  # a function may make something else
            state = state_of(self._object) if known else None
            if state != self._told:
                self._told = reply["state"] = state
        return {**reply, "seconds": time.perf_counter() - began}

    async def _make(self, job: Message) -> Message:
        self._row, self._seed = decoded(job["row"], "row"), job["seed"]
        if "state" in job:
            self._object = object.__new__(self._environment.made)
            vars(self._object).update(decoded(json.loads(job["state"]), "state"))
        else:
            self._object = self._environment.make()
        return {"value": None}

    async def _reset(self, job: Message) -> Message:
        reset = getattr(self._object, "reset", None)
        if reset is None:
            return {"value": None}
        given = _accepted(reset, self._row)
        if isinstance(given, str):
            return _wrong(given)
        value = await settled(reset(**given))
        if self._environment.form == "gym" and isinstance(value, tuple) and len(value) == 2:
            value = value[0]  # gymnasium's (observation, info)
        if value is None and self._environment.form == "toolbox":
            return {"value": None}
        if isinstance(value, list) and not _are_blocks(value):
            return self._messages(value)
        return self._text(value, "reset")

    async def _call(self, job: Message) -> Message:
        name, arguments = job["name"], job["arguments"]
        if name not in self._environment.tools:  # the trainer asks for no other than it lists
            return self._text(await settled(self._object._call_tool(name, arguments)), name)
        method = getattr(self._object, name)
        try:
            inspect.signature(method).bind(**arguments)
        except TypeError as error:
            return {"problem": f"{name} was called with wrong arguments: {error}", "kind": "wrong-arguments"}
        return self._text(await settled(method(**arguments)), name)

    async def _step(self, job: Message) -> Message:
        value = await settled(self._object.step(job["action"]))
        if not isinstance(value, tuple) or len(value) not in (3, 4, 5):
            return _wrong(f"step returned {short_repr(value)}, not (observation, reward, done)")
        observation, reward, *ended = value
        ended = [bool(flag) for flag in ended if not isinstance(flag, Mapping)]  # without gymnasium's info
        score = score_of(reward)
        if isinstance(score, str):
            return _wrong(f"the reward of step: {score}")
        return {**self._text(observation, "step"), "reward": score, "done": any(ended)}

    async def _reward(self, job: Message) -> Message:
        which = self._environment.reward
        if which == "_reward":
            value = await settled(self._object._reward(job["trajectory"]))
        elif which == "get_reward":
            value = await settled(self._object.get_reward())
        else:
            value = None
        if value is None:
            return {"value": None}
        parts = value if isinstance(value, Mapping) else {"": value}
        scores = {str(name): score_of(part) for name, part in parts.items()}
        wrong = [f"{name or which} {text}" for name, text in scores.items() if isinstance(text, str)]
        if wrong:
            return _wrong("; ".join(wrong))
        return {"value": scores if isinstance(value, Mapping) else scores[""]}

    async def _close(self, job: Message) -> Message:
        close = getattr(self._object, "close", None)
        if close is not None:
            await settled(close())
        return {"value": None}

    def _text(self, value: Any, name: str) -> Message:
        if _are_blocks(value):
            others = sorted({str(block["type"]) for block in value} - {"text"})
            if others:
                return _wrong(f"{name} returned content of the type {others[0]!r}; the policy reads text")
            value = "".join(str(block["text"]) for block in value)
        text = as_text(value)
        if text is None:
            return _wrong(
                f"{name} returned {short_repr(value)}, which cannot be written as JSON (it holds itself, or "
                "is nested too deeply); return text, a number, a list or a dict"
            )
        text, truncated = cut(text, self._limit)
        return {"value": text, "truncated": truncated}

    def _messages(self, value: list[Any]) -> Message:
        messages, truncated = [], False
        for item in value:
            content = item.get("content") if isinstance(item, Mapping) else None
            if not isinstance(content, str) or not isinstance(item.get("role"), str):
                return _wrong(
                    f"reset returned a list with {short_repr(item)}; a message is a dict with the texts "
                    "`role` and `content`"
                )
            text, was_cut = cut(content, self._limit)
            truncated |= was_cut
            messages.append({"role": item["role"], "content": text})
        return {"value": messages, "truncated": truncated}


def call_seed(seed: int, turn: int, call: int) -> int:
    """Return the seed of `random` and numpy in a call: a function of the sample's seed, the turn and the
    call, whichever process runs it."""
    text = f"lockstep tool {seed} {turn} {call}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def state_of(thing: Any) -> str | None:
    """Return the attributes of an object as JSON, from which an equal object can be made; None where that is
    impossible: they hold more than plain data, or are longer than STATE_CHARACTERS.

    Example:
        >>> state_of(calculator)
        '{"product": 6, "seen": {"$tuple": [1, 2]}}'
    """
    bases = type(thing).__mro__[:-1]
    if any(vars(base).get("__slots__") or not base.__flags__ & _HEAP_TYPE for base in bases):
        return None  # it has more than attributes: slots, or what a list or an exception holds
    try:
        given = vars(thing)
        if not _is_plain(given, set()):
            return None
        text = json.dumps(encoded(given, ""))
    except (DataError, RecursionError, TypeError, ValueError):  # TypeError: no __dict__
        return None
    return text if len(text) <= STATE_CHARACTERS else None


def _is_plain(value: Any, seen: set[int]) -> bool:
    """Whether JSON gives back the same: types exactly, and no part that is in two places, which a copy would
    take apart."""
    if type(value) in (bool, int, float, str, bytes, type(None)):
        return True
    if type(value) not in (list, dict, tuple) or id(value) in seen:
        return False
    if value or type(value) is not tuple:  # there is one empty tuple
        seen.add(id(value))
    items = [*value.keys(), *value.values()] if isinstance(value, dict) else value
    return all(_is_plain(item, seen) for item in items)


def as_text(value: Any) -> str | None:
    """Return what the policy reads of a result: text as it is, anything else as JSON (NaN as `NaN`), objects
    that JSON lacks as their text. None if that is impossible.

    Example:
        >>> as_text("6"), as_text({"a": [1.5, float("nan"), None]})
        ('6', '{"a": [1.5, NaN, null]}')
    """
    if isinstance(value, str):
        text = value
    else:
        try:
            text = json.dumps(value, ensure_ascii=False, default=_plain)
        except (ValueError, TypeError, RecursionError):  # cyclic; keys that are no text; too deep
            return None
        if not isinstance(value, bool | int | float | list | tuple | Mapping) and text.startswith('"'):
            text = json.loads(text)  # a date, a path, ...: its text alone
    return text.encode(errors="replace").decode()  # half a surrogate pair has no tokens


def cut(text: str, limit: int) -> tuple[str, bool]:
    """Return the text, or its first `limit` characters with a mark, and whether it was cut."""
    if len(text) <= limit:
        return text, False
    return text[:limit] + CUT.format(total=len(text), limit=limit), True


def _are_blocks(value: Any) -> bool:
    """Whether it is a list of TRL's content blocks: {"type": "text", "text": "..."}."""
    if not isinstance(value, list) or not value or not all(isinstance(block, dict) for block in value):
        return False
    kinds = [block.get("type") for block in value]
    return all(isinstance(k, str) and b.keys() == {"type", k} for k, b in zip(kinds, value, strict=True))


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()  # arrays and numbers of numpy
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)  # the order of a set differs between processes
    return str(value)


def _accepted(reset: Any, row: Mapping[str, Any]) -> dict[str, Any] | str:
    """The columns that `reset` names, or all if it takes `**row`; a text if it names one that is missing."""
    parameters = inspect.signature(reset).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return dict(row)
    missing = [p.name for p in parameters if p.default is p.empty and p.name not in row]
    if missing:
        columns = ", ".join(map(str, row)) or "none"
        return f"reset takes {', '.join(missing)}, which the row lacks; its columns: {columns}"
    return {p.name: row[p.name] for p in parameters if p.name in row}


def _wrong(text: str) -> Message:
    return {"problem": text, "kind": "wrong-result"}
