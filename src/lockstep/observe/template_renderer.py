"""Renders chat templates under budgets of time and memory, in one process for all of them.

A template is a program that came with a model. Jinja's sandbox keeps it from files and attributes, but not
from loops over loops or 'x' * 10**10: those end with the process that renders. Both ends of its pipe are
here; `main` is the process, which loads no torch. What it does with a template is in `template_program`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lockstep.errors import DataError
from lockstep.observe.special_text import Places, special_text
from lockstep.observe.template_program import CPU_SECONDS, MEMORY_BYTES, answer
from lockstep.observe.text import printable
from lockstep.processes.child import JobProcess, ProcessEnded, receive, send
from lockstep.processes.programs import CHAT_TEMPLATE
from lockstep.processes.supervisor import supervise

_SECONDS = 120.0
"""Deadline for the reply to a job. The child's own limit is CPU time, which other processes do not use up."""
_BATCH_CHARACTERS = 2**22
"""Messages of one exchange with the child, as JSON; a longer conversation goes alone."""
_KEPT = ("HOME", "LANG", "LC_ALL", "LC_TIME", "LD_LIBRARY_PATH", "TZ")
"""Environment variables that the child gets: for loading libraries, and for strftime_now."""
_NAMES = ("messages", "tools", "documents", "add_generation_prompt")
_NAME = re.compile(r"[A-Za-z]\w*")
_VARIABLES_KEPT = 64
_PLACEHOLDER = [{"role": "user", "content": ""}]


@dataclass(frozen=True, kw_only=True, slots=True)
class RenderJob:
    """A conversation to render."""

    template: str
    messages: Sequence[Mapping[str, Any]]
    """The content of a message without one is null for the template."""
    generate: bool = False
    """Add the header of the assistant's turn."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """More variables of the template."""
    turns: Sequence[int] = ()
    """Indices of messages, none of them 0, that are to be located in the text."""
    where: str
    """File and row of the conversation, for error messages."""
    now: float | None = None
    """Seconds since the epoch for templates that write the date or the time; None: those of `rendering_at`,
    or when it is rendered."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RenderedTurn:
    """The place of one message in the text of its conversation, in characters. It is found by comparing that
    text with three others: of the messages before it, without and with the header of an answer, and of the
    messages up to and including it."""

    opened: int
    """Length of the common beginning of the two texts before it, without and with the header."""
    start: int
    """Length of the common beginning of the text with the header and the conversation's."""
    header: str
    """What the header adds after `opened`."""
    end: int | None
    """Length of the text up to and including it. None if the conversation's text does not begin with that
    text, or if that text ends before `start`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendered:
    """A conversation as text."""

    text: str
    spans: tuple[tuple[int, int], ...] = ()
    """Characters [start, end) of every {% generation %} block."""
    turns: tuple[RenderedTurn, ...] = ()
    """Of the job's `turns`, in order."""
    plain: Places = ()
    """Where the text is a content's, and could be taken for a special token, see `SpecialText`."""


_at: float | None = None


@contextlib.contextmanager
def rendering_at(seconds: float | None) -> Iterator[None]:
    """Let templates of this process write the date and the time of `seconds` since the epoch: a run that is
    resumed on another day renders what it rendered before. None: those of each rendering."""
    global _at
    before, _at = _at, seconds
    try:
        yield
    finally:
        _at = before


def rendering_time() -> float:
    """Return the seconds since the epoch that templates write: of `rendering_at`, or now."""
    return time.time() if _at is None else _at


def render_chats(tokenizer: Any, jobs: Sequence[RenderJob]) -> Iterator[Rendered | DataError]:
    """Render conversations as `tokenizer.apply_chat_template` does, within the child's budgets.

    Yields:
        The text of each job, or the error if the template refused the messages, failed, or used up its budget
        of time or memory. Once a job has used it up, the rest of its batch is rendered one by one, as the
        results are asked for.
    """
    results = (result for batch in _batches(tokenizer, jobs) for result in _run(batch))
    for job, result in zip(jobs, results, strict=True):
        yield result if isinstance(result, DataError) else _with_plain(tokenizer, job, result)


def _with_plain(tokenizer: Any, job: RenderJob, rendered: Rendered) -> Rendered | DataError:
    """The rendered conversation with its `plain` set, from a second rendering if there could be any."""
    found = special_text(tokenizer).hidden(job.messages, job.options)
    if found is None:
        return rendered
    messages, options, hidden = found
    again = replace(job, messages=messages, options=options, turns=())
    (result,) = (each for batch in _batches(tokenizer, [again]) for each in _run(batch))
    places = None if isinstance(result, DataError) else hidden.places(rendered.text, result.text)
    if places is None:
        return DataError(
            f"refused: {job.where}: a content holds {sorted(set(hidden.texts))}, and the chat template "
            "writes something else because of that, so that what is a special token cannot be told; leave it "
            "out"
        )
    return replace(rendered, plain=places)


def render_chat(tokenizer: Any, job: RenderJob) -> Rendered:
    """Render one conversation. Raises DataError: see `render_chats`."""
    return checked(*render_chats(tokenizer, [job]))


def checked(result: Rendered | DataError) -> Rendered:
    """Return a rendered conversation. Raises the error that it is instead."""
    if isinstance(result, DataError):
        raise result
    return result


@dataclass(frozen=True, kw_only=True, slots=True)
class _Item:
    """A job in the form that the child receives; `error` if it cannot be written as JSON."""

    where: str
    shared: str = ""
    """Template and variables without the messages, as JSON; many conversations share one text."""
    content: Mapping[str, Any] = field(default_factory=dict)
    error: DataError | None = None


def _batches(tokenizer: Any, jobs: Sequence[RenderJob]) -> Iterator[list[_Item]]:
    """Yield the jobs in batches of at most _BATCH_CHARACTERS."""
    shared: dict[str, str] = {}
    known: dict[tuple[int, int], str] = {}
    batch: list[_Item] = []
    size = 0
    for job in jobs:
        try:
            # Most jobs have the same objects, whose text would take longer to compare than to render.
            same = id(job.template), id(job.options)
            if same not in known:
                known[same] = _shared(tokenizer, job, shared)
            item = _item(job, known[same])
        except DataError as error:
            item = _Item(where=job.where, error=error)
        characters = len(item.content.get("messages", ""))
        if batch and size + characters > _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += characters
    if batch:
        yield batch


def _shared(tokenizer: Any, job: RenderJob, shared: dict[str, str]) -> str:
    """Template and variables of a job, see _Item. shared: those of the jobs before, by their content."""
    with _passable(job):
        key = _json([job.template, job.options])
        if key not in shared:
            # Across calls too, because each turn of a conversation is a call.
            names = str(sorted(tokenizer.special_tokens_map.items()))
            known = _variables_of.setdefault(tokenizer, {})
            if (key, names) not in known:
                if len(known) >= _VARIABLES_KEPT:  # rows may each have their own
                    known.clear()
                known[key, names] = _json([job.template, _variables(tokenizer, job.options)])
            shared[key] = known[key, names]
        return shared[key]


def _item(job: RenderJob, shared: str) -> _Item:
    with _passable(job):
        messages = _json(job.messages)
    content = {"messages": messages, "generate": job.generate, "turns": list(job.turns), "now": job.now}
    if job.now is None:
        content["now"] = _at
    return _Item(where=job.where, shared=shared, content=content)


_json = json.JSONEncoder(ensure_ascii=False).encode


@contextlib.contextmanager
def _passable(job: RenderJob) -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError) as error:
        raise DataError(
            f"wrong-row: {job.where}: these messages cannot be passed to a chat template: {error}"
        ) from error


def _variables(tokenizer: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """The variables that transformers passes to a template besides messages, read by a template of ours that
    writes them as JSON."""
    names = {*_NAMES, *options, *tokenizer.special_tokens_map}
    pairs = ", ".join(f"'{name}': {name}" for name in sorted(names) if _NAME.fullmatch(name))
    # By transformers itself, so that what it adds (special tokens, tools as schemas) is what its own
    # templates would get. Only this harmless template runs in our process.
    text = tokenizer.apply_chat_template(
        _PLACEHOLDER, chat_template="{{ {" + pairs + "} | tojson }}", tokenize=False, **options
    )
    variables: dict[str, Any] = json.loads(text)
    return variables


def _run(batch: Sequence[_Item]) -> Iterator[Rendered | DataError]:
    """Yield the results of a batch. If the child did not survive it, each job is run alone when its result is
    asked for, to find the one at fault: a template that never ends takes its whole budget each time."""
    sent = [item for item in batch if item.error is None]
    places = {shared: number for number, shared in enumerate(dict.fromkeys(item.shared for item in sent))}
    job = {
        "shared": list(places),
        "items": [{**item.content, "shared": places[item.shared]} for item in sent],
    }
    try:
        replies = iter(_renderer.run(job, sent[0].where)["replies"] if sent else ())
    except DataError as error:
        if len(batch) == 1:
            yield error
        else:
            for item in batch:
                yield from _run([item])
        return
    for item in batch:
        yield item.error or _result(next(replies), item.where)


def _result(reply: Mapping[str, Any], where: str) -> Rendered | DataError:
    if "error" in reply:
        return DataError(
            f"refused: {where}: the chat template refuses these messages: {printable(reply['error'])}"
        )
    spans = tuple((start, end) for start, end in reply["spans"])
    turns = tuple(RenderedTurn(**turn) for turn in reply["turns"])
    return Rendered(text=reply["text"], spans=spans, turns=turns)


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
                raise _stopped(f"there was no reply within {self._seconds:g} s", where) from error
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
        return JobProcess(CHAT_TEMPLATE, role="render", env=environment)


def _stopped(why: str, where: str) -> DataError:

    return DataError(
        f"deadline: {where}: rendering with the chat template was stopped: {why}. The limits are "
        f"{CPU_SECONDS:g} s of CPU time and {MEMORY_BYTES // 2**20} MiB, and most templates take a "
        "millisecond; look for an infinite loop in the template, or set data.chat_template to another "
        "template"
    )


_renderer = Renderer()
_variables_of: weakref.WeakKeyDictionary[Any, dict[tuple[str, str], str]] = weakref.WeakKeyDictionary()
"""By tokenizer: what `_shared` returned."""
os.register_at_fork(after_in_child=_renderer.after_fork)


# The child.


def main(*, jobs: int, replies: int) -> None:
    """Answer jobs until their pipe closes."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    supervise(jobs)
    # After supervise(), which forks: the supervisor above has no such limit.
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    while True:
        job = receive(jobs)
        shared = [(*json.loads(text), {}) for text in job["shared"]]
        answers = []
        for item in job["items"]:
            template, variables, tails = shared[item["shared"]]
            answers.append(answer(template, variables, item, tails))
        send(replies, {"id": job["id"], "replies": answers})
