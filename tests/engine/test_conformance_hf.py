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


@pytest.fixture(scope="module", params=exhaustive(["one", "two", "tied"], quick=["tied"]))
def subject(request):
    model = conformance_model(tied=request.param == "tied")
    config = EngineConfig(name="hf", max_batch=48, replicas=2 if request.param == "two" else 1)
    engine = make_engine(config, model=model)

    yield from embedded(engine, model)
