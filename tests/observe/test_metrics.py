import builtins
import json
import math
from pathlib import Path

import pytest
import torch

from lockstep.errors import ConfigError
from lockstep.observe.metrics import MetricAccumulator, MetricsLog, percentile, spread
from lockstep.observe.run_dir import RunDir


def test_means_are_weighted_by_tokens_maxima_and_sums_are_not() -> None:
    metrics = MetricAccumulator()
    for value, tokens in ((1.0, 30), (4.0, 10)):
        metrics.add("loss", torch.tensor(value), weight=tokens)
        metrics.add("longest", value, kind="max")
        metrics.add("tokens", tokens, kind="sum")
    assert metrics.reduce() == {"loss": 1.75, "longest": 4.0, "tokens": 40.0}
    assert metrics.reduce() == {}


def test_nan_is_kept_and_a_micro_batch_without_tokens_does_not_spoil_a_mean() -> None:
    metrics = MetricAccumulator()
    metrics.add("loss", 2.0, weight=1)
    metrics.add("loss", math.nan, weight=0)
    metrics.add("bad", math.nan)
    metrics.add("bad", 1.0)
    metrics.add("max", 1.0, kind="max")
    metrics.add("max", math.nan, kind="max")
    metrics.add("none", 1.0, weight=0)
    result = metrics.reduce()
    assert result["loss"] == 2.0
    assert all(math.isnan(result[name]) for name in ("bad", "max", "none"))


def test_a_name_has_one_reduction() -> None:
    metrics = MetricAccumulator()
    metrics.add("x", 1.0)
    with pytest.raises(ValueError, match="'x' was added as 'mean', now as 'sum'"):
        metrics.add("x", 1.0, kind="sum")


def test_percentile_is_the_nearest_rank() -> None:
    values = [float(i) for i in range(1, 201)]  # 1 to 200: 198 values are at most 198
    assert percentile(reversed(values), 99) == 198.0
    assert percentile(values, 0) == 1.0
    assert percentile([7.0], 99) == 7.0
    assert math.isnan(percentile([], 99))
    assert spread("gap", [1.0, -3.0]) == {"gap/mean": -1.0, "gap/p99": 3.0, "gap/max": 3.0}


def events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder))
    reader.Reload()
    return {
        name: [(e.step, round(e.value, 6)) for e in reader.Scalars(name)] for name in reader.Tags()["scalars"]
    }


def test_tensorboard_forgets_the_steps_that_a_resumed_run_repeats(tmp_path: Path) -> None:
    with RunDir.create(tmp_path, config_toml="", manifest={}) as run:
        log = MetricsLog.of_run(run, tensorboard=True)
        for step in range(4):
            log.write(step, {"loss": float(step), "label": None})  # type: ignore[dict-item]
        log.close()
        run.rewind(2)
        log = MetricsLog.of_run(run, tensorboard=True, first_step=2)
        log.write(2, {"loss": 20.0})
        log.close()
    assert events(tmp_path / "logs" / "tensorboard") == {"loss": [(0, 0.0), (1, 1.0), (2, 20.0)]}
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == [(0, 0.0), (1, 1.0), (2, 20.0)]


def test_a_missing_wandb_is_named_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_import = builtins.__import__

    def without_wandb(name: str, *args: object, **kwargs: object) -> object:
        if name == "wandb":
            raise ModuleNotFoundError("No module named 'wandb'", name="wandb")
        return real_import(name, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without_wandb)
    wandb = {"project": "p", "name": "n", "config": {}}
    with (
        RunDir.create(tmp_path, config_toml="", manifest={}) as run,
        pytest.raises(ConfigError, match="pip install wandb"),
    ):
        MetricsLog.of_run(run, tensorboard=False, wandb=wandb)
    assert not (tmp_path / "metrics.jsonl").exists()
