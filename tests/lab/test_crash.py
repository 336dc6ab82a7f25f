"""Cells that crash in worker processes: errors, signals and hangs, planted by sitecustomize."""

import dataclasses
import json
import os
import shlex
import sys
from pathlib import Path

import pytest
from pydantic import TypeAdapter

sys.path.insert(0, str(Path(__file__).parent))
from bisect_disk import write_recording

from lockstep.recording import Recording
from lockstep_lab.bisect.crash import CrashSearch, find_crash
from lockstep_lab.bisect.report import crash_dict, crash_lines, crash_markdown, crash_verdict
from lockstep_lab.bisect.shrink_worker import crash_of
from lockstep_lab.replay.cell import Cell, ReplayOptions

PLANTED = """
import os, time
import lockstep.attention.adapters as adapters
inner = adapters.KERNELS["sdpa"]
def planted(q, k, v, **options):
    lengths = options["lengths"]
    {fault}
    return inner(q, k, v, **options)
adapters.KERNELS["sdpa"] = planted
"""
LONG = "if max(lengths) > 9: raise ValueError(f'a document of {max(lengths)} tokens')"
EQUAL = "if len(set(lengths)) < len(lengths): os.kill(os.getpid(), 11)"
HANG = "if max(lengths) > 15: time.sleep(1000)"  # each hang costs a new worker: few trials of it
CELL = Cell(attention="sdpa", execution="eager", layout="packed", dtype="float32", device="cpu")


def searched(tmp_path, monkeypatch, fault, **search):
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(PLANTED.format(fault=fault), encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(site), prepend=os.pathsep)
    recording = Recording.open(write_recording(tmp_path / "recording"))
    out = tmp_path / "out"
    out.mkdir()
    said = []
    found = find_crash(
        recording, ReplayOptions(cell=CELL), out, search=CrashSearch(**search), progress=said.append
    )
    return found, out, said


@pytest.mark.slow
def test_an_error_gets_small_and_its_recording_shows_it(tmp_path, monkeypatch):
    found, out, said = searched(tmp_path, monkeypatch, LONG)
    trial = found.shrunk.trial
    assert [n for _, n in trial.parts] == [10] and trial.num_layers == 1 and found.index == 1
    assert found.shrunk.crash.type == "ValueError" and found.shrunk.crash.line.startswith("sitecustomize.py:")
    assert found.workers == 1 and found.shrunk.trials <= 12  # the worker lives on over errors on a CPU
    assert found.confirmed and "a document of 10 tokens" in (out / "crash-traceback.txt").read_text()
    small = Recording.open(out / "crash-input")
    assert small.lengths == ((10,),) and "--num-layers 1" in found.command
    assert shlex.split(found.command)[:3] == ["lockstep", "replay", str(out / "crash-input")]
    whole = Recording.open(tmp_path / "recording")[1].batch
    assert small[0].batch.token_ids.tolist() == whole.token_ids[7:17].tolist()  # the last 10 of 5 + 12
    assert crash_verdict(found).endswith("it still does with 1 document, 10 tokens and 1 layer")
    assert crash_dict(found)["crashes"] and "fails as expected" in "\n".join(crash_lines(found))
    assert "ValueError" in crash_markdown(found) and said[0].endswith(": ok")


@pytest.mark.exhaustive
def test_a_process_that_is_killed_gets_small(tmp_path, monkeypatch):
    found, out, _ = searched(tmp_path, monkeypatch, EQUAL)
    trial = found.shrunk.trial
    assert found.index == 2 and found.shrunk.crash.type == "SIGSEGV" and found.confirmed
    assert [n for _, n in trial.parts] == [2, 2] and trial.num_layers == 1  # 1 token trains on nothing
    assert found.workers <= found.shrunk.trials <= 15
    assert "planted" in (out / "crash-traceback.txt").read_text()  # faulthandler's stack


@pytest.mark.exhaustive
def test_a_hang_is_a_crash(tmp_path, monkeypatch):
    found, out, _ = searched(tmp_path, monkeypatch, HANG, seconds=4.0, max_trials=12)
    assert found.shrunk.crash.type == "timeout" and found.index == 2
    assert [n for _, n in found.shrunk.trial.parts] == [16] and found.shrunk.trial.num_layers == 1
    assert "planted" in (out / "crash-traceback.txt").read_text()


def test_options_survive_the_way_to_the_worker():
    options = ReplayOptions(cell=CELL, inputs=(1, 2), steps=(None, 3), loss="logprob-sum", capacity=64)
    values = json.loads(json.dumps(dataclasses.asdict(options)))
    assert TypeAdapter(ReplayOptions).validate_python(values) == options


def test_a_crash_is_known_by_what_was_raised_first():
    def deep():
        raise KeyError("x")

    try:
        try:
            deep()
        except KeyError as error:
            raise RuntimeError("around it") from error
    except RuntimeError as error:
        crash = crash_of(error)
    assert (crash.type, crash.message) == ("KeyError", "'x'")
    assert (
        crash.line == f"test_crash.py:{deep.__code__.co_firstlineno + 1}" and "around it" in crash.traceback
    )
    assert crash_of(MemoryError()).type == "out of memory"
