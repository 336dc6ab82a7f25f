from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for loop_runs

from loop_runs import TINY, Commands, everything


@pytest.fixture(scope="session")
def lockstep() -> Iterator[Commands]:
    commands = Commands()
    yield commands
    commands.close()


@pytest.fixture(scope="session")
def tiny_toml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("config") / "tiny.toml"
    file.write_text(TINY)
    return file


@pytest.fixture(scope="session")
def straight(
    lockstep: Commands, tiny_toml: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., dict[str, Any]]:
    """`everything` of an uninterrupted run with these flags; each set of flags is run once."""
    known: dict[tuple[str, ...], dict[str, Any]] = {}

    def run(*flags: str, toml: Path = tiny_toml) -> dict[str, Any]:
        key = (str(toml), *flags)
        if key not in known:
            folder = tmp_path_factory.mktemp("straight")
            ended = lockstep("train", toml, "--run-dir", folder / "run", *flags, cwd=folder)
            assert ended.code == 0, ended.out + ended.err
            known[key] = everything(folder / "run")
        return known[key]

    return run
