"""benchmarks/soak.py: what it reads, what it calls flat, and a short run of it."""

import dataclasses
import importlib.util
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import sampled
from sampled import FakeEngine

from lockstep.protocols.engine import EngineStats, Finished, Handle
from lockstep.schema.rollout import GenerationRequest, SamplingParams

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("soak", ROOT / "benchmarks" / "soak.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["soak"] = module
    spec.loader.exec_module(module)
    return module


def readings(script: ModuleType, count: int = 50, **change: Any) -> list[Any]:
    """400 MiB, 7 descriptors, 3 threads, 0.3 CPU seconds per step; `change` are functions of the step."""
    flat = {
        "resident_mib": lambda _: 400.0,
        "descriptors": lambda _: 7,
        "threads": lambda _: 3,
        "wall": lambda step: float(step),
        "cpu": lambda step: 0.3 * step,
    }
    return [
        script.Reading(step=step, **{name: value(step) for name, value in (flat | change).items()})
        for step in range(count)
    ]


def test_what_does_not_change_is_flat(script: ModuleType) -> None:
    found = script.judge(readings(script))
    assert found["flat"] and found["steps"] == 50
    assert found["figures"]["cpu_seconds"]["first_quarter"] == pytest.approx(0.3)
    assert found["figures"]["resident_mib"]["per_1000_steps"] == pytest.approx(0.0)


def test_a_wandering_or_warming_figure_is_flat(script: ModuleType) -> None:
    found = script.judge(readings(script, resident_mib=lambda step: 400.0 + 5 * (step % 2)))
    assert found["flat"]
    found = script.judge(readings(script, resident_mib=lambda step: 100.0 if step < 10 else 400.0))
    assert found["flat"]
    assert found["figures"]["resident_mib"]["per_1000_steps"] == pytest.approx(0.0)


@pytest.mark.parametrize(
    ("name", "value", "slope"),
    [
        ("resident_mib", lambda step: 400 + 0.09 * step, 90.0),  # 90 KiB a step over 500
        ("descriptors", lambda step: 7 + step // 100, None),
        ("threads", lambda step: 3 + step // 250, None),
        ("cpu", lambda step: 0.3 * step + 0.0002 * step * step, None),
    ],
)
def test_a_leak_is_not_flat(script: ModuleType, name: str, value: Any, slope: float | None) -> None:
    found = script.judge(readings(script, 500, **{name: value}))
    figure = found["figures"]["cpu_seconds" if name == "cpu" else name]
    assert not figure["flat"] and not found["flat"]
    if slope is not None:
        assert figure["per_1000_steps"] == pytest.approx(slope)


def test_too_few_steps_are_no_verdict(script: ModuleType) -> None:
    with pytest.raises(SystemExit, match="17 steps are too few"):
        script.judge(readings(script, 17))


def test_a_reading_sees_files_threads_and_children(script: ModuleType, tmp_path: Path) -> None:
    before = script.read(0)
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    with (tmp_path / "file").open("w"):
        thread.start()
        opened = script.read(1)
        end.set()
    thread.join()
    assert opened.descriptors == before.descriptors + 1
    assert opened.threads == before.threads + 1
    with subprocess.Popen(["sleep", "60"]) as child:
        grown = script.read(2)
        child.kill()
    assert grown.threads == before.threads + 1
    assert grown.descriptors >= before.descriptors + 3
    after = script.read(3)
    assert (after.descriptors, after.threads) == (before.descriptors, before.threads)


class Counting(FakeEngine):
    """An engine whose samples are as long as their seed says, or maximal."""

    def stats(self) -> EngineStats:
        numbers = {field.name: 0 for field in dataclasses.fields(EngineStats) if "use" not in field.name}
        return EngineStats(**(numbers | {"policy_version": 5}))

    def submit_all(self, requests: Sequence[GenerationRequest]) -> list[Handle]:
        return [self.submit(request) for request in requests]

    def next(self, handle: Handle, sample: int, prompt: tuple[int, ...]) -> Finished:
        sampling, seed = handle.request.sampling, handle.request.seeds[sample]
        endless = sampling.ignore_eos and not sampling.stop_token_ids
        tokens = [1] * (sampling.max_tokens if endless else seed)
        made = sampled.completion(prompt, tokens, 0.0, finish_reason="length", seed=seed, policy_version=5)
        return Finished(handle=handle, sample=sample, completion=made)


def test_one_sample_is_maximal_and_all_keep_their_places(script: ModuleType) -> None:
    class Engine(script.Ragged, Counting):  # type: ignore[name-defined, misc]
        pass

    sampling = SamplingParams(max_tokens=9, stop_token_ids=(3,))
    requests = [
        GenerationRequest(prompt_token_ids=(index,), sampling=sampling, seeds=seeds)
        for index, seeds in enumerate([(1, 2, 3), (4, 5, 6)])
    ]
    engine = Engine()
    handles = engine.submit_all(requests)
    came = {(handles.index(done.handle), done.sample): done.completion for done in engine.finished()}
    assert {place: completion.seed for place, completion in came.items()} == {
        (i, k): seed for i, request in enumerate(requests) for k, seed in enumerate(request.seeds)
    }
    assert [len(came[0, k].token_ids) for k in range(3)] == [1, 2, 9]
    assert [len(came[1, k].token_ids) for k in range(3)] == [4, 5, 6]
    assert script.READINGS[-1].step == 5 and sorted(script.LENGTHS[5]) == [1, 2, 4, 5, 6, 9]


@pytest.mark.exhaustive
def test_forty_steps_are_flat(script: ModuleType, tmp_path: Path) -> None:
    found = script.soak(
        tmp_path / "run", engine="hf", steps=40, model="shape:tiny-llama", settings={"max_batch": 16}
    )
    assert found["steps"] == 40
    for name in ("resident_mib", "descriptors", "threads"):
        assert found["figures"][name]["flat"], (name, found["figures"][name])
    lengths = found["lengths"]
    assert lengths["longest"] == 192 and lengths["steps_with_a_maximal_sample"] == 40
    assert lengths["shortest"] < 10 < lengths["median"] < 60
