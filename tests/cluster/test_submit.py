"""What travels with a submitted job, and where --cluster auto leads."""

import os
import stat
from pathlib import Path

import pytest
from raising import raises

from lockstep.cluster import jobs
from lockstep.cluster import ray as provider
from lockstep.config.load import load_run
from lockstep.config.run import RunConfig
from lockstep.errors import ConfigError


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """A run of the working directory."""
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    (tmp_path / "work" / "tools").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work")
    return load_run(kind="grpo", overrides={"rewards": [{"name": "exact_match"}], "run_dir": "/data/run"})


def test_a_program_that_travels_can_still_be_executed(run: RunConfig) -> None:
    for name, mode in {"tools/run.sh": 0o755, "tools/rows.jsonl": 0o644, "one.sh": 0o555}.items():
        Path(name).write_text("text")
        Path(name).chmod(mode)
    with jobs.packed(run, extra=[Path("tools"), Path("one.sh")]) as folder:
        modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in folder.rglob("*.*") if p.name != "run.toml"}
    assert modes == {"run.sh": 0o755, "rows.jsonl": 0o644, "one.sh": 0o755}  # writable, to be removed


def test_the_files_of_all_includes_count_together(run: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "_MOST_BYTES", 100)
    for name in ("a.txt", "b.txt"):
        Path(name).write_bytes(bytes(60))
    with jobs.packed(run, extra=[Path("a.txt"), Path("a.txt")]) as folder:
        assert (folder / "a.txt").stat().st_size == 60
    with raises(ConfigError, "too-large"), jobs.packed(run, extra=[Path("a.txt"), Path("b.txt")]):
        pass


@pytest.mark.parametrize(
    ("named", "address"), [(None, "here:1"), ("", "here:1"), ("auto", "here:1"), ("10.0.0.7:6379", None)]
)
def test_auto_never_leaves_the_search_to_ray(
    named: str | None, address: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray would believe a file that everybody may write, also where RAY_ADDRESS is auto."""
    monkeypatch.setattr(provider, "_running_here", lambda: "here:1")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if named is not None:
        monkeypatch.setenv("RAY_ADDRESS", named)
    assert provider._auto_address() == (address or os.environ["RAY_ADDRESS"])
