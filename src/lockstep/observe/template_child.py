"""Renders chat templates in a process of its own (lockstep.processes.jobs), without torch.

A template is a program that came with a model. Jinja's sandbox keeps it from files and attributes, not from
loops over loops or 'x' * 10**10: those end with this process.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import resource
import signal
from collections.abc import Callable, Iterator
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

from lockstep.processes.messages import receive, send
from lockstep.processes.supervisor import supervise

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
