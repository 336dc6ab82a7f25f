"""Groups without a signal are left out of forward and backward: the same gradients, fewer packs."""

from __future__ import annotations

import dataclasses
import itertools
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from loop_runs import metrics_of
from scored_tools import LENGTHS, NONE, SIGNAL, Watched, apart, compare_on_ranks, group, toy_run, watched
from selected import exhaustive

from lockstep import loops
from lockstep.algorithms.grpo import PolicyAlgorithm
from lockstep.algorithms.policy_loss import PolicyLoss
from lockstep.config.algorithm import (
    ALGORITHM_NAMES,
    OBJECTIVES,
    PER_GROUP,
    PER_STEP,
    Aggregation,
    GRPOConfig,
    RolloutCorrectionConfig,
)
from lockstep.config.train import TrainConfig
from lockstep.loop.policy import scored_indices, scores_all, with_signal
from lockstep.loops.online import OnlineTrainer
from lockstep.schema.batch import policy_samples, rollout_samples

RATIOS = list(typing.get_args(typing.get_args(GRPOConfig.model_fields["ratio"].annotation)[0]))
CORRECTIONS = list(
    itertools.product(
        *(
            typing.get_args(RolloutCorrectionConfig.model_fields[field].annotation)
            for field in ("kind", "level")
        )
    )
)
STEP = [group(i, rewards) for i, rewards in enumerate((NONE, SIGNAL, NONE, SIGNAL))]


@pytest.fixture(scope="module")
def toy() -> Iterator[Watched]:
    one = watched(toy_run(score_all_every=10))
    yield one
    one.trainer.parts.close()


def both(toy: Watched, **options: Any) -> tuple[dict[str, float], float]:
    """Metrics of a step that leaves groups out, and how far its gradients are from those of one that does
    not. The weights do not move."""
    config = GRPOConfig(**options).resolved()
    parts = toy.trainer.parts
    toy.trainer.parts = dataclasses.replace(parts, algorithm=PolicyAlgorithm(config, max_tokens=8))
    full, of_full = toy.update(STEP, step=0)
    left, of_left = toy.update(STEP, step=1)
    toy.trainer.parts = parts
    assert full.metrics["scored_share"] == 1.0 and full.metrics["input/documents"] == 16
    assert left.metrics["rollout/tokens"] == full.metrics["rollout/tokens"] == full.metrics["input/tokens"]
    assert left.metrics["loss"] == pytest.approx(full.metrics["loss"], abs=1e-6)
    return left.metrics, max(map(apart, of_left, of_full))


def test_the_lists_are_not_empty() -> None:
    assert "sequence" in RATIOS and ("icepop", "sequence") in CORRECTIONS


@pytest.mark.parametrize("advantage", exhaustive([*PER_GROUP, *PER_STEP], quick=[PER_GROUP[0], PER_STEP[0]]))
def test_gradients_are_those_of_the_full_pass(toy: Watched, advantage: str) -> None:
    """Every estimator, aggregation, ratio and objective that the config accepts."""
    choices = itertools.product(typing.get_args(Aggregation), RATIOS, OBJECTIVES)
    for aggregation, ratio, objective in choices:
        if (ratio, objective) == ("sequence_token", "cispo"):
            continue  # refused
        options = {"aggregation": aggregation, "ratio": ratio, "objective": objective}
        metrics, error = both(toy, advantage=advantage, **options)
        assert error < 1e-6, options
        assert metrics["scored_share"] == 0.5 and metrics["input/documents"] == 8, options


@pytest.mark.parametrize(("kind", "level"), CORRECTIONS)
def test_gradients_with_a_rollout_correction(toy: Watched, kind: str, level: str) -> None:
    for ratio in RATIOS:
        correction = {"kind": kind, "level": level, "low": 0.1, "high": 5.0}
        metrics, error = both(toy, ratio=ratio, rollout_correction=correction, dual_clip=3.0)
        assert error < 1e-6 and metrics["scored_share"] == 0.5, ratio


@pytest.mark.parametrize("name", ALGORITHM_NAMES)
def test_several_optimizer_steps_of_every_algorithm(name: str) -> None:
    """Two minibatches, twice, with weights that move, so that ratios are clipped. The first minibatch has no
    signal at all: its shortest document stands for it."""
    groups = [group(i, rewards) for i, rewards in enumerate((NONE, NONE, SIGNAL, NONE))]
    moving = {"lr": 0.02, "minibatches": 2, "epochs_per_batch": 2}
    algorithm = {"name": name, "overlong": {"penalty": 0.0}}
    sides = [watched(toy_run(score_all_every=e, algorithm=algorithm, train=moving)) for e in (1, 10)]
    (full, of_full), (left, of_left) = (side.update(groups, step=1) for side in sides)
    assert len(of_left) == 4 and left.metrics["importance_ratio_max"] > 1.0
    silent = [gradients for side in (of_left, of_full) for gradients in side[::2]]
    assert not any(gradient.any() for gradients in silent for gradient in gradients.values())
    assert apart(of_left[1], of_full[1]) < 1e-6
    if any(gradient.any() for gradient in of_full[3].values()):  # else every ratio is clipped
        assert apart(of_left[3], of_full[3]) < 1e-5
    else:
        assert name in ("gspo", "gspo_token", "rloo")
        assert not any(gradient.any() for gradient in of_left[3].values())
    assert left.metrics["input/documents"] == 5 and full.metrics["input/documents"] == 16
    assert left.metrics["scored_share"] == (sum(LENGTHS) + min(LENGTHS)) / (4 * sum(LENGTHS))
    for side in sides:
        side.trainer.parts.close()


@pytest.mark.parametrize(
    "train",
    [
        {"accumulate": "sample", "layout": "packed"},
        {"layout": "packed"},
        {"layout": "padded"},
        {"layout": "packed", "static_capacity": True},
        {"layout": "shared", "static_capacity": True},
    ],
    ids=str,
)
def test_gradients_in_other_layouts(train: dict[str, Any]) -> None:
    """The other tests are of shared rows of any number, the default of groups."""
    toy = watched(toy_run(score_all_every=10, train=train))
    metrics, error = both(toy)
    assert error < 1e-6 and metrics["scored_share"] == 0.5
    toy.trainer.parts.close()


def test_a_step_without_any_signal_is_a_step(toy: Watched) -> None:
    result, gradients = toy.update([group(0, NONE), group(1, NONE)], step=1)
    assert result.metrics["grad_norm"] == 0.0 and result.metrics["input/documents"] == 1
    assert all(not gradient.any() for gradient in gradients[0].values())
    assert result.metrics["scored_share"] == min(LENGTHS) / (2 * sum(LENGTHS))
    assert "logprob_gap_mean" in result.metrics  # what a resumed run's first step is checked by


def test_metrics_are_of_the_scored_tokens(toy: Watched) -> None:
    """The same as those of a step of the groups with a signal alone."""
    left, _ = toy.update(STEP, step=1)
    alone, _ = toy.update([STEP[1], STEP[3]], step=0)
    for name in ("entropy", "logprob_gap_mean", "logprob_gap_max", "logprob_gap_k3", "kl_old"):
        assert left.metrics[name] == pytest.approx(alone.metrics[name], rel=1e-5), name


class AddsEntropy(PolicyLoss):
    """On top of a loss that says it needs no group without a signal, and does not say so itself."""


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ({}, True),
        ({"kl": {"coef": 0.1, "place": "reward"}}, True),
        ({"kl": {"coef": 0.1}}, False),
        ({"entropy_coef": 0.01}, False),
        ({"entropy_coef": -0.01}, False),
        ({"objective": "test_scored:bare"}, False),
        ({"objective": "test_scored:marked"}, True),
    ],
)
def test_which_losses_allow_it(options: dict[str, Any], allowed: bool) -> None:
    config = GRPOConfig(**options).resolved()
    assert PolicyLoss(config).zero_without_advantages is allowed
    assert not AddsEntropy(config).zero_without_advantages


def bare(terms: Any, config: GRPOConfig) -> torch.Tensor:
    return -terms.ratio * terms.advantages


def marked(terms: Any, config: GRPOConfig) -> torch.Tensor:
    return -terms.ratio * terms.advantages


marked.zero_without_advantages = True  # type: ignore[attr-defined]


def test_which_steps_score_all() -> None:
    def full(step: int, *, loss: Any = None, every: int = 10, **flags: Any) -> bool:
        loss = PolicyLoss(GRPOConfig().resolved()) if loss is None else loss
        train = TrainConfig(score_all_every=every, max_recompiles=flags.pop("max_recompiles", None))
        flags = {"recorded": False, "static_capacity": False, **flags}
        return scores_all(train, step, loss=loss, **flags)

    assert TrainConfig().score_all_every == 10
    assert [step for step in range(21) if full(step)] == [0, 10, 20]
    assert full(0, every=7) and not full(1, every=7) and full(1, every=1)
    assert full(1, recorded=True)
    assert full(1, loss=object())  # somebody's loss that does not say
    assert full(1, static_capacity=True, max_recompiles=0)
    assert not full(1, static_capacity=True) and not full(1, max_recompiles=0)


def test_the_first_step_behind_a_warm_up_scores_all(toy: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """PPO's value model may learn alone at first; the gap is checked at the policy's first step."""
    assert toy.trainer.warmup_batches == 0
    monkeypatch.setattr(OnlineTrainer, "warmup_batches", 3)
    shares = [toy.update(STEP, step=step)[0].metrics["scored_share"] for step in (3, 4)]
    assert shares == [1.0, 0.5]


def test_what_stands_for_documents_that_train_nothing() -> None:
    """A group with a signal of which one minibatch has only an empty completion; and no signal anywhere."""
    groups = [group(0, (1.0, 0.0), (0, 4)), group(1, (0.5, 0.5), (6, 2))]
    rollouts = rollout_samples(r.trajectory for g in groups for r in g.rollouts)
    _, advantages = PolicyAlgorithm(GRPOConfig(), max_tokens=8).advantages(groups, rollouts)
    samples = policy_samples(rollouts, advantages)
    assert with_signal(groups, samples) == {0, 1}
    assert scored_indices(samples, {0, 1}) == [0, 1]
    assert scored_indices([samples[0], *samples[2:]], {0, 1}) == [2]
    assert scored_indices(samples, ()) == [3]
    assert scored_indices(samples[:1], ()) == [0]  # nothing to train: as ever, an error of the backend


def test_with_one_process_as_on_two_ranks() -> None:
    compare_on_ranks("local", None)


@pytest.mark.parametrize("recorded", [False, True])
def test_a_recording_holds_every_group(tmp_path: Path, recorded: bool) -> None:
    run = toy_run(
        score_all_every=2,
        record={"enabled": recorded},
        eval={"before": False, "after": False},
        checkpoint={"save_at_end": False, "export_at_end": False},
        log={"tensorboard": False, "display": "off"},
    ).model_copy(update={"steps": 3, "run_dir": tmp_path / "run"})
    loops.train(run, rewards=[lambda prompt, completion, row: 1.0])
    rows = metrics_of(tmp_path / "run")
    shares = [row["scored_share"] for row in rows]
    assert shares[0] == shares[2] == 1.0 and (shares[1] == 1.0) is recorded
    assert [row["grad_norm"] for row in rows] == [0.0] * 3
