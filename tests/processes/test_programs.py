"""Programs that Lockstep starts: their modules exist, stand in one file, and the processes have a marker."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import lockstep
from lockstep.processes import programs
from lockstep.processes.child import Child
from lockstep.processes.programs import JOBS, MARKER, PROGRAMS, VLLM_MIDDLEWARE, VLLM_WORKER, role_of
from lockstep.ranks.stacks import children_of

SOURCE = Path(lockstep.__file__).parent
UP = "import sys, time; print('up', flush=True); time.sleep(600)"


@pytest.mark.parametrize("module", PROGRAMS)
def test_a_program_is_a_module_that_runs(module: str) -> None:
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    main = (
        Path(spec.origin).with_name("__main__.py") if spec.submodule_search_locations else Path(spec.origin)
    )
    assert main.name == "__main__.py" or '__name__ == "__main__"' in main.read_text()


@pytest.mark.parametrize("name", [*(f"{module}.main" for module in JOBS), VLLM_WORKER, VLLM_MIDDLEWARE])
def test_a_job_and_what_vllm_loads_are_defined(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    assert re.search(rf"^(def|class) {attribute}\b", Path(spec.origin).read_text(), re.M)


def test_their_names_stand_in_one_file() -> None:
    names = {*PROGRAMS[1:], *JOBS, VLLM_WORKER, VLLM_MIDDLEWARE}
    code = re.compile(r'"-m", "lockstep|"(' + "|".join(map(re.escape, sorted(names))) + ')"')
    files = [path for path in SOURCE.rglob("*.py") if code.search(path.read_text())]
    assert files == [Path(programs.__file__)]


@pytest.fixture
def started(tmp_path: Path) -> Iterator[tuple[Child, subprocess.Popen[bytes]]]:
    """A child of ours, and a process that only looks like one; both run."""
    path = tmp_path / "lockstep" / "loop" / "role_server.py"
    path.parent.mkdir(parents=True)
    path.write_text(UP)
    for package in (path.parent, path.parent.parent):
        (package / "__init__.py").touch()
    foreign = {name: value for name, value in os.environ.items() if name != MARKER}
    reader, writer = os.pipe()
    child = Child([sys.executable, "-c", UP], output=writer)
    other = subprocess.Popen(
        [sys.executable, "-m", programs.ROLE_SERVER, "worker.json"],
        env=foreign | {"PYTHONPATH": str(tmp_path)},
        stdout=writer,
    )
    os.close(writer)
    try:
        with open(reader, "rb") as lines:
            assert [lines.readline(), lines.readline()] == [b"up\n", b"up\n"]
            yield child, other
    finally:
        child.end()
        other.kill()
        other.wait()


def test_a_process_of_ours_has_the_marker_and_one_that_runs_our_module_without_it_is_not_ours(
    started,
) -> None:
    child, other = started
    assert programs.ROLE_SERVER in psutil.Process(other.pid).cmdline()
    assert role_of(psutil.Process(other.pid)) is None
    (program,) = psutil.Process(child.pid).children()
    assert role_of(psutil.Process(child.pid)) == "guard" and role_of(program) == ""
    shown = "\n".join(children_of(os.getpid()))
    assert f"process {child.pid} " not in shown, "a supervisor is left out"
    assert f"process {program.pid} " in shown and f"process {other.pid} " in shown
