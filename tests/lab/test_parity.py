"""The suite around its workers: what becomes of stacks that crash, hang, differ or are refused. What a real
worker computes is at the end, on two real ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from raising import raises

from lockstep.config.model import ModelConfig
from lockstep.config.train import TrainConfig
from lockstep.errors import ConfigError
from lockstep_lab.suite.process import ExitStatus, ProcessRunner
from lockstep_lab.train_parity import run as lab
from lockstep_lab.train_parity.inputs import make_inputs
from lockstep_lab.train_parity.job import InputsSpec
from lockstep_lab.train_parity.report import write_reports
from lockstep_lab.train_parity.result import ParityResult, StackResult
from lockstep_lab.train_parity.run import ParityOptions, run_parity
from lockstep_lab.train_parity.stacks import parse_stack, parse_stacks

WORKER = Path(__file__).parent / "fake_parity_worker.py"


def options(out: Path, stacks: str, **changes: Any) -> ParityOptions:
    return ParityOptions(
        **{
            "stacks": parse_stacks(stacks),
            "reference": parse_stack("local"),
            "out": out,
            "model": ModelConfig(name="shape:tiny-llama", dtype="float32"),
            "train": TrainConfig(lr=1e-3),
            "max_samples": 16,
            "batch_size": 4,
            "steps": 10,
            "timeout": 60.0,
        }
        | changes
    )


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Inputs are made in this process, workers only pretend; behaviour.json says how."""
    monkeypatch.setattr(lab, "WORKER", (str(WORKER),))
    monkeypatch.setattr(lab, "_BEHIND_LAUNCHER", 1.0)
    real = ProcessRunner.run

    def run(self: ProcessRunner, argv: Any, **given: Any) -> ExitStatus:
        if "lockstep_lab.train_parity.inputs" not in argv:
            return real(self, argv, **given)
        make_inputs(InputsSpec.model_validate_json(Path(argv[-1]).read_text()))
        return ExitStatus(returncode=0, timed_out=False, seconds=0.1)

    monkeypatch.setattr(ProcessRunner, "run", run)
    out = tmp_path / "out"
    monkeypatch.setattr(lab._Suite, "make_inputs", _with_behaviour(lab._Suite.make_inputs, tmp_path))
    return out


def _with_behaviour(make: Any, folder: Path) -> Any:
    def made(self: Any) -> Any:
        report = make(self)
        text = (folder / "behaviour.json").read_text() if (folder / "behaviour.json").exists() else "{}"
        (self.out / "behaviour.json").write_text(text)
        return report

    return made


def behave(out: Path, **stacks: str) -> None:
    named = {name.replace("_", ":", 1).replace("_", "+"): how for name, how in stacks.items()}
    (out.parent / "behaviour.json").write_text(json.dumps(named))


def by_name(result: ParityResult) -> dict[str, StackResult]:
    return {stack.name: stack for stack in result.stacks}


def test_every_ending_is_a_row(faked: Path) -> None:
    behave(
        faked,
        fsdp2_tp2="crash",
        fsdp2_ring2="kill",
        fsdp2_tp2_ring2="hang",
        deepspeed_zero1="oom",
        deepspeed_zero2="refuse",
        deepspeed_zero3="differ",
        fsdp2_tp4="flat",
        fsdp2_ring4="garbage",
    )
    names = (
        "fsdp2,fsdp2:tp2,fsdp2:ring2,fsdp2:tp2+ring2,deepspeed:zero1,deepspeed:zero2,deepspeed:zero3,"
        "fsdp2:tp4,fsdp2:ring4,deepspeed:zero0,deepspeed:deepcompile"
    )
    seen: list[str] = []
    result = run_parity(
        options(faked, names, timeout=1.0, skip=["deepspeed:zero0"]),
        progress=lambda stack, *_: seen.append(stack.name),
    )
    found = by_name(result)
    assert seen == list(found) and seen[0] == "local", "the reference first, then in the order given"
    assert {name: stack.verdict for name, stack in found.items()} == {
        "local": "reference",
        "fsdp2": "agrees",
        "fsdp2:tp2": "failed",
        "fsdp2:ring2": "failed",
        "fsdp2:tp2+ring2": "hung",
        "deepspeed:zero1": "oom",
        "deepspeed:zero2": "refused",
        "deepspeed:zero3": "differs",
        "fsdp2:tp4": "differs",
        "fsdp2:ring4": "failed",
        "deepspeed:zero0": "skipped",
        "deepspeed:deepcompile": "refused",
    }
    assert found["fsdp2:tp2"].reason == "ValueError: the third step <b>broke</b>"
    assert len(found["fsdp2:tp2"].rows) == 3 and found["fsdp2:tp2"].comparison is not None
    assert found["fsdp2:ring2"].reason.startswith(("it was killed by SIGKILL", "fsdp2:ring2: pid"))
    assert found["fsdp2:tp2+ring2"].reason == "no end after 1 s (--timeout)"
    assert found["deepspeed:zero2"].reason == "train.tp = 2 does not divide the model's 9 query heads"
    assert "DeepCompile builds a CUDA extension" in found["deepspeed:deepcompile"].reason
    (told,) = found["deepspeed:zero3"].problems
    assert told.startswith("losses differ by 0.1 at step ") and told.endswith("the threshold of 0.05")
    assert found["fsdp2:tp4"].learning_problem.startswith("the loss does not fall: 4.04 in the first 5 steps")
    assert not result.ok
    assert result.verdict.startswith("parity: 1 of 10 stacks agree with local (largest relative loss diff")
    assert "; fsdp2:tp2+ring2 hung" in result.verdict and "zero0" not in result.verdict
    write_reports(result, faked)
    assert "<b>broke" not in (faked / "parity.html").read_text()
    assert (faked / "parity.png").read_bytes().startswith(b"\x89PNG")
    values = json.loads((faked / "parity.json").read_text())
    assert values["stacks"][1]["curves"]["loss"][0] == pytest.approx(4.8)


def test_ppo_compares_policies_with_policies_and_value_models_with_value_models(faked: Path) -> None:
    (faked.parent / "behaviour.json").write_text(json.dumps({"fsdp2 (value)": "differ"}))
    result = run_parity(options(faked, "fsdp2,deepspeed:deepcompile", algorithm="ppo"))
    assert {name: stack.verdict for name, stack in by_name(result).items()} == {
        "local": "reference",
        "fsdp2": "agrees",
        "deepspeed:deepcompile": "refused",
        "local (value)": "reference",
        "fsdp2 (value)": "differs",
        "deepspeed:deepcompile (value)": "refused",
    }
    jobs = [json.loads((faked / name / "job.json").read_text()) for name in ("fsdp2", "fsdp2_value")]
    assert [Path(job["inputs"]).name for job in jobs] == ["inputs", "inputs-value"]
    write_reports(result, faked)
    assert "loss of the value model" in (faked / "parity.html").read_text()


def test_no_process_outlives_a_hang(faked: Path) -> None:
    behave(faked, fsdp2="hang")
    result = run_parity(options(faked, "fsdp2", timeout=1.0))
    log = Path(by_name(result)["fsdp2"].log).read_text()
    pid = int(log.partition("pid ")[2].split()[0])
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_threshold_flat_losses_and_a_passing_run(faked: Path) -> None:
    behave(faked, fsdp2="differ", fsdp2_tp2="flat")
    passed = run_parity(options(faked, "fsdp2", threshold=0.11))
    assert passed.ok and passed.verdict == (
        "parity: 1 of 1 stacks agree with local (largest relative loss difference 0.1); "
        "learning: every loss falls"
    )
    flat = options(faked.parent / "flat", "fsdp2:tp2", threshold=10.0, must_fall=False)
    told = "learning: the loss does not fall in 1 of 2 (fsdp2:tp2)"
    allowed = run_parity(flat)
    assert allowed.ok and allowed.learns is False and allowed.learning == f"{told} (--allow-flat)"
    strict = run_parity(flat.model_copy(update={"out": faked.parent / "f2", "must_fall": True}))
    assert not strict.ok and strict.agrees and strict.learning == told
    assert [stack.verdict for stack in strict.stacks] == ["reference", "agrees"]


def test_a_reference_that_fails_leaves_nothing_to_compare_with(faked: Path) -> None:
    behave(faked, local="refuse")
    result = run_parity(options(faked, "fsdp2"))
    assert [stack.verdict for stack in result.stacks] == ["refused", "fails"]
    assert "the reference did no step" in result.stacks[1].problems[0]
    assert result.verdict == (
        "parity: 0 of 1 stacks agree with local; local refused; fsdp2 does not pass; "
        "learning: every loss falls"
    )


def test_another_reference(faked: Path) -> None:
    result = run_parity(options(faked, "local,fsdp2", reference=parse_stack("fsdp2"), skip=["local"]))
    assert [(s.name, s.verdict) for s in result.stacks] == [("fsdp2", "reference"), ("local", "skipped")]
    assert result.ok


def test_ctrl_c_leaves_what_there_is(faked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    behave(faked)

    def interrupted(stack: StackResult, number: int, _: int) -> None:
        if number == 2:
            raise KeyboardInterrupt

    result = run_parity(options(faked, "fsdp2,fsdp2:tp2"), progress=interrupted)
    assert not result.complete and not result.ok and len(result.stacks) == 2
    assert result.verdict.endswith("; interrupted")


def test_log_names_and_folders(faked: Path, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    names = "deepspeed:zero2,deepspeed:zero3,fsdp2:tp2+ring2"
    result = run_parity(options(faked, names, log_dir=logs))
    assert sorted(path.name for path in logs.iterdir()) == [
        "deepspeed_test.log",
        "deepspeed_zero3_test.log",
        "fsdp2_tp2_ring2_test.log",
        "local_test.log",
    ]
    assert by_name(result)["fsdp2:tp2+ring2"].ranks == 4 and by_name(result)["deepspeed:zero2"].ranks == 2
    assert (faked / "fsdp2_tp2_ring2" / "metrics.jsonl").is_file()


def test_what_is_refused_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "file").touch()
    with raises(ConfigError, "already-exists: --out (OUTPUT_DIR), x"):
        run_parity(options(tmp_path / "x", "fsdp2"))
    with raises(ConfigError, "cannot-write: --out (OUTPUT_DIR), y"):
        run_parity(options(tmp_path / "x" / "file" / "y", "fsdp2"))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with raises(ConfigError, "wrong-environment: parity"):
        run_parity(options(tmp_path / "y", "fsdp2"))


def test_where_a_rank_was_when_its_time_was_up(tmp_path: Path) -> None:
    code = (
        "import faulthandler, threading, time\n"
        "def beside():\n    time.sleep(60)\n"
        "def waits_for_a_peer():\n    time.sleep(60)\n"
        "threading.Thread(target=beside, daemon=True).start()\n"
        "faulthandler.dump_traceback_later(0.5, exit=True)\n"
        "waits_for_a_peer()\n"
    )
    (tmp_path / "rank-0.log").write_text("nothing here\n")
    with (tmp_path / "rank-1.err.log").open("w") as log:
        subprocess.run([sys.executable, "-c", code], stderr=log, check=False)
    assert lab.where_it_was(tmp_path) == "; rank 1 was in waits_for_a_peer (<string>:5)"
    assert lab.where_it_was(tmp_path / "nowhere") == ""


@pytest.mark.exhaustive
def test_real_stacks_take_the_same_steps(tmp_path: Path) -> None:
    """One of each backend: how far every stack is from local is tested in parity/test_train_backends.py."""
    stacks = "deepspeed:zero2,fsdp2:tp2,fsdp2:tp3"
    given = options(tmp_path / "out", stacks, gpus=2, gradients=True, threshold=1e-4, timeout=240.0)
    result = run_parity(given)
    found = by_name(result)
    for name in stacks.split(",")[:-1]:
        row = found[name]
        assert row.verdict == "agrees", row
        assert row.comparison is not None and row.comparison.logprob is not None
        assert row.comparison.loss.max <= 1e-5 and row.comparison.grad_norm.max <= 1e-4
        assert row.comparison.logprob.max <= 1e-4 and max(row.comparison.gradients.values()) <= 1e-4
        assert set(row.comparison.gradients) == {"1", "10"}
        assert (row.ranks, len(row.rows)) == (2, 10)
    assert found["fsdp2:tp3"].verdict == "refused"
    assert found["fsdp2:tp3"].reason.startswith("tp 3 = 3 does not divide 2 ranks")
    log = (tmp_path / "out" / "logs" / "fsdp2_tp2_test.log").read_text()
    assert "step 10/10 loss: " in log
    write_reports(result, given.out)
    assert "| fsdp2:tp2 | agrees |" in (given.out / "parity.md").read_text()


@pytest.mark.slow
def test_grpo_and_a_stack_that_the_model_refuses(tmp_path: Path) -> None:
    given = options(tmp_path / "out", "fsdp2:tp4", algorithm="grpo", steps=4, batch_size=8, timeout=240.0)
    result = run_parity(given)
    found = by_name(result)
    assert found["local"].verdict == "reference" and found["local"].rows[1].grad_norm > 0
    assert found["fsdp2:tp4"].verdict == "refused", found["fsdp2:tp4"]
    assert "does not divide the model's 4 query heads and 2 key/value heads" in found["fsdp2:tp4"].reason
    assert any("made-up" in str(value) for value in result.settings.values())
