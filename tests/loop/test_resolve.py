"""What "auto" means on a machine."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from raising import raises
from resolving import resolved_on
from transformers import AutoConfig

from lockstep.config.load import build, dump_toml, parse_toml
from lockstep.config.run import DPORun, GRPORun, RunConfig, SFTRun
from lockstep.errors import ConfigError
from lockstep.loop.machine import Machine
from lockstep.loop.resolve import Resolved, resolve, resolve_attention
from lockstep.models.memory import GIB, ModelShape, planned_shape
from lockstep.models.shape_table import SHAPES


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
    return resolved_on(run).layout


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
    assert resolved_on(run, manifest={"axes": {"layout": "packed"}}).layout == "packed"
    assert resolved_on(run, manifest={"axes": {"layout": "shared"}}).layout == "shared"
    assert resolved_on(run, manifest={}).layout == "shared"
    padded = GRPORun(train={"layout": "padded"})
    assert resolved_on(padded, manifest={"axes": {"layout": "packed"}}).layout == "padded"


# One H100 of 80 GiB; every choice below is that of the version which resolved in five places.
BIG: dict[str, Any] = {
    "model": {"name": "shape:llama-3.2-1b", "dtype": "bfloat16"},
    "data": {"source": "ids"},
    "rewards": [{"name": "ids"}],
    "rollout": {"prompts_per_step": 64},
    "steps": 1000,
}
GPU = {"device": "cuda:1", "total_bytes": 80 * GIB}
CHOICES = {
    "device": "cuda:1",
    "backend": "local",
    "engine": "native",
    "attention": "varlen",
    "execution": "compile",
    "layout": "shared",
    "dtype": "bfloat16",
    "static_capacity": True,
    "batch_invariant": True,
    "deterministic": False,
    "token_budget": 32768,
}


def test_every_auto_of_a_run_on_a_gpu_and_its_fields_in_the_manifest() -> None:
    run = GRPORun(**BIG)
    resolved = resolved_on(run, **GPU)
    about = ("support", "support_note", "auto_execution", "auto_token_budget", "memory")
    assert {name: value for name, value in resolved.axes.items() if name not in about} == CHOICES
    assert list(resolved.axes) == [*list(CHOICES)[:-1], "support", "support_note", "token_budget", *about[2:]]
    train, given = resolved.run.train, resolved.given
    assert (given.train.execution, given.engine.name) == ("auto", "auto")
    assert "auto" not in (train.device, train.attention, train.execution, train.layout, train.token_budget)
    assert (resolved.run.engine.name, resolved.run.model.dtype) == ("native", "bfloat16")
    assert train.static_capacity is train.batch_invariant is True
    assert [line.partition(":")[0] for line in resolved.reasons] == [
        "train.execution auto -> compile",
        "memory plan",
    ]


@pytest.mark.parametrize(
    ("model", "engine"),
    [("shape:tiny-llama", "native"), ("shape:tiny-qwen3-moe", "native"), ("shape:tiny-gpt-neox", "hf")],
)
def test_auto_is_what_the_model_has(model: str, engine: str) -> None:
    resolved = resolved_on(GRPORun(**BIG | {"model": {"name": model, "dtype": "bfloat16"}}), **GPU)
    assert (resolved.engine, resolved.execution) == (engine, "eager")
    never = "no parity test covers its architecture compiled"
    assert (resolved.auto_execution == never) == (model == "shape:tiny-qwen3-moe")


def test_auto_of_a_model_without_a_record_is_what_generic_models_have(tmp_path: Path) -> None:
    AutoConfig.for_model(**SHAPES["tiny-llama"] | {"model_type": "starcoder2"}).save_pretrained(tmp_path)
    resolved = resolved_on(GRPORun(**BIG | {"model": {"name": str(tmp_path), "dtype": "bfloat16"}}), **GPU)
    assert (resolved.engine, resolved.execution, resolved.batch_invariant) == ("hf", "eager", False)
    asked = BIG | {"model": {"name": str(tmp_path), "dtype": "bfloat16"}, "train": {"batch_invariant": True}}
    assert resolved_on(GRPORun(**asked), **GPU).engine == "native"  # which then refuses the model


def test_a_resumed_run_is_resolved_to_an_equal_record() -> None:
    run = GRPORun(**BIG)
    before = resolved_on(run, **GPU)
    manifest = json.loads(json.dumps({"axes": before.axes}))
    assert resolved_on(run, manifest=manifest, **GPU) == before
    smaller = GPU | {"total_bytes": 40 * GIB}
    again = resolved_on(run, manifest=manifest, **smaller)
    assert again == resolved_on(run, **smaller) != before, "a plan is for GPUs of one size"


def test_a_run_that_goes_on_on_a_cpu_keeps_the_size_of_its_micro_batches_and_says_so() -> None:
    run = GRPORun(**BIG)
    axes = resolved_on(run, **GPU).axes
    moved = resolved_on(run, "cpu", manifest={"axes": axes})
    assert moved.token_budget == axes["token_budget"] == 32768 and moved.memory == {}
    why = "of the memory plan that the run had on a GPU; a CPU has none"
    assert f"train.token_budget auto -> 32768: {why}" in moved.reasons
    with raises(ConfigError, "wrong-type: train.token_budget"):
        resolved_on(run, "cpu", manifest={"axes": axes | {"token_budget": "many"}})
    back = resolved_on(run, manifest={"axes": moved.axes}, **GPU)
    assert back.token_budget == 32768 and back.memory["settings"], "it has a plan there again"


def test_a_manifest_from_before_reasons_were_written() -> None:
    run = GRPORun(**BIG)
    axes = {name: value for name, value in CHOICES.items() if name not in ("execution", "token_budget")}
    older = resolved_on(run, manifest={"axes": axes | {"layout": "packed"}}, **GPU)
    assert (older.layout, older.execution, older.token_budget) == ("packed", "compile", 32768)
    named = CHOICES | {"execution": "eager", "token_budget": 4096}
    kept = resolved_on(run, manifest={"axes": named}, **GPU)
    assert (kept.execution, kept.token_budget, kept.static_capacity) == ("eager", 4096, False)
    assert kept.reasons == []


def test_the_sizes_of_the_model_are_asked_for_once_and_only_where_a_choice_depends_on_them() -> None:
    asked: list[torch.dtype] = []

    def shape(*, dtype: torch.dtype) -> ModelShape:
        asked.append(dtype)
        return planned_shape(GRPORun(**BIG).model, dtype=dtype)

    def on(device: str, **train: Any) -> Resolved[GRPORun]:
        machine = Machine(device=device, total_bytes=80 * GIB)
        return resolve(GRPORun(**BIG, train=train), shape=shape, machine=machine, manifest={})

    on("cpu")
    settings = {"reshard_after_forward": True, "reduce_gradients": "auto", "optimizer_device": "model"}
    on("cuda", execution="eager", token_budget=4096, activation_checkpointing=False, **settings)
    asked.clear()  # what the engine keeps is planned
    assert on("cuda").execution == "compile"
    assert asked == [torch.bfloat16]


def test_a_model_that_refuses_batch_invariance_changes_nothing_else() -> None:
    resolved = resolved_on(GRPORun(**BIG), **GPU)
    without = resolved.without_batch_invariance()
    assert without.axes == resolved.axes | {"batch_invariant": False}
    assert (without.run.train.batch_invariant, without.given) == (False, resolved.given)


def test_a_plan_refuses_nothing_that_only_this_machine_lacks() -> None:
    run = GRPORun(train={"attention": "flex", "layout": "padded"}, engine={"name": "hf"})
    with raises(ConfigError, "unsupported-combination"):
        resolved_on(run)
    machine, shape = Machine(device="cpu"), partial(planned_shape, run.model)
    planned = resolve(run, shape=shape, machine=machine, manifest={}, refuse=False)
    assert (planned.support, planned.attention) == ("unsupported", "flex") and planned.support_note


def test_a_process_of_remote_roles_makes_the_same_record() -> None:
    resolved = resolved_on(GRPORun(**BIG), **GPU)
    sent = build(parse_toml(dump_toml(resolved.given).encode(), origin="test"), origin="test")
    assert Resolved.from_axes(sent, json.loads(json.dumps(resolved.axes))) == resolved
