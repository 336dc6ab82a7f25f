"""A user's reward in its own process: a crash, exit or endless loop is only an error.

The process is trusted: it has the run's environment, rights and working directory. It ends, with everything
that it started, when a call takes too long, when the rewards are closed and when the run is gone.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.config.base import read_secrets
from lockstep.config.rollout import RewardConfig
from lockstep.errors import ConfigError, LockstepError
from lockstep.observe.text import echo, printable, printable_lines
from lockstep.processes.child import JobProcess, Message, ProcessEnded
from lockstep.processes.child import end_jobs as end
from lockstep.protocols.reward import RewardInput
from lockstep.rollout import calls
from lockstep.rollout.row_values import encoded

START_SECONDS = 600.0
"""Deadline of the user's imports, and of a class that loads a model."""
END_SECONDS = 5.0
"""Deadline of the module's exit handlers when the rewards are closed."""
_LAST_WORDS_SECONDS = 1.0
_LINE_BYTES = 1 << 16


class RewardFailure(RuntimeError):
    """An error in a reward's process; its text follows the reward's name, its note is the traceback."""


class RewardWorker:
    """The process of one reward, started now, and again after an end.

    Args:
        target: `module:attribute`.
        path: folders, besides ours, in which the module is looked for.

    Raises:
        ConfigError: the module cannot be imported, or its attribute cannot be called as a reward.
    """

    def __init__(self, config: RewardConfig, target: str, path: Sequence[Path] = ()) -> None:
        self._config = config
        self._arguments = (target, config.name, [str(p) for p in (Path.cwd(), *path)])
        self._lock = threading.Lock()
        self._process: JobProcess | None = None
        self._output: threading.Thread | None = None
        self.asynchronous = False
        self._running()

    def one(self, sample: RewardInput) -> Any:
        """Score one sample.

        Raises:
            TimeoutError: it took longer than `timeout_seconds`; the process was ended.
            RewardFailure: the reward raised, gave no number, or its process died.
        """
        (outcome,) = self._scores([sample], seconds=self._config.timeout_seconds)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def together(self, inputs: Sequence[RewardInput]) -> list[Any]:
        """Return a score or an exception for each sample of an async reward. If the process dies or has to be
        ended, that is the outcome of all."""
        timeout, concurrency = self._config.timeout_seconds, self._config.max_concurrency
        limit = calls.seconds_together(len(inputs), timeout, concurrency)
        try:
            return self._scores(inputs, seconds=limit, timeout=timeout, concurrency=concurrency)
        except TimeoutError:
            return [calls.blocked(len(inputs), limit)] * len(inputs)
        except (RewardFailure, LockstepError) as error:
            return [error] * len(inputs)

    def close(self) -> None:
        """Let the process run its exit handlers and end, with every process that it started. A later call
        starts another."""
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
                raise RewardFailure("its process replied something that is no reply to the job")
        return [_received(outcome) for outcome in outcomes]

    def _seed(self, sample: RewardInput) -> int:
        """The seed of what the reward draws for a sample: the same whenever and wherever it is scored, and
        another one for each reward."""
        own = random.getrandbits(63) if sample.seed is None else sample.seed
        text = f"lockstep reward {self._config.name} {own}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1

    def _running(self) -> JobProcess:
        """The process, started if there is none."""
        if self._process is not None:
            return self._process
        reader, writer = os.pipe()
        try:
            process = JobProcess(
                "lockstep.rollout.reward_process_main", *self._arguments, role="reward", output=writer
            )
        except BaseException:
            os.close(reader)
            raise
        finally:
            # Closed here in any case: the thread below sees the
            # end of the output only when nobody holds this end.
            os.close(writer)
        self._process = process
        # A thread, because a full pipe would block the reward in its print while the run waits for its score.
        self._output = threading.Thread(target=_show, args=(reader,), name="reward-output", daemon=True)
        self._output.start()
        name = self._config.name
        try:
            # No arguments of the program, which everybody on the machine can read: a key may be among them.
            given = {**self._config.kwargs, **read_secrets(self._config.secrets, setting="rewards.secrets")}
            first = process.exchange({"kwargs": given}, seconds=START_SECONDS)
        except (TimeoutError, ProcessEnded) as error:
            self._ended()
            raise ConfigError(
                f"process-died: reward {name!r} cannot be started: {error}", name=name, reason=error
            ) from None
        if "refused" in first:
            self._ended()
            raise ConfigError(
                printable(str(first["refused"])),
                code=str(first.get("code", "refused")),
                name=first.get("name", name),
            )
        self.asynchronous = bool(first.get("asynchronous"))
        return process

    def _ended(self, seconds: float = _LAST_WORDS_SECONDS) -> None:
        """End the process, and wait until its last output is shown."""
        if self._process is not None:
            self._process.end()
        if self._output is not None:
            self._output.join(seconds)
        self._process = self._output = None


def close_all(workers: Sequence[RewardWorker]) -> None:
    """Close all workers together, which takes no longer than closing one."""
    with contextlib.ExitStack() as locks:
        for worker in workers:
            locks.enter_context(worker._lock)
        running = [worker._process for worker in workers if worker._process is not None]
        end(running, last={"end": True}, seconds=END_SECONDS)
        deadline = time.monotonic() + _LAST_WORDS_SECONDS
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
    return RewardFailure("its process replied something else than a score")


def _show(reader: int) -> None:
    """Copy the process's output to our standard error, escaped, until it closes its end."""
    with open(reader, "rb") as lines:
        while line := lines.readline(_LINE_BYTES):
            text = line.decode(errors="replace").rstrip("\n")
            with contextlib.suppress(OSError, ValueError):  # ours is closed; theirs must still be emptied
                echo("\n".join(map(printable, text.split("\r"))), file=sys.stderr, flush=True)
