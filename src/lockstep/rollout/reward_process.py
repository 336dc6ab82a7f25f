"""A user's reward in its own process: a crash, exit or endless loop is only an error.

The process is trusted: it has the run's environment, permissions and working directory. It ends, together
with everything that it started, when a call times out, when the rewards are closed, and when the run ends.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import os
import random
import resource
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.errors import ConfigError, LockstepError
from lockstep.observe.text import echo, printable, printable_lines
from lockstep.processes.child import JobProcess, Message, ProcessEnded, end_jobs, receive, send
from lockstep.processes.programs import REWARDS
from lockstep.processes.supervisor import supervise
from lockstep.protocols.reward import RewardInput
from lockstep.registry import load_object
from lockstep.rollout import reward_functions
from lockstep.rollout.reward_functions import (
    OwnReward,
    RewardFailure,
    bind,
    calls_of,
    decoded,
    encoded,
    raised,
    score_of,
)

START_SECONDS = 600.0
"""Deadline of the user's imports, and of a class that loads a model."""
END_SECONDS = 5.0
"""Deadline of the module's exit handlers when the rewards are closed."""
_LAST_OUTPUT_SECONDS = 1.0
_LINE_BYTES = 1 << 16


class RewardWorker:
    """The process of one reward; it is started at once, and restarted after it ends.

    Args:
        name: of the reward.
        target: `module:attribute`.
        kwargs: returns its keyword arguments; called when the process is started, since secrets may change.
        timeout: seconds of a call.
        concurrency: of an async reward: most calls at a time.
        path: additional folders to search for the module.

    Raises:
        ConfigError: the module cannot be imported, or its attribute cannot be called as a reward.
    """

    def __init__(
        self,
        name: str,
        target: str,
        *,
        kwargs: Callable[[], Mapping[str, Any]],
        timeout: float,
        concurrency: int,
        path: Sequence[Path] = (),
    ) -> None:
        self._name, self._kwargs, self._timeout, self._concurrency = name, kwargs, timeout, concurrency
        self._arguments = (target, name, [str(p) for p in (Path.cwd(), *path)])
        self._lock = threading.Lock()
        self._process: JobProcess | None = None
        self._output: threading.Thread | None = None
        self.asynchronous = False
        self.batched = False
        self.columns: tuple[str, ...] = ()
        """Columns of the rows that a batched reward cannot do without."""
        self._running()

    def one(self, samples: Sequence[RewardInput]) -> list[Any]:
        """Return a score or an exception for each sample of one call.

        Raises:
            TimeoutError: the call took longer than `timeout_seconds`, and the process was killed.
            RewardFailure: the process died.
        """
        return self._scores(samples, seconds=self._timeout)

    def together(self, inputs: Sequence[RewardInput]) -> list[Any]:
        """Return a score or an exception for each sample of an async reward. If the process dies or has to be
        ended, that is the outcome of all."""
        timeout, concurrency = self._timeout, self._concurrency
        calls = len(calls_of(inputs, batched=self.batched))
        limit = reward_functions.seconds_together(calls, timeout, concurrency)
        try:
            return self._scores(inputs, seconds=limit, timeout=timeout, concurrency=concurrency)
        except TimeoutError:
            return [reward_functions.blocked(calls, limit)] * len(inputs)
        except (RewardFailure, LockstepError) as error:
            return [error] * len(inputs)

    def close(self) -> None:
        """Let the process run its exit handlers and end, together with every process that it started. A later
        call starts a new one."""
        close_all([self])

    def _scores(self, samples: Sequence[RewardInput], *, seconds: float, **more: Any) -> list[Any]:
        seeds = [self._seed(sample) for sample in samples]
        job = {"samples": [{**sent(s), "seed": s.seed} for s in samples], "seeds": seeds}
        # One exchange at a time: the process serves its jobs in order, and a reply must name the last one.
        with self._lock:
            process = self._running()
            try:
                outcomes = process.exchange({**job, **more}, seconds=seconds).get("outcomes")
            except ProcessEnded as error:
                raise RewardFailure(str(error)) from None
            finally:
                if process.closed:
                    self._ended()
            # A process that broke the protocol once is not asked again: the next job gets a new one.
            if not isinstance(outcomes, list) or len(outcomes) != len(samples):
                self._ended()
                raise RewardFailure("its process sent an invalid reply to the job")
        return [_received(outcome) for outcome in outcomes]

    def _seed(self, sample: RewardInput) -> int:
        """The seed of what the reward draws for a sample: the same whenever and wherever it is scored, and
        another one for each reward."""
        own = random.getrandbits(63) if sample.seed is None else sample.seed
        text = f"lockstep reward {self._name} {own}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1

    def _running(self) -> JobProcess:
        """The process, started if there is none."""
        if self._process is not None:
            return self._process
        reader, writer = os.pipe()
        try:
            process = JobProcess(REWARDS, *self._arguments, role="reward", output=writer)
        except BaseException:
            os.close(reader)
            raise
        finally:
            # Closed here in any case: the thread below sees the
            # end of the output only when nobody holds this end.
            os.close(writer)
        self._process = process
        # A thread, because a full pipe would block the reward in its print while the run waits for its score.
        self._output = threading.Thread(target=show_output, args=(reader,), name="reward-output", daemon=True)
        self._output.start()
        name = self._name
        try:
            # No arguments of the program, which everybody on the machine can read: a key may be among them.
            first = process.exchange({"kwargs": dict(self._kwargs())}, seconds=START_SECONDS)
        except (TimeoutError, ProcessEnded) as error:
            self._ended()
            raise ConfigError(f"process-died: reward {name!r} cannot be started: {error}") from None
        if "refused" in first:
            self._ended()
            raise ConfigError(printable(str(first["refused"])), code=str(first.get("code", "refused")))
        self.asynchronous, self.batched = bool(first.get("asynchronous")), bool(first.get("batched"))
        self.columns = tuple(map(str, first.get("columns", ())))
        return process

    def _ended(self, seconds: float = _LAST_OUTPUT_SECONDS) -> None:
        """End the process and wait until its last output is shown."""
        if self._process is not None:
            self._process.end()
        if self._output is not None:
            self._output.join(seconds)
        self._process = self._output = None


def close_all(workers: Sequence[RewardWorker]) -> None:
    """Close all workers in parallel."""
    with contextlib.ExitStack() as locks:
        for worker in workers:
            locks.enter_context(worker._lock)
        running = [worker._process for worker in workers if worker._process is not None]
        end_jobs(running, last={"end": True}, seconds=END_SECONDS)
        deadline = time.monotonic() + _LAST_OUTPUT_SECONDS
        for worker in workers:
            worker._ended(max(0.0, deadline - time.monotonic()))


def sent(sample: RewardInput) -> Message:
    """Return the sample as JSON's types. Raises DataError for a row with a value that JSON cannot say."""
    return {
        "prompt": sample.prompt,
        "completion": sample.completion,
        "row": encoded(dict(sample.row), "row"),
        "prompt_token_ids": list(sample.prompt_token_ids),
        "completion_token_ids": list(sample.completion_token_ids),
        "finish_reason": sample.finish_reason,
        "index": sample.index,
    }


def _received(outcome: Any) -> float | RewardFailure:
    match outcome:
        case {"score": float() as score}:
            return score
        case {"problem": str() as problem}:
            failure = RewardFailure(printable(problem))
            if lines := str(outcome.get("traceback", "")):
                failure.add_note("In the reward's process:\n" + printable_lines(lines))
            return failure
    return RewardFailure("its process replied with something other than a score")


def show_output(reader: int) -> None:
    """Copy the process's output to our standard error, escaped, until it closes its end."""
    with open(reader, "rb") as lines:
        while line := lines.readline(_LINE_BYTES):
            text = line.decode(errors="replace").rstrip("\n")
            with contextlib.suppress(OSError, ValueError):  # ours is closed; theirs must still be emptied
                echo("\n".join(map(printable, text.split("\r"))), file=sys.stderr, flush=True)


# The process of a user's reward: samples in, scores out.
#
#     supervisor   ends the whole tree when the run is gone, see lockstep.processes
#       worker     imports the user's module and calls its function; trusted code, with the run's own rights
#
# Imports no torch and no config besides the user's module, so that a start takes some 0.2 s.


TRACEBACK_LENGTH = 8000


class Worker:
    """The loaded reward.

    Args:
        target: `module:attribute`.
        name: the reward's, for errors.
    """

    def __init__(self, target: str, name: str, kwargs: Mapping[str, Any]) -> None:
        self.reward = bind(name, kwargs, _load(target, name))
        self._file = getattr(sys.modules[target.partition(":")[0]], "__file__", None)
        self._loop: Any = None

    def outcomes(self, job: Message) -> list[Message]:
        """Return {score} or {problem, traceback} for each sample."""
        samples = [_sample(values) for values in job["samples"]]
        calls = [
            (samples[part], job["seeds"][part.start])
            for part in calls_of(samples, batched=self.reward.batched)
        ]
        if self.reward.asynchronous:
            results = self._together(calls, job)
        else:
            results = [self._one(*call) for call in calls]
        return [o for (own, _), r in zip(calls, results, strict=True) for o in self._outcomes(r, len(own))]

    def _one(self, samples: Sequence[RewardInput], seed: int) -> Any:
        """The result of a call, or what it raised."""
        try:
            seed_generators(seed)
            value = self.reward(samples)
            return self._run(_awaited(value)) if inspect.isawaitable(value) else value
        except BaseException as error:  # also SystemExit, which is the reward's error and not our end
            return error

    def _together(self, calls: Sequence[tuple[Sequence[RewardInput], int]], job: Message) -> list[Any]:
        begun = [partial(_seeded, self.reward, samples, seed) for samples, seed in calls]
        results: list[Any] = self._run(reward_functions.gather(begun, job["timeout"], job["concurrency"]))
        return results

    def _outcomes(self, result: Any, count: int) -> list[Message]:
        try:
            if isinstance(result, BaseException):
                raise result
            return [_outcome(value) for value in self.reward.values(result, count)]
        except BaseException as error:  # of the call, or of a strange result
            return [self._failure(error)] * count

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine in the single event loop of this process, to which the clients of a reward are
        bound."""
        import asyncio

        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self._loop)
        return self._loop.run_until_complete(coroutine)

    def _failure(self, error: BaseException) -> Message:
        return failure_of(error, self._file)


def failure_of(error: BaseException, file: str | None) -> Message:
    """Return {problem, traceback} of what the user's code raised.

    Args:
        file: the user's, of which the problem names the line.
    """
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
    place = f" ({os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})" if frames else ""
    try:
        lines = "".join(traceback.format_exception(error))[-TRACEBACK_LENGTH:]
    except Exception as second:
        lines = f"the traceback cannot be shown: {type(second).__name__}"
    problem = printable(str(error)) if isinstance(error, RewardFailure) else raised(error)
    return {"problem": problem + printable(place), "traceback": lines}


def seed_generators(seed: int) -> None:
    """Seed `random`, and the generators of numpy and torch if the reward has imported them."""
    random.seed(seed)
    # Never imported just for this: torch alone takes seconds.
    if "numpy" in sys.modules:
        # numpy takes 32 bits.
        sys.modules["numpy"].random.seed(seed % 2**32)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


async def _seeded(reward: OwnReward, samples: Sequence[RewardInput], seed: int) -> Any:
    seed_generators(seed)
    return await reward(samples)


async def _awaited(value: Any) -> Any:
    return await value


def _outcome(value: Any) -> Message:
    score = score_of(value)
    return {"problem": score} if isinstance(score, str) else {"score": score}


def _sample(values: Message) -> RewardInput:
    row, ids = decoded(values.pop("row"), "row"), ("prompt_token_ids", "completion_token_ids")
    return RewardInput(row=row, **{**values, **{name: tuple(values[name]) for name in ids}})


def _load(target: str, name: str) -> Any:
    try:
        return load_object(target, what=f"reward {name!r}")
    except ConfigError:
        raise
    except BaseException as error:
        raise ConfigError(f"wrong-part: reward {name!r}: importing its module {raised(error)}") from error


def _started(target: str, name: str, kwargs: Mapping[str, Any]) -> tuple[Worker | None, Message]:
    try:
        worker = Worker(target, name, kwargs)
    except ConfigError as error:
        return None, {"refused": str(error), "code": error.code}
    except BaseException as error:
        return None, {"refused": f"reward {name!r}: starting it {raised(error)}"}
    reward = worker.reward
    names = ("asynchronous", "batched", "columns")
    return worker, {name: getattr(reward, name) for name in names}


def main(target: str, name: str, path: Sequence[str], *, jobs: int, replies: int) -> None:
    """Serve samples for one reward until a job says `end`, or the pipe of jobs closes. The first job has its
    kwargs."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    supervise(jobs)
    process = os.getpid()
    for fd in (jobs, replies):  # a program that the reward starts must not hold them open
        os.set_inheritable(fd, False)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.path[:0] = [folder for folder in path if folder not in sys.path]
    job = receive(jobs)
    worker, reply = _started(target, name, job["kwargs"])
    while True:
        if os.getpid() != process:  # the reward forked, and this is the copy: nobody waits for it
            os._exit(1)
        with contextlib.suppress(Exception):  # it is the reward's to replace or close
            sys.stdout.flush()
        send(replies, {"id": job["id"], **reply})
        job = receive(jobs)
        if worker is None or "end" in job:
            return
        reply = {"outcomes": worker.outcomes(job)}
