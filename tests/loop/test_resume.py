"""A run that was killed and resumed is the run that was not, to the bit."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

import pytest
from loop_runs import FILE, FORWARD, OPTIMIZER, everything, kill

GENERATE = "lockstep.engine.hf.engine:Generation._step"
PUT = "lockstep.loop.checkpoint:CheckpointManager._publish"
METRICS = "lockstep.observe.metrics:JsonlWriter.write"
ROLLOUTS = "lockstep.observe.run_dir:RunDir.write_rollouts"
EXPORT = "lockstep.train.local:LocalBackend.export"
RESTORE = "lockstep.train.local:LocalBackend.load"

MOMENTS = {
    "before the first checkpoint": [
        kill("lockstep.loop.run:Run.restore"),
        kill(GENERATE, call=5),  # the evaluation before
        kill(METRICS, when="after"),  # its line is written
        kill(GENERATE, step=0, call=7),
        kill(FORWARD, step=0, call=2, when="backward"),
        kill(ROLLOUTS, step=0, when="after"),
    ],
    "after a checkpoint": [
        kill(PUT, step=1, when="after"),
        kill(FORWARD, step=2, call=2, when="after"),
        kill(RESTORE),
        kill(OPTIMIZER, step=2, when="after"),
        kill(RESTORE, when="after"),
        kill(METRICS, step=2, when="after"),
        kill(GENERATE, step=3, call=20),
        kill(ROLLOUTS, step=3, when="after"),
    ],
    "the last save": [
        kill(FORWARD, step=3, call=2, when="backward"),
        kill(FILE, step=3, call=5),
        kill(METRICS, step=3, call=2, when="after"),  # the evaluation after
        kill(PUT, step=3),
        kill(EXPORT, step=3),
        kill("shutil:rmtree"),  # nothing to do but to finish: a save that replaces one of the same step
        kill(EXPORT),
    ],
}


@pytest.mark.parametrize("phase", MOMENTS)
def test_a_killed_run_goes_on_as_if_nothing_had_happened(phase, lockstep, straight, tiny_toml, tmp_path):
    lockstep.broken_off(tiny_toml, tmp_path / "run", MOMENTS[phase])
    assert everything(tmp_path / "run") == straight()


@pytest.mark.parametrize(
    "order", [kill(FILE, step=1, call=5), kill(PUT, step=1), kill("tempfile:mkstemp", step=1, when="after")]
)
def test_a_run_that_was_killed_before_its_first_checkpoint_is_not_begun_again(
    order, lockstep, straight, tiny_toml, tmp_path
):
    """Its steps are done, and there is nothing to go on from: what it has written stays, also when the
    command of the message begins it again."""
    run = tmp_path / "run"
    lockstep("train", tiny_toml, "--run-dir", run, cwd=tmp_path, signals=[order], code=-9)
    before = {f: f.read_bytes() for f in [run / "metrics.jsonl", *sorted((run / "rollouts").glob("[!.]*"))]}
    ended = lockstep("train", "--resume", run, cwd=tmp_path, code=2)
    assert len(ended.err.splitlines()) == 1
    assert "contains no checkpoint, but" in ended.err and "finished steps" in ended.err
    assert {f: f.read_bytes() for f in before} == before
    assert not list(run.rglob(".step-*")), "leftovers of a killed write"
    command = re.search(r"`lockstep (train --restart [^`]+)`", ended.err)
    assert command is not None and shlex.split(command[1]) == ["train", "--restart", str(run)]
    lockstep(*shlex.split(command[1]), cwd=tmp_path)
    assert everything(run) == straight()
    kept = {f: run / "before-restart-1" / f.relative_to(run) for f in before}
    assert {f: kept[f].read_bytes() for f in before} == before


VARIANTS = {
    "minibatches and epochs": ("--train.minibatches", "2", "--train.epochs-per-batch", "2"),
    "LoRA with dropout": ("--model.lora.rank", "4", "--model.lora.dropout", "0.2"),
    "bfloat16": ("--model.dtype", "bfloat16"),
    "qwen3, a decay": (
        *("--model.name", "shape:tiny-qwen3", "--train.schedule", "cosine", "--train.warmup-steps", "2"),
    ),
    "states on the CPU, activations recomputed, padded": (
        *("--train.optimizer-device", "cpu", "--train.activation-checkpointing", "--train.layout", "padded"),
        *("--train.grad-accum-dtype", "model"),
    ),
    "experts": ("--model.name", "shape:tiny-qwen3-moe"),
    "8-bit states": ("--train.optimizer", "adamw8bit"),
    "dapo": ("--algorithm.name", "dapo"),
    "KL in the reward": ("--algorithm.kl.coef", "0.1", "--algorithm.kl.place", "reward"),
    "KL in the loss, LoRA": ("--algorithm.kl.coef", "0.1", "--model.lora.rank", "4"),
    "reinforce++ with KL in the reward": (
        *("--algorithm.name", "reinforce++", "--algorithm.kl.coef", "0.1", "--algorithm.kl.place", "reward"),
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_kind_of_run_resumes_exactly(variant, lockstep, straight, tiny_toml, tmp_path):
    flags = VARIANTS[variant]
    if "adamw8bit" in flags:
        pytest.importorskip("torchao", reason="train.optimizer = 'adamw8bit' is torchao's")
    orders = [
        kill(FORWARD, step=0, call=1, when="backward"),
        kill(FORWARD, step=3, call=1, when="backward"),
        kill(GENERATE, step=2, call=9),
    ]
    lockstep.broken_off(tiny_toml, tmp_path / "run", orders, *flags)
    assert everything(tmp_path / "run") == straight(*flags)


def test_options_that_the_config_leaves_open_are_those_the_run_began_with_or_it_says_so(
    lockstep, tiny_toml, tmp_path
):
    """The manifest has the published values of then: here it is made to tell of others, and of none."""
    run = tmp_path / "run"
    flags = ("--algorithm.name", "rloo", "--steps", "2", "--log.display", "plain")
    lockstep("train", tiny_toml, "--run-dir", run, *flags, cwd=tmp_path)
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["algorithm"]["ratio"] == "sequence_product"

    def resumed(steps: int, algorithm: dict[str, Any] | None) -> str:
        (run / "manifest.json").write_text(json.dumps(manifest | {"algorithm": algorithm}))
        ended = lockstep("train", "--resume", run, "--steps", str(steps), cwd=tmp_path)
        return ended.out + ended.err

    assert "was started" not in resumed(3, manifest["algorithm"])
    note = "the run was started with algorithm.ratio = token and continues with sequence_product"
    assert note in resumed(4, manifest["algorithm"] | {"ratio": "token"})
    assert "by an older version, in which rloo had a ratio per token" in resumed(5, None)


@pytest.mark.parametrize("kind", ["tiny_toml", "sft_toml"])
def test_a_resumed_run_takes_its_execution_mode_from_its_manifest(kind, lockstep, request, tmp_path):
    """The manifest is made to tell of a mode that the run cannot have, so that who reads it stops."""
    run, toml = tmp_path / "run", request.getfixturevalue(kind)
    lockstep("train", toml, "--run-dir", run, "--steps", "1", cwd=tmp_path)
    assert 'execution = "auto"' in (run / "config.toml").read_text()
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["axes"]["execution"] == "eager"
    manifest["axes"]["execution"] = "deepcompile"
    (run / "manifest.json").write_text(json.dumps(manifest))
    ended = lockstep("train", "--resume", run, "--steps", "2", cwd=tmp_path, code=2)
    assert "manifest.json, field axes" in ended.err, ended.out + ended.err
