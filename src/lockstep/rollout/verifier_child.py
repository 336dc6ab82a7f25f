"""What runs in the verifier process: reads jobs on standard input, answers with one JSON line each.

Run by its path, so it imports nothing of Lockstep. A job is a pickled dict behind a 4-byte length, sent by
our own parent over a private pipe; pickle keeps tuples and integer keys of the rows, which JSON would not.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import resource
import signal
import struct
import sys
from functools import lru_cache
from typing import Any

MEMORY_LIMIT = 8 << 30
"""Bytes of address space: an answer such as 9**9**9 must not take the machine with it."""

PARSE_ERRORS = (
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    AttributeError,
    SyntaxError,
    RecursionError,
    AssertionError,
)
"""What a verifier may raise over an answer that it cannot parse."""


@lru_cache(maxsize=32)
def _dataset(task: str, settings: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(task, seed=0, size=8, **json.loads(settings))


def _reasoning_gym(job: dict[str, Any]) -> dict[str, Any]:
    dataset = _dataset(job["task"], json.dumps(job["settings"], sort_keys=True))
    entry = job["entry"]
    try:
        return {"score": float(dataset.score_answer(answer=job["answer"], entry=entry))}
    except PARSE_ERRORS as error:
        # Junk only if the verifier itself works on this entry: it must take the entry's own answer without
        # raising.
        own = entry.get("answer")
        dataset.score_answer(answer="" if own is None else own, entry=entry)
        return {"score": 0.0, "junk": f"{type(error).__name__}: {error}"}


@lru_cache(maxsize=4096)
def _gold(answer: str) -> Any:
    from math_verify import parse

    gold = answer.rpartition("####")[2].strip()
    text = gold if "$" in gold or "\\boxed" in gold else f"${gold}$"
    parsed = parse(text, parsing_timeout=None, raise_on_error=True)
    if not gold or not parsed:
        raise ValueError(f"math-verify finds no expression in the row's answer {answer!r}")
    return parsed


def _math(job: dict[str, Any]) -> dict[str, Any]:
    from math_verify import parse, verify

    gold = _gold(job["gold"])
    found = parse(job["answer"], parsing_timeout=None)
    if not found:
        return {"score": 0.0, "junk": "no mathematical expression"}
    return {"score": float(verify(gold, found, timeout_seconds=None))}


def _ready(job: dict[str, Any]) -> dict[str, Any]:
    __import__(job["module"])
    return {"ready": True}


JOBS = {"reasoning_gym": _reasoning_gym, "math": _math, "import": _ready}


def main() -> None:
    """Serve jobs until standard input closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    jobs, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints must not land among the replies
    import logging

    logging.disable(
        logging.WARNING
    )  # math-verify warns that its own timeout is off; the parent keeps the time
    while head := jobs.read(4):
        job = pickle.loads(jobs.read(struct.unpack("<I", head)[0]))
        # If the parent is gone, nobody else would end a job that loops: the default action of SIGALRM does.
        signal.alarm(math.ceil(job["timeout"]) + 5)
        try:
            reply = JOBS[job["kind"]](job)
        except Exception as error:  # handed to the parent, which raises it
            reply = {"error": f"{type(error).__name__}: {error}"}
        signal.alarm(0)
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
