import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from platform import python_version
from types import SimpleNamespace

import pytest

from lockstep.cli import main as module
from lockstep.cli.main import main
from lockstep.errors import ConfigError, LockstepError, RewardError
from lockstep.version import __version__


def command(monkeypatch: pytest.MonkeyPatch, error: BaseException | int) -> None:
    def run(argv: Sequence[str]) -> int:
        if isinstance(error, int):
            return error
        raise error

    monkeypatch.setattr(module.importlib, "import_module", lambda name: SimpleNamespace(main=run))


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (
            ConfigError("out-of-range: train.lr is 0; set 1e-6"),
            2,
            "lockstep train: error[out-of-range]: train.lr is 0; set 1e-6\n",
        ),
        (RewardError("row 3", code="wrong-state"), 1, "lockstep train: error[wrong-state]: row 3\n"),
        (LockstepError("x", code="wrong-state"), 1, "lockstep train: error[wrong-state]: x\n"),
        (KeyboardInterrupt(), 130, "lockstep train: interrupted\n"),
        (0, 0, ""),
        (7, 7, ""),
    ],
)
def test_exit_status(error, status, told, monkeypatch, capsys):
    command(monkeypatch, error)
    assert main(["train"]) == status
    assert capsys.readouterr().err == told


def test_an_error_that_nobody_foresaw_keeps_its_traceback(monkeypatch):
    command(monkeypatch, ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        main(["train"])


def test_help_version_and_unknown_commands(capsys):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    _, training, laboratory = re.split(r"(?m)^(?:train and use models|laboratory):$", shown)
    groups = [re.findall(r"(?m)^  (\w+) ", group) for group in (training, laboratory)]
    assert [" ".join(group) for group in groups] == [
        "train init sample chat generate score select data plan doctor prove support view serve submit runs "
        "status stop logs hang",
        "recording replay matrix bisect parity bench",
    ]
    assert main([]) == 2
    capsys.readouterr()
    assert main(["trian"]) == 2
    assert "unknown command 'trian'; did you mean 'train'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "told"),
    [("export", "RUN_DIR/export"), ("resume", "train --resume RUN_DIR"), ("sft", "use lockstep train sft")],
)
def test_words_of_other_tools_lead_to_the_command(word, told, capsys):
    assert main([word, "runs/a"]) == 2
    shown = capsys.readouterr().err
    assert f"error[unknown-name]: unknown command '{word}'" in shown and told in shown


def test_help_of_data_check_is_no_error(capsys):
    assert main(["data", "check", "--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: lockstep data check RUN.toml [OPTIONS]")
    assert main(["data", "check"]) == 2
    assert "error[missing-setting]: there is nothing to check; begin with" in capsys.readouterr().err


def test_the_version_names_torch_and_transformers(capsys):
    import torch
    import transformers

    assert main(["--version"]) == 0
    libraries = f"torch {torch.__version__}, transformers {transformers.__version__}"
    assert capsys.readouterr().out == f"lockstep {__version__} ({libraries}, Python {python_version()})\n"


def test_every_command_runs_from_the_sources_alone():
    code = (
        "import contextlib, importlib.metadata as m, io, sys\n"
        "def none(name): raise m.PackageNotFoundError(name)\n"
        "ask = m.Distribution.from_name\n"
        "m.Distribution.from_name = lambda n: none(n) if 'lockstep' in n else ask(n)\n"
        "from lockstep.cli.main import COMMANDS, main\n"
        "for name, (place, _) in COMMANDS.items():\n"
        "    module = place.partition(':')[0]\n"
        "    shown = io.StringIO()\n"
        "    with contextlib.redirect_stdout(shown):\n"
        "        try: status = main([name, '--help'])\n"
        "        except SystemExit as done: status = done.code\n"
        "    print(name, status, f'lockstep {name}' in shown.getvalue(), sys.modules[module].__file__)\n"
    )
    source = Path(__file__).resolve().parents[2] / "src"
    environment = {**os.environ, "PYTHONPATH": str(source)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, timeout=300)
    assert done.stdout.splitlines() == [
        f"{name} 0 True {source / place.partition(':')[0].replace('.', '/')}.py"
        for name, (place, _) in module.COMMANDS.items()
    ]


def test_a_command_whose_package_is_missing_says_so(monkeypatch, capsys):
    for name in [name for name in sys.modules if name.startswith("lockstep_lab.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lockstep_lab", None)
    assert main(["replay", "--help"]) == 2
    said = capsys.readouterr().err
    assert "error[missing-package]: this command needs the package lockstep_lab, which cannot be " in said
    assert "pip install --force-reinstall --no-deps lockstep-rl" in said


def test_what_a_command_imports_and_does_not_find_keeps_its_traceback(monkeypatch):
    def load(name):
        raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")

    monkeypatch.setattr(module.importlib, "import_module", load)
    with pytest.raises(ModuleNotFoundError, match="matplotlib"):
        main(["replay"])


def test_help_loads_nothing():
    code = (
        "import sys; from lockstep.cli.main import main; main(['--help']); main(['--version']); "
        "print(*sorted({'torch', 'tyro', 'pydantic', 'rich', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == ""


def test_python_dash_m_is_the_command():
    done = subprocess.run([sys.executable, "-m", "lockstep", "--version"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("lockstep ")
    done = subprocess.run([sys.executable, "-m", "lockstep", "tain"], capture_output=True, text=True)
    assert done.returncode == 2 and "Traceback" not in done.stderr
