"""`lockstep.record` in real runs of other frameworks: the trainers of TRL, DDP, FSDP2, DeepSpeed."""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_parts import (
    documents,
    gradient_error,
    recomputed,
    save_tiny,
    tiny_tokenizer,
    unpadded,
    words,
)
from raising import raises
from safetensors.torch import load_file
from selected import exhaustive, selected
from torch import Tensor
from transformers import AutoModelForCausalLM, TrainerCallback

import lockstep
from lockstep.cli.main import main
from lockstep.errors import RecordingError
from lockstep.recording import Recording

STEPS = 2
WORKER = Path(__file__).with_name("foreign_worker.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"))


class KeepGradients(TrainerCallback):  # type: ignore[misc]
    """Of every optimizer step, as they are before it."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Tensor]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.steps.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})


class Ran:
    """What a trainer's run left."""

    def __init__(self, trainer: Any, gradients: KeepGradients, fed: list[list[list[int]]]) -> None:
        self.losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        self.weights = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
        self.gradients = gradients.steps
        self.fed = fed


def common(tmp_path: Path, **more: Any) -> dict[str, Any]:
    return {
        "output_dir": str(tmp_path / "out"),
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "max_steps": STEPS,
        "logging_steps": 1,
        "save_strategy": "no",
        "max_grad_norm": 0.0,
        "learning_rate": 1e-2,
        "disable_tqdm": True,
        "seed": 0,
        **more,
    }


def run(trainer: Any, directory: Path | None, *, temperature: float, fed: list[list[list[int]]]) -> Ran:
    keep = KeepGradients()
    trainer.add_callback(keep)
    if directory is None:
        trainer.train()
    else:
        with lockstep.record(trainer.model, directory, temperature=temperature):
            trainer.train()
    return Ran(trainer, keep, fed)


def same_runs(plain: Ran, recorded: Ran) -> None:
    assert plain.losses == recorded.losses and len(plain.losses) == STEPS
    assert all(torch.equal(value, recorded.weights[name]) for name, value in plain.weights.items())


def grpo(
    folder: Path, tmp_path: Path, directory: Path | None, *, temperature_recorded: float = 0.8, **more: Any
) -> Ran:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [float(sum(ids) % 7) + 0.1 * len(ids) for ids in completion_ids]

    fed: list[list[list[int]]] = []

    class Watched(GRPOTrainer):  # type: ignore[misc]
        def _compute_loss(self, model: Any, inputs: dict[str, Tensor]) -> Tensor:
            ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
            mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
            fed.append(unpadded(ids, mask))
            return super()._compute_loss(model, inputs)

    config = GRPOConfig(
        **common(
            tmp_path,
            **{
                "per_device_train_batch_size": 4,
                "gradient_accumulation_steps": 2,
                "num_generations": 4,
                "max_completion_length": 8,
                "temperature": 0.8,
                "beta": 0.1,
                "num_iterations": 1,
                "gradient_checkpointing": True,
                **more,
            },
        )
    )
    prompts = Dataset.from_list([{"prompt": words(2 + n, n)} for n in range(6)])
    torch.manual_seed(0)
    trainer = Watched(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        reward_funcs=reward,
        args=config,
        train_dataset=prompts,
        processing_class=tiny_tokenizer(),
    )
    return run(trainer, directory, temperature=temperature_recorded, fed=fed)


def check(directory: Path, fed: list[list[list[int]]], gradients: dict[str, Tensor]) -> Recording:
    """One rank: two updates of two micro-batches; ids, logprobs and the surrogate's gradients."""
    recording = Recording.open(directory)
    assert [checked.problem for checked in recording.validate()] == [None] * 4
    assert [tuple(meta.key) for meta in recording.metas] == [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0)]
    assert {meta.num_micro_batches for meta in recording.metas} == {2}
    assert [documents(one) for one in recording] == fed
    backend = recomputed(recording, [recording[0], recording[1]])
    assert gradient_error(backend.gradients(), gradients) < 1e-5
    return recording


@pytest.mark.slow
def test_trl_grpo(folder: Path, tmp_path: Path) -> None:
    """With a reference model, KL, activation checkpointing, and generation by the same module."""
    plain = grpo(folder, tmp_path, None)
    recorded = grpo(folder, tmp_path, tmp_path / "r")
    same_runs(plain, recorded)
    recording = check(tmp_path / "r", recorded.fed, recorded.gradients[0])
    header = recording.header
    assert (header.framework, header.temperature, header.axes["activation_checkpointing"]) == (
        "trl",
        0.8,
        True,
    )
    assert set(header.notes["skipped_forwards"]) == {"no graph", "decoding with a cache"}
    with raises(RecordingError, "contradiction: temperature"):
        grpo(folder, tmp_path, tmp_path / "other", temperature_recorded=1.0)
    replayed(tmp_path / "r", tmp_path / "replay")


@pytest.mark.exhaustive
def test_trl_grpo_with_several_updates_per_batch(folder: Path, tmp_path: Path) -> None:
    """Old logprobs are computed then, without a graph, by the module that is trained."""
    more = {
        "num_iterations": 2,
        "beta": 0.0,
        "gradient_accumulation_steps": 2,
        "gradient_checkpointing": False,
    }
    plain = grpo(folder, tmp_path, None, **more)
    recorded = grpo(folder, tmp_path, tmp_path / "r", **more)
    same_runs(plain, recorded)
    check(tmp_path / "r", recorded.fed, recorded.gradients[0])


def replayed(recording: Path, out: Path) -> None:
    summary = out.with_suffix(".json")
    assert (
        main(["replay", str(recording), "--max-inputs", "2", "--out", str(out), "--json", str(summary)]) == 0
    )
    rows = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert [row["status"] for row in rows] == ["ok", "ok"]
    assert all(row["logprob_max_difference"] < 1e-4 for row in rows)
    assert json.loads(summary.read_text())["weights"]["matches"] is True


def sft(folder: Path, tmp_path: Path, directory: Path | None, **more: Any) -> Ran:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    fed: list[list[list[int]]] = []

    class Watched(SFTTrainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
            ids, positions = inputs["input_ids"], inputs.get("position_ids")
            if positions is None:
                fed.append(unpadded(ids, inputs["attention_mask"]))
            else:
                starts = (positions[0] == 0).nonzero()[:, 0].tolist()
                bounds = itertools.pairwise([*starts, ids.shape[1]])
                fed.append([ids[0, a:b].tolist() for a, b in bounds])
            return super().compute_loss(model, inputs, *args, **kwargs)

    config = SFTConfig(
        **common(
            tmp_path, per_device_train_batch_size=3, gradient_accumulation_steps=2, max_length=32, **more
        )
    )
    data = [{"prompt": words(2 + n % 3, n), "completion": " " + words(3 + n, 50 + n)} for n in range(12)]
    torch.manual_seed(0)
    trainer = Watched(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        args=config,
        train_dataset=Dataset.from_list(data),
        processing_class=tiny_tokenizer(),
    )
    return run(trainer, directory, temperature=1.0, fed=fed)


@pytest.mark.slow
@pytest.mark.parametrize("packing", exhaustive([False, True], quick=[True]), ids=["padded", "packed"])
def test_trl_sft(folder: Path, tmp_path: Path, packing: bool) -> None:
    more = {"packing": packing, "padding_free": packing, "gradient_checkpointing": not packing}
    plain = sft(folder, tmp_path, None, **more)
    recorded = sft(folder, tmp_path, tmp_path / "r", **more)
    same_runs(plain, recorded)
    recording = check(tmp_path / "r", recorded.fed, recorded.gradients[0])
    first = recording[0].batch
    assert (
        first.loss_weights[first.loss_mask].unique().numel() == 1
    )  # a mean over tokens, of completions only
    assert 0 < int(first.loss_mask.sum()) < first.token_ids.numel() - len(recorded.fed[0])
    replayed(tmp_path / "r", tmp_path / "replay")


WRAPPED = [
    ("ddp", 2),
    ("fsdp2", 2),
    ("ddp-compiled", 2),
    ("deepspeed2", 2),
    ("deepspeed1", 1),
    ("deepspeed0", 1),
]
ONE_OF_TWO = ["ddp", "fsdp2"]
BACKENDS = {"ddp-compiled": "ddp"} | {f"deepspeed{stage}": "deepspeed" for stage in range(3)}


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Number of ranks -> the folder in which one launch has left every run of so many, by name."""
    done: dict[int, Path] = {}

    def of(count: int) -> Path:
        if count not in done:
            done[count] = tmp_path_factory.mktemp(f"on-{count}")
            jobs: list[tuple[str, str, dict[str, Any]]] = [
                (case["kind"], case["kind"], {})
                for case in selected(request, "test_wrapped")
                if case["count"] == count
            ]
            if count == 2:
                ones = [case["kind"] for case in selected(request, "test_one_of_two_ranks_records")]
                jobs[:0] = [(kind, f"{kind}-one", {"ranks": [1]}) for kind in ones]
            for _, name, _ in jobs:
                (done[count] / name).mkdir()
            launch([(kind, str(done[count] / name), options) for kind, name, options in jobs], count)
        return done[count]

    return of


def launch(jobs: list[tuple[str, str, dict[str, Any]]], count: int) -> None:
    """foreign_worker.py on each rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    workers = []
    for rank in range(count):
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
        environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [sys.executable, str(WORKER), json.dumps(jobs)]
        workers.append(
            subprocess.Popen(
                command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    try:
        outputs = [worker.communicate(timeout=600)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    for worker, output in zip(workers, outputs, strict=True):
        assert worker.returncode == 0, output[-6000:]
        assert "FutureWarning: `is_gradient" not in output


def ranks_of(out: Path, count: int) -> list[dict[str, Any]]:
    """What each rank of foreign_worker.py left."""
    return [json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "count"), exhaustive(WRAPPED, quick=[("ddp", 2), ("fsdp2", 2)]))
def test_wrapped(kind: str, count: int, runs: Callable[[int], Path]) -> None:
    """Two updates of two micro-batches on each rank, old logprobs in between, activation checkpointing."""
    place = runs(count) / kind
    results = ranks_of(place, count)
    for result in results:
        assert result["same"] and result["plain"] == result["recorded"]
        assert len(set(result["plain"])) == 4
    recording = Recording.open(place / "recording")
    assert {checked.problem for checked in recording.validate()} == {None}
    keys = [(u, m, r) for u in range(2) for m in range(2) for r in range(count)]
    assert [tuple(meta.key) for meta in recording.metas] == keys
    for (update, micro_batch, rank), one in zip(keys, recording, strict=True):
        assert documents(one) == results[rank]["fed"][2 * update + micro_batch]
    header = recording.header
    assert (header.world_size, header.axes["backend"]) == (
        count,
        BACKENDS.get(kind, kind),
    )
    assert header.axes["execution"] == ("compile" if "compiled" in kind else "eager")
    backend = recomputed(recording, [recording[index] for index in range(2 * count)])
    # each rank's loss is its own, and the frameworks average the gradients over the ranks
    assert header.notes["gradients"] == ("averaged over the ranks" if count > 1 else "as they are")
    own = {name: gradient / count for name, gradient in backend.gradients().items()}
    assert gradient_error(own, load_file(place / "gradients.safetensors")) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("kind", exhaustive(ONE_OF_TWO, quick=["ddp"]))
def test_one_of_two_ranks_records(kind: str, runs: Callable[[int], Path]) -> None:
    place = runs(2) / f"{kind}-one"
    results = ranks_of(place, 2)
    recording = Recording.open(place / "recording")
    assert recording.ranks == (1,) and recording.header.world_size == 2
    assert [documents(one) for one in recording] == results[1]["fed"]
    recomputed(recording, [recording[0], recording[1]])
