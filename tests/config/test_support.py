import json
from pathlib import Path

import pytest

from lockstep.config.run import GRPORun, SFTRun
from lockstep.config.support import (
    AXES,
    TABLE,
    cells_tested_by,
    check_device_support,
    lookup,
    support_rows,
)

ROOT = Path(__file__).parents[2]


def test_supported_means_that_its_test_exists_and_unsupported_has_a_reason():
    for entry in TABLE:
        if entry.status == "supported":
            kind, _, path = entry.tested.partition(":")
            assert kind in ("ci-cpu", "gpu") and (ROOT / path).is_file(), entry
        else:
            assert entry.reason and not entry.tested, entry
        if entry.status == "unsupported":
            assert entry.instead, entry
        for axis, values in AXES.items():
            for value in getattr(entry, axis):
                assert value in values or value.startswith("hf:"), (axis, value)


def test_a_gpu_result_holds_a_passed_row_for_every_cell_that_refers_to_it():
    for tested in {entry.tested for entry in TABLE if entry.tested.startswith("gpu:")}:
        rows = json.loads((ROOT / tested.removeprefix("gpu:")).read_text())["cells"]
        cells = list(cells_tested_by(tested))
        assert cells
        for cell in cells:
            # results of one process do not name the backend
            found = [
                r for r in rows if all(({"backend": "local"} | r)[a] == value for a, value in cell.items())
            ]
            assert found and all(row["passed"] for row in found), cell


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"train": {"backend": "fsdp2", "execution": "deepcompile"}}, "DeepCompile is DeepSpeed's"),
        ({"engine": {"name": "native"}}, "comes with a later version; set engine.name = 'hf'"),
        ({"engine": {"name": "vlm"}}, "did you mean 'vllm'"),
        ({"train": {"execution": "joint"}}, "set train.execution = 'compile'"),
        ({"train": {"attention": "varlne"}}, "unknown attention kernel 'varlne'; did you mean 'varlen'"),
        ({"train": {"attention": "flex", "device": "cpu"}}, "no backward on a CPU"),
        (
            {"train": {"attention": "varlen", "device": "cuda:1"}, "model": {"dtype": "float32"}},
            "CUDA flash kernels have no float32",
        ),
    ],
)
def test_impossible_runs_die_at_construction(setting, message):
    with pytest.raises(ValueError, match=message):
        GRPORun(**setting)


def test_auto_waits_until_start_up():
    run = GRPORun(train={"attention": "flex"})
    assert (
        check_device_support(run, attention="flex", device="cuda:0", dtype="bfloat16").status == "supported"
    )
    with pytest.raises(ValueError, match=r"train.attention = 'flex', train.device = 'cpu' is not supported"):
        check_device_support(run, attention="flex", device="cpu", dtype="float32")
    assert check_device_support(SFTRun(), attention="sdpa", device="cpu", dtype="bfloat16").tested


def test_an_unknown_hf_kernel_is_untested_not_supported():
    cell = {"backend": "local", "engine": "hf", "execution": "eager", "layout": "packed"}
    entry = lookup({**cell, "attention": "hf:my_kernel", "device": "cpu", "dtype": "float32"})
    assert (entry.status, entry.attention) == ("untested", ("hf:NAME",))
    assert lookup({**cell, "attention": "hf:sdpa", "device": "cpu", "dtype": "float32"}).status == "supported"


def test_rows_say_all():
    rows = list(support_rows())
    assert len(rows) == len(TABLE)
    row = next(r for r in rows if r["attention"] == "flex" and r["device"] == "cpu")
    assert row["status"] == "unsupported" and "instead: train.attention = 'sdpa'" in row["note"]
    assert row["backend"] == "any"
