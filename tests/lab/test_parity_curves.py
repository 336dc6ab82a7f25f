import json
import math
from pathlib import Path
from typing import Any

import pytest
from raising import raises

from lockstep.errors import ConfigError
from lockstep_lab.loss_curves import read as curves
from lockstep_lab.loss_curves.compare import compare_losses, plot
from lockstep_lab.loss_curves.read import read_losses


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def lines(*rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.mark.parametrize(
    ("text", "steps", "values"),
    [
        ("loss: 2.31\nloss: 2.2\n", (0, 1), (2.31, 2.2)),
        ("step 1/3 loss: 2.5 grad_norm: 1.0\nstep 2/3 loss: 2.25 grad_norm: 1\n", (1, 2), (2.5, 2.25)),
        (
            "{'loss': 2.3, 'grad_norm': 1.5, 'epoch': 0.1}\n{'loss': '2.1', 'epoch': 0.2}\n",
            (0, 1),
            (2.3, 2.1),
        ),
        ('{"step": 10, "loss": 1e-3}\n{"step": 20, "loss": 5E-4}\n', (10, 20), (1e-3, 5e-4)),
        ("step 3  loss 4.5000  2.1 s\nstep 4  loss 4.2500  2.0 s\n", (3, 4), (4.5, 4.25)),
        ("[global_step=7] gpt_loss=1.25, lr=1e-5\n[global_step=8] gpt_loss=1.125\n", (7, 8), (1.25, 1.125)),
        ("Iteration 5: train_loss = -0.5\niter: [6] train_loss = -1.5\n", (5, 6), (-0.5, -1.5)),
        # tqdm: one line for a terminal, the last value of a step counts
        (
            "Train:  1/9 [00:01<00:09, loss=3.0]\rTrain:  1/9 [00:01<00:09, loss=2.5]\r"
            "Train:  2/9 [00:02<00:08, loss=2.0]\n",
            (1, 2),
            (2.5, 2.0),
        ),
        ("\x1b[32mstep 1\x1b[0m loss: \x1b[1m2.5\x1b[0m\n(pid=12) step 2 loss: 2.25\n", (1, 2), (2.5, 2.25)),
        ("eval_loss: 9.0\nloss: 2.0\neval_loss: 8.0\nloss: 1.0\n", (0, 1), (2.0, 1.0)),
        ("LOSS: 2.0\n", (0,), (2.0,)),
    ],
)
def test_text_logs(tmp_path: Path, text: str, steps: tuple[int, ...], values: tuple[float, ...]) -> None:
    found = read_losses(write(tmp_path / "x.log", text))
    assert (found.steps, found.values) == (steps, values)


def test_a_log_says_which_key_was_taken(tmp_path: Path) -> None:
    log = write(
        tmp_path / "x.log", "step 1 pg_loss: 1.0 value_loss: 2.0\nstep 2 pg_loss: 0.5 value_loss: 1.0\n"
    )
    with raises(ConfigError, "ambiguous: --key, x.log"):
        read_losses(log)
    found = read_losses(log, key="value_loss")
    assert found.values == (2.0, 1.0) and found.source == "text, 'value_loss'"
    with raises(ConfigError, "unknown-name: --key, loss, x.log"):
        read_losses(log, key="loss")


def test_nan_is_read_and_not_passed_over(tmp_path: Path) -> None:
    found = read_losses(write(tmp_path / "x.log", "step 1 loss: 1.0\nstep 2 loss: nan\nstep 3 loss: -inf\n"))
    assert math.isnan(found.values[1]) and found.values[2] == -math.inf


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("x.log", "", "missing-values: x.log"),
        ("x.log", "lossless compression: 3.5\nthe loss is large\n", "missing-values: x.log"),
        ("x.jsonl", '{"step": 1, "reward": 2.0}\n', "missing-values: x.jsonl"),
        ("x.jsonl", '{"loss": 1.0}\nnot json\n{"loss": 1.0}\n', "not-json: x.jsonl, 2"),
        ("x.jsonl", "[1]\n", "wrong-type: x.jsonl, 1"),
        ("x.jsonl", "[" * 200_000 + "\n{}\n", "not-json: x.jsonl, 1"),
        ("x.json", "{", "not-json: x.json"),
        ("x.json", "[]", "missing-field: x.json, log_history"),
        ("x.json", '{"log_history": 3}', "missing-field: x.json, log_history"),
        ("x.json", '{"log_history": [1]}', "missing-field: x.json, log_history"),
        ("x.json", '{"log_history": []}', "missing-values: x.json"),
    ],
)
def test_files_without_losses(tmp_path: Path, name: str, text: str, problem: str) -> None:
    with raises(ConfigError, problem):
        read_losses(write(tmp_path / name, text))


def test_binary_and_large_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.log"
    path.write_bytes(bytes(range(256)) * 50 + b"\nloss: 2.0\n")
    assert read_losses(path).values == (2.0,)
    # a line of a megabyte is looked at in its beginning only, and quickly
    write(path, "loss: " + "1" * 1_000_000 + "\n" + "a.b/" * 500_000 + " loss 1.5\nloss: 3.0\n")
    assert read_losses(path).values[-1] == 3.0
    monkeypatch.setattr(curves, "MOST_BYTES", 100)
    with raises(ConfigError, "too-large: x.log", limit=100):
        read_losses(path)
    with raises(ConfigError, "no-such-file: none"):
        read_losses(tmp_path / "none")


def test_our_run_folder(tmp_path: Path) -> None:
    text = lines(
        {"step": 0, "evaluation": "before", "loss": 9.0},
        {"step": 0, "loss": 3.0, "grad_norm": 1.0},
        {"step": 1, "loss": "NaN"},
        {"step": 1, "loss": 2.0},
    )
    write(tmp_path / "metrics.jsonl", text + '{"step": 2, "lo')  # killed in the middle of a line
    found = read_losses(tmp_path)
    assert (found.steps, found.values) == ((0, 1), (3.0, 2.0))
    assert found.source == "metrics, key 'loss'" and found.path == tmp_path / "metrics.jsonl"
    assert found.notes == ("1 repeated step; the last value of each is taken",)


def test_hugging_face(tmp_path: Path) -> None:
    history = [{"loss": 2.0, "step": 10}, {"eval_loss": 1.9, "step": 10}, {"loss": 1.0, "step": 20}]
    for step in (9, 10):  # the newest by number, not by name
        folder = tmp_path / f"checkpoint-{step}"
        write(folder / "trainer_state.json", json.dumps({"log_history": history if step == 10 else []}))
    found = read_losses(tmp_path)
    assert (found.steps, found.values) == ((10, 20), (2.0, 1.0))
    assert found.path == tmp_path / "checkpoint-10" / "trainer_state.json"


def test_tensorboard(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path / "tb")) as writer:
        for step in range(3):
            writer.add_scalar("train/loss", 3.0 - step, step)
            writer.add_scalar("eval/loss", 9.0, step)
    found = read_losses(tmp_path / "tb")
    assert (found.steps, found.values, found.source) == (
        (0, 1, 2),
        (3.0, 2.0, 1.0),
        "TensorBoard, tag 'train/loss'",
    )
    (file,) = (tmp_path / "tb").iterdir()
    assert read_losses(file).values == (3.0, 2.0, 1.0)
    assert read_losses(tmp_path, key="eval/loss").values == (9.0, 9.0, 9.0)
    with raises(ConfigError, "unknown-name: --key, x, tb"):
        read_losses(tmp_path, key="x")
    with SummaryWriter(str(tmp_path / "tb2")) as writer:
        writer.add_scalar("loss", 1.0, 0)
    with raises(ConfigError, "ambiguous: test_tensorboard0", runs=2):
        read_losses(tmp_path)
    damaged = tmp_path / "events.out.tfevents.1"
    damaged.write_bytes(b"\x00\xff" * 500)
    with raises(ConfigError, "missing-values: events.out.tfevents.1"):
        read_losses(damaged)


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with raises(ConfigError, "wrong-kind-of-file: test_a_folder_that_is_no_run0, nor a log"):
        read_losses(tmp_path)
    write(tmp_path / "one.log", "loss: 1.0\n")
    assert read_losses(tmp_path).values == (1.0,)
    write(tmp_path / "two.log", "loss: 1.0\n")
    with raises(ConfigError, "wrong-kind-of-file: but 2 logs; give one of them"):
        read_losses(tmp_path)


def losses(tmp_path: Path, name: str, values: list[float], *, first: int = 0) -> curves.Losses:
    rows = [{"step": first + i, "loss": value} for i, value in enumerate(values)]
    text = "".join(f'{{"step": {row["step"]}, "loss": {row["loss"]!r}}}\n' for row in rows)
    return read_losses(write(tmp_path / name, text.replace("nan", "NaN")))


def test_two_runs_step_by_step(tmp_path: Path) -> None:
    a = losses(tmp_path, "a.jsonl", [4.0, 2.0, 1.0])
    found = compare_losses(a, losses(tmp_path, "b.jsonl", [4.0, 2.1, 1.02]), threshold=0.051)
    assert found.ok and found.differences == (0.0, pytest.approx(0.05), pytest.approx(0.02))
    assert found.verdict == "parity: 3 losses agree within 0.051 (largest relative difference 0.05 at step 1)"
    worse = compare_losses(a, losses(tmp_path, "c.jsonl", [4.0, 2.2, 1.2]), threshold=0.05)
    assert not worse.ok
    assert worse.verdict == (
        "parity: 2 of 3 losses differ by more than 0.05 (largest relative difference 0.2 at step 2)"
    )
    values = worse.as_dict()
    assert values["ok"] is False and values["at_step"] == 2 and values["a"]["values"] == [4.0, 2.0, 1.0]


def test_a_figure_that_is_no_loss_is_called_by_its_name(tmp_path: Path) -> None:
    rising = [{"step": i, "loss": 1.0, "reward/mean": 0.1 * (i + 1)} for i in range(6)]
    a = read_losses(write(tmp_path / "a.jsonl", lines(*rising)), key="reward/mean")
    found = compare_losses(a, a, threshold=0.05)
    assert found.verdict.startswith("parity: 6 values of reward/mean agree within 0.05 (")
    assert found.as_dict()["a"]["trend"] == "rises" and found.as_dict()["a"]["key"] == "reward/mean"
    text = "".join(f"step {i} loss: 1.0 mean_loss: {0.2 * (i + 1)}\n" for i in range(6))
    b = read_losses(write(tmp_path / "b.log", text), key="mean_loss")
    both = compare_losses(a, b, threshold=0.05)
    assert both.verdict.startswith(
        "parity: 6 of 6 values of reward/mean and mean_loss differ by more than 0.05 ("
    )


def test_steps_that_are_counted_differently(tmp_path: Path) -> None:
    a, b = losses(tmp_path, "a.jsonl", [2.0, 1.0]), losses(tmp_path, "b.jsonl", [2.0, 1.0], first=1)
    found = compare_losses(a, b, threshold=0.01)
    assert found.ok and "compared in their order" in found.notes[0]
    longer = losses(tmp_path, "c.jsonl", [2.0, 1.0, 0.5])
    with raises(ConfigError, "wrong-shape: --common", sizes=[2, 3]):
        compare_losses(a, longer, threshold=0.01)
    common = compare_losses(a, longer, threshold=0.01, common=True)
    assert common.ok and common.steps == (0, 1) and "2 steps are in both, of 2 and 3" in common.notes[0]
    far = losses(tmp_path, "d.jsonl", [2.0], first=50)
    with raises(ConfigError, "nothing-to-do"):
        compare_losses(a, far, threshold=0.01, common=True)


def test_a_loss_that_is_nan_is_a_difference(tmp_path: Path) -> None:
    a = losses(tmp_path, "a.jsonl", [2.0, math.nan])
    found = compare_losses(a, a, threshold=0.5)
    assert not found.ok
    assert found.verdict == f"parity: differs, loss of {a.path} is nan at step 1"


def test_losses_around_zero(tmp_path: Path) -> None:
    a = losses(tmp_path, "a.jsonl", [0.0, 2.0, -2.0, 4.0])
    found = compare_losses(a, losses(tmp_path, "b.jsonl", [0.02, 2.0, -2.0, 4.0]), threshold=0.05)
    assert found.floor == 2.0 and found.spread.max == pytest.approx(0.01) and found.ok
    assert "around 0" in found.notes[-1]
    # on-policy GRPO: zero but for rounding
    noise = losses(tmp_path, "c.jsonl", [1e-8, -2e-8, 3e-9])
    found = compare_losses(noise, losses(tmp_path, "d.jsonl", [-2e-8, 1e-8, 3e-9]), threshold=0.05)
    assert found.floor == 1e-4 and found.ok
    small = losses(tmp_path, "e.jsonl", [2e-5, 2e-5])
    assert not compare_losses(small, losses(tmp_path, "f.jsonl", [4e-5, 2e-5]), threshold=0.05).ok


def test_a_plot(tmp_path: Path) -> None:
    a = losses(tmp_path, "a$x_1.jsonl", [2.0, math.nan, 1.0])
    found = compare_losses(a, a, threshold=0.5)
    plot(found, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    with raises(ConfigError, "no-such-file: --plot, no"):
        plot(found, tmp_path / "no" / "x.png")
