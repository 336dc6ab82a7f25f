"""SGLangServer against a FAKE SGLang server in a process of its own: no model, no SGLang."""

import threading
from dataclasses import replace

import pytest
from raising import raises

from lockstep.engine.sglang.engine import SGLangServer
from lockstep.engine.streaming import turn_seed
from lockstep.errors import ConfigError, EngineError
from lockstep.schema.rollout import SamplingParams

from .fakes import EOS, LENGTH, asked, request, spec_in

# samples


def test_tokens_and_logprobs_come_in_order_and_in_their_place(engines):
    engine = engines()
    results = engine.generate([request(10, samples=2), request(20, max_tokens=3)])
    assert [[c.token_ids for c in row] for row in results] == [
        [(11, 12, 13, 14), (11, 12, 13, 14)],
        [(21, 22, 23)],
    ]
    first = results[0][1]
    assert first.logprobs == (-0.125, -0.25, -0.375, -0.5)
    assert (first.finish_reason, first.stop_reason, first.seed) == ("length", None, 1)
    assert (first.engine, first.policy_version, first.text) == ("sglang", 0, None)


def test_a_long_completion_comes_in_chunks_and_is_put_together(engines, tmp_path):
    engine = engines()
    (row,) = engine.generate([request(0, max_tokens=300, ignore_eos=True)])
    assert row[0].token_ids == tuple(i % 256 for i in range(1, 301))
    assert row[0].logprobs == tuple(-(k + 1) / 8 for k in range(300))
    (body,) = [body for _, body in asked(tmp_path, "/generate")]
    assert body["sampling_params"][0]["stream_interval"] == 128


def test_a_server_that_repeats_what_it_sent_is_asked_for_the_end_only(engines, tmp_path):
    engine = engines({"cumulative": True})
    (row,) = engine.generate([request(0, max_tokens=200)])
    assert row[0].token_ids == tuple(range(1, 201)) and row[0].logprobs[-1] == -25.0
    (body,) = [body for _, body in asked(tmp_path, "/generate")]
    assert body["sampling_params"][0]["stream_interval"] == 1 << 30


def test_a_server_at_a_url_is_used_and_left_alone(engines, tmp_path, monkeypatch):
    own = engines()
    config = own._config.model_copy(update={"url": own._server.spec.url, "python": None, "env": {}})
    with raises(EngineError, "unreachable: engine.url"):
        SGLangServer(config, spec=spec_in(tmp_path))
    monkeypatch.setenv("ITS_TOKEN", own._server.spec.token)
    config = config.model_copy(update={"token_env": "ITS_TOKEN"})
    other = SGLangServer(config, spec=spec_in(tmp_path))
    assert other.generate([request(0, max_tokens=2)])[0][0].token_ids == (1, 2)
    assert other.transports[0] == "disk"  # nobody knows its GPU
    other.close()
    assert own.generate([request(0, max_tokens=1)])[0][0].token_ids == (1,)


def test_eos_and_stop_ids_stay_in_the_completion(engines):
    engine = engines()
    rows = engine.generate(
        [
            request(EOS - 3, max_tokens=50),
            request(10, max_tokens=50, stop_token_ids=(12,)),
            request(EOS - 3, max_tokens=5, ignore_eos=True),
        ]
    )
    ends = [(r[0].token_ids[-1], r[0].finish_reason, r[0].stop_reason) for r in rows]
    assert ends == [(EOS, "stop", EOS), (12, "stop", 12), (EOS + 2, "length", None)]


def test_finished_samples_move_on_while_others_run(engines):
    engine = engines({"token_seconds": 0.01})
    seen = []
    engine.generate(
        [request(10, max_tokens=60), request(20, max_tokens=2), request(30, max_tokens=30)],
        on_completion=lambda i, k, c: seen.append((i, engine.stats().queued)),
    )
    assert seen == [(1, 2), (2, 1), (0, 0)]


def test_siblings_share_a_wave_and_each_has_its_seed(engines, tmp_path):
    engine = engines(batch_invariant=True, unseeded=False)
    engine.generate([request(10, samples=3)])
    (body,) = [body for _, body in asked(tmp_path, "/generate")]
    assert [p["sampling_seed"] for p in body["sampling_params"]] == [0, 1, 2]
    assert len(set(body["rid"])) == 3 and body["input_ids"] == [[1, 2, 10]] * 3


def test_many_samples_go_out_in_waves_within_the_limit(engines, tmp_path):
    engine = engines({"token_seconds": 0.2}, max_batch=100)
    rows = engine.generate([request(10, samples=300, max_tokens=2)])
    assert len(rows[0]) == 300
    sizes = [len(body["rid"]) for _, body in asked(tmp_path, "/generate")]
    assert max(sizes) == 64 and sum(sizes) == 300
    assert sorted(sizes[:3]) == [36, 64, 64]  # 100 that run and 64 that wait


def test_a_sample_may_fill_the_whole_context(engines, tmp_path):
    engine = engines()
    longest = LENGTH - 8
    (row,) = engine.generate([request(0, max_tokens=10_000, ignore_eos=True)])
    assert len(row[0].token_ids) == longest - 3 and row[0].finish_reason == "length"
    start = (tmp_path / "engine" / "sglang.log").read_text()
    assert f"--context-length {longest + 8}" in start


def test_stop_strings_are_found_here_and_the_sample_is_ended_there(engines, tmp_path):
    engine = engines({"token_seconds": 0.005}, spec={"tokenizer": Letters()})
    (row,) = engine.generate([request(96, max_tokens=400, stop=("de",))])
    assert row[0].text == "abcde" and row[0].stop_reason == "de"
    assert len(row[0].token_ids) == len(row[0].logprobs) == 5  # of a chunk of 8
    (abort,) = [body for _, body in asked(tmp_path, "/abort_request")]
    assert abort["rid"].endswith("-0-0.") and not abort["abort_all"]


class Letters:
    """Token i is the character i."""

    chat_template, added_tokens_decoder = None, {}

    def convert_ids_to_tokens(self, ids):
        return [chr(i) for i in ids]

    def decode(self, ids, **_):
        return "".join(map(chr, ids))


# what the server may do


@pytest.mark.parametrize("waiting", [False, True])
def test_an_abort_ends_everything_with_what_it_has(engines, waiting):
    engine = engines({"token_seconds": 0.02, "abort_waiting": waiting}, max_batch=4)
    threading.Timer(0.5, engine.abort).start()
    rows = engine.generate([request(0, samples=200, max_tokens=500, ignore_eos=True)])
    assert {c.finish_reason for c in rows[0]} == {"abort"} and len(rows[0]) == 200
    first = rows[0][0]
    assert first.token_ids == tuple(range(1, len(first.token_ids) + 1)) and first.token_ids
    assert len(first.logprobs) == len(first.token_ids)
    assert rows[0][-1].token_ids == ()


def test_a_server_that_dies_in_mid_batch_is_started_again_and_no_sample_is_lost(engines, tmp_path):
    engine = engines({"die_at_token": 20, "token_seconds": 0.002}, {})
    seen = []
    rows = engine.generate(
        [request(10, max_tokens=3), request(20, max_tokens=90)],
        on_completion=lambda i, k, c: seen.append(i),
    )
    assert seen == [0, 1]  # the first had finished and is not asked again
    assert rows[1][0].token_ids == tuple(range(21, 111))
    assert [row[0].attempt for row in rows] == [1, 2]
    assert engine.stats().restarts == 1
    assert [len(body["rid"]) for _, body in asked(tmp_path, "/generate")] == [2, 1]


def test_broken_connections_are_made_again(engines):
    engine = engines({"break_streams": 2})
    (row,) = engine.generate([request(10, max_tokens=20)])
    assert row[0].token_ids == tuple(range(11, 31)) and row[0].attempt == 3
    assert engine.stats().restarts == 0


@pytest.mark.parametrize(
    ("plan", "settings", "match", "fields"),
    [
        ({"die_at_token": 2}, {"max_restarts": 1}, "process-died", {"restarts": 1}),
        ({"hang_at_token": 2}, {"request_seconds": 2.0}, "deadline: engine.request_seconds", {}),
        ({"break_streams": 99}, {}, "unreachable", {"tries": 3}),
        ({"nan_at_token": 3}, {}, "not-finite: 0, 2", {}),
        ({"abort_at_token": 3}, {}, "unrequested-abort", {}),
        ({"weight_version": "other"}, {}, "values-differ: default", {}),
    ],
)
def test_a_server_that_never_gives_what_was_asked_for(engines, plan, settings, match, fields):
    engine = engines(plan, **settings)
    with raises(EngineError, match, **fields):
        engine.generate([request(10, max_tokens=50)])


@pytest.mark.parametrize(
    ("sampling", "match"),
    [
        ({"min_tokens": 2}, "unsupported-sampling: sampling.min_tokens"),
        ({"repetition_penalty": 1.1}, "unsupported-sampling: sampling.repetition_penalty"),
        ({"ignore_eos": True, "stop_token_ids": (9,)}, "unsupported-sampling: sampling.ignore_eos"),
    ],
)
def test_fields_that_sglang_cannot_honour_are_refused_before_anything_runs(
    engines, tmp_path, sampling, match
):
    engine = engines()
    with raises(EngineError, match):
        engine.generate([request(10), request(11, **sampling)])
    assert not asked(tmp_path, "/generate")


def test_a_prompt_that_is_too_long_or_empty_is_refused(engines):
    engine = engines()
    long = replace(request(5, max_tokens=1), prompt_token_ids=(1,) * (LENGTH - 8))
    with raises(EngineError, "too-long", request=0, limit=592):
        engine.generate([long])


def test_what_the_server_refuses_is_said_in_its_words(engines):
    engine = engines()
    body = engine._sglang.body
    engine._sglang.body = lambda job: body(job) | {"no_such_field": 1}
    with raises(EngineError, "refused", status=400):
        engine.generate([request(10)])
    del engine._sglang.body
    assert engine.generate([request(10)])[0][0].token_ids == (11, 12, 13, 14)


# turns


def test_a_turn_sends_the_whole_context_and_a_seed_of_its_own(engines, tmp_path):
    engine = engines(batch_invariant=True, unseeded=False)
    engine.submit(request(10, samples=2, max_tokens=3))
    seen = []
    for done in engine.finished():
        seen.append(done.completion)
        if len(seen) <= 2:
            engine.continue_(done, (20,), sampling=SamplingParams(max_tokens=2))
    assert [c.token_ids for c in seen] == [(11, 12, 13)] * 2 + [(21, 22)] * 2
    assert [c.seed for c in seen] == [0, 1, 0, 1]
    bodies = [body for _, body in asked(tmp_path, "/generate")]
    later = [
        (ids, p["sampling_seed"])
        for b in bodies[1:]
        for ids, p in zip(b["input_ids"], b["sampling_params"], strict=True)
    ]
    context = [1, 2, 10, 11, 12, 13, 20]
    assert later == [(context, turn_seed(0, 7)), (context, turn_seed(1, 7))]


def test_what_was_aborted_goes_on_in_the_same_stream(engines):
    engine = engines({"token_seconds": 0.02}, max_batch=2)
    engine.submit(request(0, samples=4, max_tokens=500, ignore_eos=True))
    threading.Timer(0.5, engine.abort).start()
    seen = []
    for done in engine.finished():
        seen.append(done)
        if len(seen) == 4:
            for one in seen[:4]:
                engine.continue_(one, sampling=SamplingParams(max_tokens=2, ignore_eos=True))
    assert [done.completion.finish_reason for done in seen] == ["abort"] * 4 + ["length"] * 4
    for first in seen[:4]:
        (second,) = [done for done in seen[4:] if done.sample == first.sample]
        count = len(first.completion.token_ids)
        assert second.completion.token_ids == (count + 1, count + 2)


# start


@pytest.mark.parametrize(
    ("plan", "match"),
    [
        ({"info": {"version": "0.5.9"}}, "unsupported-version: 0.5.9"),
        ({"info": {"dtype": "float16"}}, "server-settings: dtype"),
        ({"info": {"max_req_input_len": 100}}, "server-settings: accepts 106 tokens"),
        ({"info": {"allow_auto_truncate": True}}, "server-settings: allow_auto_truncate"),
        ({"architectures": ["QwenForCausalLM"]}, "server-settings: QwenForCausalLM"),
        ({"fail_start": "no kernel image"}, "process-died: exited with status 1"),
    ],
)
def test_a_server_that_is_not_the_right_one(engines, plan, match):
    with raises(EngineError, match):
        engines(plan)


@pytest.mark.parametrize(
    ("settings", "error", "match"),
    [
        ({"env": {}}, ConfigError, "missing-package: engine.python"),
        # logprobs before the temperature
        (
            {"env": {"SGLANG_RETURN_ORIGINAL_LOGPROB": "1"}},
            *(ConfigError, "wrong-environment: SGLANG_RETURN_ORIGINAL_LOGPROB"),
        ),
        ({"url": "http://127.0.0.1:9", "python": None, "env": {}}, EngineError, "unreachable: engine.url"),
        ({"options": {"no_such_thing": 1}}, ConfigError, "unknown-setting: engine.options"),
    ],
)
def test_settings_with_which_no_server_can_be_had(engines, settings, error, match):
    with raises(error, match):
        engines(**settings)


def test_close_leaves_no_process_and_says_so(engines):
    engine = engines()
    server = engine._server
    engine.close()
    assert server.ended() is not None
    with raises(EngineError, "wrong-state: closed"):
        engine.generate([request(1)])


def test_stats_and_description(engines):
    engine = engines()
    engine.generate([request(10, samples=2)])
    engine.generate([request(10)])
    stats = engine.stats()
    assert (stats.requests, stats.prompt_tokens, stats.completion_tokens) == (2, 9, 12)
    assert stats.cached_tokens == 6  # siblings, and the second call
    assert engine.describe()["version"] == "0.5.16" and engine.describe()["engine"] == "sglang"
    assert engine.memory() == {"weights": 1 << 29, "kv_cache": 2 << 30}
