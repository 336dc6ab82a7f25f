"""The process of a user's reward: samples in, scores out.

    supervisor   ends the whole tree when the run is gone, see lockstep.processes
      worker     imports the user's module and calls its function; trusted code, with the run's own rights

Imports the standard library and the user's module only, so that a start takes some 0.1 s.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import random
import resource
import sys
import traceback
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

from lockstep.errors import ConfigError
from lockstep.observe.text import printable
from lockstep.processes.child import Message, receive, send
from lockstep.processes.supervisor import supervise
from lockstep.protocols.reward import RewardInput
from lockstep.registry import load_object
from lockstep.rollout.reward_functions import bind, is_async, own_row, raised, score_of
from lockstep.rollout.row_values import decoded

TRACEBACK_LENGTH = 8000


class Worker:
    """The loaded reward.

    Args:
        target: `module:attribute`.
        name: the reward's, for errors.
    """

    def __init__(self, target: str, name: str, kwargs: Mapping[str, Any]) -> None:
        self._call = bind(name, kwargs, _load(target, name))
        self._file = getattr(sys.modules[target.partition(":")[0]], "__file__", None)
        self._loop: Any = None
        self.asynchronous = is_async(self._call)

    def outcomes(self, job: Message) -> list[Message]:
        """Return {score} or {problem, traceback} for each sample."""
        samples = [_sample(values) for values in job["samples"]]
        if self.asynchronous:
            return self._together(samples, job)
        return [self._one(sample, seed) for sample, seed in zip(samples, job["seeds"], strict=True)]

    def _one(self, sample: RewardInput, seed: int) -> Message:
        try:
            seed_generators(seed)
            value = self._call(own_row(sample))
            if inspect.isawaitable(value):
                value = self._run(_awaited(value))
        except BaseException as error:  # also SystemExit, which is the reward's error and not our end
            return self._failure(error)
        return _outcome(value)

    def _together(self, samples: Sequence[RewardInput], job: Message) -> list[Message]:
        from lockstep.rollout.calls import gather

        calls = [
            partial(_seeded, self._call, sample, seed)
            for sample, seed in zip(samples, job["seeds"], strict=True)
        ]
        outcomes = self._run(gather(calls, job["timeout"], job["concurrency"]))
        return [self._failure(o) if isinstance(o, BaseException) else _outcome(o) for o in outcomes]

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run it in the one event loop of this process, to which clients that a reward keeps are bound."""
        import asyncio

        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self._loop)
        return self._loop.run_until_complete(coroutine)

    def _failure(self, error: BaseException) -> Message:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == self._file]
        place = f" ({os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})" if frames else ""
        try:
            lines = "".join(traceback.format_exception(error))[-TRACEBACK_LENGTH:]
        except Exception as second:
            lines = f"the traceback cannot be shown: {type(second).__name__}"
        return {"problem": raised(error) + printable(place), "traceback": lines}


def seed_generators(seed: int) -> None:
    """Seed the generators of `random`, and those of numpy and torch where the reward has loaded them."""
    random.seed(seed)
    # Never imported just for this: torch alone takes seconds.
    if "numpy" in sys.modules:
        # numpy takes 32 bits.
        sys.modules["numpy"].random.seed(seed % 2**32)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


async def _seeded(call: Callable[[RewardInput], Any], sample: RewardInput, seed: int) -> Any:
    seed_generators(seed)
    return await call(own_row(sample))


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
        raise ConfigError(
            f"wrong-part: reward {name!r}: importing its module {raised(error)}", name="import"
        ) from error


def _started(target: str, name: str, kwargs: Mapping[str, Any]) -> tuple[Worker | None, Message]:
    try:
        worker = Worker(target, name, kwargs)
    except ConfigError as error:
        return None, {"refused": str(error), "code": error.code, "name": error.fields.get("name", "")}
    except BaseException as error:
        return None, {"refused": f"reward {name!r}: its start {raised(error)}"}
    return worker, {"asynchronous": worker.asynchronous}


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
