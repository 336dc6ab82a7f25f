"""An engine has what its protocol declares, or is refused in one error."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
from raising import raises

from lockstep.config.declarations import engines
from lockstep.config.engine import EngineConfig
from lockstep.engine import ENGINES
from lockstep.engine.build import Dispatcher, DispatcherOfOwnWeights, is_external, make_engine
from lockstep.engine.hf.engine import HFEngine
from lockstep.engine.native import NativeEngine
from lockstep.engine.sglang.engine import SGLangServer
from lockstep.engine.spec import attributes, load_engine_class, methods, protocol_of
from lockstep.engine.vllm.engine import VLLMEngine
from lockstep.engine.vllm.server import VLLMServer
from lockstep.errors import ConfigError
from lockstep.protocols.engine import (
    InferenceEngine,
    ReceivesWeights,
    SamplesTokens,
    SharesWeights,
    receives_weights,
)

OURS = [HFEngine, NativeEngine, Dispatcher, DispatcherOfOwnWeights, VLLMEngine, VLLMServer, SGLangServer]


@pytest.mark.parametrize("engine", OURS)
def test_ours_declare_what_they_are(engine: type) -> None:
    assert "external" in dir(engine)
    assert not set(methods(protocol_of(engine.external))) - set(dir(engine))
    assert ("begin_update" in dir(engine)) is engine.external


@pytest.mark.parametrize("name", ENGINES)
def test_ours_are_found_by_name(name: str) -> None:
    assert load_engine_class(name).external is engines()[name].external


def test_a_protocol_stays_small() -> None:
    for protocol in (SamplesTokens, InferenceEngine, SharesWeights, ReceivesWeights):
        own = [name for name in vars(protocol) if name in methods(protocol)]
        assert len(own) <= 8, own
    assert attributes(SharesWeights) == ["external", "contract"]
    assert "dirty" in attributes(ReceivesWeights)


def module(monkeypatch: pytest.MonkeyPatch, value: Any) -> str:
    monkeypatch.setitem(sys.modules, "their_engine", types.SimpleNamespace(Theirs=value))
    return "their_engine:Theirs"


class Whole:
    """An embedded engine that does nothing, and remembers its end."""

    external, contract = False, None
    closed = 0

    def __init__(self, config: Any, *, model: Any) -> None: ...

    def nothing(self, *args: Any) -> None: ...

    submit = continue_ = finished = generate = nothing
    sleep = wake = abort = stats = update_weights = nothing

    def close(self) -> None:
        Whole.closed += 1


def test_an_object_of_any_class_will_do(monkeypatch: pytest.MonkeyPatch, tiny: Any) -> None:
    name = module(monkeypatch, Whole)
    engine = make_engine(EngineConfig(name=name), model=tiny)
    assert (
        isinstance(engine, Whole)
        and not is_external(EngineConfig(name=name))
        and not receives_weights(engine)
    )


def test_a_class_that_lacks_methods_is_one_error(monkeypatch: pytest.MonkeyPatch, tiny: Any) -> None:
    class Half:
        external = True

        def generate(self) -> None: ...

    name = module(monkeypatch, Half)
    with pytest.raises(ConfigError) as caught:
        is_external(EngineConfig(name=name))
    assert str(caught.value) == (
        "engine.name = 'their_engine:Theirs' lacks submit, continue_, finished, abort, sleep, wake, "
        "stats, close, begin_update, receive, finish_update, fail_update, read_back, memory, describe; see "
        "docs/how-to/extend.md"
    )
    with raises(ConfigError, "wrong-part"):
        del Half.external
        make_engine(EngineConfig(name=name), model=tiny)


def test_an_object_that_lacks_attributes_is_closed(monkeypatch: pytest.MonkeyPatch, tiny: Any) -> None:
    monkeypatch.setattr(Whole, "closed", 0)
    monkeypatch.delattr(Whole, "contract")
    with raises(ConfigError, "wrong-part", names=["contract"]):
        make_engine(EngineConfig(name=module(monkeypatch, Whole)), model=tiny)
    assert Whole.closed == 1


def test_a_function_that_makes_an_engine(monkeypatch: pytest.MonkeyPatch, tiny: Any) -> None:
    def theirs(config: Any, *, model: Any) -> Whole:
        return Whole(config, model=model)

    name = module(monkeypatch, theirs)
    with raises(ConfigError, "wrong-part", names=["external"]):
        is_external(EngineConfig(name=name))
    theirs.external = False  # type: ignore[attr-defined]
    assert isinstance(make_engine(EngineConfig(name=name), model=tiny), Whole)
