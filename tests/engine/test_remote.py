"""RemoteEngine and the vLLM driver against fake servers in processes of their own: no model, no vLLM."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from raising import raises
from starting import alive, until

from lockstep.engine.remote.http import HttpBatch, HttpError
from lockstep.engine.remote.server import ServerProcess
from lockstep.engine.streaming import turn_seed
from lockstep.errors import EngineError
from lockstep.schema.rollout import SamplingParams
from lockstep.schema.weights import UpdateSession, WeightBucket

from .servers import asked, engine_in, pids, requests_of, write_plan


@pytest.fixture
def engines(tmp_path):
    """engines(plan..., config=..., spec=...): closed after the test."""
    made = []

    def make(*starts, **settings):
        write_plan(tmp_path, *starts)
        made.append(engine_in(tmp_path, **settings))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def session(version=1, seconds=20.0):
    return UpdateSession(policy_version=version, run_id="test", deadline=time.monotonic() + seconds)


def bucket(transport="disk"):
    return WeightBucket(index=0, specs=(), num_bytes=0, transport=transport, handle={"path": "x"})


def update(engine, version=1):
    engine.begin_update(session(version))
    engine.receive(bucket())
    engine.finish_update(engine._session)


# samples


def test_every_sample_comes_once_in_its_place(engines, tmp_path):
    engine = engines({"seconds": {"11": 0.5}})
    seen = []
    requests = requests_of(11, 12) + requests_of(13, prompt=(4, 5), max_tokens=3)
    results = engine.generate(requests, on_completion=lambda i, k, c: seen.append((i, k, c.seed)))
    assert [[c.token_ids for c in row] for row in results] == [
        [(11, 12, 13, 14), (12, 13, 14, 15)],
        [(13, 14, 15)],
    ]
    assert sorted(seen) == [(0, 0, 11), (0, 1, 12), (1, 0, 13)]
    assert seen[-1] == (0, 0, 11)  # the slow one came last, and did not hold up the others
    first = results[1][0]
    assert first.logprobs == (-0.5, -0.5, -0.5) and first.finish_reason == "length"
    assert first.prompt_token_ids == (4, 5) and first.cached_tokens == 3 and first.text is None
    assert (first.engine, first.policy_version, first.stop_reason) == ("vllm", 0, None)
    stats = engine.stats()
    assert (stats.requests, stats.prompt_tokens, stats.cached_tokens) == (2, 8, 9)
    assert (stats.completion_tokens, stats.queued, stats.restarts) == (11, 0, 0)
    body = next(b for b in asked(tmp_path) if b["sampling_params"]["seed"] == 11)  # they arrive in any order
    assert body["token_ids"] == [1, 2, 3] and body["sampling_params"]["ignore_eos"] is True
    assert body["sampling_params"]["stop_token_ids"] == [99] and body["sampling_params"]["seed"] == 11


def test_siblings_are_sent_together_and_at_most_max_batch_at_a_time(engines, tmp_path):
    engine = engines({"delay": 0.2}, config={"max_batch": 8})
    began = time.monotonic()
    engine.generate(requests_of(*range(16)))
    assert time.monotonic() - began >= 0.4  # two waves
    assert sorted(b["sampling_params"]["seed"] for b in asked(tmp_path)[:8]) == list(range(8))


def test_hundreds_of_samples(engines):
    engine = engines()
    results = engine.generate(requests_of(*range(300)))
    assert [c.token_ids[0] for c in results[0]] == [s % 100 for s in range(300)]


def test_bad_requests_are_refused_before_anything_is_sent(engines, tmp_path):
    engine = engines()
    for requests, message in (
        (requests_of(1, prompt=()), "empty"),
        (requests_of(1, prompt=(100,)), "outside-vocabulary"),
        (requests_of(1, prompt=[1] * 64), "too-long: 0, 64"),
        (requests_of(1) + requests_of(1, temperature=0.7), "unsupported-sampling: sampling.temperature"),
    ):
        with raises(EngineError, message):
            engine.generate(requests)
    assert asked(tmp_path) == []


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"raw": "no json"}, "not-json"),
        ({"raw": "[1]"}, "wrong-type"),
        ({"raw": '{"choices": []}'}, "bad-reply: sample"),
        ({"raw": '{"choices": [{"token_ids": ["x"]}]}'}, "bad-reply: sample"),
        ({"raw": '{"usage": {"prompt_tokens": NaN}}'}, "not-json"),
        ({"choice": {"token_ids": [1, 2, 3, "4"]}}, "bad-reply: sample"),
        ({"logprob": None}, "wrong-result: logprobs"),
        ({"choice": {"token_ids": [1, 2, 3, 100]}}, "wrong-result: logprobs"),
        ({"logprob": -9999.0}, "not-finite: 1"),
        ({"logprob": -20000.0}, "not-finite: 1"),
        ({"logprob": 0.5}, "wrong-result: logprobs"),
        ({"choice": {"finish_reason": "stop"}}, "wrong-result: which is neither an eos id"),
        ({"choice": {"finish_reason": "error"}}, "wrong-result: unknown reason"),
        ({"choice": {"logprobs": None}}, "wrong-result: logprobs"),
        ({"status": 400, "raw": '{"error": {"message": "no such thing"}}'}, "bad-reply: 400, no such thing"),
        ({"status": 500, "raw": '{"error": {"message": "kernel failed"}}'}, "refused: kernel failed"),
    ],
)
def test_replies_are_not_trusted(engines, plan, message):
    engine = engines(plan)
    with raises(EngineError, message):
        engine.generate(requests_of(1))


def test_ids_outside_the_vocabulary_and_short_samples_are_refused(engines):
    engine = engines({"vocab": 1000})
    with raises(EngineError, "wrong-result: a token id outside the vocabulary"):
        engine.generate(requests_of(500))
    content = [{"token_id": 1, "logprob": -1.0}]
    write_plan(Path(engine._spec.work_dir), {"choice": {"token_ids": [1], "logprobs": {"content": content}}})
    with raises(EngineError, "wrong-result: finish reason"):
        engine.generate(requests_of(1))


def test_the_stop_reason_is_found_in_the_tokens(engines):
    content = [{"token": f"token_id:{t}", "logprob": -1.0} for t in (7, 99)]  # as 0.26 writes them
    stop = {"choice": {"token_ids": [7, 99], "logprobs": {"content": content}, "finish_reason": "stop"}}
    engine = engines(stop)
    ((sample,),) = engine.generate(requests_of(1))
    assert (sample.finish_reason, sample.stop_reason, sample.token_ids) == ("stop", 99, (7, 99))
    with raises(EngineError, "wrong-result: which is neither an eos id"):
        engine.generate(requests_of(1, ignore_eos=True))
    ((sample,),) = engine.generate(requests_of(1, ignore_eos=True, stop_token_ids=(99,)))
    assert sample.stop_reason == 99


def test_an_end_as_the_last_token_that_fits_is_an_end(engines):
    content = [{"token_id": t, "logprob": -1.0} for t in (7, 8, 9, 99)]
    engine = engines({"choice": {"token_ids": [7, 8, 9, 99], "logprobs": {"content": content}}})
    ((sample,),) = engine.generate(requests_of(1))
    assert (sample.finish_reason, sample.stop_reason) == ("stop", 99)
    ((sample,),) = engine.generate(requests_of(1, ignore_eos=True))
    assert (sample.finish_reason, sample.stop_reason) == ("length", None)


# death, silence, abort


def test_death_in_mid_batch_asks_again_only_for_what_is_missing(engines, tmp_path):
    engine = engines({"die_after_replies": 3, "seconds": {"21": 30.0}}, {})
    seen = []
    results = engine.generate(requests_of(21, 22, 23, 24), on_completion=lambda i, k, c: seen.append(c.seed))
    assert [c.token_ids[0] for c in results[0]] == [21, 22, 23, 24]
    assert sorted(seen) == [21, 22, 23, 24]  # once each
    again = [b["sampling_params"]["seed"] for b in asked(tmp_path)[4:]]
    assert again == [21]
    assert [c.attempt for c in results[0]] == [2, 1, 1, 1]
    assert engine.stats().restarts == 1
    assert not engine.dirty  # it reads its weights from the folder


def test_answers_that_come_with_the_news_of_a_death_are_taken(engines, tmp_path, monkeypatch):
    engine = engines({"die_after_replies": 3, "seconds": {"21": 30.0}}, {})
    poll, restarts = HttpBatch.poll, engine.stats().restarts

    def late(batch, seconds):
        found = poll(batch, seconds)
        if engine.stats().restarts == restarts:
            until(lambda: found.extend(poll(batch, 0.0)) or engine._server.ended() is not None)
            found.extend(poll(batch, 1.0))
        return sorted(found, key=lambda answer: not isinstance(answer[1], HttpError))

    monkeypatch.setattr(HttpBatch, "poll", late)
    results = engine.generate(requests_of(21, 22, 23, 24))
    assert [c.token_ids[0] for c in results[0]] == [21, 22, 23, 24]
    assert [b["sampling_params"]["seed"] for b in asked(tmp_path)[4:]] == [21]


def test_death_again_and_again_ends_with_the_log(engines):
    engine = engines({"die_at_sample": 1}, config={"max_restarts": 1})
    with pytest.raises(EngineError) as caught:
        engine.generate(requests_of(1))
    text = str(caught.value)
    assert "was killed by SIGKILL while it generated" in text
    assert "engine.max_restarts = 1" in text and "RuntimeError: the fake was told to die" in text


def test_a_server_that_died_idle_is_started_again(engines, tmp_path):
    engine = engines({"grandchild": True})
    fake, _ = pids(tmp_path)
    os.kill(fake, signal.SIGKILL)
    until(lambda: engine._server.ended() is not None)
    ((sample,),) = engine.generate(requests_of(5))
    assert sample.token_ids == (5, 6, 7, 8) and engine.stats().restarts == 1


def test_pushed_weights_are_pushed_again_after_a_death(engines):
    engine = engines({"die_at_sample": 2}, {})
    update(engine, version=7)
    pushes = []

    def recover():
        pushes.append(engine.stats().restarts)
        update(engine, version=7)

    engine.recover = recover
    results = engine.generate(requests_of(1, 2, 3))
    assert pushes == [1]
    assert {c.policy_version for c in results[0]} == {7} and len(results[0]) == 3


def test_without_recovery_a_death_after_a_push_is_an_error(engines):
    engine = engines({"die_at_sample": 1}, {})
    update(engine)
    with raises(EngineError, "process-died: without the trained weights"):
        engine.generate(requests_of(1))
    assert engine.dirty
    with raises(EngineError, "wrong-state: dirty"):
        engine.generate(requests_of(1))
    update(engine, version=2)  # a whole session makes it clean
    assert engine.generate(requests_of(1))[0][0].policy_version == 2


def test_a_death_before_an_update_needs_no_recovery(engines, tmp_path):
    engine = engines({"grandchild": True})
    update(engine, version=1)
    engine.recover = lambda: pytest.fail("all weights are about to come anyway")
    os.kill(pids(tmp_path)[0], signal.SIGKILL)
    until(lambda: engine._server.ended() is not None)
    update(engine, version=2)
    assert not engine.dirty and engine.stats().restarts == 1
    assert engine.generate(requests_of(1))[0][0].policy_version == 2


def test_a_server_that_dies_when_the_update_begins_is_started_again(engines):
    engine = engines({"die_at": "/pause"}, {})
    engine.recover = lambda: pytest.fail("all weights are about to come anyway")
    update(engine, version=2)
    assert engine.generate(requests_of(1))[0][0].policy_version == 2 and engine.stats().restarts == 1


def test_a_death_while_weights_are_pushed_again_is_one_more_death(engines):
    engine = engines({"die_at_sample": 1}, {"die_at": "/pause"}, {}, config={"max_restarts": 2})
    update(engine, version=3)
    engine.recover = lambda: update(engine, version=3)
    assert engine.generate(requests_of(1))[0][0].policy_version == 3 and engine.stats().restarts == 2


def test_an_engine_that_never_answers(engines, tmp_path):
    engine = engines({"delay": 600.0, "grandchild": True}, {}, config={"request_seconds": 1.5})
    processes = pids(tmp_path)
    with raises(EngineError, "deadline: engine.request_seconds"):
        engine.generate(requests_of(1, 2))
    assert not any(alive(p) for p in processes)
    assert engine.generate(requests_of(1))[0][0].token_ids == (1, 2, 3, 4)  # by another server


def test_a_stopped_process_is_an_engine_that_never_answers(engines, tmp_path):
    engine = engines({"delay": 0.3, "grandchild": True}, config={"request_seconds": 1.5})
    fake, _ = pids(tmp_path)
    os.kill(fake, signal.SIGSTOP)
    with raises(EngineError, "deadline: engine.request_seconds"):
        engine.generate(requests_of(1))
    assert not alive(fake)


def test_a_slow_engine_that_makes_progress_is_waited_for(engines):
    engine = engines({"delay": 3.0, "progress": True}, config={"request_seconds": 1.0})
    ((sample,),) = engine.generate(requests_of(1))
    assert sample.finish_reason == "length"
    assert engine.stats().kv_cache_use == 0.25


def test_abort_ends_what_runs_and_what_waits(engines):
    engine = engines({"seconds": {"1": 60.0, "2": 60.0, "3": 60.0}}, config={"max_batch": 2})
    threading.Timer(0.5, engine.abort).start()
    (results,) = engine.generate(requests_of(1, 2, 3))
    assert [c.finish_reason for c in results] == ["abort"] * 3
    assert [c.token_ids for c in results] == [(1,), (2,), ()]
    assert engine.generate(requests_of(4))[0][0].finish_reason == "length"  # the next call is its own


def test_an_error_of_the_listener_closes_the_connections(engines):
    engine = engines({"seconds": {"2": 60.0}})

    def listen(i, k, c):
        raise KeyError("of the caller")

    with pytest.raises(KeyError):
        engine.generate(requests_of(1, 2), on_completion=listen)
    assert engine.generate(requests_of(3))[0][0].seed == 3


# turns


def test_a_turn_sends_the_whole_context_and_a_seed_of_its_own(engines, tmp_path):
    """Also after a death: the fourth request is the second one, sent again to another server."""
    engine = engines({"die_at_sample": 2}, {})
    engine.submit(requests_of(11)[0])
    seen = []
    for done in engine.finished():
        seen.append(done.completion)
        if len(seen) < 3:
            with raises(EngineError, "wrong-state: already generating"):
                engine.begin_update(session())
            engine.continue_(done, (7,), sampling=SamplingParams(max_tokens=2))
    assert {c.seed for c in seen} == {11} and engine.stats().restarts == 1
    bodies = asked(tmp_path)
    assert [b["sampling_params"]["seed"] for b in bodies] == [11, *[turn_seed(11, 8)] * 2, turn_seed(11, 11)]
    second = [1, 2, 3, 11, 12, 13, 14, 7]
    assert [b["token_ids"] for b in bodies[:3]] == [[1, 2, 3], second, second]
    assert bodies[3]["token_ids"] == [*second, *seen[1].token_ids, 7]
    assert [c.prompt_token_ids for c in seen] == [tuple(bodies[i]["token_ids"]) for i in (0, 1, 3)]
    assert engine.stats().requests == 1


def test_the_time_of_the_consumer_is_no_silence_of_the_server(engines):
    engine = engines({"seconds": {"12": 1.4}}, config={"request_seconds": 1.0})
    engine.submit(requests_of(11, 12)[0])
    for done in engine.finished():
        if done.sample == 0:
            time.sleep(1.1)
    assert done.sample == 1 and done.completion.finish_reason == "length"


def test_what_was_aborted_goes_on_in_the_same_stream(engines):
    engine = engines({"seconds": {"1": 60.0, "2": 60.0}}, config={"max_batch": 1})
    engine.submit(requests_of(1, 2)[0])
    threading.Timer(0.5, engine.abort).start()
    seen = []
    for done in engine.finished():
        seen.append(done)
        if len(seen) == 2:
            for one in seen:
                engine.continue_(one, sampling=SamplingParams(max_tokens=3))
    assert [done.completion.finish_reason for done in seen] == ["abort"] * 2 + ["length"] * 2


# updates


def test_a_session_is_one_sequence_of_calls(engines, tmp_path):
    engine = engines()
    update(engine, version=3)
    calls = asked(tmp_path, "/collective_rpc")
    assert [c["method"] for c in calls[1:]] == ["lockstep_begin", "lockstep_receive", "lockstep_finish"]
    assert len(asked(tmp_path, "/pause?mode=wait")) == len(asked(tmp_path, "/resume")) == 1
    assert len(asked(tmp_path, "/reset_prefix_cache")) == 1
    assert engine.stats().policy_version == 3 and not engine.dirty


def test_pushed_weights_start_dirty(engines):
    engine = engines(spec={"weights": "pushed"})
    assert engine.dirty
    with raises(EngineError, "wrong-state: dirty"):
        engine.generate(requests_of(1))
    update(engine)
    assert len(engine.generate(requests_of(1))) == 1


def test_a_cache_that_is_not_flushed_stops_the_update(engines):
    engine = engines({"reset": False})
    engine.begin_update(session())
    with raises(EngineError, "refused: prefix cache"):
        engine.finish_update(engine._session)
    engine.fail_update("test")
    assert engine.dirty and engine.stats().policy_version == 0
    with raises(EngineError, "wrong-state: dirty"):
        engine.generate(requests_of(1))


def test_what_a_worker_says_is_in_the_error(engines):
    engine = engines({"rpc": {"lockstep_receive": {"error": "ValueError: no weight x"}}})
    engine.begin_update(session())
    with raises(EngineError, "refused: lockstep_receive", rank=0, reason="ValueError: no weight x"):
        engine.receive(bucket())
    engine.fail_update("test")


def test_an_update_waits_for_what_runs_and_not_longer(engines):
    engine = engines({"delay": 1.0})
    results = []
    thread = threading.Thread(target=lambda: results.append(engine.generate(requests_of(1, 2))))
    thread.start()
    until(lambda: engine.stats().queued == 2)
    with raises(EngineError, "deadline", samples=2):
        engine.begin_update(session(seconds=0.2))
    engine.begin_update(session(seconds=20.0))  # waits for the thread
    assert len(results) == 1 or not thread.join(5)
    assert [c.policy_version for c in results[0][0]] == [0, 0]
    with raises(EngineError, "wrong-state: is being updated"):
        engine.generate(requests_of(1))
    with raises(EngineError, "wrong-state: is being updated"):
        engine.begin_update(session())
    engine.finish_update(engine._session)


def test_two_generates_at_once_are_refused(engines):
    engine = engines({"delay": 1.0})
    thread = threading.Thread(target=engine.generate, args=(requests_of(1),))
    thread.start()
    until(lambda: engine.stats().queued == 1)
    with raises(EngineError, "wrong-state: already generating"):
        engine.generate(requests_of(2))
    thread.join(10)


def test_a_session_that_does_not_begin_leaves_the_server_unpaused(engines, tmp_path):
    engine = engines({"rpc": {"lockstep_begin": {"error": "ValueError: x"}}})
    with raises(EngineError, "refused: lockstep_begin", rank=0, reason="ValueError: x"):
        engine.begin_update(session())
    assert engine.dirty and len(asked(tmp_path, "/resume")) == 1
    engine.fail_update("test")
    assert len(asked(tmp_path, "/resume")) == 1


def test_receive_outside_of_a_session_and_by_another_way(engines):
    engine = engines()
    with raises(EngineError, "wrong-state: no update is open"):
        engine.receive(bucket())
    engine.begin_update(session())
    with raises(EngineError, "unsupported-combination: engine.transfer", transport="ipc"):
        engine.receive(bucket("ipc"))
    engine.fail_update("test")


def test_a_session_that_is_too_late(engines):
    engine = engines()
    engine.begin_update(session(seconds=0.5))
    time.sleep(0.6)
    with raises(EngineError, "deadline: engine.update_seconds", seconds=300):
        engine.finish_update(engine._session)
    engine.fail_update("test")


# sleep, close


def test_sleep_wake_close(engines, tmp_path):
    engine = engines()
    engine.sleep()
    with raises(EngineError, "wrong-state: asleep"):
        engine.generate(requests_of(1))
    with raises(EngineError, "wrong-state: asleep"):
        engine.begin_update(session())
    engine.wake()
    assert len(engine.generate(requests_of(1))) == 1
    engine.close()
    engine.close()
    with raises(EngineError, "wrong-state: closed"):
        engine.generate(requests_of(1))
    assert engine._server.ended() is not None


def test_another_server_at_our_port_is_seen(engines):
    with raises(EngineError, "other-model: theirs"):
        engines({"id": "theirs"})


def test_a_server_that_does_not_fall_asleep(engines):
    engine = engines({"insomnia": True})
    with raises(EngineError, "refused: sleep"):
        engine.sleep()


def test_describe_names_what_was_started(engines):
    engine = engines(config={"max_batch": 4})
    found = engine.describe()
    assert found["version"] == "0.32.0" and found["log"].endswith("fake.log")
    assert found["environment"]["PATH"] == os.environ["PATH"] and found["pid"] > 0
    assert isinstance(engine._server, ServerProcess)
