"""Chat templates under budgets of time and memory: rendered by template_child.py, one process for all."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.errors import DataError
from lockstep.observe.text import printable

_CHILD = Path(__file__).with_name("template_child.py")
_SECONDS = 120.0
"""Deadline of a job and its reply; the child's own limit is CPU time, which other work does not use up."""
_END_SECONDS = 10.0
_KEPT = ("HOME", "LANG", "LC_ALL", "LC_TIME", "LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONPATH", "TZ")
"""Environment variables that the child gets: for finding Python's packages, and for strftime_now."""
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
        generate: add the header of the assistant's turn.
        options: more variables of the template.

    Raises:
        DataError: the template refuses the messages, fails, or uses up its budget of time or memory.
    """
    variables = _variables(tokenizer, messages, generate=generate, options=options or {}, where=where)
    reply = _renderer.run({"template": template, "variables": variables}, where)
    if "error" in reply:
        raise DataError(f"{where}: the chat template refuses these messages: {printable(reply['error'])}")
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
        text = tokenizer.apply_chat_template(
            list(messages),
            chat_template="{{ {" + pairs + "} | tojson }}",
            tokenize=False,
            add_generation_prompt=generate,
            **options,
        )
    except (TypeError, ValueError) as error:
        raise DataError(f"{where}: these messages cannot be given to a chat template: {error}") from error
    variables: dict[str, Any] = json.loads(text)
    return variables


class Renderer:
    """The child process: started on first use, and again after one that ran out of its budget.

    Args:
        seconds: for a job and its reply.
    """

    def __init__(self, seconds: float = _SECONDS) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._stop: weakref.finalize[Any, Any] | None = None

    def run(self, job: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Send one job to the child, and return its reply.

        Raises:
            DataError: it ended, or did not take the job and reply in time.
        """
        with self._lock:
            process = self._process or self._start()
            try:
                data = json.dumps(job).encode() + b"\n"
                line = _exchange(process, data, time.monotonic() + self._seconds)
            except BaseException:  # a late reply must not answer the next job
                self.close()
                raise
            if line is not None:
                reply: dict[str, Any] = json.loads(line)
                return reply
            self.close()
        raise DataError(
            f"{where}: the chat template does not end within its budget of time and memory; set "
            "data.chat_template to another one"
        )

    def close(self) -> None:
        """End the process."""
        if self._stop is not None:
            self._stop()
        self._process, self._stop = None, None

    def after_fork(self) -> None:
        """Give up the process in a fork: it stays its owner's, and another is started when needed.

        Two that write jobs to one process would get each other's replies, and the copy's end would end it.
        """
        self._lock = threading.Lock()  # the other one may be held by a thread that is not in the fork
        process, self._process = self._process, None
        if process is not None and self._stop is not None:
            self._stop.detach()
            process.returncode = -signal.SIGKILL  # there is nothing to wait for here
            _close_pipes(process)
        self._stop = None

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-P", "-W", "ignore", str(_CHILD)],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={name: os.environ[name] for name in _KEPT if name in os.environ},
        )
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)
        self._process = process
        self._stop = weakref.finalize(self, _end, process)
        return process


_renderer = Renderer()
os.register_at_fork(after_in_child=_renderer.after_fork)


def _exchange(process: subprocess.Popen[bytes], data: bytes, deadline: float) -> bytes | None:
    """The reply to one job; None: the process ended, or is late."""
    assert process.stdin is not None and process.stdout is not None
    stdin, stdout = process.stdin.fileno(), process.stdout.fileno()
    left, reply = memoryview(data), bytearray()
    while left:
        if not _is_ready(stdin, select.POLLOUT, deadline):
            return None
        try:
            left = left[os.write(stdin, left) :]
        except BrokenPipeError:
            return None
    while not reply.endswith(b"\n"):
        chunk = os.read(stdout, 1 << 16) if _is_ready(stdout, select.POLLIN, deadline) else b""
        if not chunk:
            return None
        reply += chunk
    return bytes(reply)


def _is_ready(fd: int, event: int, deadline: float) -> bool:
    poll = select.poll()
    poll.register(fd, event)
    return bool(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    _close_pipes(process)
    with contextlib.suppress(subprocess.TimeoutExpired):  # killed, and the kernel ends it when it can
        process.wait(_END_SECONDS)


def _close_pipes(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
