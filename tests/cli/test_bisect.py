"""`lockstep bisect`: exit status, verdict, files."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "lab"))
from bisect_disk import write_recording

from lockstep.cli.arguments import leading_word
from lockstep.cli.main import main
from lockstep_lab.cli.bisect import _joined


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    return str(write_recording(tmp_path_factory.mktemp("bisect") / "recording"))


def test_cells_that_agree(recording, tmp_path, capsys):
    out = tmp_path / "out"
    a, b = "--no-packing --no-flash-attn", "--flash-attn"
    assert main(["bisect", recording, "--a", a, "--b", b, "--max-inputs", "2", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "a: sdpa + eager + padded" in printed and "b: varlen + eager + packed" in printed
    assert printed.splitlines()[-1].startswith(
        "bisect: no difference beyond tolerance in 2 inputs; the largest:"
    )
    assert not (out / "repro.py").exists() and (out / "bisect.md").is_file()


def test_a_difference_is_reported_reproduced_and_the_exit_status(recording, tmp_path, capsys):
    out, result = tmp_path / "out", tmp_path / "result.json"
    words = ["--b", "--flash-attn", "--tolerance", "1e-9", "--inputs", "1", "--out", str(out)]
    assert main(["bisect", recording, *words, "--json", str(result), "--quiet"]) == 1
    printed = capsys.readouterr().out.splitlines()
    found = json.loads(result.read_text())
    assert printed == [found["verdict"]] and found["verdict"].startswith(
        "bisect: input 1 differs; it begins in"
    )
    assert found["differs"] and found["first"]["max_abs"] > 0 and found["repro"] == str(out / "repro.py")
    assert (out / "repro.safetensors").is_file() and "## Reproduction" in (out / "bisect.md").read_text()


def test_cells_of_a_shared_recording_have_a_row_for_each_token(tmp_path, capsys):
    recording = write_recording(tmp_path / "recording", layout="shared")
    words = ["--b", "--flash-attn", "--max-inputs", "1", "--out", str(tmp_path / "out")]
    assert main(["bisect", str(recording), *words]) == 0
    printed = capsys.readouterr().out
    assert "b: varlen + eager + packed" in printed and "layout: 'shared' -> 'packed'" in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--a and --b are the same cell"),
        (["--b", "--zero-stage 1"], "--b: bisect looks into the modules of one process"),
        (["--b", "--layout shared"], "--b has --layout shared: one row may belong to several documents"),
        (["--b", "--packing 'x"], "No closing quotation"),
        (["--max-inputs", "2", "extra"], "the recording must come first"),
        (["--b", "--flash-attn", "--a", "--num-layers 1"], "different numbers of layers"),
        (["--b", "--flash-attn", "--json", "/nowhere/x.json"], "no such folder"),
    ],
)
def test_what_cannot_be_compared_is_refused(recording, tmp_path, capsys, words, message):
    status = main(["bisect", recording, *words, "--out", str(tmp_path / "out")])
    assert status == 2 and message in capsys.readouterr().err


def test_words_are_sorted_out():
    assert leading_word(["runs/x", "--a", "-b"]) == ("runs/x", ["--a", "-b"])
    assert leading_word(["--max-inputs", "3"]) == (None, ["--max-inputs", "3"])
    assert _joined(["--a", "--packing", "--b", "", "--out", "x"]) == ["--a=--packing", "--b=", "--out", "x"]


def test_an_out_that_is_taken_is_refused(recording, tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    assert main(["bisect", recording, "--b", "--flash-attn", "--out", str(tmp_path)]) == 2
    assert "already exists" in capsys.readouterr().err


@pytest.mark.slow
def test_a_cell_that_raises_is_shrunk(recording, tmp_path, monkeypatch, capsys):
    from lockstep.attention import adapters

    fault = "if max(options['lengths']) > 9: raise ValueError('too long')"
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        "import lockstep.attention.adapters as adapters\n"
        "inner = adapters.KERNELS['sdpa']\n"
        f"def planted(q, k, v, **options):\n    {fault}\n    return inner(q, k, v, **options)\n"
        "adapters.KERNELS['sdpa'] = planted\n",
        encoding="utf-8",
    )
    monkeypatch.setenv("PYTHONPATH", str(site))
    inner = adapters.sdpa._per_document

    def planted(q, k, v, *, lengths, **options):
        if max(lengths[0]) > 9:
            raise ValueError("too long")
        return inner(q, k, v, lengths=lengths, **options)

    monkeypatch.setattr(adapters.sdpa, "_per_document", planted)
    result = tmp_path / "result.json"
    words = ["--a", "--no-packing", "--b", "--packing", "--out", str(tmp_path / "out"), "--json", str(result)]
    assert main(["bisect", recording, *words]) == 1
    found = json.loads(result.read_text())
    assert (found["index"], found["tokens"], found["num_layers"]) == (1, 10, 1) and found["confirmed"]
    assert "input 1: cell b fails (too long)" in capsys.readouterr().out
