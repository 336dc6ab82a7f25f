"""Training on several ranks, as real processes: the same numbers as one process, and an end in good order."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from loop_runs import TINY, metrics_of
from safetensors.torch import load_file

from lockstep.cli.main import main
from lockstep.config.model import ModelConfig
from lockstep.models.load import load_model
from lockstep.ranks.launch import launch_command
from lockstep.recording import Recording
from lockstep.recording.weights import load_weights

SECONDS = 300
RL = ("train", "tiny.toml")
DETAILS = ("policy_logprobs", "entropies", "advantages")


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str
    seconds: float


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With tiny.toml and the module of its reward."""
    toml = TINY.replace('name = "ids"', 'name = "rewards_of_ranks:EvenShare"').replace(
        "[train]", '[train]\ndevice = "cpu"'
    )
    (tmp_path / "tiny.toml").write_text(toml)
    shutil.copy(Path(__file__).with_name("rewards_of_ranks.py"), tmp_path)
    return tmp_path


def lockstep(
    folder: Path, *argv: str, at: str | None = None, launcher: Sequence[str] = (), **environ: str
) -> Ended:
    """`lockstep ARGV` in `folder`; at: see rewards_of_ranks. It ends within SECONDS."""
    command = [*(launcher or [sys.executable, "-m"]), "lockstep", *argv]
    started = time.monotonic()
    ended = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environ | ({"AT": at} if at else {}),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    return Ended(ended.returncode, ended.stdout, ended.stderr, time.monotonic() - started)


def here(folder: Path, monkeypatch: pytest.MonkeyPatch, *argv: str) -> None:
    """`lockstep ARGV` in `folder`, of one process: this one, which has imported torch."""
    with monkeypatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        assert main(list(argv)) == 0


def rows(run: Path) -> dict[str, Any]:
    """All rollouts and evaluations, without their logprobs."""
    rounded = ("rollout_logprobs", *DETAILS)
    return {
        name: [{k: v for k, v in line.items() if k not in rounded} for line in lines]
        for name, lines in lines_of(run).items()
    }


def details(run: Path) -> dict[str, list[Any]]:
    """What log.token_details adds to the rollouts of all steps, one after the other."""
    lines = [line for name, each in lines_of(run).items() if name.startswith("step-") for line in each]
    return {
        name: [value for line in lines for value in line[name] or [None] * len(line["advantages"])]
        for name in DETAILS
    }


def lines_of(run: Path) -> dict[str, Any]:
    files = sorted((run / "rollouts").iterdir())
    return {file.name: [json.loads(line) for line in file.read_text().splitlines()] for file in files}


def assert_close(run: Path, reference: Path, *, relative: float = 1e-4) -> None:
    """The same rollouts and rewards, losses and norms but for rounding, the same final weights likewise."""
    assert rows(run) == rows(reference)
    ours, theirs = metrics_of(run), metrics_of(reference)
    assert len(ours) == len(theirs) > 4
    for mine, other in zip(ours, theirs, strict=True):
        skipped = {"input/micro_batches", "input/fill"}
        assert mine.keys() == other.keys()
        for name in mine.keys() - skipped:
            if isinstance(mine[name], float):
                assert mine[name] == pytest.approx(other[name], rel=relative, abs=2e-6), name
            else:
                assert mine[name] == other[name], name
    exported, expected = (load_file(r / "export/model.safetensors") for r in (run, reference))
    assert exported.keys() == expected.keys()
    for name, tensor in exported.items():
        assert torch.allclose(tensor, expected[name], rtol=1e-3, atol=1e-4), name


def recorded(run: Path) -> dict[Any, Any]:
    """What the ranks were dealt and what the policy made of it."""
    found = {}
    for each in Recording.open(run / "recordings"):
        assert each.outputs is not None and each.outputs.logprobs is not None
        seen = (
            each.batch.sample_ids,
            each.outputs.loss,
            each.outputs.logprobs.tolist(),
            each.meta.checkpoint,
        )
        found[each.meta.key] = (each.meta.step, each.meta.num_micro_batches, dict(each.meta.mesh), *seen)
    return found


def assert_recorded(run: Path) -> None:
    """Each rank its share of every step, all together all documents; and the first weights, whole."""
    header = Recording.open(run / "recordings").header
    assert (header.world_size, dict(header.mesh)) == (2, {"dp": 2, "ring": 1, "tp": 1})
    for step in range(4):
        inputs = {key: value for key, value in recorded(run).items() if value[0] == step}
        assert sorted(i for value in inputs.values() for i in value[3]) == list(range(16))
        assert {key.rank: value[2]["dp"] for key, value in inputs.items()} == {0: 0, 1: 1}
        assert {value[-1] for value in inputs.values()} == {"weights/step-000000" if step == 0 else None}
    config = ModelConfig(name="shape:tiny-llama", dtype="float32")
    model = load_model(config, attention="sdpa", device=torch.device("cpu"))
    first = {name: tensor.clone() for name, tensor in model.module.named_parameters()}
    load_weights(model.module, run / "recordings/weights/step-000000")
    assert all(torch.equal(first[name], tensor) for name, tensor in model.module.named_parameters())


@pytest.mark.slow
def test_ranks_with_other_settings_are_refused_on_every_rank(folder, capfd):
    script = (
        "import os, sys; from lockstep.cli.main import main; sys.exit(main(['train', 'tiny.toml', "
        "'--train.backend', 'fsdp2', '--run-dir', 'run', '--train.lr', '1e-3' if os.environ['RANK'] == '0' "
        "else '2e-3']))"
    )
    command = ["sh", "-c", f"cd {shlex.quote(str(folder))} && exec {sys.executable} -c {shlex.quote(script)}"]
    assert launch_command(command, ranks=2, timeout=SECONDS, log_dir=folder / "logs") == 2
    assert "train.lr: 0.001 on rank 0, 0.002 on rank 1" in capfd.readouterr().err
    assert "train.lr: 0.001 on rank 0, 0.002 on rank 1" in (folder / "logs/rank-1.err.log").read_text()
    assert not (folder / "run").exists()


@pytest.mark.slow
def test_a_slow_rank_samples_less_and_changes_no_bit(tmp_path: Path) -> None:
    settings = "rollout.prompts_per_step=6 engine.name=native engine.max_batch=4 train.backend=fsdp2 steps=2"
    settings += " train.device=cpu train.batch_invariant=true train.deterministic=true"
    settings += " eval.every=0 eval.before=false eval.after=false"
    settings += " checkpoint.every=0 checkpoint.save_at_end=false checkpoint.export_at_end=false"
    flags = [part for each in settings.split() for part in ("--" + each).split("=")]
    worker, found = Path(__file__).with_name("slow_rank.py"), []
    for slow in "01":
        folder = tmp_path / slow
        folder.mkdir()
        (folder / "tiny.toml").write_text(TINY)
        words = ["env", "-C", str(folder), f"SLOW={slow}", sys.executable, str(worker), *RL, *flags]
        logs = folder / "logs"
        code = launch_command([*words, "--run-dir", "run"], ranks=2, timeout=SECONDS, log_dir=logs)
        assert code == 0, (logs / "rank-0.err.log").read_text()
        counts = [int((folder / f"sampled-{rank}").read_text()) for rank in "01"]
        assert sum(counts) == 2 * 6 * 4 and counts[int(slow)] < counts[1 - int(slow)]
        found.append((metrics_of(folder / "run"), rows(folder / "run")))
    assert found[0] == found[1] and "weights_hash" in found[0][0][0]


@pytest.mark.slow
def test_two_ranks_train_as_one_process_does_and_stop_and_go_on_exactly(folder, monkeypatch):
    detailed = (*RL, "--log.token-details")
    here(folder, monkeypatch, *detailed, "--run-dir", "alone")
    spread = ("--train.backend", "fsdp2", "--ranks", "2", "--record")
    straight = lockstep(folder, *detailed, "--run-dir", "straight", *spread, "--json", "summary.json")
    assert straight.code == 0, straight.out + straight.err
    assert_close(folder / "straight", folder / "alone")
    assert straight.out.splitlines()[-1].startswith("train: finished, 4 steps")
    assert json.loads((folder / "summary.json").read_text())["outcome"] == "finished"
    (logs,) = (folder / "straight/logs/ranks").iterdir()
    assert (logs / "rank-1.log").read_text() == "" and "step 4/4" in (logs / "rank-0.log").read_text()
    assert_recorded(folder / "straight")
    alone = details(folder / "alone")
    for name, values in details(folder / "straight").items():
        assert values and values == pytest.approx(alone[name], abs=1e-5), name

    # 8 completions in a step and 2 in an evaluation: the 23rd is of step 2.
    stopped = lockstep(folder, *detailed, "--run-dir", "stopped", *spread, at="1:23:terminate")
    assert stopped.code == 143, stopped.out + stopped.err
    last = stopped.out.splitlines()[-1]
    assert last.startswith("train: interrupted, ")
    command = shlex.split(last.rpartition("resume with: lockstep ")[2])
    assert command == ["train", "--resume", "stopped", "--ranks", "2"]
    resumed = lockstep(folder, *command)
    assert resumed.code == 0, resumed.out + resumed.err
    assert metrics_of(folder / "stopped") == metrics_of(folder / "straight")
    assert lines_of(folder / "stopped") == lines_of(folder / "straight")
    ours, theirs = (load_file(folder / r / "export/model.safetensors") for r in ("stopped", "straight"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert recorded(folder / "stopped") == recorded(folder / "straight")


@pytest.mark.exhaustive
@pytest.mark.parametrize("adapters", [False, True], ids=["all weights", "LoRA"])
def test_a_run_moves_from_one_backend_to_another(adapters, folder, monkeypatch):
    """deepspeed on 2 ranks, then fsdp2 on 2, then one process; and the result is that of one process."""
    lora = ("--model.lora.rank", "4", "--algorithm.kl.coef", "0.1") if adapters else ()
    here(folder, monkeypatch, *RL, "--run-dir", "alone", "--steps", "3", "--log.token-details", *lora)
    first = (
        "--log.token-details",
        "--train.backend",
        "deepspeed",
        "--ranks",
        "2",
        "--steps",
        "1",
        "--run-dir",
        "run",
        *lora,
    )
    second = ("--resume", "run", "--train.backend", "fsdp2", "--ranks", "2", "--steps", "2")
    third = ("--resume", "run", "--train.backend", "local", "--steps", "3")
    for command in ((*RL, *first), ("train", *second)):
        ended = lockstep(folder, *command)
        assert ended.code == 0, ended.out + ended.err
    here(folder, monkeypatch, "train", *third)
    assert [row["loss"] for row in metrics_of(folder / "run") if "loss" in row] == pytest.approx(
        [row["loss"] for row in metrics_of(folder / "alone") if "loss" in row], abs=1e-5
    )
    alone = details(folder / "alone")
    for name, values in details(folder / "run").items():
        assert values and values == pytest.approx(alone[name], abs=1e-5), name


@pytest.mark.slow
def test_a_rank_that_dies_or_fails_ends_the_run_and_is_named(folder):
    spread = ("--train.backend", "fsdp2", "--ranks", "2", "--eval.no-before")
    # 8 completions in a step and 2 in an evaluation: the 23rd is of step 2, the 12th of step 1.
    killed = lockstep(folder, *RL, "--run-dir", "killed", *spread, at="1:23:kill")
    assert killed.code == 128 + 9, killed.out + killed.err
    assert "another rank is gone" not in killed.err, "who died comes first"
    said = killed.err[killed.err.index("lockstep: rank") :]
    assert said.startswith("lockstep: rank 1 of 2 was killed by SIGKILL; last seen at step 2")
    deadline = time.time() - (folder / "acted").stat().st_mtime
    assert deadline < 30 + 5, "the run outlived its rank"
    resumed = lockstep(folder, "train", "--resume", "killed", "--ranks", "2", "--steps", "3")
    assert resumed.code == 0, resumed.out + resumed.err
    assert "resuming after 2 steps" in resumed.out

    (folder / "acted").unlink()
    failed = lockstep(folder, *RL, "--run-dir", "failed", *spread, at="1:12:raise")
    assert failed.code == 1, failed.out + failed.err
    assert "RewardError" not in failed.out
    assert (
        "lockstep train: error[reward-failed]: rank 1: " in failed.err and "no reward on rank 1" in failed.err
    )
    summary = json.loads((folder / "failed/summary.json").read_text())
    assert summary["outcome"] == "failed" and "no reward on rank 1" in summary["error"]
    assert (folder / "failed/checkpoints/step-000001/complete.json").exists(), "the step before was saved"


TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m")
DEEPSPEED = (sys.executable, "-m", "deepspeed.launcher.runner", "--num_accelerators", "2", "--module")


@pytest.mark.exhaustive
@pytest.mark.parametrize(("launcher", "backend"), [(TORCHRUN, "deepspeed"), (DEEPSPEED, "fsdp2")])
def test_the_same_command_works_under_other_launchers(launcher, backend, sft_toml, folder):
    flags = ("--train.device", "cpu", "--steps", "3", "--checkpoint.no-export-at-end")
    assert main(["train", str(sft_toml), *flags, "--run-dir", str(folder / "alone")]) == 0
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    ended = lockstep(
        folder,
        *("train", str(sft_toml), "--run-dir", "run", "--train.backend", backend, *flags, "--ranks", "2"),
        launcher=launcher,
        PATH=path,
    )
    assert ended.code == 0, ended.out + ended.err
    assert ended.out.count("train: finished, 3 steps") == 1, ended.out
    ours, theirs = metrics_of(folder / "run"), metrics_of(folder / "alone")
    for name in ("loss", "grad_norm", "eval/loss"):
        values, expected = ([row[name] for row in found if name in row] for found in (ours, theirs))
        assert values == pytest.approx(expected, rel=1e-4) and values, name


SETTINGS = ["train", "grpo", "--model.name", "shape:tiny-llama", "--data.source", "ids", "--rewards", "ids"]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--ranks", "2", "--train.backend", "local"], "Set --train.backend fsdp2 or deepspeed"),
        (
            ["--ranks", "3", "--train.backend", "fsdp2", "--train.tp", "2"],
            "start a multiple of 2 (--ranks 2, 4",
        ),
        (["--train.backend", "fsdp2", "--train.tp", "2"], "1 rank cannot be split into groups of"),
        (
            ["--ranks", "32", "--train.backend", "fsdp2", "--rollout.prompts-per-step", "2"],
            "gives only 16",
        ),
        (["--ranks", "0", "--train.backend", "fsdp2"], "not between 1 and 65536"),
        (["--ranks", "3", "--train.backend", "fsdp2", "--train.tp", "3"], "heads"),
        (["--ranks", "2", "--rank-timeout", "0", "--train.backend", "fsdp2"], "--rank-timeout"),
        (["--ranks", "2", "--train.backend", "fsdp2", "--train.device", "cuda:1"], "names one GPU"),
        (["--train.zero-stage", "3"], "ZeRO stages are DeepSpeed's"),
        (["--train.backend", "deepspeed", "--train.ring", "2"], "train.backend = 'fsdp2'"),
        (["--train.backend", "fsdp2", "--train.ring", "2", "--train.layout", "padded"], "'packed'"),
        (["--train.backend", "fsdp2", "--train.optimizer", "adamw8bit"], "'adamw'"),
    ],
)
def test_what_cannot_be_spread_is_refused_before_anything_starts(flags, told, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("start", "restart_ranks"):
        monkeypatch.delattr(f"lockstep.cli.train.{name}")
    assert main([*SETTINGS, *flags]) == 2
    assert told in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_ranks_of_a_launcher_and_of_the_flag_must_be_equal(capsys, monkeypatch):
    # A rank that failed ends its process at once if it has process groups, as other tests may have left some.
    monkeypatch.setattr("lockstep.cli.main.leave", lambda status: None)
    environ: Mapping[str, str] = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert main([*SETTINGS, "--train.backend", "fsdp2", "--ranks", "2"]) == 2
    assert "--ranks 2, but 4 ranks were started" in capsys.readouterr().err
