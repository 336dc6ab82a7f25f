from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: Any) -> Path:
    """A random model that reads single bytes, with a chat template."""
    spec = importlib.util.spec_from_file_location("tiny_text", ROOT / "examples" / "tiny_text_model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.save(tmp_path_factory.mktemp("model") / "tiny")
