"""Whole runs of a tiny model, in process: what settings must not change, and what they must."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from loop_runs import metrics_of
from raising import raises

from lockstep import loops
from lockstep.config.load import load_run
from lockstep.errors import RewardError

Run = Callable[..., Path]


@pytest.fixture(scope="module")
def train(tiny_toml: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The folder of a run with these overrides (dotted names, _ for .); each is run once."""
    known: dict[str, Path] = {}

    def run(overrides: dict[str, Any] | None = None, *, rewards: tuple[Callable[..., Any], ...] = ()) -> Path:
        given = {"steps": 2, "log.display": "off", "eval.before": False, "eval.every": 0} | (overrides or {})
        key = repr(sorted(given.items()))
        if key not in known or rewards:
            folder = tmp_path_factory.mktemp("runs") / "run"
            config = load_run(tiny_toml, overrides=given | {"run_dir": str(folder)})
            loops.train(config, rewards=rewards)  # type: ignore[arg-type]
            known[key] = folder
        return known[key]

    return run


def compare(one: Path, other: Path, *, names: tuple[str, ...], rel: float) -> None:
    pairs = list(zip(metrics_of(one), metrics_of(other), strict=True))
    for ours, theirs in pairs:
        for name in names:
            if name in ours:
                assert theirs[name] == pytest.approx(ours[name], rel=rel, abs=1e-6), name
    assert any(name in ours for ours, _ in pairs for name in names)


NUMBERS = ("loss", "grad_norm", "entropy", "reward/mean", "logprob_gap_max", "eval/mean_reward")


PACKING: list[dict[str, Any]] = [
    {"train.token_budget": 4096},
    {"train.token_budget": 64},
    {"train.layout": "padded"},
    {"train.layout": "padded", "train.padding_side": "left"},
]
MECHANICS: list[dict[str, Any]] = [
    {"train.attention": "varlen"},
    {"train.static_capacity": True},
    {"train.activation_checkpointing": True},
    {"train.grad_accum_dtype": "model"},
    {"train.optimizer_device": "cpu"},
    {"engine.max_batch": 3},
]


@pytest.mark.parametrize(
    ("minibatches", "changed"), [(1, c) for c in PACKING + MECHANICS] + [(2, c) for c in PACKING]
)
def test_what_only_arranges_the_work_changes_no_number(
    minibatches: int, changed: dict[str, Any], train: Run
) -> None:
    """Losses are normalised over the optimizer step, whatever micro-batches it is cut into."""
    base = {"train.minibatches": minibatches, "train.epochs_per_batch": minibatches}
    compare(train(base), train(base | changed), names=NUMBERS, rel=2e-4)


def test_another_learning_rate_and_another_loss_are_seen(train: Run) -> None:
    """The comparison above can fail."""
    for changed in ({"train.lr": 2e-3}, {"algorithm.aggregation": "token_mean"}):
        with pytest.raises(AssertionError):
            compare(train(), train(changed), names=NUMBERS, rel=2e-4)


def test_the_seed_decides_dropout_too(train: Run) -> None:
    """Two runs of one process: the second finds generators that the first has moved on."""
    dropout = {"model.lora.rank": 4, "model.lora.dropout": 0.5}
    first, second = (metrics_of(train(dropout | {"name": name})) for name in ("first", "second"))
    assert first == second


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_compiled_run_gives_the_same_numbers(train: Run) -> None:
    compare(train(), train({"train.execution": "compile"}), names=NUMBERS, rel=1e-3)


def test_minibatches_and_epochs_count_their_steps(train: Run) -> None:
    run = train({"train.minibatches": 2, "train.epochs_per_batch": 2})
    state = json.loads((run / "checkpoints" / "step-000002" / "state.json").read_text())
    assert state["progress"]["step"] == 2 * 2 * 2
    assert metrics_of(run)[0]["input/documents"] == 16


def test_an_evaluation_without_answers_is_none_not_zero(train: Run) -> None:
    """The id task has no right or wrong, so no accuracy; best by one of its numbers still works."""
    run = train(
        {
            "steps": 6,
            "eval.every": 2,
            "checkpoint.every": 2,
            "checkpoint.keep_last": 1,
            "checkpoint.keep_best": 1,
            "checkpoint.metric": "eval/mean_reward",
        }
    )
    evaluations = [row for row in metrics_of(run) if "evaluation" in row]
    assert [(row["step"], row["evaluation"]) for row in evaluations] == [
        (2, "during"),
        (4, "during"),
        (6, "after"),
    ]
    assert all(row["eval/strict_accuracy"] is None for row in evaluations)
    rewards = {row["step"]: row["eval/mean_reward"] for row in evaluations}
    best = max(rewards, key=lambda step: (rewards[step], step))
    kept = {int(p.name.removeprefix("step-")) for p in (run / "checkpoints").iterdir()}
    assert kept == {best, 6}
    summary = json.loads((run / "summary.json").read_text())
    assert summary["eval_after"]["mean_reward"] == rewards[6] and summary["eval_before"] is None


def test_what_is_switched_off_is_not_written(train: Run) -> None:
    run = train(
        {
            "checkpoint.every": 0,
            "checkpoint.save_at_end": False,
            "checkpoint.export_at_end": False,
            "rollout.save": False,
            "eval.after": False,
        }
    )
    left = {p.relative_to(run).as_posix() for p in run.rglob("*") if p.is_file()}
    logs = {"logs/rank-0.log", "logs/flight/rank-0.flight", "logs/flight/rank-0.stacks"}
    files = {"config.toml", "manifest.json", "metrics.jsonl", "ledger.jsonl", "summary.json", "lock"}
    assert left == files | logs


def test_every_step_says_what_a_step_must_say(train: Run) -> None:
    row = json.loads((train() / "metrics.jsonl").read_text().splitlines()[0])
    expected = {
        *("reward/mean", "reward/std", "loss", "entropy", "grad_norm", "lr", "clip_fraction_low"),
        *("logprob_gap_mean", "logprob_gap_p99", "logprob_gap_max", "throughput/tokens_per_second"),
        *("rollout/completion_tokens_mean", "input/tokens", "input/fill", "time/step", "time/generate"),
        *("time/forward_backward", "time/optimizer", "time/host_share"),
    }
    assert expected - row.keys() == set()
    assert all(math.isfinite(v) for v in row.values() if isinstance(v, float))
    assert any(name.startswith("memory/") for name in row)


def failing(kind: str) -> Callable[..., Any]:
    """A reward that fails on the completions whose third id is even, and is 0 or 1 elsewhere."""
    values: dict[str, Any] = {"none": None, "nan": math.nan, "text": "1.0"}

    def reward(prompt: str, completion: str, row: dict[str, Any]) -> Any:
        reward.calls += 1  # type: ignore[attr-defined]
        if reward.calls % 5 == 3:  # type: ignore[attr-defined]
            if kind == "raise":
                raise KeyError("no such column")
            return values[kind]
        return float(reward.calls % 2)  # type: ignore[attr-defined]

    reward.calls = 0  # type: ignore[attr-defined]
    return reward


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("raise", "raised KeyError: 'no such column'"),
        ("none", "returned None (NoneType)"),
        ("nan", "returned nan"),
        ("text", "returned '1.0' (str)"),
    ],
)
def test_a_failing_reward_stops_the_run_and_names_the_row(kind: str, told: str, train: Run) -> None:
    with raises(RewardError, "reward-failed: reward, row 1") as caught:
        train(rewards=(failing(kind),))
    assert told in str(caught.value)


def test_dropped_rewards_are_counted_and_leave_the_step(
    train: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sometimes.py").write_text(
        "import pathlib, time\n"
        "def reward(prompt, completion, row):\n"
        "    with open('calls', 'a') as file: file.write('.')\n"  # the time-out ends the reward's process
        "    calls = pathlib.Path('calls').stat().st_size\n"
        "    if calls == 3: raise ValueError('three')\n"
        "    if calls == 9: time.sleep(600)\n"
        "    return float(calls % 2)\n"
    )
    monkeypatch.chdir(tmp_path)
    rewards = [{"name": "sometimes:reward", "on_error": "drop", "timeout_seconds": 5}]
    row = metrics_of(train({"rewards": rewards, "eval.after": False}))[0]
    assert row["rollout/dropped_rollouts"] == 2
    assert row["input/documents"] == row["rollout/samples"] == 14
