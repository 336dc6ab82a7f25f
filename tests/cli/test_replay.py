from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import lockstep.train.loss_module as loss_module
from lockstep.cli.main import main
from lockstep_lab.cli.replay import on_ranks, parse, parser

RUN = """
kind = "grpo"
name = "tiny"
steps = 3
seed = 3
[model]
name = "shape:tiny-llama"
dtype = "{dtype}"
[data]
source = "ids"
max_prompt_tokens = 16
[rollout]
prompts_per_step = 2
group_size = 4
[rollout.sampling]
max_tokens = 12
[[rewards]]
name = "ids"
[train]
lr = 1e-3
token_budget = 256
{train}
[eval]
num_prompts = 2
before = false
after = false
[checkpoint]
save_at_end = false
export_at_end = false
[log]
tensorboard = false
"""


EVERY_STEP = ("--record-weights", "every 1")


def record_run(
    folder: Path,
    *,
    train: str = "",
    dtype: str = "float32",
    more: str = "",
    weights: tuple[str, ...] = EVERY_STEP,
) -> Path:
    """A tiny GRPO run that records every input and the weights of every step."""
    (folder / "run.toml").write_text(RUN.format(train=train, dtype=dtype) + more)
    flags = ["--record", *weights, "--log.display", "off"]
    assert main(["train", str(folder / "run.toml"), "--run-dir", str(folder / "run"), *flags]) == 0
    return folder / "run"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record_run(tmp_path_factory.mktemp("recorded"))


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield


def replayed(run_dir: Path, *flags: str, status: int = 0) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows and summary of `lockstep replay`."""
    out = Path(f"out-{len(list(Path().glob('out-*')))}")
    assert main(["replay", str(run_dir), "--out", str(out), *flags]) == status
    rows = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    return rows, json.loads((out / "summary.json").read_text())


# --- a real run -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("train", "dtype"),
    [
        ("", "float32"),
        ('layout = "padded"\npadding_side = "left"', "float32"),
        ("static_capacity = true", "bfloat16"),
        pytest.param('execution = "compile"', "float32", marks=pytest.mark.exhaustive),
        pytest.param('execution = "compile"\nlayout = "padded"', "bfloat16", marks=pytest.mark.exhaustive),
    ],
)
def test_a_real_run_is_replayed_to_the_bit_at_every_step(tmp_path, train, dtype):
    rows, summary = replayed(record_run(tmp_path, train=train, dtype=dtype))
    assert {row["step"] for row in rows} == {0, 1, 2}
    for row in rows:
        assert (row["weights"], row["loss_difference"], row["logprob_max_difference"]) == ("match", 0.0, 0.0)
    assert summary["verdict"].endswith("equal to the recording, bit for bit")
    assert summary["compile"]["recompiles"] == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_runs_own_checkpoints_replay_later_steps_to_the_bit(tmp_path, dtype):
    weights = ("--record-weights", "none", "--checkpoint.every", "1", "--checkpoint.keep-last", "5")
    run = record_run(tmp_path, dtype=dtype, weights=weights)
    assert not (run / "recordings/weights").exists()
    rows, _ = replayed(run)
    assert {row["step"] for row in rows} == {0, 1, 2}
    for row in rows:
        assert (row["weights"], row["loss_difference"], row["logprob_max_difference"]) == ("match", 0.0, 0.0)
    # Without the checkpoint of step 2 its inputs are not compared with like, and that is said.
    shutil.rmtree(run / "checkpoints/step-000002")
    rows, summary = replayed(run)
    assert {(row["step"], row["weights"]) for row in rows} == {(0, "match"), (1, "match"), (2, "mismatch")}
    assert all(row["logprob_max_difference"] > 1e-3 for row in rows if row["step"] == 2)
    assert "NOT the recorded weights" in summary["verdict"]


def test_adapters_are_replayed_to_the_bit_with_their_dropout(tmp_path):
    pytest.importorskip("peft")
    lora = "[model.lora]\nrank = 2\ndropout = 0.1\n"
    rows = replayed(record_run(tmp_path, more=lora))[0]
    assert {row["step"] for row in rows} == {0, 1, 2}
    for row in rows:
        assert (row["weights"], row["loss_difference"], row["logprob_max_difference"]) == ("match", 0.0, 0.0)


def test_what_is_printed_and_written(run_dir, capsys):
    assert main(["replay", str(run_dir), "--max-inputs", "3", "--json", "result.json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "replay: 3 of 3 inputs replayed; equal to the recording, bit for bit"
    text = "\n".join(lines)
    assert "cell: sdpa + eager + shared, float32 on cpu" in text and "the recorded one" in text
    assert "[3/3] input 2: step" in text and "tokens/s" in text and "forward: median" in text
    (out,) = Path("runs").glob("replay-*")
    assert sorted(path.name for path in out.iterdir()) == ["replay.log", "results.jsonl", "summary.json"]
    assert json.loads(Path("result.json").read_text()) == json.loads((out / "summary.json").read_text())
    assert "input 2: step" in (out / "replay.log").read_text()
    assert main(["replay", str(run_dir), "--max-inputs", "1", "--quiet"]) == 0
    assert capsys.readouterr().out == "replay: 1 of 1 inputs replayed; equal to the recording, bit for bit\n"


def test_a_recording_directory_is_a_recording_too(run_dir):
    assert len(replayed(run_dir / "recordings", "--max-inputs", "1")[0]) == 1


# --- flags ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "label"),
    [
        (["--preset", "all-off"], "sdpa + eager + padded"),
        (["--preset", "all-off", "--packing"], "sdpa + eager + packed"),
        (["--flash-attn"], "varlen + eager + shared"),
        (["--no-flash-attn", "--no-packing", "--padding-side", "left"], "sdpa + eager + padded left"),
        (["--attention", "hf:eager"], "hf:eager + eager + packed"),
        (["--num-layers", "1"], "sdpa + eager + shared + 1 layer"),
        (["--activation-checkpointing"], "sdpa + eager + shared + checkpointing"),
        (["--dtype", "bfloat16"], "sdpa + eager + shared"),
        (["--packing"], "sdpa + eager + packed"),
        pytest.param(
            ["--compile", "--capacity", "256"],
            "sdpa + compile + shared",
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=lambda flags: " ".join(flags) if isinstance(flags, list) else "",
)
def test_cells(run_dir, flags, label):
    rows, summary = replayed(run_dir, *flags, "--max-inputs", "2")
    assert summary["cell"]["label"] == label and [row["status"] for row in rows] == ["ok", "ok"]
    if "--num-layers" not in flags:
        assert all(row["logprob_max_difference"] < (0.2 if "--dtype" in flags else 1e-4) for row in rows)
    again = parse([str(run_dir), *summary["cell"]["flags"]])[1]
    assert again.cell.label() == label and again.cell.dtype == summary["cell"]["dtype"]


def test_which_inputs_and_what_is_done(run_dir):
    assert [row["step"] for row in replayed(run_dir, "--steps", "1:2")[0]] == [1]
    assert [row["index"] for row in replayed(run_dir, "--inputs", "2,0-1")[0]] == [2, 0, 1]
    rows = replayed(run_dir, "--no-backward", "--warmup", "1")[0]
    assert all(row["backward_ms"] is None and row["grad_norm"] is None for row in rows)
    rows, summary = replayed(run_dir, "--loss", "logprob-sum", "--optimizer-step", "--inputs", "0,1")
    assert rows[0]["loss"] > 10 and rows[0]["loss_difference"] is None and rows[1]["logprob_max_difference"]
    assert summary["optimizer_step"] and summary["loss"] == "logprob-sum"
    rows = replayed(run_dir, "--model", "shape:tiny-qwen3", "--max-inputs", "1")[0]
    assert rows[0]["weights"] == "mismatch"


def test_outputs_are_kept(run_dir):
    flags = ("--keep-outputs", "--gradient-inputs", "2", "--gradient-entries", "1000")
    summary = replayed(run_dir, *flags)[1]
    found = load_file("out-0/outputs.safetensors")
    assert {name for name in found if name.startswith("logprobs/")} == {f"logprobs/{i}" for i in range(3)}
    assert found["gradients/model.embed_tokens.weight"].shape == (1000,)
    assert summary["outputs"]["gradient_inputs"] == [0, 1]
    kept, total = re.fullmatch(r"(\d+) of (\d+) entries", summary["outputs"]["gradients"]).groups()  # type: ignore[union-attr]
    assert int(kept) == sum(t.numel() for n, t in found.items() if n.startswith("gradients/")) < int(total)


def test_when_ranks_take_over():
    def taken(*flags: str, **environ: str) -> bool:
        return on_ranks(parser().parse_args(list(flags)), environ)

    assert not taken() and not taken("--ranks", "1", "--random-seed", "3")
    assert taken("--ranks", "2") and taken("--simulate") and taken("--shuffle-inputs")
    assert taken("--local_rank=0") and taken("--local-rank", "0") and taken(RANK="0", WORLD_SIZE="1")


# --- what goes wrong --------------------------------------------------------------------------------------


def test_one_failure_among_three(run_dir, monkeypatch, capsys):
    real, calls = loss_module.decoder_inputs, []

    def broken(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("the kernel \x1b[31mraised")
        return real(*args, **kwargs)

    monkeypatch.setattr(loss_module, "decoder_inputs", broken)
    rows, summary = replayed(run_dir, status=1)
    assert [row["status"] for row in rows] == ["ok", "failed", "ok"]
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert "input 1 failed: RuntimeError: the kernel \\x1b[31mraised (out-0/tracebacks/000001.txt)" in printed
    assert printed.splitlines()[-1] == summary["verdict"]
    assert summary["verdict"].startswith("replay: 2 of 3 inputs replayed, 1 failed;")
    assert "in broken" in Path("out-0/tracebacks/000001.txt").read_text()


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--flash-attn", "--attention", "sdpa"], "both choose the kernel"),
        (["--compile", "--deepcompile"], "both choose the execution mode"),
        (["--no-compile", "--joint"], "--compile and --joint both choose"),
        (["--batch-invariant"], "splits the keys"),
        (["--optimizer-step", "--no-backward"], "needs gradients"),
        (["--attention", "flex"], "no backward on a CPU"),
        (["--attention", "nonsense"], "unknown attention kernel"),
        (["--dtype", "float16"], "no train backend scales the loss"),
        (["--num-layers", "9"], "the model has 2 layers"),
        (["--inputs", "99"], "--inputs names input 99"),
        (["--steps", "7:"], "leaves no input"),
        (["--model", "./nowhere"], "is not a folder"),
        (["--model", "shape:nonsense"], "nonsense"),
        (["--json", "no/such/folder.json"], "no such folder: 'no/such'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_refusals(run_dir, capsys, flags, text):
    assert main(["replay", str(run_dir), "--out", "out", *flags]) in (1, 2)
    said = capsys.readouterr()
    assert text in said.err and said.out == ""
    assert not Path("out").exists()  # so that the corrected command may be given with the same --out


@pytest.mark.parametrize(
    "flags",
    [
        ["--zero-stage", "4"],
        ["--max-inputs", "0"],
        ["--inputs", "3-1"],
        ["--inputs", "a"],
        ["--steps", "3"],
        ["--loss", "none"],
        ["--timeout", "0"],
        ["--max-input", "3"],
        ["--warmup", "-1"],
    ],
    ids=" ".join,
)
def test_flags_of_the_wrong_kind(run_dir, capsys, flags):
    with pytest.raises(SystemExit) as caught:
        main(["replay", str(run_dir), *flags])
    assert caught.value.code == 2 and "usage: lockstep replay" in capsys.readouterr().err


def test_nothing_to_replay(capsys, tmp_path):
    assert main(["replay", "nowhere"]) == 2
    (tmp_path / "empty").mkdir()
    assert main(["replay", str(tmp_path / "empty")]) == 2
    said = capsys.readouterr().err
    assert "nowhere" in said and "empty" in said


def test_a_second_replay_into_the_same_place_is_refused(run_dir, capsys):
    flags = ["replay", str(run_dir), "--out", "out", "--max-inputs", "1", "--quiet"]
    assert main(flags) == 0
    before = Path("out/summary.json").read_text()
    assert main(flags) == 2
    assert (
        "already contains a replay" in capsys.readouterr().err
        and Path("out/summary.json").read_text() == before
    )


def started(run_dir: Path, *flags: str, code: str = "") -> subprocess.Popen[str]:
    """`lockstep replay` in a process of its own, after `code`."""
    argv = ["replay", str(run_dir), *flags]
    source = f"{code}\nimport sys\nfrom lockstep.cli.main import main\nsys.exit(main({argv!r}))"
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", source], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    )


HANG = """
import time
import lockstep.train.loss_module as loss_module
real, calls = loss_module.decoder_inputs, []
def hang(*args, **kwargs):
    calls.append(1)
    if len(calls) == 2:
        print("hanging", flush=True)
        time.sleep(600)
    return real(*args, **kwargs)
loss_module.decoder_inputs = hang
"""


@pytest.mark.slow
def test_ctrl_c_writes_a_partial_summary(run_dir):
    process = started(run_dir, "--out", "out", code=HANG)
    assert process.stdout is not None
    assert any("hanging" in line for line in process.stdout)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    summary = json.loads(Path("out/summary.json").read_text())
    assert summary["interrupted"] and summary["counts"]["ok"] == 1
    assert "interrupted, 2 not tried: this summary is partial" in out.splitlines()[-1]


@pytest.mark.slow
def test_an_input_that_hangs_ends_the_replay(run_dir):
    process = started(run_dir, "--out", "out", "--timeout", "5", code=HANG)
    err = process.communicate(timeout=300)[1]
    assert process.returncode == 1 and "input 1 took more than --timeout 5 s" in err
    assert "in hang" in Path("out/tracebacks/000001.txt").read_text()
    summary = json.loads(Path("out/summary.json").read_text())
    assert summary["counts"].items() >= {"ok": 1, "failed": 1, "inputs": 2}.items()


@pytest.mark.slow
def test_neither_ray_nor_deepspeed_is_imported(run_dir):
    check = (
        "import atexit, sys\natexit.register(lambda: print(sorted({'ray', 'deepspeed'} & set(sys.modules))))"
    )
    process = started(run_dir, "--max-inputs", "1", "--quiet", code=check)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0 and out.splitlines()[-1] == "[]", err


@pytest.mark.slow
def test_zero_stages(run_dir):
    """Four replays in one process, which starts torch and DeepSpeed once; and one without DeepSpeed."""
    pytest.importorskip("deepspeed")
    assert main(["replay", str(run_dir), "--max-inputs", "2", "--out", "local", "--keep-outputs"]) == 0
    flags = ["replay", str(run_dir), "--max-inputs", "2", "--keep-outputs"]
    before = (
        "from lockstep.cli.main import main\nfor stage in '012':\n"
        f"    assert main([*{flags!r}, '--zero-stage', stage, '--out', 'zero-' + stage]) == 0\n"
    )
    process = started(run_dir, *flags[2:], "--zero-stage", "3", "--out", "zero-3", code=before)
    err = process.communicate(timeout=600)[1]
    assert process.returncode == 0, err
    expected = load_file("local/outputs.safetensors")
    gradients = [name for name in expected if name.startswith("gradients/")]
    for stage in range(4):
        rows = [json.loads(line) for line in Path(f"zero-{stage}/results.jsonl").read_text().splitlines()]
        assert len(rows) == 2
        for row in rows:
            assert row["weights"] == "match" and row["logprob_max_difference"] < 1e-5
            assert abs(row["loss_difference"]) < 1e-6 and row["grad_norm"] > 0
        found = load_file(f"zero-{stage}/outputs.safetensors")
        error = sum(float((found[n].double() - expected[n].double()).square().sum()) for n in gradients)
        size = sum(float(expected[n].double().square().sum()) for n in gradients)
        assert gradients and size > 0.0 and error < 1e-10 * size  # relative error below 1e-5


def test_a_missing_deepspeed_is_a_setting_that_is_wrong(run_dir, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    assert main(["replay", str(run_dir), "--zero-stage", "1", "--out", "out"]) == 2
    assert "pip install" in capsys.readouterr().err
