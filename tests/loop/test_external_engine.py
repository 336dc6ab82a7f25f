"""GRPO with an engine that has weights of its own (a test's: tests/transfer/external.py)."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from loop_runs import TINY, metrics_of
from raising import raises
from resolving import moved, resolved_on
from safetensors.torch import load_file
from selected import exhaustive
from starting import lockstep, succeeds

EXTERNAL = Path(__file__).parents[1] / "transfer"
sys.path.insert(0, str(EXTERNAL))

import external  # noqa: E402

from lockstep import loops  # noqa: E402
from lockstep.config.load import load_run  # noqa: E402
from lockstep.config.run import GRPORun  # noqa: E402
from lockstep.errors import ConfigError, EngineError  # noqa: E402
from lockstep.loop.engines import external_engine_spec, max_model_len  # noqa: E402
from lockstep.models.load import load_model  # noqa: E402


def run_of(tmp_path: Path, name: str, **overrides: Any) -> GRPORun:
    toml = tmp_path / "tiny.toml"
    toml.write_text(TINY)
    # an external engine's run is packed; beside `hf` the layout would be another one, with other bits
    values = {"run_dir": str(tmp_path / name), "log.display": "plain", "train.layout": "packed", **overrides}
    run = load_run(str(toml), overrides={key.replace("__", "."): value for key, value in values.items()})
    assert isinstance(run, GRPORun)
    return run


def rollouts(run: Path) -> dict[str, Any]:
    """Without what tells one engine from another."""
    return {file.name: file.read_text() for file in sorted((run / "rollouts").iterdir())}


def assert_same(run: Path, reference: Path) -> None:
    assert rollouts(run) == rollouts(reference)
    assert metrics_of(run) == metrics_of(reference)
    ours, theirs = (load_file(r / "export/model.safetensors") for r in (run, reference))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs) and ours.keys() == theirs.keys()


@pytest.mark.slow
@pytest.mark.parametrize("transport", exhaustive(["memory", "disk"], quick=["memory"]))
def test_it_trains_to_the_bit_as_with_hf(transport: str, tmp_path: Path) -> None:
    loops.train(run_of(tmp_path, "hf"))
    chosen = {
        "engine.name": "external:ExternalHF",
        "engine.transfer": transport,
        "engine.verify": "always",
        "engine.offload": True,
    }
    loops.train(run_of(tmp_path, "external", **chosen))
    assert_same(tmp_path / "external", tmp_path / "hf")
    engine = external.MADE[-1]
    assert engine.sessions == 5  # before the first step, and after each
    assert engine.log.count("sleep") == engine.log.count("wake") == 4
    starts = [i for i, entry in enumerate(engine.log) if entry == "begin"]
    assert all(engine.log[i - 2 : i] == ["sleep", "wake"] for i in starts[1:])
    assert engine.spec.max_model_len == 32 + 16 and engine.spec.temperatures == {0.0, 1.0}
    manifest = json.loads((tmp_path / "external/manifest.json").read_text())
    assert manifest["engine"]["transport"] == transport
    assert manifest["engine"]["environment"] == {"HF_HUB_OFFLINE": "1"}
    steps = [
        json.loads(line)
        for line in (tmp_path / "external/metrics.jsonl").read_text().splitlines()
        if "evaluation" not in line
    ]
    for step in steps:
        assert step["engine/verify_gap"] < 1e-5 and step["engine/tokens_per_second"] > 0
        assert step["engine/restarts"] == 0 and {"time/verify", "time/sleep", "time/weights"} <= step.keys()


@pytest.mark.parametrize(
    ("kind", "what", "says"),
    [
        ("OneWrong", "values-differ", "k_proj.weight"),
        ("NoHead", "values-differ", "lm_head.weight"),
        ("Stale", "values-differ", "a cache computed"),
        ("SaysCached", "values-differ: prefix cache", "prefix cache"),
    ],
)
def test_verification_stops_the_run(kind: str, what: str, says: str, tmp_path: Path) -> None:
    # A step must move the weights by more than rounding, or a stale answer is a right one.
    chosen = {"engine.name": f"external:{kind}", "engine.verify": "always", "eval.before": False}
    with raises(EngineError, what) as caught:
        loops.train(run_of(tmp_path, "run", **chosen, **{"train.lr": 0.1}))
    assert says in str(caught.value)
    if kind in ("OneWrong", "NoHead"):  # seen before the first step, and such a start leaves nothing behind
        assert not (tmp_path / "run").exists()
        return
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["outcome"] == "failed" and says in summary["error"]


def test_the_gate_of_the_first_step_stays_when_verification_is_off(tmp_path: Path) -> None:
    chosen = {"engine.name": "external:OneWrong", "engine.verify": "off", "eval.before": False}
    with raises(EngineError, "values-differ: logprob_gap_mean"):
        loops.train(run_of(tmp_path, "run", **chosen))


def test_an_engine_that_no_way_leads_to_is_closed_again(tmp_path: Path) -> None:
    chosen = {"engine.name": "external:ExternalHF", "engine.transfer": "collective"}
    with raises(EngineError, "unsupported-combination: engine.transfer"):
        loops.train(run_of(tmp_path, "run", **chosen))
    assert external.MADE[-1]._state == "closed"


def test_memory_that_runs_out_in_the_engine_is_the_engines(tmp_path: Path) -> None:
    chosen = {"engine.name": "external:RunsOut", "eval.before": False, "eval.every": 0}
    with raises(EngineError, "out-of-memory") as caught:
        loops.train(run_of(tmp_path, "run", **chosen))
    assert "before the last weight update: trainer rss_peak" in str(caught.value)
    assert str(caught.value).count("engine weights 1.00 GiB") == 3


def test_how_long_prompt_and_completion_may_be(tmp_path: Path) -> None:
    run = run_of(tmp_path, "run", **{"eval.before_max_tokens_factor": 3})
    assert max_model_len(run, max_positions=512) == 32 + 3 * 16
    assert max_model_len(run, max_positions=50) == 50
    assert max_model_len(run_of(tmp_path, "run", **{"eval.max_tokens": 40}), max_positions=512) == 72
    only_training = {"eval.before": False, "eval.after": False, "eval.every": 0, "eval.max_tokens": 400}
    assert max_model_len(run_of(tmp_path, "run", **only_training), max_positions=512) == 48
    named = {"engine.name": "external:ExternalHF"}
    own = run_of(tmp_path, "run", **named, **{"engine.max_model_len": 60, "eval.before_max_tokens_factor": 3})
    assert max_model_len(own, max_positions=512) == 60
    short = run_of(tmp_path, "run", **named, **{"engine.max_model_len": 47})
    with raises(ConfigError, "contradiction: engine.max_model_len"):
        max_model_len(short, max_positions=512)


def test_the_place_of_a_model(tmp_path: Path) -> None:
    from transformers import AutoConfig

    run = run_of(tmp_path, "run")
    model = load_model(run.model, attention="sdpa", device=torch.device("cpu"))
    resolved = resolved_on(run)
    spec = external_engine_spec(resolved, model, work_dir=tmp_path / "engine")
    config = AutoConfig.from_pretrained(spec.folder)
    assert config.architectures == ["LlamaForCausalLM"] and config.vocab_size == spec.vocab_size == 256
    assert not list(spec.folder.glob("*.safetensors"))
    assert (spec.device, spec.shares_device, spec.weights, spec.dtype) == (
        "cpu",
        False,
        "pushed",
        "float32",
    )
    gpu = moved(resolved, "cuda:1").run
    for settings, shared in (({}, True), ({"cuda_devices": (0,)}, False), ({"cuda_devices": (0, 1)}, True)):
        placed = dataclasses.replace(resolved, run=gpu.with_engine(url=None, **settings))
        there = external_engine_spec(placed, model, work_dir=tmp_path / "engine")
        assert (there.device, there.shares_device) == ("cuda:1", shared)


@pytest.mark.slow
def test_each_of_two_ranks_pushes_to_its_own_engine(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(TINY)

    flags = ("--train.backend", "fsdp2", "--train.device", "cpu", "--train.layout", "packed")
    argv = ("train", "tiny.toml", "--ranks", "2", *flags)
    place: dict[str, Any] = {"cwd": tmp_path, "PYTHONPATH": f"{EXTERNAL}:{os.environ.get('PYTHONPATH', '')}"}
    succeeds(*argv, "--run-dir", "hf", **place)
    engine = ("--engine.name", "external:ExternalHF", "--engine.verify", "always")
    succeeds(*argv, "--run-dir", "own", *engine, **place)
    assert_same(tmp_path / "own", tmp_path / "hf")
    assert sorted(path.name for path in (tmp_path / "own/engine").iterdir()) == ["rank-0", "rank-1"]
    # The engine of rank 1 alone is wrong: both end, with its error, and no rank is left in a collective.
    broken = lockstep(*argv, "--run-dir", "broken", "--engine.name", "external:WrongOnRank1", **place)
    assert broken.returncode != 0 and "the test's engine fails at receive 0" in broken.stdout + broken.stderr
