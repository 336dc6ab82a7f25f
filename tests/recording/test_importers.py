"""Dumps of other frameworks as recordings: alignment by hand, names, refusals, and a replay."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from raising import raises

from lockstep.cli.main import main
from lockstep.errors import RecordingError
from lockstep.recording import Recording
from lockstep.schema.batch import PackedBatch, PolicyBatch
from lockstep_lab.recording.importers.dumps import import_dump


def imported(value: Any, tmp_path: Path, *, model: str | None = None) -> Recording:
    torch.save(value, tmp_path / "dump.pt")
    import_dump(tmp_path / "dump.pt", tmp_path / "out", model=model)
    recording = Recording.open(tmp_path / "out")
    assert [row.problem for row in recording.validate()] == [None] * len(recording)
    return recording


def only(value: Any, tmp_path: Path) -> PackedBatch:
    recording = imported(value, tmp_path)
    assert len(recording) == 1
    return recording[0].batch


def test_openrlhf_rows(tmp_path: Path) -> None:
    """Left-padded prompts, right-padded responses, [B, R] values of the last R = 3 columns."""
    dump = {
        "sequences": torch.tensor([[0, 5, 6, 7, 8, 9], [2, 3, 4, 11, 12, 0]]),
        "attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]]),
        "action_mask": torch.tensor([[1, 1, 1], [1, 1, 0]]),
        "position_ids": torch.tensor([[1, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 1]]),
        "action_log_probs": torch.tensor([[-1.0, -2.0, -3.0], [-4.0, -5.0, -6.0]]),
        "base_action_log_probs": torch.tensor([[-1.5, -2.5, -3.5], [-4.5, -5.5, -6.5]]),
        "advantages": torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]]),
        "rewards": torch.tensor([1.0, -1.0]),
        "values": torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]),
        "rank": 1,
        "step": 7,
        "timestamp": 1.7e9,
        "return_output": True,
        "info": {"kind": "text"},
    }
    recording = imported(dump, tmp_path)
    batch = recording[0].batch
    assert isinstance(batch, PolicyBatch)
    assert batch.token_ids.tolist() == [5, 6, 7, 8, 9, 2, 3, 4, 11, 12]
    assert batch.lengths == (5, 5)
    assert batch.loss_mask.int().tolist() == [0, 1, 1, 1, 0, 0, 0, 1, 1, 0]
    assert batch.old_logprobs is not None and batch.ref_logprobs is not None
    assert batch.old_logprobs.tolist() == [0, -1, -2, -3, 0, 0, 0, -4, -5, 0]
    assert torch.equal(batch.rollout_logprobs, batch.old_logprobs)
    assert batch.ref_logprobs.tolist() == [0, -1.5, -2.5, -3.5, 0, 0, 0, -4.5, -5.5, 0]
    expected = torch.tensor([0, 0.1, 0.2, 0.3, 0, 0, 0, 0.4, 0.5, 0])
    assert torch.equal(batch.advantages, expected)
    sixth, fourth = 1 / 6, 0.25
    weights = torch.tensor([0, sixth, sixth, sixth, 0, 0, 0, fourth, fourth, 0])
    torch.testing.assert_close(batch.loss_weights, weights)
    meta = recording.metas[0]
    assert (meta.step, meta.rank, meta.world_size, meta.time) == (7, 1, 2, 1.7e9)
    assert [d["reward"] for d in meta.documents] == [1.0, -1.0]
    assert meta.documents[0]["call"]["arguments"]["return_output"] is True
    assert recording[0].extras.keys() == {"values"}
    assert recording.header.algorithm["name"] == "grpo" and recording.header.algorithm["clip_low"] == 0.2
    assert recording.header.framework == "import:torch"
    assert recording.header.vocab_size == 13
    assert recording.header.notes["dropped"] == {"info": "a dict, not a tensor"}


def test_openrlhf_packed(tmp_path: Path) -> None:
    """[1, T] with lengths; values of actions one document after the other; two slots of padding."""
    dump = {
        "sequences": torch.tensor([[5, 6, 7, 8, 9, 10, 11, 0, 0]]),
        "packed_seq_lens": [4, 3],
        "num_actions": [2, 1],
        "action_log_probs": torch.tensor([[-1.0, -2.0, -3.0]]),
        "advantages": torch.tensor([[1.0, 2.0, 3.0]]),
    }
    batch = only(dump, tmp_path)
    assert isinstance(batch, PolicyBatch)
    assert batch.lengths == (4, 3)
    assert batch.loss_mask.int().tolist() == [0, 1, 1, 0, 0, 1, 0]
    assert batch.advantages.tolist() == [0, 1, 2, 0, 0, 3, 0]
    assert batch.rollout_logprobs.tolist() == [0, -1, -2, 0, 0, -3, 0]


@pytest.mark.parametrize(
    "more",
    [
        {"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2]])},
        {"cu_seqlens": torch.tensor([0, 4, 7], dtype=torch.int32)},
        {"attention_mask": torch.tensor([[1, 1, 1, 1, 2, 2, 2]])},
        {"packed_seq_lens": np.array([4, 3])},
    ],
)
def test_documents_of_a_packed_row(more: dict[str, Any], tmp_path: Path) -> None:
    batch = only({"input_ids": torch.arange(7)[None], **more}, tmp_path)
    assert batch.lengths == (4, 3)
    assert batch.loss_mask.int().tolist() == [1, 1, 1, 0, 1, 1, 0]


def test_trl(tmp_path: Path) -> None:
    """Prompt and completion apart, an advantage per row."""
    dump = {
        "prompt_ids": torch.tensor([[0, 5], [6, 7]]),
        "prompt_mask": torch.tensor([[0, 1], [1, 1]]),
        "completion_ids": torch.tensor([[8, 9], [10, 0]]),
        "completion_mask": torch.tensor([[1, 1], [1, 0]]),
        "advantages": torch.tensor([0.5, -0.5]),
        "old_per_token_logps": torch.tensor([[-1.0, -2.0], [-3.0, 0.0]]),
        "sampling_per_token_logps": torch.tensor([[-1.25, -2.25], [-3.25, 0.0]]),
    }
    batch = only(dump, tmp_path)
    assert isinstance(batch, PolicyBatch)
    assert batch.token_ids.tolist() == [5, 8, 9, 6, 7, 10]
    assert batch.advantages.tolist() == [0.5, 0.5, 0, 0, -0.5, 0]
    assert batch.old_logprobs is not None
    assert batch.old_logprobs.tolist() == [-1, -2, 0, 0, -3, 0]
    assert batch.rollout_logprobs.tolist() == [-1.25, -2.25, 0, 0, -3.25, 0]


def test_verl(tmp_path: Path) -> None:
    """input_ids beside their own halves; the batch one level down."""
    dump = {
        "batch": {
            "input_ids": torch.tensor([[0, 5, 6, 7]]),
            "prompts": torch.tensor([[0, 5]]),
            "responses": torch.tensor([[6, 7]]),
            "attention_mask": torch.tensor([[0, 1, 1, 1]]),
            "response_mask": torch.tensor([[1, 0]]),
            "rollout_log_probs": torch.tensor([[-1.0, -2.0]]),
            "advantages": torch.tensor([[2.0, 3.0]]),
        },
        "non_tensor_batch": {"uid": np.array(["a"], dtype=object)},
        "meta_info": {"temperature": 1.0},
    }
    batch = only(dump, tmp_path)
    assert isinstance(batch, PolicyBatch)
    assert batch.token_ids.tolist() == [5, 6, 7]
    assert batch.advantages.tolist() == [2, 0, 0]
    assert batch.old_logprobs is None


@pytest.mark.parametrize("shifted", [False, True])
def test_labels(shifted: bool, tmp_path: Path) -> None:
    ids = torch.tensor([[5, 6, 7, 8]])
    labels = torch.tensor([[-100, 7, 8, -100]]) if shifted else torch.tensor([[-100, -100, 7, 8]])
    recording = imported({"input_ids": ids, "labels": labels}, tmp_path)
    batch = recording[0].batch
    assert batch.loss_mask.int().tolist() == [0, 1, 1, 0]
    assert batch.loss_weights.tolist() == [0, 0.5, 0.5, 0]
    assert recording.header.algorithm == {"name": "sft"}
    assert any("already" in text for text in recording.header.notes["said"]) == shifted


def test_lists_of_several_lengths(tmp_path: Path) -> None:
    batch = only({"input_ids": [[5, 6, 7], [8, 9]], "loss_mask": [[0, 1, 1], [0, 1]]}, tmp_path)
    assert batch.lengths == (3, 2)
    assert batch.loss_mask.int().tolist() == [1, 1, 0, 1, 0]


def test_advantages_alone_are_a_surrogate(tmp_path: Path) -> None:
    recording = imported(
        {"input_ids": torch.tensor([[5, 6, 7]]), "advantages": torch.tensor([2.0])}, tmp_path
    )
    assert recording.header.algorithm == {"name": "surrogate"}
    assert recording[0].batch.loss_weights.tolist() == [1, 1, 0]
    assert any("without logprobs" in text for text in recording.header.notes["said"])


def test_arguments_of_a_call(tmp_path: Path) -> None:
    """(sequences, num_actions) and the rest by name; a row that is all padding keeps no document."""
    dump = {
        "args": (torch.tensor([[5, 6, 7], [0, 0, 0]]), 2),
        "kwargs": {
            "attention_mask": torch.tensor([[1, 1, 1], [0, 0, 0]]),
            "advantages": torch.tensor([3.0, 4]),
        },
    }
    assert only(dump, tmp_path).loss_weights.tolist() == [1.5, 1.5, 0]


def test_a_folder_in_natural_order(tmp_path: Path) -> None:
    folder = tmp_path / "input_dumps"
    folder.mkdir()
    for step, rank, count in ((10, 0, 1), (2, 0, 2), (2, 1, 1)):
        value = [{"input_ids": torch.tensor([[step, rank, number]])} for number in range(count)]
        with (folder / f"input_step{step}_rank{rank}.pkl").open("wb") as file:
            pickle.dump(value, file)
    (folder / "notes.txt").write_text("no dump")
    report = import_dump(folder, tmp_path / "out")
    recording = Recording.open(tmp_path / "out")
    assert report.files == 3 and report.inputs == 4
    assert recording.header.framework == "import:pickle"
    assert recording.ranks == (0, 1) or list(recording.ranks) == [0, 1]
    assert [m.key for m in recording.metas] == [(2, 0, 0), (2, 0, 1), (2, 1, 0), (10, 0, 0)]
    assert [m.num_micro_batches for m in recording.metas] == [2, 1, 2, 1]
    assert [recording[i].batch.token_ids.tolist() for i in range(4)] == [
        [2, 0, 0],
        [2, 1, 0],
        [2, 0, 1],
        [10, 0, 0],
    ]


def test_steps_that_are_not_all_named_are_counted(tmp_path: Path) -> None:
    recording = imported(
        [{"input_ids": torch.tensor([[1, n]]), **({"step": 5} if n else {})} for n in range(3)], tmp_path
    )
    assert [m.step for m in recording.metas] == [0, 1, 2]
    assert any("in order" in text for text in recording.header.notes["said"])


# --- refusals -----------------------------------------------------------------------------------------------

IDS = torch.arange(8).reshape(2, 4)


@pytest.mark.parametrize(
    ("value", "match"),
    [
        ({"weights": torch.ones(2)}, "missing-field: weights"),
        ([1, 2], "missing-field: list"),
        ({"input_ids": torch.ones(2, 2)}, "wrong-field: input_ids"),
        ({"input_ids": "text"}, "wrong-field: input_ids"),
        ({"input_ids": IDS - 1}, "wrong-field: token_ids"),
        ({"input_ids": IDS, "attention_mask": torch.ones(2, 1, 4, 4)}, "wrong-field: attention_mask"),
        ({"input_ids": IDS, "attention_mask": torch.full((2, 4), -1e9)}, "wrong-field: attention_mask"),
        ({"input_ids": IDS, "attention_mask": torch.zeros(2, 4)}, "empty: attention_mask"),
        ({"input_ids": IDS, "action_mask": torch.ones(2, 5)}, "wrong-field: action_mask"),
        ({"input_ids": IDS, "num_actions": 5}, "wrong-field: num_actions"),
        ({"input_ids": IDS, "num_actions": [1, 9]}, "wrong-field: num_actions"),
        ({"input_ids": IDS, "num_actions": -1}, "wrong-field: num_actions"),
        ({"input_ids": IDS[:1], "packed_seq_lens": [3, 9]}, "wrong-shape: cu_seqlens"),
        ({"input_ids": IDS[:1], "packed_seq_lens": [float("nan"), 2.0]}, "wrong-field: packed_seq_lens"),
        ([{"input_ids": IDS}, {"input_ids": IDS, "advantages": torch.ones(2)}], "contradiction: losses"),
        ({"input_ids": IDS, "rank": 2**21}, "wrong-field: rank"),
    ],
)
def test_refusals_name_file_and_field(value: Any, match: str, tmp_path: Path) -> None:
    with raises(RecordingError, match) as caught:
        imported(value, tmp_path)
    assert "dump.pt" in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_hostile_file_in_a_folder_leaves_nothing_behind(tmp_path: Path) -> None:
    canary = tmp_path / "canary"

    class Attack:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {canary}",)

    (tmp_path / "dumps").mkdir()
    torch.save({"input_ids": IDS}, tmp_path / "dumps" / "0.pt")
    torch.save({"input_ids": IDS, "x": Attack()}, tmp_path / "dumps" / "1.pt")
    with raises(RecordingError, "forbidden-content: posix.system"):
        import_dump(tmp_path / "dumps", tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dumps"]


def test_inputs_that_share_a_large_tensor(tmp_path: Path) -> None:
    one = {"input_ids": torch.ones(1, 2**18, dtype=torch.int64)}  # 2 MiB
    with raises(RecordingError, "too-large: tensors"):
        imported([one] * 100, tmp_path)


def test_model_and_ids_must_fit(tmp_path: Path) -> None:
    with raises(RecordingError, "outside-vocabulary: token_ids", value=300):
        imported({"input_ids": torch.tensor([[300, 1]])}, tmp_path, model="shape:tiny-llama")
    recording = imported({"input_ids": torch.tensor([[30, 1]])}, tmp_path, model="shape:tiny-llama")
    assert recording.header.vocab_size == 256
    with raises(RecordingError, "already-exists"):
        import_dump(tmp_path / "dump.pt", tmp_path / "out")
    report = import_dump(tmp_path / "dump.pt", tmp_path / "other", model="nobody/knows-this")
    assert report.vocab_size == 31
    assert any("config of nobody/knows-this is not at hand" in text for text in report.said)


# --- whatever a dict says -----------------------------------------------------------------------------------

SHAPES = st.lists(st.integers(0, 5), max_size=3)
NAMES = [
    *(
        "attention_mask",
        "position_ids",
        "action_mask",
        "labels",
        "loss_mask",
        "num_actions",
        "packed_seq_lens",
    ),
    *(
        "cu_seqlens",
        "advantages",
        "old_log_probs",
        "rollout_log_probs",
        "rewards",
        "responses",
        "step",
        "rank",
    ),
]


@st.composite
def _values(draw: st.DrawFn) -> Any:
    kind = draw(st.sampled_from(["tensor", "list", "int", "float", "ragged", "text"]))
    if kind == "tensor":
        dtype = draw(st.sampled_from([torch.int64, torch.float32, torch.bool, torch.uint16, torch.int8]))
        shape = draw(SHAPES)
        count = int(np.prod(shape)) if shape else 1
        flat = draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
        return torch.tensor(flat).reshape(shape).to(dtype)
    numbers = st.integers(-2, 6) | st.floats(allow_nan=True)
    if kind == "list":
        return draw(st.lists(numbers, max_size=6))
    if kind == "ragged":
        return draw(st.lists(st.lists(st.integers(0, 6), max_size=5), max_size=3))
    return draw({"int": st.integers(-2, 2**40), "float": st.floats(), "text": st.text(max_size=5)}[kind])


@given(
    ids=_values() | st.sampled_from([IDS, IDS[:1], [[1, 2, 3], [4]]]),
    others=st.dictionaries(st.sampled_from(NAMES), _values(), max_size=4),
)
@settings(max_examples=120, suppress_health_check=list(HealthCheck))
def test_any_dict_is_imported_or_refused(
    ids: Any, others: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("any")
    try:
        imported({"input_ids": ids, **others}, folder)
    except RecordingError as error:
        assert "dump.pt" in str(error) or "input (" in str(error)


# --- replay -------------------------------------------------------------------------------------------------


def test_an_imported_dump_replays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    (tmp_path / "dumps").mkdir()
    for number in range(2):
        mask = torch.ones(2, 10, dtype=torch.int64)
        mask[0, :3] = 0
        dump = {
            "sequences": torch.randint(1, 250, (2, 10)),
            "attention_mask": mask,
            "num_actions": 4,
            "advantages": torch.randn(2, 4),
            "action_log_probs": -torch.rand(2, 4),
            "\x1b[31mred": torch.ones(1),
        }
        with (tmp_path / "dumps" / f"input_{number}.pkl").open("wb") as file:
            pickle.dump(dump, file)
    out = tmp_path / "recording"
    argv = ["recording", "import", str(tmp_path / "dumps"), "--out", str(out), "--model", "shape:tiny-llama"]
    assert main([*argv, "--json", str(tmp_path / "report.json")]) == 0
    printed = capsys.readouterr().out
    assert "sequences -> token_ids (2 inputs)" in printed
    assert "\x1b" not in printed
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["kind"] == "policy" and report["inputs"] == 2 and report["tokens"] == 34
    replayed = tmp_path / "replay"
    assert main(["replay", str(out), "--device", "cpu", "--out", str(replayed)]) == 0
    rows = [json.loads(line) for line in (replayed / "results.jsonl").read_text().splitlines()]
    assert [row["status"] for row in rows] == ["ok", "ok"]
    assert all(row["grad_norm"] > 0 and row["tokens"] == 17 for row in rows)
