"""What "auto" means on a machine."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.config.run import DPORun, GRPORun, RunConfig, SFTRun
from lockstep.loop.axes import as_started, resolve_attention, resolve_axes


@pytest.mark.parametrize(
    ("device", "dtype", "batch_invariant", "kernel"),
    [
        ("cpu", "float32", None, "sdpa"),
        ("cpu", "float32", True, "varlen"),
        ("cpu", "bfloat16", False, "sdpa"),
        ("cuda", "bfloat16", None, "varlen"),
        ("cuda:1", "float16", False, "varlen"),
        ("cuda", "float32", None, "sdpa"),
    ],
)
def test_the_attention_kernel_of_auto(
    device: str, dtype: str, batch_invariant: bool | None, kernel: str
) -> None:
    settings = {"device": device, "dtype": dtype, "batch_invariant": batch_invariant}
    assert resolve_attention("auto", **settings) == kernel  # type: ignore[arg-type]
    assert resolve_attention("flex", **settings) == "flex"  # type: ignore[arg-type]


def layout(run: RunConfig) -> str:
    return resolve_axes(run, engine="hf").layout


def test_the_layout_of_auto_is_shared_where_documents_have_a_prompt_in_common() -> None:
    train: dict[str, Any] = {"device": "cpu"}
    engine: Any = {"name": "hf"}
    assert layout(GRPORun(train=train, engine=engine)) == layout(DPORun(train=train)) == "shared"
    assert layout(SFTRun(train=train)) == "packed"
    alone: Any = {"algorithm": {"name": "reinforce++"}, "rollout": {"group_size": 1}}
    assert layout(GRPORun(train=train, **alone)) == "packed"
    joint: Any = {"train": train | {"execution": "joint"}, "engine": engine, "model": {"dtype": "float32"}}
    assert layout(GRPORun(**joint)) == "shared"
    for name in ("packed", "padded", "shared"):
        assert layout(GRPORun(train=train | {"layout": name})) == name


@pytest.mark.parametrize(
    ("train", "model"),
    [
        ({"accumulate": "sample"}, {}),
        ({"attention": "hf:sdpa"}, {}),
        ({"backend": "fsdp2", "ring": 2}, {}),
        ({"backend": "fsdp2", "attention": "varlen"}, {}),
        ({}, {"lora": {"dropout": 0.1}}),
    ],
)
def test_the_layout_of_auto_is_packed_where_shared_is_refused_or_untested(
    train: dict[str, Any], model: dict[str, Any]
) -> None:
    assert layout(GRPORun(train={"device": "cpu"} | train, model=model)) == "packed"


def test_a_run_goes_on_in_the_layout_that_it_was_started_in() -> None:
    run = GRPORun()
    assert as_started(run, {"axes": {"layout": "packed"}}).train.layout == "packed"
    assert as_started(run, {"axes": {"layout": "shared"}}) is run
    assert as_started(run, {}) is run
    padded = GRPORun(train={"layout": "padded"})
    assert as_started(padded, {"axes": {"layout": "packed"}}) is padded
