"""Logprobs of an asynchronous run, each under the version of the policy that sampled the token."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from raising import raises

from lockstep import loops
from lockstep.cli.main import main
from lockstep.config.load import build
from lockstep.errors import ConfigError, RecordingError
from lockstep.recording import Recording
from lockstep.schema.recording import InputMeta, RecordedInput
from lockstep_lab.replay.cell import Cell, ReplayOptions
from lockstep_lab.replay.versions import (
    VersionsResult,
    check_versions,
    spans_by_version,
    updates_per_step,
)

STEPS = 12
TINY: dict[str, Any] = {
    "kind": "grpo",
    "steps": STEPS,
    "model": {"name": "shape:tiny-llama", "dtype": "float32"},
    "data": {"source": "ids", "max_prompt_tokens": 16},
    "rollout": {
        "prompts_per_step": 4,
        "group_size": 4,
        "max_lag": 2,
        "sampling": {"max_tokens": 48, "temperature": 1.0, "stop_token_ids": list(range(100, 108))},
    },
    "algorithm": {"rollout_correction": {"kind": "tis"}},
    "rewards": [{"name": "ids"}],
    "train": {"lr": 3e-3, "token_budget": 256, "batch_invariant": True, "device": "cpu"},
    "engine": {"name": "native", "max_batch": 12},
    "eval": {"before": False, "after": False},
    "checkpoint": {"every": 4, "keep_last": 9, "export_at_end": False},
    "record": {"enabled": True, "weights": "every 1"},
    "log": {"tensorboard": False, "display": "off"},
}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the weights of every version, and checkpoints of 4, 8 and 12."""
    run = tmp_path_factory.mktemp("versions") / "run"
    loops.train(build(TINY | {"run_dir": str(run)}, origin="test"))
    return run


@pytest.fixture
def copy(recorded: Path, tmp_path: Path) -> Callable[..., Path]:
    """The run, with the weights of these versions and with these checkpoints only."""

    def copy(*, weights: range, checkpoints: tuple[int, ...] = ()) -> Path:
        run = tmp_path / "run"
        shutil.copytree(recorded, run)
        for folder in (run / "recordings" / "weights").iterdir():
            if int(folder.name[5:]) not in weights:
                shutil.rmtree(folder)
        for folder in (run / "checkpoints").glob("step-*"):
            if int(folder.name[5:]) not in checkpoints:
                shutil.rmtree(folder)
        return run

    return copy


class Edited(Recording):
    """A recording whose inputs pass through `edit` when they are read."""

    edit: Callable[[int, RecordedInput], RecordedInput]

    @classmethod
    def of(cls, run: Path, edit: Callable[[int, RecordedInput], RecordedInput]) -> Edited:
        recording = cls.open(run)
        assert isinstance(recording, Edited)
        recording.edit = edit  # type: ignore[method-assign]
        return recording

    def __getitem__(self, index: int) -> RecordedInput:
        return self.edit(index, super().__getitem__(index))


def checked(recording: Recording, **options: Any) -> tuple[VersionsResult, list[str]]:
    cell, said = Cell.of_recording(recording.header, device="cpu"), list[str]()
    return check_versions(recording, ReplayOptions(cell=cell, **options), say=said.append), said


def agrees(result: VersionsResult, *, recomputed: tuple[int, ...]) -> None:
    assert result.ok and result.exact and result.num_differences == 0 and result.max_difference == 0.0
    assert result.versions == tuple(range(STEPS)) and result.recomputed == recomputed
    assert result.samples == STEPS * 16 < result.spans


def test_every_logprob_is_that_of_the_version_that_sampled_it(recorded: Path) -> None:
    recording = Recording.open(recorded)
    result, said = checked(recording)
    agrees(result, recomputed=())
    assert len(said) == STEPS
    ledger = [json.loads(line) for line in (recorded / "ledger.jsonl").read_text().splitlines()]
    assert result.spans == sum(len(row["policy_versions"]) for row in ledger)
    assert result.tokens == sum(int(recorded.batch.loss_mask.sum()) for recorded in recording)


@pytest.mark.exhaustive
def test_versions_between_stored_ones_are_made_by_the_recorded_updates(copy: Callable[..., Path]) -> None:
    result, said = checked(Recording.open(copy(weights=range(0, STEPS, 4))))
    agrees(result, recomputed=(1, 2, 3, 5, 6, 7, 9, 10, 11))
    assert "recomputed from version 0:" in said[11]


@pytest.mark.exhaustive
def test_versions_are_made_from_the_nearest_checkpoint(copy: Callable[..., Path]) -> None:
    """None is stored. Checkpoint 8 holds version 8 itself, which is loaded as it is."""
    result, said = checked(Recording.open(copy(weights=range(0), checkpoints=(8,))))
    agrees(result, recomputed=tuple(v for v in range(STEPS) if v != 8))
    assert "recomputed from version 0:" in said[7] and "step-000008:" in said[8]
    assert "recomputed from version 8:" in said[9]


@pytest.mark.exhaustive
def test_a_changed_logprob_is_found(recorded: Path) -> None:
    def edit(index: int, one: RecordedInput) -> RecordedInput:
        if index != 4:
            return one
        logprobs = one.batch.rollout_logprobs.clone()  # type: ignore[attr-defined]
        slot = int(one.batch.loss_mask.nonzero()[3])
        logprobs[slot] = torch.nextafter(logprobs[slot], torch.tensor(0.0))
        batch: Any = dataclasses.replace(one.batch, rollout_logprobs=logprobs)  # type: ignore[call-arg]
        return dataclasses.replace(one, batch=batch)

    result, said = checked(Edited.of(recorded, edit))
    assert not result.ok and result.num_differences == 1
    version = Edited.of(recorded, edit)[4].meta.documents[0]["spans"][0][0]
    assert "input 4, document 0: token " in said[-1] and f"under version {version}," in said[-1]
    assert result.verdict.endswith("tokens differ, and none should")


def test_spans_that_name_the_next_version_are_found(recorded: Path) -> None:
    def edit(index: int, one: RecordedInput) -> RecordedInput:
        first, *others = one.meta.documents
        moved = first | {"spans": [[min(v + 1, STEPS - 1), n] for v, n in first["spans"]]}
        meta = dataclasses.replace(one.meta, documents=(moved, *others))
        return dataclasses.replace(one, meta=meta) if index == 0 else one

    result, said = checked(Edited.of(recorded, edit), inputs=(0, 1))
    assert not result.ok and "document 0: " in said[-1] and "under version 1," in said[-1]


def test_weights_of_another_version_are_found(copy: Callable[..., Path]) -> None:
    run = copy(weights=range(STEPS))
    weights = run / "recordings" / "weights"
    shutil.copytree(weights / "step-000006", weights / "step-000005", dirs_exist_ok=True)
    with raises(RecordingError, "hash-differs", version=5):
        checked(Recording.open(run))


def test_an_update_that_gives_other_weights_is_found(copy: Callable[..., Path]) -> None:
    """The config of the run is not the one that the weights came from."""
    run = copy(weights=range(0))
    config = run / "config.toml"
    config.write_text(config.read_text().replace("\nlr = 0.003", "\nlr = 0.0031"))
    with raises(RecordingError, "hash-differs", version=1):
        checked(Recording.open(run))


def test_what_cannot_be_made_again_is_refused(copy: Callable[..., Path]) -> None:
    run = copy(weights=range(6, 7), checkpoints=(4,))

    class WithoutStart(Recording):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            chosen = [i for i, meta in enumerate(self.metas) if meta.step >= 4]
            self._inputs = tuple(self._inputs[i] for i in chosen)
            self.metas = tuple(self.metas[i] for i in chosen)
            self.lengths = tuple(self.lengths[i] for i in chosen)

    latest = {"steps": (9, 10)}
    agreeing, _ = checked(WithoutStart.open(run), **latest)
    assert agreeing.ok and agreeing.recomputed
    (run / "checkpoints/step-000004/optimizer.safetensors").unlink()
    with raises(RecordingError, "no-such-file") as caught:
        checked(WithoutStart.open(run), **latest)
    assert "the optimizer's state is missing" in str(caught.value)
    shutil.rmtree(run / "checkpoints")
    with raises(RecordingError, "missing-setting"):
        checked(WithoutStart.open(run), **latest)
    (run / "config.toml").unlink()
    with raises(RecordingError, "no-such-file"):
        checked(WithoutStart.open(run), **latest)


def test_spans_must_be_recorded_and_cover_the_tokens(recorded: Path) -> None:
    def edited(spans: Any) -> Edited:
        def edit(_: int, one: RecordedInput) -> RecordedInput:
            facts = tuple({"spans": spans} if spans else {} for _ in one.meta.documents)
            return dataclasses.replace(one, meta=dataclasses.replace(one.meta, documents=facts))

        return Edited.of(recorded, edit)

    with raises(RecordingError, "missing-field"):
        spans_by_version(edited(None), [0])
    for wrong in ([[0, 1000]], [[0, "1"]], [[-1, 4]], "spans"):
        with raises(RecordingError, "wrong-field"):
            spans_by_version(edited(wrong), [0])


def test_the_command_prints_one_line_and_refuses_other_weights(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["replay", str(recorded), "--versions", "--steps", "5:6", "--quiet"]
    assert main([*command, "--out", str(tmp_path / "out")]) == 0
    line = capsys.readouterr().out.strip()
    assert line.startswith("versions: 16 samples, ") and line.endswith(
        "logprobs within 0 nats of what the engine reported, bit for bit"
    )
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["verdict"] == line and summary["ok"] is True
    recording = Recording.open(recorded)
    for options in ({"optimizer_step": True}, {"shuffle": True}, {"simulate": True}):
        with raises(ConfigError, "contradiction"):
            checked(recording, **options)


def test_updates_of_a_step() -> None:
    def per_step(*pairs: tuple[int, int]) -> int:
        metas = [InputMeta(step=s, update=u, micro_batch=0, num_micro_batches=1) for s, u in pairs]
        return updates_per_step(metas)

    assert per_step((0, 0), (1, 1), (9, 9)) == 1
    assert per_step((1, 3), (2, 4)) == 2  # of step 1 the second one alone
    assert per_step((0, 0), (0, 2), (5, 17)) == 3


def test_updates_are_not_repeated_in_another_dtype(copy: Callable[..., Path]) -> None:
    recording = Recording.open(copy(weights=range(0)))
    cell = dataclasses.replace(Cell.of_recording(recording.header, device="cpu"), dtype="bfloat16")
    with raises(RecordingError, "unsupported-combination") as caught:
        check_versions(recording, ReplayOptions(cell=cell))
    assert "float32, not in bfloat16" in str(caught.value)


@pytest.mark.exhaustive
def test_steps_without_updates_are_none(tmp_path: Path) -> None:
    """A value model warms up alone for a step; the others have two updates."""
    run = tmp_path / "run"
    values = json.loads(json.dumps(TINY))
    values |= {"kind": "ppo", "steps": 4, "run_dir": str(run), "value": {"warmup_batches": 1}}
    values["rollout"] |= {"prompts_per_step": 1, "group_size": 2, "max_lag": 0}
    values["train"] |= {"minibatches": 2}
    values["record"] |= {"weights": "none"}
    values["checkpoint"] = {"export_at_end": False}
    loops.train(build(values, origin="test"))
    result, _ = checked(Recording.open(run))
    assert result.ok and result.exact and result.versions == (1, 2, 3) == result.recomputed
