import gc
import os
import subprocess
import sys
from pathlib import Path

CONFTEST = Path(__file__).with_name("conftest.py")
TESTS = """
import os, pytest

@pytest.fixture(scope="module", autouse=True)
def made():
    with open("made", "a") as file:
        print(__name__, file=file)

@pytest.mark.parametrize("number", range(8))
def test_it(number):
    pass
"""


def test_processes_share_no_file_so_that_a_module_scoped_fixture_is_made_once(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST.read_text())
    for name in ("test_a", "test_b"):
        (tmp_path / f"{name}.py").write_text(TESTS)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", "--rootdir", "."]
    subprocess.run(command, cwd=tmp_path, env=environ, check=True, timeout=120, capture_output=True)
    assert sorted((tmp_path / "made").read_text().split()) == ["test_a", "test_b"]


def test_what_collection_has_imported_is_not_searched_for_garbage():
    assert gc.isenabled() and gc.get_freeze_count() > 10_000
