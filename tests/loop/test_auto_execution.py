"""train.execution = "auto": compiled where the steps of the run pay for it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from raising import raises
from resolving import resolved_on

from lockstep.config.load import load_run
from lockstep.config.run import RunConfig
from lockstep.errors import ConfigError
from lockstep.loop.resolve import (
    COMPILE_SECONDS,
    SAVED_SAMPLING,
    SAVED_TRAINING,
    choose_execution,
    resolve_execution,
    seconds_saved_per_step,
    steps_to_pay,
)

BILLION = 10**9
PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "execution-modes.md"
RL = {
    "model.dtype": "bfloat16",
    "engine.name": "native",
    "rollout.prompts_per_step": 8,
    "rollout.group_size": 16,
    "data.max_prompt_tokens": 500,
    "rollout.sampling.max_tokens": 500,
}


def grpo(**settings: Any) -> RunConfig:
    return load_run(kind="grpo", overrides=RL | {name.replace("__", "."): v for name, v in settings.items()})


def sft(**settings: Any) -> RunConfig:
    fields = {"model.dtype": "bfloat16", "batch_size": 32, "data.max_length": 1024} | settings
    return load_run(kind="sft", overrides={name.replace("__", "."): v for name, v in fields.items()})


def chosen(run: RunConfig, *, parameters: int = BILLION, device: str = "cuda", ranks: int = 1) -> str:
    return resolve_execution(run, device=device, parameters=parameters, ranks=ranks).value


def test_what_a_step_saves_worked_by_hand() -> None:
    assert grpo().tokens_per_step == 8 * 16 * 1000
    assert sft().tokens_per_step == 32 * 1024
    pairs = load_run(kind="dpo", overrides={"batch_size": 32, "data.max_length": 1024})
    assert pairs.tokens_per_step == 2 * 32 * 1024
    # 2.4e-15 s a token and parameter in training, and 1.5e-15 in sampling: 0.3072 + 0.192
    assert seconds_saved_per_step(grpo(), parameters=BILLION, ranks=1) == pytest.approx(0.4992)
    twice = grpo(train__epochs_per_batch=2)
    assert seconds_saved_per_step(twice, parameters=BILLION, ranks=2) == pytest.approx((0.6144 + 0.192) / 2)
    for other in (grpo(engine__name="hf"), grpo(engine__eager=True)):
        assert seconds_saved_per_step(other, parameters=BILLION, ranks=1) == pytest.approx(0.3072)
    assert seconds_saved_per_step(sft(), parameters=BILLION, ranks=1) == pytest.approx(0.0786432)
    assert (steps_to_pay(0.4992), steps_to_pay(0.0786432), steps_to_pay(30.0)) == (
        121,
        763,
        3,
    )  # 120.2, 762.9


def test_ppos_value_model_counts_with_its_own_epochs() -> None:
    run = load_run(kind="ppo", overrides=RL | {"value.epochs_per_batch": 3})
    # 128,000 tokens: 2.4e-15 of training and 1.5e-15 of sampling by the policy, 3 * 2.4e-15 by the other
    of_both = seconds_saved_per_step(run, parameters=BILLION, ranks=1, value_parameters=2 * BILLION)
    assert of_both == pytest.approx(0.4992 + 2 * 0.9216)
    alone = seconds_saved_per_step(run, parameters=BILLION, ranks=1)
    assert alone == pytest.approx(0.4992)
    # 60 / (0.4992 + 0.9216) = 42.2
    for steps, mode in ((42, "eager"), (43, "compile")):
        run = load_run(kind="ppo", overrides=RL | {"value.epochs_per_batch": 3, "steps": steps})
        assert chosen(run) == mode
    small = load_run(kind="ppo", overrides=RL | {"steps": 43, "value.name": "shape:tiny-llama"})
    assert chosen(small) == "eager", "the value model's own size counts"


def test_it_compiles_from_the_step_on_at_which_it_pays() -> None:
    assert [chosen(grpo(steps=steps)) for steps in (120, 121)] == ["eager", "compile"]
    assert chosen(grpo(steps=121), ranks=2) == "eager"
    assert chosen(grpo(steps=61), parameters=2 * BILLION) == "compile"
    assert [chosen(sft(steps=steps)) for steps in (762, 763)] == ["eager", "compile"]
    assert (
        "pays off from 121 steps on, and the run has 90"
        in choose_execution(grpo(steps=90), parameters=BILLION, device="cuda:1", ranks=1, tested=True).reason
    )


def test_a_cpu_and_the_tiny_recipe_stay_eager() -> None:
    assert chosen(grpo(steps=10**6), device="cpu") == "eager"
    tiny = load_run("tiny")
    assert choose_execution(tiny, parameters=10**6, device="cuda", ranks=1, tested=True).value == "eager"


@pytest.mark.parametrize(
    "settings",
    [
        {"train.backend": "fsdp2", "train.ring": 2},
        {"train.backend": "fsdp2", "train.layout": "padded"},
        {"engine.name": "vllm"},
        {"train.attention": "flex", "train.layout": "padded", "engine.name": "hf"},
        {"train.attention": "hf:flash_attention_2", "engine.name": "hf"},
        {"train.static_capacity": False},
    ],
    ids=lambda settings: " ".join(map(str, settings.values())),
)
def test_what_cannot_compile_or_is_not_tested_compiled_is_eager(settings: dict[str, Any]) -> None:
    choice = resolve_execution(grpo(steps=10**6, **settings), device="cuda", parameters=BILLION, ranks=1)
    assert choice.value == "eager" and choice.reason


def test_a_resolved_run_holds_values_and_not_the_word_auto() -> None:
    run = load_run("tiny", overrides={"train.device": "cpu", "train.token_budget": "auto"})
    assert run.train.execution == "auto", "the default"
    resolved = resolved_on(run)
    assert (resolved.execution, resolved.token_budget, resolved.reasons) == ("eager", 4096, [])
    train = resolved.run.train
    assert (train.execution, train.token_budget, train.static_capacity) == ("eager", 4096, False)
    assert (resolved.run.engine.name, resolved.given.train.execution) == ("hf", "auto")
    explicit = load_run("tiny", overrides={"train.execution": "compile", "train.device": "cpu"})
    resolved = resolved_on(explicit)
    assert (resolved.execution, resolved.static_capacity, resolved.token_budget) == ("compile", True, 2048)


def test_a_resumed_run_keeps_what_its_manifest_says() -> None:
    run, then = sft(), {"axes": {"execution": "compile", "token_budget": 16384}}
    kept = resolved_on(run, manifest=then)
    assert (kept.execution, kept.token_budget, kept.reasons) == ("compile", 16384, [])
    assert kept.given.train.execution == "auto"
    explicit = sft(**{"train.execution": "eager", "train.token_budget": 2048})
    assert resolved_on(explicit, manifest=then) == resolved_on(explicit)
    with raises(ConfigError, "unknown-name: train.execution"):
        resolved_on(run, manifest={"axes": {"execution": ["fast"]}})
    with raises(ConfigError, "wrong-type: axes"):
        resolved_on(run, manifest={"axes": ["fast"]})


def test_the_page_says_what_the_estimate_gives() -> None:
    text = " ".join(PAGE.read_text().split())
    tokens = int(re.search(r"With ([\d,]+) tokens per step", text)[1].replace(",", ""))  # type: ignore[index]
    found = re.findall(r"from ([\d,]+) steps on with ([\d.]+)B", text)
    assert [size for _, size in found] == ["0.6", "8"]
    for steps, size in found:
        per_token = (SAVED_TRAINING + SAVED_SAMPLING) * float(size) * BILLION
        assert int(steps.replace(",", "")) == steps_to_pay(per_token * tokens)
    assert f"{COMPILE_SECONDS:.0f} s" in text
