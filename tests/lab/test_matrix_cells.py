import pytest

from lockstep.errors import ConfigError
from lockstep.lab.matrix.cells import KINDS, make_cells, parse_axes, reference_cells, refusal, settings
from lockstep.lab.replay.cell import Cell

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
        (["atention"], [], "unknown axis 'atention'; did you mean 'attention'"),
        ([], ["attention"], "expected NAME=VALUE"),
        ([], ["attention=flsh"], "axis attention: unknown attention kernel 'flsh'"),
        ([], ["layers=0"], "axis layers: '0': expected a whole number from 1"),
        ([], ["zero-stage=4"], "from 0 to 3"),
        ([], ["compile=yes"], "expected on or off"),
        ([], ["layers=2", "layers=4"], "--axis layers is given twice"),
        ([], ["dtype=fp32,float32"], "name the same value twice"),
        ([], ["device=tpu"], "'tpu' is no device"),
        (["model"], [], "the axis model has no usual values"),
        (["flash", "attention"], [], "flash and attention both set attention"),
        (["backend", "zero-stage"], [], "both set zero stage"),
        ([], ["layers=" + ",".join(map(str, range(1, 600)))], "599 cells, more than 512"),
    ],
)
def test_wrong_axes(names: list[str], given: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_axes(names, axis_flags=given)


def test_settings_of_a_reference() -> None:
    assert settings("attention=varlen, packing=on dtype=bf16", origin="--reference") == {
        "attention": "varlen",
        "layout": "packed",
        "dtype": "bfloat16",
    }
    with pytest.raises(ConfigError, match="sets attention twice"):
        settings("flash=on attention=sdpa", origin="--reference")
    with pytest.raises(ConfigError, match="expected AXIS=VALUE"):
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
