import dataclasses
import threading
import time

import pytest
import torch
from raising import raises
from sampled import completion

from lockstep.config.engine import EngineConfig
from lockstep.engine import build as dispatch
from lockstep.engine.build import Dispatcher, DispatcherOfOwnWeights, assign, outstanding_tokens
from lockstep.engine.hf.engine import HFEngine
from lockstep.engine.streaming import Streaming
from lockstep.errors import EngineError
from lockstep.protocols.engine import EngineStats
from lockstep.schema.rollout import GenerationRequest, SamplingParams
from lockstep.schema.weights import UpdateSession, WeightBucket, WeightUpdate

SESSION = UpdateSession(policy_version=4, run_id="r", deadline=0.0)


def request(ids, seeds=(0,), max_tokens=10, **sampling):
    return GenerationRequest(
        prompt_token_ids=tuple(ids),
        sampling=SamplingParams(max_tokens=max_tokens, **sampling),
        seeds=tuple(seeds),
    )


class Scripted(Streaming):
    """An engine that answers with its own number, once `go` is set."""

    external = True

    def __init__(self, number, *, fails=None, held=False, transports=("ipc", "collective", "disk")):
        super().__init__(f"scripted {number}")
        self.number, self.fails, self.transports = number, fails, transports
        self.go = threading.Event()
        if not held:
            self.go.set()
        self.calls, self.buckets, self.requests = [], [], []
        self.dirty, self.recover, self.receivers = False, None, 1
        self.values = {"w": torch.tensor([1.0])}
        self.together = self.meeting = None

    def _require_ready(self):
        pass

    def _check(self, turn):
        if turn.request.sampling.max_tokens > 1000:
            raise EngineError("too long", code="wrong-state")
        self.requests.append(turn.request)

    def _advance(self):
        if self.meeting is not None:
            self.meeting.wait(5)  # breaks unless the others work at the same time
        if self.fails is not None:
            raise self.fails
        limit = time.monotonic() + 10
        while not (self.go.is_set() or self._abort.is_set()):
            time.sleep(0.001)
            assert time.monotonic() < limit, "nobody let this replica go on"
        turns = [self._inbox.popleft() for _ in range(len(self._inbox))]
        return [
            (turn, i, self._completion(turn.request, seed))
            for turn in turns
            for i, seed in enumerate(turn.request.seeds)
        ]

    def _end(self):
        pass

    def _completion(self, one, seed):
        reason = "abort" if self._abort.is_set() else "length"
        return completion(one.prompt_token_ids, [self.number], 0.0, finish_reason=reason, seed=seed)

    def _note(self, call):
        self.calls.append(call)
        if self.together is not None:
            self.together.wait(5)  # breaks unless the others are called at the same time
        if self.fails is not None:
            raise self.fails

    def abort(self):
        self.calls.append("abort")
        super().abort()

    def sleep(self):
        self._note("sleep")

    def wake(self):
        self._note("wake")

    def close(self):
        self._note("close")

    def begin_update(self, session):
        self._note(("begin", session.policy_version))

    def receive(self, bucket):
        self.buckets.append(bucket)
        self._note("receive")

    def finish_update(self, session):
        self._note(("finish", session.policy_version))

    def fail_update(self, reason):
        self._note(("fail", reason))

    def read_back(self, names):
        return {name: self.values[name] for name in names}

    def memory(self):
        return {"weights": 10.0 + self.number}

    def describe(self):
        return {"version": "1", "pid": self.number}

    def stats(self):
        return EngineStats(
            policy_version=self.number,
            requests=1,
            prompt_tokens=10,
            cached_tokens=self.number,
            completion_tokens=100,
            generate_seconds=1000.0,
            kv_cache_bytes=5,
            queued=2,
            kv_cache_use=0.5 if self.number else None,
            restarts=self.number,
        )


def scripted(count=3, **kwargs):
    return [Scripted(i, **kwargs) for i in range(count)]


# who gets what


def test_outstanding_tokens_are_prompt_and_max_tokens_of_each_sample():
    assert outstanding_tokens(request(range(5), range(3), max_tokens=7)) == 3 * (5 + 7)


def test_the_largest_group_goes_to_the_replica_with_the_fewest_tokens():
    costs = [100, 90, 30, 60, 50]  # of different prompts
    requests = [request((i,), max_tokens=cost - 1) for i, cost in enumerate(costs)]
    # 100 -> 0; 90 -> 1; 60 -> 1 (90 < 100): 150; 50 -> 0: 150; 30 -> 0 (a tie)
    assert assign(requests, 2) == [[0, 2, 4], [1, 3]]
    assert assign(requests, 1) == [[0, 1, 2, 3, 4]]
    assert assign(requests[:1], 3) == [[0], [], []]


def test_siblings_stay_together_in_one_request_or_in_several():
    requests = [request((1, 2), (i,)) for i in range(4)] + [request((3, 4), (i,)) for i in range(4)]
    mixed = [requests[i] for i in (0, 1, 4, 2, 5, 6, 3, 7)]
    assert assign(mixed, 2) == [[0, 1, 3, 6], [2, 4, 5, 7]]


def test_loads_are_within_one_group_of_each_other():
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(10, 400, (200,), generator=generator).tolist()
    requests = [request((i, i), range(4), max_tokens=size) for i, size in enumerate(sizes)]
    loads = [sum(outstanding_tokens(requests[i]) for i in share) for share in assign(requests, 4)]
    assert max(loads) - min(loads) <= 4 * (400 + 2)
    assert sorted(i for share in assign(requests, 4) for i in share) == list(range(200))


# generate


def test_results_are_in_request_order_and_every_sample_is_reported_in_the_calling_thread():
    engines = scripted(3)
    requests = [request((i,), range(i + 1), max_tokens=50 - i) for i in range(8)]
    seen, threads = {}, set()

    def note(index, sample, completion):
        seen[index, sample] = completion
        threads.add(threading.current_thread())

    results = Dispatcher(engines).generate(requests, on_completion=note)
    assert [[c.seed for c in row] for row in results] == [list(range(i + 1)) for i in range(8)]
    assert [row[0].prompt_token_ids for row in results] == [(i,) for i in range(8)]
    assert seen == {(i, j): c for i, row in enumerate(results) for j, c in enumerate(row)}
    assert threads == {threading.current_thread()}
    assert {c.token_ids[0] for row in results for c in row} == {0, 1, 2}


def test_replicas_work_at_the_same_time_and_the_idle_ones_are_not_called():
    engines = scripted(4)
    barrier = threading.Barrier(3)
    for engine in engines:
        engine.meeting = barrier
    Dispatcher(engines).generate([request((i,)) for i in range(3)])
    assert [len(engine.requests) for engine in engines] == [1, 1, 1, 0]
    assert Dispatcher(engines).generate([]) == []


def test_an_early_finisher_is_reported_while_others_still_run():
    slow, fast = Scripted(0, held=True), Scripted(1)
    seen = []

    def note(index, sample, completion):
        seen.append(completion.token_ids[0])
        slow.go.set()  # only now may the other one end

    Dispatcher([slow, fast]).generate([request((1,)), request((2,))], on_completion=note)
    assert seen == [1, 0]


def test_an_error_of_one_replica_aborts_the_others_and_is_raised_with_its_number():
    engines = [
        Scripted(0, held=True),
        Scripted(1, fails=EngineError("out of luck", code="wrong-state")),
        Scripted(2, held=True),
    ]
    seen = []
    with raises(EngineError, "wrong-state", replica=1) as caught:
        Dispatcher(engines).generate(
            [request((i,)) for i in range(3)], on_completion=lambda *found: seen.append(found)
        )
    assert isinstance(caught.value.__cause__, EngineError)
    assert "abort" in engines[0].calls and "abort" in engines[2].calls
    assert seen == []  # what an abort leaves is no completion of anything


def test_an_error_that_is_no_engine_error_keeps_its_type():
    engines = [Scripted(0), Scripted(1, fails=ZeroDivisionError("a bug"))]
    with pytest.raises(ZeroDivisionError, check=lambda error: error.args == ("a bug",)) as caught:
        Dispatcher(engines).generate([request((0,)), request((1,))])
    assert caught.value.__notes__ == ["in replica 1 of 2"]


def test_an_error_of_the_callback_stops_all_replicas():
    engines = [Scripted(0), Scripted(1, held=True)]

    def note(*_):
        raise ZeroDivisionError("in the callback")

    with pytest.raises(ZeroDivisionError, check=lambda error: error.args == ("in the callback",)):
        Dispatcher(engines).generate([request((0,)), request((1,))], on_completion=note)
    assert "abort" in engines[1].calls


def test_a_replica_that_does_not_stop_is_named_within_the_deadline(monkeypatch):
    monkeypatch.setattr(dispatch, "ABORT_SECONDS", 0.3)
    stuck = Scripted(0, held=True)
    stuck.abort = lambda: None
    both = Dispatcher([stuck, Scripted(1, fails=EngineError("gone", code="wrong-state"))])
    with raises(EngineError, "wrong-state", replica=1) as caught:
        both.generate([request((0,)), request((1,))])
    assert caught.value.__notes__ == ["replica 0 did not stop within 0.3 s after the abort"]
    with raises(EngineError, "deadline", replicas=[0]):
        both.generate([])
    stuck.go.set()


def test_abort_reaches_a_replica_whose_thread_had_not_begun():
    late = Scripted(0, held=True)
    begun, plain = threading.Event(), late.finished

    def finished():
        begun.wait(5)
        yield from plain()

    late.finished = finished
    both = Dispatcher([late, Scripted(1)])

    def abort(*_):
        both.abort()
        begun.set()

    results = both.generate([request((0,)), request((1,))], on_completion=abort)
    assert results[0][0].finish_reason == "abort"


# the stream


def test_turns_stay_with_their_replica_and_requests_go_where_the_fewest_tokens_are():
    engines = scripted(3)
    together = Dispatcher(engines)
    sizes = [100, 90, 30, 60, 50]  # 0; 1; 2; 2 (30): 90; 1 (a tie with 2)
    handles = [together.submit(request((i,), max_tokens=size - 1)) for i, size in enumerate(sizes)]
    homes = {}
    for done in together.finished():
        number = handles.index(done.handle)
        homes.setdefault(number, []).append(done.completion.token_ids[0])
        if len(homes[number]) < 3:
            more = SamplingParams(max_tokens=10)
            together.continue_(done, (7, 8), sampling=more)
    assert homes == {0: [0] * 3, 1: [1] * 3, 2: [2] * 3, 3: [2] * 3, 4: [1] * 3}
    assert [r.prompt_token_ids for r in engines[0].requests] == [(0,), (0, 0, 7, 8), (0, 0, 7, 8, 0, 7, 8)]
    assert together._loads == [0, 0, 0] and together.stats().queued == 6


def test_a_refusal_names_its_replica_and_the_others_go_on():
    together = Dispatcher(scripted(2))
    together.submit(request((1,)))
    with raises(EngineError, "wrong-state", replica=1):
        together.submit(request((2,), max_tokens=2000))
    assert [done.completion.token_ids for done in together.finished()] == [(0,)]


def test_a_turn_reaches_a_replica_that_waits_for_another_sample():
    """The short sample's next turn runs while the long one still does: `go` is set by its end."""
    slow = Scripted(0)
    fast = Scripted(1)
    together = Dispatcher([slow, fast])
    handles = [together.submit(request((i,))) for i in range(2)]
    slow.go.clear()
    turns = 0
    for done in together.finished():
        if done.handle is handles[1]:
            turns += 1
            if turns == 5:
                slow.go.set()
            else:
                together.continue_(done, (3,), sampling=SamplingParams(max_tokens=2))
    assert turns == 5


@pytest.mark.parametrize("replicas", [2, 4])
def test_one_or_several_hf_engines_give_the_same_completions(tiny, replicas):
    vocab = tiny.module.config.vocab_size
    generator = torch.Generator().manual_seed(1)
    requests = [
        request(
            torch.randint(3, vocab, (3 + 2 * i,), generator=generator).tolist(),
            range(10 * i, 10 * i + 3),
            max_tokens=4 + 3 * i,
            temperature=(1.0, 0.0, 0.7)[i % 3],
        )
        for i in range(7)
    ]
    requests.append(request(requests[0].prompt_token_ids, (99,), max_tokens=8))
    config = EngineConfig(max_batch=8)
    alone = HFEngine(config, model=tiny).generate(requests)
    many = Dispatcher([HFEngine(config, model=tiny) for _ in range(replicas)])
    together = many.generate(requests)
    assert [[c.token_ids for c in row] for row in together] == [[c.token_ids for c in row] for row in alone]
    for one, other in zip(sum(alone, []), sum(together, []), strict=True):  # noqa: RUF017
        torch.testing.assert_close(one.logprobs, other.logprobs, atol=1e-4, rtol=0)
        assert dataclasses.replace(one, logprobs=()) == dataclasses.replace(other, logprobs=())
    stats = many.stats()
    assert stats.requests == 8 and stats.completion_tokens == sum(len(c.token_ids) for c in sum(alone, []))  # noqa: RUF017
    many.update_weights(WeightUpdate(policy_version=6, tensors=lambda: iter(()), shared_module=tiny.module))
    assert {c.policy_version for row in many.generate(requests) for c in row} == {6}
    many.close()
    with raises(EngineError, "wrong-state: closed", replica=0):
        many.generate(requests)


def test_an_update_that_one_replica_refuses_names_it(tiny):
    def tensors():
        return iter([("no.such.weight", torch.zeros(1))])

    with raises(EngineError, "wrong-weights", unknown=["no.such.weight"], replica=0):
        Dispatcher([HFEngine(EngineConfig(), model=tiny) for _ in range(2)]).update_weights(
            WeightUpdate(policy_version=1, tensors=tensors)
        )


# everything else is for all of them


def test_sleep_wake_and_close_are_for_all_and_an_error_of_one_stops_none():
    engines = scripted(3)
    together = Dispatcher(engines)
    together.sleep()
    together.wake()
    engines[1].fails = EngineError("stuck", code="wrong-state")
    with raises(EngineError, "wrong-state", replica=1):
        together.close()
    assert all(engine.calls == ["sleep", "wake", "close"] for engine in engines)


def test_every_error_is_told():
    engines = scripted(3)
    engines[0].fails, engines[2].fails = (
        EngineError("first", code="wrong-state"),
        EngineError("third", code="wrong-state"),
    )
    with raises(EngineError, "wrong-state", replica=0) as caught:
        Dispatcher(engines).sleep()
    assert caught.value.__cause__.__notes__ == ["replica 2 failed too: third"]


def test_stats_are_sums_over_the_dispatchers_own_seconds():
    engines = scripted(3)
    both = Dispatcher(engines)
    both.generate([request((0,))])
    stats = both.stats()
    assert (stats.policy_version, stats.requests, stats.prompt_tokens) == (0, 3, 30)
    assert (stats.cached_tokens, stats.completion_tokens, stats.kv_cache_bytes) == (3, 300, 15)
    assert (stats.queued, stats.kv_cache_use, stats.restarts) == (6, 0.5, 3)
    assert stats.generate_seconds < 1000.0


# weights


def bucket(**changes):
    return WeightBucket(index=0, specs=(), num_bytes=16, **({"transport": "disk", "handle": {}} | changes))


def test_an_update_goes_to_all_replicas_at_the_same_time():
    engines = scripted(3)
    barrier = threading.Barrier(3)
    for engine in engines:
        engine.together = barrier
    own = DispatcherOfOwnWeights(engines)
    own.begin_update(SESSION)
    own.receive(bucket())
    own.finish_update(SESSION)
    own.fail_update("why not")
    for engine in engines:
        assert engine.calls == [("begin", 4), "receive", ("finish", 4), ("fail", "why not")]


def test_the_workers_of_a_collective_have_ranks_of_their_own():
    engines = scripted(3)
    for engine in engines:
        engine.receivers = 2
    own = DispatcherOfOwnWeights(engines)
    own.receive(bucket(transport="collective", handle={"group": "g", "first_rank": 1}))
    assert [e.buckets[0].handle["first_rank"] for e in engines] == [1, 3, 5]
    assert own.receivers == 6 and engines[2].buckets[0].handle["group"] == "g"


def test_one_dirty_replica_makes_all_dirty():
    engines = scripted(3)
    own = DispatcherOfOwnWeights(engines)
    assert not own.dirty and len(own.generate([request((0,))])) == 1
    engines[2].dirty = True
    assert own.dirty
    with raises(EngineError, "wrong-state: replicas [2] of 3"):
        own.generate([request((0,))])


def test_transports_are_those_of_every_replica():
    engines = [Scripted(0), Scripted(1, transports=("disk", "collective"))]
    assert DispatcherOfOwnWeights(engines).transports == ("collective", "disk")


def test_reading_back_compares_the_replicas():
    engines = scripted(2)
    own = DispatcherOfOwnWeights(engines)
    assert own.read_back(["w"]) == {"w": torch.tensor([1.0])}
    engines[1].values = {"w": torch.tensor([1.5])}
    with raises(EngineError, "values-differ: w", replica=1):
        own.read_back(["w"])
    engines[1].read_back = lambda names: None
    assert own.read_back(["w"]) is None


def test_memory_and_description_are_of_each_replica():
    own = DispatcherOfOwnWeights(scripted(2))
    assert own.memory() == {"replica 0, weights": 10.0, "replica 1, weights": 11.0}
    assert own.describe() == {
        "version": "1",
        "pid": 0,
        "replicas": [{"version": "1", "pid": 0}, {"version": "1", "pid": 1}],
    }


def test_only_the_replica_that_was_started_again_gets_the_weights_again():
    engines = scripted(3)
    own = DispatcherOfOwnWeights(engines)
    pushed = []
    own.recover = pushed.append
    engines[1].recover()
    assert pushed == [engines[1]]
    own.recover = None
    assert all(engine.recover is None for engine in engines)
