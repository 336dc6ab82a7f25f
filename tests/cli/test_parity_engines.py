"""`lockstep parity engines`: what its flags mean, and the command as a whole on two hf engines."""

import json
import os
from pathlib import Path

import pytest
from raising import raises

from lockstep.errors import ConfigError
from lockstep_lab.cli import parity, parity_engines


def test_engines_and_what_flags_say_about_them():
    hf, own, vllm = parity_engines.parse_engines(
        "hf,own=some.module:Engine,vllm",
        python=["vllm=env/bin/python"],
        option=["hf.max_batch=3", "vllm.batch_invariant=true", "vllm.block_size=64"],
    )
    assert (hf.name, hf.config.name, hf.config.max_batch) == ("hf", "hf", 3)
    assert (own.name, own.config.name) == ("own", "some.module:Engine")
    assert vllm.config.python is not None and str(vllm.config.python) == os.path.abspath("env/bin/python")
    assert vllm.config.batch_invariant and vllm.config.options == {"block_size": 64}
    (plain,) = parity_engines.parse_engines("some.module:Engine")
    assert plain.name == "Engine"


@pytest.mark.parametrize(
    ("engines", "flags", "text"),
    [
        ("hg", {}, "unknown-name: --engines"),
        ("hf,hf", {}, "duplicate: --engines"),
        ("", {}, "missing-setting: --engines"),
        ("hf", {"python": ["vllm=x"]}, "unknown-name: --python"),
        ("hf", {"option": ["max_batch=3"]}, "wrong-format: --option"),
        ("hf", {"option": ["hf.max_batch=none"]}, "wrong-type: max_batch"),
        ("hf", {"option": ["hf.name=vllm"]}, "unsupported-combination: --option"),
        ("vllm", {"url": ["vllm"]}, "wrong-format: --url"),
    ],
)
def test_what_cannot_be_is_refused(engines: str, flags: dict[str, list[str]], text: str):
    with raises(ConfigError, text):
        parity_engines.parse_engines(engines, **flags)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--max-prompts", "1"], "out-of-range: --max-prompts"),
        (["--device", "cpu", "--attention", "nan"], "unknown-name: --attention"),
    ],
)
def test_what_no_engine_can_run_is_refused_before_one_starts(words: list[str], text: str):
    args = parity_engines.parser().parse_args(["--engines", "hf", *words])
    with raises(ConfigError, text):
        parity_engines.make_options(args)


@pytest.mark.slow
def test_the_whole_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    flags = ["--engines", "hf,small=hf", "--option", "small.max_batch=3", "--model", "shape:tiny-llama"]
    flags += ["--max-prompts", "4", "--device", "cpu", "--json", str(tmp_path / "copy.json")]
    assert parity.main(["engines", *flags, "--out", str(tmp_path / "out")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("parity engines: ") and lines[1].startswith("[1/2] hf: reference")
    assert lines[-1].startswith("parity engines: 2 of 2 engines agree with the trainer")
    told = json.loads((tmp_path / "copy.json").read_text())
    assert told["ok"] and told["verdict"] == lines[-1]
    assert {"engines.html", "engines.md", "engines.json", "hf", "small", "logs"} <= {
        path.name for path in (tmp_path / "out").iterdir()
    }
