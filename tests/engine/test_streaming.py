"""The base of all engines: what it promises whatever an engine does."""

import threading

import pytest
from raising import raises
from sampled import completion

from lockstep.engine.streaming import Streaming, turn_seed
from lockstep.errors import EngineError
from lockstep.protocols.engine import Finished
from lockstep.schema.rollout import GenerationRequest, SamplingParams

ONE = SamplingParams(max_tokens=1)


class Echo(Streaming):
    """Each sample is its seed; `lost` turns are forgotten, `per_step` end at a time."""

    def __init__(self, *, lost=0, per_step=2):
        super().__init__("echo")
        self.lost, self.per_step, self.ends = lost, per_step, 0
        self.fail = None
        self.drawn = []

    def _require_ready(self):
        pass

    def _check(self, turn):
        if turn.request.prompt_token_ids == (0,):
            raise EngineError(f"request {turn.index} is impossible", code="wrong-state")

    def _advance(self):
        if self.fail is not None:
            raise self.fail
        for _ in range(self.lost):
            self._inbox.popleft()
        turns = [self._inbox.popleft() for _ in range(min(self.per_step, len(self._inbox)))]
        self.drawn += [turn.drawn_seed(i) for turn in turns for i in range(len(turn.samples))]
        return [
            (turn, i, self._completion(turn.request, i))
            for turn in turns
            for i in range(len(turn.request.seeds))
        ]

    def _completion(self, request, i):
        seed, reason = request.seeds[i], "abort" if self._abort.is_set() else "length"
        return completion(request.prompt_token_ids, [seed % 100], finish_reason=reason, seed=seed)

    def _end(self):
        self.ends += 1


def request(*prompt, seeds=(5,)):
    return GenerationRequest(prompt_token_ids=prompt, sampling=ONE, seeds=seeds)


def test_the_seed_of_a_turn_is_fixed():
    """A new definition would give other samples."""
    assert turn_seed(11, 8) == 3966537464770149052
    assert turn_seed(11, 9) != turn_seed(11, 8) != turn_seed(12, 8)
    assert all(0 <= turn_seed(seed, 3) < 1 << 63 for seed in range(100))


def test_a_first_turn_has_the_samples_seed_and_each_later_one_its_own():
    engine = Echo()
    engine.submit(request(1, 2, seeds=(7, 8)))
    for number, done in enumerate(engine.finished()):
        assert done.completion.seed == (7, 8)[done.sample]
        if number < 2:
            engine.continue_(done, (3, 4), sampling=ONE)
    assert engine.drawn == [7, 8, turn_seed(7, 5), turn_seed(8, 5)]


def test_generate_is_in_request_order_and_leaves_nothing_behind():
    engine = Echo(per_step=1)
    groups = engine.generate([request(1, seeds=(3, 4)), request(2, seeds=()), request(3, seeds=(9,))])
    assert [[c.seed for c in group] for group in groups] == [[3, 4], [], [9]]
    with raises(EngineError, "wrong-state"):
        engine.generate([request(1), request(0)])
    engine.fail = ValueError("of the engine")
    with pytest.raises(ValueError, check=lambda error: error.args == ("of the engine",)):
        engine.generate([request(1)])
    engine.fail = None
    assert list(engine.finished()) == [] and engine._open == 0 and not engine._inbox


def test_samples_that_an_engine_loses_are_an_error():
    with raises(EngineError, "wrong-result", samples=1):
        Echo(lost=1).generate([request(1)])


def test_numbers_of_requests_begin_anew_when_the_engine_is_idle():
    engine = Echo()
    for _ in range(2):
        assert [engine.submit(request(1)).index for _ in range(3)] == [0, 1, 2]
        with raises(EngineError, "wrong-state"):
            engine.submit(request(0))
        assert len(list(engine.finished())) == 3


def test_an_abort_before_anything_was_submitted_is_forgotten_and_one_after_it_is_not():
    engine = Echo(per_step=1)
    engine.abort()
    engine.submit(request(1))
    assert [done.completion.finish_reason for done in engine.finished()] == ["length"]
    engine.submit(request(1))
    engine.submit(request(2))
    engine.abort()
    assert [done.completion.finish_reason for done in engine.finished()] == ["abort", "abort"]
    engine.submit(request(1))
    assert [done.completion.finish_reason for done in engine.finished()] == ["length"]


def test_a_stream_is_one():
    engine = Echo(per_step=1)
    engine.submit(request(1, seeds=(1, 2, 3)))
    stream = engine.finished()
    next(stream)
    with raises(EngineError, "wrong-state: in another finished"):
        next(engine.finished())
    engine._close_stream()  # as close() does in the middle of it
    assert list(stream) == [] and engine._open == 0


def test_the_end_of_a_stream_does_not_take_what_came_after_it():
    """Another thread submits when nothing is left, and the generator has not returned yet."""
    engine = Echo()
    engine.submit(request(1))
    plain = engine._next

    def next_and_submit(**how):
        found = plain(**how)
        if found is None:
            thread = threading.Thread(target=engine.submit, args=(request(2),))
            thread.start()
            thread.join(10)
        return found

    engine._next = next_and_submit
    assert len(list(engine.finished())) == 1
    del engine._next
    assert [done.completion.prompt_token_ids for done in engine.finished()] == [(2,)]


def test_a_held_sample_keeps_the_stream_and_is_dropped_with_it():
    engine = Echo()
    engine.submit(request(1, seeds=(4, 5)))
    for done in engine.finished(wait=False):
        engine.hold(done)
    assert engine.ends == 0
    with raises(EngineError, "wrong-state"):
        engine.generate([request(1)])
    engine.continue_(done, (3,), sampling=ONE)
    (again,) = engine.finished(wait=False)
    assert again.completion.prompt_token_ids == (1, 5, 3) and engine.ends == 0
    other = Finished(handle=done.handle, sample=0, completion=done.completion)
    engine.release(other)  # by name: the handle and the sample
    assert engine.ends == 1 and engine.generate([request(1)])
    engine.submit(request(1, seeds=(4, 5)))
    stream = engine.finished()
    engine.hold(next(stream))
    stream.close()
    assert engine.generate([request(1)])


def test_an_engine_without_a_token_border_says_that_it_cannot_pause():
    with raises(EngineError, "unsupported-combination", setting="engine.name"):
        Echo().pause()


def test_what_was_aborted_can_go_on_in_the_same_stream():
    engine = Echo(per_step=1)
    for prompt in (1, 2):
        engine.submit(request(prompt))
    engine.abort()
    reasons = []
    for done in engine.finished():
        reasons.append(done.completion.finish_reason)
        if len(reasons) == 2:
            engine.continue_(done, sampling=ONE)
    assert reasons == ["abort", "abort", "length"]
