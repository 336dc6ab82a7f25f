import pytest
from raising import raises

from lockstep.errors import ConfigError
from lockstep_lab.matrix.cells import KINDS, make_cells, parse_axes, reference_cells, refusal, settings
from lockstep_lab.replay.cell import Cell

BASE = Cell(attention="sdpa", execution="eager", layout="padded", dtype="float32", device="cpu")


def test_the_usual_axes_make_the_eight_cells_of_document_000() -> None:
    cells = make_cells(BASE, parse_axes(()))
    assert len(cells) == 8 and len({cell.slug for cell in cells}) == 8
    assert cells[0].cell == BASE
    assert cells[-1].name == "varlen + compile + packed" and cells[-1].slug == "varlen-compile-packed"
    assert cells[-1].flags[:4] == ("--attention", "varlen", "--compile", "--packing")
    assert cells[-1].values == {"flash": "on", "compile": "on", "packing": "on"}


def test_values_and_their_cells() -> None:
    axes = parse_axes(["packing"], axis_flags=["attention=sdpa, hf:flash_attention_2", "zero-stage=none,3"])
    assert [axis.name for axis in axes] == ["packing", "attention", "zero-stage"]
    cells = make_cells(BASE, axes)
    assert len(cells) == 8
    assert cells[-1].name == "packed + hf:flash_attention_2 + ZeRO 3"
    assert cells[-1].slug == "packed-hf-flash_attention_2-zero-3"
    assert (cells[-1].cell.attention, cells[-1].cell.zero_stage) == ("hf:flash_attention_2", 3)
    assert cells[0].cell.zero_stage is None


def test_given_values_replace_the_usual_ones_in_place() -> None:
    axes = parse_axes(["attention", "compile"], axis_flags=["attention=varlen"])
    assert [(axis.name, len(axis.values)) for axis in axes] == [("attention", 1), ("compile", 2)]


def test_every_axis_with_usual_values_makes_cells() -> None:
    for name, kind in KINDS.items():
        if kind.usual:
            assert len(make_cells(BASE, parse_axes([name]))) == len(kind.usual) >= 2


@pytest.mark.parametrize(
    ("names", "given", "message"),
    [
        (["atention"], [], "unknown-name: --axis, atention"),
        ([], ["attention"], "wrong-format: --axis, attention"),
        ([], ["attention=flsh"], "wrong-format: --axis, attention"),
        ([], ["layers=0"], "wrong-format: --axis, layers"),
        ([], ["zero-stage=4"], "wrong-format: --axis, zero-stage"),
        ([], ["compile=yes"], "wrong-format: --axis, compile"),
        ([], ["layers=2", "layers=4"], "duplicate: --axis, layers"),
        ([], ["dtype=fp32,float32"], "duplicate: --axis, dtype, fp32, float32"),
        ([], ["device=tpu"], "wrong-format: --axis, device"),
        (["model"], [], "missing-setting: --axis, model"),
        (["flash", "attention"], [], "contradiction: --axis, attention"),
        (["backend", "zero-stage"], [], "contradiction: --axis, zero stage"),
        ([], ["layers=" + ",".join(map(str, range(1, 600)))], "too-large: --axis, 599"),
    ],
)
def test_wrong_axes(names: list[str], given: list[str], message: str) -> None:
    with raises(ConfigError, message):
        parse_axes(names, axis_flags=given)


def test_settings_of_a_reference() -> None:
    assert settings("attention=varlen, packing=on dtype=bf16", origin="--reference") == {
        "attention": "varlen",
        "layout": "packed",
        "dtype": "bfloat16",
    }
    with raises(ConfigError, "duplicate: --reference, flash=on attention=sdpa"):
        settings("flash=on attention=sdpa", origin="--reference")
    with raises(ConfigError, "wrong-format: --reference, packed"):
        settings("packed", origin="--reference")


def test_a_reference_that_is_none_of_the_cells() -> None:
    cells = make_cells(BASE, parse_axes([], axis_flags=["attention=varlen", "layers=2,all"]))
    extra, reference_of = reference_cells(cells, BASE)
    assert [cell.name for cell in extra] == ["reference (float32, 2 layers)", "reference (float32)"]
    assert [cell.cell.num_layers for cell in extra] == [2, None]
    assert reference_of["varlen + 2 layers"] == "reference (float32, 2 layers)"


def test_refusals_come_from_the_support_table() -> None:
    cells = {cell.name: cell.cell for cell in make_cells(BASE, parse_axes(["attention"]))}
    assert refusal(cells["sdpa"]) is None
    why = refusal(cells["flex"])
    assert (
        why is not None
        and "flex_attention has no backward on a CPU" in why
        and "replay sets" not in why.lower()
    )


def test_names_of_other_peoples_models_make_plain_folders() -> None:
    cells = make_cells(
        BASE, parse_axes([], axis_flags=["model=../../etc/passwd,<script>alert(1)</script>,a b"])
    )
    assert [cell.slug for cell in cells] == ["etc-passwd", "script-alert-1-script", "a-b"]
    twins = make_cells(BASE, parse_axes([], axis_flags=["model=a/b,a?b"]))
    assert [cell.slug for cell in twins] == ["a-b", "a-b-2"]
