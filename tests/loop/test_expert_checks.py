"""What a model with experts or delta nets cannot be combined with, by setting, before weights are read."""

import pytest
from raising import raises

from lockstep.cli.common_model import check_heads
from lockstep.config.load import load_run
from lockstep.config.run_config import on_ranks
from lockstep.errors import ConfigError
from lockstep.loop.expert_checks import check_experts
from lockstep.models.load import open_model
from lockstep.models.tensor_parallel import check_tensor_parallel_size

MOE = {"model.name": "shape:tiny-qwen3-moe", "train.backend": "local", "engine.name": "native"}
FSDP2 = {"train.backend": "fsdp2"}


@pytest.mark.parametrize(
    ("settings", "name", "value"),
    [
        ({"train.backend": "deepspeed"}, "train.backend", "'deepspeed'"),
        (FSDP2 | {"train.tp": 2}, "train.tp", "2"),
        (FSDP2 | {"train.ring": 2}, "train.ring", "2"),
        ({"train.execution": "joint"}, "train.execution", "'joint'"),
        ({"engine.name": "vllm"}, "engine.name", "'vllm'"),
        ({"engine.name": "sglang", "engine.unseeded": True}, "engine.name", "'sglang'"),
        ({"engine.process": "separate"}, "engine.process", "'separate'"),
    ],
)
def test_a_setting_that_no_test_covers_is_named(settings, name, value):
    run = load_run("tiny", overrides=MOE | settings)
    with raises(ConfigError, f"unsupported-combination: {name}, {value}, qwen3_moe"):
        check_experts(run, open_model(run.model))
    with raises(ConfigError, f"unsupported-combination: {name}"):
        check_experts(run, None)
    check_experts(load_run("tiny", overrides=MOE | settings | {"model.name": "shape:tiny-llama"}), None)


@pytest.mark.parametrize(
    ("settings", "name", "value"),
    [
        ({"engine.name": "native"}, "engine.name", "'native'"),
        ({"engine.name": "vllm"}, "engine.name", "'vllm'"),
        ({"train.backend": "deepspeed"}, "train.backend", "'deepspeed'"),
        ({"train.execution": "joint"}, "train.execution", "'joint'"),
    ],
)
def test_delta_nets_are_decoded_by_engine_hf_alone(settings, name, value):
    delta_nets = MOE | {"model.name": "shape:tiny-qwen3.5", "engine.name": "hf"}
    check_experts(load_run("tiny", overrides=delta_nets), None)
    with raises(ConfigError, f"unsupported-combination: {name}, {value}, qwen3_5_text"):
        check_experts(load_run("tiny", overrides=delta_nets | settings), None)


@pytest.mark.parametrize(
    "settings",
    [{}, FSDP2, {"engine.name": "hf"}, {"train.execution": "compile", "train.router_aux_loss": 0.1}],
)
def test_what_the_parity_tests_cover_is_let_through(settings):
    check_experts(load_run("tiny", overrides=MOE | settings), None)


def test_samples_are_not_balanced_one_by_one():
    one_by_one = MOE | {"train.accumulate": "sample", "train.router_z_loss": 0.1}
    check_experts(load_run("tiny", overrides=one_by_one), None)
    run = load_run("tiny", overrides=one_by_one | {"train.router_aux_loss": 0.1})
    with raises(ConfigError, "unsupported-combination: train.router_aux_loss, train.accumulate"):
        check_experts(run, None)


@pytest.mark.parametrize("name", ["router_aux_loss", "router_z_loss", "route_changes_every"])
def test_a_router_loss_without_routers_is_refused(name):
    run = load_run("tiny", overrides={"model.name": "shape:tiny-llama", f"train.{name}": 2})
    with raises(ConfigError, f"no-effect: train.{name}, llama"):
        check_experts(run, None)


def test_tensor_parallel_is_refused_where_the_plan_asks():
    config = open_model(load_run("tiny", overrides=MOE).model).text
    check_tensor_parallel_size(config, 1)
    with raises(ConfigError, "unsupported-combination: train.tp, 2, qwen3_moe"):
        check_tensor_parallel_size(config, 2)


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"train.ep": 3}, "not-divisible: train.ep, 3, 8 experts, 1, 2, 4, 8"),
        ({"train.ep": 2, "model.name": "shape:tiny-llama"}, "no-effect: train.ep, 2, llama"),
    ],
)
def test_experts_that_cannot_be_split_are_named(settings, found):
    run = load_run("tiny", overrides=MOE | FSDP2 | settings)
    for check in (lambda: check_experts(run, open_model(run.model)), lambda: check_heads(run)):
        with raises(ConfigError, found):
            check()
    split = load_run("tiny", overrides=MOE | FSDP2 | {"train.ep": 2})
    check_experts(split, None)
    assert on_ranks(split, 4) == split
    for ranks, named in ((1, "1 rank"), (3, "3 ranks")):
        with raises(ConfigError, f"not-divisible: train.ep, {named}"):
            on_ranks(split, ranks)


def test_only_fsdp2_splits_experts():
    with raises(ConfigError, "no-effect: train.ep, 2, local"):
        load_run("tiny", overrides=MOE | {"train.ep": 2})
    auto = load_run("tiny", overrides=MOE | {"train.backend": "auto", "train.ep": 2})
    assert on_ranks(auto, 2).train.backend == "fsdp2"
