import sys
from pathlib import Path

import pytest
from selected import exhaustive

sys.path.insert(0, str(Path(__file__).parent))
pytest.register_assert_rewrite("conformance")

from conformance import *  # noqa: E402, F403
from conformance import conformance_model  # noqa: E402
from conformance_parts import embedded  # noqa: E402

from lockstep.config.engine import EngineConfig  # noqa: E402
from lockstep.engine.build import make_engine  # noqa: E402

SMALL = {"kv_cache_tokens": 1100, "prefill_chunk": 64, "max_batch": 20}
"""Two samples at full length: most of what runs has to move or to wait, and prompts come in chunks."""


KINDS = ("roomy", "small and one step ahead")


@pytest.fixture(scope="module", params=exhaustive(KINDS, quick=KINDS[1:]))
def subject(request):
    model = conformance_model(tied=request.param == "roomy")
    small = request.param != "roomy"
    engine = make_engine(EngineConfig(name="native", **(SMALL if small else {})), model=model)
    engine.ahead = int(small)

    yield from embedded(engine, model)
