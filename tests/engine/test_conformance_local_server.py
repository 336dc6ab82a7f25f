"""The conformance suite on Lockstep's engines in processes of their own."""

import sys
from pathlib import Path

import pytest
from selected import exhaustive

sys.path.insert(0, str(Path(__file__).parent))
pytest.register_assert_rewrite("conformance")

from conformance import *  # noqa: E402, F403
from conformance import Subject, conformance_model  # noqa: E402
from local_server_parts import Served  # noqa: E402

SETTINGS = {
    "native": {"transfer": "disk", "verify": "always"},
    "native, little room": {
        "kv_cache_tokens": 1100,
        "prefill_chunk": 64,
        "max_batch": 20,
        "verify": "always",
    },
    "hf": {"name": "hf", "transfer": "collective", "bucket_mb": 1, "verify": "always"},
}


@pytest.fixture(scope="module", params=exhaustive(SETTINGS, quick=["native"]))
def subject(request, tmp_path_factory):
    model = conformance_model(tied=request.param == "hf")
    served = Served(model, tmp_path_factory.mktemp("served"), **SETTINGS[request.param])
    served.push(1)
    yield Subject(engine=served.engine, model=model, push=served.push, version=1, own_noise=True)
    served.close()
