"""The kinds of a prompt, by a user's regular expressions, which are searched for in a process of their own.

An expression such as `(a+)+$` can take longer than anybody waits, and holds the interpreter's lock all that
time: no thread could stop it.
"""

from __future__ import annotations

import os
import re
import resource
import signal
from collections.abc import Iterable, Mapping

from lockstep.errors import ConfigError
from lockstep.processes.child import JobProcess, ProcessEnded, end_jobs, receive, send
from lockstep.processes.programs import PROMPT_SEARCH
from lockstep.processes.supervisor import supervise
from lockstep.schema.rollout import Prompt

CPU_SECONDS = 2.0
"""Of one search; the kernel ends the process beyond it. A usual one takes microseconds."""
_SECONDS = 120.0
"""Deadline of a search on a busy machine, and of the start of the process."""


def prompt_kinds(prompts: Iterable[Prompt], expressions: Mapping[str, str]) -> dict[str, list[str]]:
    """Return for the text of each prompt the names of those `expressions`, of `eval.kinds`, that are found in
    it.

    Raises:
        ConfigError: a search took too long, or its process died.
    """
    found: dict[str, list[str]] = {}
    if not expressions:
        return {prompt.text: [] for prompt in prompts}
    process: JobProcess | None = None
    try:
        for prompt in prompts:
            if prompt.text in found:
                continue
            process = process or _started()
            found[prompt.text] = [
                name
                for name, expression in expressions.items()
                if _is_found(process, name, expression, prompt)
            ]
    finally:
        if process is not None:
            end_jobs([process])
    return found


def _started() -> JobProcess:
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    return JobProcess(PROMPT_SEARCH, role="search", env=kept)


def _is_found(process: JobProcess, name: str, expression: str, prompt: Prompt) -> bool:
    job = {"expression": expression, "text": prompt.text, "seconds": CPU_SECONDS}
    try:
        return bool(process.exchange(job, seconds=_SECONDS).get("found"))
    except (TimeoutError, ProcessEnded) as error:
        where = prompt.where or f"row {prompt.index + 1}"
        raise ConfigError(
            f"deadline: eval.kinds.{name} = {expression!r}: matching it against the prompt of {where} "
            f"({len(prompt.text):,} characters) was stopped: {error}. The limit is {CPU_SECONDS:g} s of CPU "
            "time, and most expressions take microseconds; avoid nested repetitions such as (a+)+ or "
            "(a|b*)*"
        ) from None


def main(*, jobs: int, replies: int) -> None:
    """Answer jobs {expression, text, seconds} until their pipe closes; SIGPROF ends the process after so much
    processor time."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    supervise(jobs)
    while True:
        job = receive(jobs)
        signal.setitimer(signal.ITIMER_PROF, job["seconds"])
        found = re.search(job["expression"], job["text"]) is not None
        signal.setitimer(signal.ITIMER_PROF, 0)
        send(replies, {"id": job["id"], "found": found})
