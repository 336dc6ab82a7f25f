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
from lockstep.rollout.tool_loop import tool_loop
from lockstep.schema.rollout import Completion, GenerationRequest, Prompt, SamplingParams, Span, Trajectory

_POLL_SECONDS = 0.2
"""Between two looks whether to stop while every trajectory waits for its environment."""
_CLOSE_SECONDS = 30.0
"""That environments may take to end when they are cancelled."""

Begun = tuple[Span, ...]
"""What an earlier call has sampled of a trajectory of one turn: `Trajectory.begun`. It goes on after it."""
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


class _Episode:
    """One trajectory on its way."""

    def __init__(self, sampler: Sampler, *, number: int, index: int) -> None:
        self.sampler, self.number, self.index = sampler, number, index
        self.begun: Begun = ()
        """What there is of its only turn."""
        self.turn: Turn | None = None
        """The turn that the environment waits for."""
        self.answer: asyncio.Future[Trajectory] | None = None
        """Where it waits for it."""
        self.task: asyncio.Task[Trajectory] | None = None
        self.held: Finished | None = None
        """The last turn, from the engine."""
        self.over = False
        self.since = 0.0
        self.waited = 0.0
        """Seconds that the environment was waited for."""
        self.timer: asyncio.TimerHandle | None = None

    @property
    def name(self) -> str:
        task = self.sampler.task
        return task.where or f"task {task.index}"

    @property
    def trajectory(self) -> Trajectory:
        trajectory = self.sampler.trajectory
        if trajectory is None:  # stopped before its first turn
            prompt = Span(author="prompt", token_ids=self.sampler.task.token_ids)
            trajectory = Trajectory(
                spans=(prompt,),
                finish_reason="abort",
                stop_reason=None,
                text=None,
                seed=self.sampler.seed,
                engine="",
                turns=0,
            )
        return replace(trajectory, wait_seconds=self.waited)

    def check(self, completion: Completion) -> None:
        """Check that the engine returned the sample that was asked for; a mix-up would train on the wrong
        tokens."""
        before, turn = self.sampler.trajectory, self.turn
        if turn is None or completion.seed != self.sampler.seed:
            raise EngineError(
                f"wrong-result: request {self.number}: the samples' seeds are not the requested ones"
            )
        check_completion(self.number, turn.prompt(self.sampler.task, before), completion)


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
        self._episodes: list[list[_Episode]] = []
        self._handles: dict[Handle, list[_Episode]] = {}
        self._asked: deque[_Episode] = deque()
        """Episodes whose next turn the engine does not know yet."""
        self._ended: deque[_Episode] = deque()
        self._answers: list[tuple[_Episode, Trajectory]] = []
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

    def _waiting(self) -> bool:
        """Whether an environment is at work."""
        return any(not one.over and one.turn is None for group in self._episodes for one in group)

    def _stream(self) -> Generator[Finished, None, None]:
        engine = self._engine
        return engine.finished(wait=False) if holds_turns(engine) else engine.finished()

    def _begin(self) -> None:
        """Begin the tasks that there is room for."""
        new: list[_Episode] = []
        for task, seeds, *begun in self._take(self._running):
            group: list[_Episode] = []
            for index, seed in enumerate(seeds):
                sampler = Sampler(task, rules=self._rules, seed=seed)
                group.append(_Episode(sampler, number=len(self._episodes), index=index))
                group[-1].begun = begun[0][index] if begun else ()
            self._episodes.append(group)
            new += group
        self._running += len(new)
        if self._inline:
            for episode in new:
                episode.turn = episode.sampler()
            self._asked.extend(new)
        elif new:
            self._settle(lambda: self._start(new))
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

    # passing turns to the engine, in either thread

    def _pass_on(self) -> None:
        """Give the turns that were asked for to the engine."""
        with self._lock:
            first: list[_Episode] = []
            while self._asked:
                episode = self._asked.popleft()
                if episode.over:
                    continue
                if self._stopped:
                    self._end(episode, cut=True)
                    continue
                assert episode.turn is not None, "it was asked for"
                if episode.held is None or episode.turn.prefix is not None:
                    first.append(episode)
                    continue
                self._engine.continue_(episode.held, episode.turn.reply, sampling=episode.turn.sampling)
                episode.held = None
                self._passed += 1
                self._in_engine += 1
            if first:
                self._submit(first)

    def _submit(self, first: Sequence[_Episode]) -> None:
        """Submit turns with a prompt of their own; those of a task that are alike are one request."""
        alike: dict[tuple[int, tuple[int, ...], SamplingParams], list[_Episode]] = {}
        for episode in first:
            self._release(episode)
            assert episode.turn is not None
            prompt = episode.turn.prompt(episode.sampler.task, None)
            alike.setdefault((episode.number, prompt, episode.turn.sampling), []).append(episode)
        requests = [
            GenerationRequest(
                prompt_token_ids=prompt,
                sampling=sampling,
                seeds=tuple(episode.sampler.seed for episode in group),
                trajectory_tokens=self._rules.max_tokens if self._longer else 0,
                begun=begun if any(begun := tuple(e.begun for e in group)) else (),
            )
            for (_, prompt, sampling), group in alike.items()
        ]
        self._submitted = True
        self._handles.update(zip(_submit(self._engine, requests), alike.values(), strict=True))
        self._passed += len(first)
        self._in_engine += len(first)

    def _release(self, episode: _Episode) -> None:
        done, episode.held = episode.held, None
        if done is not None and holds_turns(self._engine):
            self._engine.release(done)

    def _release_all(self) -> None:
        with contextlib.suppress(EngineError):
            for group in self._episodes:
                for episode in group:
                    self._release(episode)

    def _end(self, episode: _Episode, *, cut: bool = False) -> None:
        """Note that a trajectory has ended; `cut`: where it is, as if its last turn had been aborted."""
        with self._lock:
            if episode.over:
                return
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

    def _start(self, episodes: Sequence[_Episode]) -> None:
        for episode in episodes:
            self._start_one(episode)

    def _start_one(self, episode: _Episode) -> None:
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

    def _watch(self, episode: _Episode) -> None:
        """Begin to count the seconds that an environment takes."""
        episode.since = time.perf_counter()
        seconds = self._rules.wait_seconds
        episode.timer = tool_loop().loop.call_later(seconds, self._expired, episode)

    def _unwatch(self, episode: _Episode) -> None:
        if episode.timer is not None:
            episode.timer.cancel()
            episode.timer = None
            episode.waited += time.perf_counter() - episode.since

    def _expired(self, episode: _Episode) -> None:
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

    def _ask(self, episode: _Episode, turn: Turn) -> asyncio.Future[Trajectory]:
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

    def _answer(self, episode: _Episode, trajectory: Trajectory) -> None:
        if episode.over:  # it was stopped meanwhile
            return
        self._watch(episode)
        assert episode.answer is not None
        if not episode.answer.done():
            episode.answer.set_result(trajectory)

    def _returned(self, episode: _Episode, task: asyncio.Task[Trajectory]) -> None:
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


def check_completion(index: int, prompt_token_ids: Sequence[int], completion: Completion) -> None:
    """Raises EngineError: it is not of this prompt, that of request number `index`, or not as long as its
    logprobs."""
    if completion.prompt_token_ids != tuple(prompt_token_ids):
        raise EngineError(
            f"wrong-result: request {index}: the engine returned a completion for another prompt",
        )
    if len(completion.logprobs) != len(completion.token_ids):
        raise EngineError(
            f"wrong-result: request {index}: the engine returned {len(completion.token_ids)} tokens but "
            f"{len(completion.logprobs)} logprobs",
        )
