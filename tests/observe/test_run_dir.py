import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from raising import raises

from lockstep.errors import CheckpointError, ConfigError
from lockstep.observe import files
from lockstep.observe.lock import RunLock, process_start
from lockstep.observe.metrics import JsonlWriter
from lockstep.observe.run_dir import RunDir
from lockstep.observe.run_history import read_lines


def create(path: Path) -> RunDir:
    return RunDir.create(path, config_toml='kind = "grpo"\n', manifest={"torch": "2.13.0"})


def test_a_new_run_has_its_config_and_manifest_and_can_be_opened_again(tmp_path: Path) -> None:
    with create(tmp_path / "a" / "run") as run:
        run.update_manifest({"axes": {"device": "cpu"}, "torch": "2.14.0"})
    with RunDir.open(tmp_path / "a" / "run") as run:
        assert run.config.read_text() == 'kind = "grpo"\n'
        assert json.loads(run.manifest.read_text()) == {"torch": "2.14.0", "axes": {"device": "cpu"}}
        assert sorted(p.name for p in run.path.iterdir() if p.is_dir()) == ["checkpoints", "logs", "rollouts"]


def test_an_existing_run_is_not_overwritten(tmp_path: Path) -> None:
    create(tmp_path).close()
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    with raises(ConfigError, "already-exists: test_an_existing_run_is_not_ov0"):
        create(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 0}\n'


def test_a_file_and_a_folder_without_a_run_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with raises(ConfigError, "not-a-file: file"):
        create(tmp_path / "file")
    with raises(ConfigError, "wrong-kind-of-file: test_a_file_and_a_folder_witho0"):
        RunDir.open(tmp_path)


def test_a_folder_that_cannot_be_made_or_written_is_refused(tmp_path: Path) -> None:
    """By what stops root as well: a file where a folder should be, a folder where the lock should be."""
    (tmp_path / "file").write_text("")
    with raises(ConfigError, "cannot-write: run"):
        create(tmp_path / "file" / "run")
    (tmp_path / "run" / "lock").mkdir(parents=True)
    with raises(ConfigError, "cannot-write: run"):
        RunLock(tmp_path / "run" / "lock")


def test_a_start_that_failed_half_way_leaves_no_run_and_no_lock(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="cannot be written as JSON"):
        RunDir.create(tmp_path, config_toml="", manifest={"bad": object()})
    create(tmp_path).close()


def test_a_start_in_a_folder_of_the_user_removes_only_what_it_has_made(tmp_path: Path) -> None:
    """A project's own folders may have the names of a run's."""
    theirs = {"engine/code.py", "logs/app.log", "recordings/a.wav", "export/data.csv", "config.toml"}
    for name in theirs:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    run = create(tmp_path)
    (run.logs / "rank-0.log").write_text("")
    (run.path / "engine" / "hf.log").write_text("")
    run.discard()
    run.close()
    assert {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()} == theirs


def test_what_an_earlier_start_of_a_run_has_left_is_removed_with_it(tmp_path: Path) -> None:
    manifest = {"lockstep": "1", "torch": "2", "started": "now"}
    RunDir.create(tmp_path, config_toml="", manifest=manifest).close()
    (tmp_path / "logs" / "ranks").mkdir()
    run = RunDir.create(tmp_path, config_toml="", manifest=manifest)
    run.discard()
    run.close()
    # The launcher of ranks still writes its logs.
    assert {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")} == {"logs", "logs/ranks"}


def test_rewind_keeps_what_the_checkpoint_knows(tmp_path: Path) -> None:
    with create(tmp_path) as run:
        writer = JsonlWriter(run.metrics)
        writer.write(0, {"x": 1.0}, evaluation="before")
        for step in range(4):
            writer.write(step, {"x": float(step)}, evaluation=None)
            run.write_rollouts(step, [{"step": step}])
            writer.write(step + 1, {"x": -1.0}, evaluation="during")
            run.write_evaluation(f"step-{step + 1:06d}", [])
        writer.close()
        with run.metrics.open("a") as file:
            file.write('{"step": 4, "x": 0.')  # the process died here
        run.write_summary({"outcome": "interrupted"})

        run.rewind(2)

        kept = [(line["step"], line.get("evaluation")) for line in read_lines(run.metrics)]
        assert kept == [(0, "before"), (0, None), (1, "during"), (1, None), (2, "during")]
        assert sorted(f.name for f in run.rollouts.iterdir()) == [
            "evaluation-step-000001.jsonl",
            "evaluation-step-000002.jsonl",
            "step-000000.jsonl",
            "step-000001.jsonl",
        ]
        assert not run.summary.exists()


def test_a_rewound_file_goes_on_where_it_was_cut(tmp_path: Path) -> None:
    with create(tmp_path) as run:
        run.metrics.write_text('{"step": 0, "x": "NaN"}\n{"step": 1}\n{"st')
        run.rewind(1)
        writer = JsonlWriter(run.metrics)
        writer.write(1, {"x": float("inf")}, evaluation=None)
        writer.close()
        lines = read_lines(run.metrics)
        assert [line["step"] for line in lines] == [0, 1]
        assert [line["x"] for line in lines] == ["NaN", "Infinity"]


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_text('{"step": 0}\n{"ste\n{"step": 2}\n')
    with raises(CheckpointError, "not-json: m.jsonl, line 2"):
        read_lines(tmp_path / "m.jsonl")
    (tmp_path / "m.jsonl").write_text("[1]\n")
    with raises(CheckpointError, "wrong-type: line 1"):
        read_lines(tmp_path / "m.jsonl")


HOLDER = textwrap.dedent("""
    import sys, time
    from pathlib import Path
    from lockstep.observe.lock import RunLock
    lock = RunLock(Path(sys.argv[1]))
    print("held", flush=True)
    time.sleep(60)
""")


def test_two_processes_never_write_one_run_and_a_killed_one_does_not_block(tmp_path: Path) -> None:
    create(tmp_path).close()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "lock")], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with raises(ConfigError, "locked"):
            RunDir.open(tmp_path)
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        RunDir.open(tmp_path).close()
    finally:
        holder.kill()
        holder.wait()


def lock_text(**changes: object) -> str:
    import socket

    me = {"pid": os.getppid(), "started": process_start(os.getppid()), "host": socket.gethostname()}
    return json.dumps(me | changes)


def test_a_reused_pid_is_not_the_owner_and_another_host_is_respected(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.write_text(lock_text())
    with raises(ConfigError, "locked"):
        RunLock(path)
    path.write_text(lock_text(started="1"))
    RunLock(path).release()
    path.write_text(lock_text(host="elsewhere", started="1"))
    with raises(ConfigError, "locked"):
        RunLock(path)


def test_who_was_started_after_a_death_takes_the_lock_of_another_host_only(tmp_path: Path) -> None:
    """The launcher has ended the ranks before; a process of this machine that lives is not one of them."""
    create(tmp_path).close()
    (tmp_path / "lock").write_text(lock_text(host="elsewhere", started="1"))
    with RunDir.open(tmp_path, restarted=True):
        assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
    (tmp_path / "lock").write_text(lock_text())
    with raises(ConfigError, "locked"):
        RunDir.open(tmp_path, restarted=True)


def test_release_leaves_a_lock_that_another_process_took_over(tmp_path: Path) -> None:
    lock = RunLock(tmp_path / "lock")
    (tmp_path / "lock").write_text(lock_text())
    lock.release()
    assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getppid()


def test_a_write_that_fails_leaves_the_old_file_and_no_litter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config.toml"
    files.write_atomic(path, "old")

    def fail(*args: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(files.os, "fsync", fail)
    with pytest.raises(OSError, check=lambda error: error.args == ("disk full",)):
        files.write_atomic(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["config.toml"]


def test_no_bare_nan_is_ever_written() -> None:
    text = files.json_lines([{"a": float("nan"), "b": [float("-inf")], "c": {"d": True, "e": None}}])
    assert text == '{"a": "NaN", "b": ["-Infinity"], "c": {"d": true, "e": null}}\n'
