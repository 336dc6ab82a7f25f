"""`lockstep recording`: what it prints, its JSON, and its exit status."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "recording"))  # for recordings

from recordings import batch, documents, recorded, run_inputs, write

from lockstep.cli.main import main
from lockstep.observe.text import printable
from lockstep.packing import pack
from lockstep.recording import Recording, reader
from lockstep_lab.cli import replay
from lockstep_lab.recording.show import Style, show_input
from lockstep_lab.replay.buckets import select_inputs


@pytest.fixture
def rec(tmp_path: Path) -> Path:
    write(tmp_path / "rec", run_inputs())
    return tmp_path / "rec"


def run(capsys: pytest.CaptureFixture[str], *argv: Any) -> tuple[int, list[str], dict[str, Any]]:
    """Exit status, lines, and what --json wrote."""
    out = next(value for value in argv if isinstance(value, Path)).parent / "out.json"
    status = main(["recording", *map(str, argv), "--json", str(out)])
    return status, capsys.readouterr().out.splitlines(), json.loads(out.read_text())


def test_info(rec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, lines, found = run(capsys, "info", rec)
    assert status == 0 and lines[-1] == f"recording: 20 inputs, 340 tokens, {rec}"
    assert any("tokens of a document  p0 3, p50 5, p90 9, p99 9, p100 9" in line for line in lines)
    assert found["stored"]["rng"] == 5 and found["outcomes"] == {"finished": 20}
    assert found["weights"]["missing"] == ["weights/step-000000"]


def test_validate_tells_damage_by_its_exit_status(rec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, lines, found = run(capsys, "validate", rec)
    assert (status, lines[-1], found["valid"]) == (0, "validate: 20 inputs are valid", True)
    path, _ = Recording.open(rec).source(0)
    raw = path.read_bytes()
    path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    status, lines, found = run(capsys, "validate", rec)
    assert (status, lines[-1], found["damaged_inputs"]) == (1, "validate: 4 of 20 inputs are damaged", 4)
    assert str(path) in lines[0]
    path.write_bytes(raw[:-5])
    status, lines, found = run(capsys, "validate", rec)
    assert (status, lines[-1], found["valid"]) == (1, "validate: damaged", False)


def test_list_filters_by_step_and_rank(rec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, lines, found = run(capsys, "list", rec, "--steps", "1:3", "--rank", "1")
    assert status == 0 and lines[-1] == "list: 6 of 20 inputs, 102 tokens"
    assert [row["index"] for row in found["inputs"]] == [9, 11, 13, 15, 17, 19]
    assert found["inputs"][0] | {"loss": 0} == {
        **{"index": 9, "step": 1, "update": 2, "micro_batch": 0, "rank": 1, "documents": 3},
        **{"tokens": 17, "longest": 9, "reward_mean": pytest.approx(0.1), "loss": 0, "outcome": "finished"},
    }
    assert main(["recording", "list", str(rec), "--steps", "77:"]) == 2
    assert "no input is selected; it has steps 0 to 2" in capsys.readouterr().err


@pytest.mark.parametrize(("steps", "taken"), [("1:3", {1, 2}), ("1:2", {1}), ("1:", {1, 2}), (":1", {0})])
def test_steps_are_those_that_replay_takes(
    rec: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], steps: str, taken: set[int]
) -> None:
    status, _, found = run(capsys, "list", rec, "--steps", steps)
    assert status == 0 and {row["step"] for row in found["inputs"]} == taken
    _, options = replay.parse([str(rec), "--steps", steps, "--device", "cpu"])
    listed = [row["index"] for row in found["inputs"]]
    assert list(select_inputs(Recording.open(rec), options)) == listed
    status, _, found = run(capsys, "slice", rec, "--steps", steps, "--out", tmp_path / "part")
    assert status == 0 and {meta.step for meta in Recording.open(tmp_path / "part").metas} == taken


def test_steps_that_are_no_range_are_refused(rec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("3-9", "3", "a:b"):
        assert main(["recording", "list", str(rec), "--steps", text]) == 2
        assert f"--steps {text!r} is not a range of steps, such as 10:20" in capsys.readouterr().err
    assert main(["recording", "list", str(rec), "--steps", "2:2"]) == 2


def test_show_marks_what_is_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = documents((5,), seed=0)[0]
    first = dataclasses.replace(
        first,
        token_ids=torch.tensor([5, 6, 7, 8, 2]),
        loss_mask=torch.tensor([False, True, True, False, False]),
        advantages=torch.tensor([0.0, 0.25, 0.25, 0, 0]),
    )
    one = recorded(0, content=pack([first], [torch.ones(5)]))
    write(tmp_path / "rec", [one])
    status, lines, found = run(capsys, "show", 0, tmp_path / "rec")
    assert status == 0 and "5 6 [[7 8]] 2" in lines
    assert (
        "document 0 (sample 0): 5 tokens, 2 trained, advantage 0.25, policy version 0, reward 0.0"
        in lines[-3]
    )
    assert lines[-1] == "show: input 0 of 1, 5 tokens; ids only (shape:tiny-llama has no tokenizer)"
    assert found["token_ids"] == [5, 6, 7, 8, 2]
    status, lines, _ = run(capsys, "show", 0, tmp_path / "rec", "--tokens")
    row = next(line for line in lines if line.split()[:2] == ["2", "7"])
    assert one.outputs is not None and one.outputs.logprobs is not None
    assert float(row.split()[2]) == pytest.approx(float(one.outputs.logprobs[1]), rel=1e-5)
    assert main(["recording", "show", "5", str(tmp_path / "rec")]) == 2


def test_text_of_a_recording_cannot_reach_the_terminal() -> None:
    text = "a\x1b[2Jb\r\nc\u202ed\u200be\x07"
    assert printable(text) == "a\\x1b[2Jb\\r\\nc\\u202ed\\u200be\\x07"
    one = recorded(0, content=batch((3,)), documents=({"reward\x1b": "\x1b[31m"},), error="\x1b]0;x\x07")
    shown = "\n".join(show_input(one, Style(decoder=lambda ids: text)))
    assert "\x1b" not in shown and "\x07" not in shown and "\u202e" not in shown


def test_slice_and_merge(rec: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 1):
        status, lines, found = run(capsys, "slice", rec, "--out", tmp_path / f"r{rank}", "--rank", rank)
        assert status == 0 and found["inputs"] == 10 and found["without_weights"] == 10
        assert lines[-1] == f"slice: 10 inputs of 20, no weights, written to {tmp_path / f'r{rank}'}"
    status, _, found = run(capsys, "merge", tmp_path / "r0", tmp_path / "r1", "--out", tmp_path / "both")
    assert status == 0 and Recording.open(tmp_path / "both").metas == tuple(
        dataclasses.replace(meta, checkpoint=None) for meta in Recording.open(rec).metas
    )
    status, lines, _ = run(capsys, "slice", rec, "--out", tmp_path / "s", "--inputs", "0,5-7", "--every", "2")
    assert lines[-1].startswith("slice: 2 inputs of 20")


def test_without_a_path_it_is_the_shipped_corpus(
    rec: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reader, "corpus_path", lambda: rec)
    monkeypatch.setattr("lockstep.recording.reader.corpus_path", lambda: rec)
    assert main(["recording", "validate"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "validate: 20 inputs are valid"


def test_wrong_commands_and_missing_recordings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recording"]) == 2
    assert main(["recording", "--help"]) == 0
    assert main(["recording", "slize"]) == 2
    assert main(["recording", "info", str(tmp_path / "nowhere")]) == 2
    captured = capsys.readouterr()
    assert "did you mean 'slice'" in captured.err and "does not exist" in captured.err
