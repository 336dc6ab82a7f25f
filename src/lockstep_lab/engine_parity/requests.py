"""The requests of each pass: pure functions of the job, so that every engine gets the same."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lockstep.rollout.sampler import sample_seed
from lockstep.schema.rollout import Completion, GenerationRequest, SamplingParams
from lockstep_lab.engine_parity.job import EnginesJob

SOME = 2
"""Prompts from the beginning and as many from the end (which has the long ones) of the smaller passes."""
_GREEDY, _SAMPLED, _OTHER = -3, -4, -5
"""Used in place of the step in seeds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptRequest:
    """The generation request of one prompt."""

    prompt: int
    """Index into the job's prompts."""
    request: GenerationRequest
    first_sample: int = 0
    stop_id: int | None = None


Batch = list[PromptRequest]
"""One call of `generate`."""


def greedy(job: EnginesJob) -> Batch:
    """Request one completion of every prompt at temperature 0."""
    return [_request(job, prompt, step=_GREEDY, samples=[0]) for prompt in range(len(job.prompts))]


def stop(job: EnginesJob, completions: Iterable[tuple[PromptRequest, Completion]]) -> Batch:
    """Repeat some greedy requests, each with the id in the middle of its completion as a stop id."""
    selected = set(some(job))
    return [
        _request(job, source.prompt, step=_GREEDY, samples=[0], stop_id=ids[len(ids) // 2])
        for source, completion in completions
        if source.prompt in selected and len(ids := completion.token_ids) > 1
    ]


def sampled(job: EnginesJob) -> Batch:
    """Request n samples of every prompt."""
    samples = range(job.num_samples)
    return [_request(job, prompt, step=_SAMPLED, samples=samples) for prompt in range(len(job.prompts))]


def alone(job: EnginesJob) -> list[Batch]:
    """Request the last sample of some prompts, each in a call of its own."""
    last = [job.num_samples - 1]
    return [[_request(job, prompt, step=_SAMPLED, samples=last)] for prompt in some(job)]


def other(job: EnginesJob) -> Batch:
    """Request some prompts with seeds that no other pass has."""
    return [_request(job, prompt, step=_OTHER, samples=range(job.num_samples)) for prompt in some(job)]


def some(job: EnginesJob) -> list[int]:
    """Prompts of the smaller passes."""
    count = len(job.prompts)
    return sorted({*range(min(SOME, count)), *range(max(0, count - SOME), count)})


def _request(
    job: EnginesJob, prompt: int, *, step: int, samples: Sequence[int], stop_id: int | None = None
) -> PromptRequest:
    """Request these samples of a prompt; the step decides the seeds, and whether it is greedy."""
    params = SamplingParams(
        max_tokens=job.max_tokens,
        temperature=0.0 if step == _GREEDY else job.temperature,
        ignore_eos=job.ignore_eos,
        stop_token_ids=() if stop_id is None else (stop_id,),
    )
    return PromptRequest(
        prompt=prompt,
        request=GenerationRequest(
            prompt_token_ids=job.prompts[prompt],
            sampling=params,
            seeds=tuple(sample_seed(job.seed, step, prompt, sample) for sample in samples),
        ),
        first_sample=samples[0],
        stop_id=stop_id,
    )
