"""The conformance suite on vLLM in this process: with raw logprobs (temperatures 0 and 1), with processed
ones (any temperature), and with tied weights."""

import inprocess
import pytest
from conformance import *  # noqa: F403
from conformance import LONG, TEMPERATURES, Subject, conformance_model, prompt, request
from selected import exhaustive

KINDS = {
    "raw": ((0.0, 1.0), {"min_tokens with stop"}),
    "processed": (
        TEMPERATURES,
        {"top_p", "top_k", "min_p", "penalties", "min_tokens", "min_tokens with stop"},
    ),
    "tied": ((0.0, 1.0), {"min_tokens with stop"}),
}


@pytest.fixture(scope="module", params=exhaustive(KINDS, quick=["tied"]))
def subject(request, tmp_path_factory):
    temperatures, refuses = KINDS[request.param]
    model = conformance_model(tied=request.param == "tied")
    engine = inprocess.start(
        model,
        tmp_path_factory.mktemp(request.param),
        spec={"temperatures": frozenset(temperatures)},
    )
    inprocess.push(engine, model, 1)
    yield Subject(
        engine=engine,
        model=model,
        push=lambda version: inprocess.push(engine, model, version),
        version=1,
        temperatures=temperatures,
        refuses=frozenset(refuses),
        tolerance=1e-4,  # rounding over 300 positions is 2.5e-5; anything wrong is above 1e-2
    )
    engine.close()


def test_more_seeded_prompts_than_one_step_takes(subject):
    """40 x 300 tokens, of which a step takes 8,192: a prompt in two parts would fail on a CPU (vLLM 0.32)."""
    hot = subject.hottest()
    asked = [request(prompt(LONG, 50 + i), (i,), temperature=hot, max_tokens=3) for i in range(40)]
    together = subject.generate(*asked)
    for i in (0, 27, 39):
        ((alone,),) = subject.generate(asked[i])
        assert together[i][0].token_ids == alone.token_ids
