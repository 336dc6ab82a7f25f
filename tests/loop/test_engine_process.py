"""engine.process = "separate": the runs equal those with native in the trainer's process, to the bit."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from loop_runs import TINY, metrics_of
from safetensors.torch import load_file
from starting import succeeds

from lockstep import loops
from lockstep.config.load import build, parse_toml
from lockstep.config.run import GRPORun
from lockstep.engine.remote.driver import EventStreams
from lockstep.engine.remote.http import Unreachable
from lockstep.observe.metrics import check_ledger
from lockstep.observe.run_history import read_lines

pytestmark = pytest.mark.slow
STEPS = 3
KINDS = {"grpo": TINY, "ppo": TINY.replace('kind = "grpo"', 'kind = "ppo"') + "[value]\nlr = 1e-2\n"}


def run_of(kind: str, run_dir: Path, **engine: Any) -> GRPORun:
    values = parse_toml(KINDS[kind].encode(), origin="test") | {"steps": STEPS, "run_dir": str(run_dir)}
    values["train"] |= {"batch_invariant": True, "device": "cpu", "minibatches": 2}
    values["engine"] = {"name": "native", **engine}
    values["log"] |= {"display": "off"}
    run = build(values, origin="test")
    assert isinstance(run, GRPORun)
    return run


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The run directory of a kind of run whose engine is in the trainer's process."""
    made: dict[str, Path] = {}

    def of(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind) / "run"
            loops.train(run_of(kind, made[kind]))
        return made[kind]

    return of


def weights(run: Path) -> dict[str, bytes]:
    """The last checkpoint's tensors, the optimizer's among them, and the exported ones."""
    final = max((run / "checkpoints").glob("step-*"))
    files = [*sorted(final.rglob("*.safetensors")), *sorted(run.glob("export*/*.safetensors"))]
    assert files
    return {
        f"{file.parent.name}/{file.name}/{name}": tensor.numpy().tobytes()
        for file in files
        for name, tensor in load_file(file).items()
    }


def rollouts(run: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in sorted((run / "rollouts").iterdir())}


def engine_metrics(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "engine/restarts" in line]


@pytest.mark.parametrize("kind", list(KINDS))
def test_it_trains_to_the_bit_as_in_the_trainers_process(kind, embedded, tmp_path):
    run, reference = tmp_path / "run", embedded(kind)
    loops.train(run_of(kind, run, process="separate", verify="always"))
    assert metrics_of(run) == metrics_of(reference)
    assert rollouts(run) == rollouts(reference)
    assert weights(run) == weights(reference)
    steps = engine_metrics(run)
    assert len(steps) == STEPS
    for step in steps:
        assert step["logprob_gap_max"] == 0.0 and step["contract_verified"] == 1.0
        assert step["engine/restarts"] == 0.0
    ours, theirs = (json.loads((r / "manifest.json").read_text()) for r in (run, reference))
    assert ours["contract"] == theirs["contract"] is not None
    assert ours["engine"]["where"] == "in its own process" and ours["engine"]["transport"] == "disk"


def test_a_server_that_is_killed_in_a_batch_costs_no_bit(embedded, tmp_path, monkeypatch):
    """Killed when 5 of the second step's 16 samples have come; what is on its way is lost."""
    poll, seen, killed = EventStreams.poll, [], []

    def cut(self: EventStreams, seconds: float) -> Any:
        events = poll(self, seconds)
        for number, (key, event) in enumerate(events):
            if isinstance(event, bytes) and json.loads(event)["policy_version"] == 1:
                seen.append(event)
                if len(seen) == 5:
                    info = self._client.get("/info", seconds=60.0).object()
                    os.kill(info["pid"], signal.SIGKILL)
                    killed.append(info["pid"])
                    return [
                        *events[: number + 1],
                        (key, Unreachable("the server was killed", code="unreachable")),
                    ]
        return events

    monkeypatch.setattr(EventStreams, "poll", cut)
    run, reference = tmp_path / "run", embedded("grpo")
    loops.train(run_of("grpo", run, process="separate", verify="off"))
    assert len(killed) == 1
    assert [step["engine/restarts"] for step in engine_metrics(run)] == [0.0, 1.0, 1.0]
    assert rollouts(run) == rollouts(reference)
    assert weights(run) == weights(reference)
    attempts = Counter((row["step"], row["attempt"]) for row in read_lines(run / "ledger.jsonl"))
    assert attempts == {(0, 1): 16, (1, 1): 5, (1, 2): 11, (2, 1): 16}
    found = check_ledger(run)
    assert (found.trained, found.asked_again, found.problems) == (48, 11, ())
    # A prompt is computed again for those of its samples that were missing.
    again = "rollout/cached_tokens"
    ours, theirs = (
        [{k: v for k, v in row.items() if k != again} for row in metrics_of(r)] for r in (run, reference)
    )
    assert ours == theirs


def test_replicas_share_the_samples_and_keep_the_bits(embedded, tmp_path):
    run, reference = tmp_path / "run", embedded("grpo")
    loops.train(run_of("grpo", run, process="separate", replicas=2, transfer="collective"))
    assert rollouts(run) == rollouts(reference)
    assert weights(run) == weights(reference)


HOOK = """
import json, os, signal
from pathlib import Path
from lockstep.algorithms.policy_loss import clipped_objective as objective
from lockstep.engine.remote.http import Unreachable
from lockstep.engine.remote.driver import EventStreams

poll, seen = EventStreams.poll, []

def cut(self, seconds):
    events = poll(self, seconds)
    for number, (key, event) in enumerate(events):
        if isinstance(event, bytes) and json.loads(event)["policy_version"] == 1:
            seen.append(event)
            if len(seen) == 3:
                os.kill(self._client.get("/info", seconds=60.0).object()["pid"], signal.SIGKILL)
                Path("killed").touch()
                died = Unreachable("the server was killed", code="unreachable")
                return [*events[: number + 1], (key, died)]
    return events

if os.environ.get("RANK") == "1":
    EventStreams.poll = cut
"""
"""Kills the server of rank 1 when 3 of the second step's samples have come from it."""


@pytest.mark.exhaustive
def test_ranks_have_an_engine_each_and_keep_the_bits_when_one_is_killed(tmp_path):
    """Its weights are spread over both ranks: the other one helps to send them again."""
    toml = KINDS["grpo"].replace(
        "[train]", '[train]\nbackend = "fsdp2"\nbatch_invariant = true\ndevice = "cpu"'
    )
    (tmp_path / "run.toml").write_text(toml + '[engine]\nname = "native"\n')
    (tmp_path / "hook.py").write_text(HOOK)
    for process in ("auto", "own"):
        argv = ["train", "run.toml", "--ranks", "2", "--steps", "3", "--run-dir", process]
        argv += ["--algorithm.objective", "hook:objective", "--engine.process", process]
        succeeds(*argv, cwd=tmp_path, seconds=600)
    own, auto = tmp_path / "own", tmp_path / "auto"
    assert (tmp_path / "killed").exists()
    assert sorted(folder.name for folder in (own / "engine").iterdir()) == ["rank-0", "rank-1"]
    assert [step["engine/restarts"] for step in engine_metrics(own)] == [0.0, 1.0, 1.0]
    attempts = Counter((row["step"], row["attempt"]) for row in read_lines(own / "ledger.jsonl"))
    assert attempts == {(0, 1): 16, (1, 1): 11, (1, 2): 5, (2, 1): 16}
    again = "rollout/cached_tokens"  # a prompt is computed again for those of its samples that were missing
    ours, theirs = (
        [{k: v for k, v in row.items() if k != again} for row in metrics_of(r)] for r in (own, auto)
    )
    assert ours == theirs
    assert rollouts(own) == rollouts(auto)
    assert weights(own) == weights(auto)
