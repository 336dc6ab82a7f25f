"""`lockstep parity engines` as a whole: engines that are wrong in one way are caught and called by name."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from raising import raises
from rich.console import Console

from lockstep.config.engine import EngineConfig
from lockstep.config.model import ModelConfig
from lockstep.errors import ConfigError
from lockstep_lab.engine_parity import run as lab
from lockstep_lab.engine_parity import worker as engines_worker
from lockstep_lab.engine_parity.prompts import make_prompts, read_data
from lockstep_lab.engine_parity.report import report
from lockstep_lab.engine_parity.result import EngineResult, EnginesResult
from lockstep_lab.engine_parity.run import EngineChoice, EnginesOptions, run_engines
from lockstep_lab.suite.process import ExitStatus, ProcessRunner
from lockstep_lab.suite.report import show, write_report

MODEL = "shape:tiny-llama"
HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def wrong_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module of wrong engines can be imported, here and in workers."""
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers run in this process: what they do is the same, and importing torch takes seconds."""

    def run(self: ProcessRunner, argv: Any, *, log: Path, timeout: float, **_: Any) -> ExitStatus:
        log.touch()
        return ExitStatus(returncode=engines_worker.main([argv[-1]]), timed_out=False, seconds=1.0)

    monkeypatch.setattr(ProcessRunner, "run", run)


def options(out: Path, *engines: str, **changes: Any) -> EnginesOptions:
    model = ModelConfig(name=MODEL, dtype="float32")
    choices = [
        EngineChoice(name=name, config=EngineConfig(name="hf" if name == "hf" else f"wrong_engines:{name}"))
        for name in engines
    ]
    values: dict[str, Any] = {"max_tokens": 24, "num_samples": 3, "threshold": 1.5e-4, "timeout": 120.0}
    prompts = make_prompts(model, read_data(None, model=MODEL), max_prompts=4, max_tokens=24, seed=0)
    return EnginesOptions(engines=choices, prompts=prompts, model=model, out=out, **(values | changes))


def by_name(result: EnginesResult) -> dict[str, EngineResult]:
    return {engine.name: engine for engine in result.engines}


CAUGHT = {
    "RawLogprobs": "logprob kind",
    "DropsSeeds": "seeds",
    "OneSeed": "n",
    "AddsToken": "ids",
    "HidesToken": "gap",
    "MissesUpdate": "stale",
    "StaleCache": "stale",
    "CutsStop": "stops",
    "OldVersion": "version",
    "Samples": "greedy",
}


def test_wrong_engines_are_caught_by_name(tmp_path: Path, one_process: None):
    names = ("hf", "Right", *CAUGHT)
    seen: list[str] = []
    result = run_engines(options(tmp_path / "out", *names), progress=lambda row, *_: seen.append(row.name))
    found = by_name(result)
    assert seen == list(names)
    assert found["hf"].verdict == "reference" and found["Right"].verdict == "agrees", found["Right"].why
    for name, fault in CAUGHT.items():
        assert found[name].verdict == "differs", f"{name} was not caught"
        assert fault in found[name].faults, f"{name}: {found[name].why}"
    assert "2 of 12 engines agree" in result.verdict and "RawLogprobs: logprob kind" in result.verdict
    assert not result.ok

    texts = {name: " ".join(found[name].why) for name in CAUGHT}
    assert "those of temperature 1, not of logits / 0.7" in texts["RawLogprobs"]
    assert "the new weights did not reach it" in texts["MissesUpdate"]
    assert "a stale prefix cache" in texts["StaleCache"]
    assert "before:" not in texts["StaleCache"] and "before:" not in texts["MissesUpdate"]
    assert "the same seeds twice" in texts["DropsSeeds"]
    assert "other seeds give the same samples" in texts["OneSeed"]


def test_what_agrees_agrees_in_numbers(tmp_path: Path, one_process: None):
    result = run_engines(options(tmp_path / "out", "hf", "Right"))
    assert result.ok and result.verdict.startswith("parity engines: 2 of 2 engines agree")
    before, after = by_name(result)["Right"].phases
    for phase in (before, after):
        assert phase.gap is not None and phase.gap.max < 1e-4
        assert phase.greedy is not None and phase.greedy.equal == phase.greedy.prompts == 4
        assert phase.again is not None and phase.again.all_equal and phase.again.pairs == 12
        assert phase.alone is not None and phase.alone.all_equal and phase.alone.pairs == 4
        assert phase.other is not None and phase.other.equal == 0
        assert phase.siblings is not None and phase.siblings.equal == 0
        assert phase.matrix is not None and phase.matrix.samples == 12
        assert sum(phase.finish.values()) == phase.completions == 4 + 4 + 12 + 12 + 4 + 12
        assert phase.cache_hit_rate is not None and 0.3 < phase.cache_hit_rate < 0.7
    outcome = by_name(result)["Right"].outcome
    assert outcome is not None and outcome.update_effect is not None and outcome.update_effect > 0.05
    assert len(outcome.push_seconds) == 2
    told = json.loads((tmp_path / "out/engines.json").read_text())
    assert told["engines"][1]["phases"]["after"]["gap"]["tokens"] > 0


def test_without_an_update(tmp_path: Path, one_process: None):
    result = run_engines(options(tmp_path / "out", "hf", "StaleCache", update=False))
    assert result.ok, "what only shows after an update is not seen without one"
    assert [phase.phase for phase in by_name(result)["hf"].phases] == ["before"]


def test_an_update_that_is_too_small_is_no_proof(tmp_path: Path, one_process: None):
    result = run_engines(options(tmp_path / "out", "hf", update_scale=1e-5))
    assert by_name(result)["hf"].faults == ("update",)


def test_temperature_one_needs_no_second_scale(tmp_path: Path, one_process: None):
    result = run_engines(options(tmp_path / "out", "hf", "RawLogprobs", temperature=1.0, update=False))
    assert result.ok and by_name(result)["hf"].phases[0].gap_unscaled is None


def test_reports_escape_what_engines_write(tmp_path: Path, one_process: None):
    result = run_engines(options(tmp_path / "out", "Writes", "hf", update=False))
    console = Console(width=110, file=io.StringIO(), record=True)
    show(report(result), console)
    rows = console.export_text().splitlines()[2:4]
    assert [row.split()[:3] for row in rows] == [["Writes", "before", "reference"], ["hf", "before", "4/4"]]
    write_report(report(result), result.as_dict(), tmp_path / "out", "engines")
    page = (tmp_path / "out/engines.html").read_text()
    assert "<script" not in page and "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "\x1b" not in page and "http" not in page.replace("http-equiv", "")
    assert page.count('class="bars"') == 2 and "default-src 'none'" in page
    text = (tmp_path / "out/engines.md").read_text()
    assert text.startswith("# Engines: shape:tiny-llama") and "| hf | agrees | before | 4/4 |" in text


@pytest.mark.slow
def test_every_ending_is_a_row(tmp_path: Path):
    made = options(tmp_path / "out", "hf", "Crashes", "Raises", "Hangs", update=False, timeout=40.0)
    missing = EngineChoice(name="missing", config=EngineConfig(name="no_such_package.engine:Engine"))
    hangs = [choice for choice in made.engines if choice.name == "Hangs"]
    others = [choice for choice in made.engines if choice.name != "Hangs"]
    result = run_engines(made.model_copy(update={"engines": [*others, missing, *hangs]}))
    found = by_name(result)
    assert {name: engine.verdict for name, engine in found.items()} == {
        "hf": "reference",
        "Crashes": "failed",
        "Raises": "failed",
        "missing": "refused",
        "Hangs": "hung",
    }
    assert "Segmentation fault" in found["Crashes"].reason and "generate" in found["Crashes"].reason
    assert found["Raises"].reason == "ValueError: no kernel for <b>this</b>"
    assert "'no_such_package'" in found["missing"].reason
    assert "no end after 40 s (--timeout), in generate (wrong_engines.py:" in found["Hangs"].reason
    assert found["Crashes"].phases[0].greedy is not None, "what was done before is compared"
    assert "Crashes: failed; Raises: failed; missing: refused; Hangs: hung" in result.verdict
    write_report(report(result), result.as_dict(), tmp_path / "out", "engines")
    assert "&lt;b&gt;this&lt;/b&gt;" in (tmp_path / "out/engines.html").read_text()


@pytest.mark.slow
def test_a_suite_that_is_killed_leaves_no_worker(tmp_path: Path):
    argv = ["parity", "engines", "--engines", "wrong_engines:Hangs", "--model", MODEL, "--device", "cpu"]
    out = tmp_path / "out"
    suite = subprocess.Popen(
        [sys.executable, "-m", "lockstep", *argv, "--out", str(out)], stdout=subprocess.DEVNULL
    )
    log = out / "logs/Hangs.log"
    deadline = time.monotonic() + 120
    while not (log.exists() and "version 1 pushed" in log.read_text()):
        assert time.monotonic() < deadline and suite.poll() is None, "the worker did not start"
        time.sleep(0.2)
    children = Path(f"/proc/{suite.pid}/task/{suite.pid}/children").read_text().split()
    assert children
    suite.kill()
    suite.wait(timeout=10)
    while any(Path(f"/proc/{pid}").exists() for pid in children):
        assert time.monotonic() < deadline, "the worker outlived its suite"
        time.sleep(0.2)


def test_ctrl_c_leaves_what_there_is(tmp_path: Path, one_process: None, monkeypatch: pytest.MonkeyPatch):
    run = ProcessRunner.run

    def interrupted(self: ProcessRunner, argv: Any, **given: Any) -> ExitStatus:
        if "Right" in argv[-1]:
            raise KeyboardInterrupt
        return run(self, argv, **given)

    monkeypatch.setattr(ProcessRunner, "run", interrupted)
    result = run_engines(options(tmp_path / "out", "hf", "Right", update=False))
    assert not result.complete and not result.ok and result.verdict.endswith("; interrupted")
    assert list(by_name(result)) == ["hf"]


def test_a_folder_in_use_is_refused(tmp_path: Path):
    (tmp_path / "file").touch()
    with raises(ConfigError, "already-exists: --out, test_a_folder_in_use_is_refuse0"):
        run_engines(options(tmp_path, "hf"))


def test_a_worker_refuses_what_is_no_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert engines_worker.main([]) == 2 and "usage" in capsys.readouterr().err
    with raises(ConfigError, "cannot-read: none.json"):
        engines_worker.main([str(tmp_path / "none.json")])
    (tmp_path / "job.json").write_text('{"name": "x"}')
    with raises(ConfigError, "missing-setting: job.json, out"):
        engines_worker.main([str(tmp_path / "job.json")])


def test_names_make_files():
    assert lab.file_stem("a b/c:D") == "a_b_c_D" and lab.file_stem("..") == "engine"
