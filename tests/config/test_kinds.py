"""What a run answers for its kind."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from lockstep.config.load import RUN_KINDS, load_run
from lockstep.config.run import RunConfig

SRC = Path(__file__).parents[2] / "src"


def run_of(kind: str, **settings: Any) -> RunConfig:
    return load_run(kind=kind, overrides={name.replace("__", "."): v for name, v in settings.items()})


@pytest.mark.parametrize(
    ("kind", "settings", "answers"),
    [
        ("grpo", {}, {"online": True, "has_ref": False, "roles": ("policy",), "critic": None}),
        ("grpo", {"algorithm__kl__coef": 0.1}, {"has_ref": True, "roles": ("policy", "ref")}),
        (
            "grpo",
            {"algorithm__kl__coef": 0.1, "model__lora": {"rank": 4}},
            {"has_ref": True, "roles": ("policy",)},  # the adapters are turned off for it
        ),
        ("grpo", {"rollout__prompts_per_step": 3, "rollout__group_size": 4}, {"tokens_per_step": 12 * 512}),
        ("ppo", {"value__warmup_batches": 3, "steps": 10}, {"policy_steps": 7, "roles": ("policy", "value")}),
        ("ppo", {"value__schedule": "cosine"}, {"schedules": frozenset({"constant", "cosine"})}),
        ("ppo", {"value__name": "there"}, {"model_names": {"model.name": None, "value.name": "there"}}),
        ("sft", {}, {"online": False, "roles": ("policy",), "sampling": None, "reward_functions": ()}),
        ("sft", {"data__max_length": 100, "batch_size": 6}, {"tokens_per_step": 600, "has_groups": False}),
        ("dpo", {"data__max_length": 100, "batch_size": 6}, {"tokens_per_step": 1200, "has_groups": True}),
        ("dpo", {}, {"has_ref": True, "roles": ("policy", "ref"), "engine_name": None}),
        ("dpo", {"algorithm__name": "kto"}, {"has_groups": False, "has_ref": True}),
        ("rm", {}, {"has_ref": False, "roles": ("policy",), "offloaded": (), "keeps_rollouts": False}),
    ],
)
def test_answers(kind: str, settings: dict[str, Any], answers: dict[str, Any]) -> None:
    lengths = {"data__max_prompt_tokens": 256, "rollout__sampling__max_tokens": 256}
    run = run_of(kind, **(lengths if RUN_KINDS[kind].online else {}), **settings)
    if "model_names" in answers:
        answers = {"model_names": answers["model_names"] | {"model.name": run.model.name}}
    assert {name: getattr(run, name) for name in answers} == answers


@pytest.mark.parametrize(
    ("kind", "settings", "row", "read"),
    [
        ("grpo", {}, {}, ["prompt_column"]),
        ("grpo", {}, {"messages": []}, []),
        ("sft", {}, {}, []),
        ("dpo", {}, {}, ["chosen_column", "rejected_column"]),
        ("rm", {}, {"chosen": "a"}, ["chosen_column", "rejected_column", "prompt_column"]),
        ("dpo", {"algorithm__name": "kto"}, {"label": True}, ["prompt_column", "completion_column"]),
        ("dpo", {"algorithm__name": "kto"}, {"chosen": []}, ["chosen_column", "rejected_column"]),
    ],
)
def test_columns_that_a_row_must_have(
    kind: str, settings: dict[str, Any], row: dict[str, Any], read: list[str]
) -> None:
    run = run_of(kind, **settings)
    assert run.columns_read(run.data, row) == read


def test_data_sections_and_the_run_without_its_rewards() -> None:
    run = run_of("grpo", eval_data__source="ids", data__source="ids", rewards=[{"name": "ids"}])
    assert list(run.data_sections) == ["data", "eval_data"]
    assert run.without_rewards().reward_functions == () != run.reward_functions
    other = run_of("sft")
    assert other.data_sections == {"data": other.data} and other.without_rewards() is other


def test_nobody_asks_for_the_class_of_a_run() -> None:
    kinds = "|".join([*(kind.__name__ for kind in RUN_KINDS.values()), "OfflineRun", "PairRun"])
    asked = re.compile(rf"isinstance\([^,]*,[^)]*\b({kinds})\b")
    files = [file for file in SRC.rglob("*.py") if asked.search(file.read_text(encoding="utf-8"))]
    assert files == [], "an answer of the kind, on its class in lockstep.config, takes the question's place"
