"""An adapter whose package is missing names the extra that installs it."""

from __future__ import annotations

import importlib
import sys

import pytest
from raising import raises

from lockstep.errors import ConfigError


@pytest.mark.parametrize(
    "package, target",
    [
        ("mcp", "mcp_tools:McpTools"),
        ("openenv", "openenv_game:OpenEnvGame"),
        ("verifiers", "verifiers_tasks:VerifiersTasks"),
    ],
)
def test_a_missing_package(package: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, _, attribute = target.partition(":")
    for loaded in [key for key in sys.modules if key.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, package, None)
    for loaded in (name, "verifiers_client"):
        monkeypatch.delitem(sys.modules, f"lockstep.environments.{loaded}", raising=False)
    made = getattr(importlib.import_module(f"lockstep.environments.{name}"), attribute)
    with raises(ConfigError, f"missing-package: {attribute} needs {package}, lockstep-rl[{package}]"):
        made(*["my_tasks", None] if package == "verifiers" else [])
    del sys.modules[f"lockstep.environments.{name}"]
