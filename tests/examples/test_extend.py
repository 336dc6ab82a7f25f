"""What docs/how-to/extend.md shows: parts that stand outside of Lockstep, named as `module:attribute`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from raising import raises

from lockstep.algorithms.grpo import PolicyAlgorithm
from lockstep.algorithms.policy_loss import PolicyLoss, PolicyTerms
from lockstep.cli.main import main
from lockstep.config.algorithm import GRPOConfig
from lockstep.errors import ConfigError
from lockstep.registry import load_object

EXTEND = Path(__file__).resolve().parents[2] / "examples" / "extend"


@pytest.fixture(autouse=True)
def in_the_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory, in which modules are looked for, and a path that is put back."""
    monkeypatch.chdir(EXTEND)
    monkeypatch.setattr(sys, "path", list(sys.path))


def trained(folder: Path, *flags: str) -> list[dict[str, float]]:
    """Metrics of the steps of `tiny`."""
    words = [
        "train",
        "grpo",
        "--recipe",
        "tiny",
        "--steps",
        "4",
        "--run-dir",
        str(folder),
        "--eval.no-before",
    ]
    assert main([*words, "--eval.no-after", *flags]) == 0
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_an_estimator():
    estimator = load_object("ranked:advantages", what="the estimator")
    rewards = torch.tensor([[0.1, 50.0, 0.2], [1.0, 1.0, 9.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, True], [True, True, False]])
    assert estimator(rewards, mask)[mask].tolist() == [-1.0, 1.0, 0.0, 0.0, 0.0]


def test_an_estimator_trains(tmp_path):
    rows = trained(tmp_path / "run", "--algorithm.advantage", "ranked:advantages")
    assert all(row["grad_norm"] > 0 for row in rows)


def test_a_loss():
    objective = load_object("simple_policy:loss", what="the loss")
    ratio = torch.tensor([1.0, 1.5, 0.5])
    terms = PolicyTerms(*[ratio] * len(PolicyTerms._fields))._replace(
        ratio=ratio, advantages=torch.tensor([2.0, 2.0, -1.0])
    )
    config = GRPOConfig(objective="simple_policy:loss", clip_high=0.25).resolved()
    # -(1.5 * 2 - 2 / 0.5 * 0.25) = -2; -(0.5 * -1 - 1 / 0.5 * 0.25) = 1
    assert objective(terms, config).tolist() == pytest.approx([-2.0, -2.0, 1.0])
    assert PolicyLoss(config).objective is objective


def test_a_loss_trains(tmp_path):
    flags = ("--algorithm.objective", "simple_policy:loss", "--train.epochs-per-batch", "2")
    rows = trained(tmp_path / "run", *flags)
    clipped = trained(tmp_path / "clipped", "--train.epochs-per-batch", "2")
    assert all(row["grad_norm"] > 0 for row in rows)
    assert rows[-1]["loss"] != clipped[-1]["loss"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--algorithm.advantage", "ranked:missing"), "has no attribute 'missing'"),
        (("--algorithm.objective", "no_such_module:loss"), "no_such_module"),
        (("--algorithm.advantage", "rank"), "unknown advantage estimator 'rank'"),
        (("--algorithm.objective", "ppo-clip"), "did you mean 'ppo_clip'?"),
    ],
)
def test_a_name_that_leads_nowhere(flags, says, tmp_path, capsys):
    out = tmp_path / "run"
    assert main(["train", "grpo", "--recipe", "tiny", "--run-dir", str(out), *flags]) == 2
    assert says in capsys.readouterr().err and not out.exists()


def test_a_class_of_ones_own_takes_grpos_values():
    config = GRPOConfig(name="my_module:MyAlgorithm").resolved()
    assert config.advantage == "group_mean_std" and config.clip_high == 0.2
    with raises(ConfigError, "missing-package: my_module"):
        PolicyAlgorithm(GRPOConfig(advantage="my_module:advantages"), max_tokens=8)


def test_a_kernel_trains_as_sdpa_does(tmp_path):
    """tests/parity/test_documents.py holds it to what every kernel is held to."""
    ours = trained(tmp_path / "dense", "--train.attention", "dense:attention")
    theirs = trained(tmp_path / "sdpa", "--train.attention", "sdpa")
    for a, b in zip(ours, theirs, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-5)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)


PLAIN = ("--train.backend", "plain_backend:PlainBackend")


def test_a_backend_takes_locals_steps(tmp_path):
    """20 GRPO steps with weight decay, clipping, and a reference in the loss."""
    flags = ["--steps", "20", "--algorithm.kl.coef", "0.01", "--train.weight-decay", "0.1", "--train.lr=3e-4"]
    ours = trained(tmp_path / "plain", *PLAIN, *flags)
    theirs = trained(tmp_path / "local", *flags)
    for a, b in zip(ours, theirs, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=3e-6)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)
        assert a["reward/mean"] == b["reward/mean"], "the same completions"
        assert a["kl_ref"] == pytest.approx(b["kl_ref"], abs=3e-6)
    assert max(row["kl_ref"] for row in ours) > 1e-4, "the policy moved"


def test_what_a_backend_declares_as_unsupported_is_refused(tmp_path, capsys):
    for setting, value, says in (
        ("execution", "compile", "is not supported: it compiles nothing; set train.execution = 'eager'"),
        (
            "accumulate",
            "sample",
            "train.accumulate = 'sample' has no effect with train.backend = 'plain_backend:PlainBackend'",
        ),
    ):
        flags = [*PLAIN, f"--train.{setting}", value, "--run-dir", str(tmp_path / "run")]
        assert main(["train", "grpo", "--recipe", "tiny", *flags]) == 2
        assert says in capsys.readouterr().err


@pytest.mark.slow
def test_a_backends_run_goes_on_exactly_after_a_kill(tmp_path):
    words = ["--checkpoint.every", "2", *PLAIN]
    straight = trained(tmp_path / "straight", *words, "--steps", "30")
    run = tmp_path / "killed"
    command = [sys.executable, "-m", "lockstep", "train", "grpo", "--recipe", "tiny", "--run-dir", str(run)]
    command += ["--eval.no-before", "--eval.no-after", "--steps", "30", *words]
    process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"})
    deadline = time.monotonic() + 120
    while not (run / "checkpoints" / "step-000002").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.kill()
    assert process.wait(timeout=60) == -9
    assert main(["train", "--resume", str(run)]) == 0
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["loss"] for row in rows] == [row["loss"] for row in straight]
    # and with another backend
    assert main(["train", "--resume", str(run), "--steps", "31", "--train.backend", "local"]) == 0


def test_a_class_that_lacks_members_is_refused(tmp_path, monkeypatch, capsys):
    (tmp_path / "half_a_backend.py").write_text("class Half:\n    shards_weights = False\n")
    monkeypatch.chdir(tmp_path)
    flags = ["--train.backend", "half_a_backend:Half", "--run-dir", str(tmp_path / "run")]
    assert main(["train", "grpo", "--recipe", "tiny", *flags]) == 2
    assert "lacks logprobs, forward_backward" in capsys.readouterr().err


def test_a_class_that_shards_weights_is_not_recorded_between_optimizer_steps(tmp_path, monkeypatch, capsys):
    """As our own backends that do: a recording needs whole weights."""
    members = [
        *("logprobs", "forward_backward", "optimizer_step", "weights"),
        *("save", "load", "export", "close", "compile_report"),
    ]
    methods = "".join(f"    def {name}(self): ...\n" for name in members)
    (tmp_path / "sharding.py").write_text(
        f"class Sharding:\n    shards_weights = True\n    def __init__(self, config, **_): ...\n{methods}"
    )
    monkeypatch.chdir(tmp_path)
    flags = ["--train.backend", "sharding:Sharding", "--run-dir", str(tmp_path / "run"), "--record.enabled"]
    assert main(["train", "grpo", "--recipe", "tiny", *flags, "--train.minibatches", "2"]) == 2
    error = capsys.readouterr().err
    assert "record.enabled = true with train.backend = 'sharding:Sharding' and 2 optimizer steps" in error
    assert not (tmp_path / "run").exists()
