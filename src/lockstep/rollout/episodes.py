"""Run the trajectories of many tasks in one engine.

    caller's thread: the engine                        event loop of the environments, a thread of its own
    begin ───────── environment.run(task, sample) ──►  ... await sample(...) ─┐
    submit, continue_  ◄──────── a turn is asked for ─────────────────────────┘
    engine.finished() ─► hold ─► the trajectory ─────► ... await tool(...) ... await sample(...)
    on_end           ◄────────── run has returned ───  return trajectory

While an environment waits for a tool, the engine decodes other samples and holds the keys of the one that
waits. Environments that wait for nothing but `sample` go on before the engine does, so that a step does not
depend on timing. The default `run`, a single turn, needs no event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Any

from lockstep.errors import DataError, EngineError
from lockstep.protocols.engine import Finished, Handle, InferenceEngine, holds_turns
from lockstep.rollout.environment import Environment, OutOfRoom, Sampler, TrajectoryRules, Turn
from lockstep.rollout.episode import Begun, Episode
from lockstep.rollout.tool_loop import tool_loop
from lockstep.schema.rollout import GenerationRequest, Prompt, SamplingParams, Trajectory

_POLL_SECONDS = 0.2
"""Between two looks whether to stop while every trajectory waits for its environment."""
_WAIT_SECONDS = 0.001
"""Between two looks whether every environment has answered."""
_LOOKS = 2
"""That must find none at work."""
_CLOSE_SECONDS = 30.0
"""That environments may take to end when they are cancelled."""

Tasks = Sequence[tuple[Prompt, Sequence[int]] | tuple[Prompt, Sequence[int], Sequence[Begun]]]
"""Tasks, each with the seeds of its trajectories, and where they have begun with what there is of each."""


def at_once(tasks: Tasks) -> Callable[[int], Tasks]:
    """Return what `run_episodes` takes all of these tasks from at its beginning."""
    left = [tasks]
    return lambda running: left.pop() if left else ()


def run_episodes(
    engine: InferenceEngine,
    environment: Environment,
    take: Callable[[int], Tasks],
    *,
    rules: TrajectoryRules,
    on_end: Callable[[int, int, Trajectory], None],
    stop: Callable[[], bool] = lambda: False,
) -> list[list[Trajectory]]:
    """Run every trajectory of the tasks to its end; one list per task, in order of its seeds. First turns of
    a task that are alike are one request, so that the engine computes their prompt once.

    Args:
        take: returns the tasks to begin. Called with the number of trajectories that have not ended, at the
            beginning and after each that ends.
        rules: of every trajectory.
        on_end: called with the number of the task, the index of the seed, and the trajectory when it has
            ended.
        stop: whether no further turn is to begin: the engine's `abort` may come when no turn is running.
            Trajectories that were not at their end then end with finish_reason "abort".

    Raises:
        DataError: the context of a trajectory's first turn leaves no room for it.
        EngineError: from the engine; or it returned other samples than were asked for; or an environment
            waited for too long. And what `environment.run` raises. Nothing of the call is left in the engine,
            and no `environment.run` goes on.
    """
    with _Run(engine, environment, take, rules=rules) as run:
        run.on_end, run.stop = on_end, stop
        return run.to_the_end()


class _Run:
    """The state of one call. The lock guards what both threads use: `_asked`, `_ended`, `_handles`,
    `_in_engine`, and calls that pass a turn to the engine."""

    on_end: Callable[[int, int, Trajectory], None]
    stop: Callable[[], bool]

    def __init__(
        self,
        engine: InferenceEngine,
        environment: Environment,
        take: Callable[[int], Tasks],
        *,
        rules: TrajectoryRules,
    ) -> None:
        self._engine, self._environment, self._take, self._rules = engine, environment, take, rules
        self._inline = environment.takes_one_turn
        self._longer = not self._inline and rules.max_tokens > rules.sampling.max_tokens
        """Whether trajectories may become longer than a turn."""
        self._lock = threading.RLock()
        self._news = threading.Event()
        self._episodes: list[list[Episode]] = []
        self._handles: dict[Handle, list[Episode]] = {}
        self._asked: deque[Episode] = deque()
        """Episodes whose next turn the engine does not know yet."""
        self._ended: deque[Episode] = deque()
        self._answers: list[tuple[Episode, Trajectory]] = []
        """Turns from the engine that their environments do not know yet."""
        self._running = self._in_engine = self._passed = 0
        self._submitted = self._stopped = self._settling = False
        self._failure: BaseException | None = None

    def __enter__(self) -> _Run:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with self._lock:
            self._stopped = True  # what the loop's thread asks for from here on is cut
        if error is not None and self._submitted:  # before a stream began, or it would have dropped them
            self._engine.abort()
            with contextlib.suppress(EngineError), contextlib.closing(self._stream()) as stream:
                for _ in stream:
                    pass
        try:
            self._cancel()
        except EngineError as left:
            if error is None:
                raise
            error.add_note(str(left))  # which must not hide the error that came first
        if error is not None:
            self._release_all()

    # in the caller's thread

    def to_the_end(self) -> list[list[Trajectory]]:
        """See run_episodes."""
        self._begin()
        while True:
            self._look()
            self._pass_on()
            with self._lock:
                passed, in_engine = self._passed, self._in_engine
                waits = bool(self._ended or self._asked) or self._failure is not None or self._waiting()
            if in_engine:
                with contextlib.closing(self._stream()) as stream:
                    for done in stream:
                        self._finished(done)
                        if not done.more:
                            self._answer_all()
                        self._look()
                self._answer_all()
                if self._in_engine and self._passed == passed:
                    break  # the engine has lost them
            elif not waits:
                break
            elif not self._news.wait(_POLL_SECONDS) and not self._stopped and self.stop():
                self._stop()
        if missing := sum(e.turn is not None for group in self._episodes for e in group):
            self._submitted = False  # it has nothing left that it could end
            raise EngineError(f"wrong-result: the engine did not return {missing} of the requested samples")
        return [[episode.trajectory for episode in group] for group in self._episodes]

    def _waiting(self, *, queued: bool = True) -> bool:
        """Whether an environment is at work, or, if `queued`, waits for others' room."""
        return any(
            not one.over and one.turn is None and (queued or not one.sampler.queued)
            for group in self._episodes
            for one in group
        )

    def _stream(self) -> Generator[Finished, None, None]:
        engine = self._engine
        return engine.finished(wait=False) if holds_turns(engine) else engine.finished()

    def _begin(self) -> None:
        """Begin the tasks that there is room for."""
        new: list[Episode] = []
        for task, seeds, *begun in self._take(self._running):
            group: list[Episode] = []
            for index, seed in enumerate(seeds):
                sampler = Sampler(task, rules=self._rules, seed=seed)
                group.append(Episode(sampler, number=len(self._episodes), index=index))
                group[-1].keeps = self._rules.goes_on and not self._inline
                group[-1].before = before = begun[0][index] if begun else None
                if before is not None:
                    sampler.go_on(before)
            self._episodes.append(group)
            new += group
        self._running += len(new)
        if self._inline:
            for episode in new:
                episode.turn = episode.sampler()
            self._asked.extend(new)
        elif new:
            self._settle(lambda: self._start(new))
            self._wait()
        self._pass_on()

    def _finished(self, done: Finished) -> None:
        """Take a turn from the engine."""
        with self._lock:
            episode = self._handles[done.handle][done.sample]
            self._in_engine -= 1
        if episode.over:  # its environment did not wait for the turn
            return
        completion = done.completion
        episode.check(completion)
        turn = episode.turn
        assert turn is not None, "checked"
        trajectory = episode.sampler.add(turn, completion)
        episode.turn = None
        if self._inline or completion.finish_reason == "abort":
            self._end(episode)
            return
        episode.held = done
        if holds_turns(self._engine):
            self._engine.hold(done, seconds=self._rules.wait_seconds)
        self._answers.append((episode, trajectory))

    def _answer_all(self) -> None:
        """Let the environments of the turns that have ended go on: those of one step of the engine together,
        because each takes two changes of threads, while a GPU has nothing to do."""
        answers, self._answers = self._answers, []
        if not answers:
            return

        def answer() -> None:
            for each in answers:
                self._answer(*each)

        self._settle(answer)
        self._wait()
        if self._asked and not self._stopped and self.stop():
            self._stop()
        self._pass_on()

    def _look(self) -> None:
        """Raise what an environment raised, and see to the trajectories that have ended."""
        self._news.clear()
        if self._failure is not None:
            raise self._failure
        while self._ended:
            episode = self._ended.popleft()
            self._running -= 1
            self.on_end(episode.number, episode.index, episode.trajectory)
            if self._rules.goes_on and not self._stopped and self.stop():
                self._stop()
            self._begin()

    def _stop(self) -> None:
        """Let no further turn begin; what waits for its environment ends where it is."""
        self._stopped = True
        self._engine.abort()  # one before may have come between two turns
        for episode in (e for group in self._episodes for e in group):
            if not episode.over and episode.turn is None:
                self._end(episode, cut=True)

    def _settle(self, work: Callable[[], Any]) -> None:
        """Run `work` in the loop, and wait until no environment can go on without waiting."""
        self._settling = True
        try:
            tool_loop().settle(work, seconds=self._rules.wait_seconds)
        finally:
            self._settling = False

    def _wait(self) -> None:
        """Let no environment be at work, but those that wait for others' room, if the engine waits for them;
        what they ask for then has an order that does not depend on time."""
        if not self._rules.engine_waits:
            return
        still = 0  # looks: room that is given on takes rounds of the loop to arrive
        self._settling = True
        try:
            while still < _LOOKS and self._failure is None and not self.stop():
                tool_loop().settle(lambda: None, seconds=self._rules.wait_seconds)
                still = 0 if self._waiting(queued=False) else still + 1
                if not still:
                    time.sleep(_WAIT_SECONDS)
        finally:
            self._settling = False
        with self._lock:
            order = sorted(self._asked, key=lambda one: (one.number, one.index))
            self._asked.clear()
            self._asked.extend(order)
            ended = sorted(self._ended, key=lambda one: (one.number, one.index))
            self._ended.clear()
            self._ended.extend(ended)

    # passing turns to the engine, in either thread

    def _pass_on(self) -> None:
        """Give the turns that were asked for to the engine."""
        with self._lock:
            first: list[Episode] = []
            while self._asked:
                episode = self._asked.popleft()
                if episode.over:
                    continue
                if self._stopped:
                    self._end(episode, cut=True)
                    continue
                assert episode.turn is not None, "it was asked for"
                if episode.held is None or episode.turn.prefix is not None:  # held: not by this call
                    first.append(episode)
                    continue
                self._engine.continue_(episode.held, episode.turn.reply, sampling=episode.turn.sampling)
                episode.held = None
                self._passed += 1
                self._in_engine += 1
            if first:
                self._submit(first)

    def _submit(self, first: Sequence[Episode]) -> None:
        """Submit turns with a prompt of their own; those of a task that are alike are one request."""
        alike: dict[tuple[int, tuple[int, ...], SamplingParams], list[Episode]] = {}
        for episode in first:
            self._release(episode)
            assert episode.turn is not None
            prompt = episode.turn.prompt(episode.sampler.task, episode.sampler.trajectory)
            alike.setdefault((episode.number, prompt, episode.turn.sampling), []).append(episode)
        requests = [
            GenerationRequest(
                prompt_token_ids=prompt,
                sampling=sampling,
                seeds=tuple(episode.sampler.seed for episode in group),
                trajectory_tokens=max(e.tokens_left for e in group) if self._longer else 0,
                begun=begun if any(begun := tuple(e.take_begun() for e in group)) else (),
            )
            for (_, prompt, sampling), group in alike.items()
        ]
        self._submitted = True
        self._handles.update(zip(_submit(self._engine, requests), alike.values(), strict=True))
        self._passed += len(first)
        self._in_engine += len(first)

    def _release(self, episode: Episode) -> None:
        done, episode.held = episode.held, None
        if done is not None and holds_turns(self._engine):
            self._engine.release(done)

    def _release_all(self) -> None:
        with contextlib.suppress(EngineError):
            for group in self._episodes:
                for episode in group:
                    self._release(episode)

    def _end(self, episode: Episode, *, cut: bool = False) -> None:
        """Note that a trajectory has ended; `cut`: where it is, as if its last turn had been aborted."""
        with self._lock:
            if episode.over:
                return
            trajectory = episode.sampler.trajectory
            unfinished = cut or (trajectory is not None and trajectory.finish_reason == "abort")
            episode.sampler.goes_on = self._rules.goes_on and unfinished
            episode.over, episode.turn = True, None
            if cut and episode.sampler.trajectory is not None:
                episode.sampler.trajectory = replace(
                    episode.sampler.trajectory, finish_reason="abort", end="abort"
                )
            self._release(episode)
            self._ended.append(episode)
            self._news.set()
        if episode.task is not None and not episode.task.done():
            tool_loop().loop.call_soon_threadsafe(episode.task.cancel)

    # in the event loop

    def _start(self, episodes: Sequence[Episode]) -> None:
        for episode in episodes:
            self._start_one(episode)

    def _start_one(self, episode: Episode) -> None:
        environment, sampler = self._environment, episode.sampler

        def ask(turn: Turn) -> asyncio.Future[Trajectory]:
            return self._ask(episode, turn)

        def clock(runs: bool) -> None:
            (self._watch if runs else self._unwatch)(episode)

        sampler.ask, sampler.clock = ask, clock
        coroutine = environment.run(sampler.task, sampler)
        if not inspect.iscoroutine(coroutine):
            self._fail(
                EngineError(
                    f"wrong-result: {episode.name}: {type(environment).__name__}.run returned "
                    f"{type(coroutine).__name__}; write it as `async def run(self, task, sample)`"
                )
            )
            return
        episode.task = tool_loop().loop.create_task(coroutine)
        episode.task.add_done_callback(lambda task: self._returned(episode, task))
        self._watch(episode)

    def _watch(self, episode: Episode) -> None:
        """Begin to count the seconds that an environment takes."""
        episode.since = time.perf_counter()
        seconds = self._rules.wait_seconds
        episode.timer = tool_loop().loop.call_later(seconds, self._expired, episode)

    def _unwatch(self, episode: Episode) -> None:
        if episode.timer is not None:
            episode.timer.cancel()
            episode.timer = None
            episode.waited += time.perf_counter() - episode.since

    def _expired(self, episode: Episode) -> None:
        episode.timer = None
        seconds = self._rules.wait_seconds
        self._fail(
            EngineError(
                f"deadline: {episode.name}: {type(self._environment).__name__}.run waited for {seconds:g} s "
                "without asking for a turn or returning; give its tools deadlines, or raise "
                "rollout.wait_seconds",
                setting="rollout.wait_seconds",
            )
        )

    def _ask(self, episode: Episode, turn: Turn) -> asyncio.Future[Trajectory]:
        """Ask for a turn; the future gets the trajectory."""
        if episode.turn is not None:
            raise EngineError(
                f"wrong-state: {episode.name}: the environment awaited sample(...) while another turn of the "
                "trajectory was not finished; await one turn after the other"
            )
        self._unwatch(episode)
        episode.answer = asyncio.get_running_loop().create_future()
        if episode.over:
            episode.answer.cancel()
            return episode.answer
        if episode.sampler.repeats:
            episode.answer.set_result(episode.sampler.repeated(turn))
            self._watch(episode)
            return episode.answer
        with self._lock:
            episode.turn = turn
            self._asked.append(episode)
        if not self._settling:
            tool_loop().loop.call_soon(self._pass_on_later)
        return episode.answer

    def _pass_on_later(self) -> None:
        """Give turns to the engine while the caller's thread may be in it."""
        if self._settling:
            return
        try:
            self._pass_on()
        except BaseException as error:  # raised in the caller's thread
            self._fail(error)
        self._news.set()

    def _answer(self, episode: Episode, trajectory: Trajectory) -> None:
        if episode.over:  # it was stopped meanwhile
            return
        self._watch(episode)
        assert episode.answer is not None
        if not episode.answer.done():
            episode.answer.set_result(trajectory)

    def _returned(self, episode: Episode, task: asyncio.Task[Trajectory]) -> None:
        self._unwatch(episode)
        if episode.over:
            if not task.cancelled():
                task.exception()  # it was told to end: what it raises then is not asked for
            return
        sampler = episode.sampler
        error: BaseException | None
        try:
            error, result = task.exception(), None
            if error is None:
                result = task.result()
        except asyncio.CancelledError as cancelled:
            error, result = cancelled, None
        ended_there = isinstance(error, OutOfRoom) and sampler.trajectory is not None
        if isinstance(error, OutOfRoom) and not ended_there:
            self._fail(
                DataError(
                    f"too-long: {error}, and it is the first; shorten what the environment puts before it, "
                    "or raise data.max_prompt_tokens"
                )
            )
        elif error is not None and not ended_there:
            self._fail(error)
        elif not ended_there and (result is None or result is not sampler.trajectory):
            self._fail(
                EngineError(
                    f"wrong-result: {episode.name}: the environment's run returned {type(result).__name__} "
                    "instead of the trajectory of its last `await sample(...)`; return that trajectory"
                )
            )
        else:
            sampler.close()
            episode.before = None  # all of it was repeated
            self._end(episode)

    def _fail(self, error: BaseException) -> None:
        """Let the caller's thread raise an error."""
        if self._failure is None:
            self._failure = error
            self._news.set()
            if self._in_engine and not self._settling:
                self._engine.abort()

    def _cancel(self) -> None:
        """Let every environment end, and what it has left in the loop that waits for a turn."""
        episodes = [episode for group in self._episodes for episode in group]
        tasks = [e.task for e in episodes if e.task is not None and not e.task.done()]
        answers = [e.answer for e in episodes if e.answer is not None and not e.answer.done()]
        if not tasks and not answers:
            return
        for episode in episodes:
            episode.over = True

        async def cancelled() -> None:
            for waiting in (*tasks, *answers):
                waiting.cancel()
            await asyncio.sleep(0)
            if tasks:
                await asyncio.wait(tasks, timeout=_CLOSE_SECONDS)

        with contextlib.suppress(TimeoutError):  # something blocks the loop
            tool_loop().run(cancelled(), seconds=2 * _CLOSE_SECONDS)
        if left := sum(not task.done() for task in tasks):
            raise EngineError(
                f"deadline: {left} environments did not end within {_CLOSE_SECONDS:g} s after they were "
                "cancelled; let run end when asyncio.CancelledError is raised in it"
            )


def _submit(engine: InferenceEngine, requests: Sequence[GenerationRequest]) -> Sequence[Handle]:
    """Submit all of them: together where the engine spreads them over replicas."""
    together: Callable[[Sequence[GenerationRequest]], Sequence[Handle]] | None
    together = getattr(engine, "submit_all", None)
    return [engine.submit(request) for request in requests] if together is None else together(requests)
