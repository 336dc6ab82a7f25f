"""Tests with a real vLLM, in an environment of its own: `make test-vllm`. Elsewhere nothing is collected."""

import importlib.util
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "engine")]  # inprocess.py here, conformance.py there
pytest.register_assert_rewrite("conformance", "inprocess")
