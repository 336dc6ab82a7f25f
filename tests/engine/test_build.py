import dataclasses
import sys
import threading
import types

import pytest
from raising import raises
from sampled import engine_spec

from lockstep.config.engine import EngineConfig
from lockstep.engine.build import Dispatcher, DispatcherOfOwnWeights, cuda_index, is_external, make_engine
from lockstep.engine.hf.engine import HFEngine
from lockstep.engine.vllm import VLLM
from lockstep.errors import ConfigError, EngineError

SPEC = engine_spec(max_model_len=640, device="cuda:1", shares_device=True)


class External:
    """Remembers how it was made."""

    external = True
    made: list["External"] = []  # noqa: RUF012
    fails_at: int | None = None
    barrier: threading.Barrier | None = None

    def __init__(self, config, *, spec):
        self.config, self.spec, self.closed = config, spec, False
        if External.barrier is not None:
            External.barrier.wait(5)  # breaks unless all start at the same time
        if External.fails_at is not None and spec.work_dir.name == f"replica-{External.fails_at}":
            raise EngineError("it does not start", code="wrong-state")
        External.made.append(self)

    def close(self):
        self.closed = True

    def unused(self, *args):
        raise AssertionError("nothing is asked of this engine")

    submit = continue_ = finished = unused
    generate = sleep = wake = abort = stats = memory = describe = unused
    begin_update = receive = finish_update = fail_update = read_back = unused
    transports, dirty, receivers, recover = ("disk",), True, 1, None


@pytest.fixture(autouse=True)
def module(monkeypatch):
    monkeypatch.setitem(sys.modules, "their_engine", types.SimpleNamespace(External=External))
    monkeypatch.setattr(External, "made", [])
    monkeypatch.setattr(External, "fails_at", None)
    monkeypatch.setattr(External, "barrier", None)


def config(**settings):
    return EngineConfig(name="their_engine:External", **settings)


def test_an_embedded_engine_gets_the_trainers_model(tiny):
    engine = make_engine(EngineConfig(name="hf"), model=tiny)
    assert isinstance(engine, HFEngine) and not is_external(EngineConfig(name="hf"))
    several = make_engine(EngineConfig(name="hf", replicas=3), model=tiny)
    assert isinstance(several, Dispatcher) and len(several.engines) == 3
    with raises(ConfigError, "missing-argument"):
        make_engine(EngineConfig(name="hf"), spec=SPEC)


def test_an_external_engine_gets_a_place():
    settings = config()
    engine = make_engine(settings, spec=SPEC)
    assert engine.config is settings and engine.spec == SPEC and is_external(settings)
    with raises(ConfigError, "missing-argument"):
        make_engine(settings)


def test_the_configs_longest_sequence_is_the_places():
    assert make_engine(config(max_model_len=99), spec=SPEC).spec.max_model_len == 99


def test_each_replica_has_its_gpus_and_its_folder():
    engine = make_engine(config(replicas=3, tp=2, cuda_devices=(0, 1, 2, 3, 4, 5)), spec=SPEC)
    assert isinstance(engine, DispatcherOfOwnWeights)
    assert [e.config.cuda_devices for e in engine.engines] == [(0, 1), (2, 3), (4, 5)]
    assert [e.config.replicas for e in engine.engines] == [1, 1, 1]
    folders = [str(e.spec.work_dir) for e in engine.engines]
    assert folders == [f"/run/engine/replica-{i}" for i in range(3)]
    # the trainer is on GPU 1
    assert [e.spec.shares_device for e in engine.engines] == [True, False, False]


def test_one_engine_with_a_gpu_of_its_own_does_not_share_the_trainers():
    assert make_engine(config(cuda_devices=(0,)), spec=SPEC).spec.shares_device is False
    assert make_engine(config(cuda_devices=(1,)), spec=SPEC).spec.shares_device is True
    assert make_engine(config(), spec=SPEC).spec.work_dir == SPEC.work_dir


@pytest.mark.parametrize(
    ("settings", "device", "message"),
    [
        ({"replicas": 2}, "cuda:0", "contradiction: engine.cuda_devices"),
        ({"tp": 4}, "cuda:0", "contradiction: engine.cuda_devices"),
        ({"cuda_devices": (0,)}, "cpu", "unsupported-combination: engine.cuda_devices"),
        ({"tp": 2}, "cpu", "unsupported-combination: engine.tp"),
    ],
)
def test_engines_without_a_place_to_run_are_refused(settings, device, message):
    with raises(ConfigError, message):
        make_engine(config(**settings), spec=dataclasses.replace(SPEC, device=device))
    assert External.made == []


def test_replicas_start_at_the_same_time_and_on_a_cpu_need_no_devices(monkeypatch):
    monkeypatch.setattr(External, "barrier", threading.Barrier(2))
    make_engine(config(replicas=2), spec=dataclasses.replace(SPEC, device="cpu", shares_device=False))
    assert len(External.made) == 2


def test_when_one_does_not_start_the_others_are_closed(monkeypatch):
    monkeypatch.setattr(External, "fails_at", 2)
    with raises(EngineError, "wrong-state"):
        make_engine(config(replicas=4), spec=dataclasses.replace(SPEC, device="cpu"))
    assert len(External.made) == 3 and all(engine.closed for engine in External.made)


def test_an_unknown_engine_is_refused(tiny):
    with raises(ConfigError, "unknown-name"):
        make_engine(EngineConfig(name="trt"), model=tiny)


@pytest.mark.parametrize(
    ("settings", "module", "name"),
    [
        ({}, "lockstep.engine.vllm.engine", "VLLMEngine"),
        ({"python": "/p"}, "lockstep.engine.vllm.server", "VLLMServer"),
        ({"url": "http://127.0.0.1:1"}, "lockstep.engine.vllm.server", "VLLMServer"),
    ],
)
def test_vllm_is_in_process_or_a_server(settings, module, name, monkeypatch):
    fake = types.SimpleNamespace(**{name: lambda config, *, spec: (module, config.name, spec)})
    monkeypatch.setitem(sys.modules, module, fake)
    assert VLLM.external and VLLM(EngineConfig(name="vllm", **settings), spec=SPEC) == (
        module,
        "vllm",
        SPEC,
    )


@pytest.mark.parametrize(("device", "index"), [("cuda:3", 3), ("cuda", 0)])
def test_the_index_of_a_device(device, index):
    assert cuda_index(device) == index
