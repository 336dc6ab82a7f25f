"""What holds for the repository as a whole: sizes, layers, what an import loads, what must not be tracked."""

from __future__ import annotations

import gzip
import importlib.util
import lzma
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


limits = load_script("check_limits")
check_python = load_script("check_python")
lowest_versions = load_script("lowest_versions")


def tracked_texts() -> list[tuple[str, str]]:
    texts = []
    for path in limits.tracked(ROOT):
        if path.is_file() and not path.name.endswith((".png", ".svg", ".safetensors", ".parquet", ".tar.xz")):
            unpack = {".gz": gzip.decompress, ".xz": lzma.decompress}.get(path.suffix, bytes)
            texts.append((str(path.relative_to(ROOT)), unpack(path.read_bytes()).decode("utf-8")))
    return texts


def test_the_limits_can_be_exceeded(tmp_path: Path) -> None:
    body = "\n".join("    x = 1" for _ in range(80))
    file = tmp_path / "long.py"
    file.write_text(
        f"def long():\n{body}\n\n"
        "def wide(self, a, b, c, d, e, f, *, g): ...\n"
        "def dictated(a, b, c, d, e, f, g): ...  # signature: another library's\n"
        "def narrow(self, a, *rest, b, c, d, e, f, **more): ...\n" + "# a line\n" * 720
    )
    told = list(limits.check_python(file, tmp_path))
    assert told == [
        "long.py: 805 lines, at most 800",
        "long.py:1: long has 81 lines, at most 80",
        "long.py:83: wide has 7 parameters, at most 6",
    ]
    (told_bytes,) = limits.check_bytes({file: 13 * 2**20}, tmp_path)
    assert told_bytes == "tracked files have 13.0 MiB, at most 12; largest: long.py 13.0"


def test_lines_are_counted_by_kind(tmp_path: Path) -> None:
    text = (
        '"""Two\n\nlines."""\n\n# a comment\nx = 1  # code\n"""Of x."""\ny = """\n# a string\n"""\n\n'
        'def f() -> None:\n    """Doc."""\n    return None\n'
    )
    assert limits.count(text) == limits.Lines(code=6, docstring=4, comment=1, all=14)
    assert (
        limits.raise_lines("if x:\n    raise A(\n        'b'\n    ) from x\nelse:\n    raise\nraised = 1\n")
        == 4
    )
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b.py").write_text(text)
    (tmp_path / "a" / "page.html").write_text("<p>\n\n</p>\n")
    (tmp_path / "c.py").write_text("x = 1\n")
    packages = limits.count_packages(
        [tmp_path / "a/b.py", tmp_path / "a/page.html", tmp_path / "c.py"], tmp_path
    )
    told = limits.table(packages)
    assert [line.split() for line in told.splitlines()[1:]] == [
        ["a", "8", "4", "1", "17"],
        [".", "1", "0", "0", "1"],
        ["all", "9", "4", "1", "18"],
    ]


def test_one_function_in_a_hundred_may_be_long(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    long = "def long():\n" + "    x = 1\n" * 50
    file.write_text("def short(): ...\n" * 99 + long)
    assert list(limits.check_p99([file], tmp_path)) == []
    file.write_text("def short(): ...\n" * 98 + long * 2)
    assert list(limits.check_p99([file], tmp_path)) == [
        "src: the 99th percentile of function lengths is 51 lines, at most 50"
    ]


def test_lower_bounds_become_pins() -> None:
    text = (
        '[project]\ndependencies = ["a>=1.2", "b[c]>=3"]\n[project.optional-dependencies]\nx = ["d>=1rc1"]\n'
    )
    assert lowest_versions.lowest(text, ["x"]) == ["a==1.2", "b[c]==3", "d==1rc1"]
    with pytest.raises(ValueError, match="a>1"):
        lowest_versions.lowest('[project]\ndependencies = ["a>1"]\n', [])


def test_patch_releases_of_python_are_told_apart() -> None:
    used = "with tarfile.open(x) as a:\n    a.extractall(y, filter='data')\nfrom tarfile import data_filter\n"
    assert sorted(check_python.check(used, "a.py")) == [
        "a.py:2: extractall(filter=) came with Python 3.11.4",
        "a.py:3: data_filter came with Python 3.11.4",
    ]
    assert list(check_python.check("a.extractall(y)\nfilter(f, x)\n", "a.py")) == []
    assert check_python.main() == 0


def test_import_layers_hold() -> None:
    command = shutil.which("lint-imports", path=str(Path(sys.executable).parent))
    assert command is not None, "import-linter is not installed; run make venv"
    done = subprocess.run([command, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("lockstep.config.run", "torch transformers numpy ray vllm sglang deepspeed tyro"),
        ("lockstep.config.load", "torch transformers numpy ray vllm sglang deepspeed tyro"),
        ("lockstep.config.support", "torch transformers numpy ray vllm sglang deepspeed tyro"),
        ("lockstep.observe.run_dir", "torch transformers numpy ray pydantic"),
        ("lockstep.observe.metrics", "torch transformers numpy ray pydantic wandb tensorboard"),
        ("lockstep.observe.display", "torch transformers numpy ray pydantic rich"),
        ("lockstep.cli.main", "torch transformers numpy ray pydantic tyro rich"),
        ("lockstep.cli.train", "torch transformers numpy ray vllm sglang deepspeed"),
        ("lockstep.ops", "transformers ray vllm sglang deepspeed pydantic"),
    ],
)
def test_an_import_loads_only_what_it_needs(module: str, forbidden: str) -> None:
    code = f"import sys, {module}; print(*sorted(set({forbidden.split()!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


# Written in pieces so that this file does not find itself.
MACHINE_PATHS = re.compile(
    r"(?<![\w.])/(?:" + "|".join(("home/", "Users/", "work/", "root/", "mnt/", "opt/")) + r")\w+"
)


def test_no_machine_paths_in_tracked_files() -> None:
    found = [
        f"{name}: {match[0]}"
        for name, text in tracked_texts()
        if not name.endswith("LICENSE")
        for match in MACHINE_PATHS.finditer(text)
    ]
    assert found == []
    assert MACHINE_PATHS.search("see /" + "home/someone/x") and not MACHINE_PATHS.search("a/" + "work/b")


def test_constraints_pin_what_the_metadata_asks_for() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    )
    assert pins["torch"] == "2.13.0"
    assert "torch>=2.11" in project["dependencies"]
    extras = project["optional-dependencies"]
    needed = [
        *project["dependencies"],
        *(
            line
            for name in (
                "bundled",
                "data",
                "plots",
                "tensorboard",
                "lora",
                "bench",
                "deepspeed",
                "mcp",
                "dev",
            )
            for line in extras[name]
        ),
    ]
    unpinned = [line for line in needed if re.split(r"[\[>=<]", line)[0] not in pins]
    assert unpinned == []
    assert all(re.fullmatch(r"[\w.]+", version) for version in pins.values()), "a local path or version"


def test_ci_runs_what_a_contributor_runs() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert "set -euo pipefail" in script and "make check" in script and "make test" in script
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111
