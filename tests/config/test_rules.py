"""Rules about combinations of settings: each has a config here that breaks it, and nothing before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError
from raising import problems

from lockstep.config.algorithm import DPOConfig, RolloutCorrectionConfig
from lockstep.config.batch import GenerateConfig, RewardRoleConfig, ScoreConfig
from lockstep.config.cluster import ClusterConfig
from lockstep.config.engine import EngineConfig, check_engine
from lockstep.config.environment import EnvironmentConfig
from lockstep.config.model import LoraConfig
from lockstep.config.ppo import PPOConfig, PPOKLConfig, PPORun
from lockstep.config.record import RecordConfig
from lockstep.config.rollout import RewardConfig, RolloutConfig, SamplingConfig
from lockstep.config.rule import Rule
from lockstep.config.rules import RULES, refuse
from lockstep.config.run import DPORun, GRPORun, RewardModelRun, SFTRun
from lockstep.config.support import check_backend
from lockstep.config.train import EvalConfig, TrainConfig
from lockstep.config.value import ValueConfig
from lockstep.errors import CODES, ConfigError


def train(**values: Any) -> None:
    check_backend(TrainConfig(**values), lora=False)


def deepspeed(**values: Any) -> None:
    refuse(TrainConfig(**values), "train (deepspeed)")


def deepspeed_optimizer(**values: Any) -> None:
    refuse(TrainConfig(**values), "train (deepspeed's optimizers)")


def engine(**values: Any) -> None:
    check_engine(EngineConfig(**values))


VLLM = {"name": "vllm", "python": "/env/bin/python"}
GREEDY = {"sampling": {"temperature": 0.0}}
CORRECTED = {"rollout_correction": {"kind": "tis"}}
LAG = {"rollout": {"max_lag": 1}, "algorithm": CORRECTED}
FIXED = LAG | {"rollout": {"max_lag": 1, "schedule": "fixed"}}
APART = {"name": "native", "process": "separate"}
ENDLESS = {"sampling": {"ignore_eos": True}}
LONGEST = {"min_tokens": 9}
REMOTE = {"gpus": 1, "dedicated_gpus": True, "colocate": (("policy",), ("value",))}
BREAKING: dict[str, tuple[Callable[..., Any], list[dict[str, Any]]]] = {
    "algorithm (dpo)": (
        DPOConfig,
        [
            {"name": "kto", "desirable_weight": 0.0, "undesirable_weight": 0.0},
            {"name": "kto", "average": True},
            {"name": "orpo", "average": False},
        ],
    ),
    "algorithm (ppo)": (
        PPOConfig,
        [{"reward_clip": (1.0, 1.0)}, {"lam": 0.5, "lam_length_alpha": 0.05}],
    ),
    "algorithm.kl (ppo)": (
        PPOKLConfig,
        [{"target": 6.0, "coef": 0.0}, {"target": 6.0, "coef": 0.1, "place": "loss"}],
    ),
    "algorithm.rollout_correction": (
        RolloutCorrectionConfig,
        [{"geometric_low": 0.5}, {"kind": "icepop", "low": 2.0, "high": 2.0}],
    ),
    "engine": (
        engine,
        [
            {"name": "sglang", "url": "http://127.0.0.1:8000", "transfer": "ipc"},
            {"name": "vllm", "url": "127.0.0.1:8000"},
        ],
    ),
    "cluster": (ClusterConfig, [{"gpus": 2, "slots": 2}, {"dedicated_gpus": True}]),
    "engine (devices)": (
        engine,
        [
            VLLM | {"tp": 2, "cuda_devices": (0,)},
            VLLM | {"tp": 2, "cuda_devices": (1, 1)},
            VLLM | {"replicas": 2, "cuda_devices": (1, 1)},
        ],
    ),
    "engine (in the trainer's process)": (engine, [{"name": "hf", "transfer": "disk"}]),
    "engine (servers)": (
        engine,
        [{"name": "vllm", "python": "/env/bin/python", "url": "http://127.0.0.1:8000"}],
    ),
    "engine (seeds)": (engine, [{"name": "sglang", "unseeded": True, "batch_invariant": True}]),
    "eval": (EvalConfig, [{"samples_per_prompt": 2}]),
    "generate": (
        GenerateConfig,
        [
            {"n": 2, "sampling": {"temperature": 0.0}},
            {"model": {"name": "m", "lora": {}}},
            {"iteration": 0, "max_samples": 4},
            {"data": {"source": "ids", "shuffle": False}},
        ],
    ),
    "environment": (
        EnvironmentConfig,
        [
            {},
            {"name": "m:C", "classes": {"c": "m:C"}},
            {"name": "Calculator"},
            {"name": "m:C", "column": "kind"},
        ],
    ),
    "model.lora": (LoraConfig, [{"target_parameters": ("experts.down_proj",), "dropout": 0.1}]),
    "record": (RecordConfig, [{"first_step": 3, "last_step": 2}]),
    "reward_model": (RewardRoleConfig, [{"name": "m", "aggregation": "min"}]),
    "rewards": (RewardConfig, [{"name": "math", "secrets": {"key": "env:KEY"}}]),
    "rewards (http)": (RewardConfig, [{"name": "http"}]),
    "rollout": (
        RolloutConfig,
        [{"max_trajectory_tokens": 100}, {"schedule": "fixed"}, {"slots": 8}],
    ),
    "rollout.sampling": (SamplingConfig, [{"min_tokens": 9, "max_tokens": 8}, {"top_k": 0}]),
    "run": (SFTRun, [{"train": {"min_lr_ratio": 0.1, "schedule": "constant"}}]),
    "run (dpo)": (DPORun, [{"algorithm": {"name": "kto"}, "batch_size": 1}]),
    "run (offline)": (
        SFTRun,
        [{"train": {"reuse_rollout_logprobs": False}}, {"log": {"token_details": True}}],
    ),
    "run (ppo)": (
        PPORun,
        [
            {"value": {"warmup_batches": 2}, "steps": 2},
            {"algorithm": {"kl": {"coef": 0.1, "place": "reward", "target": 6.0, "horizon": 8}}},
            {"train": {"backend": "deepspeed", "execution": "deepcompile"}},
        ],
    ),
    "run (record)": (SFTRun, [{"record": {"enabled": True, "first_step": 2}, "steps": 2}]),
    "run (remote roles)": (SFTRun, [{"cluster": {"gpus": 1, "colocate": (("policy",), ("ref",))}}]),
    "run (rl lag)": (
        GRPORun,
        [
            LAG | {"engine": {"name": "hf"}},
            FIXED | {"rewards": (), "environment": {"name": "m:C"}, "engine": APART},
            FIXED | {"engine": {"name": "native"}},
            FIXED | {"engine": APART},
            FIXED | {"engine": APART | {"replicas": 2}, "train": {"batch_invariant": True}},
            FIXED | {"engine": APART | {"offload": True}, "train": {"batch_invariant": True}},
            LAG | {"engine": APART, "train": {"deterministic": True}},
            LAG | {"algorithm": CORRECTED | {"dynamic_sampling": True}},
            {"rollout": {"max_lag": 1}},
            LAG | {"train": {"batch_invariant": True, "reuse_rollout_logprobs": True}},
        ],
    ),
    "run (rl)": (
        GRPORun,
        [
            {"rollout": {"group_size": 1}},
            {"algorithm": {"mask_truncated": True}, "rollout": ENDLESS},
            {"rollout": GREEDY},
            {"rewards": ()},
            {"log": {"token_details": True}, "rollout": {"save": False}},
        ],
    ),
    "run (rl offload)": (
        PPORun,
        [
            {"offload": ("policy", "policy")},
            {"offload": ("value",), "train": {"execution": "joint", "cuda_graph": True}},
            {"offload": ("value",), "record": {"enabled": True}},
        ],
    ),
    "run (rl remote roles)": (
        PPORun,
        [
            {"cluster": REMOTE, "train": {"backend": "deepspeed"}},
            {"cluster": REMOTE, "record": {"enabled": True}},
        ],
    ),
    "run (rl sizes)": (
        GRPORun,
        [
            {"eval": {"max_tokens": 8}, "rollout": {"sampling": LONGEST}},
            {"data": {"size": 4}},
            {"train": {"token_budget": 64}},
            {"engine": {"name": "native", "kv_cache_tokens": 64}},
            {"train": {"minibatches": 7}},
        ],
    ),
    "run (rm)": (RewardModelRun, [{"train": {"batch_invariant": True}}]),
    "score": (ScoreConfig, [{}]),
    "value": (
        ValueConfig,
        [{"loss": "squared", "huber_delta": 2.0}, {"name": "policy", "revision": "main"}],
    ),
    "train": (
        train,
        [
            {"backend": "fsdp2", "tp_plan": "hf"},
            {"backend": "fsdp2", "ring_comm": "p2p"},
            {"cuda_graph": True},
        ],
    ),
    "train (deepspeed)": (
        deepspeed,
        [
            {"execution": "deepcompile", "zero_stage": 0},
            {"execution": "joint", "zero_stage": 3},
            {"ring": 2},
            {"tp": 2},
            {"optimizer_device": "cpu", "zero_stage": 0},
            {"parameter_device": "cpu", "zero_stage": 2},
            {"parameter_device": "cpu", "zero_stage": 3},
            {"execution": "deepcompile", "zero_stage": 2, "optimizer_device": "cpu"},
        ],
    ),
    "train (deepspeed's optimizers)": (deepspeed_optimizer, [{"optimizer": "adamw8bit"}]),
    "train (joint graphs)": (train, [{"execution": "joint", "static_capacity": False}]),
    "train (batch-invariant)": (
        train,
        [
            {"backend": "fsdp2", "batch_invariant": True, "ring": 2, "ring_comm": "p2p"},
            {"reuse_rollout_logprobs": True, "batch_invariant": False},
        ],
    ),
    "train (ring)": (
        train,
        [
            {"backend": "fsdp2", "ring": 2, "layout": "padded"},
            {"backend": "fsdp2", "ring": 2, "execution": "compile"},
            {"backend": "fsdp2", "ring": 2, "attention": "flex"},
        ],
    ),
    "train (experts)": (
        train,
        [
            {"backend": "fsdp2", "ep": 2, "tp": 2},
            {"backend": "fsdp2", "ep": 2, "execution": "compile"},
        ],
    ),
    "train (backends of several ranks)": (
        train,
        [{"backend": "fsdp2", "optimizer": "adamw8bit"}, {"backend": "fsdp2", "device": "cuda:1"}],
    ),
}
CASES = [
    pytest.param(rule, make, values, id=f"{table}-{rule.setting}-{number}")
    for table, rules in RULES.items()
    for make, all_values in [BREAKING[table]]
    for number, (rule, values) in enumerate(zip(rules, all_values, strict=True))
]


@pytest.mark.parametrize(("rule", "make", "values"), CASES)
def test_each_rule_has_a_config_that_breaks_it(
    rule: Rule, make: Callable[..., Any], values: dict[str, Any]
) -> None:
    assert rule.code in CODES
    with pytest.raises((ValidationError, ConfigError)) as caught:
        make(**values)
    (problem,) = problems(caught.value)
    assert (problem["code"], problem["setting"]) == (rule.code, rule.setting)
    begins = rule.text.partition("{")[0]
    assert begins in str(caught.value) and "{0" not in str(caught.value)


def test_the_first_rule_that_is_broken_is_the_error() -> None:
    with pytest.raises(ConfigError) as caught:
        refuse(SamplingConfig.model_construct(min_tokens=9, max_tokens=8, top_k=0), "rollout.sampling")
    assert str(caught.value) == "min_tokens = 9 exceeds max_tokens = 8; lower min_tokens"
    refuse(SamplingConfig.model_construct(min_tokens=0, max_tokens=8, top_k=1), "rollout.sampling")
