"""CompileWatch: what counts, and where the compiler keeps its code."""

import os
import tempfile
from pathlib import Path

import pytest
import torch
from raising import raises
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from lockstep.errors import ConfigError, TrainError
from lockstep.execution import CompileWatch, compile_cache, use_compile_cache
from lockstep.execution.regions import log_build


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


def make_graph(width):
    """One more graph of a code object of its own."""

    def double(x):
        return 2 * x

    torch.compile(double, backend="eager", dynamic=False)(torch.ones(width))


def test_without_sections_everything_counts():
    watch = CompileWatch(max_recompiles=0)
    make_graph(3)
    watch.mark_warm()
    watch.check()
    make_graph(4)
    assert (watch.report().graphs, watch.report().recompiles) == (2, 1)
    with raises(TrainError, "too-many-recompiles: train.max_recompiles", recompiles=1):
        watch.check()


def test_with_sections_only_what_is_compiled_inside_counts():
    watch = CompileWatch(max_recompiles=0)
    with watch.counting():
        make_graph(3)
        with watch.counting():
            make_graph(4)
        assert watch.report().graphs == 2
    make_graph(5)
    assert watch.report().graphs == 2 and watch.report().seconds > 0
    watch.mark_warm()
    make_graph(6)
    watch.check()
    seconds = watch.report().seconds
    with pytest.raises(RuntimeError, check=lambda error: error.args == ("broken",)), watch.counting():
        make_graph(7)
        raise RuntimeError("broken")
    assert watch.report().recompiles == 1 and watch.report().seconds > seconds


def test_a_build_of_ours_adds_its_time_and_its_reason():
    watch = CompileWatch()
    log_build(started_us=watch._start_us + 1, seconds=2.5, reason="")
    log_build(started_us=watch._start_us + 2, seconds=1.5, reason="another shape")
    report = watch.report()
    assert report.seconds == pytest.approx(4.0, abs=0.1) and report.reasons == ("another shape",)
    section = CompileWatch()
    with section.counting():
        log_build(started_us=section._start_us, seconds=1.0, reason="inside")
    log_build(started_us=section._start_us + 10**7, seconds=1.0, reason="outside")
    assert section.report().reasons == ("inside",)
    assert section.report().seconds == pytest.approx(1.0, abs=0.1)


def test_the_compile_cache_is_below_xdg_cache_home_unless_the_user_says_otherwise(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for found in (None, default_cache_dir()):  # torch writes its own default into the variable
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        if found:
            monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", found)
        assert use_compile_cache() == compile_cache() == tmp_path / "lockstep" / "inductor"
        assert Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) == tmp_path / "lockstep" / "inductor"
        assert (tmp_path / "lockstep" / "inductor").is_dir()
    with tempfile.TemporaryDirectory() as own:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", own)
        assert use_compile_cache() == Path(own)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with raises(ConfigError, "cannot-write"):
        use_compile_cache()
