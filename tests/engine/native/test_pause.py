"""An engine that stands still between two tokens, and takes new weights there."""

import dataclasses
import sys
import threading
import time
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
from lockstep.schema.rollout import GenerationRequest, SamplingParams, Trajectory
from lockstep.schema.weights import WeightUpdate

SAMPLING = SamplingParams(max_tokens=20, temperature=0.7, ignore_eos=True)
ASKED = GenerationRequest(prompt_token_ids=(9, 4, 7, 5), sampling=SAMPLING, seeds=(1, 2, 3))


def engine_of(model, ahead=0, **settings):
    engine = make_engine(EngineConfig(name="native", **settings), model=model)
    engine.ahead = ahead
    return engine


def at_token(engine, count, act):
    """Call `act` in another thread when the first sample has so many tokens."""
    threads = []

    def on_token(request, sample, ids):
        if sample == 0 and len(ids) == count and not threads:
            threads.append(threading.Thread(target=act))
            threads[0].start()
            time.sleep(0.2)  # so that the pause comes before the next token

    engine.on_token = on_token
    return threads


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_paused_engine_computes_nothing_and_goes_on_as_if_it_had_not_paused(ahead):
    model = policy("tiny-llama", "float32")
    engine = engine_of(model, ahead)
    (whole,) = engine.generate([ASKED])
    seen = []

    def act():
        engine.pause(seconds=30)
        seen.append(engine.counts.steps)
        time.sleep(0.3)
        seen.append(engine.counts.steps)
        with raises(EngineError, "wrong-state: already paused"):
            engine.pause()
        with raises(EngineError, "wrong-state: already generating"):
            engine.sleep()
        engine.resume()

    threads = at_token(engine, 5, act)
    before = engine.counts.steps
    (paused,) = engine.generate([ASKED])
    threads[0].join()
    assert seen[0] == seen[1] and before < seen[0] < engine.counts.steps
    assert paused == whole


@pytest.mark.parametrize("ahead", [0, 1])
def test_samples_go_on_with_new_weights_and_each_span_has_the_bits_of_its_version(ahead):
    model = policy("tiny-llama", "float32")
    engine = engine_of(model, ahead)
    old = {name: p.clone() for name, p in model.module.named_parameters()}

    def change(factor):
        with torch.no_grad():
            for name, parameter in model.module.named_parameters():
                parameter.copy_(old[name] * factor)

    def act():
        engine.pause(seconds=30)
        change(1.25)
        nothing = WeightUpdate(policy_version=7, tensors=lambda: iter(()), shared_module=model.module)
        engine.update_weights(nothing)
        engine.resume()

    threads = at_token(engine, 6, act)
    short = dataclasses.replace(ASKED, sampling=dataclasses.replace(SAMPLING, max_tokens=3), seeds=(5,))
    (early,), completions = engine.generate([short, ASKED])
    threads[0].join()
    assert early.versions == () and early.policy_version == 0
    keys = 4 + completions[0].versions[0][1] - 1
    assert engine.stats().recomputed_tokens == keys + 2 * (keys - 3)  # the prompt's once
    spans = [Trajectory.of(completion).spans for completion in completions]
    for of_sample in spans:
        assert [span.author for span in of_sample] == ["prompt", "policy", "policy"]
        assert [span.policy_version for span in of_sample[1:]] == [0, 7]
        assert sum(len(span.token_ids) for span in of_sample[1:]) == 20
    for version, factor in ((1, 1.0), (2, 1.25)):
        change(factor)
        parts = [
            dataclasses.replace(
                completion,
                prompt_token_ids=tuple(i for span in of_sample[:version] for i in span.token_ids),
                token_ids=of_sample[version].token_ids,
            )
            for completion, of_sample in zip(completions, spans, strict=True)
        ]
        found = torch.tensor([p for of_sample in spans for p in of_sample[version].logprobs])
        assert torch.equal(found, trainers_logprobs(model, parts))


def test_a_stream_that_nobody_resumes_ends_with_an_error():
    engine = engine_of(policy("tiny-llama", "float32"))
    engine.submit(ASKED)
    engine.pause(seconds=0.3)
    with raises(EngineError, "deadline: resume"):
        list(engine.finished())
    engine.resume()
    assert len(engine.generate([ASKED])[0]) == 3


def test_samples_that_end_while_it_pauses_are_returned_before_the_cache_grows():
    """Their last token is read at the border, and what comes meanwhile is larger than the KV cache."""
    engine, done = engine_of(policy("tiny-llama", "float32"), ahead=1), []

    def act():
        engine.pause(seconds=30)
        engine.submit(dataclasses.replace(ASKED, prompt_token_ids=(3,) * 150, seeds=(4,)))
        engine.resume()

    threads = at_token(engine, SAMPLING.max_tokens - 1, act)
    engine.submit(ASKED)
    for finished in engine.finished():
        done.append((finished.completion.seed, len(finished.completion.token_ids)))
    threads[0].join(30)
    assert sorted(done) == [(1, 20), (2, 20), (3, 20), (4, 20)]
