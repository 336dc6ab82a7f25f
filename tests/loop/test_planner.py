"""The memory planner against two tables of forty runs, which were written before it, and what it says."""

from __future__ import annotations

import dataclasses
from typing import Any

import planner_rows_a as author_a
import planner_rows_b as author_b
import pytest

from lockstep.config.load import load_run
from lockstep.config.run import RunConfig, on_ranks
from lockstep.loop.memory_plan import CUDA_RUNTIME
from lockstep.loop.planner import Candidate, Place, Planner, setting, with_settings
from lockstep.models.memory import GIB, ModelShape

GPUS = {
    24: "NVIDIA GeForce RTX 4090",
    40: "NVIDIA A100-PCIE-40GB",
    80: "NVIDIA H100 80GB HBM3",
    141: "NVIDIA H200",
}
PATHS = {
    "activation_checkpointing": "train.activation_checkpointing",
    "reshard_after_forward": "train.reshard_after_forward",
    "reduce_gradients": "train.reduce_gradients",
    "engine_offload": "engine.offload",
    "optimizer_device": "train.optimizer_device",
}
DISAGREE: dict[str, dict[str, str]] = {"a": {}, "b": {}}
"""Where the planner chooses something else than an author accepts, and why; test_planner fails too when a
disagreement is gone."""


def shape_of(case: dict[str, Any]) -> ModelShape:
    sizes = author_a.SHAPES[case["model"]]
    queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    layer = sizes.hidden * (2 * queries + 2 * keys) + 3 * sizes.hidden * sizes.intermediate
    parameters = sizes.layers * layer + (1 if sizes.tied else 2) * sizes.vocab * sizes.hidden
    lora = case["lora_rank"] > 0
    same = ("layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim", "vocab")
    return ModelShape(
        **{name: getattr(sizes, name) for name in same},
        norm_width=2 * sizes.hidden,
        parameters=parameters,
        trained=parameters // 200 if lora else parameters,
        dtype_bytes=2,
        lora=lora,
    )


def run_of(case: dict[str, Any]) -> RunConfig:
    settings: dict[str, Any] = {
        "model.name": "shape:llama-3.1-8b",
        "model.dtype": "bfloat16",
        "train.tp": case["tp"],
        "train.execution": "compile",
        "train.attention": "varlen",
        "train.layout": "packed",
    }
    if case["kind"] in ("grpo", "ppo"):
        settings |= {
            "rollout.prompts_per_step": case["prompts"],
            "rollout.group_size": case["group"],
            "rollout.sampling.max_tokens": case["max_tokens"],
            "data.max_prompt_tokens": case["prompt_tokens"],
            "data.source": "ids",
            "rewards": [{"name": "ids"}],
            "engine.name": "native",
            "engine.max_batch": case["max_batch"],
            "algorithm.kl.coef": 0.01 * case["kl"],
        }
    else:
        settings |= {
            "batch_size": case["documents"],
            "data.source": "x.jsonl",
            "data.max_length": case["length"],
        }
    if case["lora_rank"]:
        settings["model.lora"] = {"rank": case["lora_rank"]}
    run = on_ranks(load_run(kind=case["kind"], overrides=settings), case["ranks"])
    return with_settings(run, {"train.batch_invariant": case["tp"] == 1})


def place_of(case: dict[str, Any]) -> Place:
    total = int(author_a.USABLE_GIB[case["gib"]] * GIB)
    return Place(gpu=GPUS[case["gib"]], total_bytes=total, ranks=case["ranks"])


def planner_of(case: dict[str, Any]) -> Planner[RunConfig]:
    shape = shape_of(case)
    value = dataclasses.replace(shape, vocab=1) if case["kind"] == "ppo" else None
    return Planner(run_of(case), shape=shape, place=place_of(case), value_shape=value)


def accepts(row: Any, run: RunConfig) -> bool:
    """Whether the plan of `run` is one that an author accepts."""

    def holds(key: str, wanted: Any) -> bool:
        budget = run.train.token_budget
        assert budget != "auto"
        if key.startswith("token_budget"):
            return budget >= wanted if key.endswith("least") else budget <= wanted
        return (
            ("ref" in run.offloaded) == wanted if key == "offload_ref" else setting(run, PATHS[key]) == wanted
        )

    return any(all(holds(key, wanted) for key, wanted in plan.items()) for plan in row.acceptable)


def difference(row: Any, planner: Planner[RunConfig], found: Candidate | None) -> str:
    """What an author's row and the plan differ in; empty: nothing."""
    if found is None or not row.fits:
        return "" if (found is None) == (not row.fits) else "fits"
    if not accepts(row, with_settings(planner.run, found.settings)):
        return "settings"
    outside = next(part.bytes for part in found.plan.parts if part.name == CUDA_RUNTIME)
    low, high = row.peak_gib
    return "" if low <= (found.plan.peak_bytes - outside) / GIB <= high else "peak"


@pytest.mark.parametrize("key", author_a.CASES)
def test_the_planner_agrees_with_both_authors_or_the_disagreement_is_listed(key: str) -> None:
    planner = planner_of(author_a.CASES[key])
    found = planner.fitting()
    for name, rows in (("a", author_a.EXPECTED), ("b", author_b.EXPECTED)):
        listed = DISAGREE[name].get(key, "").partition(":")[0]
        assert difference(rows[key], planner, found) == listed, (name, found and found.settings)
