"""Trajectories of many turns in one engine: what environments may wait for, and what ends them."""

import asyncio
import threading
import time

import pytest
from raising import raises
from sampled import FakeEngine, completion

from lockstep.engine.streaming import Streaming
from lockstep.errors import DataError, EngineError
from lockstep.rollout import episodes
from lockstep.rollout.environment import Environment, OutOfRoom, TrajectoryRules
from lockstep.rollout.episodes import at_once, run_episodes
from lockstep.rollout.tool_loop import tool_loop
from lockstep.schema.batch import rollout_samples
from lockstep.schema.rollout import Prompt, SamplingParams

SAMPLING = SamplingParams(max_tokens=4)


def rules(max_tokens=40, **more):
    return TrajectoryRules(sampling=SAMPLING, max_tokens=max_tokens, **{"wait_seconds": 20.0} | more)


class Echo(Streaming):
    """Ends one turn at a time, in the order in which they came, with the context's length as its token."""

    def __init__(self):
        super().__init__("echo")
        self.contexts = []
        self.requests = []
        self.now = []

    def _require_ready(self):
        pass

    def _check(self, turn):
        self.requests.append(turn.request)

    def _advance(self):
        self.now += [(turn, i) for turn in self._inbox for i in range(len(turn.samples))]
        self._inbox.clear()
        turn, i = self.now.pop(0)
        prompt = turn.request.prompt_token_ids
        self.contexts.append(prompt)
        reason = "abort" if self._abort.is_set() else "stop"
        made = completion(prompt, [len(prompt)], finish_reason=reason, seed=turn.request.seeds[i])
        return [(turn, i, made)]

    def _end(self):
        self.now.clear()


def run(environment, *, engine=None, tasks=2, seeds=(1, 2), how=None, **hooks):
    """The trajectories, the engine, and in which order they have ended."""
    engine, ended = engine or Echo(), []
    prompts = [(Prompt(index=i, token_ids=(9,) * (i + 1), text=""), seeds) for i in range(tasks)]
    found = run_episodes(
        engine,
        environment,
        at_once(prompts),
        rules=how or rules(),
        **{"on_end": lambda number, index, _: ended.append((number, index))} | hooks,
    )
    assert left_over(engine) == []
    return found, engine, ended


def left_over(engine):
    """What a call has left behind: tasks in the loop, turns in the engine."""

    async def others():
        return [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]

    return [*tool_loop().run(others(), seconds=10), *([] if engine._is_idle() else [engine])]


def shape(trajectory):
    return [(span.author, span.token_ids) for span in trajectory.spans]


def test_the_engine_goes_on_while_an_environment_waits():
    """The first task's tool answers when the second one's trajectories have had all their turns."""
    done = asyncio.Event()

    class Waits(Environment):
        async def run(self, task, sample):
            trajectory = await sample()
            if task.index == 0:
                await done.wait()
                return await sample((7, 8))
            for _ in range(3):
                trajectory = await sample((5,))
            done.set()
            return trajectory

    found, engine, ended = run(Waits())
    assert [shape(t) for t in found[0]] == [
        [("prompt", (9,)), ("policy", (1,)), ("tool", (7, 8)), ("policy", (4,))]
    ] * 2
    assert {len(t.spans) for t in found[1]} == {8} and {t.turns for t in found[1]} == {4}
    assert set(ended) == {(0, 0), (0, 1), (1, 0), (1, 1)} and ended[0][0] == 1
    # First turns that are alike are one request, later ones go on.
    assert [len(request.seeds) for request in engine.requests[:2]] == [2, 2]
    assert all(t.wait_seconds > 0 for t in found[0])


def test_a_tool_may_run_in_a_thread_and_first_turns_may_come_late():
    class Prepares(Environment):
        async def run(self, task, sample):
            number = await asyncio.to_thread(lambda: time.sleep(0.05) or task.index)
            async with asyncio.timeout(10):
                await sample(max_tokens=2)
            return await sample((number + 20,))

    found, engine, _ = run(Prepares(), tasks=3)
    assert [shape(t)[2] for group in found for t in group] == [("tool", (20 + i // 2,)) for i in range(6)]
    first = [request for request in engine.requests if request.trajectory_tokens == 40]
    assert sum(len(request.seeds) for request in first) == 6
    assert {request.sampling.max_tokens for request in first} == {2}


def test_an_environment_that_raises_ends_the_call_and_the_others():
    cleaned = []

    class Breaks(Environment):
        async def run(self, task, sample):
            try:
                trajectory = await sample()
                if task.index == 1:
                    await asyncio.sleep(0.05)
                    raise ValueError("the tool broke")
                await asyncio.Event().wait()
                return trajectory
            finally:
                await asyncio.sleep(0)
                cleaned.append(task.index)

    engine = Echo()
    with pytest.raises(ValueError, match="the tool broke"):
        run(Breaks(), engine=engine)
    assert sorted(cleaned) == [0, 0, 1, 1] and left_over(engine) == []
    assert run(Environment(), engine=engine)[0]


def test_an_environment_that_waits_for_too_long_is_named():
    class Hangs(Environment):
        async def run(self, task, sample):
            await sample()
            await asyncio.Event().wait()

    engine = Echo()
    with raises(EngineError, "deadline", setting="rollout.wait_seconds"):
        run(Hangs(), engine=engine, how=rules(wait_seconds=0.2))
    assert left_over(engine) == []


def test_a_stop_ends_trajectories_whose_environments_wait():
    stopped = threading.Event()

    class Hangs(Environment):
        async def run(self, task, sample):
            trajectory = await sample()
            if task.index == 0:
                return trajectory
            if task.index == 2:
                stopped.set()
            await asyncio.Event().wait()

    found, *_ = run(Hangs(), tasks=3, seeds=(1,), stop=stopped.is_set)
    assert [t.finish_reason for (t,) in found] == ["stop", "abort", "abort"]
    assert [t.end for (t,) in found] == ["done", "abort", "abort"]

    class Never(Environment):
        async def run(self, task, sample):
            await asyncio.Event().wait()

    found, engine, ended = run(Never(), stop=lambda: True)
    assert [t.spans for group in found for t in group] == [found[0][0].spans] * 2 + [found[1][0].spans] * 2
    assert len(ended) == 4 and engine.requests == []


@pytest.mark.parametrize("kind", [KeyboardInterrupt, ZeroDivisionError])
def test_an_error_of_the_caller_leaves_nothing_behind(kind):
    class Waits(Environment):
        async def run(self, task, sample):
            trajectory = await sample()
            if task.index:
                await asyncio.Event().wait()
            return trajectory

    def on_end(*_):
        raise kind

    engine = Echo()
    with pytest.raises(kind):
        run(Waits(), engine=engine, on_end=on_end)
    assert left_over(engine) == []


def test_two_turns_at_once_are_refused():
    class Both(Environment):
        async def run(self, task, sample):
            await asyncio.gather(sample(), sample())

    with raises(EngineError, "wrong-state"):
        run(Both())


class Talks(Environment):
    """Replies until there is no room."""

    def __init__(self, reply=(5, 6), catches=False):
        self.reply, self.catches = reply, catches

    async def run(self, task, sample):
        trajectory = await sample()
        try:
            while True:
                trajectory = await sample(self.reply)
        except OutOfRoom:
            if self.catches:
                return trajectory
            raise


@pytest.mark.parametrize("catches", [False, True])
def test_a_trajectory_without_room_ends_there_and_is_cut_off(catches):
    by_turns = run(Talks(catches=catches), how=rules(max_turns=3))[0]
    by_tokens = run(Talks(catches=catches), how=rules(9))[0]
    assert {(t.turns, t.end, t.finish_reason) for group in by_turns for t in group} == {
        (3, "turns", "length")
    }
    # 1 + 2 + 1 + 2 + 1 tokens, and no room for 2 + 1 more
    ends = {(t.turns, t.added_tokens, t.end, t.finish_reason) for group in by_tokens for t in group}
    assert ends == {(3, 7, "tokens", "length")}


def test_a_turn_has_its_own_limit_and_the_trajectory_another():
    engine = FakeEngine()
    asked = []
    plain = engine.continue_
    engine.continue_ = lambda done, ids, *, sampling: (
        asked.append(sampling.max_tokens) or plain(done, ids, sampling=sampling)
    )
    run_episodes(
        engine,
        Talks(reply=(5,)),
        at_once([(Prompt(index=0, token_ids=(9,), text=""), (1,))]),
        rules=rules(7),
        on_end=lambda *_: None,
    )
    assert engine.requests[0].sampling.max_tokens == 4 and engine.requests[0].trajectory_tokens == 7
    assert asked == [4, 3, 1]  # 7 less 1 + 1, 1 + 1 + 1 + 1, and so on


class Branches(Environment):
    """The second turn goes on in the context of the first, the third in a new one."""

    async def run(self, task, sample):
        await sample()
        await sample((5, 6))
        trajectory = await sample.branch((1, 2, 3), max_tokens=2)
        assert len(trajectory.parts) == 2 and trajectory.token_ids[:3] == (1, 2, 3)
        return await sample((7,))


def test_a_trajectory_goes_on_with_a_new_prefix_and_each_policy_token_is_trained_once():
    ((one, two), *_), engine, _ = run(Branches(), tasks=1)
    assert one.parts == two.parts and one.turns == 4
    assert [(span.author, span.token_ids) for span in one.parts[0]] == [
        ("prompt", (9,)),
        ("policy", (1,)),
        ("tool", (5, 6)),
        ("policy", (4,)),
    ]
    assert shape(one) == [("prompt", (1, 2, 3)), ("policy", (3,)), ("tool", (7,)), ("policy", (5,))]
    assert one.policy_tokens == 4 and one.added_token_ids == (1, 5, 6, 4, 3, 7, 5)
    assert len(engine._held) == 0
    documents = rollout_samples([one, two])
    assert [(d.sample_id, d.trajectory, d.num_trained, len(d)) for d in documents] == [
        (0, 0, 2, 5),
        (1, 0, 2, 6),
        (2, 1, 2, 5),
        (3, 1, 2, 6),
    ]
    trained = [d.token_ids[1:][d.loss_mask[:-1]].tolist() for d in documents[:2]]
    assert trained == [[1, 4], [3, 5]]


def test_a_branch_is_bounded_by_what_is_left_and_by_what_its_prefix_leaves():
    class Long(Environment):
        async def run(self, task, sample):
            await sample()
            with pytest.raises(OutOfRoom):
                sample.branch((1,) * 10)
            turn = sample.branch((1,) * 8)
            assert turn.sampling.max_tokens == 1 + 8 - 8
            return await turn

    ((trajectory,),) = run(Long(), tasks=1, seeds=(1,), how=rules(8))[0]
    assert [len(spans[0].token_ids) for spans in trajectory.parts] == [1, 8]


def test_the_first_turn_may_have_another_context_than_the_task():
    class Resets(Environment):
        async def run(self, task, sample):
            await sample.branch((4,) * 12)
            return await sample((5,))

    ((trajectory,),) = run(Resets(), tasks=1, seeds=(1,), how=rules(8, max_context=20))[0]
    assert shape(trajectory)[0] == ("prompt", (4,) * 12) and len(trajectory.parts) == 1
    assert trajectory.turns == 2 and trajectory.added_tokens == 3


def test_a_first_context_without_room_for_a_turn_names_the_task():
    class Long(Environment):
        async def run(self, task, sample):
            return await sample.branch((4,) * 20)

    with raises(DataError, "too-long: a task: a context of 20 more tokens"):
        run(Long(), tasks=1, seeds=(1,), how=rules(8, max_context=20))


def test_what_other_trajectories_hold_up_is_not_counted():
    room = threading.Event()  # for one of the two

    class Queues(Environment):
        async def run(self, task, sample):
            if room.is_set():
                await sample.in_line(asyncio.sleep(0.6))
            room.set()
            await asyncio.sleep(0.05)
            return await sample()

    ((first, second),) = run(Queues(), tasks=1, how=rules(wait_seconds=0.3))[0]
    assert max(first.wait_seconds, second.wait_seconds) < 0.3


def test_a_blocked_loop_is_the_error_also_where_it_cannot_be_left(monkeypatch):
    monkeypatch.setattr(episodes, "_CLOSE_SECONDS", 0.05)
    free = threading.Event()

    class Blocks(Environment):
        async def run(self, task, sample):
            trajectory = await sample()
            free.wait(10)
            return trajectory

    prompt = Prompt(index=0, token_ids=(9,), text="")
    how = {"rules": rules(wait_seconds=0.2), "on_end": lambda *_: None}
    try:
        with raises(EngineError, "deadline: an environment kept the event loop busy") as raised:
            run_episodes(Echo(), Blocks(), at_once([(prompt, (1,))]), **how)
    finally:
        free.set()
    assert "1 environments did not end" in raised.value.__notes__[0]


def test_a_turn_asked_for_between_two_looks_is_not_lost(monkeypatch):
    """The tool answers just after the caller's thread has passed on what was there."""
    answer, asked = threading.Event(), threading.Event()
    passed_on = episodes._Run._pass_on

    class Late(Environment):
        async def run(self, task, sample):
            await sample()
            while not answer.is_set():
                await asyncio.sleep(0.001)
            waits = sample.ask(sample((5,)))
            asked.set()
            return await waits

    looks = []  # the first one is in the stream, which takes what comes

    def passes(self):
        passed_on(self)
        if threading.current_thread() is threading.main_thread() and self._episodes[0][0].held is not None:
            looks.append(self)
            if len(looks) == 2:
                answer.set()
                assert asked.wait(10)

    monkeypatch.setattr(episodes._Run, "_pass_on", passes)
    later = episodes._Run._pass_on_later
    monkeypatch.setattr(
        episodes._Run, "_pass_on_later", lambda self: tool_loop().loop.call_later(0.3, later, self)
    )
    ((trajectory,),) = run(Late(), tasks=1, seeds=(1,))[0]
    assert trajectory.turns == 2
