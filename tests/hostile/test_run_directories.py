"""Run directories and checkpoints that were edited, damaged or made to harm: a resume gives one error of
Lockstep's, or just what the undisturbed directory gives, and never waits."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from raising import raises

from lockstep import loops
from lockstep.config.load import load_resumed, load_run
from lockstep.config.run import GRPORun
from lockstep.errors import CheckpointError, ConfigError, LockstepError, TrainError
from lockstep.loop import distributed as joining
from lockstep.loop.policy import Policy
from lockstep.loop.preflight import preflight
from lockstep.loop.run import Run
from lockstep.models.load import load_model
from lockstep.observe.lock import RunLock
from lockstep.observe.run_history import Line, check_lines, metric_lines
from lockstep.train.local import LocalBackend

SECONDS = 300
"""Only what waits for ever takes so long."""
STEPS = 4
TINY = {
    "steps": STEPS,
    "model.num_layers": 1,
    "rollout.prompts_per_step": 2,
    "rollout.group_size": 2,
    "rollout.sampling.max_tokens": 4,
    "eval.every": 2,
    "eval.num_prompts": 2,
    "log.tensorboard": False,
    "log.display": "off",
    "checkpoint.every": 2,
    "checkpoint.export_at_end": False,
}


@pytest.fixture(autouse=True)
def deadline() -> Iterator[None]:
    """A test that waits for a fifo ends with an error."""

    def late(*_: object) -> None:
        raise AssertionError(f"still waiting after {SECONDS} s")

    previous = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, previous)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    run = load_run("tiny", overrides=TINY | {"run_dir": str(folder)})
    assert isinstance(run, GRPORun)
    assert loops.train(run)["outcome"] == "finished"
    return folder


@pytest.fixture(scope="module")
def backend() -> LocalBackend:
    run = load_run("tiny", overrides=TINY)
    model = load_model(run.model, attention="sdpa", device=torch.device("cpu"))
    return LocalBackend(run.train, model=model, total_steps=STEPS, temperature=1.0, ref=False)


Resume = Callable[..., dict[str, Any]]


@pytest.fixture
def spoilt(finished: Path, tmp_path: Path) -> Callable[[], Path]:
    """A new copy of the finished run each time. Weights are links to the same file: nothing writes them."""
    numbers = iter(range(10_000))

    def copy(source: str, target: str) -> None:
        (os.link if source.endswith(".safetensors") else shutil.copyfile)(source, target)

    return lambda: Path(shutil.copytree(finished, tmp_path / f"run-{next(numbers)}", copy_function=copy))


@pytest.fixture
def resume(backend: LocalBackend, finished: Path, monkeypatch: pytest.MonkeyPatch) -> Resume:
    """What a resumed run to six steps begins with: everything but the model and the data, which other files
    decide. The config is read once: it takes half of the time."""
    extended = load_resumed(finished, {"steps": 6})
    monkeypatch.setattr(joining, "check_resumable", lambda folder, run: None)

    def begin(folder: Path, *, checkpoint: int | None = None) -> dict[str, Any]:
        run = extended.model_copy(update={"run_dir": folder})
        with torch.no_grad():
            for parameter in backend.module.parameters():
                parameter.zero_()
        if (summary := preflight(run, resume=folder, checkpoint=checkpoint)) is not None:
            return summary
        with Run(run, resume=folder, checkpoint=checkpoint) as opened:
            opened.restore(cast(Policy, SimpleNamespace(backend=backend)))
            done, evaluations = opened.first_step, opened._saving.state.values["evaluations"]
        lines = [(line.step, line.evaluation) for line in metric_lines(folder / "metrics.jsonl")]
        rollouts = {f.name: f.read_bytes() for f in sorted((folder / "rollouts").iterdir())}
        weights = b"".join(p.detach().numpy().tobytes() for p in backend.module.parameters())
        return {
            "done": done,
            "updates": backend.steps_done,
            "evaluations": evaluations,
            "lines": lines,
            "rollouts": rollouts,
            "weights": hashlib.sha256(weights).hexdigest(),
            "left": sorted(p.name for p in folder.iterdir() if p.name != "summary.json"),
        }

    return begin


# --- every file, in every way -------------------------------------------------------------------------------

VALUES: dict[str, Any] = {
    "null": None,
    "text": "\x1b]0;x\x07",
    "negative": -5,
    "true": True,
    "list": [],
    "huge": 10**400,
}
DEEP = b'{"step": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n"


def replace(path: Path, data: bytes) -> None:
    path.unlink()
    path.write_bytes(data)


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def link(path: Path, target: Path) -> None:
    path.unlink()
    path.symlink_to(target)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


WHOLE: dict[str, Callable[[Path], object]] = {
    "removed": lambda path: path.unlink(),
    "empty": lambda path: replace(path, b""),
    "garbage": lambda path: replace(path, b"\x00\x01{{"),
    "not UTF-8": lambda path: replace(path, b'{"step": "\xff\xfe"}\n'),
    "half": lambda path: replace(path, path.read_bytes()[: path.stat().st_size // 2]),
    "deep": lambda path: replace(path, DEEP),
    "no object": lambda path: replace(path, b"[1]\n"),
    "a fifo": fifo,
    "a link to itself": lambda path: link(path, path),
    "a link to a device": lambda path: link(path, Path("/dev/zero")),
    "a folder": folder,
}
JSON_FILES = ("manifest.json", "summary.json", "lock")
CHECKPOINT_FILES = ("complete.json", "run_state.json", "state.json")


def attempt(resume: Resume, run: Path, undisturbed: dict[str, Any], what: str) -> bool:
    """Whether the resume was refused; if not, it was the undisturbed one."""
    try:
        result = resume(run)
    except LockstepError as error:
        text = str(error)
        assert text.isprintable(), (what, text)
        assert len(text) < 2000, what
        return True
    assert result == undisturbed, what
    return False


def test_a_spoilt_file_is_refused_or_changes_nothing(spoilt, resume):
    undisturbed = resume(spoilt())
    assert (undisturbed["done"], undisturbed["updates"]) == (4, 4)
    refused = set()
    last = Path("checkpoints/step-000004")
    names = [*JSON_FILES, "metrics.jsonl", *(last / name for name in CHECKPOINT_FILES)]
    names += [last / "model.safetensors", last / "rng.safetensors"]
    for name in names:
        for way, spoil in WHOLE.items():
            run = spoilt()
            spoil(run / name)
            if attempt(resume, run, undisturbed, f"{name}: {way}"):
                refused.add((str(name), way))
            shutil.rmtree(run)
    # Only what every run writes again may be missing or damaged.
    contents = {"removed", "empty", "garbage", "not UTF-8", "half", "deep", "no object"}
    assert {(str(name), way) for name in names for way in WHOLE} - refused == {
        *(("summary.json", way) for way in contents),
        *(("lock", way) for way in contents),
    }


def test_a_field_of_another_kind_is_refused_or_changes_nothing(spoilt, resume):
    """In checkpoints with the hashes made to fit, so that the field itself is looked at."""
    undisturbed = resume(spoilt())
    last, kept = Path("checkpoints/step-000004"), set()
    for name in ("manifest.json", *(last / name for name in CHECKPOINT_FILES)):
        fields = json.loads((spoilt() / name).read_text())
        for field in fields:
            for kind, value in VALUES.items():
                run = spoilt()
                replace(run / name, json.dumps(fields | {field: value}).encode())
                if Path(name).name in ("run_state.json", "state.json"):
                    make_hashes_fit(run / last)
                if not attempt(resume, run, undisturbed, f"{name}: {field} is {kind}"):
                    kept.add(f"{Path(name).name}: {field}")
                shutil.rmtree(run)
    decisive = {
        *("complete.json: step", "complete.json: files", "run_state.json: step", "run_state.json: evaluated"),
        *("run_state.json: evaluations", "state.json: progress", "state.json: files", "state.json: tensors"),
        *("state.json: version", "state.json: format", "complete.json: optimizer_steps"),
    }
    assert kept & (decisive - {"complete.json: optimizer_steps"}) == set()


def make_hashes_fit(checkpoint: Path) -> None:
    file = checkpoint / "complete.json"
    complete = json.loads(file.read_text())
    for name in complete["files"]:
        data = (checkpoint / name).read_bytes()
        complete["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    file.write_text(json.dumps(complete))


def test_a_line_of_metrics_that_is_lost_doubled_or_wrong(spoilt, resume):
    undisturbed = resume(spoilt())
    lines = (spoilt() / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    rows = [(row["step"], row.get("evaluation")) for row in map(json.loads, lines)]
    assert rows == [
        *((0, "before"), (0, None), (1, None), (2, "during")),
        *((2, None), (3, None), (4, "after")),
    ]
    spoils: dict[str, list[bytes]] = {}
    for i, line in enumerate(lines):
        row = json.loads(line)
        spoils[f"{rows[i]} lost"] = lines[:i] + lines[i + 1 :]
        spoils[f"{rows[i]} twice"] = [*lines[: i + 1], *lines[i:]]
        spoils[f"only {i} lines"] = lines[:i]
        if i:
            spoils[f"{rows[i]} moved"] = [line, *lines[:i], *lines[i + 1 :]]
        for kind, value in VALUES.items():
            wrong = json.dumps(row | {"step": value}).encode() + b"\n"
            spoils[f"{rows[i]} has step {kind}"] = [*lines[:i], wrong, *lines[i + 1 :]]
        spoils[f"{rows[i]} deep"] = [*lines[:i], DEEP, *lines[i + 1 :]]
    refused = set()
    for what, spoil in spoils.items():
        run = spoilt()
        replace(run / "metrics.jsonl", b"".join(spoil))
        if attempt(resume, run, undisturbed, what):
            refused.add(what)
        shutil.rmtree(run)
    # The resumed run makes the evaluation "after" later: its line is dropped anyway.
    after = "(4, 'after')"
    assert spoils.keys() - refused == {f"{after} lost", f"{after} twice", f"{after} moved", "only 6 lines"}


def test_a_stand_in_line_shows_the_hole_and_lets_the_run_go_on(spoilt, resume):
    run = spoilt()
    lines = (run / "metrics.jsonl").read_text().splitlines()
    replace(run / "metrics.jsonl", "".join(f"{line}\n" for line in lines if '"step": 1' not in line).encode())
    with raises(CheckpointError, "incomplete: step 1"):
        resume(run)
    stand_in = [line if '"step": 1' not in line else '{"step": 1}' for line in lines]
    replace(run / "metrics.jsonl", "".join(f"{line}\n" for line in stand_in).encode())
    assert resume(run)["done"] == 4


def test_lines_by_hand():
    def lines(*rows: tuple[int, str | None]) -> list[Line]:
        return [
            Line(number=i, raw=b"", step=step, evaluation=name)
            for i, (step, name) in enumerate(rows, start=1)
        ]

    path, good = Path("m"), lines((0, "before"), (0, None), (1, None), (2, None))
    check_lines(path, good, done=2, evaluations={(0, "before")})
    check_lines(path, good, done=3, evaluations=set())
    for rows, done, said in (
        (lines((0, None), (2, None)), 3, "incomplete: step 1"),
        (lines((1, None)), 2, "incomplete: step 0"),
        ([], 1, "incomplete: step 0"),
        (lines((0, None), (1, None)), 3, "incomplete: step 2"),
        (lines((0, None), (0, None)), 1, "out-of-order: step 0"),
        (lines((0, None)), 1, "incomplete: evaluation 'before' after 0 steps"),
        (
            lines((0, "before"), (0, "before"), (0, None)),
            1,
            "out-of-order: evaluation 'before' after 0 steps",
        ),
    ):
        with raises(CheckpointError, said):
            check_lines(path, rows, done=done, evaluations={(0, "before")} if done == 1 else set())


# --- a run that has done steps is not begun again -----------------------------------------------------------


@pytest.mark.parametrize("left", ["everything", "metrics.jsonl", "summary.json", "rollouts"])
def test_without_checkpoints_nothing_is_begun_again(left, spoilt, resume):
    run = spoilt()
    shutil.rmtree(run / "checkpoints")
    for name in ("metrics.jsonl", "summary.json"):
        if left not in ("everything", name):
            (run / name).unlink()
    if left not in ("everything", "rollouts"):
        shutil.rmtree(run / "rollouts")
    before = {
        p: p.read_bytes() for p in run.rglob("*") if p.is_file() and p.name not in ("lock", "config.toml")
    }
    with raises(CheckpointError, "incomplete: checkpoints"):
        resume(run)
    with raises(ConfigError, "already-exists: run-0"):
        loops.train(load_run("tiny", overrides=TINY | {"run_dir": str(run)}))  # type: ignore[arg-type]
    assert {p: p.read_bytes() for p in before} == before


def test_an_incomplete_checkpoint_is_no_reason_to_begin_again(spoilt, resume):
    run = spoilt()
    for complete in run.glob("checkpoints/*/complete.json"):
        complete.unlink()
    with raises(CheckpointError, "damaged-file: complete.json is missing"):
        resume(run)
    assert len(metric_lines(run / "metrics.jsonl")) == 7


def test_a_run_that_did_no_step_begins_again(spoilt, resume):
    """As one that was killed after the evaluation before, or in the middle of its first step."""
    run = spoilt()
    shutil.rmtree(run / "checkpoints")
    (run / "summary.json").unlink()
    first = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)[0]
    replace(run / "metrics.jsonl", first + b'{"step": 0, "lo')
    lines = (run / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    replace(run / "ledger.jsonl", b"".join(line for line in lines if json.loads(line)["step"] == 0))
    for file in (run / "rollouts").iterdir():
        if file.name not in ("evaluation-before.jsonl", "step-000000.jsonl"):
            file.unlink()
    run_config = load_resumed(run)
    with Run(run_config, resume=run) as opened:
        assert opened._saving._from is None and opened._saving.state.values["evaluations"] == {}


def test_checkpoints_on_which_the_files_disagree(spoilt, resume):
    def edit(run: Path, name: str, change: Callable[[dict[str, Any]], object]) -> None:
        file = run / "checkpoints/step-000004" / name
        value = json.loads(file.read_text())
        change(value)
        file.write_text(json.dumps(value))
        if name != "complete.json":
            make_hashes_fit(file.parent)

    edits: list[tuple[str, Callable[[Path], object], str]] = [
        (
            "the loop's step",
            lambda r: edit(r, "run_state.json", lambda v: v.update(step=3)),
            "mixed-files: step",
        ),
        (
            "the optimizer's steps",
            lambda r: edit(r, "state.json", lambda v: v["progress"].update(step=3)),
            "mixed-files: optimizer steps",
        ),
        (
            "complete.json's step",
            lambda r: edit(r, "complete.json", lambda v: v.update(step=5)),
            "damaged-file: step-000004",
        ),
        (
            "the folder's name",
            lambda r: (r / "checkpoints/step-000004").rename(r / "checkpoints/step-000003"),
            "damaged-file: step-000003",
        ),
        *(
            (
                f"complete.json without {name}",
                lambda r, name=name: edit(r, "complete.json", lambda v: v["files"].pop(name)),
                f"wrong-field: files, {name}",
            )
            for name in ("model.safetensors", "rng.safetensors", "state.json", "run_state.json")
        ),
        (
            "another hash in complete.json",
            lambda r: (
                replace(r / "checkpoints/step-000004/model.safetensors", b"other weights"),
                make_hashes_fit(r / "checkpoints/step-000004"),
            ),
            "mixed-files: model.safetensors",
        ),
        (
            "a name with an escape",
            lambda r: edit(
                r, "complete.json", lambda v: v["files"].update({"\x1b]0;x": {"bytes": 1, "sha256": ""}})
            ),
            "damaged-file: step-000004",
        ),
        (
            "a name that is too long",
            lambda r: edit(
                r, "complete.json", lambda v: v["files"].update({"x" * 5000: {"bytes": 1, "sha256": ""}})
            ),
            "damaged-file: step-000004",
        ),
    ]
    reasons = {
        "complete.json's step": "belongs to step 5",
        "the folder's name": "name to step 3",
        "a name with an escape": r"names '\x1b]0;x'",
        "a name that is too long": os.strerror(errno.ENAMETOOLONG),
    }
    for what, spoil, said in edits:
        run = spoilt()
        spoil(run)
        with raises(CheckpointError, said) as caught:
            resume(run)
        assert str(caught.value).isprintable(), what
        assert reasons.get(what, "") in str(caught.value), what
        if what != "the folder's name":  # that one is renamed: nothing else is the matter with it
            assert "--checkpoint 2" in str(caught.value), what
    assert resume(spoilt(), checkpoint=2)["done"] == 2


# --- paths that lead elsewhere ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        *("config.toml", "manifest.json", "metrics.jsonl", "summary.json", "lock", "rollouts", "checkpoints"),
        *("logs", "checkpoints/step-000004", "checkpoints/step-000004/model.safetensors"),
        *("checkpoints/step-000004/complete.json", "checkpoints/step-000004/run_state.json"),
        *("logs/tensorboard", "export", "recordings"),
    ],
)
def test_no_link_leads_out_of_a_run(name, spoilt, resume, tmp_path):
    run, outside = spoilt(), tmp_path / "outside"
    path = run / name
    if path.exists():
        path.rename(outside)
    else:
        outside.mkdir()
        (outside / "config.json").write_text("{}")
    path.symlink_to(outside)
    before = {p: p.read_bytes() for p in [outside, *outside.rglob("*")] if p.is_file()}
    with pytest.raises(LockstepError) as caught:
        resume(run)
    error = caught.value
    if "step-000004" in name:
        assert error.code == "damaged-file" and "is a link that points outside" in str(error)
    else:
        assert error.code == "leads-out-of-folder" and Path(name).name in str(error)
    assert {p: p.read_bytes() for p in [outside, *outside.rglob("*")] if p.is_file()} == before


def test_a_run_directory_may_itself_be_a_link(spoilt, resume, tmp_path):
    run = spoilt()
    (tmp_path / "linked").symlink_to(run)
    assert resume(tmp_path / "linked")["done"] == 4


@pytest.mark.parametrize("name", ["rollouts", "checkpoints", "logs", "export", "recordings"])
@pytest.mark.parametrize("kind", ["file", "fifo"])
def test_a_folder_that_is_none(name, kind, spoilt, resume):
    run = spoilt()
    shutil.rmtree(run / name, ignore_errors=True)
    os.mkfifo(run / name) if kind == "fifo" else (run / name).write_text("x")
    with raises(CheckpointError, f"not-a-file: {name}"):
        resume(run)


def test_what_a_killed_write_left_is_removed(spoilt, resume):
    run, undisturbed = spoilt(), resume(spoilt())
    for name in (
        *("rollouts/.step-000000.jsonl.ab12_xyz", "rollouts/.evaluation-before.jsonl.ab12_xyz"),
        *("rollouts/.evaluation-step-000002.jsonl.ab12_xyz", ".summary.json.ab12_xyz"),
        *(".metrics.jsonl.ab12_xyz", ".manifest.json.ab12_xyz", ".config.toml.ab12_xyz"),
        ".export.tmp-ab12_xyz/part-0.safetensors",
    ):
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_text("{")
    (run / "rollouts" / ".mine").write_text("stays")
    result = resume(run)
    assert result.pop("rollouts").keys() == {*undisturbed.pop("rollouts"), ".mine"}
    assert result == undisturbed


# --- a full disk --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def small_disk(folder: Path, kib: int) -> Iterator[Path]:
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_fills_up_while_training(finished, resume, tmp_path):
    """Step by step less room, so that it gives out in the manifest, the rollouts, the metrics, the summary;
    with room again the run goes on from its checkpoint to the numbers of the run that had room."""
    size = sum(-(-p.stat().st_size // 4096) * 4 + 4 for p in finished.rglob("*"))
    with small_disk(tmp_path / "disk", kib=size + 400) as disk:
        failed = set()
        for left in (0, 4, 8, 12, 16, 24, 32):
            run = disk / "run"
            shutil.copytree(finished, run)
            free = shutil.disk_usage(disk).free
            (disk / "ballast").write_bytes(bytes(free - left * 1024))
            with pytest.raises(LockstepError) as caught:
                loops.train(load_resumed(run, {"steps": 6}), resume=run)  # type: ignore[arg-type]
            assert str(caught.value).isprintable() and caught.value.code in ("cannot-write", "no-space")
            failed.add(str(caught.value).partition(":")[0].rpartition("/")[2])
            (disk / "ballast").unlink()
            assert resume(run)["done"] == 4
            shutil.rmtree(run)
    assert {type(name) for name in failed} == {str} and len(failed) >= 2, failed


@pytest.mark.parametrize("name", ["manifest.json", "metrics.jsonl", "step-000004.jsonl", "summary.json"])
def test_each_file_on_a_full_disk_is_one_error(name, spoilt, monkeypatch):
    """The system refuses to write one file; when it has room again, the run ends as the undisturbed one."""
    from lockstep.observe import files, metrics

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    real, run = files.os.replace, spoilt()

    def replace_all_but_one(source: str, target: Path) -> None:
        full() if Path(target).name == name else real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "replace", replace_all_but_one)
        if name == "metrics.jsonl":
            patch.setattr(metrics.os, "write", full)
        with raises(TrainError, f"cannot-write: {name}"):
            loops.train(load_resumed(run, {"steps": 6}), resume=run)  # type: ignore[arg-type]
    assert not list(run.rglob(".*"))
    summary = loops.train(load_resumed(run, {"steps": 6}), resume=run)  # type: ignore[arg-type]
    assert (summary["outcome"], summary["steps"]) == ("finished", 6)
    steps = [line.step for line in metric_lines(run / "metrics.jsonl") if line.evaluation is None]
    assert steps == [0, 1, 2, 3, 4, 5]


def test_half_a_line_of_metrics_leaves_no_trace(spoilt, monkeypatch):
    from lockstep.observe import metrics

    file = spoilt() / "metrics.jsonl"
    before, real = file.read_bytes(), os.write
    writer = metrics.JsonlWriter(file)

    def half(handle: int, data: bytes) -> int:
        if len(data) < 40:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(handle, data[: len(data) // 2])

    with monkeypatch.context() as patch:
        patch.setattr(metrics.os, "write", half)
        with pytest.raises(OSError) as caught:
            writer.write(4, {"loss": 0.125, "reward/mean": 0.5}, evaluation=None)
    assert caught.value.errno == errno.ENOSPC
    assert file.read_bytes() == before
    writer.write(4, {"loss": 0.125}, evaluation=None)
    writer.sync()
    writer.close()
    assert json.loads(file.read_bytes()[len(before) :])["loss"] == 0.125


# --- refused before anything is loaded or made --------------------------------------------------------------


def test_a_step_that_needs_more_prompts_than_there_are(tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"question {i}"}) + "\n" for i in range(10)))
    model = tmp_path / "model"  # holds no weights: whoever loads it fails otherwise
    model.mkdir()
    (model / "config.json").write_text("{}")
    settings = {"model.name": str(model), "data.source": str(data), "run_dir": str(tmp_path / "run")}
    reward = {"rewards": [{"name": "length", "kwargs": {"target": 4}}]}
    cases = [
        (
            "grpo",
            {"rollout.prompts_per_step": 11, "eval.before": False, "eval.after": False},
            "not-enough: rollout.prompts_per_step, 10",
        ),
        (
            "grpo",
            {"rollout.prompts_per_step": 8, "eval.num_prompts": 3},
            "not-enough: rollout.prompts_per_step, 10, 3",
        ),
        ("sft", {"batch_size": 11}, "not-enough: batch_size, 10"),
    ]
    for kind, more, said in cases:
        with raises(ConfigError, said) as caught:
            more |= reward if kind == "grpo" else {}
            preflight(load_run(kind=kind, overrides=settings | more), resume=None, checkpoint=None)
        assert ("rollout.prompts_per_step = " if kind == "grpo" else "batch_size = ") in str(caught.value)
    enough = settings | reward | {"rollout.prompts_per_step": 7, "eval.num_prompts": 3}
    preflight(load_run(kind="grpo", overrides=enough), resume=None, checkpoint=None)


@pytest.mark.parametrize(
    ("package", "settings", "about"),
    [
        ("wandb", {"log.wandb": True}, "log.wandb"),
        ("tensorboard", {"log.tensorboard": True}, "log.tensorboard = true"),
        ("peft", {"model.lora.rank": 4}, "model.lora"),
        ("torchao", {"train.optimizer": "adamw8bit"}, "train.optimizer = 'adamw8bit'"),
        ("deepspeed", {"train.backend": "deepspeed"}, "train.backend = 'deepspeed'"),
    ],
)
def test_a_missing_package_is_named_before_there_is_a_run_directory(
    package, settings, about, tmp_path, monkeypatch
):
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else real(name))
    run = load_run("tiny", overrides=TINY | settings | {"run_dir": str(tmp_path / "run")})
    with raises(ConfigError, f"missing-package: {about}"):
        loops.train(run)  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("started_with", [False, True])
def test_evaluations_on_resume_never_change_the_training_data(started_with, tmp_path):
    """Ten prompts, of which an evaluation takes four; turned off later, they stay out of training. A run that
    has trained on all ten is not evaluated on them."""
    folder = tmp_path / "run"
    evaluation = {"eval.before": started_with, "eval.after": False, "eval.every": 0, "eval.num_prompts": 4}
    settings = {
        "data.size": 10,
        "steps": 1,
        "eval_data.source": "ids",
        "eval_data.size": 4,
        "run_dir": str(folder),
    }
    # The same generator: the held-out prompts are the first four of the ten.
    run = load_run("tiny", overrides=TINY | evaluation | settings)
    loops.train(run)  # type: ignore[arg-type]
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["held_out"], manifest["data"]["prompts"]) == ("hash" if started_with else None, 10)
    turned = load_resumed(folder, {"steps": 2, "eval.before": False, "eval.after": not started_with})
    if started_with:
        assert loops.train(turned, resume=folder)["steps"] == 2  # type: ignore[arg-type]
        return
    with raises(ConfigError, "contradiction: eval.before"):
        loops.train(turned, resume=folder)  # type: ignore[arg-type]


def test_a_run_of_a_version_that_always_held_prompts_out_trains_on_the_same_ones(tmp_path):
    """Such a version had no evaluation to make here, and still trained on six of the ten prompts."""
    folder = tmp_path / "run"
    settings = {"data.size": 10, "steps": 1, "eval_data.source": "ids", "eval_data.size": 4}
    off = {"eval.before": False, "eval.after": False, "eval.every": 0, "eval.num_prompts": 4}
    run = load_run("tiny", overrides=TINY | settings | off | {"run_dir": str(folder)})
    loops.train(run)  # type: ignore[arg-type]
    file = folder / "manifest.json"
    written = json.loads(file.read_text())
    older = {name: value for name, value in written.items() if name not in ("held_out", "algorithm")}
    # As commit 56d1f28 wrote them for this run.
    older["data"] = {"prompts": 10, "excluded": 4, "dropped_overlong": 0, "truncated": 0}
    older["data_fingerprint"] = "c65c8c77c9a493dfe7e952ac9a58a197"
    file.write_text(json.dumps(older))
    resumed = load_resumed(folder, {"steps": 2})
    assert loops.train(resumed, resume=folder)["steps"] == 2  # type: ignore[arg-type]
    again = json.loads(file.read_text())
    assert (again["held_out"], again["data"], again["data_fingerprint"]) == (
        "first",
        older["data"],
        older["data_fingerprint"],
    )
    assert written["data_fingerprint"] != older["data_fingerprint"]


def test_a_finished_summary_is_read_with_care(spoilt):
    """Its numbers are printed: where they are none, the run writes it again."""
    run = spoilt()
    config, file = load_resumed(run), run / "summary.json"
    summary = json.loads(file.read_text())
    assert preflight(config, resume=run, checkpoint=None) == summary
    for change in (
        *({"wall_seconds": "x"}, {"run_dir": None}, {"eval_after": 5}, {"eval_before": {"mean_reward": "x"}}),
        *({"eval_after": {"step": -1}}, {"outcome": []}, {"steps": None}),
    ):
        file.write_text(json.dumps(summary | change))
        assert preflight(config, resume=run, checkpoint=None) is None, change


def test_a_lock_that_leads_elsewhere_is_left_alone(tmp_path):
    for spoil in (lambda lock: lock.symlink_to(tmp_path / "mine"), os.mkfifo, lambda lock: lock.mkdir()):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        (tmp_path / "run").mkdir()
        (tmp_path / "mine").write_text("precious")
        spoil(tmp_path / "run" / "lock")
        with pytest.raises(ConfigError):
            RunLock(tmp_path / "run" / "lock")
        assert (tmp_path / "mine").read_text() == "precious"
