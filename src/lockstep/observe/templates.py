"""Chat templates under budgets of time and memory: rendered by template_child.py, one process for all."""

from __future__ import annotations

import contextlib
import json
import re
import select
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
"""For a reply; the child's own limit is CPU time, which other work on the machine does not use up."""
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
    """What `tokenizer.apply_chat_template` makes of the messages, within the child's budgets.

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
    """What transformers passes to a template, read back from a template of ours that writes it as JSON."""
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
    """The child process: started on first use, and again after one that ran out of its budget."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._stop: weakref.finalize[Any, Any] | None = None

    def run(self, job: Mapping[str, Any], where: str) -> dict[str, Any]:
        """The child's reply to one job.

        Raises:
            DataError: it ended, or gave no reply in time.
        """
        with self._lock:
            process = self._process or self._start()
            try:
                line = _exchange(process, json.dumps(job).encode() + b"\n")
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

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-P", "-W", "ignore", str(_CHILD)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._process = process
        self._stop = weakref.finalize(self, _end, process)
        return process


_renderer = Renderer()


def _exchange(process: subprocess.Popen[bytes], data: bytes) -> bytes | None:
    """The reply to one job; None: the process ended, or is late."""
    assert process.stdin is not None and process.stdout is not None
    deadline, reply = time.monotonic() + _SECONDS, b""
    try:
        process.stdin.write(data)
        process.stdin.flush()
    except BrokenPipeError:
        return None
    while not reply.endswith(b"\n"):
        ready, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
        chunk = process.stdout.read1(1 << 16) if ready else b""  # type: ignore[attr-defined]
        if not chunk:
            return None
        reply += chunk
    return reply


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):  # a job was still in the pipe's buffer
                pipe.close()
