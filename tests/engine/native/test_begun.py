"""Samples that one request begins and another one goes on with."""

import dataclasses
import sys
from pathlib import Path

import pytest
import torch
from raising import raises

sys.path.insert(0, str(Path(__file__).parent))

from native_parts import policy
from test_bits import trainers_logprobs

from lockstep.config.engine import EngineConfig
from lockstep.engine.build import make_engine
from lockstep.errors import EngineError
from lockstep.schema.rollout import GenerationRequest, SamplingParams, Span, Trajectory
from lockstep.schema.weights import WeightUpdate

SAMPLING = SamplingParams(max_tokens=20, temperature=0.7, ignore_eos=True)
ASKED = GenerationRequest(prompt_token_ids=(9, 4, 7, 5), sampling=SAMPLING, seeds=(1, 2, 3))


def engine_of(model, **settings):
    return make_engine(EngineConfig(name="native", **settings), model=model)


def cut(engine, request, tokens):
    """The spans of the request's samples, aborted when the first has so many tokens."""

    def on_token(_, sample, ids):
        if sample == 0 and len(ids) == tokens:
            engine.abort()

    engine.on_token = on_token
    (completions,) = engine.generate([request])
    engine.on_token = None
    assert {completion.finish_reason for completion in completions} == {"abort"}
    return tuple(Trajectory.of(completion).begun for completion in completions)


@pytest.mark.parametrize("rows", [1, 2, 8])
@pytest.mark.parametrize("shape", [{}, {"min_tokens": 12, "repetition_penalty": 1.3, "ignore_eos": False}])
def test_a_sample_that_is_cut_and_goes_on_has_the_bits_of_one_that_was_not(rows, shape):
    engine = engine_of(policy("tiny-llama", "float32"), max_batch=rows)
    request = dataclasses.replace(ASKED, sampling=dataclasses.replace(SAMPLING, **shape))
    (whole,) = engine.generate([request])
    before = engine.stats()
    begun = ((),) * 3
    for tokens in (3, 7, 8):
        begun = cut(engine, dataclasses.replace(request, begun=begun), tokens)
    assert len(begun[0]) == 1 and len(begun[0][0].token_ids) == 8
    (again,) = engine.generate([dataclasses.replace(request, begun=begun)])
    assert [dataclasses.replace(c, cached_tokens=0) for c in again] == [
        dataclasses.replace(c, cached_tokens=0) for c in whole
    ]
    after = engine.stats()
    written = sum(len(completion.token_ids) for completion in whole)
    assert after.completion_tokens - before.completion_tokens == written
    assert after.recomputed_tokens > before.recomputed_tokens


def test_other_weights_go_on_after_what_earlier_ones_wrote():
    model = policy("tiny-llama", "float32")
    engine = engine_of(model)
    old = {name: p.clone() for name, p in model.module.named_parameters()}
    begun = cut(engine, ASKED, 6)
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter.mul_(1.25)
    nothing = WeightUpdate(policy_version=7, tensors=lambda: iter(()), shared_module=model.module)
    engine.update_weights(nothing)
    (completions,) = engine.generate([dataclasses.replace(ASKED, begun=begun)])
    spans = [Trajectory.of(completion).spans for completion in completions]
    assert [[span.policy_version for span in of] for of in spans] == [[None, 0, 7]] * 3
    assert [of[1] for of in spans] == [of[0] for of in begun]
    for version in (2, 1):
        parts = [
            dataclasses.replace(
                completion,
                prompt_token_ids=tuple(i for span in of[:version] for i in span.token_ids),
                token_ids=of[version].token_ids,
            )
            for completion, of in zip(completions, spans, strict=True)
        ]
        found = torch.tensor([p for of in spans for p in of[version].logprobs])
        assert torch.equal(found, trainers_logprobs(model, parts))
        with torch.no_grad():
            for name, parameter in model.module.named_parameters():
                parameter.copy_(old[name])


def test_what_cannot_go_on_is_refused():
    model = policy("tiny-llama", "float32")
    engine = engine_of(model)
    span = Span(author="policy", token_ids=(5,) * 20, logprobs=(-1.0,) * 20, policy_version=0)
    short = dataclasses.replace(span, token_ids=(5, 6), logprobs=(-1.0, -1.0))
    for begun, told in (
        (((span,),), "wrong-shape: begun has 1 entries for 3 seeds"),
        (((span,), (), ()), "too-long: a sample of 20 tokens was begun"),
        (((dataclasses.replace(short, logprobs=()),), (), ()), "wrong-shape: need a logprob per token"),
        (((dataclasses.replace(short, token_ids=(5, 10**6)),), (), ()), "outside-vocabulary"),
    ):
        with raises(EngineError, told):
            engine.submit(dataclasses.replace(ASKED, begun=begun))
    other = make_engine(EngineConfig(name="hf"), model=model)
    with raises(EngineError, "unsupported-combination: rollout.max_lag = 0", setting="engine.name"):
        other.submit(dataclasses.replace(ASKED, begun=((short,), (), ())))
    assert len(engine.generate([ASKED])[0]) == 3
