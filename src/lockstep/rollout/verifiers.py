"""Verifiers of packages, in a sandbox: from any thread, a job ends in time and reaches nothing.

Some reasoning_gym tasks evaluate what the model wrote, and math-verify's own timeout works by SIGALRM and
only in a main thread. One process per package, started on first use, started again after a kill; what happens
in it: `lockstep.rollout.verifier_child`.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.errors import ConfigError
from lockstep.rollout.messages import JobProcess, Message, ProcessEnded, end
from lockstep.rollout.row_values import encoded

_START_SECONDS = 180.0
"""For importing a library, which the job's own limit does not count."""
_GRACE_SECONDS = 30.0
"""What the judge may take beyond the runs of a job: it keeps their time itself."""
_RUNS = 4
"""On the answer, on the row's own answer, and to make the task's data set twice."""
PACKAGES = {"reasoning_gym": "reasoning-gym", "math_verify": "math-verify"}

Score = tuple[float, str | None]
"""A score, and why the answer counts as junk, or None."""


class VerifierFailure(RuntimeError):
    """A verifier fails on the row itself, or its process does."""


class VerifierProcess:
    """Runs verifier jobs one at a time with a time limit; safe to call from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._processes: dict[str, JobProcess] = {}

    def reasoning_gym(
        self, row: Mapping[str, Any], answer: str, *, timeout: float, allowed: Sequence[str] = ()
    ) -> Score:
        """Score by the score_answer of the task that `row["verifier"]` names.

        An exception, a time-out or a crash over the answer is junk, score 0, if the verifier takes the row's
        own answer.

        Args:
            allowed: tasks that may evaluate text on a machine that gives no sandbox.

        Raises:
            ConfigError: the task evaluates text, this machine gives no sandbox, and it is not allowed.
            DataError: the row holds something that is no data.
            VerifierFailure: the verifier fails on the row's own answer too.
        """
        entry = {k: v for k, v in row.items() if k not in ("verifier", "verifier_settings", "problem")}
        job = {
            "task": str(row["verifier"]).partition(":")[2],
            "settings": dict(row.get("verifier_settings") or {}),
            "entry": encoded(entry, "the row"),
            "answer": answer,
            "own_answer": "" if row.get("answer") is None else str(row["answer"]),
            "allowed": list(allowed),
        }
        return self._score("reasoning_gym", job, timeout)

    def math(self, gold: str, answer: str, *, timeout: float) -> Score:
        """1.0 or 0.0 by math-verify of `answer` against `gold`; junk as above.

        Raises:
            VerifierFailure: `gold` holds no expression, or math-verify fails on it.
        """
        own = gold.rpartition("####")[2].strip()
        own = own if "$" in own or "\\boxed" in own else f"${own}$"
        return self._score("math_verify", {"gold": gold, "answer": answer, "own_answer": own}, timeout)

    def close(self) -> None:
        """End the processes; a later job starts others."""
        with self._lock:
            end(self._processes.values())
            self._processes.clear()

    def _score(self, package: str, job: Message, timeout: float) -> Score:
        with self._lock:
            process = self._processes.get(package) or self._start(package)
            seconds = _RUNS * timeout + _GRACE_SECONDS
            try:
                reply = process.exchange({**job, "timeout": timeout}, seconds=seconds)
            except TimeoutError:
                raise VerifierFailure(f"{package} could not be stopped within {seconds:g} s") from None
            except ProcessEnded as error:
                raise VerifierFailure(f"{package}: {error}") from None
            finally:
                if process.closed:
                    del self._processes[package]
        match reply:
            case {"score": float() as score, **rest} if math.isfinite(score) and rest.keys() <= {"junk"}:
                junk = rest.get("junk")
                return score, None if junk is None else str(junk)
            case {"refused": str() as given}:
                raise ConfigError(_refusal(job["task"], given))
        raise VerifierFailure(str(reply.get("error", f"{package} replied {reply!r:.200}")))

    def _start(self, package: str) -> JobProcess:
        kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
        env = {**kept, "LC_ALL": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        process = JobProcess("lockstep.rollout.verifier_child", package, env=env)
        try:
            reply = process.exchange({}, seconds=_START_SECONDS)
        except (TimeoutError, ProcessEnded) as error:
            raise VerifierFailure(f"{package} cannot be started: {error}") from None
        if "ready" not in reply:
            process.close()
            raise VerifierFailure(str(reply.get("error")))
        self._processes[package] = process
        return process


def _refusal(task: str, given: str) -> str:
    return (
        f"reasoning_gym task {task!r} evaluates text that the model wrote, and this machine gives too little "
        f"to do that safely (sandbox: {given}); run where the kernel allows seccomp, or, if you trust what "
        f"is scored, set allow_unsandboxed = [{task!r}] in the reward"
    )


def require_package(module: str, *, needed_by: str) -> None:
    """ConfigError with the pip line when a package is not installed; imports nothing."""
    from importlib.util import find_spec

    if find_spec(module) is None:
        raise ConfigError(
            f"{needed_by} needs {PACKAGES[module]}, which is not installed; pip install {PACKAGES[module]}"
        )
