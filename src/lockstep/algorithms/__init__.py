"""Algorithms: compositions of lockstep.ops under their published names."""

from __future__ import annotations

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
        "cispo": _POLICY,
        "sft": "lockstep.algorithms.sft:SFT",
        "dpo": "lockstep.algorithms.dpo:DPO",
    },
)
"""The classes behind `algorithm.name`. PolicyAlgorithm(config, max_tokens=...); SFT(config); DPO(config)."""
