"""Third-party verifiers in a sandbox: jobs may come from any thread, have a deadline, and cannot access the
system.

Some reasoning_gym tasks evaluate text of the model, and math-verify's own timeout works by SIGALRM and only
in a main thread. Each package has one process, started on first use, started again after a kill; its code is
`lockstep.rollout.verifiers`.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import importlib
import inspect
import json
import logging
import math
import os
import re
import select
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any, NoReturn

from lockstep.common_errors import missing_package
from lockstep.errors import ConfigError
from lockstep.observe.text import printable
from lockstep.processes.child import JobProcess, Message, ProcessEnded, end_jobs, receive, send
from lockstep.processes.programs import VERIFIERS
from lockstep.processes.supervisor import close_all_but
from lockstep.rollout import sandbox
from lockstep.rollout.reward_functions import decoded, encoded

if TYPE_CHECKING:
    from lockstep.config.rollout import RewardConfig

_START_SECONDS = 180.0
"""Deadline of importing a library, which the job's own limit does not count."""
_GRACE_SECONDS = 30.0
"""Time of the process beyond the runs of a job, whose limits it keeps itself."""
_RUNS = 4
"""Runs per job: on the answer, on the row's own answer, and twice to make the task's data set."""
PACKAGES = {"reasoning_gym": "reasoning-gym", "math_verify": "math-verify"}

Score = tuple[float, str | None]
"""A score, and the reason why the answer is junk, or None."""


class VerifierFailure(RuntimeError):
    """A verifier fails on the row's own answer, or its process fails."""


class VerifierProcess:
    """Runs verifier jobs one at a time with a time limit; safe to call from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._processes: dict[str, JobProcess] = {}

    def reasoning_gym(
        self, row: Mapping[str, Any], answer: str, *, timeout: float, allowed: Sequence[str] = ()
    ) -> Score:
        """Score an answer with score_answer of the task in `row["verifier"]`.

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
        """Score `answer` against `gold` with math-verify, 1.0 or 0.0; junk as above.

        Raises:
            VerifierFailure: `gold` contains no expression, or math-verify fails on it.
        """
        own = gold.rpartition("####")[2].strip()
        own = own if "$" in own or "\\boxed" in own else f"${own}$"
        return self._score("math_verify", {"gold": gold, "answer": answer, "own_answer": own}, timeout)

    def close(self) -> None:
        """End the processes; a later job starts new ones."""
        with self._lock:
            end_jobs(self._processes.values())
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
                raise ConfigError(_refusal(job["task"], isolation), code="refused")
        raise VerifierFailure(str(reply.get("error", f"{package} replied {reply!r:.200}")))

    def _start(self, package: str) -> JobProcess:
        kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
        env = {**kept, "LC_ALL": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        process = JobProcess(VERIFIERS, package, role="verify", env=env)
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
        f"reasoning_gym task {task!r} evaluates text that the model wrote, and this machine cannot isolate "
        f"that safely (sandbox: {isolation}); run where the kernel allows seccomp, or, if you trust the "
        f"text to be scored, set allow_unsandboxed = [{task!r}] in the reward"
    )


def require_package(module: str, *, needed_by: str) -> None:
    """ConfigError with the pip line when a package is not installed; imports nothing."""
    from importlib.util import find_spec

    if find_spec(module) is None:
        raise missing_package(needed_by, PACKAGES[module])


# The process of a verifier package: jobs in, one small reply each, in a sandbox.
#
#     supervisor   ends the whole tree when the parent is gone, see lockstep.processes
#       judge      imports the package, locks itself in, reads jobs, keeps the time, writes the replies
#         evaluator  a fork of the judge: has no pipe but its own to the judge; computes one score
#
# An answer that a task evaluates (`eval`, sympy's parse_expr) and that could name something gets an
# evaluator of its own, ended after the job; other jobs share one. Started as `python -I -c`, with an empty
# environment; imports nothing of Lockstep that is large.


REPLY_BYTES = 4096
"""Largest reply of an evaluator."""
EVALUATING = {"eval", "exec", "parse_expr", "sympify", "create_dataset"}
"""Calls with which a task evaluates text, or delegates to another task."""
NAMELESS = re.compile(r"[0-9+\-*/%().,\[\]\s]*", re.ASCII)
"""An answer that cannot name anything, whatever evaluates it: no letters, underscores or quotes."""


class Ended(Exception):
    """The evaluator gave no reply: it ran for too long, or died. The text says which."""


# --- In the evaluator


@lru_cache(maxsize=32)
def _dataset(task: str, settings: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(task, seed=0, size=8, **json.loads(settings))


def _settings(job: Message) -> str:
    return json.dumps(job["settings"], sort_keys=True)


def _reasoning_gym(job: Message) -> float:
    dataset = _dataset(job["task"], _settings(job))
    if job.get("builds"):
        return 0.0
    return float(dataset.score_answer(answer=job["answer"], entry=decoded(job["entry"], "entry")))


@lru_cache(maxsize=4096)
def _gold(answer: str) -> Any:
    from math_verify import parse

    gold = answer.rpartition("####")[2].strip()
    text = gold if "$" in gold or "\\boxed" in gold else f"${gold}$"
    # No time limit of its own: it is an alarm signal, and the judge keeps the time anyway.
    parsed = parse(text, parsing_timeout=None, raise_on_error=True)
    if not gold or not parsed:
        raise LookupError(f"math-verify found no expression in the row's answer {answer!r}")
    return parsed


def _math(job: Message) -> float:
    from math_verify import parse, verify

    gold = _gold(job["gold"])
    parsed = parse(job["answer"], parsing_timeout=None)
    if not parsed:
        raise ValueError("no mathematical expression")
    return float(verify(gold, parsed, timeout_seconds=None))


@lru_cache(maxsize=1)
def _warm_up() -> None:
    """Fill sympy's caches once, for all evaluators."""
    import sympy

    x = sympy.Symbol("x")
    sympy.simplify(sympy.diff(sympy.parse_expr("2*x**2 + sqrt(x)/3 - 1", local_dict={"x": x}), x))
    # The collector writes to the header of what it visits, which would copy the pages that forks share.
    gc.collect()
    gc.freeze()


SCORES: dict[str, Callable[[Message], float]] = {"reasoning_gym": _reasoning_gym, "math_verify": _math}


def _evaluate(score: Callable[[Message], float], jobs: int, replies: int) -> NoReturn:
    """Score jobs until the judge closes the pipe."""
    # Before the first job is read: from here on no process can be started, whatever the answer says.
    sandbox.lock(None, may_fork=False)
    while True:
        job = receive(jobs)
        try:
            value = score(job)
            reply = {"score": value} if math.isfinite(value) else {"junk": f"the score is {value}"}
        except Exception as error:  # the answer's fault or the row's, which the judge finds out
            reply = {"junk": f"{type(error).__name__}: {error}"[:500]}
        send(replies, reply)


# --- In the judge


class Judge:
    """Passes jobs to evaluators and enforces deadlines."""

    def __init__(self, package: str) -> None:
        self._score = SCORES[package]
        self._evaluator: tuple[int, int, int] | None = None
        self._built: set[tuple[str, str]] = set()

    def build(self, job: Message) -> Message | None:
        """Make the task's data set here, so that every later evaluator inherits it; return None, or {error}.

        An evaluator makes it first, as that can be ended: a data set is made by a package and settings of the
        row, and some take for ever.
        """
        key = job["task"], _settings(job)
        try:
            built = key in self._built or "score" in self._exchange({**job, "builds": True})
        except Ended as error:
            self._end()
            task = job["task"]
            return {
                "error": (
                    f"reasoning_gym task {task!r}: its data set could not be generated: {error}; choose "
                    "smaller verifier_settings for the row, or a larger timeout_seconds for the reward"
                )
            }
        if built:  # otherwise the evaluator of the answer meets it again, and says so
            self._built.add(key)
            _dataset(*key)
            _warm_up()
        return None

    def reply(self, job: Message) -> Message:
        """Return {score}, {score, junk} or {error}.

        An exception, a time-out or a death is the answer's fault, and scores 0, if the verifier takes the
        row's own answer.
        """
        outcome = self._run(job)
        if "score" in outcome:
            return outcome
        own = self._run({**job, "answer": job["own_answer"]})
        if "score" in own:
            return {"score": 0.0, "junk": outcome["junk"]}
        return {"error": own["junk"]}

    def _run(self, job: Message) -> Message:
        alone = job["evaluates"] and not NAMELESS.fullmatch(job["answer"])
        # A fresh one: what an earlier answer did to this process must not decide about the next.
        if alone:
            self._end()
        try:
            outcome = self._exchange(job)
        except Ended as error:
            outcome = {"junk": str(error)}
            alone = True
        if alone:
            self._end()
        return outcome

    def _exchange(self, job: Message) -> Message:
        _, jobs, replies = self._evaluator or self._start()
        deadline = time.monotonic() + job["timeout"]
        try:
            send(jobs, job)
            data = _read_reply(replies, deadline)
        except TimeoutError:
            raise Ended(f"TimeoutError: the verifier took longer than {job['timeout']:g} s") from None
        # It died before it read the job; no bytes are the same outcome as a reply cut short.
        except BrokenPipeError:
            data = b""
        try:
            outcome = json.loads(data)
        except (ValueError, RecursionError):
            outcome = None
        match outcome:
            # Exactly this form: the reply comes from a process in which the answer may have run.
            case {"score": float() as score, **rest} if not rest and math.isfinite(score):
                return outcome  # type: ignore[no-any-return]
            case {"junk": str()} if len(outcome) == 1:
                return outcome  # type: ignore[no-any-return]
        raise Ended("the verifier's process died, or its reply was not a score")

    def _start(self) -> tuple[int, int, int]:
        theirs_in, jobs = os.pipe()
        replies, theirs_out = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                close_all_but(1, 2, theirs_in, theirs_out)  # 1 and 2 are /dev/null
                _evaluate(self._score, theirs_in, theirs_out)
            finally:
                os._exit(1)
        os.close(theirs_in)
        os.close(theirs_out)
        self._evaluator = (pid, jobs, replies)
        return self._evaluator

    def _end(self) -> None:
        """Kill the evaluator, and whatever else lives in this pid namespace."""
        if self._evaluator is None:
            return
        pid, *pipes = self._evaluator
        self._evaluator = None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
            if os.getpid() == 1:
                # Everybody but oneself, so only as pid 1 of a namespace
                # of our own; elsewhere that is the whole user.
                os.kill(-1, signal.SIGKILL)
        for pipe in pipes:
            os.close(pipe)
        os.waitpid(pid, 0)
        with contextlib.suppress(ChildProcessError):
            # Orphans of the evaluator are children of pid 1, and zombies until it waits for them.
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _read_reply(fd: int, deadline: float) -> bytes:
    """One message of at most REPLY_BYTES and nothing after it; empty when the writer is gone."""
    data = b""
    while len(data) < 4 or len(data) < 4 + struct.unpack("<I", data[:4])[0]:
        if not select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise TimeoutError
        chunk = os.read(fd, REPLY_BYTES)
        data += chunk
        if not chunk or len(data) > REPLY_BYTES:
            return b""
    return data[4:] if len(data) == 4 + struct.unpack("<I", data[:4])[0] else b""


def evaluates(task: str) -> bool:
    """Return whether the module of a reasoning_gym task, or of a class that it extends, evaluates text."""
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        return False
    modules = {c.__module__ for c in DATASETS[task][0].__mro__ if c.__module__.startswith("reasoning_gym.")}
    return any(_evaluating_module(name) for name in modules)


@lru_cache(maxsize=1024)
def _evaluating_module(name: str) -> bool:
    tree = ast.parse(inspect.getsource(sys.modules[name]))
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    return any(getattr(call, "id", getattr(call, "attr", "")) in EVALUATING for call in calls)


def _answer(judge: Judge, job: Message, isolation: sandbox.Isolation) -> Message:
    task = job.get("task")
    job["evaluates"] = task is not None and evaluates(task)
    if not job["evaluates"]:
        return judge.reply(job)
    if not isolation.sufficient and task not in job["allowed"]:
        return {"refused": isolation.describe()}
    return judge.build(job) or judge.reply(job)


def main(package: str, jobs: int, replies: int) -> None:
    """Serve jobs for one package until the pipe of jobs closes."""
    namespaces = sandbox.supervise(jobs)
    logging.disable(
        logging.WARNING
    )  # math-verify warns that its own timeout is off; the judge keeps the time
    first: Message = {"ready": True}
    try:
        importlib.import_module(package)
        sandbox.guard()
    except Exception as error:
        first = {"error": f"{package} cannot be imported: {type(error).__name__}: {error}"}
    sandbox.limits()
    layers = sandbox.lock(sandbox.readable_places(), may_fork=True)
    isolation = sandbox.Isolation(namespaces=tuple(namespaces), **layers)
    gc.collect()
    gc.freeze()  # so that a fork copies fewer pages
    job = receive(jobs)
    send(replies, {"id": job["id"], **first})
    judge = Judge(package)
    while "ready" in first:
        job = receive(jobs)
        try:
            reply = _answer(judge, job, isolation)
        except Exception as error:  # handed to the parent, which raises it
            reply = {"error": f"{type(error).__name__}: {error}"[:500]}
        send(replies, {"id": job["id"], **reply})


# What the verifiers among the rewards need of a row. Imports nothing large: a start is refused by it.


def check_row(config: RewardConfig, row: Mapping[str, Any]) -> None:
    """Check that a row has what the reward compares an answer with; only `verifier` and `math` need anything.

    Raises:
        ConfigError: the reward cannot score such rows, whatever the policy answers.
    """
    if config.name == "verifier" and not str(row.get("verifier", "")).startswith("reasoning_gym:"):
        raise ConfigError(
            "missing-column: reward 'verifier', which is the default, only scores rows from data.source = "
            f"'reasoning_gym:TASK', but these rows have the columns {_columns(row)}. Set rewards: 'math' "
            "compares with the column 'answer' (or data.answer_column), and 'module:function' calls your "
            "function"
        )
    if config.name == "math" and "answer" not in row:
        raise ConfigError(
            "missing-column: reward 'math' compares with the column 'answer', but the rows' columns are "
            f"{_columns(row)}; set data.answer_column to the column that has the answers"
        )


def _columns(row: Mapping[str, Any]) -> str:
    return ", ".join(printable(name[:80]) for name in islice(row, 40))
