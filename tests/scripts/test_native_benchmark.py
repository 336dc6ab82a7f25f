"""benchmarks/native.py: what counts as equal, and the run that it trains."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from sampled import completion

from lockstep.config.load import load_run

FOLDER = Path(__file__).parents[2] / "benchmarks"


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def test_one_bit_is_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    side = load("native_side", monkeypatch)
    values = torch.tensor([-1.0, -2.0, -3.0])
    other = values.clone()
    other[1] = torch.nextafter(other[1], torch.tensor(0.0))
    found = side.compare([values], [other])
    assert (found["values"], found["differ"], found["equal"]) == (3, 1, False)
    assert found["max"] == pytest.approx(2.0**-23, rel=1e-6)  # one step of float32 just below 2
    assert side.compare([values[:1], values[1:]], [values])["equal"]


def test_samples_are_compared_up_to_the_first_other_token(monkeypatch: pytest.MonkeyPatch) -> None:
    side = load("native_side", monkeypatch)
    first = [completion((1,), (5, 6, 7), (-1.0, -2.0, -3.0), seed=1), completion((1,), (5,), seed=2)]
    same = side.against(first, first[::-1])
    assert same["equal"] and same["values"] == 4 and same["tokens_from_the_first_other_one"] == 0
    twins = [completion((1,), (5, 9, 7), (-1.0, -8.0, -3.5), seed=1), completion((1,), (5,), seed=2)]
    found = side.against(first, twins)
    assert (found["values"], found["differ"], found["tokens_from_the_first_other_one"]) == (2, 0, 2)
    assert not found["equal"], "other tokens are a difference though no compared logprob is"


def test_the_runs_are_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    side, native = load("native_side", monkeypatch), load("native", monkeypatch)
    job = {"model": "shape:tiny-llama", "invariant": True, "prompt_tokens": 8, "tokens": 24, "num_layers": 1}
    run = side.run_of(job | {"engine": {"max_batch": 3}, "train": {"lr": 0.5}})
    assert (run.train.batch_invariant, run.engine.max_batch, run.train.lr) == (True, 3, 0.5)
    assert (run.model.num_layers, run.engine.name, run.train.attention) == (1, "native", "varlen")
    args = native.parser().parse_args(
        ["grpo", "--out", str(tmp_path / "x.json"), "--model", "shape:tiny-llama"]
    )
    args = SimpleNamespace(**vars(args) | {"engine": {"prefill_chunk": 64}})
    grpo = load_run(native.recipe(args, tmp_path / "run.toml"))
    assert (grpo.steps, grpo.rollout.sampling.temperature, grpo.engine.prefill_chunk) == (20, 0.7, 64)
    assert grpo.rollout.prompts_per_step * grpo.rollout.group_size == 64


def test_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = load("native_tables", monkeypatch)
    row = {"values": 2000, "differ": 0, "max": 0.0, "tokens_from_the_first_other_one": 3}
    lines = list(tables.equal({"shape:x": {"against": {"engine, alone": row}}, "seconds": 3.0}))
    assert lines[-1] == "| shape:x | engine, alone | 2,000 | 0, and 3 tokens | 0 |"
    one = {"ms": {"median": 3.0, "min": 2.5, "max": 4.0}, "of_ordinary": {"median": 1.5, "min": 1, "max": 2}}
    found = {"512": {"ready": {}, "invariant": one | {"mfu": 0.25, "peak_gib": None}}, "command": "x"}
    assert list(tables.train(found))[-1] == (
        "| invariant | 512 | 3.0 [2.5, 4.0] | 1.500 [1.000, 2.000] | 0.250 | - |"
    )
