"""`lockstep.record` never raises into the loop that it watches for what the input is: it keeps it, marked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from raising import raises
from torch import Tensor, nn

import lockstep
from lockstep.config.model import ModelConfig
from lockstep.models.load import load_model
from lockstep.recording import Recording
from lockstep_lab.replay.cell import ReplayOptions, resolve_cell
from lockstep_lab.replay.run import replay

IDS = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])


class Odd:
    """An argument that is nothing in particular."""


class Policy(nn.Module):
    """Takes anything; its logits are of as many slots as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(300, 16)

    def forward(self, input_ids: Any = None, **named: Any) -> Tensor:
        if named.get("crash"):
            raise ArithmeticError("the model's own")
        slots = named.get("slots", 4)
        return self.table.weight[:slots].expand(2, slots, 16) @ self.table.weight.T


def one_call(tmp_path: Path, *args: Any, **named: Any) -> tuple[Recording, Any]:
    """A good input, then the odd one, then a good one; what the odd call gave or raised."""
    module = Policy().train()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    result: Any = None
    with lockstep.record(module, tmp_path / "r", weights="none"):
        for number in range(3):
            if number != 1:
                module(input_ids=IDS).sum().backward()
            else:
                try:
                    result = module(*args, **named)
                    result.sum().backward()
                except Exception as error:  # of the model itself
                    result = error
            optimizer.step()
    return Recording.open(tmp_path / "r"), result


@pytest.mark.parametrize(
    ("named", "reason"),
    [
        ({"input_ids": torch.tensor([[5, 300, 7, 8]])}, "token_ids range from 5 to 300"),
        ({"input_ids": torch.tensor([[5, -200, 7, 8]])}, "token_ids range from -200 to 8"),
        ({"input_ids": torch.tensor([[5, 2**40, 7, 8]])}, "token_ids range from"),
        ({"input_ids": torch.empty(0, 4, dtype=torch.int64)}, "[0, 4]"),
        ({"input_ids": torch.empty(2, 0, dtype=torch.int64)}, "[2, 0]"),
        ({"input_ids": torch.full((2, 4), torch.nan)}, "float32"),
        ({"input_ids": torch.ones(2, 4, 3, dtype=torch.int64)}, "[2, 4, 3]"),
        ({"input_ids": torch.tensor(5)}, "[]"),
        ({"input_ids": [[5, 6], [7]]}, "list"),
        ({"input_ids": "text"}, "str"),
        ({"input_ids": IDS, "attention_mask": torch.zeros(2, 4)}, "no real token"),
        ({"input_ids": IDS, "cu_seqlens": torch.tensor([0, 40])}, "cumulative lengths"),
        ({"input_ids": IDS, "cu_seqlens": torch.tensor([], dtype=torch.int64)}, "cumulative lengths"),
        ({"input_ids": IDS.to_sparse()}, ""),
        ({"input_ids": IDS.to("meta")}, ""),
        ({"inputs_embeds": torch.ones(2, 4, 16)}, "NoneType"),
        ({}, "NoneType"),
    ],
)
def test_an_input_that_is_none_is_kept_as_it_was_and_the_model_still_runs(
    tmp_path: Path, named: dict[str, Any], reason: str
) -> None:
    recording, result = one_call(tmp_path, **named)
    assert isinstance(result, Tensor)
    assert [meta.unusable is not None for meta in recording.metas] == [False, True, False]
    assert recording.header.notes["unusable_inputs"] == 1
    meta, kept = recording.metas[1], recording[1]
    assert meta.error is not None and reason in meta.error
    for name, value in named.items():
        if isinstance(value, Tensor) and value.ndim and value.layout == torch.strided and not value.is_meta:
            stored = kept.extras[name]
            assert stored.dtype == value.dtype and torch.equal(stored.nan_to_num(), value.nan_to_num())
        else:
            assert any(k.startswith(name) for k in meta.documents[0]["call"]["arguments"])
    assert all(row.problem is None for row in recording.validate())


@pytest.mark.parametrize(
    "named",
    [
        {"slots": 3},
        {"slots": 1, "logits_to_keep": torch.tensor([0, 1, 2])},
        {"logits_to_keep": torch.tensor([[0]])},
        {"labels": torch.full((2, 4), -100)},
        {"labels": torch.ones(3)},
        {"advantages": torch.full((2, 4), torch.nan)},
        {"old_logprobs": torch.full((2, 4), -torch.inf), "temperature": float("nan")},
        {"huge": 10**5000, "text": "x" * 10**7, "complex": torch.tensor(1j), "odd": Odd()},
        {"wide": torch.ones(2, dtype=torch.complex128), "sparse": torch.ones(2).to_sparse()},
        {"n" * 500: torch.ones(3), "m" * 500: 1.0},
        {"nested": {"a": [{"b": torch.ones(2)}] * 9000, "c": {1: {2: {3: Odd()}}}}},
        {"past_key_values": 7},
        {"past_key_values": Odd()},
        {"position_ids": torch.zeros(2, 4, dtype=torch.int64)},
        {"attention_mask": torch.ones(2, 1, 4, 4)},
    ],
)
def test_odd_arguments_beside_good_ids_leave_a_usable_input(tmp_path: Path, named: dict[str, Any]) -> None:
    recording, result = one_call(tmp_path, input_ids=IDS, **named)
    assert isinstance(result, Tensor)
    assert [meta.unusable for meta in recording.metas] == [None, None, None]
    assert recording[1].batch.token_ids.tolist() == IDS.flatten().tolist()
    assert all(row.problem is None for row in recording.validate())


def test_the_error_of_the_model_is_kept_beside_what_is_wrong_with_the_input(tmp_path: Path) -> None:
    recording, result = one_call(tmp_path, input_ids=torch.tensor([[5, 999]]), crash=True)
    assert isinstance(result, ArithmeticError)
    meta = recording.metas[1]
    assert meta.outcome == "failed" and meta.error is not None
    assert meta.error.startswith("ArithmeticError: the model's own; kept as it was called with")
    assert recording[1].extras["input_ids"].tolist() == [[5, 999]]


def test_more_documents_than_a_reader_takes_are_kept_as_the_call(tmp_path: Path) -> None:
    ids = torch.full((2, 100_000), 5)
    recording, result = one_call(tmp_path, input_ids=ids, position_ids=torch.zeros_like(ids))
    assert isinstance(result, Tensor)
    assert recording.metas[1].unusable is not None
    assert torch.equal(recording[1].extras["input_ids"], ids)


def llama() -> nn.Module:
    config = ModelConfig(name="shape:tiny-llama", dtype="float32")
    return load_model(config, attention="hf:sdpa", device=torch.device("cpu")).module.train()


def test_ids_outside_the_vocabulary_of_a_llama_raise_its_own_error_and_a_replay_names_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = llama()
    with lockstep.record(module, tmp_path / "r"):
        module(input_ids=IDS, labels=IDS).loss.backward()
        with pytest.raises(IndexError, match="out of range"):
            module(input_ids=IDS + 10**6, labels=IDS)
        torch.optim.SGD(module.parameters(), lr=0.1).step()
    assert "1 inputs are no documents of the model" in capsys.readouterr().err
    recording = Recording.open(tmp_path / "r")
    assert "IndexError" in str(recording.metas[1].error)
    cell, notes = resolve_cell(recording.header, device="cpu")
    result = replay(recording, ReplayOptions(cell=cell, notes=notes))
    assert [row.status for row in result.rows] == ["ok", "failed"]
    assert "token_ids range from 1000005 to 1000012" in result.rows[1].error["line"]


def test_a_recording_that_cannot_be_written_still_ends_the_run(tmp_path: Path) -> None:
    module = Policy().train()
    handle = lockstep.record(module, tmp_path / "r", weights="none")
    module(input_ids=IDS)
    (tmp_path / "r/rank-0000").rename(tmp_path / "away")
    check: Callable[[], Any] = lambda: module(input_ids=IDS)  # noqa: E731
    with raises(lockstep.errors.RecordingError, "cannot-write"):
        check()
    (tmp_path / "away").rename(tmp_path / "r/rank-0000")
    handle.close()
