import pytest
from raising import raises

from lockstep.config.engine import HAS_EFFECT, EngineConfig, has_own_weights, kind, resolved
from lockstep.config.run import GRPORun

PYTHON, URL = "/envs/vllm/bin/python", "http://127.0.0.1:8000"
WHERE = {
    "native": {"name": "native"},
    "hf": {"name": "hf"},
    "native, started": {"name": "native", "process": "separate"},
    "hf, started": {"name": "hf", "process": "separate"},
    "auto": {},
    "vllm, in process": {"name": "vllm"},
    "vllm, started": {"name": "vllm", "python": PYTHON},
    "vllm, at a url": {"name": "vllm", "url": URL},
    "sglang, started": {"name": "sglang", "unseeded": True},
    "sglang, at a url": {"name": "sglang", "unseeded": True, "url": URL},
}
OTHER = {
    "process": "separate",
    "replicas": 2,
    "cuda_devices": (0,),
    "tp": 2,
    "max_model_len": 128,
    "kv_cache_tokens": 4096,
    "prefill_chunk": 512,
    "memory_fraction": 0.3,
    "prefix_caching": False,
    "eager": True,
    "batch_invariant": True,
    "unseeded": True,
    "offload": True,
    "bucket_mb": 64,
    "start_seconds": 5.0,
    "request_seconds": 5.0,
    "update_seconds": 5.0,
    "max_restarts": 0,
    "options": {"block_size": 32},
    "env": {"NCCL_DEBUG": "INFO"},
    "secrets": {"MY_KEY": "env:MY_KEY"},
    "python": PYTHON,
    "url": URL,
    "token_env": "MY_KEY",
}


def test_every_setting_is_one_that_always_counts_or_is_in_the_table():
    always = {"name", "max_batch", "transfer", "verify"}
    assert set(HAS_EFFECT) | always == set(EngineConfig.model_fields)
    assert set(OTHER) == set(HAS_EFFECT)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("name", [name for name in OTHER if name not in ("python", "url", "process")])
def test_a_setting_without_an_effect_is_refused(where, name):
    settings = WHERE[where] | {name: OTHER[name]}
    if name == "batch_invariant":
        settings.pop("unseeded", None)
    places = {"native", "hf"} if where == "auto" else {where}
    if places & set(HAS_EFFECT[name][0]):
        config = EngineConfig(**settings)
        assert kind(config) == where and getattr(config, name) == OTHER[name]
        return
    with raises(ValueError, f"no-effect: engine.{name}"):
        EngineConfig(**settings)


@pytest.mark.parametrize("name", ["python", "url"])
@pytest.mark.parametrize("engine", ["auto", "hf", "native"])
def test_the_trainers_own_modules_are_no_server(name, engine):
    with raises(ValueError, f"no-effect: engine.{name}"):
        EngineConfig(**{"name": engine, name: OTHER[name]})


def test_a_process_of_its_own_is_for_the_trainers_own_modules():
    for where in ("native", "hf"):
        assert kind(EngineConfig(**WHERE[where], process="separate")) == f"{where}, started"
    config = EngineConfig(process="separate", max_restarts=5)
    assert has_own_weights(config) and not has_own_weights(EngineConfig())
    assert kind(resolved(config, native=True)) == "native, started"
    with raises(ValueError, "no-effect: engine.prefill_chunk"):
        resolved(EngineConfig(process="separate", prefill_chunk=5), native=False)
    for where in ("vllm, in process", "vllm, started", "vllm, at a url", "sglang, started"):
        with raises(ValueError, "no-effect: engine.process"):
            EngineConfig(**WHERE[where], process="separate")
    with raises(ValueError, "unsupported-combination: engine.transfer"):
        EngineConfig(name="native", process="separate", transfer="memory")
    assert not has_own_weights(EngineConfig(name="their.module:Engine", process="separate"))


def test_auto_is_checked_as_what_it_comes_to():
    config = EngineConfig(kv_cache_tokens=4096)
    assert resolved(config, native=True) == EngineConfig(name="native", kv_cache_tokens=4096)
    with raises(ValueError, "no-effect: engine.kv_cache_tokens"):
        resolved(config, native=False)
    named = EngineConfig(name="vllm")
    assert resolved(named, native=True) is named


def test_a_default_that_is_written_down_is_no_error():
    defaults = {
        name: f.get_default(call_default_factory=True) for name, f in EngineConfig.model_fields.items()
    }
    assert EngineConfig(**defaults) == EngineConfig()


def test_an_engine_of_somebody_else_may_read_every_setting():
    settings = {name: value for name, value in OTHER.items() if name != "url"}
    assert EngineConfig(name="their.module:Engine", **settings).tp == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "vllm", "python": PYTHON, "url": URL}, "contradiction: engine.url"),
        ({"name": "sglang"}, "unsupported-combination: engine.batch_invariant"),
        ({"name": "sglang", "unseeded": True, "batch_invariant": True}, "no-effect: engine.unseeded"),
        ({"name": "vllm", "python": PYTHON, "cuda_devices": (0, 1)}, "contradiction: engine.cuda_devices"),
        (
            {"name": "vllm", "python": PYTHON, "replicas": 2, "tp": 2, "cuda_devices": (0, 1)},
            "contradiction: engine.cuda_devices",
        ),
        (
            {"name": "vllm", "python": PYTHON, "tp": 2, "cuda_devices": (1, 1)},
            "duplicate: engine.cuda_devices",
        ),
        (
            {"name": "vllm", "python": PYTHON, "replicas": 2, "cuda_devices": (1, 1)},
            "missing-setting: engine.memory_fraction",
        ),
        ({"name": "vllm", "url": "localhost:8000"}, "wrong-format: engine.url"),
        ({"name": "hf", "transfer": "disk"}, "no-effect: engine.transfer"),
        (
            {"name": "vllm", "python": PYTHON, "transfer": "memory"},
            "unsupported-combination: engine.transfer",
        ),
        ({"name": "vllm", "url": URL, "transfer": "ipc"}, "unsupported-combination: engine.transfer"),
        ({"name": "vllm", "memory_fraction": 1.0}, "out-of-range: memory_fraction"),
        ({"name": "vllm", "gpu_memory_utilization": 0.5}, "unknown-setting: gpu_memory_utilization"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, message):
    with raises(ValueError, message):
        EngineConfig(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"name": "vllm", "python": PYTHON, "replicas": 2, "tp": 2, "cuda_devices": (0, 1, 2, 3)},
        {"name": "vllm", "python": PYTHON, "replicas": 2, "cuda_devices": (1, 1), "memory_fraction": 0.3},
        {"name": "sglang", "python": PYTHON, "batch_invariant": True},
        {"name": "sglang", "url": URL, "batch_invariant": True},
        {"name": "vllm", "transfer": "memory"},
        {"name": "hf", "transfer": "memory", "replicas": 4, "offload": True},
    ],
)
def test_what_goes_together_is_accepted(settings):
    EngineConfig(**settings)


def test_a_run_takes_engines_that_exist():
    assert GRPORun().engine.name == "auto"
    assert GRPORun(engine={"name": "native"}).engine.name == "native"
    assert GRPORun(engine={"name": "vllm"}).engine.name == "vllm"
    assert GRPORun(engine={"name": "sglang", "batch_invariant": True}).engine.name == "sglang"
