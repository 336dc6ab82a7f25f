"""No field is dropped on its way to an engine, also none that is added later."""

import dataclasses

import pytest
from sampled import engine_spec

from lockstep.config.engine import HAS_EFFECT, EngineConfig
from lockstep.engine.sglang import translate as sglang
from lockstep.engine.vllm import translate as vllm
from lockstep.errors import EngineError
from lockstep.schema.rollout import SamplingParams

CHANGES = {
    "max_tokens": 9,
    "min_tokens": 2,
    "temperature": 0.0,
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.2,
    "repetition_penalty": 1.3,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.4,
    "stop": ("x",),
    "stop_token_ids": (5,),
    "keep_stop": False,
    "ignore_eos": True,
    "skip_special_tokens": True,
    "logprob_kind": "raw",
}
WAYS = {
    "vllm, raw": lambda p: vllm.vllm_sampling(p, seed=1, eos_token_ids=(2,), logprobs_mode="raw_logprobs"),
    "vllm, processed": lambda p: vllm.vllm_sampling(
        p, seed=1, eos_token_ids=(2,), logprobs_mode="processed_logprobs"
    ),
    "sglang, seeded": lambda p: sglang.sglang_sampling(p, seed=1, eos_token_ids=(2,), seeded=True),
    "sglang, unseeded": lambda p: sglang.sglang_sampling(p, seed=1, eos_token_ids=(2,), seeded=False),
}
OURS = {"sglang": {"stop", "keep_stop", "skip_special_tokens"}}
"""Done by the engine's client, in the ids that stream in."""


def test_every_sampling_field_is_in_the_list():
    assert set(CHANGES) == {field.name for field in dataclasses.fields(SamplingParams)}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("field", CHANGES)
def test_a_changed_field_changes_what_is_sent_or_is_refused_by_name(way, field):
    plain = SamplingParams(max_tokens=16)
    changed = dataclasses.replace(plain, **{field: CHANGES[field]})
    if field in OURS.get(way.partition(",")[0], ()):
        assert WAYS[way](changed) == WAYS[way](plain)
        return
    try:
        sent = WAYS[way](changed)
    except EngineError as error:
        assert f"sampling.{field} = " in str(error)
        return
    assert sent != WAYS[way](plain)


SPEC = engine_spec(dtype="bfloat16", device="cuda:0")
AT_START = {
    "max_batch": 8,
    "tp": 2,
    "memory_fraction": 0.3,
    "prefix_caching": False,
    "eager": True,
    "batch_invariant": True,
    "offload": True,
    "options": {"attention_backend": "x"},
}
ELSEWHERE = {
    "process",  # make_engine
    "replicas",  # make_engine
    "max_model_len",  # make_engine puts it into the spec
    "cuda_devices",  # the server's process
    "python",
    "url",
    "token_env",
    "env",
    "secrets",
    "start_seconds",
    "max_restarts",
    "request_seconds",
    "update_seconds",
    "bucket_mb",  # the transfer
    "unseeded",  # only says that it is accepted
    "kv_cache_tokens",  # the native engine
    "prefill_chunk",
}


def test_every_setting_is_sent_at_the_start_or_read_elsewhere():
    assert set(HAS_EFFECT) | {"max_batch"} == set(AT_START) | ELSEWHERE


@pytest.mark.parametrize("name", ["vllm", "sglang"])
@pytest.mark.parametrize("setting", AT_START)
def test_a_changed_setting_changes_what_an_engine_is_started_with(name, setting):
    def started(**settings):
        config = EngineConfig(name=name, python="/p", **settings)
        if name == "vllm":
            sent = vllm.vllm_constructor(config, SPEC)
            environment = vllm.vllm_environment(config, SPEC, in_process=False)
            return sent, environment, vllm.vllm_server_command(config, SPEC, port=1)
        sent = sglang.sglang_constructor(config, SPEC)
        every = frozenset(f"--{field.replace('_', '-')}" for field in (*sent, "host", "port"))
        return sent, sglang.sglang_server_command(
            config,
            SPEC,
            port=1,
            flags=every | {"--disable-decode-cuda-graph", "--disable-prefill-cuda-graph"},
        )

    base = {"unseeded": True} if name == "sglang" and setting != "batch_invariant" else {}
    before = started(**({"unseeded": True} if name == "sglang" else {}))
    after = started(**base, **{setting: AT_START[setting]})
    assert before[0] != after[0] or (name, setting) == ("vllm", "batch_invariant")  # a variable of its own
    assert before[1:] != after[1:]
