import json
import random
import signal
import subprocess
import sys
import time

import pytest
from raising import raises

from lockstep.cli import generate, score, select
from lockstep.errors import ConfigError, DataError

N = 40


@pytest.fixture
def place(tmp_path, tiny_folder, monkeypatch):
    """A folder with prompts; commands run in it."""
    monkeypatch.chdir(tmp_path)
    rows = ({"prompt": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(N))
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def command(tiny_folder, *more, out="s.jsonl", tokens=16):
    base = ["--model", str(tiny_folder), "--model.dtype", "float32", "--data", "p.jsonl", "--out", out]
    return [*base, "--n", "2", "--max-tokens", str(tokens), "--rollout-batch-size", "4", *more]


def test_flags_reach_the_settings(place, tiny_folder):
    (place / "run.toml").write_text('n = 3\n[sampling]\ntop_p = 0.5\n[engine]\nname = "vllm"\n')
    flags = ["run.toml", "--data=p.jsonl", "--engine.python", sys.executable, "--out", "s.jsonl"]
    config = generate.parse([*flags, "--temperature", "0.7"]).config
    assert (config.n, config.sampling.top_p, config.sampling.temperature) == (3, 0.5, 0.7)
    assert (config.engine.name, str(config.engine.python)) == ("vllm", sys.executable)
    assert config.data.source == "p.jsonl" and not config.data.shuffle
    assert (
        generate.parse(["--data", "p.jsonl", "--engine", "hf", "--out", "s.jsonl"]).config.engine.name == "hf"
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--out", "s.jsonl"], "missing-setting: --data"),
        (["--data", "p.jsonl"], "missing-setting: --out"),
        (["--data", "p.jsonl", "--out", "s.jsonl", "--engine", "vlm"], "unknown-name: engine.name"),
        (["--data", "p.jsonl", "--out", "s.csv"], "wrong-format: --out"),
        (["--data", "p.jsonl", "--out", "no/s.jsonl"], "no-such-file: --out, no/s.jsonl"),
        (["--data", "q.jsonl", "--out", "s.jsonl"], "no-such-file: data.source"),
        (
            ["--data", "p.jsonl", "--out", "s.jsonl", "--checkpoint", "last"],
            "wrong-kind-of-file: --checkpoint",
        ),
        (
            ["--data", "p.jsonl", "--out", "s.jsonl", "--data.prompt-column", "promt"],
            "missing-column: data.prompt_column, promt",
        ),
        (["--data", "p.jsonl", "--out", "s.jsonl", "--max-tokens", "4090"], "too-long"),
    ],
)
def test_bad_input_is_told_and_leaves_nothing(place, tiny_folder, flags, message):
    with raises((ConfigError, DataError), message):
        generate.main(["--model", str(tiny_folder), *flags])
    assert not (place / "s.jsonl").exists()


def test_the_three_commands_chain_into_an_sft_set(place, tiny_folder, capsys):
    (place / "mine.py").write_text(
        "def digits(*, prompt, completion, row):\n    return sum(map(str.isdigit, completion))\n"
    )
    assert generate.main(command(tiny_folder, "--max-samples", "6", "--json", "r.json")) == 0
    result = json.loads((place / "r.json").read_text())
    assert (result["outcome"], result["rows"], result["new_rows"]) == ("finished", 12, 12)
    assert generate.main(command(tiny_folder, "--max-samples", "6")) == 0
    assert "nothing to do: s.jsonl is complete, 12 rows of 6 prompts" in capsys.readouterr().out
    with raises(ConfigError, "contradiction: --out", names=["settings.sampling.temperature"]):
        generate.main(command(tiny_folder, "--max-samples", "6", "--temperature", "0.5"))
    assert score.main(["--data", "s.jsonl", "--reward", "mine:digits", "--out", "scored.parquet"]) == 0
    assert score.main(["--data", "s.jsonl", "--reward", "mine:digits", "--out", "scored.parquet"]) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert select.main(["--data", "scored.parquet", "--best-of-n", "--out", "sft.jsonl"]) == 0
    from lockstep.config.data import DataConfig
    from lockstep.config.model import ModelConfig
    from lockstep.data.sft import load_sft
    from lockstep.models.load import load_tokenizer

    documents = load_sft(
        DataConfig(source="sft.jsonl"), tokenizer=load_tokenizer(ModelConfig(name=str(tiny_folder)))
    )
    assert len(documents) == 6
    with raises(ConfigError, "already-exists: --out"):
        select.main(["--data", "scored.parquet", "--best-of-n", "--out", "sft.jsonl"])


def test_parquet_out_has_the_same_rows(place, tiny_folder):
    from lockstep.rollout.rows import read_rows

    for out in ("s.jsonl", "s.parquet"):
        assert generate.main(command(tiny_folder, "--max-samples", "5", "--quiet", out=out)) == 0
    lines = sorted(read_rows(place / "s.jsonl"), key=lambda r: (r["index"], r["sample"]))
    assert list(read_rows(place / "s.parquet")) == lines


def start(tiny_folder, *more, **options):
    words = [sys.executable, "-m", "lockstep", "generate", *command(tiny_folder, *more, **options)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def stop_at(process, path, size, number):
    """Send the signal once the file has so many bytes; the exit status."""
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if path.exists() and path.stat().st_size >= size:
            process.send_signal(number)
            break
        time.sleep(0.001)
    process.communicate(timeout=60)
    return process.returncode


@pytest.mark.slow
def test_sigkill_at_random_places_changes_nothing(place, tiny_folder):
    columns = ["--columns", "token_ids", "logprobs"]
    assert generate.main(command(tiny_folder, *columns, out="whole.jsonl")) == 0
    whole = (place / "whole.jsonl").read_bytes()
    generator = random.Random(1)
    killed = 0
    for share in sorted(generator.random() * 0.8 for _ in range(3)):
        code = stop_at(
            start(tiny_folder, *columns), place / "s.jsonl", share * len(whole) + 1, signal.SIGKILL
        )
        killed += code == -signal.SIGKILL
    assert killed > 0
    assert generate.main(command(tiny_folder, *columns)) == 0
    assert sorted((place / "s.jsonl").read_bytes().splitlines()) == sorted(whole.splitlines())


@pytest.mark.slow
def test_ctrl_c_leaves_a_file_that_a_later_command_completes(place, tiny_folder):
    # Long enough to be still at it when a loaded machine sends the signal.
    code = stop_at(start(tiny_folder, tokens=64), place / "s.jsonl", 2000, signal.SIGINT)
    assert code == 130
    kept = (place / "s.jsonl").read_bytes()
    assert kept.endswith(b"\n") and 0 < kept.count(b"\n") < 2 * N
    with raises(DataError, "incomplete: s.jsonl"):
        score.main(["--data", "s.jsonl", "--reward", "ids", "--out", "x.jsonl"])
    assert generate.main(command(tiny_folder, tokens=64)) == 0
    assert (place / "s.jsonl").read_bytes().startswith(kept)
    assert (place / "s.jsonl").read_bytes().count(b"\n") == 2 * N
