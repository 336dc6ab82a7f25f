"""Settings under their old names: read everywhere with one warning, refused beside the new name."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
from raising import raises

from lockstep.cli import train
from lockstep.config import base, old_names
from lockstep.config.cluster import ClusterConfig
from lockstep.config.engine import EngineConfig
from lockstep.config.load import build, dump_toml, load_resumed, load_run, override, to_values
from lockstep.config.old_names import RENAMED, SettingWarning
from lockstep.config.ppo import PPORun
from lockstep.config.run import GRPORun, RunConfig
from lockstep.errors import ConfigError
from lockstep.ranks.environment import LAUNCHER_PID

OLD = """
kind = "ppo"
sleep = ["policy"]

[algorithm.kl]
coef = 0.1

[engine]
name = "native"
process = "own"
sleep = true

[cluster]
colocate = [["policy", "value"], ["ref"]]
world_gpus = "own"
world_seconds = 7.0
world_start_seconds = 8.0
world_restarts = 9
standby = false
"""
NEW = {
    "offload": ("policy",),
    "engine.process": "separate",
    "engine.offload": True,
    "cluster.dedicated_gpus": True,
    "cluster.remote_seconds": 7.0,
    "cluster.remote_start_seconds": 8.0,
    "cluster.remote_restarts": 9,
    "cluster.warm_spares": False,
}
FLAGS = [
    *("--algorithm.kl.coef", "0.1", "--sleep", "policy", "--engine.name", "native"),
    *(
        "--engine.process",
        "own",
        "--engine.sleep",
        "--cluster.world-gpus=own",
        "--cluster.world_seconds",
        "7",
    ),
    *("--cluster.colocate", '[["policy", "value"], ["ref"]]', "--cluster.world-start-seconds=8"),
    *("--cluster.world-restarts", "9", "--cluster.no-standby"),
]


@pytest.fixture(autouse=True)
def _first_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process warns of each name once."""
    monkeypatch.setattr(old_names, "_WARNED", set())
    monkeypatch.setattr(base, "_SAVED", set())


def new_values(run: RunConfig) -> dict[str, Any]:
    found = {}
    for path in NEW:
        value: Any = run
        for part in path.split("."):
            value = getattr(value, part)
        found[path] = value
    return found


def told(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(each.message) for each in caught if each.category is SettingWarning]


def test_every_old_name_is_tried_here() -> None:
    assert {each.new for each in RENAMED} == set(NEW)


@pytest.mark.parametrize("way", ["file", "flags", "overrides"])
def test_an_old_name_is_read_as_the_new_one_with_one_warning(tmp_path: Path, way: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text(OLD)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if way == "file":
            run = load_run(file)
        elif way == "flags":
            run = train.parse(["ppo", *FLAGS]).run
        else:
            values: dict[str, Any] = {"cluster": {"world_restarts": 9}, "cluster.standby": False}
            values |= {"engine.name": "native", "algorithm.kl.coef": 0.1}
            values |= {"sleep": ["policy"], "engine.process": "own", "engine.sleep": True}
            values |= {"cluster.colocate": [["policy", "value"], ["ref"]], "cluster.world_gpus": "own"}
            values |= {"cluster.world_seconds": 7.0, "cluster.world_start_seconds": 8.0}
            run = load_run(kind="ppo", overrides=values)
        again = build(to_values(run), origin="again")
    assert new_values(run) == NEW and again == run
    assert "sleep" not in to_values(run) and "world_" not in dump_toml(run)
    lines = told(caught)
    assert len(lines) == len(set(lines)) == len(RENAMED)
    assert any("cluster.world_gpus = 'own' is now cluster.dedicated_gpus = true" in line for line in lines)


def test_an_old_name_is_read_as_a_keyword_in_python() -> None:
    with pytest.warns(SettingWarning) as caught:
        cluster = ClusterConfig(colocate=(("policy",), ("ref",)), world_gpus="own", world_seconds=7.0)  # type: ignore[call-arg]
        engine = EngineConfig(name="native", sleep=True)  # type: ignore[call-arg]
        run = GRPORun(engine=engine, sleep=("policy",), cluster={"standby": False})  # type: ignore[call-arg, arg-type]
    assert (cluster.dedicated_gpus, cluster.remote_seconds, engine.offload) == (True, 7.0, True)
    assert run.offload == ("policy",) and run.cluster is not None and not run.cluster.warm_spares
    assert len(told(list(caught))) == 5


@pytest.mark.parametrize(
    ("environment", "count"),
    [({}, 1), ({"RANK": "0"}, 1), ({"RANK": "1"}, 0), ({"RANK": "0", LAUNCHER_PID: "1"}, 0)],
)
def test_one_process_of_a_run_warns(
    environment: dict[str, str], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**environment, **({"WORLD_SIZE": "2"} if environment else {})}.items():
        monkeypatch.setenv(name, value)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        EngineConfig(name="native", sleep=True)  # type: ignore[call-arg]
        EngineConfig(name="native", sleep=True)  # type: ignore[call-arg]
    assert len(told(caught)) == count


def test_lists_are_still_taken_for_tuples_in_files() -> None:
    """A config's own __init__ must not be what pydantic reads JSON through."""
    run = load_run(kind="ppo", overrides={"cluster.colocate": [["policy", "value"]], "run_dir": "there"})
    assert run.cluster is not None and run.cluster.colocate == (("policy", "value"),)


def test_old_and_new_together_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('kind = "grpo"\n[engine]\nsleep = true\noffload = true\n')
    cases = {
        "engine.sleep is the old name of engine.offload": lambda: load_run(file),
        "--sleep is the old name of --offload": lambda: train.parse(
            ["grpo", "--offload", "policy", "--sleep", "policy"]
        ),
        "engine.sleep is the old name": lambda: load_run(
            kind="grpo", overrides={"engine.sleep": True, "engine.offload": True}
        ),
        "cluster.standby is the old name of cluster.warm_spares": lambda: ClusterConfig(
            standby=True,  # type: ignore[call-arg]
            warm_spares=True,
        ),
    }
    for text, call in cases.items():
        with raises(ConfigError, "duplicate") as refused:
            call()
        assert text in str(refused.value) and "both are set" in str(refused.value)


@pytest.mark.filterwarnings("ignore::lockstep.config.old_names.SettingWarning")
def test_an_override_by_the_new_name_wins_over_an_old_name_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(OLD)
    run = load_run(file, overrides={"cluster.remote_restarts": 1, "offload": []})
    assert run.cluster is not None and run.cluster.remote_restarts == 1
    assert isinstance(run, PPORun) and run.offload == ()


def test_a_run_of_old_names_resumes(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(OLD)
    with pytest.warns(SettingWarning) as caught:
        run = load_resumed(tmp_path, {"cluster.world_restarts": 2})
    assert new_values(run) == NEW | {"cluster.remote_restarts": 2}
    assert len(told(list(caught))) == len(RENAMED) + 1, "the file's names, and the override's"
    with raises(ConfigError, "not-resumable") as refused:
        load_resumed(tmp_path, {"engine.sleep": False})
    assert "  engine.offload: True in the run, now False" in str(refused.value)


IDLE = """
kind = "ppo"

[train]
min_lr_ratio = 0.1

[value]
schedule = "linear"

[cluster]
colocate = [["policy"]]

[[rewards]]
name = "mine:score"
[rewards.kwargs]
api_key = "0123456789abcdef01"
"""


def test_a_run_resumes_with_what_new_runs_refuse(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(IDLE)
    (tmp_path / "run.toml").write_text(IDLE)
    with raises(ConfigError, "secret-in-config: rewards[0].kwargs.api_key"):
        load_run(tmp_path / "run.toml")
    for code, values in {
        "no-effect: train.min_lr_ratio": {"train.min_lr_ratio": 0.1},
        "missing-setting: cluster.colocate": {"cluster.colocate": [["policy"]]},
    }.items():
        with raises(ConfigError, code):
            load_run(kind="ppo", overrides=values)
    with pytest.warns(SettingWarning) as caught:
        run = load_resumed(tmp_path)
    assert isinstance(run, PPORun) and run.train.min_lr_ratio == 0
    assert run.value.train(run.train).min_lr_ratio == 0.1, "the value model's decay had it"
    assert run.rewards[0].kwargs == {"api_key": "0123456789abcdef01"}
    assert run.cluster is not None and run.cluster.colocate == ()
    assert override(run, {"log.display": "off"}).rewards == run.rewards, "checked again, it is still taken"
    lines = told(list(caught))
    assert len(lines) == 2 and "0123456789" not in "".join(lines)
    assert "train.min_lr_ratio = 0.1 is ignored" in lines[0] and "rewards.kwargs.api_key" in lines[1]
