"""A server in this process, and the real client, which talks to it over HTTP."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    pytest.importorskip("tinker", reason="the client of the API; `pip install lockstep-rl[serve]`")
    import torch
    from transformers import AutoTokenizer

    from lockstep.models.source import bundled_folder
    from lockstep.serve.app import Server
    from lockstep.serve.models import BaseModel
    from lockstep.serve.service import Service
    from lockstep.serve.store import Store

    store = Store(Path(tmp_path_factory.mktemp("served")) / "run")
    tokens = store.tokens(["ada", "bob", "cleo", "group/../eve %"])
    cpu = torch.device("cpu")
    bases = [BaseModel(name, "shape:tiny-qwen3", device=cpu, dtype="float32") for name in ("tiny", "worded")]
    tokenizer = AutoTokenizer.from_pretrained(bundled_folder("smollm2-135m"))  # all 256 ids are in it
    bases[1].loaded = dataclasses.replace(bases[1].loaded, tokenizer=tokenizer)
    server = Server(Service(bases, store), tokens, port=0)
    server.tokens, server.store, server.bases = tokens, store, bases  # type: ignore[attr-defined]
    ready = threading.Event()
    thread = threading.Thread(target=server.run, args=(ready.set,), daemon=True)
    thread.start()
    assert ready.wait(60)
    yield server
    server.stop()
    thread.join(60)


@pytest.fixture
def service(served: Any) -> Any:
    """A ServiceClient of user ada."""
    import tinker

    return tinker.ServiceClient(base_url=served.url, api_key=served.tokens["ada"])
