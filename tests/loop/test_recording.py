"""Runs that are recorded: what is on the disk is what the policy was fed, and it gives the same numbers."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from loop_runs import FORWARD, Commands, everything, kill, metrics_of
from raising import raises
from selected import exhaustive

from lockstep import loops
from lockstep.algorithms import ALGORITHMS
from lockstep.cli.main import main
from lockstep.config.algorithm import GRPOConfig, SFTConfig
from lockstep.config.load import load_run
from lockstep.config.model import ModelConfig
from lockstep.config.train import TrainConfig
from lockstep.errors import TrainError
from lockstep.models.load import load_model
from lockstep.observe.run_history import read_lines
from lockstep.recording import Recording
from lockstep.recording.weights import find_weights, load_weights
from lockstep.schema.batch import PolicyBatch
from lockstep.schema.recording import RecordedInput
from lockstep.train.local import LocalBackend
from lockstep.train.loss_module import require_finite

BASE: dict[str, Any] = {
    "steps": 3,
    "log.display": "off",
    "eval.before": False,
    "eval.after": False,
    "eval.every": 0,
    "checkpoint.every": 0,
    "record.enabled": True,
    "record.weights": "every 1",
}

Train = Callable[..., Path]


@pytest.fixture(scope="module")
def train(tiny_toml: Path, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """The folder of a recorded run with these overrides; each is run once."""
    known: dict[str, Path] = {}

    def run(**overrides: Any) -> Path:
        given = BASE | {name.replace("__", "."): value for name, value in overrides.items()}
        key = repr(sorted(given.items()))
        if key not in known:
            folder = tmp_path_factory.mktemp("runs") / "run"
            loops.train(load_run(tiny_toml, overrides=given | {"run_dir": str(folder)}))  # type: ignore[arg-type]
            known[key] = folder
        return known[key]

    return run


def by_update(inputs: Sequence[RecordedInput]) -> list[list[RecordedInput]]:
    return [list(group) for _, group in itertools.groupby(inputs, key=lambda each: each.meta.update)]


def again(recording: Recording, inputs: Sequence[RecordedInput], *, folder: Path) -> None:
    """The inputs of one optimizer step through a new model with the recorded settings: every bit agrees."""
    header = recording.header
    model = load_model(
        ModelConfig.model_validate_json(json.dumps(header.model)),
        attention=header.axes["attention"],
        device=torch.device(header.axes["device"]),
    )
    assert load_weights(model.module, folder) == inputs[0].meta.weights
    names = ("execution", "layout", "padding_side", "static_capacity", "activation_checkpointing")
    backend = LocalBackend(
        TrainConfig(**{name: header.axes[name] for name in names}),
        model=model,
        total_steps=1,
        temperature=header.temperature,
    )
    config: Any = SFTConfig if header.algorithm["name"] == "sft" else GRPOConfig
    options = config.model_validate_json(json.dumps(header.algorithm))
    more = {} if header.max_tokens is None else {"max_tokens": header.max_tokens}
    loss = ALGORITHMS.load(options.name)(options, **more).loss()
    if inputs[0].rng is not None:
        torch.set_rng_state(inputs[0].rng)
    stats = backend.forward_backward([each.batch for each in inputs], loss)
    grad_norm = backend.optimizer_step()["grad_norm"]
    for place, each in enumerate(inputs):
        assert each.outputs is not None and each.outputs.logprobs is not None
        assert torch.equal(each.outputs.logprobs, stats.logprobs[place])
        assert each.outputs.entropy is not None and torch.equal(each.outputs.entropy, stats.entropy[place])
        assert each.outputs.loss == float(stats.losses[place])
        assert each.outputs.grad_norm == grad_norm


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two updates of old weights": {"train__minibatches": 2, "train__token_budget": 128},
    "temperature and entropy": {"rollout__sampling__temperature": 0.7, "algorithm__entropy_coef": 0.1},
    "LoRA with dropout": {"model__lora": {"rank": 4, "dropout": 0.2}},
    "KL in the loss": {"algorithm__kl__coef": 0.1},
    "gspo": {"algorithm__name": "gspo"},
    "static capacity": {"train__static_capacity": True, "train__layout": "packed"},
    "padded": {"train__layout": "padded", "train__padding_side": "left"},
    "varlen, recomputed": {"train__attention": "varlen", "train__activation_checkpointing": True},
    "bfloat16": {"model__dtype": "bfloat16"},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_input_gives_what_it_gave_to_the_bit(variant: str, train: Train) -> None:
    run = train(**VARIANTS[variant])
    recording = Recording.open(run)
    updates = by_update(list(recording))
    per_step = VARIANTS[variant].get("train__minibatches", 1)
    assert len(updates) == 3 * per_step and max(map(len, updates)) > 1
    for number, inputs in enumerate(updates):
        metas = [each.meta for each in inputs]
        assert {m.update for m in metas} == {number} and {m.step for m in metas} == {number // per_step}
        assert [m.micro_batch for m in metas] == list(range(len(inputs)))
        assert {m.num_micro_batches for m in metas} == {len(inputs)}
        assert {m.outcome for m in metas} == {"finished"}
        folder = find_weights(recording.path, metas[0])
        if number % per_step:  # later updates of a step: other weights, which are not stored
            assert folder is None and metas[0].checkpoint is None
            assert metas[0].weights != updates[number - 1][0].meta.weights
        else:
            assert metas[0].checkpoint == f"weights/step-{number // per_step:06d}" and folder is not None
            again(recording, inputs, folder=folder)


def test_another_weight_or_input_would_be_seen(train: Train) -> None:
    """The comparison above can fail."""
    recording = Recording.open(train())
    updates = by_update(list(recording))
    folder = recording.path / "weights" / "step-000001"
    with pytest.raises(AssertionError):
        again(recording, updates[2], folder=folder)
    ids = updates[1][0].batch.token_ids.clone()
    ids[3] = (ids[3] + 1) % 256
    batch = dataclasses.replace(updates[1][0].batch, token_ids=ids)
    with pytest.raises(AssertionError):
        again(recording, [dataclasses.replace(updates[1][0], batch=batch), *updates[1][1:]], folder=folder)


def test_the_recording_knows_what_the_rollouts_say(train: Train) -> None:
    run = train(algorithm__overlong={"penalty": 1.0})
    recording = Recording.open(run)
    for step in range(3):
        rows = read_lines(run / "rollouts" / f"step-{step:06d}.jsonl")
        inputs = [each for each in recording if each.meta.step == step]
        seen: set[int] = set()
        for each in inputs:
            assert isinstance(each.batch, PolicyBatch)
            parts = zip(
                each.batch.sample_ids,
                each.batch.split(each.batch.token_ids),
                each.batch.split(each.batch.rollout_logprobs),
                each.meta.documents,
                strict=True,
            )
            for sample, ids, logprobs, document in parts:
                row = rows[sample]
                seen.add(sample)
                assert ids.tolist() == row["prompt_token_ids"] + row["token_ids"]
                trained = logprobs[len(row["prompt_token_ids"]) - 1 : -1]
                assert trained.tolist() == pytest.approx(row["rollout_logprobs"], abs=1e-6)
                for name in ("prompt_index", "sample", "reward", "rewards", "finish_reason", "seed"):
                    assert document[name] == row[name], name
        assert seen == set(range(len(rows)))
    total = [sum(each.outputs.loss for each in group) for group in by_update(list(recording))]  # type: ignore
    assert total == pytest.approx([row["loss"] for row in metrics_of(run)], abs=1e-9)


def test_the_header_is_the_resolved_run(train: Train) -> None:
    run = train(train__static_capacity=True, train__layout="packed")
    header, manifest = Recording.open(run).header, json.loads((run / "manifest.json").read_text())
    for name in ("backend", "engine", "attention", "execution", "layout", "device", "dtype"):
        assert header.axes[name] == manifest["axes"][name] != "auto"
    assert header.model["dtype"] == "float32" and header.vocab_size == 256
    assert header.algorithm["aggregation"] == "sequence_mean" and header.max_tokens == 16
    assert header.capacity == {"token_budget": 256, "max_seqlen": 48, "max_documents": 16}
    for each in Recording.open(run):
        assert each.batch.num_slots in (64, 128, 192, 256) and each.batch.max_seqlen == 48


def test_recording_changes_nothing(train: Train, tiny_toml: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    overrides = BASE | {"record.enabled": False, "run_dir": str(run)}
    loops.train(load_run(tiny_toml, overrides=overrides))  # type: ignore[arg-type]
    assert everything(run) == everything(train())
    assert not (run / "recordings").exists()
    assert all("time/record" not in row for row in read_lines(run / "metrics.jsonl"))
    assert all(row["time/record"] > 0 for row in read_lines(train() / "metrics.jsonl"))


def test_a_range_of_steps_and_every_third_input(train: Train) -> None:
    every = Recording.open(train(train__token_budget=128))
    some = Recording.open(
        train(train__token_budget=128, record__first_step=1, record__last_step=7, record__every=3)
    )
    wanted = [each for number, each in enumerate(every) if number % 3 == 0 and each.meta.step >= 1]
    assert [m.key for m in some.metas] == [each.meta.key for each in wanted] and len(wanted) >= 2
    for ours, theirs in zip(some, wanted, strict=True):
        assert torch.equal(ours.batch.token_ids, theirs.batch.token_ids)
        assert ours.outputs is not None and theirs.outputs is not None
        assert ours.outputs.loss == theirs.outputs.loss
        assert ours.meta.num_micro_batches == theirs.meta.num_micro_batches


def test_weights_first_and_none(train: Train) -> None:
    first = Recording.open(train(record__weights="first", record__first_step=1))
    assert [p.name for p in (first.path / "weights").iterdir()] == ["step-000001"]
    assert {m.checkpoint for m in first.metas if m.step == 1} == {"weights/step-000001"}
    assert {m.checkpoint for m in first.metas if m.step == 2} == {None}
    none = Recording.open(train(record__weights="none", checkpoint__every=1, checkpoint__keep_last=9))
    assert not (none.path / "weights").exists()
    assert {m.checkpoint for m in none.metas if m.step == 0} == {None}  # the model itself
    assert {m.checkpoint for m in none.metas if m.step == 2} == {"../checkpoints/step-000002"}
    for inputs in by_update(list(none))[1:]:
        folder = find_weights(none.path, inputs[0].meta)
        assert folder is not None
        again(none, inputs, folder=folder)


def test_what_a_step_failed_on_is_there(tiny_toml: Path, tmp_path: Path, monkeypatch: Any) -> None:
    def check(losses: Any, batches: Any, *, step: int) -> None:
        require_finite([*losses[:-1], losses[-1] * (math.nan if step == 1 else 1.0)], batches, step=step)

    monkeypatch.setattr("lockstep.train.base.require_finite", check)
    run = load_run(tiny_toml, overrides=BASE | {"run_dir": str(tmp_path / "run")})
    with raises(TrainError, "not-finite", step=1, micro_batch=1):
        loops.train(run)  # type: ignore[arg-type]
    recording = Recording.open(tmp_path / "run")
    assert {m.outcome for m in recording.metas if m.step == 0} == {"finished"}
    failed = [each for each in recording if each.meta.step == 1]
    assert len(failed) == failed[0].meta.num_micro_batches > 1
    for each in failed:
        assert each.meta.outcome == "failed" and each.outputs is None
        assert each.meta.error is not None and each.meta.error.startswith("TrainError: step 1, micro-batch")
        assert each.batch.num_tokens > 0


# --- killed, resumed ----------------------------------------------------------------------------------------


def contents(run: Path) -> list[Any]:
    """Everything that a recording says, but when it was made."""
    found: list[Any] = []
    for each in Recording.open(run):
        tensors = {f"batch.{f.name}": getattr(each.batch, f.name) for f in dataclasses.fields(each.batch)}
        assert each.outputs is not None
        tensors |= {
            f"outputs.{f.name}": getattr(each.outputs, f.name) for f in dataclasses.fields(each.outputs)
        }
        plain = {n: v.tolist() if isinstance(v, torch.Tensor) else v for n, v in tensors.items()}
        plain["rng"] = None if each.rng is None else each.rng.tolist()
        plain["outputs.fingerprints"] = dict(plain["outputs.fingerprints"])
        meta = dataclasses.replace(each.meta, time=0.0)
        found.append((meta, plain))
    weights = Path(run, "recordings", "weights")
    return [found, {f.parent.name: f.read_bytes() for f in sorted(weights.glob("*/*"))}]


BEGIN = "lockstep.recording.writer:RecordingWriter.begin"
FINISH = "lockstep.recording.writer:RecordingWriter.finish"
FLUSH = "lockstep.recording.writer:RecordingWriter._flush"
WEIGHTS = "lockstep.recording.recorder:save_weights"
MOMENTS = [
    [kill(FORWARD, step=0, when="backward"), kill(FORWARD, step=2), kill(FORWARD, step=3, when="backward")],
    [kill(BEGIN, step=2), kill(BEGIN, step=2, when="after"), kill(FINISH, step=3)],
    [kill(FINISH, step=2, when="after"), kill(FLUSH)],
    [kill(WEIGHTS, step=0, when="after"), kill(FORWARD, step=2, when="backward")],
]
RECORD = ("--record", "--record-weights", "every 2")


SOME_OF_LORA = (
    *("--record.every", "2", "--train.token-budget", "128"),
    *("--model.lora.rank", "4", "--model.lora.dropout", "0.1"),
)


@pytest.fixture(scope="module", params=[(), SOME_OF_LORA], ids=["all", "some of LoRA"])
def undisturbed(
    request: pytest.FixtureRequest, lockstep: Commands, tiny_toml: Path, tmp_path_factory: Any
) -> tuple[tuple[str, ...], list[Any]]:
    """Flags, and what a run with them records."""
    folder, flags = tmp_path_factory.mktemp("undisturbed"), (*RECORD, *request.param)
    lockstep("train", tiny_toml, "--run-dir", folder / "run", *flags, cwd=folder)
    return flags, contents(folder / "run")


@pytest.mark.slow
@pytest.mark.parametrize("moments", exhaustive(MOMENTS, quick=MOMENTS[:1]))
def test_a_run_killed_and_resumed_records_the_same(moments, undisturbed, lockstep, tiny_toml, tmp_path):
    flags, expected = undisturbed
    lockstep.broken_off(tiny_toml, tmp_path / "run", moments, *flags)
    assert contents(tmp_path / "run") == expected


def test_the_input_that_killed_the_process_is_there(lockstep, tiny_toml, tmp_path):
    orders = [kill(FORWARD, call=2, step=1, when="backward")]
    argv = ("train", tiny_toml, "--run-dir", tmp_path / "run", "--record")
    lockstep(*argv, cwd=tmp_path, signals=orders, code=-9)
    recording = Recording.open(tmp_path / "run")
    pending = [each for each in recording if each.meta.step == 1]
    assert len(pending) == pending[0].meta.num_micro_batches > 1
    assert all(each.meta.outcome == "pending" and each.outputs is None for each in pending)
    assert all(len(each.meta.documents) == len(each.batch.sample_ids) for each in pending)


def test_recording_can_begin_when_a_run_is_resumed(tiny_toml: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    quiet = ("--log.display", "off")
    assert main(["train", str(tiny_toml), "--run-dir", str(run), "--steps", "2", *quiet]) == 0
    assert main(["train", "--resume", str(run), "--steps", "4", "--record", *quiet]) == 0
    recording = Recording.open(run)
    assert {m.step for m in recording.metas} == {2, 3}
    assert [p.name for p in (recording.path / "weights").iterdir()] == ["step-000002"]


# --- SFT ----------------------------------------------------------------------------------------------------


def test_sft_gives_what_it_gave_to_the_bit(sft_toml: Path, tmp_path: Path) -> None:
    overrides = {"run_dir": str(tmp_path / "run"), "log.display": "off", "steps": 3}
    overrides |= {"record.enabled": True, "record.weights": "every 1"}
    loops.train(load_run(sft_toml, overrides=overrides))  # type: ignore[arg-type]
    recording = Recording.open(tmp_path / "run")
    assert recording.header.algorithm["name"] == "sft" and recording.header.max_tokens is None
    assert Path(recording.header.model["name"]).is_absolute()
    updates = by_update(list(recording))
    assert len(updates) == 3 and max(map(len, updates)) > 1
    for inputs in updates:
        folder = find_weights(recording.path, inputs[0].meta)
        assert folder is not None
        again(recording, inputs, folder=folder)
