from __future__ import annotations

import itertools
from typing import Any

import pytest
from pydantic import ValidationError
from raising import raises

from lockstep.config.algorithm import PUBLISHED, GRPOConfig, KLConfig
from lockstep.config.load import load_run
from lockstep.errors import ConfigError

PENALTIES = {("reward", "k1"), ("loss", "k2"), ("loss", "k3")}


@pytest.mark.parametrize(
    ("place", "estimator"), list(itertools.product(("reward", "loss"), ("k1", "k2", "k3")))
)
def test_only_estimators_that_are_a_penalty_where_they_stand(place: Any, estimator: Any) -> None:
    if (place, estimator) in PENALTIES:
        assert KLConfig(place=place, estimator=estimator).resolved().estimator == estimator
        return
    with raises(ValidationError, "unsupported-combination: estimator"):
        KLConfig(place=place, estimator=estimator)
    overrides = {"algorithm.kl.coef": 0.1, "algorithm.kl.place": place, "algorithm.kl.estimator": estimator}
    with raises(ConfigError, "unsupported-combination: algorithm.kl.estimator"):
        load_run("tiny", kind="grpo", overrides=overrides)


@pytest.mark.parametrize(("place", "estimator"), [("reward", "k1"), ("loss", "k3")])
def test_the_default_estimator_depends_on_the_place(place: Any, estimator: str) -> None:
    config = GRPOConfig(kl=KLConfig(coef=0.1, place=place)).resolved()
    assert config.kl.estimator == estimator
    assert config.resolved() == config


@pytest.mark.parametrize(
    ("options", "penalty"),
    [
        ({"name": "grpo"}, 0.0),
        ({"name": "dapo"}, 1.0),
        ({"name": "dapo", "overlong": {"buffer_tokens": 5}}, 1.0),
        ({"name": "dapo", "overlong": {"penalty": 0.5}}, 0.5),
        ({"name": "dapo", "overlong": {"penalty": 0.0}}, 0.0),
        ({"name": "dapo", "overlong": None}, 0.0),
        ({"name": "grpo", "overlong": {"buffer_tokens": 5}}, 1.0),
        ({"name": "grpo", "overlong": {"penalty": 0.5}}, 0.5),
        ({"name": "grpo", "overlong": None}, 0.0),
    ],
)
def test_when_overlong_is_on(options: dict[str, Any], penalty: float) -> None:
    config = GRPOConfig(**options)
    assert config.resolved().overlong.penalty == penalty
    for again in (config.resolved(), GRPOConfig.model_validate(config.model_dump(mode="json"))):
        assert again.resolved().overlong.penalty == penalty, "a config says the same after it was written"


def test_overlong_of_dapo_is_turned_off_from_the_command_line() -> None:
    run = load_run("tiny", kind="grpo", overrides={"algorithm.name": "dapo", "algorithm.overlong.penalty": 0})
    assert run.algorithm.resolved().overlong.penalty == 0.0


def test_dual_clip_needs_an_objective_that_has_it() -> None:
    assert GRPOConfig(dual_clip=3.0).resolved().dual_clip == 3.0
    for options in ({"name": "cispo"}, {"objective": "cispo"}):
        with raises(ValidationError, "no-effect: dual_clip"):
            GRPOConfig(dual_clip=3.0, **options)
    assert GRPOConfig(name="cispo", objective="ppo_clip", dual_clip=3.0).dual_clip == 3.0
    with pytest.raises(ValidationError):
        GRPOConfig(dual_clip=1.0)


def test_temperatures_and_clips_exclude_one_another() -> None:
    for option in ("clip_low", "clip_high", "dual_clip"):
        with raises(ValidationError, f"no-effect: {option}"):
            GRPOConfig(name="sapo", **{option: 2.0})
    for option in ("tau_pos", "tau_neg"):
        for objective in ("ppo_clip", "cispo"):
            with raises(ValidationError, f"no-effect: {option}, {objective}"):
                GRPOConfig(objective=objective, **{option: 2.0})
    for options in ({"name": "sapo"}, {"objective": "sapo"}, {"name": "cispo", "objective": "sapo"}):
        config = GRPOConfig(**options).resolved().resolved()
        assert (config.tau_pos, config.tau_neg, config.clip_low, config.clip_high) == (1.0, 1.05, None, None)
    config = GRPOConfig(name="sapo", objective="ppo_clip").resolved()
    assert (config.tau_pos, config.clip_low, config.clip_high) == (None, 0.2, 0.2)
    assert GRPOConfig(objective="own:objective").resolved().tau_neg == 1.05


def test_the_lower_geometric_bound_needs_the_upper_one() -> None:
    with raises(ValidationError, "no-effect: rollout_correction.geometric_low"):
        GRPOConfig(rollout_correction={"geometric_low": 0.9})
    for bounds in ({"geometric_high": 1.0}, {"geometric_high": 2.0, "geometric_low": 1.0}):
        with pytest.raises(ValidationError):
            GRPOConfig(rollout_correction=bounds)


def test_sequence_token_needs_an_objective_with_a_gradient_by_the_ratio() -> None:
    for options in ({"name": "cispo"}, {"objective": "cispo"}):
        with raises(ValidationError, "no-effect: ratio"):
            GRPOConfig(ratio="sequence_token", **options)
    with raises(ValidationError, "no-effect: ratio"):
        GRPOConfig(name="gspo_token", objective="cispo")
    assert GRPOConfig(name="gspo_token").resolved().ratio == "sequence_token"


@pytest.mark.parametrize("name", PUBLISHED)
def test_no_option_of_a_resolved_config_is_left_open(name: Any) -> None:
    config = GRPOConfig(name=name).resolved()
    unread = ["clip_low", "clip_high", "dual_clip"] if name == "sapo" else ["dual_clip", "tau_pos", "tau_neg"]
    assert [key for key, value in config if value is None] == [*unread, "off_policy_mask_threshold"]
    assert config.kl.estimator is not None and config.overlong.penalty is not None
