import dataclasses

import pytest
import torch
from transformers.generation import logits_process as hf

from lockstep.engine.sampling import Sampler, SampleState, draw_logits
from lockstep.ops.logprobs import token_logprobs
from lockstep.schema.rollout import SamplingParams

VOCAB = 1500
BASE = SamplingParams(max_tokens=50)
PROMPT = (3, 4, 4, 9)
OUTPUT = [5, 5, 7, 3]


def state(params: SamplingParams, seed: int = 1, output: list[int] = OUTPUT) -> SampleState:
    return SampleState(
        params=params, seed=seed, prompt_token_ids=PROMPT, end_ids=(0, 11), token_ids=list(output)
    )


def some_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


HF_CASES = {
    "temperature": ({"temperature": 0.6}, [hf.TemperatureLogitsWarper(0.6)]),
    "top_k": ({"top_k": 7}, [hf.TopKLogitsWarper(7)]),
    "top_p": ({"top_p": 0.8}, [hf.TopPLogitsWarper(0.8)]),
    "top_p in the tail": ({"top_p": 0.9999}, [hf.TopPLogitsWarper(0.9999)]),
    "min_p": ({"min_p": 0.05}, [hf.MinPLogitsWarper(0.05)]),
    "repetition": ({"repetition_penalty": 1.3}, [hf.RepetitionPenaltyLogitsProcessor(1.3)]),
    "min_tokens": ({"min_tokens": 5}, [hf.MinNewTokensLengthLogitsProcessor(len(PROMPT), 5, [0, 11])]),
    "all": (
        {
            "temperature": 0.7,
            "top_k": 40,
            "top_p": 0.9,
            "min_p": 0.02,
            "repetition_penalty": 0.8,
            "min_tokens": 9,
        },
        [
            hf.RepetitionPenaltyLogitsProcessor(0.8),
            hf.MinNewTokensLengthLogitsProcessor(len(PROMPT), 9, [0, 11]),
            hf.TemperatureLogitsWarper(0.7),
            hf.TopKLogitsWarper(40),
            hf.TopPLogitsWarper(0.9),
            hf.MinPLogitsWarper(0.02),
        ],
    ),
}


@pytest.mark.parametrize("case", HF_CASES)
def test_distribution_is_that_of_transformers_processors(case):
    settings, processors = HF_CASES[case]
    logits = some_logits(3)
    rows = [state(dataclasses.replace(BASE, **settings)) for _ in range(3)]
    ids = torch.tensor([[*PROMPT, *OUTPUT]] * 3)
    expected = logits.clone()
    for processor in processors:
        expected = processor(ids, expected)
    torch.testing.assert_close(draw_logits(logits, rows), expected, rtol=1e-5, atol=1e-5)
    assert torch.isfinite(expected[0]).sum() < VOCAB or case in ("temperature", "repetition")


def test_presence_and_frequency_penalties_by_hand():
    params = dataclasses.replace(BASE, presence_penalty=0.5, frequency_penalty=0.25)
    drawn = draw_logits(torch.zeros(1, VOCAB), [state(params)])[0]
    # output: 5 twice, 7 and 3 once; the prompt (3, 4, 9) does not count
    assert {i: drawn[i].item() for i in (3, 4, 5, 7, 9)} == {3: -0.75, 4: 0.0, 5: -1.0, 7: -0.75, 9: 0.0}


def test_logprobs_are_canonical_whatever_was_drawn_from():
    """Temperature counts; penalties, truncation and suppressed ids do not; temperature 0 counts as 1."""
    variants = [
        {},
        {"temperature": 0.5},
        {"temperature": 0.0},
        {"top_k": 3, "temperature": 1.7},
        {"top_p": 0.5},
        {"repetition_penalty": 1.5, "presence_penalty": 1.0},
        {"min_tokens": 20},
    ] * 3
    rows = [state(dataclasses.replace(BASE, **v), seed=i) for i, v in enumerate(variants)]
    logits = some_logits(len(rows), seed=2)
    tokens, logprobs = Sampler().sample(logits, rows)
    for i, row in enumerate(rows):
        reference, _ = token_logprobs(
            logits[i : i + 1], tokens[i : i + 1], temperature=row.params.temperature or 1.0
        )
        assert logprobs[i].item() == pytest.approx(reference.item(), abs=2e-6)
    assert logprobs.min() < -0.5


def test_greedy_is_argmax_of_what_may_be_drawn():
    logits = some_logits(2)
    best = logits.argmax(-1)
    greedy = dataclasses.replace(BASE, temperature=0.0)
    assert Sampler().sample(logits, [state(greedy)] * 2)[0].tolist() == best.tolist()
    held = SampleState(
        params=dataclasses.replace(greedy, min_tokens=9),
        seed=0,
        prompt_token_ids=PROMPT,
        end_ids=(int(best[0]),),
        token_ids=[5],
    )
    assert Sampler().sample(logits[:1], [held])[0].item() == logits[0].topk(2).indices[1].item()


def test_sampling_ignores_torchs_generator_and_the_other_rows():
    logits = some_logits(20, seed=4)
    rows = [
        state(dataclasses.replace(BASE, temperature=0.5 + 0.1 * i, top_k=-1 if i % 2 else 50), i)
        for i in range(20)
    ]
    torch.manual_seed(0)
    before = torch.get_rng_state()
    tokens, logprobs = Sampler().sample(logits, rows)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(99)
    for i in range(20):
        token, logprob = Sampler().sample(logits[i : i + 1], rows[i : i + 1])
        assert token.item() == tokens[i].item()
        assert logprob.item() == pytest.approx(logprobs[i].item(), abs=1e-6)
    assert len(set(tokens.tolist())) > 5


def test_truncated_sampling_has_the_renormalised_frequencies():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, -2.0]])
    n = 4000
    rows = [state(dataclasses.replace(BASE, top_k=3), seed=i) for i in range(n)]
    tokens, _ = Sampler().sample(logits.expand(n, 5), rows)
    expected = torch.softmax(logits[0, :3], -1)
    share = torch.bincount(tokens, minlength=5).double() / n
    assert share[3:].sum() == 0
    torch.testing.assert_close(share[:3], expected.double(), atol=0.025, rtol=0)
