"""Verifiers of packages, in a sandbox: jobs can come from any thread, end in time and cannot reach the
system.

Some reasoning_gym tasks evaluate text of the model, and math-verify's own timeout works by SIGALRM and only
in a main thread. Each package has one process, started on first use, started again after a kill; its code is
`lockstep.rollout.verifier_child`.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.errors import ConfigError
from lockstep.processes.child import JobProcess, Message, ProcessEnded
from lockstep.processes.child import end_jobs as end
from lockstep.rollout.row_values import encoded

_START_SECONDS = 180.0
"""Deadline of importing a library, which the job's own limit does not count."""
_GRACE_SECONDS = 30.0
"""Time of the process beyond the runs of a job, whose limits it keeps itself."""
_RUNS = 4
"""On the answer, on the row's own answer, and to make the task's data set twice."""
PACKAGES = {"reasoning_gym": "reasoning-gym", "math_verify": "math-verify"}

Score = tuple[float, str | None]
"""A score, and the reason why the answer counts as junk, or None."""


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
        """Score an answer by the score_answer of the task that `row["verifier"]` names.

        An exception, a time-out or a crash over the answer is junk, score 0, if the verifier takes the row's
        own answer.

        Args:
            allowed: tasks that may evaluate text on a machine without a sandbox.

        Raises:
            ConfigError: the task evaluates text, this machine has no sandbox, and the task is not allowed.
            DataError: the row holds a value that is no data.
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
        """Score `answer` against `gold` by math-verify, 1.0 or 0.0; junk as above.

        Raises:
            VerifierFailure: `gold` holds no expression, or math-verify fails on it.
        """
        own = gold.rpartition("####")[2].strip()
        own = own if "$" in own or "\\boxed" in own else f"${own}$"
        return self._score("math_verify", {"gold": gold, "answer": answer, "own_answer": own}, timeout)

    def close(self) -> None:
        """End the processes; a later job starts new ones."""
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
            case {"refused": str() as isolation}:
                raise ConfigError(
                    _refusal(job["task"], isolation), code="refused", name=job["task"], reason=isolation
                )
        raise VerifierFailure(str(reply.get("error", f"{package} replied {reply!r:.200}")))

    def _start(self, package: str) -> JobProcess:
        kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
        env = {**kept, "LC_ALL": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        process = JobProcess("lockstep.rollout.verifier_child", package, role="verify", env=env)
        try:
            reply = process.exchange({}, seconds=_START_SECONDS)
        except (TimeoutError, ProcessEnded) as error:
            raise VerifierFailure(f"{package} cannot be started: {error}") from None
        if "ready" not in reply:
            process.end()
            raise VerifierFailure(str(reply.get("error")))
        self._processes[package] = process
        return process


def _refusal(task: str, isolation: str) -> str:
    return (
        f"reasoning_gym task {task!r} evaluates text that the model wrote, and this machine gives too little "
        f"to do that safely (sandbox: {isolation}); run where the kernel allows seccomp, or, if you trust "
        f"what is scored, set allow_unsandboxed = [{task!r}] in the reward"
    )


def require_package(module: str, *, needed_by: str) -> None:
    """ConfigError with the pip line when a package is not installed; imports nothing."""
    from importlib.util import find_spec

    if find_spec(module) is None:
        raise ConfigError(
            f"missing-package: {needed_by} needs {PACKAGES[module]}, which is not installed; pip install "
            f"{PACKAGES[module]}"
        )
