import gzip
import importlib
import json
from pathlib import Path

import pytest
from raising import raises

from lockstep.config.declarations import engines, own_rows
from lockstep.config.run import GRPORun, SFTRun
from lockstep.config.support import (
    AXES,
    BATCH_INVARIANT,
    TABLE,
    cells_tested_by,
    check_device_support,
    lookup,
    support_rows,
)
from lockstep.errors import ConfigError

ROOT = Path(__file__).parents[2]
OWN = {"status": "unsupported", "dtype": ["bfloat16"], "reason": "mine", "instead": "model.dtype"}


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
        stored = (ROOT / tested.removeprefix("gpu:")).read_bytes()
        result = json.loads(gzip.decompress(stored) if tested.endswith(".gz") else stored)
        rows = result["cells"]
        versions = f"torch {result['torch']}, transformers {result['transformers']}"
        on = f"{result['date']}, {result['machine']}, {versions}"
        assert {entry.on for entry in TABLE if entry.tested == tested} == {on}
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
        (
            {"train": {"backend": "fsdp2", "execution": "deepcompile"}},
            "unsupported-combination: fsdp2, deepcompile",
        ),
        (
            {"engine": {"name": "native"}, "train": {"device": "cuda"}, "model": {"dtype": "float32"}},
            "unsupported-combination: native, cuda, float32",
        ),
        ({"engine": {"name": "vlm"}}, "unknown-name: engine.name"),
        (
            {"train": {"backend": "deepspeed", "zero_stage": 3, "execution": "joint"}},
            "unsupported-combination",
        ),
        ({"train": {"attention": "varlne"}}, "unknown-name: train.attention"),
        ({"train": {"attention": "flex", "device": "cpu"}}, "unsupported-combination: flex, cpu"),
        (
            {"train": {"attention": "varlen", "device": "cuda:1"}, "model": {"dtype": "float32"}},
            "unsupported-combination: varlen, cuda, float32",
        ),
    ],
)
def test_impossible_runs_die_at_construction(setting, message):
    with raises(ValueError, message):
        GRPORun(**setting)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"train": {"attention": "sdpa"}}, "unsupported-combination: train.batch_invariant, sdpa"),
        ({"train": {"attention": "hf:eager"}}, "unsupported-combination: train.batch_invariant, hf:eager"),
        ({"engine": {"name": "hf"}}, "unsupported-combination: train.batch_invariant, hf"),
        (
            {"train": {"device": "cuda"}, "model": {"dtype": "float32"}, "engine": {"name": "hf"}},
            "unsupported-combination: train.batch_invariant, cuda, float32",
        ),
        (
            {"train": {"backend": "deepspeed", "execution": "deepcompile", "device": "cuda"}},
            "unsupported-combination: train.batch_invariant, deepcompile",
        ),
        (
            {"train": {"backend": "fsdp2", "ring": 2, "ring_comm": "p2p"}},
            "unsupported-combination: train.ring_comm",
        ),
    ],
)
def test_what_batch_invariance_cannot_be_combined_with_is_refused_by_name(setting, message):
    train = {"batch_invariant": True} | setting.get("train", {})
    with raises(ValueError, message):
        GRPORun(**{"engine": {"name": "native"}, **setting, "train": train})
    assert GRPORun(**{"engine": {"name": "native"}, **setting, "train": setting.get("train", {})})


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            {"train": {"backend": "fsdp2", "ring": 2}},
            "unsupported-combination: train.layout",
        ),
        ({"train": {"accumulate": "sample"}}, "unsupported-combination: train.layout"),
        ({"model": {"lora": {"dropout": 0.1}}}, "unsupported-combination: train.layout"),
        ({"train": {"attention": "hf:sdpa"}}, "unsupported-combination: hf:sdpa, shared"),
        ({"train": {"attention": "mine:kernel"}}, "unsupported-combination: mine:kernel, shared"),
        (
            {"train": {"backend": "deepspeed", "execution": "deepcompile", "device": "cuda"}},
            "unsupported-combination: deepspeed, deepcompile, shared",
        ),
    ],
)
def test_what_shared_rows_cannot_be_combined_with_is_refused_by_name(setting, message):
    train = setting.get("train", {})
    with raises(ValueError, message) as refusal:
        GRPORun(**setting | {"train": {"layout": "shared"} | train})
    assert "or train.layout = 'packed'" in str(refusal.value)
    assert GRPORun(**setting)
    assert GRPORun(train={"layout": "shared"}, model={"lora": {}})


def test_batch_invariance_in_other_places():
    assert SFTRun(train={"batch_invariant": True, "attention": "varlen"})
    vllm = {"name": "vllm", "batch_invariant": True}
    run = GRPORun(train={"batch_invariant": True, "attention": "varlen"}, engine=vllm)
    axes = {"attention": "varlen", "dtype": "bfloat16", "batch_invariant": True}
    assert check_device_support(run, device="cuda:0", **axes).status == "supported"
    with raises(
        ValueError, "unsupported-combination: train.batch_invariant", cell={"train.attention": "sdpa"}
    ):
        check_device_support(run, device="cpu", **(axes | {"attention": "sdpa"}))
    with raises(ValueError, "unsupported-combination: train.reuse_rollout_logprobs"):
        GRPORun(train={"reuse_rollout_logprobs": True}, engine={"name": "hf"})
    with raises(ValueError, "unsupported-combination: train.reuse_rollout_logprobs"):
        GRPORun(train={"reuse_rollout_logprobs": True, "batch_invariant": False})


def test_a_deterministic_run_needs_an_engine_that_is():
    with raises(ValueError, "unsupported-combination: train.deterministic"):
        GRPORun(train={"deterministic": True}, engine={"name": "vllm"})
    assert GRPORun(train={"deterministic": True}, engine={"name": "vllm", "batch_invariant": True})


def test_auto_waits_until_start_up():
    run = GRPORun(train={"attention": "flex"}, engine={"name": "hf"})
    assert (
        check_device_support(run, attention="flex", device="cuda:0", dtype="bfloat16").status == "supported"
    )
    with raises(
        ValueError, "unsupported-combination", cell={"train.attention": "flex", "train.device": "cpu"}
    ):
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
    refused = list(support_rows(BATCH_INVARIANT))
    assert {row["status"] for row in refused} == {"unsupported"} and refused[-1]["engine"] == "hf"
    row = next(r for r in rows if r["attention"] == "flex" and r["device"] == "cpu")
    assert row["status"] == "unsupported" and "instead: train.attention = 'sdpa'" in row["note"]
    assert row["backend"] == "any"


@pytest.mark.parametrize("execution", ["eager", "compile"])
@pytest.mark.parametrize(
    ("layout", "gpu"), [("packed", "2026-11-22, NVIDIA H100"), ("shared", "2026-11-23, NVIDIA H200")]
)
def test_the_default_path_on_a_gpu_is_tested(layout, gpu, execution):
    cell = {"backend": "local", "engine": "native", "attention": "varlen", "layout": layout}
    entry = lookup(cell | {"execution": execution, "device": "cuda", "dtype": "bfloat16"})
    assert entry.status == "supported" and entry.on.startswith(gpu)


def test_rows_are_tried_unsupported_first_and_the_last_covers_everything():
    order = [("unsupported", "supported", "untested").index(entry.status) for entry in TABLE]
    assert order == sorted(order) and TABLE[-1].matches({}) and len(set(TABLE)) == len(TABLE)


def test_rows_of_a_part_of_the_users_are_tried_with_ours():
    rows = own_rows([OWN, OWN | {"status": "supported", "tested": "mine.py"}], axis="backend", name="m:C")
    cell = {"backend": "m:C", "engine": "hf", "attention": "sdpa", "execution": "eager", "layout": "packed"}
    here = cell | {"device": "cpu", "dtype": "bfloat16"}
    assert lookup(here).status == "untested" and lookup(here, own=rows) is rows[0]
    assert lookup(here, own=rows[1:]) is rows[1]
    assert lookup(here | {"backend": "local"}, own=rows).status == "supported", "not about ours"
    ours = lookup(here | {"dtype": "float16"}, own=rows[1:])
    assert (ours.status, ours.dtype) == ("unsupported", ("float16",)), "and it does not outvote a refusal"
    for wrong in ([OWN | {"dtpye": []}], [{"status": "unsupported", "reason": "why"}], 3, ["x"]):
        with raises(ConfigError, "wrong-part: m:C"):
            own_rows(wrong, axis="backend", name="m:C")


def test_engines_say_what_becomes_of_a_waiting_trajectory_and_whether_they_pause():
    for engine in engines().values():
        assert engine.waiting_keys.keys() == engine.settings.keys() >= set(engine.pauses)
        module, _, name = engine.object.partition(":")
        made = getattr(importlib.import_module(module), name)
        assert getattr(made, "pauses", False) == ("embedded" in engine.pauses)
        assert getattr(made, "partial_rollouts", False) == ("embedded" in engine.partial_rollouts)
    assert engines()["native"].waiting_keys["embedded"] == "kept"
