import contextlib
import importlib.util
import json
from pathlib import Path

from raising import raises

from lockstep.errors import ConfigError
from lockstep.observe.metrics import MetricsLog
from lockstep.observe.run_dir import RunDir


def events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder))
    reader.Reload()
    return {
        name: [(e.step, round(e.value, 6)) for e in reader.Scalars(name)] for name in reader.Tags()["scalars"]
    }


def test_tensorboard_forgets_the_steps_that_a_resumed_run_repeats(tmp_path, monkeypatch):
    from tensorboard.summary.writer import event_file_writer

    # Names of event files end in this count, and .10 sorts before .9: two files of one second would swap.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(9))
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


def test_auto_writes_tensorboard_where_it_is_installed(tmp_path, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "tensorboard" else real(name)
    )
    with RunDir.create(tmp_path, config_toml="", manifest={}) as run:
        with contextlib.closing(MetricsLog.of_run(run, tensorboard="auto")) as log:
            log.write(0, {"loss": 1.0})
        assert not (tmp_path / "logs" / "tensorboard").exists()
        with raises(ConfigError, "missing-package: log.tensorboard = true needs tensorboard"):
            MetricsLog.of_run(run, tensorboard=True)
        monkeypatch.undo()
        with contextlib.closing(MetricsLog.of_run(run, tensorboard="auto")):
            assert list((tmp_path / "logs" / "tensorboard").glob("events.out.tfevents.*"))


def test_a_missing_wandb_is_named_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    wandb = {"project": "p", "name": "n", "config": {}}
    with (
        RunDir.create(tmp_path, config_toml="", manifest={}) as run,
        raises(ConfigError, "missing-package: log.wandb"),
    ):
        MetricsLog.of_run(run, tensorboard=False, wandb=wandb)
    assert not (tmp_path / "metrics.jsonl").exists()
