"""FSDP2Backend against LocalBackend: loss, logprobs, gradients, optimizer steps, errors and checkpoints, on
meshes of 2 and of 4 ranks. One launch of processes runs many checks of fsdp2_worker.py."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from raising import raises
from selected import exhaustive, selected
from starting import run_ranks

from lockstep.config.train import TrainConfig
from lockstep.errors import ConfigError
from lockstep.train.fsdp2.backend import FSDP2Backend
from lockstep.train.fsdp2.sharded_model import mesh_sizes

WORKER = Path(__file__).with_name("fsdp2_worker.py")
TIMEOUT = 480
TWO = (
    *(
        "sgd",
        "adamw",
        "tp",
        "tp_tied",
        "ring",
        "ring_gather",
        "ring_whole",
        "ring_of_few",
        "value",
        "value_tp",
    ),
    *("value_ring", "value_static", "joint", "joint_ref", "joint_ref_alone", "joint_collectives"),
    *("checkpointing", "gathered_between", "static_padded", "offloaded_parameters", "ref"),
    *("reduced_each", "reduced_each_in_steps", "reduced_each_joint", "reduced_each_compiled"),
    *("not_finite_reduced_each", "recovers_reduced_each", "weights_one_at_a_time"),
    *("one_micro_batch", "several_calls", "collectives", "not_finite", "other_batches"),
    *(
        "preferences",
        "recovers",
        "rest",
        "nothing_to_train",
        "routers_without_trained_tokens",
        "groups_left_out",
        "bfloat16",
    ),
    *("sharded_start", "checkpoint_of_local", "deadlines", "hf_plan", "export", "lora", "lora_tp"),
    *("lora_ring", "lora_checkpointing", "lora_offloaded", "lora_optimizer_on_host"),
    *("lora_compiled", "lora_joint", "lora_value", "lora_value_tp", "lora_ref", "lora_state"),
    *("experts", "experts_of_families", "experts_steps", "experts_checkpointing", "experts_settings"),
    *("experts_state", "experts_refused"),
)
FOUR = (
    *("preferences", "value", "dp_tp", "dp_ring", "ring_tp", "checkpoints", "not_finite_tp"),
    *("sharded_start_tp", "hf_plan_refused", "lora", "lora_ring_tp", "lora_value"),
    *("experts_of_families", "experts_steps", "experts_state", "experts_refused"),
)

QUICK_ON_TWO = (
    *(
        "sgd",
        "tp",
        "ring",
        "ring_gather",
        "value",
        "joint",
        "static_padded",
        "ref",
        "collectives",
        "not_finite",
    ),
    *("recovers", "rest", "groups_left_out", "sharded_start", "checkpoint_of_local", "deadlines"),
    "routers_without_trained_tokens",
    *("export", "lora_tp", "lora_state", "reduced_each", "not_finite_reduced_each"),
    *("weights_one_at_a_time", "experts", "experts_state"),
)
QUICK_ON_FOUR = ("ring_tp",)

Results = dict[str, list[dict[str, Any]]]


def launch(ranks: int, checks: Sequence[str]) -> Results:
    """What each rank says of each check."""
    found: Results = defaultdict(list)
    for printed in run_ranks(WORKER, *checks, ranks=ranks, seconds=TIMEOUT):
        for result in printed:
            found[result["check"]].append(result)
    return found


@pytest.fixture(scope="module")
def of_two(request: pytest.FixtureRequest) -> Results:
    return launch(2, [case["check"] for case in selected(request, "test_on_two_ranks")])


@pytest.fixture(scope="module")
def of_four(request: pytest.FixtureRequest) -> Results:
    return launch(4, [case["check"] for case in selected(request, "test_on_four_ranks")])


@pytest.mark.slow
@pytest.mark.parametrize("check", exhaustive(TWO, quick=QUICK_ON_TWO))
def test_on_two_ranks(of_two: Results, check: str) -> None:
    passed(of_two[check], ranks=2)


@pytest.mark.slow
@pytest.mark.parametrize("check", exhaustive(FOUR, quick=QUICK_ON_FOUR))
def test_on_four_ranks(of_four: Results, check: str) -> None:
    passed(of_four[check], ranks=4)


def passed(results: list[dict[str, Any]], *, ranks: int) -> None:
    assert len(results) == ranks
    for rank, result in enumerate(results):
        assert result["ok"], f"rank {rank}: {result['seen']}"


def test_sizes_that_do_not_divide_are_named() -> None:
    assert mesh_sizes(8, ring=2, tp=2) == (2, 2, 2)
    with raises(ConfigError, "not-divisible: train.tp", ranks=6):
        mesh_sizes(6, ring=2, tp=2)


@pytest.mark.parametrize(
    ("train", "said"),
    [
        ({"execution": "deepcompile"}, "unsupported-combination: train.execution"),
        ({"optimizer": "adamw8bit"}, "unsupported-combination: train.optimizer"),
        ({"ring": 2, "layout": "padded"}, "unsupported-combination: train.layout"),
        ({"ring": 2, "execution": "compile"}, "unsupported-combination: train.execution"),
        ({"tp": 2}, "not-divisible: train.tp, 1"),
    ],
)
def test_what_it_does_not_have_is_refused(tiny_model: Any, train: dict[str, Any], said: str) -> None:
    with raises(ConfigError, said):
        FSDP2Backend(TrainConfig(**train), model=tiny_model(), total_steps=1)


def test_one_process_and_a_module_with_weights(
    make_backend: Any, tiny_model: Any, documents: Any, batch_of: Any, loss: Any
) -> None:
    """Nobody launched ranks, and the model was loaded whole."""
    local = make_backend(lr=1e-3)
    model = dataclasses.replace(tiny_model(), source=None)
    backend = FSDP2Backend(TrainConfig(lr=1e-3), model=model, total_steps=10)
    for step in range(3):
        batches = [batch_of(documents(3, seed=step), weight=1 / 30)]
        expected, found = local.forward_backward(batches, loss), backend.forward_backward(batches, loss)
        assert float(found.losses[0]) == pytest.approx(float(expected.losses[0]), rel=1e-5)
        norms = backend.optimizer_step()["grad_norm"], local.optimizer_step()["grad_norm"]
        assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    backend.close()


def test_a_module_with_weights_in_bfloat16_keeps_its_float32_tables(
    make_backend: Any, tiny_model: Any, documents: Any, batch_of: Any
) -> None:
    """Nothing will be trained, so the shards are bfloat16 too; rotary frequencies must not be."""
    batches = [batch_of(documents(3, seed=0), weight=1 / 30)]
    backend = FSDP2Backend(TrainConfig(), model=tiny_model(dtype="bfloat16"), total_steps=0)
    assert {buffer.dtype for buffer in backend.module.buffers()} == {torch.float32}
    expected = make_backend(dtype="bfloat16", total_steps=0).logprobs(batches)
    assert torch.equal(backend.logprobs(batches)[0], expected[0])
