"""`lockstep replay` on two ranks: simulated ones against real processes, failures, launchers, ZeRO stages."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from raising import raises
from safetensors.torch import load_file
from starting import wait_for
from torch import Tensor

from lockstep.cli.main import main
from lockstep.recording.writer import RecordingWriter

from .conftest import MemoryRecording, record_steps

PYTHON = [sys.executable, "-m", "lockstep"]
KEEP = ["--keep-outputs", "--gradient-inputs", "100"]


def write(recording: MemoryRecording, path: Path) -> Path:
    """On the disk, where other processes find it."""
    with RecordingWriter(path, recording.header) as writer:
        for update in sorted({meta.update for meta in recording.metas}):
            inputs = [r for r in recording.inputs if r.meta.update == update]
            writer.begin(inputs)
            writer.finish(inputs)
    return path


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two optimizer steps of three inputs."""
    path = tmp_path_factory.mktemp("ranks") / "recording"
    return write(record_steps(path, attention="sdpa"), path)


def rows_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


def summary_of(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return found


def difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> tuple[float, float]:
    """(largest |difference| of a logprob, relative error of all gradients together)."""
    assert set(a) == set(b)
    logprobs = [float((a[n] - b[n]).abs().max()) for n in a if n.startswith("logprobs/")]
    gradients = [n for n in a if n.startswith("gradients/")]
    assert logprobs and gradients
    error = sum(float((a[n].double() - b[n].double()).square().sum()) for n in gradients)
    size = sum(float(a[n].double().square().sum()) for n in gradients)
    return max(logprobs), math.sqrt(error / size)


@pytest.fixture(scope="module")
def simulated(recorded: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """OUT of two simulated ranks, shuffled."""
    out = tmp_path_factory.mktemp("simulated") / "out"
    assert main(["replay", str(recorded), "--shuffle-inputs", *KEEP, "--out", str(out)]) == 0
    return out


@pytest.mark.slow
def test_simulated_ranks_and_real_ones_compute_the_same(
    recorded: Path, simulated: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    status = main(["replay", str(recorded), "--shuffle-inputs", "--ranks", "2", *KEEP, "--out", str(out)])
    text = capfd.readouterr().out
    assert status == 0, text
    logprobs, gradients = difference(
        load_file(simulated / "outputs.safetensors"), load_file(out / "outputs.safetensors")
    )
    assert logprobs == 0.0 and gradients < 1e-6
    where = ("step", "rank", "index", "status", "loss")
    assert [[r[k] for k in where] for r in rows_of(out)] == [
        [r[k] for k in where] for r in rows_of(simulated)
    ]
    assert sorted(row["index"] for row in rows_of(out)) == list(range(6))
    for real, other in zip(rows_of(out), rows_of(simulated), strict=True):
        assert real["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5)
    own = [json.loads(x)["index"] for x in (out / "rank-1/results.jsonl").read_text().splitlines()]
    assert own == [row["index"] for row in rows_of(out) if row["rank"] == 1]
    ranks = summary_of(out)["ranks"]
    assert ranks["desync"] is None and ranks["notes"] == [] and ranks["statement"] == "2 ranks on cpu, gloo"
    assert "no-input" in [finding["kind"] for finding in ranks["findings"]]
    assert ranks["mixed_weights"] == summary_of(simulated)["ranks"]["mixed_weights"] > 0
    assert summary_of(out)["counts"]["ok"] == 6 and summary_of(out)["differences"]["logprob_max"] == 0.0
    assert text.rstrip().splitlines()[-1].startswith("replay: 6 of 6 inputs replayed")


def test_gradients_of_simulated_ranks_are_those_of_the_inputs_added_up(
    recorded: Path, simulated: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert main(["replay", str(recorded), *KEEP, "--out", str(out), "--quiet"]) == 0
    alone, together = load_file(out / "outputs.safetensors"), load_file(simulated / "outputs.safetensors")
    logprobs, gradients = difference(alone, together)
    assert logprobs == 0.0 and gradients < 1e-6
    assert sorted(summary_of(simulated)["outputs"]["gradient_inputs"]) == list(range(6))


def test_gradients_over_different_weights_are_told(recorded: Path, simulated: Path, tmp_path: Path) -> None:
    updates: dict[int, set[int]] = {}
    for row in rows_of(simulated):
        updates.setdefault(row["step"], set()).add(row["update"])
    mixed = sum(len(each) > 1 for each in updates.values())  # each update has its own weights stored
    found, log = summary_of(simulated), (simulated / "replay.log").read_text()
    assert mixed and found["ranks"]["mixed_weights"] == mixed
    steps = f"{mixed} step{'s' if mixed > 1 else ''}"
    assert found["verdict"].endswith(f"; gradients of {steps} are sums over DIFFERENT weights")
    assert log.count(f"mixed weights in {mixed} of {len(updates)} steps") == 1
    for name, flags in (
        ("own", ["--simulate", "--ranks", "2"]),  # the recorded steps: one set of weights each
        ("one", ["--shuffle-inputs", "--steps", "1:2"]),
        ("forward", ["--shuffle-inputs", "--no-backward"]),  # no gradients, no sum
        ("fixed", ["--shuffle-inputs", "--optimizer-step"]),  # those of the first input for all
    ):
        out = tmp_path / name
        assert main(["replay", str(recorded), *flags, "--quiet", "--out", str(out)]) == 0
        assert summary_of(out)["ranks"]["mixed_weights"] == 0
        assert "DIFFERENT weights" not in summary_of(out)["verdict"]
        assert "mixed weights" not in (out / "replay.log").read_text()


@pytest.mark.exhaustive
def test_without_the_guard_steps_mix_and_the_deadline_ends_it_with_a_diagnosis(
    recorded: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    flags = ["--shuffle-inputs", "--ranks", "2", "--no-guard", "--rank-timeout", "4", "--out", str(out)]
    assert main(["replay", str(recorded), *flags]) == 1
    text, found = capfd.readouterr().out, summary_of(out)
    # rank 1 skips step 1, so its step 2 meets rank 0's step 1: no collective has noticed
    assert "gradients of DIFFERENT steps were added up (rank 0 at step 1, rank 1 at step 2)" in text
    assert "ranks are out of step" in found["ranks"]["desync"]
    assert re.search(r"rank 1: step 4: the end", found["ranks"]["desync"])
    assert found["counts"]["desync"] == 1 and "OUT OF STEP" in found["verdict"]
    assert {row["status"] for row in rows_of(out)} == {"ok", "desync", "skipped"}


def poisoned(path: Path) -> Path:
    """Input 1 has advantages that are not finite: its loss is refused."""
    recording = record_steps(path, attention="sdpa")
    bad = recording.inputs[1]
    batch: Any = bad.batch
    nan = torch.where(batch.loss_mask, torch.inf, batch.advantages)
    recording.inputs[1] = dataclasses.replace(bad, batch=dataclasses.replace(batch, advantages=nan))
    return write(recording, path)


@pytest.mark.parametrize("ranks", [["--simulate"], pytest.param([], marks=pytest.mark.slow)])
def test_an_input_that_fails_on_one_rank_leaves_its_step_without_gradients(
    tmp_path: Path, ranks: list[str]
) -> None:
    path, out = poisoned(tmp_path / "recording"), tmp_path / "out"
    assert main(["replay", str(path), "--ranks", "2", *ranks, *KEEP, "--out", str(out)]) == 1
    found = {row["index"]: row for row in rows_of(out)}
    assert {index: row["status"] for index, row in found.items()} == {
        index: "failed" if index == 1 else "ok" for index in range(6)
    }
    # round robin: (0, 1), (2, -) | (3, 4), (5, -)
    assert found[0]["step"] == found[1]["step"] == 0 and found[0]["grad_norm"] is None
    assert found[2]["grad_norm"] > 0 and found[4]["grad_norm"] == found[3]["grad_norm"]
    assert sorted(summary_of(out)["outputs"]["gradient_inputs"]) == [2, 3, 4, 5]
    assert any("step 0 has no gradients" in note for note in summary_of(out)["ranks"]["notes"])
    log = found[1]["error"]["log"]
    assert "TrainError" in (out / log).read_text()


@pytest.mark.exhaustive
def test_optimizer_steps_on_ranks_move_all_ranks_alike(recorded: Path, tmp_path: Path) -> None:
    flags = ["--steps", "0:1", "--ranks", "2", "--optimizer-step", *KEEP]
    first, second = tmp_path / "real", tmp_path / "simulated"
    assert main(["replay", str(recorded), *flags, "--out", str(first)]) == 0
    assert main(["replay", str(recorded), *flags, "--simulate", "--out", str(second)]) == 0
    logprobs, gradients = difference(
        load_file(first / "outputs.safetensors"), load_file(second / "outputs.safetensors")
    )
    assert logprobs < 1e-6 and gradients < 1e-6
    assert summary_of(first)["differences"]["logprob_max"] > 1e-6  # step 1 ran with weights that had moved


def children(pid: int) -> dict[int, int]:
    """rank -> pid of a launcher's ranks."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            if parent != pid:
                continue
            environment = (path.parent / "environ").read_bytes().split(b"\0")
        except (FileNotFoundError, PermissionError, ProcessLookupError):
            continue
        rank = next((int(x[5:]) for x in environment if x.startswith(b"RANK=")), None)
        if rank is not None:
            found[rank] = int(path.parent.name)
    return found


@pytest.mark.slow
def test_a_killed_rank_ends_the_replay_and_is_named(recorded: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = subprocess.Popen(
        [*PYTHON, "replay", str(recorded), "--ranks", "2", "--out", str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert wait_for((out / "rank-1").exists, seconds=300)
        pids = children(process.pid)
        os.kill(pids[1], signal.SIGKILL)
        _, text = process.communicate(timeout=300)
        assert process.returncode == 128 + 9
        # how far it got by then, and so how rank 0 learns of it, depends on the machine
        assert re.search(r"^lockstep: rank 1 of 2 was killed by SIGKILL; last seen at ", text, re.MULTILINE)
        assert re.search(r"^rank 0 .*; last seen at ", text, re.MULTILINE)
        assert wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids.values()), seconds=60)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate(timeout=30)


@pytest.mark.exhaustive
@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
def test_the_same_command_runs_under_other_launchers(
    recorded: Path, simulated: Path, tmp_path: Path, launcher: str
) -> None:
    if launcher == "deepspeed":
        pytest.importorskip("deepspeed")
        start = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_accelerators", "2"]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        start += ["--master_port", str(port), "--module", "lockstep"]
    else:
        start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
        start += ["-m", "lockstep"]
    out = tmp_path / "out"
    command = [*start, "replay", str(recorded), "--shuffle-inputs", "--ranks", "2", *KEEP, "--out", str(out)]
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    logprobs, gradients = difference(
        load_file(simulated / "outputs.safetensors"), load_file(out / "outputs.safetensors")
    )
    assert logprobs == 0.0 and gradients < 1e-6


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_zero_stages_on_two_ranks_with_unequal_counts(recorded: Path, tmp_path: Path, stage: int) -> None:
    """Stage 1 has the gradients of stage 0 until the optimizer's step, which this replay does not take."""
    pytest.importorskip("deepspeed")
    flags = ["--steps", "0:1", "--shuffle-inputs", *KEEP]
    local, out = tmp_path / "local", tmp_path / "zero"
    assert main(["replay", str(recorded), *flags, "--out", str(local)]) == 0
    zero = ["--ranks", "2", "--zero-stage", str(stage), "--out", str(out)]
    assert main(["replay", str(recorded), *flags, *zero]) == 0
    logprobs, gradients = difference(
        load_file(local / "outputs.safetensors"), load_file(out / "outputs.safetensors")
    )
    assert logprobs < 1e-5 and gradients < 1e-5
    assert summary_of(out)["ranks"]["findings"][0]["kind"] == "no-input"
    assert sorted(summary_of(out)["outputs"]["gradient_inputs"]) == [0, 1, 2]


def test_another_number_of_ranks_than_the_launchers_is_refused(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from lockstep.errors import ConfigError
    from lockstep_lab.cli.replay import parse
    from lockstep_lab.replay.ranks import rank_options

    _, options = parse([str(recorded), "--ranks", "3"])
    context: Any = type("Context", (), {"world_size": 2, "device": torch.device("cpu")})()
    with raises(ConfigError, "contradiction: --ranks"):
        rank_options(options, context)
