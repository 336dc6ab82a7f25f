"""Chat templates under budgets of time and memory: rendered by one process for all."""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import os
import re
import resource
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

from lockstep.errors import DataError
from lockstep.observe.text import printable
from lockstep.processes.child import JobProcess, ProcessEnded, receive, send
from lockstep.processes.supervisor import supervise

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
            f"refused: {where}: the chat template refuses these messages: {printable(reply['error'])}"
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
            f"wrong-row: {where}: these messages cannot be given to a chat template: {error}"
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
        return JobProcess("lockstep.observe.template_sandbox", role="render", env=environment)


def _stopped(why: str, where: str) -> DataError:

    return DataError(
        f"deadline: {where}: rendering with the chat template was stopped: {why}. It may take "
        f"{CPU_SECONDS:g} s of processor time and {MEMORY_BYTES // 2**20} MiB, and a usual template takes a "
        "millisecond; look for a loop in it that does not end, or set data.chat_template to another one"
    )


_renderer = Renderer()
os.register_at_fork(after_in_child=_renderer.after_fork)


# Renders chat templates in a process of its own (lockstep.processes.child), without torch.
#
# A template is a program that came with a model. Jinja's sandbox keeps it from files and attributes, not
# from loops over loops or 'x' * 10**10: those end with this process.


CPU_SECONDS = 2.0
"""Of one rendering; the kernel ends the process beyond it. A usual template takes a millisecond."""
MEMORY_BYTES = 2**30
TEXT_CHARACTERS = 2**24


class Generation(jinja2.ext.Extension):
    """`{% generation %}`: notes where in the text its blocks stand, as transformers' extension does."""

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


def main(*, jobs: int, replies: int) -> None:
    """Answer jobs until their pipe closes."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    supervise(jobs)
    # After supervise(), which forks: the supervisor above has no such limit.
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    while True:
        job = receive(jobs)
        with limited():
            reply = answer(job)
        send(replies, {"id": job["id"], **reply})


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """SIGPROF ends the process after CPU_SECONDS; no code of ours has to run for that."""
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def answer(job: dict[str, Any]) -> dict[str, Any]:
    """{text, spans}, or {error} with whatever the template raised."""
    try:
        template, generation = compiled(job["template"])
        generation.blocks, generation.spans = [], []
        size = 0
        for block in template.generate(**job["variables"]):
            generation.blocks.append(block)
            size += len(block)
            if size > TEXT_CHARACTERS:
                return {"error": f"its text has more than {TEXT_CHARACTERS:,} characters"}
        return {"text": "".join(generation.blocks), "spans": generation.spans}
    except MemoryError:
        return {"error": f"it needs more than {MEMORY_BYTES // 2**20} MiB of memory"}
    except jinja2.TemplateError as error:
        return {"error": str(error)[:1000]}
    except Exception as error:  # any code can stand in a template
        return {"error": f"{type(error).__name__}: {str(error)[:1000]}"}


@functools.lru_cache(maxsize=16)
def compiled(text: str) -> tuple[jinja2.Template, Any]:
    """The template in the environment that transformers documents for chat templates, and its extension."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    generation = next(e for e in environment.extensions.values() if isinstance(e, Generation))
    return environment.from_string(text), generation


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
