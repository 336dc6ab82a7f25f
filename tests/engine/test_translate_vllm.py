import dataclasses
import json

import pytest
from raising import raises
from sampled import engine_spec

from lockstep.config.engine import EngineConfig
from lockstep.engine.vllm.translate import (
    vllm_constructor,
    vllm_environment,
    vllm_logprobs_mode,
    vllm_sampling,
    vllm_server_command,
)
from lockstep.errors import ConfigError, EngineError
from lockstep.schema.rollout import SamplingParams

SPEC = engine_spec(
    dtype="bfloat16",
    max_model_len=640,
    eos_token_ids=(2, 3),
    tokenizer=object(),
    device="cuda:0",
    shares_device=True,
    seed=17,
)
CPU = dataclasses.replace(SPEC, device="cpu", shares_device=False)
NONE = SamplingParams(max_tokens=16)


def config(**settings):
    return EngineConfig(name="vllm", **settings)


def sampling(mode="raw_logprobs", eos=(2, 3), **fields):
    params = dataclasses.replace(NONE, **fields)
    return vllm_sampling(params, seed=5, eos_token_ids=eos, logprobs_mode=mode)


def test_nothing_is_left_to_the_constructors_defaults():
    assert vllm_constructor(config(), SPEC) == {
        "model": "/models/m",
        "tokenizer": "/models/m",
        "skip_tokenizer_init": False,
        "dtype": "bfloat16",  # never "auto", which makes bfloat16 of a float32 checkpoint
        "seed": 17,
        "max_model_len": 640,
        "max_num_seqs": 256,
        "tensor_parallel_size": 1,
        "enable_prefix_caching": True,
        "enforce_eager": False,
        "enable_sleep_mode": False,
        "generation_config": "vllm",  # not the model's, whose penalties would be merged in
        "logprobs_mode": "raw_logprobs",
        "load_format": "dummy",
        "trust_remote_code": False,
        "worker_extension_cls": "lockstep.wire.vllm_worker.LockstepWorker",
        "gpu_memory_utilization": 0.45,
        "distributed_executor_backend": "uni",
        "disable_log_stats": False,
    }


@pytest.mark.parametrize(
    ("settings", "spec", "expected"),
    [
        ({"max_batch": 8}, {}, {"max_num_seqs": 8}),
        ({"python": "/p", "tp": 2}, {}, {"tensor_parallel_size": 2}),
        ({}, {"max_model_len": 99}, {"max_model_len": 99}),
        ({"memory_fraction": 0.7}, {}, {"gpu_memory_utilization": 0.7}),
        ({"prefix_caching": False}, {}, {"enable_prefix_caching": False}),
        ({"eager": True}, {}, {"enforce_eager": True}),
        ({"offload": True}, {}, {"enable_sleep_mode": True}),
        ({}, {"weights": "folder"}, {"load_format": "auto"}),
        ({}, {"tokenizer": None}, {"skip_tokenizer_init": True}),
        ({}, {"dtype": "float32"}, {"dtype": "float32"}),
        ({}, {"temperatures": frozenset({0.0, 1.0})}, {"logprobs_mode": "raw_logprobs"}),
        ({}, {"temperatures": frozenset({0.0, 0.7})}, {"logprobs_mode": "processed_logprobs"}),
        ({"options": {"attention_backend": "FLASH_ATTN"}}, {}, {"attention_backend": "FLASH_ATTN"}),
        ({"options": {"max-num-batched-tokens": 512}}, {}, {"max_num_batched_tokens": 512}),
    ],
)
def test_each_field_of_the_constructor(settings, spec, expected):
    found = vllm_constructor(config(**settings), dataclasses.replace(SPEC, **spec))
    assert {name: found[name] for name in expected} == expected


def test_the_memory_of_a_gpu_of_its_own_is_the_engines_to_decide():
    own = dataclasses.replace(SPEC, shares_device=False)
    assert "gpu_memory_utilization" not in vllm_constructor(config(), own)


def test_the_kv_cache_on_a_cpu_is_not_most_of_all_memory():
    found = vllm_constructor(config(), CPU)
    assert found["kv_cache_memory_bytes"] == 1 << 30 and "gpu_memory_utilization" not in found
    assert "kv_cache_memory_bytes" not in vllm_constructor(config(memory_fraction=0.1), CPU)
    own = vllm_constructor(config(options={"kv_cache_memory_bytes": 4096}), CPU)
    assert own["kv_cache_memory_bytes"] == 4096
    assert found["enable_chunked_prefill"] is False and found["max_num_batched_tokens"] == 8192
    assert "enable_chunked_prefill" not in vllm_constructor(config(), SPEC)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float16"}, "contradiction: engine.options.dtype"),
        ({"max-model-len": 5}, "contradiction: engine.options.max-model-len"),
        ({"--enforce-eager": True}, "contradiction: engine.options.--enforce-eager"),
        ({"logprobs_mode": "raw_logits"}, "contradiction: engine.options.logprobs_mode"),
        ({"generation_config": "auto"}, "contradiction: engine.options.generation_config"),
        (
            {"override_generation_config": "{}"},
            "unsupported-combination: engine.options.override_generation_config",
        ),
        ({"data_parallel_size": 2}, "unsupported-combination: engine.options.data_parallel_size"),
        ({"quantization": "fp8"}, "unsupported-combination: engine.options.quantization"),
        ({"block_size": 32, "block-size": 64}, "duplicate: engine.options.block_size"),
    ],
)
def test_options_may_not_change_what_requests_mean(options, message):
    with raises(ConfigError, message):
        vllm_constructor(config(options=options), SPEC)


def test_what_vllm_cannot_do_on_a_cpu_is_refused():
    with raises(ConfigError, "missing-device: engine.batch_invariant"):
        vllm_constructor(config(batch_invariant=True), CPU)
    with raises(ConfigError, "missing-device: engine.offload"):
        vllm_constructor(config(offload=True), CPU)


def test_the_server_gets_the_same_arguments():
    command = vllm_server_command(
        config(python="/p", eager=True, options={"block_size": 32, "async_scheduling": False}), CPU, port=8123
    )
    assert " ".join(command) == (
        "-m vllm.entrypoints.openai.api_server --model /models/m --tokenizer /models/m "
        "--no-skip-tokenizer-init --dtype bfloat16 --seed 17 --max-model-len 640 --max-num-seqs 256 "
        "--tensor-parallel-size 1 --enable-prefix-caching --enforce-eager --no-enable-sleep-mode "
        "--generation-config vllm --logprobs-mode raw_logprobs --load-format dummy --no-trust-remote-code "
        "--worker-extension-cls lockstep.wire.vllm_worker.LockstepWorker "
        "--distributed-executor-backend uni --kv-cache-memory-bytes 1073741824 "
        "--no-enable-chunked-prefill --max-num-batched-tokens 8192 --host 127.0.0.1 --port 8123 "
        "--disable-uvicorn-access-log --middleware lockstep.wire.server_token.RequireToken "
        "--block-size 32 --no-async-scheduling"
    )
    with raises(ConfigError, "contradiction: engine.options.host"):
        vllm_server_command(config(python="/p", options={"host": "0.0.0.0"}), SPEC, port=1)


def test_the_environment():
    here = vllm_environment(config(batch_invariant=True), SPEC, in_process=True)
    assert here["VLLM_BATCH_INVARIANT"] == "1" and here["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert here["VLLM_USE_FLASHINFER_SAMPLER"] == "0" and here["HF_HUB_OFFLINE"] == "1"
    server = vllm_environment(config(python="/p"), SPEC, in_process=False)
    assert server["VLLM_BATCH_INVARIANT"] == "0" and server["VLLM_SERVER_DEV_MODE"] == "1"
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in server


@pytest.mark.parametrize(
    ("temperatures", "mode"),
    [
        ({1.0}, "raw_logprobs"),
        ({0.0}, "raw_logprobs"),
        ({0.0, 1.0}, "raw_logprobs"),
        ({0.7}, "processed_logprobs"),
        ({0.0, 1.0, 0.7}, "processed_logprobs"),
        (set(), "raw_logprobs"),
    ],
)
def test_the_kind_of_logprobs_follows_from_the_temperatures(temperatures, mode):
    assert vllm_logprobs_mode(frozenset(temperatures)) == mode


def test_every_sampling_field_is_sent():
    params = SamplingParams(
        max_tokens=16,
        min_tokens=2,
        temperature=1.0,
        top_p=0.9,
        top_k=7,
        min_p=0.05,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=-0.3,
        stop_token_ids=(9, 2),
        keep_stop=False,
    )
    found = vllm_sampling(params, seed=2**62, eos_token_ids=(2, 3), logprobs_mode="raw_logprobs")
    assert found == {
        "n": 1,
        "max_tokens": 16,
        "min_tokens": 2,
        "temperature": 1.0,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.3,
        "seed": 2**62,
        "stop": [],
        "stop_token_ids": [9, 2, 3],
        "include_stop_str_in_output": False,
        "ignore_eos": True,
        "logprobs": 0,
        "detokenize": False,
        "skip_special_tokens": False,
    }
    assert json.loads(json.dumps(found)) == found


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {"top_k": -1, "top_p": 1.0, "min_p": 0.0, "max_tokens": 16}),  # off is said, not left out
        ({"temperature": 0.0}, {"temperature": 0.0, "seed": 5}),
        ({"stop": ("a", "b")}, {"stop": ["a", "b"], "detokenize": True, "include_stop_str_in_output": True}),
        ({"keep_stop": False, "stop": ("a",)}, {"include_stop_str_in_output": False}),
        ({"ignore_eos": True}, {"stop_token_ids": [], "ignore_eos": True}),
        ({"ignore_eos": True, "stop_token_ids": (2,)}, {"stop_token_ids": [2]}),
    ],
)
def test_single_sampling_fields(fields, expected):
    found = sampling(**fields)
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("mode", "fields", "message"),
    [
        ("processed_logprobs", {"temperature": 0.005}, "temperature, 0.005, it would sample at 0.01"),
        ("processed_logprobs", {"temperature": 2.5}, "temperature, 2.5, its limit is 2"),
        ("raw_logprobs", {"temperature": 0.7}, "temperature, 0.7, temperatures 0 and 1"),
        ("processed_logprobs", {"temperature": 0.7, "top_p": 0.9}, "top_p, 0.9, renormalised"),
        ("processed_logprobs", {"temperature": 1.0, "top_k": 5}, "top_k, 5, renormalised"),
        ("processed_logprobs", {"temperature": 0.7, "min_p": 0.1}, "min_p, 0.1, renormalised"),
        ("processed_logprobs", {"repetition_penalty": 1.1}, "repetition_penalty, 1.1, renormalised"),
        (
            "processed_logprobs",
            {"temperature": 0.0, "presence_penalty": 0.5},
            "presence_penalty, 0.5, renormalised",
        ),
        ("processed_logprobs", {"frequency_penalty": 0.5}, "frequency_penalty, 0.5, renormalised"),
        ("processed_logprobs", {"min_tokens": 3}, "min_tokens, 3, renormalised"),
        ("raw_logprobs", {"min_tokens": 3, "stop": ("a",)}, "min_tokens, 3, stop strings"),
        ("raw_logprobs", {"min_tokens": 3, "ignore_eos": True}, "min_tokens, 3, ignore_eos"),
        ("raw_logprobs", {"presence_penalty": 2.5}, "presence_penalty, 2.5, its range is [-2"),
        ("raw_logprobs", {"frequency_penalty": -2.5}, "frequency_penalty, -2.5, its range is [-2"),
        ("raw_logprobs", {"logprob_kind": "raw"}, "logprob_kind, raw"),
    ],
)
def test_what_vllm_would_change_is_refused(mode, fields, message):
    with raises(EngineError, f"unsupported-sampling: sampling.{message}"):
        sampling(mode, **fields)


def test_truncation_without_an_effect_is_no_reason_to_refuse():
    found = sampling("processed_logprobs", temperature=0.0, top_p=0.9, top_k=5)
    assert (found["temperature"], found["top_k"]) == (0.0, 5)
    assert sampling(eos=(), ignore_eos=True, min_tokens=3)["min_tokens"] == 3
