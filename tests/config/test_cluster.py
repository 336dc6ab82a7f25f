from pathlib import PurePath

import pytest
from raising import raises

from lockstep.config.cluster import LONGEST_TEMP, ClusterConfig, check_temp_dir
from lockstep.config.load import load_run, override
from lockstep.config.run import RunConfig
from lockstep.errors import ConfigError


def cluster(**settings: object) -> ClusterConfig:
    values = {f"cluster.{name}": value for name, value in settings.items()}
    config = override(load_run(None, kind="grpo"), values, origin="test").cluster
    assert config is not None
    return config


def test_a_run_has_no_cluster_unless_it_says_so() -> None:
    assert load_run(None, kind="grpo").cluster is None
    assert cluster(nodes=2, slots=3).ranks == 6 and cluster(nodes=2, gpus=4).per_node == 4


def test_it_draws_the_ranks_of_each_node() -> None:
    assert cluster(nodes=2, slots=2).draw(["policy", "value"]) == [
        "node 0: [cpu 0: rank 0] [cpu 1: rank 1]  each: policy + value",
        "node 1: [cpu 0: rank 2] [cpu 1: rank 3]  each: policy + value",
    ]
    copied = cluster(nodes=3, peer_copy=True).draw(["policy"])
    assert copied[3:] == ["copies in memory after each step: node 0 -> node 1 -> node 2 -> node 0"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"nodes": 0}, "out-of-range: cluster.nodes"),
        ({"gpus": 2, "slots": 2}, "no-effect: cluster.slots"),
        ({"nodes": 2**16, "slots": 2}, "out-of-range: cluster.nodes, 131072"),
        ({"colocate": [["policy", "ref"], ["value", "policy"]]}, "duplicate: cluster.colocate, policy"),
        ({"colocate": [["ref"], ["value"]]}, "missing-setting: cluster.colocate"),
        ({"colocate": [["policy"], []]}, "empty: cluster.colocate"),
        ({"remote_seconds": 0}, "out-of-range: cluster.remote_seconds"),
        ({"colocate": [["actor"]]}, "unknown-name: cluster.colocate, actor"),
        ({"secrets": ["HF_TOKEN=hf_abc"]}, "wrong-format: cluster.secrets[0]"),
        ({"nodess": 2}, "unknown-setting: cluster.nodess"),
        ({"dedicated_gpus": True}, "no-effect: cluster.dedicated_gpus"),
        ({"dedicated_gpus": True, "colocate": [["policy", "ref"]]}, "no-effect: cluster.dedicated_gpus"),
        ({"dedicated_gpus": "mine"}, "wrong-type: cluster.dedicated_gpus"),
        ({"engine_gpus": -1}, "out-of-range: cluster.engine_gpus"),
    ],
)
def test_a_placement_that_cannot_be_is_refused(settings: dict[str, object], said: str) -> None:
    with raises(ConfigError, said) as refused:
        cluster(**settings)
    assert "hf_abc" not in str(refused.value)


def placed(*groups: list[str], kind: str = "ppo", **settings: object) -> RunConfig:
    values: dict[str, object] = {"cluster.colocate": groups} | settings
    if kind == "ppo":
        values = {"algorithm.kl.coef": 0.1} | values
    return override(load_run(None, kind=kind), values, origin="test")


@pytest.mark.parametrize(
    ("groups", "settings", "said"),
    [
        ([["policy", "ref"], ["value", "reward_model"]], {}, "unknown-name: cluster.colocate, reward_model"),
        ([["policy"], ["ref"]], {"model.lora.rank": 4}, "unknown-name: cluster.colocate, ref"),
        ([["policy"], ["ref"]], {"algorithm.kl.coef": 0.0}, "unknown-name: cluster.colocate, ref"),
        ([["policy"], ["value"]], {}, "missing-setting: cluster.colocate, ref"),
        ([["policy"], ["value"], ["ref"], ["reward_model"]], {}, "unknown-name: cluster.colocate"),
        ([["policy"], ["ref"]], {"kind": "sft"}, "unsupported-combination: cluster.colocate, sft"),
        (
            [["policy", "value"], ["ref"]],
            {"train.backend": "deepspeed"},
            "unsupported-combination: cluster.colocate, deepspeed",
        ),
        ([["policy", "ref"], ["value"]], {"record.enabled": True}, "unsupported-combination: record.enabled"),
    ],
)
def test_roles_that_cannot_be_placed_are_refused(
    groups: list[list[str]], settings: dict[str, object], said: str
) -> None:
    kind = str(settings.pop("kind", "ppo"))
    with raises(ConfigError, said):
        placed(*groups, kind=kind, **settings)


def test_each_group_without_the_policy_is_remote() -> None:
    run = placed(["value", "ref"], ["policy"])
    assert run.remote_groups == (("value", "ref"),) and run.cluster is not None
    assert run.cluster.draw(["policy", "ref", "value"]) == [
        "node 0: [cpu 0: rank 0]  each: policy",
        "  remote group 1: [cpu 0: beside rank 0]  each: value + ref",
    ]
    run = placed(["value"], ["policy"], ["ref"])
    assert (
        run.remote_groups == (("value",), ("ref",))
        and run.remote_roles == {"ref", "value"}
        and run.cluster is not None
    )
    assert run.cluster.draw(["policy", "ref", "value"]) == [
        "node 0: [cpu 0: rank 0]  each: policy",
        "  remote group 1: [cpu 0: beside rank 0]  each: value",
        "  remote group 2: [cpu 0: beside rank 0]  each: ref",
    ]
    assert placed(["policy", "ref", "value"]).remote_groups == ()
    assert placed(["policy"], kind="sft").remote_roles == frozenset()


OWN: dict[str, object] = {"cluster.dedicated_gpus": True}
SERVER: dict[str, object] = {"engine.process": "separate", "engine.name": "native", "cluster.engine_gpus": 1}


def test_it_draws_devices_of_remote_roles_and_engines() -> None:
    groups = (["policy"], ["value", "ref"])
    run = placed(*groups, **OWN, **SERVER, **{"cluster.gpus": 2, "cluster.nodes": 2})
    assert run.cluster is not None and run.cluster.draw(["policy", "ref", "value"]) == [
        "node 0: [gpu 0: rank 0] [gpu 1: rank 1]  each: policy",
        "  remote group 1: [gpu 2: beside rank 0] [gpu 3: beside rank 1]  each: value + ref",
        "  engines: [gpu 4: beside rank 0] [gpu 5: beside rank 1]",
        "node 1: [gpu 0: rank 2] [gpu 1: rank 3]  each: policy",
        "  remote group 1: [gpu 2: beside rank 2] [gpu 3: beside rank 3]  each: value + ref",
        "  engines: [gpu 4: beside rank 2] [gpu 5: beside rank 3]",
    ]
    wide = {**SERVER, "engine.replicas": 2, "cluster.engine_gpus": 2, "engine.memory_fraction": 0.5}
    run = placed(["policy", "value", "ref"], **wide)
    assert run.cluster is not None and run.cluster.draw(["policy"])[1:] == [
        "  engines: [cpu 1 + 2: beside rank 0]"
    ]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({**OWN, "train.device": "cuda:1"}, "contradiction: train.device"),
        ({"cluster.engine_gpus": 1}, "unsupported-combination: cluster.engine_gpus"),
        ({**SERVER, "cluster.engine_gpus": 2}, "contradiction: cluster.engine_gpus"),
        ({**SERVER, "engine.replicas": 2}, "contradiction: cluster.engine_gpus"),
        ({**SERVER, "engine.cuda_devices": [1]}, "contradiction: engine.cuda_devices"),
        ({**SERVER, "engine.transfer": "ipc"}, "contradiction: engine.transfer"),
        (
            {**OWN, **SERVER, "cluster.engine_gpus": 0, "engine.cuda_devices": [1]},
            "duplicate: engine.cuda_devices",
        ),
        (
            {"cluster.engine_gpus": 1, "engine.name": "vllm", "engine.url": "http://127.0.0.1:1"},
            "unsupported-combination: cluster.engine_gpus",
        ),
    ],
)
def test_devices_that_cannot_be_given_are_refused(settings: dict[str, object], said: str) -> None:
    with raises(ConfigError, said):
        placed(["policy"], ["value", "ref"], **settings)


def test_an_engine_beside_a_remote_role_with_a_device_of_its_own_is_taken() -> None:
    beside = {**OWN, **SERVER, "cluster.engine_gpus": 0}
    assert placed(["policy"], ["value", "ref"], **beside, **{"engine.cuda_devices": [2]}).remote_groups
    assert placed(["policy"], ["value", "ref"], **beside, **{"engine.cuda_devices": [0]}).remote_groups


def test_a_run_without_an_engine_has_no_devices_for_it() -> None:
    with raises(ConfigError, "no-effect: cluster.engine_gpus"):
        placed(["policy"], kind="sft", **{"cluster.engine_gpus": 1})


def test_a_node_with_too_few_gpus_is_refused_by_both_numbers() -> None:
    run = placed(["policy"], ["value"], ["ref"], **OWN, **SERVER)
    assert run.cluster is not None
    run.cluster.check_devices(run.cluster.layout(2), there=8)
    with raises(ConfigError, "not-enough: cluster.dedicated_gpus, 8 GPUs, only 7 are visible"):
        run.cluster.check_devices(run.cluster.layout(2), there=7)
    shared = run.cluster.model_copy(update={"dedicated_gpus": False, "engine_gpus": 0})
    shared.check_devices(shared.layout(2), there=1)  # ranks may share GPUs


def test_a_folder_too_long_for_sockets_is_refused() -> None:
    check_temp_dir(PurePath("/" + "x" * (LONGEST_TEMP - 1)))
    with raises(ConfigError, "too-long: cluster.temp_dir"):
        check_temp_dir(PurePath("/" + "x" * LONGEST_TEMP))
