"""What verification catches, and that it lets the right weights through."""

from __future__ import annotations

import itertools
from typing import Any

import external
import pytest
import torch
from raising import raises
from test_push import engine_of, policy, transfer_to

from lockstep.config.engine import EngineConfig
from lockstep.config.train import TrainConfig
from lockstep.errors import EngineError
from lockstep.models.load import LoadedModel
from lockstep.packing import Planner
from lockstep.train.local import LocalBackend
from lockstep.transfer.buckets import Verifier, compare_heads, probe_prompts


def verifier_of(model: LoadedModel, engine: Any, *, when: Any, **settings: Any) -> tuple[Any, Verifier]:
    train = TrainConfig(device="cpu", token_budget=256)
    backend = LocalBackend(train, model=model, total_steps=0, temperature=0.7)
    transfer = transfer_to(engine, verify=when)
    plan = Planner(token_budget=256, static_capacity=False, max_seqlen=64, max_documents=64)
    verifier = Verifier(
        when=when,
        backend=backend,
        engine=engine,
        transfer=transfer,
        plan=plan,
        vocab_size=256,
        max_prompt_tokens=40,
        max_tokens=20,
        temperature=0.7,
        dtype="float32",
        **settings,
    )

    def push(version: int) -> dict[str, float]:
        transfer.push(backend, engine, policy_version=version)
        return verifier()

    return push, verifier


def trained(model: LoadedModel) -> None:
    """Other weights in the same module."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def made(kind: str, model: LoadedModel, tmp_path: Any) -> Any:
    return getattr(external, kind)(EngineConfig(), spec=engine_of(model, tmp_path).spec)


def test_the_right_weights_pass_every_time(tmp_path: Any) -> None:
    model = policy()
    engine = engine_of(model, tmp_path)
    push, _ = verifier_of(model, engine, when="always")
    for version in (1, 2, 3):
        found = push(version)
        assert found.keys() == {"engine/verify_gap"} and found["engine/verify_gap"] < 1e-5
        trained(model)


@pytest.mark.parametrize(("when", "probed"), [("off", 0), ("first", 1), ("always", 3)])
def test_when(when: str, probed: int, tmp_path: Any) -> None:
    model = policy()
    engine = engine_of(model, tmp_path)
    push, _ = verifier_of(model, engine, when=when)
    read: list[int] = []
    inner = engine.read_back
    engine.read_back = lambda names: read.append(len(names)) or inner(names)
    found = [push(version) for version in (1, 2, 3)]
    assert [bool(each) for each in found] == [i < probed for i in range(3)]
    assert len(read) == probed and set(read) <= {len(model.module.state_dict())}
    assert engine.stats().requests == 2 * probed


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("OneWrong", "values-differ"),
        ("OneWrongUnreadable", "values-differ"),
        ("NoHead", "values-differ"),
        ("NoHeadUnreadable", "values-differ"),
    ],
)
def test_wrong_weights_stop_the_first_time(kind: str, says: str, tmp_path: Any) -> None:
    model = policy()
    engine = made(kind, model, tmp_path)
    push, _ = verifier_of(model, engine, when="first")
    with raises(EngineError, says):
        push(1)
    assert engine.dirty


@pytest.mark.parametrize(
    ("kind", "says"),
    [("Stale", "values-differ"), ("SaysCached", "values-differ: prefix cache")],
)
def test_a_stale_cache_shows_at_the_second_push(kind: str, says: str, tmp_path: Any) -> None:
    model = policy()
    engine = made(kind, model, tmp_path)
    push, _ = verifier_of(model, engine, when="always")
    push(1)
    trained(model)
    with raises(EngineError, says):
        push(2)
    assert engine.dirty


def test_probes_are_the_same_every_time_share_no_prefix_and_fit() -> None:
    first = probe_prompts(1000, 400)
    assert first == probe_prompts(1000, 400) and [len(p) for p in first] == [300, 300]
    assert [len(p) for p in probe_prompts(10, 7)] == [7, 7]
    for a, b in itertools.combinations(first, 2):
        assert a[0] != b[0]
    assert all(0 <= i < 10 for prompt in probe_prompts(10, 50) for i in prompt)


def heads(**values: list[float]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(each) for name, each in values.items()}


def test_heads_are_compared_to_the_bit() -> None:
    sent = heads(a=[1.0, 2.0], b=[0.0])
    assert compare_heads(sent, heads(a=[1.0, 2.0], b=[0.0])) is None
    assert compare_heads(sent, heads(a=[1.0, 2.0])) is None, "one that cannot be read back is left out"
    assert compare_heads(sent, heads(b=[-0.0])) == "1 of 1 weights differ: b (values differ by up to 0)"
    assert "a (values differ by up to 0.5)" in str(compare_heads(sent, heads(a=[1.0, 2.5])))
    assert "a (1 values were read back instead of 2)" in str(compare_heads(sent, heads(a=[1.0])))
    assert "it names ['c']" in str(compare_heads(sent, heads(c=[1.0])))
    nan = heads(a=[float("nan")])
    assert compare_heads(nan, heads(a=[float("nan")])) is None


def test_values_read_back_as_float32_are_those_of_a_16_bit_weight() -> None:
    sent = {"a": torch.tensor([1.0, 1 / 3]).bfloat16()}
    assert compare_heads(sent, {"a": sent["a"].float()}) is None
    assert compare_heads(sent, {"a": torch.tensor([1.0, 1 / 3])}) is not None
    assert compare_heads(sent, {"a": sent["a"].half()}) is not None
