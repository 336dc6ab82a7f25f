import dataclasses
import json

import pytest
from raising import raises
from sampled import engine_spec

from lockstep.config.engine import EngineConfig
from lockstep.engine.sglang.translate import (
    sglang_constructor,
    sglang_environment,
    sglang_sampling,
    sglang_server_command,
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
    temperatures=frozenset({0.7}),
    seed=17,
)
NONE = SamplingParams(max_tokens=16)
KNOWN = """--model-path --dtype --random-seed --context-length --max-running-requests --tp-size
--disable-radix-cache --enable-memory-saver --enable-deterministic-inference --sampling-defaults
--load-format --trust-remote-code --skip-server-warmup --incremental-streaming-output
--mem-fraction-static --skip-tokenizer-init --host --port --attention-backend
--disable-decode-cuda-graph --disable-prefill-cuda-graph"""
FLAGS = frozenset(KNOWN.split())


def config(**settings):
    return EngineConfig(name="sglang", **({"batch_invariant": True} | settings))


def sampling(seeded=True, **fields):
    return sglang_sampling(dataclasses.replace(NONE, **fields), seed=5, eos_token_ids=(2, 3), seeded=seeded)


def test_nothing_is_left_to_the_constructors_defaults():
    assert sglang_constructor(config(), SPEC) == {
        "model_path": "/models/m",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "random_seed": 17,  # SGLang's own default is a random one
        "context_length": 648,
        "max_running_requests": 256,
        "tp_size": 1,
        "disable_radix_cache": False,
        "disable_cuda_graph": False,
        "enable_memory_saver": False,
        "enable_deterministic_inference": True,
        "sampling_defaults": "openai",
        "load_format": "dummy",
        "trust_remote_code": False,
        "skip_server_warmup": True,
        "incremental_streaming_output": True,
        "mem_fraction_static": 0.45,
    }


@pytest.mark.parametrize("eager", [True, False])
def test_cuda_graphs_are_off_when_eager_and_only_then(eager):
    """A mapping that was published has `disable_cuda_graph = not enforce_eager`."""
    assert sglang_constructor(config(eager=eager), SPEC)["disable_cuda_graph"] is eager
    command = sglang_server_command(config(eager=eager), SPEC, port=1, flags=FLAGS)
    assert ("--disable-decode-cuda-graph" in command) is eager
    assert ("--disable-prefill-cuda-graph" in command) is eager


@pytest.mark.parametrize("caching", [True, False])
def test_the_prefix_cache_is_off_when_it_is_turned_off_and_only_then(caching):
    """The same published mapping ties the prefix cache to the padding of CUDA graphs."""
    found = sglang_constructor(config(prefix_caching=caching), SPEC)
    assert found["disable_radix_cache"] is (not caching) and "disable_cuda_graph_padding" not in found
    command = sglang_server_command(config(prefix_caching=caching), SPEC, port=1, flags=FLAGS)
    assert ("--disable-radix-cache" in command) is (not caching)


@pytest.mark.parametrize(
    ("settings", "spec", "expected"),
    [
        ({"max_batch": 8}, {}, {"max_running_requests": 8}),
        ({"tp": 2}, {}, {"tp_size": 2}),
        ({}, {"max_model_len": 99}, {"context_length": 107}),
        ({"memory_fraction": 0.7}, {}, {"mem_fraction_static": 0.7}),
        ({"offload": True}, {}, {"enable_memory_saver": True}),
        (
            {"batch_invariant": False, "unseeded": True},
            {},
            {"enable_deterministic_inference": False},
        ),
        ({}, {"weights": "folder"}, {"load_format": "auto"}),
        ({}, {"dtype": "float32"}, {"dtype": "float32"}),
        ({}, {"seed": 3}, {"random_seed": 3}),
        ({"options": {"attention_backend": "triton"}}, {}, {"attention_backend": "triton"}),
    ],
)
def test_each_field_of_the_constructor(settings, spec, expected):
    found = sglang_constructor(config(**settings), dataclasses.replace(SPEC, **spec))
    assert {name: found[name] for name in expected} == expected


def test_the_memory_of_a_gpu_of_its_own_is_the_engines_to_decide():
    own = dataclasses.replace(SPEC, shares_device=False)
    assert "mem_fraction_static" not in sglang_constructor(config(), own)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp": 2}, "contradiction: engine.options.tp"),
        ({"tensor-parallel-size": 2}, "contradiction: engine.options.tensor-parallel-size"),
        ({"model": "x"}, "contradiction: engine.options.model"),
        ({"mem_fraction": 0.9}, "contradiction: engine.options.mem_fraction"),
        ({"random_seed": 1}, "contradiction: engine.options.random_seed"),
        ({"allow_auto_truncate": True}, "unsupported-combination: engine.options.allow_auto_truncate"),
        (
            {"preferred_sampling_params": "{}"},
            "unsupported-combination: engine.options.preferred_sampling_params",
        ),
        ({"dp_size": 2}, "unsupported-combination: engine.options.dp_size"),
        ({"disable_cuda_graph": True}, "unsupported-combination: engine.options.disable_cuda_graph"),
        (
            {"disable-decode-cuda-graph": True},
            "unsupported-combination: engine.options.disable-decode-cuda-graph",
        ),
        ({"quantization": "fp8"}, "unsupported-combination: engine.options.quantization"),
        ({"rl_on_policy_target": "fsdp"}, "unsupported-combination: engine.options.rl_on_policy_target"),
    ],
)
def test_options_may_not_change_what_requests_mean(options, message):
    with raises(ConfigError, message):
        sglang_constructor(config(options=options), SPEC)


def test_what_needs_a_gpu_is_refused_on_a_cpu():
    cpu = dataclasses.replace(SPEC, device="cpu", shares_device=False)
    with raises(ConfigError, "missing-device: engine.batch_invariant"):
        sglang_constructor(config(), cpu)
    with raises(ConfigError, "missing-device: engine.offload"):
        sglang_constructor(config(batch_invariant=False, unseeded=True, offload=True), cpu)


def test_the_servers_command():
    command = sglang_server_command(
        config(options={"attention_backend": "triton"}), SPEC, port=8124, flags=FLAGS
    )
    assert " ".join(command) == (
        "-m sglang.launch_server --model-path /models/m --skip-tokenizer-init --dtype bfloat16 "
        "--random-seed 17 --context-length 648 --max-running-requests 256 --tp-size 1 "
        "--enable-deterministic-inference --sampling-defaults openai --load-format dummy "
        "--skip-server-warmup --incremental-streaming-output --mem-fraction-static 0.45 --host 127.0.0.1 "
        "--port 8124 --attention-backend triton"
    )


def test_the_command_keeps_to_the_flags_that_this_version_knows():
    old = FLAGS - {"--disable-decode-cuda-graph", "--disable-prefill-cuda-graph"} | {"--disable-cuda-graph"}
    command = sglang_server_command(config(eager=True), SPEC, port=1, flags=old)
    assert "--disable-cuda-graph" in command and "--disable-decode-cuda-graph" not in command
    with raises(ConfigError, "unknown-setting: engine.options"):
        sglang_server_command(config(options={"enable_magic": True}), SPEC, port=1, flags=FLAGS)
    with raises(ConfigError, "no-effect: engine.options.enable_metrics"):
        sglang_server_command(config(options={"enable_metrics": False}), SPEC, port=1, flags=FLAGS)
    with raises(ConfigError, "contradiction: engine.options.host"):
        sglang_server_command(config(options={"host": "0.0.0.0"}), SPEC, port=1, flags=FLAGS)


def test_the_environment_keeps_logprobs_after_temperature():
    assert sglang_environment(config(), SPEC) == {
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        "HF_HUB_OFFLINE": "1",
    }


def test_every_sampling_field_is_sent():
    params = SamplingParams(
        max_tokens=16, temperature=0.7, top_p=0.9, top_k=7, stop_token_ids=(9, 2), stop=("x",)
    )
    found = sglang_sampling(params, seed=2**62, eos_token_ids=(2, 3), seeded=True)
    assert found == {
        "n": 1,
        "max_new_tokens": 16,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "min_new_tokens": 0,
        "stop_token_ids": [9, 2, 3],
        "ignore_eos": False,
        "sampling_seed": 2**62,
    }
    assert json.loads(json.dumps(found)) == found


@pytest.mark.parametrize(
    ("seeded", "fields", "expected"),
    [
        (True, {}, {"top_k": -1, "top_p": 1.0, "max_new_tokens": 16}),  # 0 would be refused by SGLang
        (True, {"temperature": 0.0}, {"temperature": 0.0}),
        (True, {"ignore_eos": True}, {"ignore_eos": True, "stop_token_ids": []}),
        (False, {"min_p": 0.1}, {"min_p": 0.1}),
        (True, {"min_p": 0.1, "temperature": 0.0}, {"temperature": 0.0}),
    ],
)
def test_single_sampling_fields(seeded, fields, expected):
    found = sampling(seeded, **fields)
    assert {name: found[name] for name in expected} == expected


def test_a_seed_is_sent_only_where_it_is_read():
    assert sampling(True)["sampling_seed"] == 5
    assert "sampling_seed" not in sampling(False)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": 1e-7}, "temperature, 1e-07"),
        ({"repetition_penalty": 1.1}, "repetition_penalty, 1.1"),
        ({"presence_penalty": 0.5}, "presence_penalty, 0.5"),
        ({"frequency_penalty": 0.5}, "frequency_penalty, 0.5"),
        ({"presence_penalty": -2.5}, "presence_penalty, -2.5, range"),
        ({"min_tokens": 2}, "min_tokens, 2"),
        ({"min_p": 0.1}, "min_p, 0.1"),
        ({"ignore_eos": True, "stop_token_ids": (4,)}, "ignore_eos, True"),
        ({"logprob_kind": "raw"}, "logprob_kind, raw"),
    ],
)
def test_what_sglang_would_change_is_refused(fields, message):
    with raises(EngineError, f"unsupported-sampling: sampling.{message}"):
        sampling(**fields)
