from __future__ import annotations

import dataclasses

import pytest
import torch
from raising import raises
from recorded import recording_header

from lockstep.errors import ConfigError, RecordingError
from lockstep.schema.recording import RecordingHeader
from lockstep_lab.cli.replay import cell_fields, parser
from lockstep_lab.replay.cell import ALL_OFF, Cell, resolve_cell, train_config


def header(**axes: object) -> RecordingHeader:
    return recording_header(axes=axes)


CPU = {"attention": "sdpa", "device": "cpu", "dtype": "float32", "execution": "eager", "layout": "packed"}


def test_the_recorded_configuration_is_the_default_where_the_device_is_the_same() -> None:
    recorded = CPU | {"attention": "varlen", "dtype": "bfloat16", "layout": "padded", "padding_side": "left"}
    cell, notes = resolve_cell(header(**recorded), device="cpu")
    assert (cell.attention, cell.dtype, cell.layout, cell.padding_side) == (
        "varlen",
        "bfloat16",
        "padded",
        "left",
    )
    assert [note.partition(":")[0] for note in notes] == ["support"]


def test_a_gpu_recording_becomes_float32_sdpa_on_a_cpu_and_says_why() -> None:
    recorded = CPU | {"attention": "varlen", "dtype": "bfloat16", "device": "cuda:0", "execution": "compile"}
    cell, notes = resolve_cell(header(**recorded), device="cpu")
    assert (cell.attention, cell.dtype, cell.device, cell.execution) == ("sdpa", "float32", "cpu", "compile")
    text = "\n".join(notes)
    assert "recorded on 'cuda:0', replayed on 'cpu'" in text
    assert "'varlen' -> 'sdpa' (its kernels need a GPU" in text and "'bfloat16' -> 'float32'" in text


def test_what_is_asked_for_is_not_resolved_away() -> None:
    recorded = CPU | {"attention": "varlen", "dtype": "bfloat16", "device": "cuda"}
    cell, notes = resolve_cell(header(**recorded), device="cpu", overrides={"attention": "varlen"})
    assert (cell.attention, cell.dtype) == ("varlen", "float32")
    assert not any(note.startswith("attention:") for note in notes)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without CUDA")
def test_a_device_that_is_not_there_is_refused() -> None:
    with raises(ConfigError, "missing-device: train.device"):
        resolve_cell(header(**CPU), device="cuda")


def test_the_support_table_refuses_with_its_reason_and_the_flags() -> None:
    with raises(
        ConfigError, "unsupported-combination", cell={"train.attention": "flex", "train.device": "cpu"}
    ):
        resolve_cell(header(**CPU), device="cpu", overrides={"attention": "flex"})
    with raises(ConfigError, "unknown-name: train.attention"):
        resolve_cell(header(**CPU), device="cpu", overrides={"attention": "flsh"})


@pytest.mark.parametrize(
    ("field", "value"),
    [("dtype", "int8"), ("layout", "heap"), ("attention", 3), ("static_capacity", "yes"), ("execution", [])],
)
def test_a_header_that_names_what_does_not_exist_is_refused_with_the_field(field: str, value: object) -> None:
    with raises(RecordingError, f"wrong-field: axes.{field}"):
        Cell.of_recording(header(**(CPU | {field: value})), device="cpu")


def test_a_foreign_header_without_axes_means_plain_sdpa() -> None:
    cell = Cell.of_recording(header(), device="cpu")
    assert (cell.attention, cell.execution, cell.layout, cell.dtype) == ("sdpa", "eager", "packed", "float32")


def test_all_off() -> None:
    cell, _ = resolve_cell(header(**(CPU | {"execution": "compile"})), device="cpu", overrides=ALL_OFF)
    assert cell.label() == "sdpa + eager + padded"
    assert dataclasses.asdict(cell).items() >= ALL_OFF.items()


def test_labels() -> None:
    cell = Cell(attention="varlen", execution="compile", layout="packed", dtype="bfloat16", device="cuda")
    assert cell.label() == "varlen + compile + packed"
    more = dataclasses.replace(
        cell,
        layout="padded",
        padding_side="left",
        zero_stage=3,
        num_layers=1,
        ranks=2,
        activation_checkpointing=True,
    )
    assert more.label() == "varlen + compile + padded left + ZeRO 3 + checkpointing + 1 layer + 2 ranks"


CELLS = [
    Cell(attention="sdpa", execution="eager", layout="packed", dtype="float32", device="cpu"),
    Cell(
        attention="varlen",
        execution="compile",
        layout="padded",
        dtype="bfloat16",
        device="cpu",
        padding_side="left",
    ),
    Cell(
        attention="varlen",
        execution="joint",
        layout="packed",
        dtype="float32",
        device="cpu",
        batch_invariant=True,
    ),
    Cell(
        attention="hf:eager",
        execution="eager",
        layout="packed",
        dtype="float32",
        device="cpu",
        num_layers=1,
        zero_stage=2,
        model="shape:tiny-llama",
        activation_checkpointing=True,
        ranks=2,
    ),
]


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.label())
def test_flags_give_the_cell_back_whatever_the_recording(cell: Cell) -> None:
    args = parser().parse_args(cell.flags())
    other = header(**(CPU | {"attention": "varlen", "layout": "padded", "execution": "compile"}))
    assert resolve_cell(other, device=args.device, overrides=cell_fields(args))[0] == cell


def test_a_recording_inside_of_the_claim_leaves_it_where_the_cell_has_to_and_says_why() -> None:
    recorded = header(**(CPU | {"attention": "varlen", "batch_invariant": True}))
    cell, notes = resolve_cell(recorded, device="cpu")
    assert cell.batch_invariant and cell.label() == "varlen + eager + packed + batch-invariant"
    cell, notes = resolve_cell(recorded, device="cpu", overrides={"attention": "sdpa"})
    assert not cell.batch_invariant
    (note,) = (note for note in notes if note.startswith("batch_invariant: on -> off ("))
    assert "splits the keys" in note
    with raises(
        ConfigError, "unsupported-combination: train.batch_invariant", cell={"train.attention": "sdpa"}
    ):
        resolve_cell(recorded, device="cpu", overrides={"attention": "sdpa", "batch_invariant": True})
    with raises(ConfigError, "unsupported-combination: --batch-invariant"):
        resolve_cell(recorded, device="cpu", overrides={"execution": "deepcompile", "batch_invariant": True})


def test_a_joint_graph_needs_whole_weights() -> None:
    cell = resolve_cell(header(**CPU), device="cpu", overrides={"execution": "joint", "zero_stage": 2})[0]
    assert (cell.execution, cell.zero_stage) == ("joint", 2)
    with raises(ConfigError, "unsupported-combination: --joint"):
        resolve_cell(header(**CPU), device="cpu", overrides={"execution": "joint", "zero_stage": 3})


def test_deepcompile_has_a_flag() -> None:
    cell = dataclasses.replace(CELLS[0], execution="deepcompile", zero_stage=1)
    assert cell_fields(parser().parse_args(cell.flags()))["execution"] == "deepcompile" and cell.deepspeed


def test_train_config_has_every_axis() -> None:
    config = train_config(CELLS[1], static_capacity=True, token_budget=77)
    assert (config.attention, config.execution, config.layout) == ("varlen", "compile", "padded")
    assert (config.padding_side, config.device, config.static_capacity, config.token_budget) == (
        "left",
        "cpu",
        True,
        77,
    )
