"""Two of vLLM's own servers behind the dispatcher: one answer, whoever gives it.

One start of both (a minute on two cores), and one more of the one that is killed.
"""

import dataclasses
import os
import signal
import sys
import threading

import pytest
from conformance import LONG, conformance_model, gaps, prompt, request, sharpen
from inprocess import KV_BYTES, spec_of

from lockstep.config.engine import EngineConfig
from lockstep.engine.build import DispatcherOfOwnWeights, make_engine
from lockstep.schema.weights import WeightUpdate
from lockstep.transfer import make_transfer

pytestmark = pytest.mark.slow
TOLERANCE = 1e-4
CONFIG = EngineConfig(
    name="vllm",
    python=sys.executable,
    replicas=2,
    eager=True,
    max_batch=32,
    bucket_mb=1,
    start_seconds=300.0,
    request_seconds=120.0,
    options={"kv_cache_memory_bytes": KV_BYTES},
)


class Trainer:
    """What a transfer asks of one: all weights by name, whole."""

    def __init__(self, model):
        self.module = model.module

    def weights(self, *, policy_version):
        return WeightUpdate(
            policy_version=policy_version,
            tensors=lambda: iter(self.module.state_dict().items()),
            shared_module=self.module,
        )


@pytest.fixture(scope="module")
def model():
    return conformance_model()


@pytest.fixture(scope="module")
def both(model, tmp_path_factory):
    engine = make_engine(CONFIG, spec=spec_of(model, tmp_path_factory.mktemp("replicas")))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def pushed(request, model, both):
    """Both hold new weights, that came this way."""
    transfer = make_transfer(CONFIG.model_copy(update={"transfer": request.param}), both, device="cpu")
    sharpen(model.module, seed=30 + len(request.param))
    transfer.push(Trainer(model), both, policy_version=3)
    assert transfer.check(both)
    yield both
    transfer.close()


def work():
    return [
        request(prompt(length, i), range(4), temperature=i % 2, max_tokens=12)
        for i, length in enumerate((5, 40, 90, LONG, 12, 33))
    ]


@pytest.mark.parametrize("pushed", ["disk", "collective"], indirect=True)
def test_two_engines_give_the_answers_of_one(pushed, model):
    assert isinstance(pushed, DispatcherOfOwnWeights) and not pushed.dirty
    together = pushed.generate(work())
    for engine in pushed.engines:  # each of them alone, with everything in one batch
        for one, other in zip(engine.generate(work()), together, strict=True):
            assert [c.token_ids for c in one] == [c.token_ids for c in other]
            for mine, theirs in zip(one, other, strict=True):
                assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)
                assert dataclasses.replace(mine, logprobs=(), cached_tokens=0) == dataclasses.replace(
                    theirs, logprobs=(), cached_tokens=0
                )
    for row in together:
        for completion in row:
            assert gaps(model, completion, 1.0).max() <= TOLERANCE and completion.policy_version == 3
    assert all(engine.stats().requests for engine in pushed.engines)


@pytest.mark.parametrize("pushed", ["collective"], indirect=True)
def test_a_replica_that_dies_in_mid_batch_is_filled_again_and_no_row_is_lost(pushed, model):
    before = [engine.stats().restarts for engine in pushed.engines]
    wanted = pushed.generate(work())
    process = pushed.engines[1]._server.pid
    killed = threading.Event()

    def kill(*_):
        if not killed.is_set():
            killed.set()
            os.kill(process, signal.SIGKILL)

    results = pushed.generate(
        [*work(), *(request(prompt(20, 50 + i), range(4), max_tokens=200) for i in range(4))],
        on_completion=kill,
    )
    assert [len(row) for row in results] == [4] * 10
    for row, old in zip(results, wanted, strict=False):
        assert [c.token_ids for c in row] == [c.token_ids for c in old]
    assert all(gaps(model, c, 1.0).max() <= TOLERANCE for row in results for c in row)
    after = [engine.stats().restarts for engine in pushed.engines]
    assert [a - b for a, b in zip(after, before, strict=True)] == [0, 1] and pushed.stats().restarts == sum(
        after
    )
