"""Algorithms: compositions of lockstep.ops under their published names."""

from __future__ import annotations

from lockstep.config.algorithm import PER_GROUP
from lockstep.registry import Registry

_POLICY = "lockstep.algorithms.grpo:PolicyAlgorithm"

ALGORITHMS = Registry(
    "algorithm",
    {
        "grpo": _POLICY,
        "dr_grpo": _POLICY,
        "dapo": _POLICY,
        "rloo": _POLICY,
        "reinforce++": _POLICY,
        "reinforce++-baseline": _POLICY,
        "gspo": _POLICY,
        "gspo_token": _POLICY,
        "cispo": _POLICY,
        "sapo": _POLICY,
        "ppo": "lockstep.algorithms.ppo:PPO",
        "sft": "lockstep.algorithms.offline:SFT",
        "dpo": "lockstep.algorithms.offline:DPO",
        "bradley_terry": "lockstep.algorithms.offline:RewardModel",
    },
)
"""The classes behind `algorithm.name`: PolicyAlgorithm(config, max_tokens=...), PPO(config, max_tokens=...),
SFT(config), DPO(config) and RewardModel(config)."""

ADVANTAGES = Registry(
    "advantage estimator",
    {name: f"lockstep.ops.advantages:{name}" for name in PER_GROUP},
)
"""The functions behind `algorithm.advantage` that compare rewards within a group: they map rewards [G, n]
float64 and mask [G, n] bool (False for lost rollouts) to advantages [G, n]."""

OBJECTIVES = Registry(
    "objective",
    {
        "ppo_clip": "lockstep.algorithms.policy_loss:clipped_objective",
        "cispo": "lockstep.algorithms.policy_loss:cispo_objective",
        "sapo": "lockstep.algorithms.policy_loss:sapo_objective",
    },
)
"""The functions behind `algorithm.objective`: they map PolicyTerms and the resolved GRPOConfig to the loss of
each token, [R]. KL, entropy, rollout_is_weight and loss_weights are applied to the result."""
