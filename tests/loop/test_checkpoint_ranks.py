"""Four real ranks save and load together; what each case is, is in checkpoint_worker.py."""

from __future__ import annotations

import ast
import json
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lockstep.cli.common_model import read_checkpoint
from lockstep.config.model import ModelConfig
from lockstep.config.train import CheckpointConfig, TrainConfig
from lockstep.loop.checkpoint import CheckpointManager
from lockstep.loop.checkpoint_files import verify
from lockstep.models.load import load_model
from lockstep.ranks.launch import launch_command
from lockstep.train.local import LocalBackend
from lockstep.train.state.files import write_tensors
from lockstep.train.state.index import rank_file

WORKER = Path(__file__).with_name("checkpoint_worker.py")
CASES = [
    element.id
    for node in ast.parse(WORKER.read_text()).body
    if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CASES"
    for element in ast.walk(node.value)
    if isinstance(element, ast.Name)
]


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Case to the ranks on which it held; all cases in one launch, for each costs a start of torch."""
    out = tmp_path_factory.mktemp("ranks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUT", str(out))
        launch_command([sys.executable, str(WORKER)], ranks=4, timeout=200, log_dir=out / "logs")
    found: dict[str, list[str]] = {}
    for file in sorted(out.glob("rank-*.txt")):
        for line in file.read_text().splitlines():
            found.setdefault(line.split()[0], []).append(file.stem)
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", CASES)
def test_four_ranks(case: str, held: dict[str, list[str]]) -> None:
    assert held.get(case) == [f"rank-{rank}" for rank in range(4)], "the rank's error is shown above"


@pytest.mark.slow
def test_a_rank_that_is_killed_leaves_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    command = [sys.executable, str(WORKER), "killed"]
    assert launch_command(command, ranks=2, timeout=120, log_dir=tmp_path / "logs") != 0
    assert "rank 1" in capfd.readouterr().err and not list(tmp_path.glob("rank-*.txt"))
    folder = tmp_path / "killed"
    assert len(list(folder.glob(".saving-step-000002-*/*"))) > 0
    checkpoints = CheckpointManager(folder, CheckpointConfig(background=False))
    assert [p.name for p in folder.iterdir()] == ["step-000001"] and checkpoints.steps() == [1]
    verify(folder / "step-000001")


def test_weights_of_several_files_are_read_for_sampling(tmp_path: Path) -> None:
    """As two ranks write them: half of the tensors each."""
    config = ModelConfig(name="shape:tiny-llama", dtype="float32")
    model, other = (load_model(config, attention="sdpa", device=torch.device("cpu")) for _ in range(2))
    LocalBackend(TrainConfig(), model=model, total_steps=0).save(tmp_path)()
    weights = load_file(tmp_path / "model.safetensors")
    state = json.loads((tmp_path / "state.json").read_text())
    (tmp_path / "model.safetensors").unlink()
    shares = {name: number % 2 for number, name in enumerate(weights)}
    for rank in range(2):
        file = rank_file("model", "safetensors", rank=rank, size=2)
        own = {name: weights[name] for name, share in shares.items() if share == rank}
        record = write_tensors(tmp_path / file, own)
        generators = rank_file("rng", "safetensors", rank=rank, size=2)
        shutil.copyfile(tmp_path / "rng.safetensors", tmp_path / generators)
        files = {file: asdict(record), generators: state["files"]["rng.safetensors"]}
        if rank == 0:
            names = [rank_file("model", "safetensors", rank=number, size=2) for number in range(2)]
            tensors = {f"model/{name}": names[share] for name, share in shares.items()}
            changed = state | {"world_size": 2, "files": files, "tensors": tensors}
            (tmp_path / "state.json").write_text(json.dumps(changed))
        else:
            listed = {"save_id": state["save_id"], "files": files}
            (tmp_path / "files-00001-of-00002.json").write_text(json.dumps(listed))
    with torch.no_grad():
        for parameter in other.module.parameters():
            parameter.zero_()
    read_checkpoint(other, tmp_path)
    found = dict(other.module.named_parameters())
    assert all(torch.equal(found[name], weight) for name, weight in weights.items())
