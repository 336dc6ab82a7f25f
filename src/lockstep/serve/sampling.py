"""The answers to sample requests."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from lockstep.schema.rollout import Completion
from lockstep.serve import wire
from lockstep.serve.models import Sampler
from lockstep.serve.work import Answer


def sampled(sampler: Sampler, request: wire.SampleRequest, group: Sequence[Completion]) -> Answer:
    """Return the answer to a request whose samples are `group`."""
    sequences = []
    for completion in group:
        whole = (*completion.prompt_token_ids, *completion.token_ids)
        logprobs = torch.tensor(completion.logprobs, dtype=torch.float32)
        # The engine's are of the logits it drew from; the API's are at temperature 1, which greedy counts as.
        if request.sampling.temperature not in (0.0, 1.0):
            logprobs = sampler.score(whole)[len(completion.prompt_token_ids) - 1 :]
        top = None
        if request.top_sampled:
            top = sampler.candidates(whole, request.top_sampled, last=len(completion.token_ids))
        stopped = completion.finish_reason == "stop"
        sequences.append(
            wire.Sampled(token_ids=completion.token_ids, logprobs=logprobs, stopped=stopped, top=top)
        )
    length = len(request.prompt)
    return Answer(wire.sample_response(sequences, _scored(sampler, request), length=length), protobuf=True)


def _scored(sampler: Sampler, request: wire.SampleRequest) -> wire.ScoredPrompt:
    prompt, logprobs, top, targets = request.prompt, None, None, None
    if request.prompt_logprobs:
        logprobs = torch.full((len(prompt),), math.nan)
        if request.last:
            logprobs[-request.last :] = sampler.score(prompt)[-request.last :]
    if request.top_prompt and request.last:
        top = sampler.candidates(prompt, request.top_prompt, last=request.last)
    if request.targets is not None and len(request.targets):
        targets = sampler.candidates(prompt, request.targets, last=len(request.targets))[1]
    return wire.ScoredPrompt(logprobs=logprobs, top=top, targets=targets)
