"""Chat templates under budgets of time and memory: rendered by template_child.py, one process for all."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.errors import DataError
from lockstep.observe.text import printable
from lockstep.processes.jobs import JobProcess, ProcessEnded

_SECONDS = 120.0
"""Deadline of a job and its reply; the child's own limit is CPU time, which other work does not use up."""
_KEPT = ("HOME", "LANG", "LC_ALL", "LC_TIME", "LD_LIBRARY_PATH", "TZ")
"""Environment variables that the child gets: for loading libraries, and for strftime_now."""
_NAMES = ("messages", "tools", "documents", "add_generation_prompt")
_NAME = re.compile(r"[A-Za-z]\w*")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendered:
    """A conversation as text."""

    text: str
    spans: tuple[tuple[int, int], ...]
    """Characters [start, end) of every {% generation %} block."""


def render_chat(
    tokenizer: Any,
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    generate: bool = False,
    options: Mapping[str, Any] | None = None,
    where: str,
) -> Rendered:
    """Render the messages as `tokenizer.apply_chat_template` does, within the child's budgets.

    Args:
        messages: the content of a message without one is null.
        generate: add the header of the assistant's turn.
        options: more variables of the template.

    Raises:
        DataError: the template refuses the messages, fails, or uses up its budget of time or memory.
    """
    variables = _variables(tokenizer, messages, generate=generate, options=options or {}, where=where)
    reply = _renderer.run({"template": template, "variables": variables}, where)
    if "error" in reply:
        raise DataError(
            f"refused: {where}: the chat template refuses these messages: {printable(reply['error'])}",
            where=where,
        )
    return Rendered(text=reply["text"], spans=tuple((start, end) for start, end in reply["spans"]))


def _variables(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    generate: bool,
    options: Mapping[str, Any],
    where: str,
) -> dict[str, Any]:
    """The variables that transformers passes to a template, read by a template of ours that writes them as
    JSON."""
    names = {
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        *options,
        *tokenizer.special_tokens_map,
    }
    pairs = ", ".join(f"'{name}': {name}" for name in sorted(names) if _NAME.fullmatch(name))
    try:
        # By transformers itself, so that what it adds (special tokens, tools as schemas) is what its own
        # templates would get. Only this harmless template runs in our process.
        text = tokenizer.apply_chat_template(
            list(messages),
            chat_template="{{ {" + pairs + "} | tojson }}",
            tokenize=False,
            add_generation_prompt=generate,
            **options,
        )
    except (TypeError, ValueError) as error:
        raise DataError(
            f"wrong-row: {where}: these messages cannot be given to a chat template: {error}", where=where
        ) from error
    variables: dict[str, Any] = json.loads(text)
    for message in variables["messages"]:
        message.setdefault("content", None)
    return variables


class Renderer:
    """The child process: started on first use, and again after one that ran out of its budget.

    Args:
        seconds: for a job and its reply.
    """

    def __init__(self, seconds: float = _SECONDS) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._process: JobProcess | None = None

    def run(self, job: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Send one job to the child, and return its reply.

        Raises:
            DataError: it ended, or did not take the job and reply in time.
        """
        with self._lock:
            process = self._process = self._process or self._start()
            try:
                return process.exchange(dict(job), seconds=self._seconds)
            except TimeoutError as error:
                raise _stopped(f"no reply came within {self._seconds:g} s", where) from error
            except ProcessEnded as error:
                raise _stopped(str(error), where) from error
            finally:
                if process.closed:
                    self._process = None

    def after_fork(self) -> None:
        """Give up the process in a fork: it stays its owner's, and another is started when needed.

        Two that write jobs to one process would get each other's replies.
        """
        self._lock = threading.Lock()  # the other one may be held by a thread that is not in the fork
        self._process = None

    def _start(self) -> JobProcess:
        environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
        return JobProcess("lockstep.observe.template_child", role="render", env=environment)


def _stopped(why: str, where: str) -> DataError:
    from lockstep.observe.template_child import CPU_SECONDS, MEMORY_BYTES

    return DataError(
        f"deadline: {where}: rendering with the chat template was stopped: {why}. It may take "
        f"{CPU_SECONDS:g} s of processor time and {MEMORY_BYTES // 2**20} MiB, and a usual template takes a "
        "millisecond; look for a loop in it that does not end, or set data.chat_template to another one",
        where=where,
    )


_renderer = Renderer()
os.register_at_fork(after_in_child=_renderer.after_fork)
